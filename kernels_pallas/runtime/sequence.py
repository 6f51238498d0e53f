"""Launches that follow each other, as one CUDA graph where their addresses come again.

A launch costs the host several microseconds, a graph of many as much as one. Allocators give the
same addresses again and again; a graph holds those of the launches it was made of. So launches
whose addresses have come `GRAPH_AFTER` times are captured, on a stream of their own, and from
then on the graph is launched in their place:

    addresses new          launch, launch, ..
    ... come again         launch, launch, ..; then capture them: nothing runs, a graph is left
    ... and again          cuGraphLaunch
"""

import ctypes
import operator
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from kernels_pallas.runtime import driver
from kernels_pallas.runtime.plan import LaunchPlan

GRAPH_AFTER = 3  # runs with the same addresses, the last of which captures
GRAPHS = 64  # of a sequence at most, each of other addresses; the oldest goes first
SEEN = 4 * GRAPHS  # addresses whose runs are counted

_capturing = threading.Lock()  # one capture at a time


class LaunchSequence:
    """Plans of one device that run one after the other; any thread may launch them.

    Args:
      plans: two or more.
      arguments: of each plan, which of the sequence's addresses it takes.
    """

    def __init__(self, plans: Sequence[LaunchPlan], arguments: Sequence[Sequence[int]]):
        self.plans = [
            (plan.launch, operator.itemgetter(*numbers))
            for plan, numbers in zip(plans, arguments, strict=True)
        ]
        self.name = ", ".join(plan.cubin.name for plan in plans)
        self._context = plans[0].context
        self._graphs: dict[Sequence[int], _Graph] = {}
        self._runs: dict[Sequence[int], int] = {}
        self._lock = threading.Lock()
        self._off = False

    def launch(self, stream: int, addresses: tuple[int, ...]) -> None:
        """Queues one run.

        Args:
          stream, addresses: as of `LaunchPlan.launch`.

        Raises:
          as `LaunchPlan.launch`.
        """
        graph = self._graphs.get(addresses)
        # What is being captured by someone else has to see launches.
        if graph is not None and not driver.is_capturing(stream):
            graph.launch(stream)
            return
        for launch, pick in self.plans:
            launch(stream, pick(addresses))
        if graph is None and not self._off and not driver.is_capturing(stream):
            self._count(addresses)

    def _count(self, addresses: tuple[int, ...]) -> None:
        with self._lock:
            runs = self._runs.pop(addresses, 0) + 1
            if runs < GRAPH_AFTER:
                if len(self._runs) >= SEEN:
                    self._runs.pop(next(iter(self._runs)))
                self._runs[addresses] = runs
            elif addresses not in self._graphs:
                self._keep(addresses)

    def _keep(self, addresses: tuple[int, ...]) -> None:
        try:
            graph = _Graph(self._captured(addresses), self._context, self.name)
        except RuntimeError as error:  # launches do as well
            driver.LOG.warning("no CUDA graph of %s: %s", self.name, error)
            self._off = True
            return
        if len(self._graphs) >= GRAPHS:
            self._graphs.pop(next(iter(self._graphs)))
        self._graphs[addresses] = graph

    def _captured(self, addresses: tuple[int, ...]) -> int:
        """A graph of the launches; the driver's, for the caller to destroy."""
        with _capturing, driver.current(self._context), driver.relaxed(self.name):
            stream = driver.side_stream(self._context)
            with driver.captured(stream, self.name) as graph:
                for launch, pick in self.plans:
                    launch(stream, pick(addresses))
        assert graph.value
        return graph.value


class _Graph:
    """An executable graph of `graph`, which it destroys."""

    def __init__(self, graph: int, context: int, of: str):
        self.of = of
        self._context = ctypes.c_void_p(context)
        quick = driver.quick()
        self._push, self._pop = quick.cuCtxPushCurrent_v2, quick.cuCtxPopCurrent_v2
        self._popped = ctypes.byref(ctypes.c_void_p())
        self._start = driver.library().cuGraphLaunch
        self._lock = threading.Lock()  # the driver takes one call at a time of such a graph
        with driver.current(context), driver.relaxed(of):
            self._handle = driver.executable(graph, of)
        end: Any = weakref.finalize(self, driver.library().cuGraphExecDestroy, self._handle)
        end.atexit = False  # the context may be gone then

    def launch(self, stream: int) -> None:
        with self._lock:
            if error := self._push(self._context):
                raise RuntimeError(f"{self.of}: cuCtxPushCurrent: {driver.words(error)}")
            try:
                error = self._start(self._handle, ctypes.c_void_p(stream))
            finally:
                self._pop(self._popped)
        if error:
            raise RuntimeError(f"{self.of}: cuGraphLaunch failed with {driver.words(error)}")
