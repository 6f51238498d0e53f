"""Runs every test that needs one GPU (or two), and reports the age of the last run.

    python -m bench.gpu_tests --save_records
    python -m bench.gpu_tests --part 1/2
    python -m bench.gpu_tests --gpus 2
    python -m bench.gpu_tests --age

Tests run in one process per core, as far as GPU memory allows. Each process has its own cores, and
loads machine code that another process has built. The outcome of each test is printed when it
ends, so that a run that is cut off has named its failed tests. `--gpus 2` runs only the tests that
need two GPUs, in one process. A skipped test counts as in `bench.suite`.

`--save_records` appends a line with commit, outcomes, seconds and versions to
bench/records/<device>/kernel_log/gpu_tests.jsonl. Commit gpu_tests.jsonl together with a change of
kernels. `--age` runs no test. `--age` prints a warning unless all tests on one GPU were recorded
and passed since the last change of the kernels or the host side.
"""

import datetime
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from . import suite
from .harness import cli, command, exit_status, records

FLAGS = cli.define(
    gpus=("1", "Number of GPUs that the tests need.", ("1", "2")),
    part=(str, "Part of the tests as K/N, the Kth of N parts."),
    processes=(
        int,
        "Number of parallel processes; default: one per core, and at most one per 7 GiB of GPU "
        "memory.",
    ),
    out=(str, "New folder for the results; default: bench/results/<time>."),
    save_records=(False, "Also append the record to bench/records/<device>/kernel_log/."),
    age=(False, "Only report the age of the newest record."),
)

NAME = "gpu_tests.jsonl"
KEPT = Path("kernel_log") / NAME  # the path in the folder of a device
DATE = "%Y-%m-%d %H:%M"
# Folders with the code that the tests run: kernels and the host side.
FOLDERS = ("kernels_pallas", "interop", "nsa_core", "nsa_jax", "nsa_torch")
# GPU memory of one process: the contexts of both frameworks and the reserves of their allocators.
# An H200, with 5.8 GiB for each of 24 processes, once had too little memory.
PROCESS_BYTES = 7 << 30


def pytest_arguments() -> list[str]:
    """Return the arguments of pytest: the tests to run, and the number of processes."""
    if FLAGS.gpus == "2":
        return ["-m", "two_gpus", "-v"]
    room = torch.cuda.get_device_properties(0).total_memory // PROCESS_BYTES
    processes = FLAGS.processes or min(len(os.sched_getaffinity(0)), max(1, room))
    which = ["-m", "gpu and not two_gpus", *([f"--part={FLAGS.part}"] if FLAGS.part else [])]
    return [*which, "-v", "-n", str(processes), "--dist", "worksteal", "-p", "no:benchmark"]


def whole(parts: set[str | None]) -> bool:
    """Return whether the runs together contain all tests."""
    counts = {int(part.split("/")[1]) for part in parts if part}
    return None in parts or any(parts >= {f"{k}/{n}" for k in range(1, n + 1)} for n in counts)


def age() -> str:
    """Return whether all tests ran on one GPU since the newest change, with the dates of the run
    and of the change.

    Raises:
      NotImplementedError: git does not report the time of the newest change.
    """
    changed = records.output(
        "git", "log", "-1", "--format=%cI", "--", *(f":/{x}" for x in FOLDERS)
    )
    if not changed:
        raise NotImplementedError(f"git must report when {', '.join(FOLDERS)} were changed")
    change = datetime.datetime.fromisoformat(changed)
    runs = [
        line | {"time": datetime.datetime.fromisoformat(line["time"])}
        for path in sorted(records.FOLDER.glob(f"*/{KEPT}"))
        for line in records.flat_lines(path)
        if line["gpus"] == 1
    ]
    since = [run for run in runs if run["time"] >= change]
    failed = sum(len(run["failed"]) for run in since)
    newest = max((f"{run['time']:{DATE}}" for run in runs), default="never")
    dates = f"newest change {change.astimezone(datetime.UTC):{DATE}}, GPU tests {newest} (UTC)"
    if not whole({run["part"] for run in since}):
        return f"warning: {dates}: run `make test-gpu` and commit its record"
    return f"warning: {dates}: {failed} failed" if failed else f"ok: {dates}"


def main(argv: Sequence[str]) -> int:
    if FLAGS.age:
        cli.refuse_beside(
            FLAGS["age"],
            (FLAGS[x] for x in ("gpus", "part", "processes", "out", "save_records")),
        )
        print(age())
        return exit_status.OK
    if FLAGS.gpus == "2":
        cli.refuse_beside(FLAGS["gpus"], (FLAGS["part"], FLAGS["processes"]))
    if torch.cuda.device_count() < int(FLAGS.gpus):
        raise NotImplementedError(
            f"--gpus must be at most the number of GPUs, {torch.cuda.device_count()}, got "
            f"{FLAGS.gpus}"
        )
    folder = command.new_folder(FLAGS.out)
    device = torch.cuda.get_device_name()
    start = time.monotonic()
    status, found = suite.run(folder, pytest_arguments())
    if found is None:
        return exit_status.WRONG
    line = {
        "device": device,
        "gpus": int(FLAGS.gpus),
        "part": FLAGS.part,
        "passed": found.passed,
        "failed": found.failures,
        "skipped": found.allowed | found.unknown,
        "seconds": round(time.monotonic() - start),
    }
    made = [records.record("gpu_tests", FLAGS.commit, **line)]
    records.append(folder / NAME, made)
    if FLAGS.save_records:
        records.keep(made, str(KEPT))
    print(f"{line['seconds']} s, written to {folder}")
    return exit_status.OK if status == 0 and found.ok else exit_status.WRONG


if __name__ == "__main__":
    cli.run(main, FLAGS)
