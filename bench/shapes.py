"""Whole attention of every shape of the targets: parity, times and memory, at one commit.

    python -m bench.shapes
    python -m bench.shapes --only 64k --only 8k --input random
    python -m bench.shapes --only 64k --input alike
    python -m bench.shapes --kernels triton --at_once 3 --save_records

Each shape and input is a `bench.compare` of its own, forward and with backward, eager torch; all
shapes of one input come before those of the next, which find their oracles compiled.
`--at_once` of them compile and are judged side by side, then each is timed with the GPU to
itself. Parity looks at `--most_rows` queries of each sequence. The targets and their
measurements are in bench/records/log/calls.md, "Against the targets".

All records are in `--out`/compare.jsonl; `--save_records` appends them to
bench/records/<device>/compare.jsonl too.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from . import against
from .harness import cli, command, exit_status, problems, records, turns
from .harness.timed_problem import Problem

FLAGS = cli.define(
    only=((), "Shapes whose names begin so (repeatable)."),
    input=(("random", "text"), "Where arrays come from.", problems.KINDS),
    packed=(False, "Beside each its rows as one packed row, whose metadata is there."),
    dense=(False, "Dense attention beside the first input of each."),
    kernels=("mosaic", "Implementation of all branches."),
    most_rows=(96, "Queries judged.", 12),
    at_once=(5, "Processes side by side."),
    out=(str, "A new folder; default: bench/results/<time>."),
    save_records=(False, "Keep the records."),
)

# JAX only makes inputs and oracles here, and its programs run once per input. The next input of a
# shape uses the programs of the one before.
ENVIRONMENT = turns.ALONE | {
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
}


def _settings(problem: Problem) -> dict[str, Any]:
    """Of `bench.compare`, on top of configs/base.yaml."""
    p = problem
    model = {"n_heads": p.H, "n_kv_groups": p.Hkv, "d_k": p.D, "d_v": p.Dv}
    return {"model": model, "runtime": {"seq_len": p.T, "batch": p.B}}


# Names are those of files too.
SHAPES: Mapping[str, Mapping[str, Any]] = {
    problem.name.replace("/", " and "): _settings(problem)
    for problem in against.EAGER
    if not problem.alike  # --input decides how alike neighbours are
}


def commands_of(
    shapes: Sequence[str], inputs: Sequence[str], folder: Path
) -> Iterator[tuple[str, list[str]]]:
    """Name and words of each `bench.compare`, which writes into the folder of its name; files of
    their settings are in `folder`.
    """
    for source in inputs:
        for name in shapes:
            settings = folder / f"{name}.yaml"
            settings.write_text(yaml.safe_dump(dict(SHAPES[name])))
            row = f"{name}, {source}"
            words = ["bench.compare", "--framework=torch", f"--config={settings}"]
            words += [f"--input={source}", f"--kernels={FLAGS.kernels}", "--branch=all"]
            words += ["--mode=forward", "--mode=fwdbwd", f"--most_rows={FLAGS.most_rows}"]
            words += [f"--out={folder / row}", "--turn", "--nosave_records"]
            words += ["--packed"] if FLAGS.packed else []
            words += ["--branch=dense"] if FLAGS.dense and source == inputs[0] else []
            if FLAGS.commit:
                words.append(f"--commit={FLAGS.commit}")
            yield row, words


def main(argv: Sequence[str]) -> int:
    shapes = cli.chosen(FLAGS.only, SHAPES)
    lines = command.new_file(FLAGS.out, "compare.jsonl")
    folder = lines.parent
    folder.mkdir(parents=True, exist_ok=True)
    statuses, kept = [], []
    commands = dict(commands_of(shapes, FLAGS.input, folder))
    with tempfile.TemporaryDirectory() as compiled:
        environment = ENVIRONMENT | {"JAX_COMPILATION_CACHE_DIR": compiled}
        found = turns.measured(commands, lines, environment, at_once=FLAGS.at_once)
        for row, status, done in found:
            statuses.append(status)
            kept += [(row, record) for record in done]
            if FLAGS.save_records:
                records.keep(done, "compare.jsonl")
    for row, record in kept:
        time = f"{record.time_ms:9.3f} ms" if record.time_ms else record.reason
        print(f"{row:32} {record.mode:8} {record.status:6} {time}")
    print(f"written to {folder}")
    return exit_status.worst(statuses)


if __name__ == "__main__":
    cli.run(main, FLAGS)
