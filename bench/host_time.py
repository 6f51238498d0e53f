"""Measures the host time of a call, with and without CUDA graphs of launches.

    python -m bench.host_time
    python -m bench.host_time --rounds 4 --out host.jsonl
    python -m bench.host_time --implementation triton
    python -m bench.host_time --launch --out variants.jsonl

`nsa_torch.attention` is called repeatedly on the same tensors. The calls run on `mosaic`, which
needs a Hopper GPU, or on `triton`, whose launches the library never combines into graphs. Since
host times vary between machines and from minute to minute, two forms of a call are timed
alternately, each in its own process:

- `graphs`: the library combines repeated launches into one CUDA graph
  (`kernels_pallas.runtime.sequence`).
- `each`: every launch is separate.

Each shape and pass has these times per call in ms. All times are medians of the rounds and have a
20th and an 80th percentile:

- `host`: the time until the call returns, if the GPU was idle.
- `done`: the time until the GPU is done too.
- `row`: the time per call in a series of consecutive calls.
- `replay`: the time per replay in a series of replays, with the call captured in one CUDA graph of
  torch.

`graphs_a_call` is the number of the library's own graphs that a call launches.

`--launch` measures one launch in us instead of calls. Launches are measured in torch in both forms,
and in JAX in a compiled program. A small kernel runs 8 or 72 times in a series, each time on the
output of the previous launch. The time of a launch is the difference between the series of 72 and
of 8 launches, divided by 64. The difference excludes the constant part of a call. The lines have
the format of `bench/records/<device>/kernel_log/variants.jsonl`.

Without `--launch` the output also has the times of this host for a million additions in Python and
for torch's `add_` on eight numbers.
"""

import contextlib
import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch

from kernels_pallas.kernel import Kernel
from kernels_pallas.specs.combine import Combine, gated_sum
from nsa_interop import launch

from . import run
from .harness import cli, exit_status, process, timing
from .harness.records import Values
from .harness.timed_problem import Problem, named, torch_calls

FORMS = ("graphs", "each")
FLAGS = cli.define(
    calls=(200, "Number of timed calls per form and round."),
    rounds=(2, "Number of processes per form."),
    implementation=("mosaic", "Implementation of all branches.", ("mosaic", "triton")),
    launch=(False, "Measure one launch in torch and in JAX, instead of calls."),
    form=(str, "Internal: measure only this form, in this process.", FORMS),
)
cli.define_lines(FLAGS)
PASSES = {"forward": "forward", "with backward": "fwdbwd"}
BEFORE = 40  # number of untimed calls first, in which the library builds its graphs
ROWS, WIDTH, FEW, MANY = 64, 64, 8, 72  # sizes of the kernel, and launches in a series


def graphs_a_call(call: Callable[[], Any], calls: int = 20) -> float:
    """Return the mean number of the library's graphs that a call launches."""
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
    """Return a context for the form `name`. In this context, consecutive launches become a graph or
    remain separate launches.
    """
    from kernels_pallas.runtime import sequence

    before = sequence.GRAPH_AFTER
    sequence.GRAPH_AFTER = before if name == "graphs" else sys.maxsize
    try:
        yield
    finally:
        sequence.GRAPH_AFTER = before


def probes() -> dict[str, float]:
    """Return the time of this host for work outside the library, in ms."""

    def additions():
        total = 0
        for _ in range(1_000_000):
            total += 1

    x = torch.zeros(8, device="cuda")
    (python,) = timing.in_a_row(additions, samples=1)
    (add,) = timing.in_a_row(lambda: x.add_(1), 1000, 1, warmup=1)
    return {"python_million_ms": python, "torch_add_ms": add}


def one_form(name: str) -> Iterator[Values]:
    """Yield a row per shape and pass for the form `name`."""
    host, calls, fifth = probes(), FLAGS.calls, max(FLAGS.calls // 5, 1)
    for shape, sizes in named("host").items():
        problem = Problem(name=shape, implementation=FLAGS.implementation, **sizes)
        of, _ = torch_calls(problem)
        for which, mode in PASSES.items():
            call = of[mode]
            timing.in_a_row(call, BEFORE, 1)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            found = {
                "host": timing.in_a_row(call, samples=calls),
                "done": timing.in_a_row(call, samples=calls, done=True),
                "row": timing.in_a_row(call, fifth, 5, done=True),
                "replay": timing.in_a_row(graph.replay, fifth, 5, done=True),
            }
            row: Values = {"shape": shape, "pass": which, "form": name}
            for part, samples in found.items():
                p20, median, p80 = np.percentile(samples, [20, 50, 80]).tolist()
                row |= {f"{part}_ms": median, f"{part}_p20": p20, f"{part}_p80": p80}
            yield row | {"graphs_a_call": graphs_a_call(call)} | host


def merged(rounds: Sequence[Sequence[Values]]) -> Iterator[Values]:
    """Merge the rows of several rounds of one form. Numbers become medians over the rounds."""
    for same in zip(*rounds, strict=True):
        median = lambda name, same=same: statistics.median(row[name] for row in same)
        yield {k: x if isinstance(x, str) else median(k) for k, x in same[0].items()}


def kernel() -> Kernel:
    """Return a kernel of one CTA, which takes about 2 us on a GPU."""
    return gated_sum(Combine(ROWS, WIDTH, 1, "bfloat16"))


def chain(run: Callable[..., Any], count: int, gate: Any, x: Any) -> Any:
    """Run `count` launches, each on the output of the previous launch, and return the last
    output.
    """
    for _ in range(count):
        (x,) = run(kernel(), gate, x)
    return x


def of_torch(count: int) -> Callable[[], Any]:
    """Return a function that makes `count` launches from a plan (`nsa_torch.plans`)."""
    from nsa_torch.plans import Planned

    gate, x = torch.ones(1, ROWS, 1), torch.ones(ROWS, WIDTH, dtype=torch.bfloat16)
    arrays = gate.cuda(), x.cuda()
    planned = Planned(lambda ops, *arrays: [chain(ops.run, count, *arrays)])
    return lambda: planned(*arrays)


def of_jax(count: int) -> Callable[[], Any]:
    """Return a function that makes `count` launches as custom calls of a compiled program."""
    import jax
    import jax.numpy as jnp

    from nsa_jax.jax_ops import JAX_OPS

    arrays = jnp.ones((1, ROWS, 1)), jnp.ones((ROWS, WIDTH), jnp.bfloat16)
    program = jax.jit(functools.partial(chain, JAX_OPS.run, count))
    return lambda: program(*arrays)


def microseconds(row: Callable[[int], Callable[[], Any]], calls: int) -> float:
    """Return the time of a launch of `of_torch` or `of_jax`, in us."""
    import jax

    launch.prepare([kernel()], 0)
    how: Values = {"wait": None if row is of_torch else jax.block_until_ready}

    def took(count: int) -> float:
        call = row(count)
        timing.in_a_row(call, samples=BEFORE, **how)
        return float(np.median(timing.in_a_row(call, calls, 5, done=True, **how)))

    return (took(MANY) - took(FEW)) * 1e3 / (MANY - FEW)


def launches() -> dict[str, float]:
    """Return the time of a launch in us by framework and form, as medians of `--rounds`."""
    kinds = {
        "torch, each by itself": ("each", of_torch),
        "torch, as graphs": ("graphs", of_torch),
        "JAX, a compiled program": ("graphs", of_jax),
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(FLAGS.rounds):
        for name, (which, row) in kinds.items():
            with form(which):
                found[name].append(microseconds(row, FLAGS.calls))
    return {name: float(np.median(each)) for name, each in found.items()}


def main(argv: Sequence[str]) -> int:
    if FLAGS.launch:
        cli.refuse_beside(FLAGS["launch"], (FLAGS["implementation"], FLAGS["form"]))
    if not torch.cuda.is_available():
        raise NotImplementedError("a GPU is needed (for mosaic, a Hopper GPU)")
    if FLAGS.launch:
        for name, time in launches().items():
            run.variants(FLAGS, "launch", name, {"us": time})
        return exit_status.OK
    if FLAGS.form:
        with form(FLAGS.form):
            print(json.dumps([*one_form(FLAGS.form)]), flush=True)
        return exit_status.OK
    rounds: dict[str, list[list[Values]]] = {name: [] for name in FORMS}
    words = [f"--calls={FLAGS.calls}", f"--implementation={FLAGS.implementation}"]
    for _ in range(FLAGS.rounds):
        for name, found in rounds.items():
            status, said = process.answer("bench.host_time", f"--form={name}", *words)
            if status:
                print(f"{name}: exit status {status}", flush=True)
                return exit_status.worst([status])
            found.append(said)
    about = {"device": torch.cuda.get_device_name(), "implementation": FLAGS.implementation}
    forms = zip(*map(merged, rounds.values()), strict=True)
    made: list[Values] = [about | row for same in forms for row in same]
    run.rows("host_time", FLAGS, made)
    print(
        f"a million additions in Python {made[0]['python_million_ms']:.1f} ms, "
        f"`add_` of torch {made[0]['torch_add_ms'] * 1e3:.1f} us"
    )
    return exit_status.OK


if __name__ == "__main__":
    cli.run(main, FLAGS)
