"""What each Mosaic kernel of a call takes, forward and backward, on this GPU.

    python -m bench.call_kernels
    python -m bench.call_kernels --only 64k --only 8k --out variants.jsonl

The steps of `nsa_torch.attention` with gradients run as in a first call, each kernel between two
CUDA events, while the GPU is kept busy until the host has queued all of them. Milliseconds,
medians of `--rounds`; L2 holds what the kernel before left there. A column is a branch of a pass;
`rest` has the kernels of no column, merges and lists among them; `whole` is the call, with the
operators of torch between kernels. Hopper; the shapes are those of `bench.against`.

Lines of `--out` are those of `bench/records/<device>/kernel_log/variants.jsonl`.
"""

import collections
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

import nsa_torch
from kernels_pallas.kernel import Kernel
from nsa_core.config import NSAConfig
from nsa_core.steps import fused, mosaic_attention
from nsa_core.steps.fused import Inputs
from nsa_core.types import Branches
from nsa_torch import operators
from nsa_torch.kernel_path import KernelLayout
from nsa_torch.operators import SHARED_KV
from nsa_torch.torch_ops import TorchOps

from . import against
from .harness import cli, exit_status, records
from .harness.timed_problem import Problem, torch_inputs

FLAGS = cli.define(
    only=cli.ONLY,
    rounds=(5, "Calls that are timed."),
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
BUSY_CYCLES = 40_000_000  # 20 ms: longer than the host takes to queue a call


def column(kernel: Kernel) -> str:
    """Of the table: a kernel of intervals has all tokens as keys, or the compressed ones."""
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
    """Runs kernels between events."""

    def __init__(self):
        self.spans = []

    def run(self, kernel, *tensors):
        with self.timed(column(kernel)):
            return super().run(kernel, *tensors)

    @contextlib.contextmanager
    def timed(self, name: str):
        """What is queued within counts in this column."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self.spans.append((name, start, end))

    def milliseconds(self) -> dict[str, float]:
        """The time of the kernels per column; waits for the GPU."""
        torch.cuda.synchronize()
        found: dict[str, float] = collections.defaultdict(float)
        for name, start, end in self.spans:
            found[name] += start.elapsed_time(end)
        return found


def run(ops: TorchOps, tensors: Sequence[torch.Tensor], do: torch.Tensor) -> Inputs:
    """The gradients: all steps of a call whose branches share their tokens.

    Args:
      tensors: query, key, value, and gates `[B, T, H, 3]`.
      do: the output's gradient.
    """
    query, key, value, gates = tensors
    config, length = NSAConfig(), key.shape[1]
    gates = Branches(*(x.contiguous() for x in gates.unbind(-1)))
    inputs = Inputs(query, Branches.each(key), Branches.each(value), gates)
    layout = KernelLayout(ops, query, *operators.arguments(config, length, None, None))
    steps = mosaic_attention.STEPS
    inputs = fused.with_means(steps, ops, inputs, layout.params)
    rest = layout.params, layout.num_blocks(inputs.key.compressed)
    _, residuals = fused.forward_with_residuals(steps, ops, inputs, None, *rest)
    found = fused.backward(steps, ops, inputs, residuals, do, layout.params)
    of_tokens = length, layout.params, SHARED_KV.shared
    return fused.gradients_of_tokens(steps, ops, found, *of_tokens)


def prepare(problem: Problem) -> None:
    """Builds its kernels, side by side."""
    nsa_torch.prepare(
        heads=problem.H,
        kv_heads=problem.Hkv,
        key_width=problem.D,
        value_width=problem.Dv,
        lengths=[problem.T],
    )


def measure(problem: Problem, rounds: int) -> dict[str, float]:
    """Milliseconds by column."""
    *tensors, do = torch_inputs(problem)
    prepare(problem)
    run(TorchOps(), tensors, do)
    found = []
    for _ in range(rounds):
        ops = Timed()
        torch.cuda._sleep(BUSY_CYCLES)
        with ops.timed(WHOLE):
            run(ops, tensors, do)
        found.append(ops.milliseconds())
    return {name: float(np.median([each[name] for each in found])) for name in found[0]}


def lines(
    problem: Problem, found: Mapping[str, float], commit: str | None
) -> Iterator[tuple[str, list[records.Record]]]:
    """To print, with those of `--out`."""
    shown = {name: found[name] for name in COLUMNS if name in found}
    of = [
        records.variant("call_kernels", name, problem.name, ms, commit)
        for name, ms in shown.items()
    ]
    yield f"{problem.name}:\n  {', '.join(f'{x} {ms:.3f}' for x, ms in shown.items())}", of


def main(argv: Sequence[str]) -> int:
    commit = records.environment(FLAGS.commit)["commit"]
    measured = lambda problem: lines(problem, measure(problem, FLAGS.rounds), commit)
    against.measured(FLAGS, against.EAGER, measured)
    return exit_status.OK


if __name__ == "__main__":
    cli.run(main, FLAGS)
