"""What a Triton kernel is to the rest of the library: a description, which needs no Triton.

The steps are written once for both frameworks; a framework's `ArrayOps.run` launches what is
described here on its own arrays.
"""

import dataclasses
import functools
import importlib
from typing import Any

from kernels_pallas.kernel import Array


@dataclasses.dataclass(frozen=True)
class TritonKernel:
    """One launch. The function takes the arrays that `run` is given, `scalars`, `outputs`, and
    `constants`, in this order; all arrays lie in memory row by row.

    Attributes:
      function: `module:name` of the `triton.jit` function, a module of this package.
      programs: of the launch's only axis, at least 1.
      scalars: what lengths decide, and the scale: no value compiles anything anew.
      outputs: shapes and dtypes.
      constants: what is compiled in, the only `tl.constexpr` of the function: a NamedTuple of
        sizes of a layer, of tiles, and switches.
      warps: of a program.
      stages: of the loops' loads.
    """

    function: str
    programs: int
    scalars: tuple[int | float, ...]
    outputs: tuple[Array, ...]
    constants: Any
    warps: int = 4
    stages: int = 1

    @functools.cached_property
    def jitted(self) -> Any:
        """The `triton.jit` function, which imports Triton."""
        module, name = self.function.split(":")
        return getattr(importlib.import_module(f"kernels_pallas.triton.{module}"), name)

    @property
    def name(self) -> str:
        return self.function.split(":")[1]
