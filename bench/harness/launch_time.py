"""What one launch of a kernel takes of the host: by torch, and by a program of JAX.

A small kernel runs so and so often in a row, each time on what the last one wrote. What a long row
takes more than a short one, by the launches that it has more, is a launch without what a call does
once.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from kernels_pallas.kernel import Kernel
from kernels_pallas.specs.combine import Combine, gated_sum
from nsa_interop import launch

ROWS, WIDTH = 64, 64
FEW, MANY = 8, 72  # launches of a row
BEFORE = 40  # rows before the first that is timed


def kernel() -> Kernel:
    """Of one CTA: some 2 us of a GPU."""
    return gated_sum(Combine(ROWS, WIDTH, 1, "bfloat16"))


def chain(run: Callable[..., Any], count: int, gate: Any, x: Any) -> Any:
    """What the last of `count` launches writes."""
    for _ in range(count):
        (x,) = run(kernel(), gate, x)
    return x


def of_torch(count: int) -> Callable[[], Any]:
    """A row of launches as plans have them (`nsa_torch.execute`)."""
    from nsa_torch.plans import Planned

    gate, x = torch.ones(1, ROWS, 1), torch.ones(ROWS, WIDTH, dtype=torch.bfloat16)
    arrays = gate.cuda(), x.cuda()
    planned = Planned(lambda ops, *arrays: [chain(ops.run, count, *arrays)])
    return lambda: planned(*arrays)


def of_jax(count: int) -> Callable[[], Any]:
    """The same as custom calls of a compiled program."""
    import jax
    import jax.numpy as jnp

    from nsa_jax.jax_ops import JAX_OPS

    arrays = jnp.ones((1, ROWS, 1)), jnp.ones((ROWS, WIDTH), jnp.bfloat16)
    program = jax.jit(functools.partial(chain, JAX_OPS.run, count))
    return lambda: program(*arrays)


def in_a_row(call: Callable[[], Any], calls: int, wait: Callable[[Any], Any]) -> float:
    """Microseconds of a call where calls follow each other: the median of five."""
    for _ in range(BEFORE):
        wait(call())
    found = []
    for _ in range(5):
        start, last = time.perf_counter(), None
        for _ in range(calls):
            last = call()
        wait(last)
        found.append((time.perf_counter() - start) * 1e6 / calls)
    return statistics.median(found)


def microseconds(row: Callable[[int], Callable[[], Any]], calls: int) -> float:
    """Of a launch of `of_torch` or `of_jax`."""
    launch.prepare([kernel()], 0)

    def wait(result: Any) -> None:
        if row is of_torch:
            torch.cuda.synchronize()
        else:
            result.block_until_ready()

    few, many = (in_a_row(row(count), calls, wait) for count in (FEW, MANY))
    return (many - few) / (MANY - FEW)
