"""Small tensors that follow from a problem's sizes alone, made once for calls alike."""

import collections
import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from kernels_pallas.runtime import captures, driver
from kernels_pallas.runtime.captures import Capture
from nsa_interop import launch

BYTES = 24 * 2**20  # kept at most, of all devices, besides what the last calls used
RECENT = 32  # uses of tensors: more than a call has, forward and backward


class Shared:
    """Tensors by key, the least recently used ones dropped first. What was among the last
    `recent` uses stays: the calls that run now need it, however large it is.

    Safe on any stream: a stream that did not make a tensor waits for the one that did. A CUDA
    graph, which outlives any cache, reads what was there before its capture, and keeps it. What
    was not there the graph makes, once for all calls that it captures.
    """

    def __init__(self, limit: int = BYTES, recent: int = RECENT):
        self.limit, self.recent = limit, recent
        self.size, self.uses = 0, 0
        self._kept = collections.OrderedDict()
        self._captured: dict[Hashable, Any] = {}
        self._capture: Capture | None = None
        self._lock = threading.Lock()

    def get(
        self, key: Hashable, device: torch.device, make: Callable[[], Iterable[Tensor]]
    ) -> list[Tensor]:
        """What `make()` gave for `key`."""
        capture = _capture(device)
        with self._lock:
            if capture != self._capture:
                self._captured, self._capture = {}, capture
            captured = self._captured.get(key) if capture else None
            kept = self._kept.get(key, (0, None))[1]
            if kept is not None:
                self._use(key, kept)
        if captured is not None:
            found = captured
        elif kept is not None:
            found = _held(kept, capture) if capture else kept
        else:
            found = _made(device, make)
        if found is not captured and found is not kept:
            self._keep(key, found, capture)
        tensors, stream, event = found
        if event is not None and stream != launch.current_stream(device):
            current = torch.cuda.current_stream(device)
            current.wait_event(event)
            for x in tensors:
                x.record_stream(current)
        return list(tensors)

    def _keep(self, key, found, capture):
        with self._lock:
            if capture:
                if capture == self._capture:
                    self._captured[key] = found
                return
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

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._kept.clear()
            self._captured = {}
            self.size = 0
        captures.release()


SHARED = Shared()


def _capture(device) -> Capture | None:
    """The CUDA graph that the current stream is being captured into."""
    if device.type != "cuda":
        return None
    current = device.index is None or device.index == torch.cuda.current_device()
    if current and not torch.cuda.is_current_stream_capturing():  # quicker than the driver
        return None
    return captures.of_stream(launch.current_stream(device))


def _held(kept, capture):
    """The same tensors for a CUDA graph: they are ready now, and stay as long as it."""
    tensors, _, event = kept
    if event is not None:
        # A graph cannot wait for what is outside it.
        with driver.relaxed("tensors of a CUDA graph"):
            event.synchronize()
    captures.hold(capture.graph, tensors)
    return tensors, None, None


def _made(device, make):
    """What `make()` gives, the address of the stream that makes it, and an event at its end."""
    with torch.inference_mode(False), torch.no_grad():
        # Contiguous, so that a kernel can read them as they are.
        tensors = [x.contiguous() for x in make()]
    if device.type != "cuda":
        return tensors, None, None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return tensors, launch.current_stream(device), event


def _bytes(tensors):
    return sum(x.numel() * x.element_size() for x in tensors)
