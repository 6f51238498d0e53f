"""Measures attention of all branches for every shape that has a target. The measurements are
parity, times and memory.

    python -m bench.shapes
    python -m bench.shapes --only 64k --only 8k --input random
    python -m bench.shapes --only 64k --input alike
    python -m bench.shapes --kernels triton --at_once 3 --save_records

Each combination of shape and input is a separate run of `bench.compare`, forward and with backward,
in eager torch. All shapes are measured with one input before the next input, so that the second
input of a shape finds the compiled oracles of the first input. Up to `--at_once` processes of
`bench.compare` compile and check parity in parallel. After the compilation, each process is timed
with exclusive use of the GPU. Parity is checked for `--most_rows` queries of each sequence. The
targets and their measurements are in bench/records/log/calls.md, "Against the targets".

All records are in `--out`/compare.jsonl. `--save_records` also appends these records to
bench/records/<device>/compare.jsonl.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from . import run
from .harness import cli, command, exit_status, problems, records, turns
from .harness.timed_problem import Problem

FLAGS = cli.define(
    only=((), "Only shapes whose names begin with this text (repeatable)."),
    input=(("random", "text"), "Sources of the arrays.", problems.KINDS),
    packed=(
        False,
        "Also measure the rows of each shape as one packed row, with metadata made in advance.",
    ),
    dense=(False, "Also measure dense attention, for the first input of each shape."),
    kernels=("mosaic", "Implementation of all branches."),
    most_rows=(96, "Number of queries per sequence that are judged.", 12),
    at_once=(5, "Number of processes that run at the same time."),
    out=(str, "Folder for the results, which must not exist; default: bench/results/<time>."),
    save_records=(False, "Also append the records to bench/records/<device>/compare.jsonl."),
)

# JAX only computes inputs and oracles here, and runs each program once per input. Tuning is
# therefore not worthwhile. The next input of a shape finds the compiled programs in the cache.
ENVIRONMENT = turns.ALONE | {
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
}


# The shapes by name. The names are also names of files.
SHAPES: Mapping[str, Problem] = {
    p.name.replace("/", " and "): p
    for p in run.EAGER
    if not p.alike  # `--input` determines the similarity of adjacent queries
}


def settings(p: Problem) -> dict[str, dict[str, int]]:
    """Return the settings of `bench.compare` that override configs/base.yaml."""
    model = {"n_heads": p.H, "n_kv_groups": p.Hkv, "d_k": p.D, "d_v": p.Dv}
    return {"model": model, "runtime": {"seq_len": p.T, "batch": p.B}}


def words_of(name: str, source: str, folder: Path) -> list[str]:
    """Return the arguments of a `bench.compare` that writes into a folder named after its row.
    The settings of that command are written to a file in `folder`.
    """
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(settings(SHAPES[name])))
    words = ["bench.compare", "--framework=torch", f"--config={path}", f"--input={source}"]
    words += [f"--kernels={FLAGS.kernels}", "--branch=all", "--mode=forward", "--mode=fwdbwd"]
    words += [f"--most_rows={FLAGS.most_rows}", f"--out={folder / f'{name}, {source}'}"]
    words += ["--turn", "--nosave_records"] + ["--packed"] * FLAGS.packed
    words += ["--branch=dense"] * (FLAGS.dense and source == FLAGS.input[0])
    return words + ([f"--commit={FLAGS.commit}"] if FLAGS.commit else [])


def main(argv: Sequence[str]) -> int:
    shapes = cli.chosen(FLAGS.only, SHAPES)
    folder, statuses, kept = command.new_folder(FLAGS.out), [], []
    folder.mkdir(parents=True, exist_ok=True)
    commands = {
        f"{name}, {source}": words_of(name, source, folder)
        for source in FLAGS.input
        for name in shapes
    }
    with tempfile.TemporaryDirectory() as compiled:
        environment = ENVIRONMENT | {"JAX_COMPILATION_CACHE_DIR": compiled}
        found = turns.measured(
            commands, folder / "compare.jsonl", environment, at_once=FLAGS.at_once
        )
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
