"""Compares training steps that read the selection as blocks or as key ranges, by length and
mode.

    python -m bench.showcase                                 # on a GPU: S 512, 1024, 2048
    python -m bench.showcase --modes none --config tiny --lengths 64 --set runtime.kernels=sdpa

Each row is a process of `python -m bench.train --throughput` with
`configs/train/runbook_s<S>.yaml` and one mode of `--ranges`:

- `none`: the kernel reads the selected keys by blocks.
- `v1`: the kernel reads ranges of keys that the host computes.
- `v2`: the kernel reads ranges of keys that the device computes.
- `adaptive`: `v1` for short rows, and `v2` for long rows.

The folder of the results has the report (`showcase.md`) and the lines (`showcase.jsonl`). For each
row the folder also has the log of the process, `run_s<S>_<mode>.log`, and the samples of
nvidia-smi, `gpu_s<S>_<mode>.csv`. A row that could not be measured states the reason.
"""

import contextlib
import dataclasses
import itertools
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import tables
from .harness import cli, command, exit_status, heartbeat, markdown, process, records
from .harness.records import Values
from .lm import config_file, log, variants
from .reports import render

FLAGS = cli.define(
    lengths=(["512", "1024", "2048"], "Numbers of tokens of a row."),
    modes=(list(variants.RANGES), "Values of --ranges of bench.train."),
    config=(str, "Value of --config of bench.train; default: runbook_s<length>."),
    set=((), "Value of --set of bench.train (repeatable)."),
    row_seconds=(10.0, "Seconds spent on timing a row."),
    timeout_s=(600.0, "Time limit for the process of a row, in seconds.", 1),
    out=(str, "Folder for the results, which must be empty; default: bench/results/<time>."),
)
QUERY = "timestamp,utilization.gpu,memory.used"
COLUMNS = tuple(tables.KINDS["ranges"]["cells"])


def main(argv: Sequence[str]) -> int:
    lengths = command.integers("lengths", FLAGS.lengths, ())
    for mode in FLAGS.modes:
        if mode not in variants.RANGES:
            raise ValueError(f"modes must be in {variants.RANGES}, got {mode!r}")
    for length in lengths:  # this reports an invalid file before anything runs
        config_file.read(_config(length), FLAGS.set)
    folder = command.new_folder(FLAGS.out)
    folder.mkdir(parents=True, exist_ok=True)
    rows, speeds = list[Values](), list[log.Speed]()
    for length, mode in itertools.product(lengths, FLAGS.modes):
        heartbeat.say(f"S={length} {mode}")
        row, found = measure(folder, length, mode)
        rows.append(row)
        speeds += found
        said = cells_of(row)
        print(f"S={length} {mode}: {said['status']} {said['ms']} ms {said['note']}")
    log.append(folder / "showcase.jsonl", speeds)
    text = report(rows, speeds, folder)
    (folder / "showcase.md").write_text(text)
    print(f"\n{text}\nwritten to {folder}")
    statuses = [row["status"] for row in rows]
    if lost := len(rows) - statuses.count("ok"):
        print(f"{lost} of {len(rows)} rows were not measured", file=sys.stderr)
    return exit_status.of_statuses(statuses)


def _config(length: int) -> str:
    return FLAGS.config or f"runbook_s{length}"


def measure(folder: Path, length: int, mode: str) -> tuple[Values, list[log.Speed]]:
    """Measure one row in a separate process. Return the values of the row, with a status and the
    reason of a failure, and the measurement, if there is one.
    """
    name, row = f"s{length}_{mode}", {"length": length, "mode": mode}
    out = folder / name
    words = ["bench.train", "--throughput", "--framework=torch", "--attention=nsa"]
    words += [
        f"--config={config_file.path_of(_config(length)).resolve()}",
        f"--lengths={length}",
        f"--ranges={mode}",
    ]
    words += [f"--row_seconds={FLAGS.row_seconds}", f"--out={out.resolve()}"]
    words += [f"--set={change}" for change in FLAGS.set]
    words += [f"--commit={FLAGS.commit}"] if FLAGS.commit else []
    with watched(folder / f"gpu_{name}.csv") as samples:
        result = process.run(f"run_{name}", words, folder, FLAGS.timeout_s, False)
    path = out / "train.jsonl"
    lines = log.read(path) if path.exists() else []
    if found := [x for x in lines if isinstance(x, log.Speed)][:1]:
        row |= dataclasses.asdict(found[0]) | {"used_percent": used(samples, FLAGS.row_seconds)}
        return row | ({"fa2": fa2(found[0])} if row["status"] == "ok" else {}), found
    said = (folder / f"run_{name}.log").read_text(errors="replace").splitlines()
    errors = [line for line in said if line.startswith("error: ")]
    refused = result.reason == f"exit status {exit_status.NOT_MEASURED}"
    reason = errors[-1][7:] if errors else result.reason or "no row"
    return row | {"status": "unsupported" if refused else "error", "reason": reason}, []


@contextlib.contextmanager
def watched(path: Path) -> Iterator[Path]:
    """Return a context in which nvidia-smi appends one line per second about the first visible GPU
    to `path`. Without nvidia-smi, nothing is written.
    """
    if shutil.which("nvidia-smi") is None:
        yield path
        return
    visible = process.environment({}).get("CUDA_VISIBLE_DEVICES", "")
    device = visible.split(",")[0] or "0"
    words = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,nounits", "-l", "1"]
    words += ["-i", device]
    with path.open("wb") as output:
        child = subprocess.Popen(words, stdout=output, stderr=subprocess.DEVNULL)
        try:
            yield path
        finally:
            child.terminate()
            child.wait()


def used(path: Path, seconds: float) -> float | None:
    """Return the mean utilization of the GPU in percent, or None if there are no samples. The
    mean is over the last `seconds` samples before the last two. The process of a row is timed
    during these last samples.
    """
    if not path.exists():
        return None
    found = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError, IndexError):
            found.append(float(line.split(",")[1]))  # one sample per second
    last = found[:-2][-max(1, round(seconds)) :]
    return sum(last) / len(last) if last else None


def fa2(speed: log.Speed) -> str:
    """Return a text about the branches that ran on FA-2: "yes" for all three branches, "no" for
    none, otherwise the names of these branches.

    The label of a line names the kernels that ran: one kernel for all steps, or one per step.
    """
    kernels = speed.implementation.partition(" ")[0].split("/")
    steps = ("compressed", "scores", "selected", "sliding")
    each = zip(steps, kernels * 4 if len(kernels) == 1 else kernels, strict=False)
    by = [step for step, kernel in each if kernel == "fa2" and step != "scores"]
    return "yes" if len(by) == 3 else ", ".join(by) or "no"


def cells_of(row: Values) -> dict[str, str]:
    """Return the cells of a line of the table."""
    return tables.rows("ranges", [row])[0]


def report(rows: Sequence[Values], speeds: Sequence[log.Speed], folder: Path) -> str:
    """Return `showcase.md`."""
    speed = next(iter(speeds), None)
    versions = speed.versions if speed else records.environment(FLAGS.commit)["versions"]
    times: dict[int, dict[str, float]] = {row["length"]: {} for row in rows}
    for row in rows:
        if row["status"] == "ok" and row["time_ms"]:
            times[row["length"]][row["mode"]] = row["time_ms"]
    return render.filled(
        "showcase.md.jinja",
        speed=speed,
        device=speed.device if speed else "not known",
        versions=dict.fromkeys(("torch", "cuda", "driver")) | versions,
        commit=(speed and speed.commit) or FLAGS.commit or "unknown",
        table=markdown.table(COLUMNS, (cells_of(row).values() for row in rows)),
        times=times,
        files=sorted(path.name for path in folder.iterdir() if path.is_file()),
    )


if __name__ == "__main__":
    cli.run(main, FLAGS)
