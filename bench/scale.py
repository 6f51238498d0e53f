"""Measures attention to one sequence that is divided among several GPUs of a host.

    python -m bench.scale --devices 1,2 --lengths 32768,131072
    python -m bench.scale --devices 2 --framework jax --mode forward
    python -m bench.scale --lengths 65536 --documents 8192,8192,8192,8192,8192,8192,8192,8192
    python -m bench.scale --devices 4 --lengths 1048576 --check rows
    python -m bench.scale --predict 8,64 --records <file> [--link_gb_s 50]

Each number of devices is a separate run. In torch a run has one process per GPU (`torchrun`, NCCL;
`gloo` without a GPU), and in JAX one process. Each problem of each run is a line of JSON in
`--out`:

- `ms`: median time of the slowest device, if all devices begin together. `p20_ms` and `p80_ms` are
  the 20th and 80th percentile.
- `efficiency`: `ms` on one device divided by `devices * ms`, for the same problem.
- `tokens_s_device`: tokens per second and device. With `--weak` every device has the same number of
  tokens, so that this rate can be compared between numbers of devices. With `--weak`, the work per
  token grows with the length.
- `compute_ms`: time of the same call without transport (torch). Each device uses copies of its own
  keys and values instead of the keys and values of other devices.
- `exposed_ms`: `ms - compute_ms`, the transport that no computation hides.
- `transport_ms`: time of only the transport of a call (torch).
- `imbalance`: `compute_ms` of the slowest device divided by the mean over the devices.
- `moved_mib`: data that a device receives, by the formula of `harness/scale_model.py`.
- `memory_mib`: peak memory of a device.
- `errors`: root mean square of the difference from a float32 oracle, divided by the root mean
  square of the oracle, for each result. By default sequences of up to `--checked` tokens are
  judged. A row is `wrong` if an error exceeds twice the error of one device (`errors_of_one`) plus
  4 roundings. `--check rows` (torch) judges 16 tokens of a sequence of any length, and the
  gradients that follow from these tokens. With `--check rows`, a row is `wrong` if an error exceeds
  one rounding.

If one device cannot hold the problem, the row of one device states this, and the rows of several
devices have no efficiency. `--predict` computes the time on more devices from measured rows. A
predicted time is not a measurement.
"""

import importlib
import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from absl import app

from nsa_core import context_layout

from . import run
from .harness import (
    cli,
    command,
    exit_status,
    heartbeat,
    launchers,
    process,
    records,
    scale_model,
)
from .harness.records import Values
from .harness.runners import out_of_memory
from .harness.scale_problem import Problem
from .reports import render

MODES, LAYOUTS = ("forward", "fwdbwd"), ("zigzag", "contiguous")
DTYPES = ("bfloat16", "float16", "float32")
FLAGS = cli.define(
    devices=(["1", "2"], "Numbers of devices."),
    lengths=(["131072"], "Numbers of tokens of the whole sequence."),
    framework=("torch", "Framework that computes attention.", ["torch", "jax"]),
    mode=(MODES, "Passes that are timed (repeatable).", MODES),
    layout=(("zigzag",), "Layouts of a sequence over the devices (repeatable).", LAYOUTS),
    heads=(64, "Query heads."),
    kv_heads=(4, "Key/value heads."),
    dk=(128, "Number of columns of queries and keys."),
    dv=(128, "Number of columns of values."),
    dtype=("bfloat16", "Precision.", DTYPES),
    documents=(
        [],
        "Number of tokens of each document of a packed row (torch); none: one sequence.",
    ),
    weak=(False, "Take --lengths as tokens per device instead of as the total."),
    samples=(10, "Number of samples per row."),
    checked=(32768, "Length of the longest sequence that is judged.", None),
    recompute=(False, "Recompute the branches in the backward pass (torch)."),
    check=(
        "whole",
        "What is judged: all rows up to --checked tokens, or a sample of rows at any length.",
        ["whole", "rows"],
    ),
    timeout_s=(600.0, "Time limit for the run of one number of devices, in seconds.", None),
    predict=([], "Numbers of devices for which times are predicted from rows."),
    records=(str, "File of the rows from which --predict computes times."),
    link_gb_s=(
        float,
        "Bandwidth to predict for, in GB/s, if the links differ from the measured ones.",
        None,
    ),
    worker=(False, "Internal: this is a process of a run."),
)
cli.define_lines(FLAGS)


def problems(size: int) -> list[Problem]:
    """Return the problems for a number of devices.

    Raises:
      ValueError: A length cannot be divided among devices in whole chunks, the documents do not
        add up to the length, or `--heads` is not a multiple of `--kv_heads`.
      NotImplementedError: A flag is not supported in JAX.
    """
    if FLAGS.heads % FLAGS.kv_heads:
        raise ValueError(
            f"heads must be a multiple of kv_heads, got {FLAGS.heads} and {FLAGS.kv_heads}"
        )
    lengths = command.integers("lengths", FLAGS.lengths, ())
    documents = command.integers("documents", FLAGS.documents, ()) if FLAGS.documents else ()
    by_rows = FLAGS.check == "rows"
    if FLAGS.framework == "jax" and (documents or by_rows or FLAGS.recompute):
        what = "documents are" if documents else "--check rows and --recompute are"
        raise NotImplementedError(f"{what} measured in torch, got jax")
    found = []
    for length, layout, mode in itertools.product(lengths, FLAGS.layout, FLAGS.mode):
        length *= size if FLAGS.weak else 1
        chunks = len(context_layout.Shards(layout, size, 0, 1).order)
        if documents and sum(documents) != length:
            raise ValueError(
                f"documents must be {length} tokens in total, as --lengths requires, got "
                f"{sum(documents)}"
            )
        if length % chunks:
            raise ValueError(
                f"lengths must be multiples of {chunks} for {size} devices, {layout}, "
                f"got {length}"
            )
        about = FLAGS.framework, mode, layout, length
        sizes = FLAGS.heads, FLAGS.kv_heads, FLAGS.dk, FLAGS.dv, FLAGS.dtype, FLAGS.checked
        how: Values = {"documents": documents, "recompute": FLAGS.recompute}
        found.append(Problem(*about, *sizes, **how, by_rows=by_rows))
    return found


def measured(size: int) -> tuple[list[Values], str]:
    """Return the rows of a run on `size` devices. Also return the reason why the run ended early,
    or an empty string.
    """
    words = ["bench.scale", *sys.argv[1:], f"--devices={size}", "--worker"]
    if FLAGS.framework == "torch":
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={size}", "-m"]
        words = [*launcher, process.module(words[0]), *words[1:]]
    heartbeat.say(f"{size} devices")
    with tempfile.TemporaryDirectory() as folder:
        done = process.run("run", words, Path(folder), FLAGS.timeout_s, budget=False)
        text = (Path(folder) / "run.log").read_text(errors="replace")
    found = [json.loads(line) for line in text.splitlines() if line.startswith('{"framework"')]
    if done.reason:
        print(text[-10000:], file=sys.stderr)
    return found, done.reason


def derived(row: Values, done: Sequence[Values]) -> Values:
    """Return a measured row with additional values, which follow from this row and from the rows
    of `done`.
    """
    if row["status"] not in ("ok", "wrong"):
        return row
    size, ms = row["devices"], row["ms"]
    one = scale_model.alone(scale_model.by_problem(done)[scale_model.problem(row)])
    row["efficiency"] = one / (size * ms) if one else None
    row["tokens_s_device"] = row["S"] / ms / size * 1e3
    row["moved_mib"] = scale_model.moved_bytes(row, size) / 2**20
    if row["compute_ms"] is not None:
        row["exposed_ms"] = ms - row["compute_ms"]
    return row


def predict(path: str) -> int:
    rows = [x for x in records.flat_lines(path) if x["status"] == "ok"]
    bandwidth = None if FLAGS.link_gb_s is None else FLAGS.link_gb_s * 1e9
    found = scale_model.by_problem(rows).values()
    models = [(x, ms) for x in found if (ms := scale_model.fitted(x))]
    if not models:
        print("no problem was measured with transport both on one device and on several")
        return exit_status.NOT_MEASURED
    sizes = command.integers("predict", FLAGS.predict, ())
    how = {"models": models, "sizes": sizes, "bandwidth": bandwidth}
    print(render.filled("prediction.txt.jinja", **how), end="")
    return exit_status.OK


def work(size: int) -> None:
    """Measure the problems in a process of a run on `size` devices. Print a line of JSON per
    problem."""
    kind = "scale_ranks" if FLAGS.framework == "torch" else "scale_devices"
    measure = importlib.import_module(f".harness.{kind}", __package__)
    with measure.devices(size) as mesh:
        for problem in problems(size):
            try:
                found = measure.row(problem, mesh, FLAGS.samples)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                reason = str(error).splitlines()[0].partition(". ")[0]
                found = {"status": "unsupported", "reason": reason}
            if launchers.is_first():
                row = json.dumps(problem.about | {"devices": size} | found)
                # Other ranks write to the same log, possibly without a final line break.
                print(f"\n{row}\n", end="", flush=True)


def main(argv: Sequence[str]) -> int:
    devices = sorted(command.integers("devices", FLAGS.devices, ()))
    if FLAGS.worker:  # a process of a run
        work(devices[0])
        return exit_status.OK
    launchers.check_one()
    if FLAGS.predict:
        if not FLAGS.records:
            raise app.UsageError("--predict needs --records")
        asked = {"commit", "link_gb_s", "predict", "records", "timeout_s", "worker"}
        cli.refuse_beside(FLAGS["predict"], (FLAGS[x] for x in FLAGS if x not in asked))
        return predict(FLAGS.records)
    if FLAGS.records or FLAGS.link_gb_s is not None:
        raise app.UsageError("--records and --link_gb_s need --predict")
    for size in devices:
        problems(size)
    import torch

    name = "cpu"
    if torch.cuda.is_available():
        name, there = torch.cuda.get_device_name(), torch.cuda.device_count()
        if max(devices) > there:
            raise NotImplementedError(f"{max(devices)} GPUs are needed, got {there}")
    broken = list[str]()

    def rows():
        done = []
        for size in devices:
            some, reason = measured(size)
            for row in some:
                done.append(row)
                yield {"device": name} | derived(row, done)
            if reason:
                broken.append(reason)
                count = f"{len(some)} of {len(problems(size))} rows"
                print(f"{size} devices: {count}: {reason}", flush=True)

    statuses = run.rows("scale", FLAGS, rows())
    return exit_status.WRONG if broken else exit_status.of_statuses(statuses)


if __name__ == "__main__":
    cli.run(main, FLAGS, several=True)  # --devices starts such processes
