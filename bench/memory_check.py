"""Mosaic kernels under `compute-sanitizer`: layers forward and backward, on this GPU.

    python -m bench.memory_check
    python -m bench.memory_check --only gathered --tool racecheck --kernels gathered

| tool | what it finds |
|---|---|
| `memcheck` | an address outside every allocation |
| `synccheck` | a barrier that not all threads reach |
| `racecheck` | threads that reach the same shared memory with no barrier between |

`bench.harness.checked_layer` has the layers, and the kernels of each that have to run. Each layer
first runs without a tool, which builds its kernels; then under every tool, `--at_once` processes
together. torch's caching allocator is off: within its large blocks `memcheck` would not see an
address past the end of a tensor. Each tool must first find a fault that is planted for it,
otherwise no layer runs under it.

A row is `ok`, `wrong` (the tool found something, a layer gave other bits, or a kernel did not run
that has to) or `timeout`. Logs are in `--out`, with memory_check.jsonl; `--save_records` appends
its lines to bench/records/<device>/kernel_log/memory_check.jsonl.
"""

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Literal

import torch

from .harness import checked_layer, cli, command, exit_status, process, records
from .harness.checked_layer import LAYERS, TOOLS

FLAGS = cli.define(
    only=((), "Layers whose names begin so (repeatable)."),
    tool=(TOOLS, "Repeatable.", TOOLS),
    kernels=("", "racecheck: only kernels whose names contain this."),
    at_once=(8, "Processes side by side."),
    timeout_s=(300, "Of a process."),
    out=(str, "A new folder; default: bench/results/<time>."),
    save_records=(False, "Keep the records."),
)

SANITIZER = "compute-sanitizer"
CHILD = "bench.harness.checked_layer"
ALONE = "alone"  # in place of a tool
ALL_KERNELS = checked_layer.symbol("")  # what the symbols of all Mosaic kernels contain
SUMMARY = re.compile(r"SUMMARY: (\d+) (?:error|hazard)")
# Several processes share the GPU. torch's caching allocator is off.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


@dataclasses.dataclass(frozen=True)
class Row:
    """The outcome of a layer, or of the planted fault where `layer` is "".

    Attributes:
      reason: why it is not `ok`.
      ran: The result of `checked_layer.check`; empty if there is none.
      watched: `--kernels` where the tool looked at these only.
    """

    tool: str
    layer: str
    status: Literal["ok", "wrong", "timeout"]
    seconds: float
    reason: str
    ran: dict[str, Any]
    watched: str | None


def run(tool: str, layer: str, folder: Path) -> Row:
    """Runs a process and judges it; `compared` judges the bits of a layer under a tool."""
    log = f"{tool}, {layer or 'planted'}"
    sanitizer = [] if tool == ALONE else [SANITIZER, "--tool", tool]
    watched = (FLAGS.kernels or None) if tool == "racecheck" else None
    if tool == "racecheck":  # which takes long
        sanitizer += ["--kernel-regex", f"kns={watched or ALL_KERNELS}"]
    name = FLAGS.kernels or "planted"
    words = [CHILD, *([layer] if layer else [f"--name={name}", f"--planted={tool}"])]
    how = {"budget": False, "before": sanitizer, "variables": ENVIRONMENT}
    done = process.run(log, words, folder, FLAGS.timeout_s, **how)
    text = (folder / f"{log}.log").read_text(errors="replace")
    found = sum(map(int, SUMMARY.findall(text)))
    lines = [line for line in text.splitlines() if line.startswith('{"kernels"')]
    ran = json.loads(lines[-1]) if lines else {}
    if done.status == "timeout":
        return Row(tool, layer, "timeout", done.seconds, done.reason, ran, watched)
    if not layer:
        caught = found and checked_layer.symbol(name) in text
        reason = "" if caught else "it does not find the fault that was planted"
    elif found:
        reason = f"{tool} found {found}"
    elif not ran:
        reason = done.reason or "it said nothing"
    elif tool != ALONE and not SUMMARY.search(text):
        reason = f"no summary of {tool}"
    else:
        reason = ran["fault"] or done.reason
    status = "wrong" if reason else "ok"
    return Row(tool, layer, status, done.seconds, reason, ran, watched)


def compared(row: Row, alone: Row) -> Row:
    """`row`, which is wrong if the layer gave other bits under the tool."""
    if row.status != "ok" or row.ran["digest"] == alone.ran["digest"]:
        return row
    return dataclasses.replace(row, status="wrong", reason="other bits than alone")


def show(row: Row) -> None:
    tiles = row.ran.get("gathered_tiles")
    more = row.reason or (f"{tiles} tiles gathered" if tiles else "")
    name = row.layer or "planted fault"
    print(f"{row.tool:10} {name:28} {row.status:8} {row.seconds:6.1f} s  {more}", flush=True)


def check(layers: Sequence[str], tools: Sequence[str], folder: Path) -> Iterator[Row]:
    """Layers without a tool and the planted faults; then the layers that were right, under the
    tools that found theirs. Processes are ended where the caller stops waiting for rows.

    Raises:
      ValueError: a layer has no kernel that `--kernels` names.
    """
    pool = ThreadPoolExecutor(FLAGS.at_once)
    futures: list[Future[Row]] = []

    def rows(pairs: Sequence[tuple[str, str]]) -> Iterator[Row]:
        futures[:] = [pool.submit(run, tool, layer, folder) for tool, layer in pairs]
        return (future.result() for future in futures)

    try:
        alone, trusted = {}, []
        for row in rows([(ALONE, layer) for layer in layers] + [(tool, "") for tool in tools]):
            yield row
            if row.status == "ok" and row.layer:
                alone[row.layer] = row
                _check_watched(row)
            elif row.status == "ok":
                trusted.append(row.tool)
        for row in rows([(tool, layer) for tool in trusted for layer in alone]):
            yield compared(row, alone[row.layer])
    finally:
        for future in futures:
            future.cancel()
        while wait(futures, timeout=0.2).not_done:
            process.end_all()
        pool.shutdown()


def _check_watched(row: Row) -> None:
    kernels = row.ran["kernels"]
    if not any(FLAGS.kernels in checked_layer.symbol(name) for name in kernels):
        raise ValueError(f"--kernels: {row.layer!r} runs {', '.join(kernels)}")


def main(argv: Sequence[str]) -> int:
    layers = cli.chosen(FLAGS.only, LAYERS)
    if FLAGS.kernels and "racecheck" not in FLAGS.tool:
        raise ValueError("--kernels is for --tool=racecheck: other tools watch all kernels")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise NotImplementedError("a Hopper GPU is needed")
    if not shutil.which(SANITIZER):
        raise NotImplementedError(f"{SANITIZER} of the CUDA toolkit must be on PATH")
    lines = command.new_file(FLAGS.out, "memory_check.jsonl")
    folder = lines.parent
    folder.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name()
    made, statuses = [], []
    try:
        with process.interruptible():
            for row in check(layers, list(dict.fromkeys(FLAGS.tool)), folder):
                show(row)
                statuses.append(row.status)
                about = {"device": device, **dataclasses.asdict(row)}
                made.append(records.record("memory_check", FLAGS.commit, **about))
                records.append(lines, made[-1:])
    except process.Interrupted as error:
        print(f"interrupted by {error}: {folder}")
        return 128 + error.number
    if FLAGS.save_records:
        kept = records.folder_of(device) / "kernel_log" / lines.name
        records.append(kept, made)
    print(f"written to {folder}")
    return exit_status.of_statuses(statuses)


if __name__ == "__main__":
    cli.run(main, FLAGS)
