"""Measures attention of all branches over prompts of several lengths. The results are milliseconds,
tokens/s, and the growth of the time with the length.

    python -m bench.prefill
    python -m bench.prefill --framework=jax --S_list=4096,8192,16384 --kernels=mosaic

`scaling` is the time divided by the time of the previous length. `exponent` is the logarithm of
`scaling` divided by the logarithm of the ratio of lengths. An exponent of 1 means linear growth,
and an exponent of 2 means quadratic growth. Every length is checked against the reference before it
is timed.
"""

import functools
import math
from collections.abc import Sequence

from nsa_core import flags as kernel_flags

from .harness import cli, command, problems
from .harness.command import config_of, integers, speed_up
from .harness.jobs import Job, jobs
from .harness.parts import Problem
from .harness.records import Record, Values
from .harness.runners import RUNNERS, asked

FLAGS = command.flag_values(
    frameworks=True,
    text=True,
    **command.SIZES,
    B=(1, "Sequences."),
    S_list=(list, "Numbers of tokens; default: 256,512,1024."),
)


def scaling(now: Record, before: Record | None) -> Values:
    """Return the values of the row of a length, given the record of the previous length."""
    found: Values = {"now": now}
    if now.times_ms is not None:
        found["tokens_per_s"] = now.B * now.S / now.times_ms[0] * 1e3
    growth = "n/a"
    if before is not None and before.S != now.S and (gain := speed_up(now, before)):
        found |= {"scaling": gain, "exponent": math.log(gain) / math.log(now.S / before.S)}
        growth = f"{gain:.2f}x"
    growth = f"  {before.S}->{now.S}: {growth}" if before else ""
    return found | {"line": {"growth": growth}}


def job(runner, settings) -> Job:
    """Return a job of attention of all branches, on the implementations that the flags name or on
    the automatic choice."""
    named, on_unsupported = kernel_flags.named(), kernel_flags.on_unsupported()
    found = jobs(runner, asked(settings, runner), named, on_unsupported, ["all"], chosen=True)
    (what,) = found
    if what.asked is None:  # the name is no implementation of this framework
        raise ValueError(what.unsupported)
    return what


def main(argv: Sequence[str]) -> int:
    lengths = integers("S_list", FLAGS.S_list, (256, 512, 1024))
    runner = RUNNERS[FLAGS.framework](FLAGS.device)
    gpu, config, before = runner.platform != "cpu", config_of(FLAGS), None
    results = command.Results("prefill", FLAGS)
    print(f"device: {runner.device}; {runner.framework}", flush=True)
    for length in lengths:
        at = command.settings(FLAGS, config, gpu, seq_len=length, batch=FLAGS.B, dim=FLAGS.dim)
        inputs = functools.partial(problems.make, at, FLAGS.input, FLAGS.seed)
        of = "prefill", runner, at, FLAGS, inputs, lambda what=job(runner, at): [what]
        row = Problem(*of, command.sampling(FLAGS, gpu), branch="all", mode="forward")
        (now,) = results.keep(row.judge()())
        results.row(**scaling(now, before))
        before = now
    return results.finish()


if __name__ == "__main__":
    cli.run(main, FLAGS)
