"""Whole attention over prompts of several lengths: milliseconds, tokens/s, how it scales.

    python -m bench.prefill
    python -m bench.prefill --framework=jax --S_list=4096,8192,16384 --kernels=mosaic

`scaling` is the time over that of the length before, `exponent` its logarithm over that of the
lengths' ratio: 1 is linear, 2 quadratic. Every length is checked against the reference first.
"""

import math
from collections.abc import Sequence
from typing import Any

from nsa_core import flags as kernel_flags

from .harness import cli, command, problems
from .harness.command import config_of, integers, shown
from .harness.jobs import Job, jobs
from .harness.measure import judge
from .harness.records import Record
from .harness.runners import RUNNERS, asked
from .judge.checks import Checker

FLAGS = command.flag_values(
    frameworks=True,
    text=True,
    **command.SIZES,
    B=(1, "Sequences."),
    S_list=(list, "Lengths; default: 256,512,1024."),
)


def row(record: Record, before: Record | None) -> dict[str, Any]:
    """A line of the CSV file; `before` is the length before it."""
    cells = command.cells(record, "S", ms="time_ms", p20_ms="p20_ms", p80_ms="p80_ms")
    cells |= dict.fromkeys(("tokens_per_s", "scaling", "exponent"))
    if record.times_ms is not None:
        cells["tokens_per_s"] = record.B * record.S / record.times_ms[0] * 1e3
        if before is not None and before.times_ms is not None and before.S != record.S:
            cells["scaling"] = record.times_ms[0] / before.times_ms[0]
            cells["exponent"] = math.log(cells["scaling"]) / math.log(record.S / before.S)
    same = "B", "H", "Hkv", "D", "Dv", "dtype", "framework", "error_max", "error_bound"
    same += "device", "commit", "status", "reason"
    return cells | command.cells(record, *same, kernel="implementation")


def line(cells: dict[str, Any], before: Record | None) -> str:
    """What is printed of a length."""
    text = f"S={cells['S']} {shown(cells['ms'], ' ms')}"
    text += f" (p20 {shown(cells['p20_ms'])}, p80 {shown(cells['p80_ms'])})"
    text += f"  {shown(cells['tokens_per_s'], ' tokens/s', 0)}"
    if before is not None:
        text += f"  {before.S}->{cells['S']}: {shown(cells['scaling'], 'x', 2)}"
    return f"{text}  {cells['kernel']}{command.bad(cells)}"


def job(runner, settings) -> Job:
    """The whole attention by the flags' implementations, or by the first that can."""
    named, on_unsupported = kernel_flags.named(), kernel_flags.on_unsupported()
    found = jobs(runner, asked(settings, runner), named, on_unsupported, ["all"], chosen=True)
    (what,) = found
    if what.asked is None:  # no implementation of this framework
        raise ValueError(what.unsupported)
    return what


def main(argv: Sequence[str]) -> int:
    lengths = integers("S_list", FLAGS.S_list, (256, 512, 1024))
    runner = RUNNERS[FLAGS.framework](FLAGS.device)
    gpu, config = runner.platform != "cpu", config_of(FLAGS)
    how, rows, before = command.sampling(FLAGS, gpu), [], None
    results = command.Results("prefill", FLAGS)
    print(f"device: {runner.device}; {runner.framework}", flush=True)
    for length in lengths:
        at = command.settings(FLAGS, config, gpu, seq_len=length, batch=FLAGS.B, dim=FLAGS.dim)
        inputs = problems.make(at, FLAGS.input, FLAGS.seed)
        checker, what = Checker(at, inputs, backward=False), job(runner, at)
        found = judge(what, runner, at, inputs, checker).timed(**how)
        common = command.about(runner, at, inputs) | {"implementation": what.label}
        record = results.add(
            branch="all", mode="forward", refused=what.refused, **common | found
        )
        rows.append(row(record, before))
        print(line(rows[-1], before), flush=True)
        before = record
    return results.finish(rows)


if __name__ == "__main__":
    cli.run(main, FLAGS)
