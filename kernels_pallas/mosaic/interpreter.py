"""Holds the machine that runs the programs of warps while kernels are interpreted.

Pallas' interpreter has no instructions of a warp. The tests, which interpret kernels, pass a
machine that has them to `use`. Compiled kernels need no machine.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

_machine: Any = None


def use(machine: Any) -> None:
    """Runs warps on `machine`, whose functions `run` and `warpgroup` run programs on the functions
    of `warp.py`.
    """
    global _machine
    _machine = machine


def machine() -> Any:
    """Return the machine of `use`.

    Raises:
      RuntimeError: There is none.
    """
    if _machine is None:
        raise RuntimeError(
            "interpreted kernels of warps need a machine; call interpreter.use(machine)"
        )
    return _machine


def written(
    program: Callable[..., None],
    arrays: Sequence[Any],
    scalars: Sequence[Any],
    outputs: Sequence,
) -> list[Any]:
    """Return the arrays of 32-bit numbers, with the types `outputs`, that a warpgroup writes to
    shared memory.

    The arguments of `program(warp, arrays, words, places)` are the instructions, the whole
    `arrays`, the scalars as words and the addresses of the outputs.
    """

    def run(arrays, scalars):
        arrays = [np.asarray(x) for x in arrays]

        def of_warps(warp, *arguments):
            program(warp, arrays, arguments[len(outputs) :], arguments[: len(outputs)])

        found = [np.empty(x.shape, x.dtype) for x in outputs]
        return machine().warpgroup(of_warps, found, [np.int32(x) for x in scalars])

    return jax.pure_callback(run, list(outputs), [x[...] for x in arrays], list(scalars))


def shape_of(array: Any) -> Sequence[int]:
    """Return the shape of a reference in a kernel, or of an array."""
    return array.type.shape if hasattr(array, "type") else array.shape
