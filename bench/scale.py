"""One sequence over several GPUs of a host: time, transport, memory, and what more GPUs would do.

    python -m bench.scale --devices 1,2 --lengths 32768,131072
    python -m bench.scale --devices 2 --framework jax --mode forward
    python -m bench.scale --lengths 65536 --documents 8192,8192,8192,8192,8192,8192,8192,8192
    python -m bench.scale --devices 4 --lengths 1048576 --check rows
    python -m bench.scale --predict 8,64 --records <file> [--link_gb_s 50]

Each number of devices is a run of its own: in torch one process a GPU (`torchrun`, NCCL; `gloo`
without a GPU), in JAX one process. A row of JSON each in `--out`:

  ms            of the slowest device, all begin together: median, p20, p80
  efficiency    ms on one device / (devices * ms), of the same length
  tokens_s_device  tokens a second a device: what `--weak` compares, where each device has as
                many tokens; the work of a token grows with the length all the same
  compute_ms    the same call where what others would send is the device's own: all its work, and
                no transport (torch)
  exposed_ms    ms - compute_ms: transport that nothing hides
  transport_ms  what a call moves of keys and values, and nothing computed (torch)
  imbalance     compute_ms of the slowest device over the mean
  moved_mib     that a device receives, counted (`harness/scale_model.py`)
  memory_mib    the most that a device held
  errors        up to `--checked` tokens: distance from a float32 oracle, beside that of one device;
                more than twice that is `wrong`. `--check rows` (torch): of 16 tokens of a sequence
                of any length, and of every gradient where the others' outputs have none; more
                than one rounding of the dtype is `wrong`

Where one device cannot hold the problem its row says so, and others have no efficiency.
`--predict` computes from rows what more devices would take; it is no measurement.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any, cast

from absl import app, flags

from nsa_core import context_layout
from nsa_core.config import NSAConfig
from nsa_core.context_layout import Layout

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
from .harness.scale_problem import Problem

FLAGS = flags.FlagValues()
at = {"flag_values": FLAGS}
MODES, LAYOUTS = ("forward", "fwdbwd"), ("zigzag", "contiguous")
DEVICES = flags.DEFINE_list("devices", ["1", "2"], "Numbers of devices.", **at)
LENGTHS = flags.DEFINE_list("lengths", ["131072"], "Tokens of the whole sequence.", **at)
FRAMEWORK = flags.DEFINE_enum("framework", "torch", ["torch", "jax"], "What runs it.", **at)
MODE = flags.DEFINE_multi_enum("mode", list(MODES), MODES, "Repeatable.", **at)
LAYOUT = flags.DEFINE_multi_enum("layout", ["zigzag"], LAYOUTS, "Repeatable.", **at)
HEADS = flags.DEFINE_integer("heads", 64, "Query heads.", lower_bound=1, **at)
KV_HEADS = flags.DEFINE_integer("kv_heads", 4, "Key/value heads.", lower_bound=1, **at)
WIDTH = flags.DEFINE_integer("dk", 128, "Columns of queries and keys.", lower_bound=1, **at)
VALUE_WIDTH = flags.DEFINE_integer("dv", 128, "Columns of values.", lower_bound=1, **at)
DTYPES = ("bfloat16", "float16", "float32")
DTYPE = flags.DEFINE_enum("dtype", "bfloat16", DTYPES, "Precision.", **at)
DOCUMENTS = flags.DEFINE_list(
    "documents",
    [],
    "Tokens of each, of a packed row of that length (torch); none: one sequence.",
    **at,
)
WEAK = flags.DEFINE_bool("weak", False, "--lengths are tokens a device, not of all.", **at)
SAMPLES = flags.DEFINE_integer("samples", 10, "Of a row.", lower_bound=1, **at)
CHECKED = flags.DEFINE_integer("checked", 32768, "Longest sequence that is judged.", **at)
RECOMPUTE = flags.DEFINE_bool(
    "recompute", False, "Branches are computed again in the backward pass (torch).", **at
)
CHECK = flags.DEFINE_enum(
    "check", "whole", ["whole", "rows"], "What is judged: all, up to --checked; or rows.", **at
)
SECONDS = flags.DEFINE_float("timeout_s", 600.0, "Of one number of devices.", **at)
PREDICT = flags.DEFINE_list("predict", [], "Numbers of devices to predict from rows.", **at)
RECORDS = flags.DEFINE_string("records", None, "The rows to predict from.", **at)
LINK = flags.DEFINE_float("link_gb_s", None, "GB/s of other links than the measured.", **at)
OUT = cli.define_lines(FLAGS)
COMMIT = cli.define_commit(FLAGS)
MEASURED = (
    *(DEVICES, LENGTHS, FRAMEWORK, MODE, LAYOUT, HEADS, KV_HEADS, WIDTH, VALUE_WIDTH, DTYPE),
    *(DOCUMENTS, WEAK, SAMPLES, CHECKED, CHECK, RECOMPUTE, OUT),
)  # what --predict does not ask
WORKER = flags.DEFINE_string("worker", None, "Problems in JSON; what a run is given.", **at)


def problems(size: int) -> list[Problem]:
    """For a number of devices."""
    lengths = command.integers("lengths", LENGTHS.value, ())
    lengths = [length * size if WEAK.value else length for length in lengths]
    documents = command.integers("documents", DOCUMENTS.value, ()) if DOCUMENTS.value else ()
    return [
        Problem(
            framework=FRAMEWORK.value,
            mode=mode,
            layout=cast(Layout, layout),
            S=length,
            H=HEADS.value,
            Hkv=KV_HEADS.value,
            D=WIDTH.value,
            Dv=VALUE_WIDTH.value,
            dtype=DTYPE.value,
            checked=CHECKED.value,
            config=NSAConfig(),
            documents=tuple(documents),
            recompute=RECOMPUTE.value,
            by_rows=CHECK.value == "rows",
        )
        for length in lengths
        for layout in LAYOUT.value
        for mode in MODE.value
    ]


def check(found: Iterable[Problem], size: int) -> None:
    """Raises ValueError for lengths that the devices cannot share in whole chunks, or that
    documents do not have.
    """
    for problem in found:
        if problem.documents and problem.framework == "jax":
            raise NotImplementedError("documents are measured in torch, got jax")
        if (problem.by_rows or problem.recompute) and problem.framework == "jax":
            raise NotImplementedError("--check rows and --recompute are for torch, got jax")
        if problem.documents and sum(problem.documents) != problem.S:
            raise ValueError(
                f"documents must be {problem.S} tokens together, as --lengths says, got "
                f"{sum(problem.documents)}"
            )
        chunks = len(context_layout.Shards(problem.layout, size, 0, 1).order)
        if problem.S % chunks:
            raise ValueError(
                f"lengths must be multiples of {chunks} for {size} devices, {problem.layout}, "
                f"got {problem.S}"
            )
    if HEADS.value % KV_HEADS.value:
        raise ValueError(
            f"heads must be a multiple of kv_heads, got {HEADS.value} and {KV_HEADS.value}"
        )


def measured(found: Sequence[Problem], size: int) -> tuple[list[dict[str, Any]], str]:
    """The rows of a run on `size` devices, and why it ended early, or nothing."""
    words = json.dumps([dataclasses.asdict(x) for x in found])
    own = [
        "-m",
        process.module("bench.scale"),
        f"--worker={words}",
        f"--samples={SAMPLES.value}",
    ]
    own += [f"--devices={size}", f"--framework={FRAMEWORK.value}"]
    launcher = (
        []
        if FRAMEWORK.value == "jax"
        else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    )
    run = subprocess.Popen(
        [sys.executable, *launcher, *own],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that its ranks end with it
    )
    heartbeat.say(f"{size} devices")
    try:
        text, _ = run.communicate(timeout=SECONDS.value)
        reason = f"exit status {run.returncode}" if run.returncode else ""
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        text, _ = run.communicate()
        reason = f"longer than {SECONDS.value:g} s"
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")], reason


def line(row: dict[str, Any]) -> str:
    """Of the table."""
    name = f"{row['framework']} {row['mode']} {row['S']} tokens, {row['devices']} devices"
    name += f", {len(documents)} documents" if (documents := row.get("documents")) else ""
    if row["status"] != "ok":
        name += f" {row['status']}: {row['reason']}"
    cells = (
        "ms",
        "tokens_s_device",
        "efficiency",
        "compute_ms",
        "exposed_ms",
        "imbalance",
        "memory_mib",
    )
    shown = (f"{cell} {row[cell]:.4g}" for cell in cells if row.get(cell) is not None)
    return f"{name}  {'  '.join(shown)}"


def predict(path: str) -> int:
    rows = [x for x in records.flat_lines(path) if x["status"] == "ok"]
    bandwidth = None if LINK.value is None else LINK.value * 1e9
    count = 0
    for found in scale_model.by_problem(rows).values():
        model = scale_model.Model.fitted(found)
        if model is None:
            continue
        count += 1
        row = model.row
        print(f"{row['framework']} {row['mode']} {row['layout']} {row['S']} tokens:")
        for each in sorted(found, key=lambda x: x["devices"]):
            ms = model.ms(each["devices"])
            error = ms / each["ms"] - 1
            print(f"  {each['devices']} measured {each['ms']:.4g} ms, model {error:+.1%}")
        for size in command.integers("predict", PREDICT.value, ()):
            ms = model.ms(size, bandwidth)
            share = model.compute_ms / size / ms
            print(f"  {size} predicted {ms:.4g} ms, efficiency {share:.0%}")
    if not count:
        print("no problem was measured on one device and on several, with transport")
    return exit_status.OK if count else exit_status.NOT_MEASURED


def work() -> int:
    """What a process of a run does."""
    given = json.loads(WORKER.value or "[]")
    typed = lambda x: {"config": NSAConfig(**x["config"]), "documents": tuple(x["documents"])}
    found = [Problem(**x | typed(x)) for x in given]
    if FRAMEWORK.value == "torch":
        from .harness import scale_ranks

        scale_ranks.run(found, SAMPLES.value)
    else:
        from .harness import scale_devices

        scale_devices.run(found, int(DEVICES.value[0]), SAMPLES.value)
    return exit_status.OK


def main(argv: Sequence[str]) -> int:
    if WORKER.value:
        return work()
    launchers.check_one()
    if PREDICT.value:
        if not RECORDS.value:
            raise app.UsageError("--predict needs --records")
        cli.refuse_beside(PREDICT, MEASURED)
        return predict(RECORDS.value)
    if RECORDS.value or LINK.value is not None:
        raise app.UsageError("--records and --link_gb_s need --predict")
    devices = sorted(command.integers("devices", DEVICES.value, ()))
    for size in devices:
        check(problems(size), size)
    import torch

    name = "cpu"
    if torch.cuda.is_available():
        name, there = torch.cuda.get_device_name(), torch.cuda.device_count()
        if max(devices) > there:
            raise NotImplementedError(f"{max(devices)} GPUs are needed, got {there}")
    rows, broken = list[dict[str, Any]](), False
    for size in devices:
        found = problems(size)
        some, reason = measured(found, size)
        for row in some:
            rows.append(row)
            if row["status"] in ("ok", "wrong"):
                alike = [x for x in rows if scale_model.problem(x) == scale_model.problem(row)]
                row["efficiency"] = scale_model.efficiency(
                    row, [x for x in alike if x.get("ms")]
                )
                row["tokens_s_device"] = row["S"] / row["ms"] / size * 1e3
                row["moved_mib"] = scale_model.moved_bytes(row, size) / 2**20
                if row["compute_ms"] is not None:
                    row["exposed_ms"] = row["ms"] - row["compute_ms"]
            print(line(row), flush=True)
            if OUT.value:
                made = records.record("scale", COMMIT.value, device=name, **row)
                records.append(OUT.value, [made])
        if reason:
            broken = True
            print(f"{size} devices: {len(some)} of {len(found)} rows: {reason}", flush=True)
    return exit_status.WRONG if broken else exit_status.of_statuses(x["status"] for x in rows)


if __name__ == "__main__":
    cli.run(main, FLAGS, several=True)  # --devices starts them
