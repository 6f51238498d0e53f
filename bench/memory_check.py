"""Runs Mosaic kernels under `compute-sanitizer`, in layers forward and backward, on this GPU.

    python -m bench.memory_check
    python -m bench.memory_check --only gathered --tool racecheck --kernels gathered

| tool | what it finds |
|---|---|
| `memcheck` | an address outside every allocation |
| `synccheck` | a barrier that not all threads reach |
| `racecheck` | threads that reach the same shared memory with no barrier between |

`bench.harness.checked_layer` has the layers, and the kernels that each layer must run. Each layer
first runs without a tool. The run without a tool builds the kernels of the layer. After the run
without a tool, the layer runs under every tool. Up to `--at_once` processes run at the same time.
The caching allocator of torch is disabled, since `memcheck` cannot detect addresses past the end of
a tensor within the large blocks of this allocator. Each tool must first find a planted fault;
otherwise no layer runs under this tool.

A row is `ok`, `wrong` (the tool found an error, the results of a layer have other bits, or a
required kernel did not run) or `timeout`. Logs are in `--out`, with memory_check.jsonl.
`--save_records` appends the lines of memory_check.jsonl to
bench/records/<device>/kernel_log/memory_check.jsonl.
"""

import contextlib
import json
import re
import shutil
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch

from . import run
from .harness import checked_layer, cli, command, exit_status, process, records
from .harness.checked_layer import LAYERS, TOOLS
from .harness.records import Values

FLAGS = cli.define(
    only=((), "Only layers whose names begin with this text (repeatable)."),
    tool=(TOOLS, "Tools to run (repeatable).", TOOLS),
    kernels=("", "With --tool=racecheck: only kernels whose names contain this."),
    at_once=(8, "Number of processes that run at the same time."),
    timeout_s=(300, "Time limit of a process."),
    out=(str, "Folder for the results, which must not exist; default: bench/results/<time>."),
    save_records=(False, "Also append the records to bench/records/<device>/kernel_log/."),
)

SANITIZER = "compute-sanitizer"
CHILD = "bench.harness.checked_layer"
ALONE = "alone"  # the name in a row for a run without a tool
ALL_KERNELS = checked_layer.symbol("")  # a part that the symbols of all Mosaic kernels contain
SUMMARY = re.compile(r"SUMMARY: (\d+) (?:error|hazard)")
# Several processes share the GPU. torch's caching allocator is off.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def watched(tool: str, layer: str, folder: Path) -> Values:
    """Run a layer under a tool, or the planted fault if `layer` is "", and judge the result. In the
    returned row, `ran` is the output of `checked_layer`, and `watched` is `--kernels` if the tool
    checked only the kernels of this flag.
    """
    log = f"{tool}, {layer or 'planted'}"
    sanitizer = [] if tool == ALONE else [SANITIZER, "--tool", tool]
    kernels = (FLAGS.kernels or None) if tool == "racecheck" else None
    if tool == "racecheck":  # this tool is slow and therefore checks only Mosaic kernels
        sanitizer += ["--kernel-regex", f"kns={kernels or ALL_KERNELS}"]
    name = FLAGS.kernels or "planted"
    words = [CHILD, *([layer] if layer else [f"--name={name}", f"--planted={tool}"])]
    how = {"budget": False, "before": sanitizer, "variables": ENVIRONMENT}
    done = process.run(log, words, folder, FLAGS.timeout_s, **how)
    text = (folder / f"{log}.log").read_text(errors="replace")
    found = sum(map(int, SUMMARY.findall(text)))
    lines = [line for line in text.splitlines() if line.startswith('{"kernels"')]
    ran = json.loads(lines[-1]) if lines else {}
    row = {"tool": tool, "layer": layer, "status": "ok", "seconds": done.seconds}
    row |= {"ran": ran, "watched": kernels}
    if done.status == "timeout":
        return row | {"status": "timeout", "reason": done.reason}
    if not layer:
        caught = found and checked_layer.symbol(name) in text
        reason = "" if caught else "the tool does not find the planted fault"
    elif found:
        reason = f"{tool} found {found}"
    elif not ran:
        reason = done.reason or "it said nothing"
    elif tool != ALONE and not SUMMARY.search(text):
        reason = f"the log has no summary of {tool}"
    else:
        reason = ran["fault"] or done.reason
    return row | ({"status": "wrong", "reason": reason} if reason else {})


def check(
    layers: Sequence[str], tools: Sequence[str], folder: Path
) -> Generator[Values, None, None]:
    """Yield the rows of all layers without a tool, and of the planted faults. Then yield the rows
    of all layers whose results were right, under each tool that found its planted fault. The
    processes end if the caller stops iterating.

    Raises:
      ValueError: `--kernels` matches no kernel of a layer.
    """
    pool = ThreadPoolExecutor(FLAGS.at_once)
    futures: list[Future[Values]] = []

    def rows(pairs: Sequence[tuple[str, str]]) -> Iterator[Values]:
        futures[:] = [pool.submit(watched, *pair, folder) for pair in pairs]
        return (future.result() for future in futures)

    try:
        bits, trusted = {}, []
        for row in rows([(ALONE, layer) for layer in layers] + [(tool, "") for tool in tools]):
            yield row
            if row["status"] == "ok" and row["layer"]:
                bits[row["layer"]] = row["ran"]["digest"]
                names = [*row["ran"]["kernels"]]
                if not any(FLAGS.kernels in checked_layer.symbol(name) for name in names):
                    raise ValueError(
                        f"--kernels must be part of the name of a kernel of {row['layer']!r}, "
                        f"which runs {', '.join(names)}"
                    )
            elif row["status"] == "ok":
                trusted.append(row["tool"])
        for row in rows([(tool, layer) for tool in trusted for layer in bits]):
            if row["status"] == "ok" and row["ran"]["digest"] != bits[row["layer"]]:
                row |= {
                    "status": "wrong",
                    "reason": "the results have other bits than without a tool",
                }
            yield row
    finally:
        for future in futures:
            future.cancel()
        while wait(futures, timeout=0.2).not_done:
            process.end_all()
        pool.shutdown()


def main(argv: Sequence[str]) -> int:
    layers = cli.chosen(FLAGS.only, LAYERS)
    if FLAGS.kernels and "racecheck" not in FLAGS.tool:
        raise ValueError(
            "--kernels requires --tool=racecheck, since other tools check all kernels"
        )
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise NotImplementedError("a Hopper GPU is needed")
    if not shutil.which(SANITIZER):
        raise NotImplementedError(f"{SANITIZER} of the CUDA toolkit must be on PATH")
    lines = command.new_folder(FLAGS.out) / "memory_check.jsonl"
    lines.parent.mkdir(parents=True, exist_ok=True)
    device: Values = {"device": torch.cuda.get_device_name()}
    rows = check(layers, [*dict.fromkeys(FLAGS.tool)], lines.parent)
    try:
        with process.interruptible(), contextlib.closing(rows):
            found = (device | row for row in rows)
            statuses = run.rows("memory_check", FLAGS, found, shown, out=lines)
    except process.Interrupted as error:
        print(f"interrupted by {error}: {lines.parent}")
        return 128 + error.number
    if FLAGS.save_records:
        records.keep(records.read(lines), f"kernel_log/{lines.name}")
    print(f"written to {lines.parent}")
    return exit_status.of_statuses(statuses)


def shown(row: Values) -> Values:
    """Return the values of the printed line."""
    tiles = row["ran"].get("gathered_tiles")
    more = row.get("reason") or (f"{tiles} tiles gathered" if tiles else None)
    return {"more": more, "name": row["layer"] or "planted fault"}


if __name__ == "__main__":
    cli.run(main, FLAGS)
