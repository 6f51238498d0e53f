"""Times each Mosaic kernel of a call on this GPU, forward and backward.

    python -m bench.call_kernels
    python -m bench.call_kernels --only 64k --only 8k --out variants.jsonl

The steps of `nsa_torch.attention` with gradients run one by one, as in a first call. Each kernel
runs between two CUDA events. The GPU is kept busy until the host has queued all kernels. Times are
medians over `--rounds` in milliseconds. The caches are not flushed, so that L2 contains data of the
previous kernel. A column is a branch in one pass. The column `rest` has the kernels of no branch,
such as merges and lists. The column `whole` has the time of the whole call, including torch's
operators between kernels. A Hopper GPU is needed. The shapes are the shapes of `bench.against` that
run in eager torch.

The lines of `--out` have the format of `bench/records/<device>/kernel_log/variants.jsonl`.
"""

import collections
import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import nsa_torch
from kernels_pallas.kernel import Kernel
from nsa_torch import plans
from nsa_torch.torch_ops import TorchOps

from . import run
from .harness import cli, exit_status
from .harness.timed_problem import Problem, torch_calls

FLAGS = cli.define(
    only=cli.ONLY,
    rounds=(5, "Number of timed calls."),
)
cli.define_lines(FLAGS)

REST, WHOLE = "rest", "whole"
OF_BRANCH = {
    "interval_forward": "{branch}",
    "best_blocks": "scores",
    "selected_forward": "selected",
    "gathered_forward": "selected",
    "gathered_merge": "selected",
    "interval_dq": "dq: {branch}",
    "selected_dq": "dq: selected",
    "gathered_dq": "dq: selected",
    "gathered_merge_dq": "dq: selected",
    "stored_ds_dq": "dq: selected",
    "dkv_partials": "dkv: {branch}",
}
COLUMNS = (
    *("compressed", "scores", "selected", "sliding"),
    *("dq: compressed", "dq: selected", "dq: sliding", "dq: compressed and sliding"),
    *("dkv: compressed", "dkv: selected", "dkv: sliding"),
    *(REST, WHOLE),
)
BUSY_CYCLES = 40_000_000  # 20 ms; this is longer than the host needs to queue a call


def column(kernel: Kernel) -> str:
    """Return the column of the table for a kernel. The keys of an interval kernel determine its
    branch. The keys are gathered blocks (selected), two sets (compressed and sliding), fewer than
    the queries (compressed), or all tokens (sliding).
    """
    spec: Any = kernel.spec
    name = OF_BRANCH.get(kernel.name, REST)
    if "{" not in name:
        return name
    if getattr(spec, "gathered", False):
        return name.format(branch="selected")
    if getattr(spec, "second_keys", None) is not None:
        return name.format(branch="compressed and sliding")
    return name.format(branch="compressed" if spec.S < spec.T else "sliding")


class Timed(TorchOps):
    """An `ArrayOps` that runs each kernel between two CUDA events."""

    def __init__(self):
        self.spans = []

    def run(self, kernel, *tensors):
        with self.timed(column(kernel)):
            return super().run(kernel, *tensors)

    @contextlib.contextmanager
    def timed(self, name: str):
        """Return a context in which the time of kernels is added to the column `name`."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self.spans.append((name, start, end))

    def milliseconds(self) -> dict[str, float]:
        """Wait for the GPU. Return the time of the kernels per column."""
        torch.cuda.synchronize()
        found: dict[str, float] = collections.defaultdict(float)
        for name, start, end in self.spans:
            found[name] += start.elapsed_time(end)
        return found


def prepared(problem: Problem):
    """Prepare a call with gradients, and build its kernels in parallel."""
    nsa_torch.prepare(
        heads=problem.H,
        kv_heads=problem.Hkv,
        key_width=problem.D,
        value_width=problem.Dv,
        lengths=[problem.T],
    )
    return torch_calls(problem)[0]["fwdbwd"]


def measure(problem: Problem) -> None:
    """Print and record the milliseconds of a problem by column."""
    call, found = prepared(problem), []
    for _ in range(1 + FLAGS.rounds):  # the first round does not count
        ops = Timed()
        torch.cuda._sleep(BUSY_CYCLES)
        with plans.unplanned(ops), ops.timed(WHOLE):
            call()
        found.append(ops.milliseconds())
    medians = {
        name: float(np.median([each[name] for each in found[1:]]))
        for name in COLUMNS
        if name in found[0]
    }
    run.variants(FLAGS, "call_kernels", problem.name, medians)


def main(argv: Sequence[str]) -> int:
    for problem in run.chosen(FLAGS, run.EAGER, "ms"):
        measure(problem)
    return exit_status.OK


if __name__ == "__main__":
    cli.run(main, FLAGS)
