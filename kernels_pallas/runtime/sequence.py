"""Launches that follow each other, as one CUDA graph where their addresses come again.

A launch costs the host several microseconds, a graph of many as much as one. Allocators give the
same addresses again and again; a graph holds those of the launches it was made of:

    addresses new          launch, launch, ..
    ... `GRAPH_AFTER` times  launch, launch, ..; then make a graph of the same kernels
    ... and again          cuGraphLaunch

The graph is made node by node, not by a capture: while a stream is captured, no other thread may
wait for the device. To make one costs what several launches of it save. Where addresses rarely
come again, few are made.
"""

import collections
import ctypes
import logging
import operator
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from kernels_pallas.runtime import driver
from kernels_pallas.runtime.bound_kernel import BoundKernel

LOG = logging.getLogger("kernels_pallas.runtime")
GRAPH_AFTER: int = 3  # runs with the same addresses before there is a graph
COUNTED = 256  # addresses of a sequence whose runs are counted
GRAPHS = 1024  # of the process at most, the oldest dropped first
# A sequence with FREE_GRAPHS graphs makes another one where those beyond them were worth it, each
# used USES_OF_A_GRAPH times, or where the same addresses have come MANY_RUNS times.
FREE_GRAPHS, USES_OF_A_GRAPH, MANY_RUNS = 16, 8, 16

_graphs: "collections.deque[weakref.ref[_Graph]]" = collections.deque()  # the oldest first
_lock = threading.Lock()


class LaunchSequence:
    """Plans of one device that run one after the other; any thread may launch them.

    Args:
      kernels: two or more.
      arguments: of each, which of the sequence's addresses it takes.
    """

    def __init__(self, kernels: Sequence[BoundKernel], arguments: Sequence[Sequence[int]]):
        self.kernels = [
            (kernel, operator.itemgetter(*numbers))
            for kernel, numbers in zip(kernels, arguments, strict=True)
        ]
        self.name = ", ".join(kernel.cubin.name for kernel in kernels)
        self.context = kernels[0].context
        self.graphs: dict[Sequence[int], _Graph] = {}
        self._runs: dict[Sequence[int], int] = {}
        self._graphs_made = self._graph_uses = 0
        self._lock = threading.Lock()
        self._off = False  # no graph could be made

    def launch(self, stream: int, addresses: tuple[int, ...]) -> None:
        """Queues one run.

        Args:
          stream, addresses: as of `BoundKernel.launch`.

        Raises:
          as `BoundKernel.launch`.
        """
        graph = self.graphs.get(addresses)
        if graph is not None and graph.launch(stream):
            self._graph_uses += 1
            return
        for kernel, pick in self.kernels:
            kernel.launch(stream, pick(addresses))
        if graph is None and not self._off:
            self._count(addresses)

    def _count(self, addresses: tuple[int, ...]) -> None:
        with self._lock:
            if addresses in self.graphs:  # another thread was faster
                return
            runs = self._runs.pop(addresses, 0) + 1
            wanted = USES_OF_A_GRAPH * (self._graphs_made - FREE_GRAPHS)
            worth = self._graph_uses >= wanted or runs >= MANY_RUNS
            if runs >= GRAPH_AFTER and worth:
                self._make(addresses)
                return
            if len(self._runs) >= COUNTED:
                self._runs.pop(next(iter(self._runs)))
            self._runs[addresses] = runs

    def _make(self, addresses: tuple[int, ...]) -> None:
        try:
            graph = _Graph(self, addresses)
        except RuntimeError as error:  # launches do as well
            LOG.warning("no CUDA graph of %s: %s", self.name, error)
            self._off = True
            return
        self.graphs[addresses] = graph
        self._graphs_made += 1
        with _lock:
            _graphs.append(weakref.ref(graph))
            oldest = _graphs.popleft()() if len(_graphs) > GRAPHS else None
        if oldest is not None:
            oldest.drop()


class _Graph:
    """The launches of a sequence with certain addresses, as the driver runs them at once."""

    def __init__(self, sequence: LaunchSequence, addresses: tuple[int, ...]):
        self.of, self.addresses = sequence.name, addresses
        self._sequence = weakref.ref(sequence)
        self._context = ctypes.c_void_p(sequence.context)
        library = driver.library()
        quick = driver.quick()
        self._push, self._pop = quick.cuCtxPushCurrent_v2, quick.cuCtxPopCurrent_v2
        self._popped = ctypes.byref(ctypes.c_void_p())
        self._start, self._asked = library.cuGraphLaunch, quick.cuStreamIsCapturing
        self._lock = threading.Lock()  # the driver takes one call at a time of such a graph
        with driver.current(sequence.context, self.of), driver.relaxed(self.of):
            with driver.graph(self.of) as graph:
                node = None
                for kernel, pick in sequence.kernels:
                    node = kernel.add_to(graph, node, pick(addresses))
                self._handle = driver.executable(graph, self.of)
        end: Any = weakref.finalize(self, _destroy, self._handle, sequence.context)
        end.atexit = False  # the context may be gone then

    def launch(self, stream: int) -> bool:
        """Queues it; False, and nothing is queued, on a stream that is being captured, where it
        would become a graph in a graph.
        """
        status, handle = ctypes.c_int(), ctypes.c_void_p(stream)
        with self._lock:
            if error := self._push(self._context):
                raise RuntimeError(f"{self.of}: cuCtxPushCurrent: {driver.words(error)}")
            try:
                # An error: the default stream, while another one is captured.
                if self._asked(handle, ctypes.byref(status)) or status.value:
                    return False
                error = self._start(self._handle, handle)
            finally:
                self._pop(self._popped)
        if error:
            raise RuntimeError(f"{self.of}: cuGraphLaunch failed with {driver.words(error)}")
        return True

    def drop(self) -> None:
        """Its sequence launches kernel by kernel again."""
        sequence = self._sequence()
        if sequence is not None:
            sequence.graphs.pop(self.addresses, None)


def _destroy(handle: ctypes.c_void_p, context: int) -> None:
    """The driver waits until what runs of it has ended."""
    with driver.current(context), driver.relaxed(""):
        driver.library().cuGraphExecDestroy(handle)
