"""One training run: steps with a line each, checkpoints, and the three ways to end."""

import dataclasses
import functools
import signal
import sys
import tempfile
import time
from pathlib import Path

from ..harness import records, timing
from . import checkpoint, health, log, measures, speed, tasks, variants
from . import share as shares
from .data import Batch, Batches
from .learner import Learner
from .progress import Progress
from .ranks import Ranks
from .spec import DivergedError, Task
from .watch import Settings, Watch

EVALUATED_BATCHES = 8
ON_THE_WAY = 4  # one in so many held-out batches


class Stop:
    """While entered, SIGTERM or Ctrl-C asks the run to stop after the step that it is in; a second
    Ctrl-C ends it at once.

    Attributes:
      asked: whether a signal came.
      by: name of the signal; SIGTERM if another rank got it.
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
            print("stops after this step; Ctrl-C again ends it now", file=sys.stderr)


@dataclasses.dataclass(frozen=True)
class Run:
    """A run, and the locations of its files.

    Attributes:
      variant, task, batches: The attention, the model and the data.
      path: path of the file with the lines.
      folder: folder of the checkpoints of this run.
      save_every: Steps between checkpoints. None means no checkpoint, even at the end.
      commit: as in `records.environment`.
      ranks: the processes of the run; the first of them writes.
      watched: Further observed values, in files next to `path`.
      evaluate_every: Steps between evaluations of held-out text, of every fourth batch. None
        means only at the end.
      evaluated: batches of held-out text.
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
    watched: Settings = dataclasses.field(default_factory=Settings)
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
        """Return the last checkpoint, or None."""
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
    """Train from the last checkpoint, if there is one, and write all lines. Every rank must
    call it, and all ranks end in the same way.

    The run ends `ok` after its steps, `stopped` by a signal with a checkpoint of the steps done,
    or `diverged` where a loss or gradient is not finite: the checkpoint from before stays, and
    no later one is written.

    Raises:
      ValueError: the checkpoint was written under other settings.
      LostError: another rank is gone.
    """
    try:
        return _run(run, stop)
    except RuntimeError as error:
        lost = run.ranks.lost(error)
        if lost is None:
            raise
        raise lost from error


def _run(run: Run, stop: Stop) -> log.Summary:
    with tempfile.TemporaryDirectory() as scratch:
        learner = variants.learner(run.variant, run.task, Path(scratch), run.ranks)
    first = 0
    if run.ranks.first(run.checkpoint() is not None):
        first = checkpoint.load_last(run.folder, learner, run.settings(), run.ranks)
    run.write(
        log.Header(
            **run.variant.name,
            model=run.task.model.as_dict() | run.task.model.layer.start(),
            parameters=learner.parameters(),
            training=dataclasses.asdict(run.task.training),
            dtype=run.task.dtype,
            first_step=first,
            flops=run.task.flops(),
            input_sha256=run.batches.sha256,
            device=variants.device(run.variant.framework),
            time=records.utc_now(),
            parallel=_spread(run, learner),
            epochs=run.batches.epochs(run.task.training.steps),
            **records.environment(run.commit),
        )
    )
    times_ms: list[float] = []
    with Watch(run.path.parent, run.name, run.ranks, run.watched) as watch:
        summary = steps(run, learner, first, stop, times_ms, watch)
    run.write(summary)
    if len(times_ms) > 1:  # the first compiles
        found = speed.ok(timing.Timing.of(times_ms[1:], "host"), learner)
        run.write(speed.line(run.variant, run.task, run.commit, found))
    return summary


def steps(
    run: Run, learner: Learner, first: int, stop: Stop, times_ms: list[float], watch: Watch
) -> log.Summary:
    """Return the steps from `first` on. Each step appends to `times_ms` the time since the end of
    the previous one, without checkpoints and observations.
    """
    training, save = run.task.training, functools.partial(_save, run, learner)
    summary = functools.partial(log.Summary, **run.variant.name)
    following, held_out = None, run.held_out()
    some = held_out.every(ON_THE_WAY)
    with Progress(run.name, first, training.steps, silent=run.ranks.rank > 0) as progress:
        since = time.perf_counter()
        for step in range(first, training.steps):
            # Signals come to ranks at different steps: all stop where one was asked to.
            if run.ranks.any(stop.asked):
                where = "not saved" if run.save_every is None else f"saved to {save(step)}"
                reason = f"{stop.by} after {step} steps, {where}"
                return summary(status="stopped", steps=step, reason=reason)
            done = step + 1
            last, observes = done == training.steps, watch.due(done)
            saves = _due(run.save_every, done) and not last
            evaluates = _due(run.evaluate_every, done) and not last
            # The work after such a step does not begin earlier: it would overlap untimed work.
            pauses = last or observes or saves or evaluates
            batch = _batch(run, learner, step) if following is None else following
            following = None if pauses else _batch(run, learner, done)
            try:
                loss, norm = learner.step(batch, step, following)
            except DivergedError as error:
                reason = f"{error}; the last checkpoint is {run.checkpoint()}"
                return summary(status="diverged", steps=step, reason=reason)
            now = time.perf_counter()
            time_ms, since = (now - since) * 1e3, now
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
            watch.stepped(line)
            if observes:
                _observe(run, learner, batch, line, watch)
            progress.stepped(done, loss, time_ms)
            if evaluates:
                found = some.measured(learner)
                run.write(log.Evaluation(**run.variant.name, steps=done, measures=found))
            if saves:
                _save_if_there_is_room(run, save, done)
            if pauses:
                since = time.perf_counter()
    if run.save_every is not None:
        save(training.steps)
    found = held_out.measured(learner)
    run.write(log.Evaluation(**run.variant.name, steps=training.steps, measures=found))
    copies = measures.copies(
        learner, held_out.batches, run.task.model.layer, (training.seed, 4), run.thorough
    )
    if isinstance(run.batches, tasks.Tasks):
        copies |= tasks.measured(learner, run.batches, run.task.model.layer)
    return summary(status="ok", steps=training.steps, held_out_loss=found["loss"], **copies)


def _due(every: int | None, done: int) -> bool:
    return every is not None and done % every == 0


def _batch(run: Run, learner: Learner, step: int) -> Batch:
    """This rank's rows of the batch of `step`."""
    batch = learner.share.of(functools.partial(run.batches.train, step))
    shares.check_vocabulary(batch, run.task.model.vocabulary)
    return batch


def _observe(run: Run, learner: Learner, batch: Batch, line: log.Step, watch: Watch) -> None:
    """Observe gates and selection after the step of `line`."""
    devices = run.variant.parallel.devices
    device = variants.device(run.variant.framework)
    found = log.Watch(
        **run.variant.name,
        step=line.step,
        loss=line.loss,
        grad_norm=line.grad_norm,
        lr=line.lr,
        tokens_per_s=line.tokens_per_s,
        mfu=speed.mfu(run.task, line.time_ms, device, devices),
        layers=health.layers(learner, batch),
    )
    run.write(found)
    if run.ranks.rank == 0:
        watch.observed(found)


def _spread(run: Run, learner: Learner) -> dict | None:
    """Return the header's field about several devices or micro-batches."""
    spread = run.variant.parallel
    if spread == type(spread)():
        return None
    return spread.as_dict() | {"graph": learner.graph}


def _save(run: Run, learner: Learner, step: int) -> Path:
    return checkpoint.save(run.folder, learner, step, run.settings(), run.ranks)


def _save_if_there_is_room(run: Run, save, step: int) -> None:
    """Save a checkpoint during the run. If it cannot be written, the run continues and the last
    checkpoint remains.
    """
    try:
        save(step)
    except OSError as error:
        text = f"no checkpoint after {step} steps, {run.checkpoint()} stays: {error}"
        print(f"warning: {text}", file=sys.stderr)
