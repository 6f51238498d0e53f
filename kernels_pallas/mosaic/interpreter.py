"""Where the programs of warps run while kernels are interpreted.

Pallas' interpreter has no instructions of a warp. Who interprets kernels, which are the tests,
hands over a machine that has them (`use`); a kernel that is compiled never asks for one.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np


class Machine(Protocol):
    """Runs programs on the functions of `warp.py`, of `warp.py` in clusters of CTAs."""

    def run(
        self,
        program: Callable[..., None],
        sizes: Any,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        *,
        cluster: int | None,
        grid: Sequence[int],
        warps: int,
        shared: Sequence[tuple[int, ...]],
        kv_heads: int | None,
    ) -> tuple[np.ndarray, ...]:
        """The outputs of a kernel of `warp_kernel.py`; `cluster`: None of the module `warp`."""
        ...

    def warpgroup(
        self,
        program: Callable[..., None],
        shared: Sequence[np.ndarray],
        arguments: Sequence[Any],
    ) -> list[np.ndarray]:
        """What a warpgroup leaves in these arrays in shared memory.

        `program(instructions, *shared, *arguments)`: scalars of `arguments` are words, arrays
        `[4, 32]` a value a lane, arrays of other shapes in global memory.
        """
        ...


_machines: list[Machine] = []


def use(machine: Machine) -> None:
    """From now on warps run on `machine`."""
    _machines[:] = [machine]


def machine() -> Machine:
    """What warps run on.

    Raises:
      RuntimeError: nobody handed one over.
    """
    if not _machines:
        raise RuntimeError(
            "interpreted kernels need a machine for programs of warps: interpreter.use(machine)"
        )
    return _machines[0]
