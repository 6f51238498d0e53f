"""Milliseconds of one call: warmed up, the device idle before and after, compilation outside.

On CUDA torch is timed with CUDA events, the L2 cache overwritten between samples. JAX has no
events, so its samples are host time around enough calls in a row that a sample lasts 5 ms;
the caller rotates the inputs where they could stay in the L2 cache. On the CPU: host time.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np

SAMPLE_MS = 5.0
MIN_SAMPLES, MAX_SAMPLES = 5, 50
L2_FLUSH_BYTES = 256 * 2**20


@dataclasses.dataclass(frozen=True)
class Timing:
    """The median and the 20th and 80th percentile of the samples, each of one call."""

    time_ms: float
    p20_ms: float
    p80_ms: float
    samples: int
    timer: str

    @classmethod
    def of(cls, samples_ms: list[float], timer: str) -> "Timing":
        p20, median, p80 = np.percentile(samples_ms, [20, 50, 80])
        return cls(float(median), float(p20), float(p80), len(samples_ms), timer)


def time_host(
    call: Callable[[int], Any], sync: Callable[[Any], Any], *, seconds: float
) -> Timing:
    """Host clock around `call(i)` for consecutive `i`, then `sync` on the last result.

    Runs for about `seconds`, but takes 5 samples at least.
    """

    def sample(calls: int, first: int) -> float:
        start = time.perf_counter()
        result = call(first)
        for index in range(first + 1, first + calls):
            result = call(index)
        sync(result)
        return (time.perf_counter() - start) * 1e3 / calls

    sync(call(0))
    once_ms = sample(1, 1)
    calls = max(1, round(SAMPLE_MS / once_ms + 0.5)) if once_ms < SAMPLE_MS else 1
    samples_ms, total_ms = [], 0.0
    while len(samples_ms) < MAX_SAMPLES:
        samples_ms.append(sample(calls, len(samples_ms) * calls))
        total_ms += samples_ms[-1] * calls
        if len(samples_ms) >= MIN_SAMPLES and total_ms > seconds * 1e3:
            break
    return Timing.of(samples_ms, "host" if calls == 1 else f"host/{calls}")


def time_cuda_events(call: Callable[[int], Any], *, seconds: float) -> Timing:
    """CUDA events around one `call(i)` on torch's current stream, L2 flushed before each."""
    import torch

    flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def sample(index: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        call(index)
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    for index in range(3):
        sample(index)
    samples_ms: list[float] = []
    while len(samples_ms) < MAX_SAMPLES:
        samples_ms.append(sample(len(samples_ms)))
        if len(samples_ms) >= MIN_SAMPLES and sum(samples_ms) > seconds * 1e3:
            break
    return Timing.of(samples_ms, "cuda_events")
