"""Small tensors that follow from a problem's sizes alone, made once for calls alike."""

import collections
import threading
from collections.abc import Callable, Hashable, Iterable

import torch
from torch import Tensor

BYTES = 256 * 2**20  # kept at most, of all devices


class Shared:
    """Tensors by key, the least recently used ones dropped first.

    Safe on any stream: a stream that did not make a tensor waits for the one that did. While a
    CUDA graph is captured nothing is kept or reused, since a graph outlives any cache.
    """

    def __init__(self, limit: int = BYTES):
        self.limit, self.size = limit, 0
        self._kept = collections.OrderedDict()
        self._lock = threading.Lock()

    def get(
        self, key: Hashable, device: torch.device, make: Callable[[], Iterable[Tensor]]
    ) -> list[Tensor]:
        """What `make()` gave for `key`."""
        cuda = device.type == "cuda"
        if cuda and torch.cuda.is_current_stream_capturing():
            return list(make())
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
        if found is None:
            found = self._make(key, device, make)
        tensors, stream, event = found
        if event is not None:
            current = torch.cuda.current_stream(device)
            if current != stream:
                current.wait_event(event)
                for x in tensors:
                    x.record_stream(current)
        return list(tensors)

    def _make(self, key, device, make):
        with torch.inference_mode(False), torch.no_grad():
            # Contiguous, so that a kernel can read them as they are.
            tensors = [x.contiguous() for x in make()]
        stream = event = None
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            event = torch.cuda.Event()
            event.record(stream)
        found = tensors, stream, event
        with self._lock:
            if key not in self._kept:
                self._kept[key] = found
                self.size += _bytes(tensors)
            while self.size > self.limit:
                _, (dropped, *_) = self._kept.popitem(last=False)
                self.size -= _bytes(dropped)
        return found

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._kept.clear()
            self.size = 0


SHARED = Shared()


def _bytes(tensors):
    return sum(x.numel() * x.element_size() for x in tensors)
