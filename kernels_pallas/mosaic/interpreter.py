"""Registers an emulator of warps, the machine, for kernels that run in the Pallas interpreter.

The Pallas interpreter has no instructions of a warp. Tests therefore call `use` with a machine that
emulates the instructions of a warp.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

_machine: Any = None


def use(machine: Any) -> None:
    """Set the machine.

    The functions `run` and `warpgroup` of the machine run programs that use the functions of
    `warp.py`.
    """
    global _machine
    _machine = machine


def machine() -> Any:
    """Return the machine that `use` has set.

    Raises:
      RuntimeError: No machine is registered.
    """
    if _machine is None:
        raise RuntimeError(
            "kernels with warp programs can be interpreted only with a machine; call "
            "interpreter.use(machine)"
        )
    return _machine


def written(
    program: Callable[..., None],
    arrays: Sequence[Any],
    scalars: Sequence[Any],
    outputs: Sequence,
) -> list[Any]:
    """Run a program in a warpgroup and return the arrays that the program writes to shared
    memory. The arrays have 32-bit numbers of the types `outputs`. The arguments of
    `program(warp, arrays, words, places)` are the instructions, the whole `arrays`, the scalars
    as words, and the addresses of the outputs.
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
