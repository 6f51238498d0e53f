"""Caches small tensors that depend only on the sizes of a problem, so that calls with the same
sizes share the tensors.
"""

import collections
import logging
import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from kernels_pallas.runtime import driver
from nsa_interop import launch

LOG = logging.getLogger(__name__)
# the limit in bytes over all devices; only the tensors of the last `RECENT` uses may exceed it
BYTES = 24 * 2**20
RECENT = 32  # the number of last uses, more than those of a forward and backward pass
MANY_PINNED = 512 * 2**20  # bytes of CUDA graphs beyond which a warning is logged


class Kept(list[Tensor]):
    """A list of cached tensors. The list is never modified. A weak reference to the list detects
    whether the list still exists.
    """

    __slots__ = ("__weakref__",)


class Shared:
    """Caches tensors by key. The least recently used tensors are dropped first. The tensors of the
    last `recent` uses are never dropped, regardless of their size, since current calls may need
    them.

    The cache may be used on any stream. Before a tensor is returned, the current stream waits for
    the stream that computed the tensor. A tensor that a CUDA graph reads is retained until the
    process ends, since the graph may outlive this cache. If a tensor did not exist before the
    capture, the graph computes it at each replay. A call before the capture avoids this computation
    at each replay. A call before the capture is also needed to compile kernels.
    """

    def __init__(self, limit: int = BYTES, recent: int = RECENT):
        self.limit, self.recent = limit, recent
        self.size = self.uses = self.pinned_bytes = 0
        self._kept = collections.OrderedDict()
        self._pinned: dict[Hashable, tuple] = {}
        self._lock = threading.Lock()

    def get(
        self, key: Hashable, device: torch.device, make: Callable[[], Iterable[Tensor]]
    ) -> "Kept":
        """Return the result of `make()` for `key`. As long as the result is cached, each call
        returns the same list.
        """
        capturing = is_capturing(device)
        with self._lock:
            found = self._pinned.get(key)
            if found is None and key in self._kept:
                found = self._kept[key][1]
                self._use(key, found)
        if found is None:
            found = _made(device, make)
            if capturing:
                return found[0]
            self._keep(key, found)
        tensors, stream, event = found
        if capturing:
            self._pin(key, found)
        elif event is not None and stream != launch.current_stream(device):
            current = torch.cuda.current_stream(device)
            current.wait_event(event)
            for x in tensors:
                x.record_stream(current)
        return tensors

    def _pin(self, key, found):
        """Wait until the cached tensors in `found` are computed, and retain them until the
        process ends."""
        tensors, _, event = found
        if event is not None:
            # A CUDA graph cannot wait for work outside the graph.
            with driver.relaxed("tensors of a CUDA graph"):
                event.synchronize()
        with self._lock:
            if key in self._pinned:
                return
            self._pinned[key] = found
            bytes = _bytes(tensors)
            before, self.pinned_bytes = self.pinned_bytes, self.pinned_bytes + bytes
            if self._kept.pop(key, None):
                self.size -= bytes
        if before <= MANY_PINNED < self.pinned_bytes:
            LOG.warning(
                "CUDA graphs of %d shapes have read %d MiB of shared tensors, which are retained "
                "until the process ends; capture fewer shapes",
                len(self._pinned),
                self.pinned_bytes >> 20,
            )

    def _keep(self, key, found):
        with self._lock:
            if key not in self._kept:
                self.size += _bytes(found[0])
            self._use(key, found)
            while self.size > self.limit:
                oldest = next(iter(self._kept))
                used, (tensors, *_) = self._kept[oldest]
                if used > self.uses - self.recent:
                    break
                del self._kept[oldest]
                self.size -= _bytes(tensors)

    def _use(self, key, found):
        self.uses += 1
        self._kept[key] = self.uses, found
        self._kept.move_to_end(key)

    def refill(self, device: torch.device, make: Callable[[Any], Iterable[Tensor]]) -> None:
        """Write the result of `make(key)` into the tensors of each key, on the current stream."""
        with self._lock:
            kept = {key: found for key, (_, found) in self._kept.items()}
            pinned = dict(self._pinned)

        def write():
            for key, (tensors, *_) in (kept | pinned).items():
                for x, new in zip(tensors, make(key), strict=True):
                    x.copy_(new)
            return ()

        _, stream, event = _made(device, write)
        if is_capturing(device):
            return  # an event that is recorded in a CUDA graph does not exist outside the graph
        with self._lock:
            for key, (used, (tensors, *_)) in self._kept.items():
                if key in kept:
                    self._kept[key] = used, (tensors, stream, event)
            for key in pinned:
                self._pinned[key] = self._pinned[key][0], stream, event

    def keys(self) -> set[Hashable]:
        """Return the keys of the cached tensors."""
        with self._lock:
            return {*self._kept, *self._pinned}

    def clear(self) -> None:
        """Drop all cached tensors except those that CUDA graphs read."""
        with self._lock:
            self._kept.clear()
            self.size = 0


SHARED = Shared()


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream of a device is being captured into a CUDA graph."""
    if device.type != "cuda":
        return False
    if device.index is None or device.index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _made(device, make):
    """Return the result of `make()`, the address of the stream that computed the result, and an
    event that marks the end of the computation.
    """
    with torch.inference_mode(False), torch.no_grad():
        # The tensors are made contiguous, so that a kernel can read them without a copy.
        tensors = Kept([x.contiguous() for x in make()])
    if device.type != "cuda":
        return tensors, None, None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return tensors, launch.current_stream(device), event


def _bytes(tensors):
    return sum([x.numel() * x.element_size() for x in tensors])
