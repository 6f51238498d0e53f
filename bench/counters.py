"""Measures hardware counters of each Mosaic kernel of a call, forward and backward, with Nsight
Compute.

    python -m bench.counters --only "24k" --out counters.jsonl

`ncu` is CUDA's profiler. `ncu` needs the driver's permission to read the counters. `ncu` runs each
launch several times, with empty caches and without fixed clocks, so that times are longer than in
`bench.call_kernels`. `bench.call_kernels` has the same problems and columns. Several launches of a
kernel in one column make one line. The line has the sum of their times, and the means of these
values weighted by time:

- The share of cycles in which the tensor pipe is busy.
- The throughput of L2 as a share of its peak, the share of hits in L2, and the HBM throughput.
- The two main reasons why warps wait, in warps per issued instruction, and the share of used issue
  slots.

The lines of `--out` have the format of `bench/records/<device>/kernel_log/counters.jsonl`. A Hopper
GPU is needed.
"""

import csv
import itertools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nsa_torch import plans
from nsa_torch.torch_ops import TorchOps

from . import call_kernels, run
from .harness import cli, exit_status, process, records
from .harness.records import Record
from .harness.timed_problem import Problem, torch_calls

FLAGS = cli.define(
    only=cli.ONLY,
    under_ncu=(str, "Internal: run this row, in a process that ncu observes."),
)
cli.define_lines(FLAGS)

NCU = (
    *(
        "ncu",
        "--target-processes=application-only",
        "--csv",
        "--page=raw",
        "--print-units=base",
    ),
    *("--clock-control=none", "--profile-from-start=off"),
)
OURS = "_mosaic_gpu_kernel"  # the end of the name of each Mosaic kernel's function
TIME, TENSOR, L2, HITS, HBM, ISSUED = (
    "gpu__time_duration.sum",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "lts__t_sector_hit_rate.pct",
    "dram__bytes.sum.per_second",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
)
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = (
    *("barrier", "branch_resolving", "drain", "gmma", "lg_throttle", "long_scoreboard"),
    *("math_pipe_throttle", "membar", "mio_throttle", "no_instruction", "short_scoreboard"),
    *("sleeping", "wait"),
)
METRICS = (TIME, TENSOR, L2, HITS, HBM, ISSUED, *map(STALL.format, STALLS))


class Named(TorchOps):
    """Print the name and the column of each kernel that runs."""

    def run(self, kernel, *tensors):
        print(f"{kernel.name}\t{call_kernels.column(kernel)}")
        return super().run(kernel, *tensors)


def watched(problem: Problem) -> None:
    """Run one call with gradients between start and stop of the profiler, in the process that
    ncu observes. Print a line per kernel."""
    call = torch_calls(problem)[0]["fwdbwd"]
    with plans.unplanned(TorchOps()):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    with plans.unplanned(Named()):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def lines(problem: str, printed: str, written: str, commit: str | None) -> Iterator[Record]:
    """Yield the records for `--out`, from the output of `watched` and the CSV output of ncu.

    Args:
      problem: The name of the problem.
      printed: The output of `watched`.
      written: The log of ncu.
      commit: The commit that was measured.

    Raises:
      ValueError: The launches that ncu reports differ from the launches that ran.
    """
    launched = [line.split("\t") for line in printed.splitlines() if "\t" in line]
    # Skip the messages of ncu, and the line with the units.
    table = (line for line in written.splitlines() if line.startswith('"'))
    found = [*csv.DictReader(table)][1:]
    ran = [f"{name}{OURS}" for name, _ in launched]
    if (seen := [row["Kernel Name"].partition("(")[0] for row in found]) != ran:
        raise ValueError(f"ncu must report the launches that ran, {ran}, got {seen}")
    both = sorted(zip(launched, found, strict=True), key=lambda pair: pair[0])
    for (name, column), pairs in itertools.groupby(both, key=lambda pair: pair[0]):
        rows = [row for _, row in pairs]
        times = [number(row, TIME) for row in rows]

        def mean(metric, rows=rows, times=times):
            weighted = (t * number(row, metric) for t, row in zip(times, rows, strict=True))
            return sum(weighted) / sum(times)

        waits = sorted(((mean(STALL.format(x)), x) for x in STALLS), reverse=True)[:2]
        said = ", ".join(f"{reason} {many:.1f}" for many, reason in waits)
        count = f" ({len(rows)} launches)" if len(rows) > 1 else ""
        about = {
            "kernel": f"{problem}: {name}, {column}{count}",
            "tensor_pipe_percent": round(mean(TENSOR)),
            "l2_traffic": f"{mean(L2):.0f} % busy, {mean(HITS):.0f} % hits; "
            f"HBM {mean(HBM) / 1e12:.1f} TB/s",
            "warps_wait_for": f"{said}; issue slots {mean(ISSUED):.0f} %",
        }
        ms = float(f"{sum(times) / 1e6:.3g}")
        yield Record(bench="counters", time_ms=ms, extra=about, commit=commit and commit[:7])


def number(row: Mapping[str, str], metric: str) -> float:
    """Return the value of a counter, or NaN if ncu has no value for it."""
    text = row[metric].replace(",", "")
    return float(text) if text and text != "n/a" else float("nan")


def measure(problem: Problem, commit: str | None) -> Iterator[Record]:
    """Yield a record per kernel and column.

    Raises:
      ChildProcessError: ncu failed. The error message has the output of ncu.
    """
    # Kernels are built here, since a build would replace ncu's driver in the observed process.
    call_kernels.prepared(problem)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        words = [*NCU, f"--kernel-name=regex:{OURS}", f"--log-file={log}"]
        words += [f"--metrics={','.join(METRICS)}", sys.executable, "-m"]
        words += [process.module("bench.counters"), f"--under_ncu={problem.name}"]
        how: dict[str, Any] = {"capture_output": True, "text": True}
        done = subprocess.run(words, env=process.environment({}), **how)
        said = log.read_text() if log.exists() else ""
    if done.returncode:
        raise ChildProcessError(f"ncu: exit status {done.returncode}\n{said}{done.stderr}")
    yield from lines(problem.name, done.stdout, said, commit)


def main(argv: Sequence[str]) -> int:
    if not torch.cuda.is_available():
        raise NotImplementedError("this command needs a Hopper GPU")
    if FLAGS.under_ncu:
        (row,) = (p for p in run.EAGER if p.name == FLAGS.under_ncu)
        watched(row)
        return exit_status.OK
    problems = [*run.chosen(FLAGS, run.EAGER)]
    if not shutil.which("ncu"):
        raise NotImplementedError("ncu of the CUDA toolkit must be on PATH")
    commit = records.environment(FLAGS.commit)["commit"]
    for problem in problems:
        for found in measure(problem, commit):
            print(*found.extra.values(), f"{found.time_ms:g} ms", sep="; ", flush=True)
            if FLAGS.out:
                records.append(FLAGS.out, [found])
    return exit_status.OK


if __name__ == "__main__":
    cli.run(main, FLAGS)
