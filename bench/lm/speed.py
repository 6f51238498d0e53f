"""Measures the cost of a training step: its time, its memory, and its share of the device's peak
rate."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

from ..harness import records, timing
from ..harness.runners import out_of_memory
from . import spec, variants
from .data import Batches
from .log import Speed


def line(
    variant: variants.Variant, task: spec.Task, commit: str | None, found: dict[str, Any]
) -> Speed:
    """Return the line of a measurement. `found` is a status with its reason, or the fields that the
    function `ok` returns."""
    found, device = dict(found), variants.device(variant.framework)
    devices = variant.parallel.devices
    if found["status"] == "ok":
        time_ms = found["time_ms"]
        share = task.mfu(time_ms, device, devices)
        found |= {"tokens_per_s": task.tokens() / time_ms * 1e3, "mfu": share}
        if share is not None and share > 1:
            reason = f"{time_ms:.3g} ms are too short for the device, since MFU is {share:.2f}"
            found |= {"status": "error", "reason": reason}
    return Speed(
        **variant.name,
        model=task.name,
        dtype=task.dtype,
        batch=task.training.batch,
        seq_len=task.training.seq_len,
        flops=task.flops(),
        mfu_is=spec.MFU,
        device=device,
        devices=devices,
        time=records.utc_now(),
        **records.environment(commit),
        **found,
    )


def ok(found: timing.Timing, learner) -> dict[str, Any]:
    """Return the fields of a `Speed` from timed steps of `learner`."""
    times = {k: v for k, v in dataclasses.asdict(found).items() if k != "timer"}
    return {"status": "ok", "peak_bytes": learner.peak_bytes(), **times}


def measure(
    variant: variants.Variant, task: spec.Task, scratch: Path, batches: Batches, seconds: float
) -> dict[str, Any]:
    """Time whole steps for about `seconds`, including the transfer of the batch to the device.

    Return the fields of `ok`. If an exception is raised, return a status and the reason instead.
    """
    try:
        learner = variants.learner(variant, task, scratch)
        count = itertools.cycle(range(task.training.steps))
        for _ in range(2):  # this step compiles, and determines the layout of memory
            learner.step(batches.train(0), next(count))
        waiting = itertools.cycle(batches.train(i) for i in range(4))
        pairs = itertools.pairwise(waiting)

        def step():
            now, after = next(pairs)
            return learner.step(now, next(count), after)

        # `step` has waited for the device
        found = timing.time_host(step, lambda numbers: numbers, seconds=seconds)
        return ok(found, learner)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        if out_of_memory(error):
            return {"status": "oom", "reason": reason}
        # Dense attention is code of another library, which may refuse with any exception.
        if isinstance(error, NotImplementedError) or variant.attention == "dense":
            return {"status": "unsupported", "reason": reason}
        return {"status": "error", "reason": reason}
