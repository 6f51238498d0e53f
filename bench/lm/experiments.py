"""Experiments on quality, one command each: NSA's variants and dense attention over seeds.

    python -m bench.lm.experiments table_8k --corpus corpus --seeds 0,1 --out runs
    python -m bench.lm.experiments table_8k --corpus corpus --limit 590 --out runs    # goes on
    python -m bench.lm.quality runs/52m_8k/*.jsonl

Runs of one seed start from the same weights and see the same rows. A run is one file,
`<out>/<setting>/<variant>-<seed>.jsonl`, that is there once the run has ended: the same command
again makes those that are missing, so that a call may be cut. It has about a hundred steps of
`bench.train`'s lines, all else whole. `--jobs 4` runs four at a time, over the GPUs that there are
in turn: two on one GPU hide what the host does between steps. Times of steps are kept of `--jobs 1`
alone. Exit status 3: runs were left out, since they might not have ended within `--limit` seconds.
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

from absl import app

from nsa_core.types import Branches

from ..harness import cli, exit_status
from . import corpus, data, log, loop, recall, spec, variants, watch
from .data import Batches
from .tokens import Documents

FLAGS = cli.define(
    corpus=("corpus", "What bench.lm.corpus built."),
    seeds=(list, "Default: those of the experiment."),
    runs=(list, "Default: all of the experiment."),
    out=("runs", "Folder of the experiments' runs."),
    jobs=(1, "Runs at a time, of all GPUs."),
    limit=(float, "Seconds: no run begins that may end later.", None),
    model=(str, "Another model.", list(spec.MODELS)),
    steps=(int, "Another number of steps."),
    batch=(int, "Other rows a step."),
    seq_len=(int, "Another length of rows."),
)

# What runs are judged by, about; at most this share of what they learn from.
HELD_OUT_TOKENS, HELD_OUT_ROWS = 2**17, 32
HELD_OUT_SHARE = 1 / 64
EVALUATIONS = 14  # of a run
KEPT_EVERY, KEPT_STEPS = 20, 100  # step lines of a record: not more often, about so many


@dataclasses.dataclass(frozen=True)
class Variant:
    """A model; `what` it is in words, `changes`: what is not as in the plain one."""

    what: str
    changes: dict[str, Any]


# Gates of "head" start at (-2, 2, 2).
HEAD = {"gate": "head"}
SHARED = HEAD | {"kv": "shared"}
TAPS = SHARED | {"key_taps": 3}
DENSE = {"attention": "dense"}
FINER = {"l": 16, "d": 8, "l_sel": 32, "n_sel": 32}  # as many keys
HALF_OPEN = {"gate_bias": (0.0, 2.0, 2.0)}
VARIANTS = {
    "dense": Variant("dense attention", DENSE),
    "dense_wide": Variant("as many parameters as `head`", DENSE | {"hidden": 184}),
    "dense_slow": Variant("0.7 times the learning rate", DENSE | {"lr": 0.7}),
    "dense_fast": Variant("1.4 times the learning rate", DENSE | {"lr": 1.4}),
    "dense_taps": Variant("keys convolved over three tokens", DENSE | {"key_taps": 3}),
    "sigmoid": Variant("gates of the mean query, keys of each branch", {"gate": "sigmoid"}),
    "head": Variant("gates of each head, keys of each branch", HEAD),
    "head_0": Variant("all gates start at 1/2", HEAD | {"gate_bias": (0.0, 0.0, 0.0)}),
    "head_022": Variant("the compressed gate starts at 1/2", HEAD | HALF_OPEN),
    "head_half": Variant("blocks of 32, 32 selected", HEAD | FINER),
    "head_mlp_pe": Variant("learned compression", HEAD | {"phi": "mlp_pe"}),
    "head_mlp_rope": Variant(
        "learned compression, rotated after it", HEAD | {"phi": "mlp_rope"}
    ),
    "head_first_dense": Variant("a dense first layer", HEAD | {"dense_first": 1}),
    "head_all": Variant("every block selected", HEAD | {"n_sel": 32}),
    "head_win": Variant(
        "sliding and selected branch share keys", HEAD | {"shared_window": True}
    ),
    "head_index": Variant("a loss trains the selection", HEAD | {"selection_loss": 0.1}),
    "head_win_index": Variant(
        "both of these", HEAD | {"shared_window": True, "selection_loss": 0.1}
    ),
    "head_taps": Variant("keys convolved over three tokens", HEAD | {"key_taps": 3}),
    "head_shared": Variant("gates of each head, keys for all branches", SHARED),
    "shared_022": Variant("the compressed gate starts at 1/2", SHARED | HALF_OPEN),
    "shared_half": Variant("blocks of 32, 32 selected", SHARED | FINER),
    "shared_taps": Variant("keys convolved over three tokens", TAPS),
    "shared_taps_n32": Variant("convolved keys, 32 blocks", TAPS | {"n_sel": 32}),
    "shared_taps_n64": Variant("convolved keys, 64 blocks", TAPS | {"n_sel": 64}),
    "shared_taps_half": Variant("convolved keys, 32 blocks of 32", TAPS | FINER),
    "shared_taps_fine": Variant("convolved keys, finer means", TAPS | {"l": 16, "d": 8}),
    "shared_taps_index": Variant("convolved keys, a loss", TAPS | {"selection_loss": 0.1}),
    "shared_taps_third": Variant("convolved keys, a third dense", TAPS | {"dense_every": 3}),
    "shared_first_dense": Variant("a dense first layer", SHARED | {"dense_first": 1}),
    "shared_index": Variant("a loss trains the selection", SHARED | {"selection_loss": 0.1}),
    "shared_mlp_pe": Variant("learned compression", SHARED | {"phi": "mlp_pe"}),
    "shared_n32": Variant("32 blocks selected", SHARED | {"n_sel": 32}),
    "shared_n64": Variant("64 blocks selected", SHARED | {"n_sel": 64}),
    "shared_fine": Variant("compressed tokens of 16, every 8", SHARED | {"l": 16, "d": 8}),
    "shared_dense_third": Variant("every third layer dense", SHARED | {"dense_every": 3}),
    **{
        f"shared_{rule}": Variant(what, SHARED | {"choice": rule})
        for rule, what in {
            "mass": "blocks chosen by attention to all keys",
            "bound": "blocks chosen by the box of their keys",
            "middle": "compressed keys rotated after the mean",
            "heads": "blocks chosen per query head",
            "mass_heads": "blocks chosen per query head by attention to all keys",
        }.items()
    },
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """What runs that are compared have in common. So many steps of so few rows, since a model
    learns to copy after so many steps, rather than after so many tokens.

    Attributes:
      text: a folder of `bench.lm.corpus`, or `data.TEXT`; None: what `--corpus` names.
      repeats: passages of a training row that stand in it before, beyond the window.
    """

    model: str
    batch: int
    length: int
    steps: int
    lr: float
    text: str | None = None
    repeats: int = 0


SETTINGS = {
    "13m_2k": Setting("13m", 4, 2048, 3000, 1.5e-3),
    "13m_8k": Setting("13m", 1, 8192, 3500, 1.5e-3),
    "13m_8k_repeats": Setting("13m", 1, 8192, 3000, 1.5e-3, repeats=32),
    "13m_bytes": Setting("13m", 4, 2048, 3000, 1.5e-3, data.TEXT),
    "52m_2k": Setting("52m", 4, 2048, 3000, 7e-4),
    "52m_8k": Setting("52m", 1, 8192, 3500, 1e-3),
    "52m_8k_long": Setting("52m", 1, 8192, 10000, 1e-3),
    "125m_2k": Setting("125m", 4, 2048, 3000, 6e-4),
    "125m_bytes": Setting("125m", 16, 2048, 1000, 6e-4, data.TEXT),
}


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A question, and the runs that answer it, the first one dense. Experiments of one setting
    have runs in common.
    """

    question: str
    setting: str
    runs: tuple[str, ...]
    seeds: tuple[int, ...]


EXPERIMENTS = {
    "table_2k": Experiment(
        "Is NSA as good as dense attention at rows of 2k?",
        "52m_2k",
        ("dense", "head_shared", "head", "dense_wide"),
        (0, 1, 2, 3, 4),
    ),
    "table_8k": Experiment(
        "Is NSA as good as dense attention at rows of 8k?",
        "52m_8k",
        ("dense", "head_shared"),
        (0, 1, 2, 3, 4, 7, 8, 9, 10),
    ),
    "table_125m": Experiment(
        "Is a larger model with NSA as good as with dense attention?",
        "125m_2k",
        ("dense", "head_shared"),
        (0, 1, 2),
    ),
    "gates": Experiment(
        "Which change of the gates counts: the layer's input a head, or where they start?",
        "52m_2k",
        ("dense", "sigmoid", "head", "head_0", "head_022"),
        (0, 1, 2),
    ),
    "recall": Experiment(
        "What costs recall beyond the window: keys and values of each branch, or the selection?",
        "13m_2k",
        (
            *("dense", "head", "head_all", "head_shared", "head_win", "head_index"),
            *("head_win_index", "head_half", "head_022", "head_first_dense"),
        ),
        (0,),
    ),
    "repeats": Experiment(
        "Does NSA come off worse by its gates, or by a text that repeats?",
        "125m_bytes",
        ("dense", "sigmoid", "head", "head_shared"),
        (0, 1, 2),
    ),
    "repeats_13m": Experiment(
        "Is it the gates or the text that repeats, of a small model?",
        "13m_bytes",
        ("dense", "sigmoid", "head", "head_shared"),
        (0, 1, 2),
    ),
    "rates": Experiment(
        "Is another learning rate better for dense attention at rows of 8k?",
        "52m_8k",
        ("dense", "dense_slow", "dense_fast"),
        (0, 1, 2),
    ),
    "selection": Experiment(
        "What makes selection find what counts at rows of 8k: keys for all branches, gates, "
        "blocks, convolved keys, a dense first layer, a loss?",
        "52m_8k",
        (
            *("dense", "head_shared", "head", "sigmoid", "shared_022", "shared_half"),
            *("dense_taps", "shared_taps", "shared_first_dense", "shared_index"),
        ),
        (0, 1, 2),
    ),
    "far": Experiment(
        "What keeps NSA from what lies more than a thousand tokens back: how many blocks are "
        "selected, by which rule, or the compressed keys?",
        "52m_8k_long",
        (
            *("dense", "head_shared", "head", "shared_n32", "shared_n64", "shared_mass"),
            *("shared_bound", "shared_middle", "shared_heads", "shared_mass_heads"),
            *("shared_fine", "shared_half", "dense_taps", "shared_taps", "shared_index"),
            *("shared_first_dense", "shared_dense_third", "shared_taps_n32"),
            *("shared_taps_n64", "shared_taps_half", "shared_taps_fine"),
            *("shared_taps_index", "shared_taps_third"),
        ),
        (7, 8, 9),
    ),
    "selection_13m": Experiment(
        "What makes a small model's selection find what counts at rows of 8k?",
        "13m_8k",
        (
            *("dense", "head_shared", "head", "shared_022", "shared_half"),
            *("dense_taps", "shared_taps", "shared_first_dense", "shared_index"),
        ),
        (0,),
    ),
    "far_13m": Experiment(
        "Does selection find copies at rows of 8k where the text has many of them?",
        "13m_8k_repeats",
        (
            *("dense", "head_shared", "head", "shared_half", "dense_taps", "shared_taps"),
            "shared_index",
        ),
        (0,),
    ),
    "compression": Experiment(
        "Does learned compression help?",
        "52m_2k",
        ("dense", "head", "head_mlp_pe", "head_mlp_rope", "head_shared", "shared_mlp_pe"),
        (0, 1, 2),
    ),
    "compression_13m": Experiment(
        "Does learned compression help a small model?",
        "13m_2k",
        ("dense", "head", "head_mlp_pe", "head_mlp_rope", "head_shared", "shared_mlp_pe"),
        (0, 1, 2),
    ),
    "copying": Experiment(
        "Do convolved keys make copying form early, in dense attention too?",
        "52m_2k",
        ("dense", "head_shared", "dense_taps", "shared_taps"),
        (0, 1, 2),
    ),
    "copying_13m": Experiment(
        "Do convolved keys make copying form early in a small model?",
        "13m_2k",
        ("dense", "head_shared", "dense_taps", "shared_taps", "head", "head_taps"),
        (0, 1, 2),
    ),
}


@dataclasses.dataclass(frozen=True)
class Job:
    """One run; `path`: the file that it leaves."""

    setting: Setting
    variant: str
    seed: int
    text: str
    path: Path
    commit: str | None
    timed: bool
    deadline: float  # of `time.monotonic`, the same for all processes

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.stem}"


def task(job: Job, vocabulary: int, dtype: str) -> spec.Task:
    """What the run trains.

    Raises:
      ValueError: the model and its rows do not go together.
    """
    at = job.setting
    changes = dict(VARIANTS[job.variant].changes)
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
    """The rows that the runs of a seed see, each once for an epoch."""
    at = job.setting
    given = at.batch, at.length, job.seed
    if job.text == data.TEXT:
        return data.load(data.TEXT, *given)
    documents = {"documents": _documents(job.text), "pack": "once"}
    if not at.repeats:
        return Batches(*given, **documents)
    apart = spec.model(at.model, "dense").layer.w
    own = {"passages": at.repeats, "size": recall.PASSAGE, "apart": apart}
    return data.Repeating(*given, **own, **documents)


def run(job: Job) -> tuple[Job, str, float]:
    """Trains, and writes the file of the run; how it ended, and in how many seconds."""
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
                save_every=None,
                commit=job.commit,
                watched=watch.Settings(csv=False, every=max(1, job.setting.steps // 4)),
                evaluate_every=max(1, math.ceil(job.setting.steps / EVALUATIONS)),
                evaluated=_evaluated(todo),
                thorough=True,
            ),
            loop.Stop(),  # not entered: SIGTERM ends the process at once, nothing is lost
        )
        every = max(KEPT_EVERY, job.setting.steps // KEPT_STEPS)
        lines = [x for x in log.read(path) if kept(x, job.timed, every)]
        if summary.status == "ok":
            # Whole or not at all, since a file that is there is a run that has ended.
            scratch = job.path.with_suffix(".part")
            scratch.unlink(missing_ok=True)
            log.append(scratch, lines)
            scratch.rename(job.path)
    variants.free()
    status = summary.status if summary.status == "ok" else f"{summary.status}: {summary.reason}"
    return job, status, time.monotonic() - began


def _evaluated(todo: spec.Task) -> int:
    """Held-out batches, two at least: a passage is read before in one row, and not in another."""
    wanted = max(HELD_OUT_TOKENS, HELD_OUT_ROWS * todo.training.seq_len)
    most = HELD_OUT_SHARE * todo.training.steps * todo.tokens()
    return max(2, int(min(wanted, most)) // todo.tokens())


def kept(line: log.Line, timed: bool, every: int = KEPT_EVERY) -> bool:
    """Whether a record has it: every so many steps, and all else."""
    if isinstance(line, log.Step):
        return line.step % every == 0
    return timed or not isinstance(line, log.Speed)


LEFT_OUT = "left out"
_longest = 0.0  # of this process's runs, in seconds


def _within_the_limit(job: Job) -> tuple[Job, str, float]:
    """`run`, if it may end in time by the longest of those before it."""
    global _longest
    if time.monotonic() + 1.1 * _longest > job.deadline:
        return job, LEFT_OUT, 0.0
    try:
        found = run(job)
    except Exception as error:  # other runs go on
        return job, f"{type(error).__name__}: {error}", 0.0
    _longest = max(_longest, found[2])
    return found


def jobs(names: Sequence[str], began: float) -> list[Job]:
    """The runs of experiments that are not there yet, seed by seed.

    Raises:
      ValueError: there is no such experiment, variant or seed.
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
        wanted = at.runs if FLAGS.runs is None else FLAGS.runs
        if not wanted or set(wanted) - VARIANTS.keys():
            raise ValueError(f"--runs must be of {sorted(VARIANTS)}, got {wanted}")
        named = [*map(str, at.seeds)] if FLAGS.seeds is None else FLAGS.seeds
        if not named or not all(x.isdecimal() for x in named):
            raise ValueError(f"--seeds must be integers from 0 on, got {FLAGS.seeds}")
        text = setting.text or FLAGS.corpus
        if text != data.TEXT and not corpus.is_corpus(text):
            raise ValueError(f"--corpus must be what bench.lm.corpus built, got {text}")
        end = math.inf if FLAGS.limit is None else began + FLAGS.limit
        for seed, variant in itertools.product(map(int, named), wanted):
            path = Path(FLAGS.out) / at.setting / f"{variant}-{seed}.jsonl"
            job = Job(setting, variant, seed, text, path, FLAGS.commit, FLAGS.jobs == 1, end)
            task(job, 256, "float32")
            found[path] = job
    return [job for path, job in found.items() if not path.exists()]


def gpus() -> list[str]:
    """The GPUs that this process may see, as CUDA_VISIBLE_DEVICES names them; "" where there is
    none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        import torch

        visible = ",".join(map(str, range(torch.cuda.device_count())))
    return visible.split(",")


def take_gpu(places: Any) -> None:
    """This process sees the next GPU of the queue `places` alone."""
    os.environ["CUDA_VISIBLE_DEVICES"] = places.get()


def main(argv: Sequence[str]) -> int:
    if len(argv) < 2:
        raise app.UsageError(f"experiments, of {', '.join(EXPERIMENTS)}")
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
