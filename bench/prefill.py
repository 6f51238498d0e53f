"""Whole attention over prompts of several lengths: milliseconds, tokens/s, how it scales.

    python -m bench.prefill
    python -m bench.prefill --framework=jax --S_list=4096,8192,16384 --kernels=mosaic

`scaling` is the time over that of the length before, `exponent` its logarithm over that of the
lengths' ratio: 1 is linear, 2 quadratic. Every length is checked against the reference first.
"""

import math
from collections.abc import Sequence
from typing import Any

from absl import flags

from nsa_core import flags as kernel_flags
from nsa_core.types import Branches

from .harness import cli, command, problems
from .harness.command import config_of, integers, shown
from .harness.jobs import Job, label, refusals
from .harness.measure import measure
from .harness.records import Record
from .harness.runners import RUNNERS, asked
from .judge.checks import Checker

FLAGS = command.flag_values(frameworks=True, text=True, **command.SIZES)
_own = {"flag_values": FLAGS}
BATCH = flags.DEFINE_integer("B", 1, "Sequences.", lower_bound=1, **_own)
LENGTHS = flags.DEFINE_list("S_list", None, "Lengths; default: 256,512,1024.", **_own)
COLUMNS = ("S", "ms", "p20_ms", "p80_ms", "tokens_per_s", "scaling", "exponent", "B", "H")
COLUMNS += ("Hkv", "D", "Dv", "dtype", "framework", "kernel", "error_max", "error_bound")
COLUMNS += ("device", "commit", "status", "reason")


def row(record: Record, before: Record | None) -> dict[str, Any]:
    """A line of the CSV file; `before` is the length before it."""
    same = ("S", "p20_ms", "p80_ms", "B", "H", "Hkv", "D", "Dv", "dtype", "framework")
    same += ("error_max", "error_bound", "device", "commit", "status", "reason")
    cells: dict[str, Any] = {name: getattr(record, name) for name in same}
    cells |= {"ms": record.time_ms, "kernel": record.implementation}
    cells |= dict.fromkeys(("tokens_per_s", "scaling", "exponent"))
    if record.times_ms is not None:
        cells["tokens_per_s"] = record.B * record.S / record.times_ms[0] * 1e3
        if before is not None and before.times_ms is not None and before.S != record.S:
            cells["scaling"] = record.times_ms[0] / before.times_ms[0]
            ratio = math.log(record.S / before.S)
            cells["exponent"] = math.log(cells["scaling"]) / ratio
    return cells


def line(cells: dict[str, Any], before: Record | None) -> str:
    """What is printed of a length."""
    text = f"S={cells['S']} {shown(cells['ms'], ' ms')}"
    text += f" (p20 {shown(cells['p20_ms'])}, p80 {shown(cells['p80_ms'])})"
    text += f"  {shown(cells['tokens_per_s'], ' tokens/s', 0)}"
    if before is not None:
        text += f"  {before.S}->{cells['S']}: {shown(cells['scaling'], 'x', 2)}"
    bad = f"  {cells['status']}: {cells['reason']}" if cells["status"] != "ok" else ""
    return f"{text}  {cells['kernel']}{bad}"


def job(runner, settings) -> Job:
    """The whole attention by the flags' implementations, or by the first that can."""
    named = kernel_flags.named()
    try:
        chosen = runner.registry.choices(
            asked(settings, runner), named, kernel_flags.on_unsupported()
        )
    except NotImplementedError as error:
        return Job("all", "/".join(name or "auto" for name in named), unsupported=str(error))
    names = Branches(*(getattr(chosen, branch).implementation for branch in Branches._fields))
    return Job("all", label(chosen), names, refusals(chosen))


def main(argv: Sequence[str]) -> int:
    lengths = integers("S_list", LENGTHS.value, (256, 512, 1024))
    runner = RUNNERS[FLAGS.framework](FLAGS.device)
    gpu, config = runner.platform != "cpu", config_of(FLAGS)
    how, rows, before = command.sampling(FLAGS, gpu), [], None
    results = command.Results("prefill", FLAGS)
    print(f"device: {runner.device}; {runner.framework}", flush=True)
    for length in lengths:
        at = command.settings(
            FLAGS, config, gpu, seq_len=length, batch=BATCH.value, dim=FLAGS.dim
        )
        inputs = problems.make(at, FLAGS.input, FLAGS.seed)
        checker, what = Checker(at, inputs, backward=False), job(runner, at)
        found = measure(what, runner, at, inputs, checker, "forward", **how)
        common = command.about(runner, at, inputs) | {"implementation": what.label}
        record = results.add(
            branch="all", mode="forward", refused=what.refused, **common | found
        )
        rows.append(row(record, before))
        print(line(rows[-1], before), flush=True)
        before = record
    return results.finish(COLUMNS, rows)


if __name__ == "__main__":
    cli.run(main, FLAGS)
