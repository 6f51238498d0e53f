"""Whole attention of every shape of the targets: parity, times and memory, at one commit.

    python -m bench.shapes
    python -m bench.shapes --only 64k --only 8k --input random
    python -m bench.shapes --only 64k --input alike
    python -m bench.shapes --kernels triton --at_once 3 --save_records

Each shape and input is a `bench.compare` of its own, forward and with backward, eager torch; all
shapes of one input come before those of the next, which find their oracles compiled.
`--at_once` of them compile and are judged side by side, then each is timed with the GPU to
itself. Parity looks at `--most_rows` queries of each sequence. The targets and what was measured
of them are in bench/records/log/calls.md, "Against the targets".

All records are in `--out`/compare.jsonl; `--save_records` appends them to
bench/records/<device>/compare.jsonl too.
"""

import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from absl import flags

from . import against
from .harness import cli, command, exit_status, problems, records, turns
from .harness.timed_problem import Problem

FLAGS = flags.FlagValues()
at = {"flag_values": FLAGS}
ONLY = flags.DEFINE_multi_string("only", [], "Shapes whose names begin so (repeatable).", **at)
INPUT = flags.DEFINE_multi_enum(
    "input", ["random", "text"], problems.KINDS, "Where arrays come from.", **at
)
PACKED = flags.DEFINE_bool(
    "packed", False, "Beside each its rows as one packed row, whose metadata is there.", **at
)
DENSE = flags.DEFINE_bool(
    "dense", False, "Dense attention beside the first input of each.", **at
)
KERNELS = flags.DEFINE_string("kernels", "mosaic", "Implementation of all branches.", **at)
ROWS = flags.DEFINE_integer("most_rows", 96, "Queries judged.", lower_bound=12, **at)
AT_ONCE = flags.DEFINE_integer("at_once", 5, "Processes side by side.", lower_bound=1, **at)
OUT = flags.DEFINE_string("out", None, "A new folder; default: bench/results/<time>.", **at)
SAVE = flags.DEFINE_bool("save_records", False, "Keep the records.", **at)
COMMIT = cli.define_commit(FLAGS)

# JAX only makes inputs and oracles here: it gives back memory that it does not use, and what it
# compiles runs once an input. The next input of a shape takes what was compiled for the one before.
ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
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
    if not problem.alike  # --input says how alike neighbours are
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
            words += [f"--input={source}", f"--kernels={KERNELS.value}", "--branch=all"]
            words += ["--mode=forward", "--mode=fwdbwd", f"--most_rows={ROWS.value}"]
            words += [f"--out={folder / row}", "--turn", "--nosave_records"]
            words += ["--packed"] if PACKED.value else []
            words += ["--branch=dense"] if DENSE.value and source == inputs[0] else []
            if COMMIT.value:
                words.append(f"--commit={COMMIT.value}")
            yield row, words


def main(argv: Sequence[str]) -> int:
    shapes = [name for name in SHAPES if name.startswith(tuple(ONLY.value) or "")]
    if not shapes:
        raise ValueError(f"--only: no such shape, known: {'; '.join(SHAPES)}")
    lines = command.new_file(OUT.value, "compare.jsonl")
    folder = lines.parent
    folder.mkdir(parents=True, exist_ok=True)
    statuses, kept = [], []
    commands = list(commands_of(shapes, INPUT.value, folder))
    with tempfile.TemporaryDirectory() as compiled:
        environment = ENVIRONMENT | {"JAX_COMPILATION_CACHE_DIR": compiled}
        for wave in itertools.batched(commands, AT_ONCE.value):
            for row, status in turns.of_names(dict(wave), folder, environment):
                statuses.append(status)
                made = folder / row / "compare.jsonl"
                done = records.read(made) if made.exists() else []
                records.append(lines, done)  # at once: what follows may be ended from outside
                kept += [(row, record) for record in done]
                if SAVE.value:
                    records.keep(done, "compare.jsonl")
    for row, record in kept:
        time = f"{record.time_ms:9.3f} ms" if record.time_ms else record.reason
        print(f"{row:32} {record.mode:8} {record.status:6} {time}")
    print(f"written to {folder}")
    return exit_status.worst(statuses)


if __name__ == "__main__":
    cli.run(main, FLAGS)
