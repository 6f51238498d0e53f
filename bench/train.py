"""Trains a language model on NSA and on dense attention, in JAX and in torch.

    python -m bench.train                                   # a tiny model, all four runs
    python -m bench.train --config 125m --set train.lr=3e-4 # a file of configs/train/, or a path
    python -m bench.train --dataset 'texts/*.jsonl' --tokenizer tokenizer.json
    python -m bench.train --dataset HuggingFaceFW/fineweb-edu:sample-10BT
    python -m bench.train --model 125m --steps 300          # 124 million weights, on a GPU
    python -m bench.train --model 125m --throughput         # tokens/s, memory and MFU by length
    python -m bench.train --model 125m --throughput --gate sigmoid,head     # both in turn
    python -m bench.train --resume --out bench/results/...  # continue after Ctrl-C
    torchrun --nproc-per-node=2 -m bench.train --framework torch --parallel fsdp

By default there are four runs: NSA and dense attention, each in JAX and in torch. All runs read
the same batches. Weights with the same name start with the same values.

The exit status is 1 if JAX and torch do not agree or if NSA ends worse than dense attention. The
exit status is 4 if a loss or gradient is not finite, 69 if another process of the run ended, and 76
if no step ended for `--hang_s`. The exit status is 75 if SIGTERM or Ctrl-C stopped the runs. If the
runs were stopped, their state is saved, and `--resume` continues the runs.
"""

import dataclasses
import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from nsa_core import extras
from nsa_core import flags as kernel_flags
from nsa_core.layer import GATES
from nsa_core.layer import PHI as PHIS

from .harness import cli, command, exit_status, heartbeat, records
from .lm import (
    checkpoint,
    config_file,
    curves,
    data,
    log,
    loop,
    spec,
    speed,
    spread,
    variants,
    watched,
)
from .lm.config import TrainConfig
from .lm.data import CORPUS_BYTES, Batches
from .lm.ranks import LostError, Ranks

# sysexits.h: 69 "service unavailable", 75 "try again"
WRONG, DIVERGED, LOST, STOPPED = exit_status.WRONG, 4, 69, 75
MEMORIZED = "the difference may then also be in what a model has memorized"
DTYPES = {"f32": "float32", "bf16": "bfloat16"}

FLAGS = cli.define(
    config=(str, "Configuration of the run: a name in configs/train/, or the path of a file."),
    set=(
        (),
        "key=value that replaces a value of the file, for example train.lr=3e-4 (repeatable).",
    ),
    model=("tiny", "Name of the model's sizes.", list(spec.MODELS)),
    framework=("both", "Framework that trains the model.", ["jax", "torch", "both"]),
    attention=("both", "Kinds of attention of the model.", ["nsa", "dense", "both"]),
    dense=(
        "auto",
        "Backend of dense attention; all: each backend of the framework, with --throughput.",
        ["auto", "all", *dict.fromkeys(itertools.chain(*variants.DENSE.values()))],
    ),
    phi=("avg", "Compression of NSA.", PHIS),
    gate=(["sigmoid"], f"Gates of NSA: one of {GATES}, or several with --throughput."),
    dtype=(str, "Dtype of the computation; default: f32, or bf16 on a GPU.", list(DTYPES)),
    steps=(int, "Optimizer steps."),
    seq_len=(int, "Number of tokens per sequence."),
    batch=(int, "Number of sequences per step, over all devices."),
    batch_size=(int, "Instead of --batch: number of sequences of a micro-batch on one device."),
    lr=(float, "Highest learning rate."),
    warmup=(int, "Number of warmup steps; default: a tenth of the steps.", 0),
    clip=(1.0, "Norm to which gradients are clipped."),
    seed=(0, "Seed of weights and data.", 0),
    dataset=(
        data.TEXT,
        "text: the standard library's source; a corpus of bench.lm.corpus; a path, folder or glob "
        "of .jsonl, .parquet, .txt; or owner/name[:config] of the Hugging Face Hub.",
    ),
    text_column=("text", "Name of the column of documents in --dataset."),
    tokenizer=(str, "File of the library tokenizers; default: tokens are bytes."),
    pack=(
        str,
        "documents: rows of documents with boundaries; none: windows of one stream at random "
        "places; once: each row of the stream once per epoch; default: documents, for text none, "
        "for a corpus once.",
        [*data.PACKS],
    ),
    shuffle_buffer=(
        int,
        "Number of documents of the Hub that are shuffled at a time; default: 4096.",
    ),
    corpus_bytes=(
        CORPUS_BYTES,
        "Number of bytes of --dataset=text; a sixteenth of them is held out.",
    ),
    ranges=(
        "none",
        "Key ranges with which fa2 in torch reads the selected keys; none: it reads blocks; v1: "
        "ranges made on the host; v2: ranges made on the device; adaptive: v1 for short rows, v2 "
        "for long ones.",
        variants.RANGES,
    ),
    tolerance=(
        float,
        "Accepted relative difference between the losses of JAX and torch; default: by dtype.",
    ),
    margin=(
        curves.MARGIN,
        "Share by which NSA's loss at the end of a run may exceed that of dense attention.",
        None,
    ),
    out=(str, "Folder of the results; default: bench/results/<time>."),
    checkpoint_dir=(str, "Folder of the checkpoints; default: in --out."),
    save_every=(100, "Number of steps between checkpoints."),
    evaluate_every=(
        int,
        "Number of steps between evaluations on held-out text; default: only at the end.",
    ),
    graph=(
        bool,
        "In torch on a GPU, forward and backward run as one CUDA graph; default: true in one "
        "process without --compile. With --parallel=ddp, gradients are summed after the graph, "
        "without DistributedDataParallel; with --parallel=fsdp, the graph has the collectives.",
    ),
    resume=(False, "Continue from the existing checkpoints."),
    throughput=(False, "Only measure training steps, by length."),
    lengths=("512,1024,2048,8192,32768".split(","), "Lengths for --throughput."),
    tokens=(32768, "Number of tokens per step for --throughput without --batch."),
    row_seconds=(3.0, "Seconds spent on timing a row of --throughput."),
    save_records=(False, "Also append the lines to bench/records/<device>/train.jsonl."),
    **spread.DEFINED,
)


def main(argv: Sequence[str]) -> int:
    settings, values, told = config_file.read(FLAGS.config, FLAGS.set)
    for line in told:
        print(f"warning: {line}", file=sys.stderr)
    config_file.apply(values, (FLAGS, flags.FLAGS))
    if FLAGS.resume and FLAGS.out is None:
        raise ValueError("--resume needs --out, the folder of the runs to continue")
    if FLAGS.dense == "all" and not FLAGS.throughput:
        raise ValueError("--dense=all requires --throughput, got a training run")
    if not FLAGS.gate or set(FLAGS.gate) - {*GATES}:
        raise ValueError(f"--gate must be in {GATES}, got {FLAGS.gate}")
    if len(FLAGS.gate) > 1 and not FLAGS.throughput:
        raise ValueError(f"several values of --gate require --throughput, got {FLAGS.gate}")
    if not FLAGS.throughput:
        for flag in map(FLAGS.__getitem__, ("lengths", "tokens", "row_seconds")):
            if flag.value != flag.default:
                raise ValueError(f"--{flag.name} requires --throughput, got a training run")
    if FLAGS.throughput and (FLAGS.parallel, FLAGS.accumulate) != ("none", 1):
        raise ValueError(
            "--throughput measures only one device, got --parallel or --accumulate"
        )
    if FLAGS.framework != "torch":
        extras.require("train", "optax", "flax")
    if FLAGS.graph and FLAGS.framework == "jax":
        raise ValueError("--graph needs --framework=torch, got jax")
    if None not in (FLAGS.batch, FLAGS.batch_size):
        raise ValueError("--batch and --batch_size must not both be given")
    ranks = spread.ranks(FLAGS, FLAGS.framework)
    try:
        first = str(command.folder(FLAGS.out) if ranks.rank == 0 else "")
        folder = Path(ranks.first(first))
        path = folder / "train.jsonl"
        if path.exists() and not FLAGS.resume:
            raise ValueError(f"{path} exists; --out must name a new folder, or give --resume")
        with variants.ranges(FLAGS.ranges):
            if FLAGS.throughput:
                status = throughput(folder, settings)
            else:
                status = runs(folder, settings, ranks)
    except LostError as error:  # `close` would wait for the process that was lost
        print(f"error: {error}", file=sys.stderr)
        return LOST
    ranks.close()
    return status


def _frameworks() -> tuple[str, ...]:
    # torch runs first, since torch returns memory to the device and JAX does not.
    return ("torch", "jax") if FLAGS.framework == "both" else (FLAGS.framework,)


def _tasks(settings: TrainConfig, **known: int) -> list[spec.Task]:
    """Return a task for NSA and for dense attention. `known` overrides values of `Training`."""
    values: dict[str, Any] = spec.MODELS[FLAGS.model]["train"] | settings.train
    for name in ("batch", "seq_len", "steps", "lr", "warmup", "clip", "seed"):
        if FLAGS[name].value is not None:
            values[name] = FLAGS[name].value
    values.setdefault("warmup", max(1, values["steps"] // 10))
    training = spec.Training(**values | known)
    on_gpu = any(map(variants.gpu, _frameworks()))
    dtype = DTYPES[FLAGS.dtype or ("bf16" if on_gpu else "f32")]
    kinds: tuple[spec.Attention, ...] = ("nsa", "dense")
    wanted = [kind for kind in kinds if FLAGS.attention in (kind, "both")]
    plain = [
        spec.model(FLAGS.model, kind, FLAGS.phi, gate)
        for kind in wanted
        for gate in (FLAGS.gate if kind == "nsa" else FLAGS.gate[:1])
    ]
    models = [settings.model_of(model) for model in plain]
    name = FLAGS.model if models == plain else f"{FLAGS.model}-changed"
    return [spec.Task(_named(name, model), model, training, dtype) for model in models]


def _named(name: str, model: spec.ModelSpec) -> str:
    """Return the name of a model, followed by the kind of its gates. Gates of the kind sigmoid
    are not named, as in older records.
    """
    gate = model.layer.gate
    return name if model.attention == "dense" or gate == "sigmoid" else f"{name}-{gate}-gates"


def _of_all(batch_size: int | None, ranks: Ranks) -> dict[str, int]:
    """Return the size of the global batch for `--batch_size`, as an argument of `_tasks`."""
    if batch_size is None:
        return {}
    layout = spread.parallel(FLAGS, _frameworks()[0], ranks)
    batch = batch_size * layout.accumulate * layout.replicas
    if ranks.rank == 0:
        print(
            f"{batch_size=} x accumulate={layout.accumulate} x {layout.replicas} replica(s): "
            f"{batch=} rows per step"
        )
    return {"batch": batch}


def _batches(settings: TrainConfig, folder: Path, batch: int, length: int) -> Batches:
    """Return the batches of the dataset that the flags name. The positions in a stream are noted in
    `folder`.
    """
    given = settings.data
    return data.load(
        FLAGS.dataset,
        batch,
        length,
        FLAGS.seed,
        size=FLAGS.corpus_bytes,
        pack=FLAGS.pack,
        tokenizer=FLAGS.tokenizer,
        column=FLAGS.text_column,
        split=given.split or "train",
        revision=given.revision,
        buffer=FLAGS.shuffle_buffer,
        notes=folder,
        cache=None if given.cache is None else Path(given.cache),
    )


def _are_packed(batches: Batches) -> bool:
    """Return whether rows have documents with boundaries."""
    return batches.train(0, slice(0, 1)).segment_ids is not None


def _variant(
    framework: str,
    task: spec.Task,
    dense: str,
    ranks: Ranks | None = None,
    packed: bool = False,
) -> variants.Variant:
    if task.model.attention == "dense":
        found = variants.dense(framework, dense, task.dtype)
    else:
        named, fallback = kernel_flags.named(), kernel_flags.on_unsupported()
        found = variants.nsa(framework, named, fallback, task, packed)
        found = variants.with_ranges(found, FLAGS.ranges, task)
    parallel = spread.parallel(FLAGS, framework, ranks or Ranks())
    can = not parallel.compiled and not parallel.safe
    if FLAGS.graph and framework == "torch" and not can:
        raise NotImplementedError(
            "--graph must not be combined with --ddp_safe, which checks each collective"
            " on the host, or with --compile"
        )
    graph = can and parallel.kind == "none" if FLAGS.graph is None else FLAGS.graph
    return dataclasses.replace(found, graph=graph and found.graph, parallel=parallel)


def runs(folder: Path, settings: TrainConfig, ranks: Ranks) -> int:
    """Train every unfinished run, and return the exit status."""
    tasks = _tasks(settings, **_of_all(FLAGS.batch_size, ranks))
    training, dtype = tasks[0].training, tasks[0].dtype
    kept = Path(FLAGS.checkpoint_dir or folder / "checkpoints")
    batches = _batches(settings, folder, training.batch, training.seq_len)
    tasks = [settings.fitted(task, batches.vocabulary) for task in tasks]
    path = folder / "train.jsonl"
    epochs = batches.epochs(training.steps)
    if epochs is not None and epochs > 1 and ranks.rank == 0:
        print(f"warning: the text is seen {epochs:.1f} times: {MEMORIZED}", file=sys.stderr)
    packed = _are_packed(batches)
    plan = [
        loop.Run(
            _variant(framework, task, FLAGS.dense, ranks, packed),
            task,
            batches,
            path,
            kept / f"{framework}-{task.model.attention}",
            FLAGS.save_every,
            FLAGS.commit,
            ranks,
            spread.watched(FLAGS),
            FLAGS.evaluate_every,
        )
        for framework in _frameworks()
        for task in tasks
    ]
    found = [each.checkpoint() for each in plan]
    if FLAGS.resume and not any(found):
        raise ValueError(f"--resume needs a checkpoint, found none in {kept}")
    if not FLAGS.resume and any(found):
        raise ValueError(f"{next(filter(None, found))} exists; give --resume or another folder")
    ended = curves.last(log.read(path), log.Summary) if path.exists() else {}
    with loop.Stop() as stop:
        for run in plan:
            last = run.checkpoint()
            if last and run.name in ended and ended[run.name].status == "ok":
                checkpoint.check_settings(last, run.settings())
                continue
            heartbeat.say(run.name)
            summary = loop.run(run, stop)
            variants.free()
            if summary.status != "ok":
                stopped = summary.status == "stopped"
                text = f"{run.name} {summary.status}: {summary.reason}"
                if stopped:
                    text += f"\nthe same command with --resume --out={folder} goes on"
                if ranks.rank == 0:
                    print(text, file=sys.stderr)
                return STOPPED if stopped else DIVERGED
    if ranks.rank:
        return 0
    tolerance = curves.TOLERANCE[dtype] if FLAGS.tolerance is None else FLAGS.tolerance
    verdicts = curves.verdicts(log.read(path), tolerance, FLAGS.margin)
    curves.plot(log.read(path), folder / "train.png", tolerance)
    _finish(folder, verdicts)
    return 0 if all(verdict.ok for verdict in verdicts) else WRONG


def throughput(folder: Path, settings: TrainConfig) -> int:
    """Measure a step of every variant at every length, and return the exit status."""
    numbers = [length.isdigit() and int(length) for length in FLAGS.lengths]
    if not numbers or not all(numbers):
        raise ValueError(f"lengths must be positive numbers, got {FLAGS.lengths}")
    path, statuses = folder / "train.jsonl", list[str]()
    with tempfile.TemporaryDirectory() as scratch:
        for framework, length in itertools.product(_frameworks(), map(int, FLAGS.lengths)):
            batch = FLAGS.batch or FLAGS.batch_size or max(1, FLAGS.tokens // length)
            batches = _batches(settings, folder, batch, length)
            packed = _are_packed(batches)
            for task in _tasks(settings, batch=batch, seq_len=length):
                task = settings.fitted(task, batches.vocabulary)
                if packed:  # records of rows that are not packed have no suffix
                    task = dataclasses.replace(task, name=f"{task.name}-documents")
                every = FLAGS.dense == "all" and task.model.attention == "dense"
                some = []
                for dense in variants.DENSE[framework] if every else (FLAGS.dense,):
                    variant = _variant(framework, task, dense, packed=packed)
                    given = task, Path(scratch), batches, FLAGS.row_seconds
                    heartbeat.say(f"{framework} {task.model.attention} {length}")
                    found = speed.measure(variant, *given)
                    variants.free()
                    log.append(path, [speed.line(variant, task, FLAGS.commit, found)])
                    some.append(found["status"])
                    shown = " ".join(variant.name.values())
                    print(f"{shown} {length}: {found['status']}", file=sys.stderr)
                # If all backends are requested, one measured backend is enough, provided that
                # none is broken.
                enough = every and "ok" in some and "error" not in some
                statuses += ["ok"] if enough else some
    _finish(folder, [])
    return exit_status.of_statuses(statuses)


def _finish(folder: Path, verdicts: Sequence[curves.Verdict]) -> None:
    """Write and print the tables, and store the lines if requested."""
    found = log.read(folder / "train.jsonl")
    shown = [*verdicts, *watched.verdicts(folder / "train.jsonl", found)]
    text = watched.markdown(found, shown)
    (folder / "train.md").write_text(text)
    print(text)
    print(f"written to {folder}")
    if FLAGS.save_records:
        device = next(x.device for x in found if isinstance(x, log.Header | log.Speed))
        log.append(records.folder_of(device) / "train.jsonl", found)


if __name__ == "__main__":
    cli.run(main, FLAGS, several=True)
