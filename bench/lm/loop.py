"""One training run: steps, a line each, checkpoints, and the three ways in which it ends."""

import dataclasses
import functools
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Protocol

import numpy as np

from bench.harness import records, timing
from bench.lm import checkpoint, log, speed, variants
from bench.lm.data import Batch, Batches
from bench.lm.spec import DivergedError, Task

EVALUATED_BATCHES = 8
REPORTS = 10  # on the console in a run


class Learner(checkpoint.Kept, Protocol):
    """`jax_lm.Learner` or `torch_lm.Learner`."""

    def step(self, batch: Batch, step: int) -> tuple[float, float]: ...

    def loss(self, batch: Batch) -> float: ...

    def parameters(self) -> int: ...

    def peak_bytes(self) -> int | None: ...


class Stop:
    """While entered, SIGTERM asks the run to stop after the step that it is in."""

    def __init__(self):
        self.asked = False

    def __enter__(self) -> "Stop":
        self.before = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self.before)

    def _ask(self, *_: object) -> None:
        self.asked = True


@dataclasses.dataclass(frozen=True)
class Run:
    """What one run is, and where it leaves its traces.

    Attributes:
      variant, task, batches: what trains what on what.
      path: of the lines.
      folder: of this run's checkpoints.
      save_every: steps between checkpoints.
      commit: as in `records.environment`.
    """

    variant: variants.Variant
    task: Task
    batches: Batches
    path: Path
    folder: Path
    save_every: int = 100
    commit: str | None = None

    @property
    def name(self) -> str:
        return f"{self.variant.framework}-{self.variant.attention}"

    def write(self, line: log.Line) -> None:
        log.append(self.path, [line])

    def checkpoint(self) -> Path | None:
        """The last checkpoint there is."""
        return checkpoint.latest(self.folder)

    def settings(self) -> dict:
        """What a checkpoint must agree with."""
        return self.task.settings() | {"input_sha256": self.batches.sha256}


def run(run: Run, stop: Stop) -> log.Summary:
    """Trains from the last checkpoint on, if there is one, and writes every line of it.

    The run ends `ok` after its steps, `stopped` by SIGTERM with a checkpoint of what is done,
    or `diverged` where a loss or gradient is not finite: the checkpoint from before stays, and
    no later one is written.

    Raises:
      ValueError: the checkpoint was written under other settings.
    """
    with tempfile.TemporaryDirectory() as scratch:
        learner = variants.learner(run.variant, run.task, Path(scratch))
    before = run.checkpoint()
    first = checkpoint.load(before, learner, run.settings()) if before else 0
    run.write(
        log.Header(
            **run.variant.name,
            model=run.task.model.as_dict(),
            parameters=learner.parameters(),
            training=dataclasses.asdict(run.task.training),
            dtype=run.task.dtype,
            first_step=first,
            flops=run.task.flops(),
            input_sha256=run.batches.sha256,
            device=variants.device(run.variant.framework),
            time=records.utc_now(),
            **records.environment(run.commit),
        )
    )
    times_ms: list[float] = []
    summary = steps(run, learner, first, stop, times_ms)
    run.write(summary)
    if len(times_ms) > 1:  # the first compiles
        found = speed.ok(timing.Timing.of(times_ms[1:], "host"), learner)
        run.write(speed.line(run.variant, run.task, run.commit, found))
    return summary


def steps(
    run: Run, learner: Learner, first: int, stop: Stop, times_ms: list[float]
) -> log.Summary:
    """The steps from `first` on; each appends to `times_ms`."""
    training, save = run.task.training, functools.partial(_save, run, learner)
    summary = functools.partial(log.Summary, **run.variant.name)
    for step in range(first, training.steps):
        if stop.asked:
            reason = f"SIGTERM after {step} steps, saved to {save(step)}"
            return summary(status="stopped", steps=step, reason=reason)
        batch = run.batches.train(step)
        start = time.perf_counter()
        try:
            loss, norm = learner.step(batch, step)
        except DivergedError as error:
            reason = f"{error}; the last checkpoint is {run.checkpoint()}"
            return summary(status="diverged", steps=step, reason=reason)
        time_ms = (time.perf_counter() - start) * 1e3
        times_ms.append(time_ms)
        line = log.Step(
            **run.variant.name,
            step=step,
            loss=loss,
            grad_norm=norm,
            lr=training.rate(step),
            time_ms=time_ms,
            tokens_per_s=run.task.tokens() / time_ms * 1e3,
        )
        run.write(line)
        done = step + 1
        if done % max(1, training.steps // REPORTS) == 0:
            where = f"{run.name} step {done} of {training.steps}"
            print(f"{where}: loss {loss:.4f}, {time_ms:.0f} ms", file=sys.stderr)
        if done % run.save_every == 0:
            save(done)
    save(training.steps)
    held_out = [learner.loss(batch) for batch in run.batches.evaluation(EVALUATED_BATCHES)]
    loss = float(np.mean(held_out))
    return summary(status="ok", steps=training.steps, held_out_loss=loss)


def _save(run: Run, learner: Learner, step: int) -> Path:
    return checkpoint.save(run.folder, learner, step, run.settings())
