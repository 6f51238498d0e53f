"""Runs the training of one model. The module runs the steps, writes their lines to `train.jsonl`,
makes checkpoints and ends the run."""

import dataclasses
import functools
import signal
import sys
import tempfile
import time
from pathlib import Path

from ..harness import records, timing
from . import checkpoint, health, log, measures, speed, tasks, variants, watch
from . import share as shares
from .data import Batch, Batches
from .learner import Learner
from .ranks import Ranks
from .spec import DivergedError, Task

EVALUATED_BATCHES = 8
ON_THE_WAY = 4  # evaluations before the end use one in four held-out batches


class Stop:
    """A context in which SIGTERM or Ctrl-C asks the run to stop after its current step. A second
    Ctrl-C ends the run at once.

    Attributes:
      asked: Whether this process received a signal.
      by: Name of the signal. If only another rank received a signal, the name is SIGTERM.
    """

    by = signal.SIGTERM.name

    def __init__(self):
        self.asked = False

    def __enter__(self) -> "Stop":
        numbers: list[int] = [signal.SIGTERM, signal.SIGINT]
        self.before = {number: signal.signal(number, self._ask) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _: object) -> None:
        self.asked, self.by = True, signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(number, self.before[number])
            print(
                "the run stops after this step; pressing Ctrl-C again ends it now",
                file=sys.stderr,
            )


@dataclasses.dataclass(frozen=True)
class Run:
    """A training run, and the locations of its files.

    Attributes:
      variant: The attention and its framework.
      task: The model and its training.
      batches: The data.
      path: path of the file with the lines.
      folder: folder of the checkpoints of this run.
      save_every: Steps between checkpoints. `save_every=None` means no checkpoint, even at the
        end.
      commit: as in `records.environment`.
      ranks: the processes of the run. The first process writes the files.
      watched: Settings of the observed values, whose files are next to `path`.
      evaluate_every: Steps between evaluations on held-out text. An evaluation during training uses
        every fourth held-out batch. `evaluate_every=None` means that the run is evaluated only at
        its end.
      evaluated: number of batches of held-out text.
      thorough: See `measures.copies`.
    """

    variant: variants.Variant
    task: Task
    batches: Batches
    path: Path
    folder: Path
    save_every: int | None = 100
    commit: str | None = None
    ranks: Ranks = dataclasses.field(default_factory=Ranks)
    watched: watch.Settings = dataclasses.field(default_factory=watch.Settings)
    evaluate_every: int | None = None
    evaluated: int = EVALUATED_BATCHES
    thorough: bool = False

    @property
    def name(self) -> str:
        return f"{self.variant.framework}-{self.variant.attention}"

    def write(self, line: log.Line) -> None:
        if self.ranks.rank == 0:
            log.append(self.path, [line])

    def checkpoint(self) -> Path | None:
        """Return the last checkpoint of this run, or None."""
        return checkpoint.latest(self.folder)

    def held_out(self) -> measures.HeldOut:
        """Return the text on which the run is evaluated."""
        model = self.task.model
        batches = self.batches.evaluation(self.evaluated)
        return measures.HeldOut.of(batches, model.layer.w, model.vocabulary)

    def settings(self) -> dict:
        """Return the settings that a checkpoint must have."""
        return self.task.settings() | {"input_sha256": self.batches.sha256}


def run(run: Run, stop: Stop) -> log.Summary:
    """Train from the last checkpoint, if there is one, and write all lines. Every rank must call
    the function `run`, and all ranks end in the same way.

    The status of the summary is `ok` after all steps. After a signal the status is `stopped`, and
    there is a checkpoint of the steps done. If a loss or gradient is not finite, the status is
    `diverged`. After a divergence, existing checkpoints remain, and no later checkpoint is written.

    Raises:
      ValueError: The checkpoint was written under other settings.
      LostError: Another rank has ended or does not answer.
    """
    with run.ranks.together():
        variant, task = run.variant, run.task
        with tempfile.TemporaryDirectory() as scratch:
            learner = variants.learner(variant, task, Path(scratch), run.ranks)
        first = 0
        if run.ranks.first(run.checkpoint() is not None):
            first = checkpoint.load_last(run.folder, learner, run.settings(), run.ranks)
        spread = variant.parallel
        several = None
        if spread != type(spread)():
            several = dataclasses.asdict(spread) | {"graph": learner.graph}
        run.write(
            log.Header(
                **variant.name,
                model=task.model.as_dict() | task.model.layer.start(),
                parameters=learner.parameters(),
                training=dataclasses.asdict(task.training),
                dtype=task.dtype,
                first_step=first,
                flops=task.flops(),
                input_sha256=run.batches.sha256,
                device=variants.device(variant.framework),
                time=records.utc_now(),
                parallel=several,
                epochs=run.batches.epochs(task.training.steps),
                **records.environment(run.commit),
            )
        )
        times_ms: list[float] = []
        with watch.Watch(run.path.parent, run.name, run.ranks, run.watched) as watched:
            summary = steps(run, learner, first, stop, times_ms, watched)
        run.write(summary)
        if len(times_ms) > 1:  # the first step compiles
            found = speed.ok(timing.Timing.of(times_ms[1:], "host"), learner)
            run.write(speed.line(variant, task, run.commit, found))
        return summary


def steps(
    run: Run,
    learner: Learner,
    first: int,
    stop: Stop,
    times_ms: list[float],
    watched: watch.Watch,
) -> log.Summary:
    """Run the steps from `first` on, evaluate the model, and return the summary. Each step appends
    to `times_ms` the time since the end of the previous step, without the time of checkpoints and
    observations.
    """
    name, total, rate = run.variant.name, run.task.training.steps, run.task.training.rate
    summary = functools.partial(log.Summary, **name)
    following, held_out = None, run.held_out()
    some = held_out.every(ON_THE_WAY)

    def save(step: int) -> Path:
        return checkpoint.save(run.folder, learner, step, run.settings(), run.ranks)

    def drawn(step: int) -> Batch:
        """Return this rank's rows of the batch of `step`."""
        batch = learner.share.of(functools.partial(run.batches.train, step))
        shares.check_vocabulary(batch, run.task.model.vocabulary)
        return batch

    def evaluate(some: measures.HeldOut, done: int) -> dict[str, float]:
        found = some.measured(learner)
        run.write(log.Evaluation(**name, steps=done, measures=found))
        return found

    def due(every: int | None, done: int) -> bool:
        return every is not None and done % every == 0 and done < total

    silent = run.ranks.rank > 0
    with watch.progress(run.name, first, total, silent) as shown:
        since = time.perf_counter()
        for step in range(first, total):
            # Ranks receive signals at different steps. All ranks stop at the same step, as soon
            # as one of them was asked to stop.
            if run.ranks.any(stop.asked):
                where = "not saved" if run.save_every is None else f"saved to {save(step)}"
                reason = f"{stop.by} after {step} steps, {where}"
                return summary(status="stopped", steps=step, reason=reason)
            done = step + 1
            saves, evaluates = due(run.save_every, done), due(run.evaluate_every, done)
            # If untimed work follows the step, the next batch must not begin before that work.
            pauses = done == total or watched.due(done) or saves or evaluates
            batch = drawn(step) if following is None else following
            following = None if pauses else drawn(done)
            try:
                loss, norm = learner.step(batch, step, following)
            except DivergedError as error:
                reason = f"{error}; the last checkpoint is {run.checkpoint()}"
                return summary(status="diverged", steps=step, reason=reason)
            now = time.perf_counter()
            time_ms, since = (now - since) * 1e3, now
            times_ms.append(time_ms)
            numbers = dict(
                step=step,
                loss=loss,
                grad_norm=norm,
                lr=rate(step),
                tokens_per_s=run.task.tokens() / time_ms * 1e3,
            )
            line = log.Step(**name, **numbers, time_ms=time_ms)
            run.write(line)
            watched.stepped(line)
            if watched.due(done):
                device = variants.device(run.variant.framework)
                mfu = run.task.mfu(time_ms, device, run.variant.parallel.devices)
                layers = health.layers(learner, batch)
                seen = log.Watch(**name, **numbers, mfu=mfu, layers=layers)
                run.write(seen)
                if not silent:
                    watched.observed(seen)
            shown(done, loss, time_ms)
            if evaluates:
                evaluate(some, done)
            if saves:
                try:
                    save(done)
                except OSError as error:  # an error such as a full disk must not end the run
                    text = (
                        f"the checkpoint after {done} steps was not written, and "
                        f"{run.checkpoint()} remains: {error}"
                    )
                    print(f"warning: {text}", file=sys.stderr)
            if pauses:
                since = time.perf_counter()
    if run.save_every is not None:
        save(total)
    loss = evaluate(held_out, total)["loss"]
    copies = measures.copies(
        learner,
        held_out.batches,
        run.task.model.layer,
        (run.task.training.seed, 4),
        run.thorough,
    )
    if isinstance(run.batches, tasks.Tasks):
        copies |= tasks.measured(learner, run.batches, run.task.model.layer)
    return summary(status="ok", steps=total, held_out_loss=loss, **copies)
