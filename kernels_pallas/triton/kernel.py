"""Describes a Triton kernel without importing Triton.

The steps in `nsa_core.steps` are written once for both frameworks. A framework's `ArrayOps.run`
launches the described kernels on its own arrays.
"""

import collections
import dataclasses
import functools
import importlib
from collections.abc import Sequence
from typing import Any, Self

from kernels_pallas.kernel import Array
from kernels_pallas.specs.tile import LOG2E, cdiv  # noqa: F401, for descriptions


@dataclasses.dataclass(frozen=True)
class TritonKernel:
    """The description of one launch.

    The arguments of the launched function are the arrays of `run`, `scalars`, `outputs` and
    `constants`, in this order. All arrays are contiguous in row-major order.

    Attributes:
      function: `module:name` of the `triton.jit` function in this package.
      programs: Number of programs of the launch, at least 1. The grid of a launch has one axis.
      scalars: The numbers that depend on lengths, and floats such as the scale. The values of
        `scalars` are not compiled into the code.
      outputs: Shapes and dtypes of the outputs.
      constants: A NamedTuple of the compiled numbers: the sizes of a layer, sizes of tiles, and
        switches. `constants` is the only `tl.constexpr` of the function.
      warps: Number of warps per program.
      stages: Number of pipeline stages for the loads of loops.
    """

    function: str
    programs: int
    scalars: Sequence[int | float]
    outputs: Sequence[Array]
    constants: Any
    warps: int = 4
    stages: int = 1

    @classmethod
    def of(
        cls, function: str, programs: int, scalars, outputs, launch=(4, 1), **constants: Any
    ) -> Self:
        """Return a kernel.

        `launch` has the numbers of warps and stages, and `constants` has the compiled constants.
        All launches of a function have the same names of constants.
        """
        values = _constants(*constants)(**constants)
        return cls(function, programs, tuple(scalars), tuple(outputs), values, *launch)

    @functools.cached_property
    def jitted(self) -> Any:
        """The `triton.jit` function, which imports Triton."""
        module, name = self.function.split(":")
        function = getattr(importlib.import_module(f"kernels_pallas.triton.{module}"), name)
        return _for_any_number(function, len(self.scalars), len(self.outputs))

    @property
    def name(self) -> str:
        return self.function.split(":")[1]


@functools.cache
def _for_any_number(function: Any, scalars: int, outputs: int) -> Any:
    """Return a kernel that Triton does not compile again if its scalars change."""
    import triton

    end = len(function.arg_names) - 1 - outputs
    return triton.jit(do_not_specialize=[*range(end - scalars, end)])(function.fn)


@functools.cache
def _constants(*names: str) -> Any:
    return collections.namedtuple("Constants", names)  # pyrefly: ignore
