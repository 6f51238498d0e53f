"""Small tensors that follow from a problem's sizes alone, made once for calls alike."""

import collections
import threading
from collections.abc import Callable, Hashable, Iterable

import torch
from torch import Tensor

from interop import launch

BYTES = 24 * 2**20  # kept at most, of all devices, besides what the last calls used
RECENT = 32  # uses of tensors: more than a call has, forward and backward


class Shared:
    """Tensors by key, the least recently used ones dropped first. What was among the last
    `recent` uses stays: the calls that run now need it, however large it is.

    Safe on any stream: a stream that did not make a tensor waits for the one that did. A CUDA
    graph, which outlives any cache, makes its own, once for all calls that it captures.
    """

    def __init__(self, limit: int = BYTES, recent: int = RECENT):
        self.limit, self.recent = limit, recent
        self.size, self.uses = 0, 0
        self._kept = collections.OrderedDict()
        self._captured, self._capture = {}, 0
        self._lock = threading.Lock()

    def get(
        self, key: Hashable, device: torch.device, make: Callable[[], Iterable[Tensor]]
    ) -> list[Tensor]:
        """What `make()` gave for `key`."""
        capture = _capture(device)
        with self._lock:
            if capture != self._capture:
                self._captured, self._capture = {}, capture
            found = self._captured.get(key) if capture else self._kept.get(key, (0, None))[1]
            if found is not None and not capture:
                self._use(key, found)
        if found is None:
            found = _made(device, make)
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


SHARED = Shared()


def _capture(device):
    """Which CUDA graph is being captured on the current stream; 0: none."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return 0
    return launch.capture_of(launch.current_stream(device))


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
