"""What a call takes of the host, with and without CUDA graphs of launches.

    python -m bench.host_time
    python -m bench.host_time --rounds 4 --out host.jsonl
    python -m bench.host_time --implementation triton
    python -m bench.host_time --launch --out variants.jsonl

`nsa_torch.attention` of the same tensors again and again, on `mosaic`, so a Hopper GPU, or on
`triton`, whose launches are no graphs of ours: both forms are the same there. Machines
and minutes differ by more than what is compared, so both forms take turns, each in a process of
its own:

    graphs   launches that come again as one CUDA graph (`kernels_pallas.runtime.sequence`)
    each     every launch by itself

For each shape and pass, ms, median and 20th and 80th percentile of all rounds:

    host     until a call returns, the GPU idle before
    done     until the GPU is done too
    row      of a call where calls follow each other
    replay   of the same call as one CUDA graph of torch, replays following each other

and how many of our own graphs a call launches (`graphs_a_call`).

`--launch` measures one launch in place of calls, us: of torch in both forms, and of a compiled
program of JAX (`harness/launch_time.py`). Its lines are those of
`bench/records/<device>/kernel_log/variants.jsonl`.

Beside them stand what this host takes for a million additions in Python and for `add_` of torch
on eight numbers.
"""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from absl import flags

from .harness import cli, exit_status, launch_time, process, records
from .harness.attention_calls import Calls

FLAGS = flags.FlagValues()
at = {"flag_values": FLAGS}
CALLS = flags.DEFINE_integer("calls", 200, "Timed a form and round.", lower_bound=1, **at)
ROUNDS = flags.DEFINE_integer("rounds", 2, "Processes a form.", lower_bound=1, **at)
OUT = cli.define_lines(FLAGS)
COMMIT = cli.define_commit(FLAGS)
IMPLEMENTATION = flags.DEFINE_enum(
    "implementation", "mosaic", ["mosaic", "triton"], "Kernels.", **at
)
LAUNCH = flags.DEFINE_bool("launch", False, "One launch, of torch and of JAX.", **at)
FORMS = ("graphs", "each")
FORM = flags.DEFINE_enum("form", None, FORMS, "Only this one, in this process.", **at)

# batch, tokens, query heads, key/value heads, columns of a head
SHAPES: Mapping[str, tuple[int, int, int, int, int]] = {
    "1 x 4k, G=16": (1, 4096, 64, 4, 128),
    "1 x 8k, G=16": (1, 8192, 64, 4, 128),
    "8 x 2k, G=6, D=64": (8, 2048, 12, 2, 64),
}
PASSES = ("forward", "with backward")
TIMES = ("host", "done", "row", "replay")
BEFORE = 40  # calls before the first that is timed: graphs are made in these


def timed(call: Callable[[], Any], calls: int) -> dict[str, list[float]]:
    """Samples in ms of each of `TIMES`."""
    for _ in range(BEFORE):
        call()
    found: dict[str, list[float]] = {name: [] for name in TIMES}
    for _ in range(calls):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        returned = time.perf_counter()
        torch.cuda.synchronize()
        found["host"].append((returned - start) * 1e3)
        found["done"].append((time.perf_counter() - start) * 1e3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for name, again in ("row", call), ("replay", graph.replay):
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(max(calls // 5, 1)):
                again()
            torch.cuda.synchronize()
            found[name].append((time.perf_counter() - start) * 1e3 / max(calls // 5, 1))
    return found


def graphs_a_call(call: Callable[[], Any], calls: int = 20) -> float:
    """Mean number of graphs that a call launches."""
    from kernels_pallas.runtime.sequence import _Graph

    launches, start = [], _Graph.launch

    def counted(graph, stream):
        done = start(graph, stream)
        launches.append(done)
        return done

    with mock.patch.object(_Graph, "launch", counted):
        for _ in range(calls):
            call()
            torch.cuda.synchronize()
    return sum(launches) / calls


@contextlib.contextmanager
def form(name: str) -> Iterator[None]:
    """Within: launches in a row are graphs, or each is a launch."""
    from kernels_pallas.runtime import sequence

    before = sequence.GRAPH_AFTER
    sequence.GRAPH_AFTER = before if name == "graphs" else sys.maxsize
    try:
        yield
    finally:
        sequence.GRAPH_AFTER = before


def probes() -> dict[str, float]:
    """What this host takes for work that is not ours, ms."""
    start = time.perf_counter()
    total = 0
    for _ in range(1_000_000):
        total += 1
    python = (time.perf_counter() - start) * 1e3
    x = torch.zeros(8, device="cuda")
    x.add_(1)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(1000):
        x.add_(1)
    add = time.perf_counter() - start
    torch.cuda.synchronize()
    return {"python_million_ms": python, "torch_add_ms": add}


def one_form(name: str) -> dict[str, Any]:
    """Samples of every shape and pass, and the probes."""
    samples, graphs = {}, {}
    with form(name):
        for shape, sizes in SHAPES.items():
            calls = Calls.of(*sizes, IMPLEMENTATION.value)
            for which, call in zip(PASSES, (calls.forward, calls.both), strict=True):
                samples[f"{shape}/{which}"] = timed(call, CALLS.value)
                graphs[f"{shape}/{which}"] = graphs_a_call(call)
    return {"samples": samples, "graphs": graphs} | probes()


def summary(rounds: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """A row a shape, pass and form; `rounds`: what `one_form` returned, by form."""
    rows = []
    for shape in SHAPES:
        for which in PASSES:
            for name, found in rounds.items():
                row: dict[str, Any] = {"shape": shape, "pass": which, "form": name}
                for part in TIMES:
                    samples = [x["samples"][f"{shape}/{which}"][part] for x in found]
                    p20, median, p80 = np.percentile(np.concatenate(samples), [20, 50, 80])
                    row |= {f"{part}_ms": median, f"{part}_p20": p20, f"{part}_p80": p80}
                counts = [x["graphs"][f"{shape}/{which}"] for x in found]
                row["graphs_a_call"] = float(np.mean(counts))
                for probe in ("python_million_ms", "torch_add_ms"):
                    row[probe] = float(np.median([x[probe] for x in found]))
                rows.append(row)
    return rows


def launches() -> dict[str, float]:
    """Microseconds of a launch, by who queues it; medians of `--rounds`."""
    found: dict[str, list[float]] = {}
    for _ in range(ROUNDS.value):
        for name, which in ("torch, each by itself", "each"), ("torch, as graphs", "graphs"):
            with form(which):
                took = launch_time.microseconds(launch_time.of_torch, CALLS.value)
            found.setdefault(name, []).append(took)
        took = launch_time.microseconds(launch_time.of_jax, CALLS.value)
        found.setdefault("JAX, a compiled program", []).append(took)
    return {name: float(np.median(each)) for name, each in found.items()}


def one_launch() -> int:
    """Prints and keeps `launches`; the exit status."""
    commit = records.environment(COMMIT.value)["commit"]
    rows = [records.variant("launch", "us", *found, commit) for found in launches().items()]
    for row in rows:
        print(f"{row.extra['variant']:24} {row.time_ms:.2f} us a launch")
    if OUT.value:
        records.append(OUT.value, rows)
    return exit_status.OK


def main(argv: Sequence[str]) -> int:
    if LAUNCH.value:
        cli.refuse_beside(LAUNCH, (IMPLEMENTATION, FORM))
    if not torch.cuda.is_available():
        raise NotImplementedError("a GPU is needed, for mosaic a Hopper one")
    if LAUNCH.value:
        return one_launch()
    if FORM.value:
        print(json.dumps(one_form(FORM.value)), flush=True)
        return exit_status.OK
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in FORMS}
    for _ in range(ROUNDS.value):
        for name, found in rounds.items():
            words = [f"--calls={CALLS.value}", f"--implementation={IMPLEMENTATION.value}"]
            status, said = process.answer("bench.host_time", f"--form={name}", *words)
            if status:
                print(f"{name}: exit status {status}", flush=True)
                return exit_status.worst([status])
            found.append(said)
    rows = summary(rounds)
    for row in rows:
        times = ", ".join(
            f"{part} {row[f'{part}_ms']:.3f} ({row[f'{part}_p20']:.3f} to {row[f'{part}_p80']:.3f})"
            for part in TIMES
        )
        graphs = f"{row['graphs_a_call']:g} graphs a call"
        print(
            f"{row['shape']:18} {row['pass']:13} {row['form']:6} {times}, {graphs}", flush=True
        )
    print(
        f"a million additions in Python {rows[0]['python_million_ms']:.1f} ms, "
        f"`add_` of torch {rows[0]['torch_add_ms'] * 1e3:.1f} us"
    )
    if OUT.value:
        about = {
            "device": torch.cuda.get_device_name(),
            "implementation": IMPLEMENTATION.value,
        }
        made = (records.record("host_time", COMMIT.value, **about, **row) for row in rows)
        records.append(OUT.value, made)
    return exit_status.OK


if __name__ == "__main__":
    cli.run(main, FLAGS)
