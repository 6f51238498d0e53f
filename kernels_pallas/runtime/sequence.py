"""Runs consecutive launches as one CUDA graph if their addresses repeat.

A launch costs the host several microseconds, and a graph of many launches costs no more than one
launch. A graph contains the addresses of its launches. Allocators return the same addresses
repeatedly, so that a graph can run many times.

| addresses                    | action                                                          |
|------------------------------|-----------------------------------------------------------------|
| new                          | launches the kernels one by one                                 |
| repeated `GRAPH_AFTER` times | launches the kernels one by one, and then builds a graph        |
| repeated more often          | runs the graph with cuGraphLaunch                               |

The graph is built node by node, not by a capture, since during a capture no other thread may wait
for the device. Building a graph costs as much time as several launches of the graph save. If
addresses rarely repeat, few graphs are built.
"""

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
GRAPH_AFTER: int = 3  # number of runs with the same addresses after which a graph is built
COUNTED = 256  # maximum number of address lists per sequence whose runs are counted
GRAPHS = 64  # maximum number of graphs per sequence; the oldest is dropped first
# A sequence builds FREE_GRAPHS graphs without further conditions. The sequence builds graph
# number FREE_GRAPHS + i + 1 if its earlier graphs were launched at least i * USES_OF_A_GRAPH
# times in total, or after MANY_RUNS runs with the same addresses.
FREE_GRAPHS, USES_OF_A_GRAPH, MANY_RUNS = 16, 8, 16


class LaunchSequence:
    """A sequence of kernels on one device that run one after the other.

    Any thread may launch a `LaunchSequence`.

    Args:
      kernels: Two or more kernels.
      arguments: For each kernel, the indices of its addresses among the addresses of the
        sequence.
    """

    def __init__(self, kernels: Sequence[BoundKernel], arguments: Sequence[Sequence[int]]):
        self.kernels = [
            (kernel, operator.itemgetter(*numbers))
            for kernel, numbers in zip(kernels, arguments, strict=True)
        ]
        self.name = ", ".join(kernel.cubin.name for kernel in kernels)
        self.graphs: dict[Sequence[int], _Graph] = {}
        self._runs: dict[Sequence[int], int] = {}
        self._graphs_made = self._graph_uses = 0
        self._lock = threading.Lock()
        self._off = False  # whether a graph could not be built

    def launch(self, stream: int, addresses: tuple[int, ...]) -> None:
        """Queue one run of the sequence on `stream`.

        Args:
          stream, addresses: As in `BoundKernel.launch`.

        Raises:
          The same errors as `BoundKernel.launch`.
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
            if addresses in self.graphs:  # another thread has built the graph meanwhile
                return
            runs = self._runs.pop(addresses, 0) + 1
            wanted = USES_OF_A_GRAPH * (self._graphs_made - FREE_GRAPHS)
            worth = self._graph_uses >= wanted or runs >= MANY_RUNS
            if runs < GRAPH_AFTER or not worth:
                if len(self._runs) >= COUNTED:
                    self._runs.pop(next(iter(self._runs)))
                self._runs[addresses] = runs
                return
            try:
                graph = _Graph(self, addresses)
            except RuntimeError as error:  # the kernels can still be launched without a graph
                LOG.warning("cannot build a CUDA graph of %s: %s", self.name, error)
                self._off = True
                return
            if len(self.graphs) >= GRAPHS:
                self.graphs.pop(next(iter(self.graphs)))
            self.graphs[addresses] = graph
            self._graphs_made += 1


class _Graph:
    """The launches of a sequence with given addresses, as one CUDA graph."""

    def __init__(self, sequence: LaunchSequence, addresses: tuple[int, ...]):
        self.of, context = sequence.name, sequence.kernels[0][0].context
        self._context = ctypes.c_void_p(context)
        quick = driver.quick()
        self._push, self._pop = quick.cuCtxPushCurrent_v2, quick.cuCtxPopCurrent_v2
        self._popped = ctypes.byref(ctypes.c_void_p())
        self._start, self._asked = driver.library().cuGraphLaunch, quick.cuStreamIsCapturing
        self._lock = threading.Lock()  # the driver allows only one call at a time for a graph
        graph, self._handle = ctypes.c_void_p(), ctypes.c_void_p()
        with driver.current(context, self.of), driver.relaxed(self.of):
            driver.call("cuGraphCreate", ctypes.byref(graph), 0, of=self.of)
            try:
                self._add(graph, sequence, addresses)
                out, flags = ctypes.byref(self._handle), ctypes.c_ulonglong(0)
                driver.call("cuGraphInstantiateWithFlags", out, graph, flags, of=self.of)
            finally:
                driver.call("cuGraphDestroy", graph, of=self.of)
        end: Any = weakref.finalize(self, _destroy, self._handle, context)
        end.atexit = False  # when Python exits, the context may no longer exist

    def _add(self, graph: ctypes.c_void_p, sequence: LaunchSequence, addresses) -> None:
        """Add the launches to the graph, each after the previous launch. The graph copies the
        parameters of the launches.
        """
        before, count = ctypes.c_void_p(), 0
        for kernel, pick in sequence.kernels:
            given, _kept = kernel.node(pick(addresses))
            node = ctypes.c_void_p()
            after = ctypes.byref(before), ctypes.c_size_t(count)
            out, given = ctypes.byref(node), ctypes.byref(given)
            driver.call("cuGraphAddKernelNode_v2", out, graph, *after, given, of=self.of)
            for each in kernel.attributes:
                value = ctypes.byref(each, driver.LaunchAttribute.value.offset)
                name = "cuGraphKernelNodeSetAttribute"
                driver.call(name, node, each.number, value, of=self.of)
            before, count = node, 1

    def launch(self, stream: int) -> bool:
        """Queue the graph. If the stream is being captured, queue nothing and return False,
        since this graph would become a node of the captured graph.
        """
        status, handle = ctypes.c_int(), ctypes.c_void_p(stream)
        with self._lock:
            if error := self._push(self._context):
                driver.check(error, f"{self.of}: cuCtxPushCurrent")
            try:
                # The query fails for the default stream while another stream is captured.
                if self._asked(handle, ctypes.byref(status)) or status.value:
                    return False
                error = self._start(self._handle, handle)
            finally:
                self._pop(self._popped)
        if error:
            driver.check(error, f"{self.of}: cuGraphLaunch")
        return True


def _destroy(handle: ctypes.c_void_p, context: int) -> None:
    """Destroy a graph. The driver frees the graph after the graph's runs have ended."""
    with driver.current(context), driver.relaxed(""):
        driver.library().cuGraphExecDestroy(handle)
