"""Mosaic kernels under `compute-sanitizer`: layers forward and backward, on this GPU.

    python -m bench.memory_check
    python -m bench.memory_check --only gathered --tool racecheck --kernels gathered

| tool | what it finds |
|---|---|
| `memcheck` | an address outside every array |
| `synccheck` | a barrier that not all threads reach |
| `racecheck` | threads that reach the same shared memory with no barrier between |

Layers and what of them must run are in `bench.harness.checked_layer`. Each layer first runs
alone, which builds its kernels; then under every tool, `--at_once` processes side by side. torch
then asks CUDA for each tensor: in torch's own large blocks `memcheck` would not see an address
behind one. A tool is believed only where it finds a fault that is planted for it.

A row is `ok`, `wrong` (the tool found something, or a layer gave other bits, or did not run what
it is here for) or `timeout`. Logs are in `--out`, with memory_check.jsonl; `--save_records`
appends its lines to bench/records/<device>/kernel_log/memory_check.jsonl.
"""

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch
from absl import flags

from bench.harness import cli, command, exit_status, process, records
from bench.harness.checked_layer import LAYERS, TOOLS

FLAGS = flags.FlagValues()
at = {"flag_values": FLAGS}
ONLY = flags.DEFINE_multi_string("only", [], "Layers whose names begin so (repeatable).", **at)
TOOL = flags.DEFINE_multi_enum("tool", TOOLS, TOOLS, "Repeatable.", **at)
KERNELS = flags.DEFINE_string(
    "kernels", "", "racecheck: only kernels whose names have this within.", **at
)
AT_ONCE = flags.DEFINE_integer("at_once", 8, "Processes side by side.", lower_bound=1, **at)
TIMEOUT_S = flags.DEFINE_integer("timeout_s", 300, "Of a process.", lower_bound=1, **at)
OUT = flags.DEFINE_string("out", None, "A new folder; default: bench/results/<time>.", **at)
SAVE = flags.DEFINE_bool("save_records", False, "Keep the records.", **at)
COMMIT = flags.DEFINE_string("commit", None, "Of this tree; default: what git says.", **at)

SANITIZER = "compute-sanitizer"
CHILD = "bench.harness.checked_layer"
ALONE = "alone"  # in place of a tool
OURS = "mosaic_gpu"  # in the name of every kernel of Mosaic, and of no other
SUMMARY = re.compile(r"SUMMARY: (\d+) (?:error|hazard)")
# Two processes or more share the GPU; every tensor is an allocation of its own.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


@dataclasses.dataclass(frozen=True)
class Row:
    """How a layer fared, or with the name "" the fault that is planted for the tool."""

    tool: str
    layer: str
    status: Literal["ok", "wrong", "timeout"]
    seconds: float
    reason: str
    ran: dict[str, Any] = dataclasses.field(default_factory=dict)  # of `checked_layer.check`


def run(tool: str, layer: str, folder: Path) -> Row:
    """A row, but for what `compared` says of it."""
    name = f"{tool}, {layer or 'planted'}"
    watched = [] if tool == ALONE else [SANITIZER, "--tool", tool]
    if tool == "racecheck":  # which takes long
        watched += ["--kernel-regex", f"kns={KERNELS.value or OURS}"]
    planted = [f"--within={KERNELS.value or 'planted'}", f"--planted={tool}"]
    words = [CHILD, *([layer] if layer else planted)]
    done = process.run(name, words, folder, TIMEOUT_S.value, False, watched, ENVIRONMENT)
    text = (folder / f"{name}.log").read_text(errors="replace")
    said = [int(number) for number in SUMMARY.findall(text)]
    lines = [line for line in text.splitlines() if line.startswith('{"kernels"')]
    ran = json.loads(lines[-1]) if lines else {}
    if done.status == "timeout":
        return Row(tool, layer, "timeout", done.seconds, done.reason)
    if not layer:
        reason = "" if any(said) else "it does not find the fault that was planted"
    elif any(said):
        reason = f"{tool} found {sum(said)}"
    elif not ran:
        reason = done.reason or "it said nothing"
    elif tool != ALONE and not said:
        reason = f"no summary of {tool}"
    else:
        reason = ran["fault"] or done.reason
    return Row(tool, layer, "wrong" if reason else "ok", done.seconds, reason, ran)


def compared(row: Row, alone: Row) -> Row:
    """`row`, which is wrong where the layer gave other bits than alone."""
    if row.status != "ok" or row.ran["digest"] == alone.ran["digest"]:
        return row
    return dataclasses.replace(row, status="wrong", reason="other bits than alone")


def show(row: Row) -> None:
    tiles = row.ran.get("gathered_tiles")
    more = row.reason or (f"{tiles} tiles gathered" if tiles else "")
    name = row.layer or "planted fault"
    print(f"{row.tool:10} {name:28} {row.status:8} {row.seconds:6.1f} s  {more}", flush=True)


def check(layers: Sequence[str], tools: Sequence[str], folder: Path) -> Iterator[Row]:
    """Layers alone, then those that are right so under every tool.

    Raises:
      ValueError: a layer has no kernel that `--kernels` names.
    """
    pool = ThreadPoolExecutor(AT_ONCE.value)
    try:
        alone = {}
        for row in pool.map(lambda layer: run(ALONE, layer, folder), layers):
            yield row
            if row.status != "ok":
                continue
            kernels = row.ran["kernels"]
            if not any(KERNELS.value in name for name in kernels):
                raise ValueError(f"--kernels: {row.layer!r} runs {', '.join(kernels)}")
            alone[row.layer] = row
        pairs = [(tool, layer) for tool in tools for layer in ("", *alone)]
        for row in pool.map(lambda pair: run(pair[0], pair[1], folder), pairs):
            yield compared(row, alone[row.layer]) if row.layer else row
    finally:
        pool.shutdown(cancel_futures=True)  # else all that waits would still run


def main(argv: Sequence[str]) -> int:
    layers = [name for name in LAYERS if name.startswith(tuple(ONLY.value) or "")]
    if not layers:
        raise ValueError(f"--only: no such layer, known: {'; '.join(LAYERS)}")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise NotImplementedError("a Hopper GPU is needed")
    if not shutil.which(SANITIZER):
        raise NotImplementedError(f"{SANITIZER} of the CUDA toolkit must be on PATH")
    folder = command.folder(OUT.value)
    if (lines := folder / "memory_check.jsonl").exists():
        raise ValueError(f"{lines} exists; --out must name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name()
    about = {"device": device, "time": records.utc_now()} | records.environment(COMMIT.value)
    made = []
    for row in check(layers, list(dict.fromkeys(TOOL.value)), folder):
        show(row)
        watched = KERNELS.value or None if row.tool == "racecheck" else None
        made.append(about | dataclasses.asdict(row) | {"watched": watched})
        records.append_lines(
            lines, made[-1:]
        )  # at once: what follows may be ended from outside
    if SAVE.value:
        kept = records.folder_of(device) / "kernel_log" / lines.name
        records.append_lines(kept, made)
    print(f"written to {folder}")
    statuses = {line["status"] for line in made}
    if "wrong" in statuses:
        return exit_status.WRONG
    return exit_status.NOT_MEASURED if "timeout" in statuses else exit_status.OK


if __name__ == "__main__":
    cli.run(main, FLAGS)
