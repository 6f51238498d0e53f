"""Measures the time of one call in milliseconds, after a warm-up that includes compilation. The
device is idle before and after a sample.

In torch on CUDA, samples are measured with CUDA events, and the L2 cache is overwritten before each
sample. JAX has no events. Samples of JAX are host time around several consecutive calls, which last
5 ms together. The caller rotates the inputs if they could stay in the L2 cache. On the CPU, samples
are also host time.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .timed_problem import cuda_graph as cuda_graph

SAMPLE_MS, WARMUP = 5.0, 3
MIN_SAMPLES, MAX_SAMPLES = 5, 50
L2_FLUSH_BYTES = 256 * 2**20
RESTED = "{}, after 50 ms of rest"  # the name of the timer if `rest` is given


@dataclasses.dataclass(frozen=True)
class Timing:
    """The median and the 20th and 80th percentile of the samples. A sample is the time of one
    call."""

    time_ms: float
    p20_ms: float
    p80_ms: float
    samples: int
    timer: str

    @classmethod
    def of(cls, samples_ms: Sequence[float], timer: str) -> "Timing":
        p20, median, p80 = np.percentile(samples_ms, [20, 50, 80])
        return cls(float(median), float(p20), float(p80), len(samples_ms), timer)

    @property
    def spread(self) -> dict[str, Any]:
        """The times as fields of a line."""
        return {"ms": self.time_ms, "p20_ms": self.p20_ms, "p80_ms": self.p80_ms}


def spread(samples_ms: Sequence[float]) -> dict[str, Any]:
    """Return the median and the 20th and 80th percentile, as fields of a line."""
    return Timing.of(samples_ms, "").spread


def _collect(
    sample: Callable[[], tuple[float, float]], seconds: float, iters: int | None
) -> list[float]:
    """Return samples `(ms of one call, ms spent)`. There are `iters` samples, or 5 to 50 samples
    in about `seconds`.
    """
    samples_ms: list[float] = []
    spent_ms = 0.0
    while len(samples_ms) < (iters or MAX_SAMPLES):
        once_ms, took_ms = sample()
        samples_ms.append(once_ms)
        spent_ms += took_ms
        enough = len(samples_ms) >= MIN_SAMPLES and spent_ms > seconds * 1e3
        if iters is None and enough:
            break
    return samples_ms


def time_host(
    call: Callable[[], Any],
    sync: Callable[[Any], Any],
    *,
    seconds: float = math.inf,
    iters: int | None = None,
    warmup: int = 1,
) -> Timing:
    """Time `call()` with the host clock.

    Args:
      call: The call.
      sync: A function that waits for the device, given the last result of a sample, or None before
        the first sample.
      seconds: Approximate duration, with 5 to 50 samples. Without a limit, 50 samples are measured.
      iters: Number of samples, regardless of their duration. By default `seconds` determines the
        number.
      warmup: Calls before the first sample, at least one.
    """

    def sample(calls: int) -> tuple[float, float]:
        (took_ms,) = in_a_row(call, calls, 1, wait=sync, done=True)
        return took_ms, took_ms * calls

    in_a_row(call, 1, max(warmup, 1), wait=sync)
    once_ms, _ = sample(1)
    calls = max(1, round(SAMPLE_MS / once_ms + 0.5)) if once_ms < SAMPLE_MS else 1
    samples_ms = _collect(lambda: sample(calls), seconds, iters)
    return Timing.of(samples_ms, "host" if calls == 1 else f"host/{calls}")


def time_cuda_events(
    call: Callable[[], Any],
    *,
    seconds: float = math.inf,
    iters: int | None = None,
    warmup: int = WARMUP,
    timer: str = "cuda_events",
    rest: float = 0,
) -> Timing:
    """Time each `call()` with CUDA events on torch's current stream. The L2 cache is overwritten
    before each call.

    Args:
      call: The call.
      seconds: See `time_host`.
      iters: See `time_host`.
      warmup: See `time_host`.
      timer: Name of the timer in the result.
      rest: Seconds for which the GPU is idle before each call.
    """
    import torch

    flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def sample() -> tuple[float, float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if rest:
            time.sleep(rest)
        flush.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        return (start.elapsed_time(end),) * 2

    for _ in range(max(warmup, 1)):
        sample()
    return Timing.of(_collect(sample, seconds, iters), timer)


def in_a_row(
    call: Callable[[], Any],
    calls: int = 1,
    samples: int = 20,
    *,
    wait: Callable[[Any], Any] | None = None,
    done: bool = False,
    warmup: int = 0,
) -> list[float]:
    """Return the milliseconds per call of each sample. A sample is `calls` consecutive calls, and
    the device is idle before each sample.

    Args:
      call: The call.
      calls: Calls per sample.
      samples: Number of samples.
      wait: A function that waits for the device, given a result. Defaults to waiting for torch's
        device.
      done: Whether the time until the device has finished counts. If `done` is False, the times are
        host times.
      warmup: Samples that are dropped first.
    """
    if wait is None:
        import torch

        wait = lambda _: torch.cuda.synchronize()
    found, last = [], None
    for _ in range(warmup + samples):
        wait(last)
        start = time.perf_counter()
        for _ in range(calls):
            last = call()
        if done:
            wait(last)
        found.append((time.perf_counter() - start) * 1e3 / calls)
    wait(last)
    return found[warmup:]
