"""Whole attention of every shape of the targets: parity, times and memory, at one commit.

    python -m bench.shapes
    python -m bench.shapes --only 64k --only 8k --input random
    python -m bench.shapes --kernels triton --at_once 3 --save_records

Each shape and input is a `bench.compare` of its own, forward and with backward, eager torch.
`--at_once` of them compile and are judged side by side, then each is timed with the GPU to
itself. Parity looks at `--most_rows` queries of each sequence. The targets and what was measured
of them are in docs/kernels.md, "Against the targets".

All records are in `--out`/compare.jsonl; `--save_records` appends them to
bench/records/<device>/compare.jsonl too.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml
from absl import flags

from bench.harness import cli, command, exit_status, records, turns

INPUTS = "random", "text"

FLAGS = flags.FlagValues()
at = {"flag_values": FLAGS}
ONLY = flags.DEFINE_multi_string("only", [], "Shapes whose names begin so (repeatable).", **at)
INPUT = flags.DEFINE_multi_enum("input", INPUTS, INPUTS, "Where arrays come from.", **at)
KERNELS = flags.DEFINE_string("kernels", "mosaic", "Implementation of all branches.", **at)
ROWS = flags.DEFINE_integer("most_rows", 96, "Queries judged.", lower_bound=12, **at)
AT_ONCE = flags.DEFINE_integer("at_once", 5, "Processes side by side.", lower_bound=1, **at)
OUT = flags.DEFINE_string("out", None, "A new folder; default: bench/results/<time>.", **at)
SAVE = flags.DEFINE_bool("save_records", False, "Keep the records.", **at)
COMMIT = flags.DEFINE_string("commit", None, "Of this tree, where it has no .git.", **at)

# JAX only makes inputs and oracles here: it gives back memory that it does not use, and what it
# compiles runs once.
ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",
}
K = 1024


def _shape(
    length: int, heads: int, kv_heads: int, width: int, value_width: int, batch: int = 1
):
    """Settings of `bench.compare`, on top of configs/base.yaml."""
    model = {"n_heads": heads, "n_kv_groups": kv_heads, "d_k": width, "d_v": value_width}
    return {"model": model, "runtime": {"seq_len": length, "batch": batch}}


SHAPES: Mapping[str, Mapping] = {
    "64k": _shape(64 * K, 64, 4, 128, 128),
    "64k, 192 and 128": _shape(64 * K, 64, 4, 192, 128),
    "32k": _shape(32 * K, 64, 4, 128, 128),
    "8k": _shape(8 * K, 64, 4, 128, 128),
    "32k, G=4": _shape(32 * K, 32, 8, 128, 128),
    "32k, G=8": _shape(32 * K, 64, 8, 128, 128),
    "16k, G=10": _shape(16 * K, 40, 4, 128, 128),
    "16k, G=1": _shape(16 * K, 16, 16, 128, 128),
    "24k, G=6, D=64": _shape(24 * K, 12, 2, 64, 64),
    "8 x 2k, G=6, D=64": _shape(2 * K, 12, 2, 64, 64, batch=8),
}


def commands_of(
    shapes: Sequence[str], inputs: Sequence[str], folder: Path
) -> Iterator[tuple[str, list[str]]]:
    """Name and words of each `bench.compare`, which writes into the folder of its name; files of
    their settings are in `folder`.
    """
    for name in shapes:
        settings = folder / f"{name}.yaml"
        settings.write_text(yaml.safe_dump(dict(SHAPES[name])))
        for source in inputs:
            row = f"{name}, {source}"
            words = ["bench.compare", "--framework=torch", f"--config={settings}"]
            words += [f"--input={source}", f"--kernels={KERNELS.value}", "--branch=all"]
            words += ["--mode=forward", "--mode=fwdbwd", f"--most_rows={ROWS.value}"]
            words += [f"--out={folder / row}", "--turn", "--nosave_records"]
            if COMMIT.value:
                words.append(f"--commit={COMMIT.value}")
            yield row, words


def main(argv: Sequence[str]) -> int:
    shapes = [name for name in SHAPES if name.startswith(tuple(ONLY.value) or "")]
    if not shapes:
        raise ValueError(f"--only: no such shape, known: {'; '.join(SHAPES)}")
    folder = command.folder(OUT.value)
    lines = folder / "compare.jsonl"
    if lines.exists():
        raise ValueError(f"{lines} exists; --out must name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    statuses, kept = [], []
    commands = list(commands_of(shapes, INPUT.value, folder))
    for wave in itertools.batched(commands, AT_ONCE.value):
        for row, status in turns.of_names(dict(wave), folder, ENVIRONMENT):
            statuses.append(exit_status.WRONG if status < 0 else status)
            made = folder / row / "compare.jsonl"
            done = records.read(made) if made.exists() else []
            records.append(lines, done)  # at once: what follows may be ended from outside
            kept += [(row, record) for record in done]
            if SAVE.value:
                for device, of_device in itertools.groupby(done, lambda record: record.device):
                    path = records.folder_of(device) / "compare.jsonl"
                    records.append(path, list(of_device))
    for row, record in kept:
        time = f"{record.time_ms:9.3f} ms" if record.time_ms else record.reason
        print(f"{row:32} {record.mode:8} {record.status:6} {time}")
    print(f"written to {folder}")
    return max(statuses)


if __name__ == "__main__":
    cli.run(main, FLAGS)
