"""Experiments on quality. Each experiment is one command, which trains variants of NSA and dense
attention with several seeds.

    python -m bench.lm.experiments table_8k --corpus corpus --seeds 0,1 --out runs
    python -m bench.lm.experiments table_8k --corpus corpus --limit 590 --out runs    # continues
    python -m bench.lm.quality runs/52m_8k/*.jsonl

Runs of one seed start from the same weights and read the same rows. A run is one file,
`<out>/<setting>/<variant>-<seed>.jsonl`, which is written when the run ends. If the command is
interrupted, a second call of the same command makes the missing runs. A file contains about a
hundred lines of steps, and all other lines of `bench.train`. `--jobs 4` runs four runs at a time
and distributes them over the GPUs. If two runs share a GPU, one run computes while the host works
between steps of the other run. Times of steps are stored only with `--jobs 1`. Exit status 3 means
that runs were omitted because they might not have ended within `--limit` seconds.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from absl import app

from nsa_core.types import Branches

from ..harness import cli, exit_status
from . import corpus, data, log, loop, recall, spec, tasks, variants, watch
from .data import Batches
from .tokens import Documents

FLAGS = cli.define(
    corpus=("corpus", "Folder that bench.lm.corpus built."),
    seeds=(list, "Seeds of the runs; default: the seeds of the experiment."),
    runs=(list, "Names of the runs; default: all runs of the experiment."),
    out=("runs", "Folder of the runs of all experiments."),
    jobs=(1, "Number of runs that run at the same time, over all GPUs."),
    limit=(
        float,
        "Time limit in seconds. A run starts only if it can end within the limit.",
        None,
    ),
    model=(str, "Replaces the model of the experiment.", list(spec.MODELS)),
    steps=(int, "Replaces the number of steps."),
    batch=(int, "Replaces the number of rows per step."),
    seq_len=(int, "Replaces the number of tokens per row."),
)

# The approximate size of the held-out text, which is at most this share of the training text.
HELD_OUT_TOKENS, HELD_OUT_ROWS = 2**17, 32
HELD_OUT_SHARE = 1 / 64
EVALUATIONS = 14  # of a run
# the approximate number of lines of steps in a record, and the minimum interval between them
KEPT_EVERY, KEPT_STEPS = 20, 100


@dataclasses.dataclass(frozen=True)
class Variant:
    """A variant of the model. `what` describes the variant, and `changes` has the differences from
    the default model. If the variant was removed, the commit `commit` still has its code.
    """

    what: str
    changes: dict[str, Any]
    commit: str | None


@dataclasses.dataclass(frozen=True)
class Setting:
    """The common properties of runs that are compared. Runs have many steps with few rows each.
    The number of steps, not of tokens, determines when a model learns to copy.

    Attributes:
      text: A folder of `bench.lm.corpus`, or `data.TEXT`. By default the folder `--corpus` is used.
      repeats: Number of passages per training row that repeat earlier passages beyond the window.
      tasks: Share of the training rows that contain tasks (`bench.lm.tasks`).
    """

    model: str
    batch: int
    length: int
    steps: int
    lr: float
    text: str | None = None
    repeats: int = 0
    tasks: float = 0


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A question, and the runs that answer it. The first run has dense attention. Experiments of
    one setting share runs.
    """

    question: str
    setting: str
    runs: list[str]
    seeds: list[int]


_FOUND = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
VARIANTS = {
    name: Variant(changes.pop("what"), changes, changes.pop("commit", None))
    for name, changes in _FOUND["variants"].items()
}
SETTINGS = {name: Setting(**sizes) for name, sizes in _FOUND["settings"].items()}
EXPERIMENTS = {name: Experiment(**about) for name, about in _FOUND["experiments"].items()}


@dataclasses.dataclass(frozen=True)
class Job:
    """One run. `path` is the file that the run writes."""

    setting: Setting
    variant: str
    seed: int
    text: str
    path: Path
    commit: str | None
    timed: bool
    deadline: float  # a time of `time.monotonic`, the same for all processes

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.stem}"


def task(job: Job, vocabulary: int, dtype: str) -> spec.Task:
    """Return the task of the run. Raises: ValueError: the model does not support the rows of the
    run."""
    at = job.setting
    changes = dict(VARIANTS[job.variant].changes)
    if "gate_bias" in changes:
        changes["gate_bias"] = tuple(changes["gate_bias"])
    attention, factor = changes.pop("attention", "nsa"), changes.pop("lr", 1)
    plain = spec.model(at.model, attention)
    hidden = plain.hidden + changes.pop("hidden", 0)
    own = {name: changes.pop(name) for name in spec.TORCH_ONLY if name in changes}
    layer = dataclasses.replace(plain.layer, **changes)
    model = dataclasses.replace(plain, layer=layer, hidden=hidden, vocabulary=vocabulary, **own)
    training = spec.Training(
        steps=at.steps,
        batch=at.batch,
        seq_len=at.length,
        lr=at.lr * factor,
        warmup=max(1, at.steps // 10),
        seed=job.seed,
    )
    return spec.Task(job.variant, model, training, dtype)


@functools.lru_cache(1)
def _documents(text: str) -> Documents:
    return corpus.read(text)


def batches(job: Job) -> Batches:
    """Return the batches of all runs with the seed of `job`. Each row of the text occurs once per
    epoch."""
    at = job.setting
    given = at.batch, at.length, job.seed
    if job.text == data.TEXT:
        return data.load(data.TEXT, *given)
    documents = {"documents": _documents(job.text), "pack": "once"}
    if at.tasks:
        return tasks.Tasks(*given, share=at.tasks, **documents)
    if not at.repeats:
        return Batches(*given, **documents)
    apart = spec.model(at.model, "dense").layer.w
    own = {"passages": at.repeats, "size": recall.PASSAGE, "apart": apart}
    return data.Repeating(*given, **own, **documents)


def run(job: Job) -> tuple[Job, str, float]:
    """Train, and write the file of the run. Return the status of the end and the seconds."""
    began = time.monotonic()
    dtype = "bfloat16" if variants.gpu("torch") else "float32"
    rows = batches(job)
    todo = task(job, rows.vocabulary, dtype)
    if todo.model.attention == "dense":
        variant = variants.dense("torch", "auto", dtype)
    else:
        variant = variants.nsa("torch", Branches(None, None, None), "error", todo)
    job.path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.jsonl"
        summary = loop.run(
            loop.Run(
                variant,
                todo,
                rows,
                path,
                Path(folder),
                commit=job.commit,
                watched=watch.Settings(csv=False, every=max(1, job.setting.steps // 4)),
                evaluate_every=max(1, math.ceil(job.setting.steps / EVALUATIONS)),
                evaluated=_evaluated(todo),
                thorough=True,
            ),
            # this context is not entered: SIGTERM ends the process at once, and nothing is lost
            loop.Stop(),
        )
        every = max(KEPT_EVERY, job.setting.steps // KEPT_STEPS)
        lines = [x for x in log.read(path) if kept(x, job.timed, every)]
        if summary.status == "ok":
            # The file is written completely or not at all, since an existing file means that the
            # run has ended.
            scratch = job.path.with_suffix(".part")
            scratch.unlink(missing_ok=True)
            log.append(scratch, lines)
            scratch.rename(job.path)
    variants.free()
    status = summary.status if summary.status == "ok" else f"{summary.status}: {summary.reason}"
    return job, status, time.monotonic() - began


def _evaluated(todo: spec.Task) -> int:
    """Evaluate on at least two held-out batches. The measures of copies need passages from more
    than one row.
    """
    wanted = max(HELD_OUT_TOKENS, HELD_OUT_ROWS * todo.training.seq_len)
    most = HELD_OUT_SHARE * todo.training.steps * todo.tokens()
    return max(2, int(min(wanted, most)) // todo.tokens())


def kept(line: log.Line, timed: bool, every: int = KEPT_EVERY) -> bool:
    """Return whether a record contains the line. Only some of the steps are recorded."""
    if isinstance(line, log.Step):
        return line.step % every == 0
    return timed or not isinstance(line, log.Speed)


LEFT_OUT = "left out"
_longest = 0.0  # of this process's runs, in seconds


def _within_the_limit(job: Job) -> tuple[Job, str, float]:
    """Call the function `run` if the duration of the longest earlier run suggests that this run
    ends in time."""
    global _longest
    if time.monotonic() + 1.1 * _longest > job.deadline:
        return job, LEFT_OUT, 0.0
    try:
        found = run(job)
    except Exception as error:  # other runs continue
        return job, f"{type(error).__name__}: {error}", 0.0
    _longest = max(_longest, found[2])
    return found


def jobs(names: Sequence[str], began: float) -> list[Job]:
    """Return those runs of experiments that do not exist yet, seed by seed.

    Raises:
      ValueError: There is no such experiment, variant or seed.
    """
    changes = {
        "model": FLAGS.model,
        "steps": FLAGS.steps,
        "batch": FLAGS.batch,
        "length": FLAGS.seq_len,
    }
    given: dict[str, Any] = {k: v for k, v in changes.items() if v is not None}
    found: dict[Path, Job] = {}  # experiments may have runs in common
    for name in names:
        if name not in EXPERIMENTS:
            raise ValueError(f"experiment must be one of {sorted(EXPERIMENTS)}, got {name!r}")
        at = EXPERIMENTS[name]
        setting = dataclasses.replace(SETTINGS[at.setting], **given)
        known = [name for name, x in VARIANTS.items() if x.commit is None]
        wanted = [x for x in at.runs if x in known] if FLAGS.runs is None else FLAGS.runs
        if not wanted or set(wanted) - {*known}:
            raise ValueError(f"--runs must contain only names in {sorted(known)}, got {wanted}")
        named = [*map(str, at.seeds)] if FLAGS.seeds is None else FLAGS.seeds
        if not named or not all(x.isdecimal() for x in named):
            raise ValueError(f"--seeds must be non-negative integers, got {FLAGS.seeds}")
        text = setting.text or FLAGS.corpus
        if text != data.TEXT and not corpus.is_corpus(text):
            raise ValueError(
                f"--corpus must be a folder that bench.lm.corpus built, got {text}"
            )
        end = math.inf if FLAGS.limit is None else began + FLAGS.limit
        for seed, variant in itertools.product(map(int, named), wanted):
            path = Path(FLAGS.out) / at.setting / f"{variant}-{seed}.jsonl"
            job = Job(setting, variant, seed, text, path, FLAGS.commit, FLAGS.jobs == 1, end)
            task(job, 256, "float32")
            found[path] = job
    return [job for path, job in found.items() if not path.exists()]


def gpus() -> list[str]:
    """Return the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES, or "" without a
    GPU.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        import torch

        visible = ",".join(map(str, range(torch.cuda.device_count())))
    return visible.split(",")


def take_gpu(places: Any) -> None:
    """Restrict this process to the next GPU of the queue `places`."""
    os.environ["CUDA_VISIBLE_DEVICES"] = places.get()


def main(argv: Sequence[str]) -> int:
    if len(argv) < 2:
        raise app.UsageError(
            f"arguments must name experiments; known: {', '.join(EXPERIMENTS)}"
        )
    todo = jobs(argv[1:], time.monotonic())
    if not todo:
        print(f"all runs are in {FLAGS.out}")
        return exit_status.OK
    ends: list[str] = []
    with contextlib.ExitStack() as stack:
        found = map(_within_the_limit, todo)
        if FLAGS.jobs > 1:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(exit_status.NOT_MEASURED))
            context = multiprocessing.get_context("spawn")
            places = context.SimpleQueue()
            for place in itertools.islice(itertools.cycle(gpus()), FLAGS.jobs):
                places.put(place)
            pool = stack.enter_context(context.Pool(FLAGS.jobs, take_gpu, (places,)))
            found = pool.imap_unordered(_within_the_limit, todo)
        for job, status, seconds in found:
            print(f"{job.name}: {status}, {seconds:.0f} s", flush=True)
            ends.append(status)
    if all(x == "ok" for x in ends):
        return exit_status.OK
    lost = all(x in ("ok", LEFT_OUT) for x in ends)
    return exit_status.NOT_MEASURED if lost else exit_status.WRONG


if __name__ == "__main__":
    cli.run(main, FLAGS, arguments=True)
