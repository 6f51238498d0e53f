"""Describes the sizes of a branch on Triton kernels, and the kernels that split a layer's
projection.

This module does not import Triton. The steps (`nsa_core.steps.triton_forward`, ..) describe their
own launches.
"""

import dataclasses
from typing import Any, NamedTuple

from kernels_pallas.triton import tiling as tilings
from kernels_pallas.triton.kernel import LOG2E, TritonKernel, cdiv
from kernels_pallas.triton.tiling import Tiling, power, precision

SPLIT_NUMBERS = 4096  # number of elements of a head per program of `split_heads`


class Problem(NamedTuple):
    """The sizes of one branch and its GPU. `nsa_core.types` explains the letters.

    Attributes:
      capability: Compute capability of the GPU, which limits the size of tiles.
    """

    B: int
    T: int
    S: int
    H: int
    Hkv: int
    D: int
    Dv: int
    dtype: str
    scale: float
    capability: tuple[int, int]

    @property
    def group(self) -> int:
        return self.H // self.Hkv

    @property
    def pairs(self) -> int:
        """The number of batch rows times the number of key/value heads."""
        return self.B * self.Hkv

    @property
    def log2_scale(self) -> float:
        return self.scale * LOG2E

    def tiling(self, kernel: str, rows: int | None = None, keys: int | None = None) -> Tiling:
        """Return the tiling of a kernel (`tiling.needed`) with at most `rows` rows and `keys`
        keys per tile. A given `rows` replaces the default bound. `keys` can only reduce the
        default bound.

        Raises:
          NotImplementedError: No tiles fit in the shared memory of the GPU.
        """
        largest = tilings.most(kernel, self.capability, self.D, self.Dv)
        limits = rows or largest[0], min(keys or largest[1], largest[1])
        widths = self.D, self.Dv, tilings.itemsize(self.dtype)
        found = tilings.choose(kernel, *limits, *widths, self.capability)
        if found is None:
            raise NotImplementedError(
                f"triton: no tiles for {self.dtype}, D={self.D}, Dv={self.Dv} fit in the shared "
                f"memory of compute capability {self.capability}"
            )
        return found

    def kernel(
        self, launch: tuple[str, Tiling, int], scalars, outputs, **constants: Any
    ) -> TritonKernel:
        """Return an attention kernel with the scalars T, S and `scalars`. `launch` has the
        function, the tiles, and the number of programs per batch row and key/value head.
        """
        function, tiling, programs = launch
        return TritonKernel.of(
            function,
            self.pairs * programs,
            (self.T, self.S, *scalars),
            outputs,
            tiling.launch,
            HEADS=self.Hkv,
            GROUP=self.group,
            WIDTH=self.D,
            VALUE_WIDTH=self.Dv,
            ROWS=tiling.rows,
            KEYS=tiling.keys,
            PRECISION=precision(self.dtype),
            **constants,
        )


@dataclasses.dataclass(frozen=True)
class Heads:
    """The layout of a row of a layer's fused projection. A row has the query heads of D
    columns, the key heads of D columns of 1 to 3 branches, and the value heads of Dv columns of
    these branches. After the value heads follow `gates` numbers per query head, and padding to a
    multiple of 16 bytes.

    Attributes:
      means: 1 if the mean of each key/value head's query heads is also computed, otherwise 0.
      raw_keys: Number of branches, counted from the first, whose keys are not rotated.
    """

    H: int
    Hkv: int
    D: int
    Dv: int
    branches: int
    means: int = 0
    gates: int = 0
    raw_keys: int = 0

    @property
    def row(self) -> int:
        """The number of columns of the projection."""
        heads = self.H * self.D + self.branches * self.Hkv * (self.D + self.Dv)
        return heads + self.gate_columns

    @property
    def gate_columns(self) -> int:
        """The number of columns of the gates, including padding."""
        return cdiv(self.H * self.gates, 8) * 8

    @property
    def rows(self) -> int:
        """The number of tokens per program."""
        return max(SPLIT_NUMBERS // max(power(self.D), power(self.Dv)), 1)

    def partials(self, tokens: int) -> tuple[int, int, int]:
        """Return the shape of the partial gradients of the norm weights, which are summed
        later.
        """
        return cdiv(tokens, self.rows), self.H + self.branches * self.Hkv, self.D

    def split_shapes(self, *tokens: int) -> list[tuple[int, ...]]:
        """Return the shapes of query, three keys, three values, mean and gates. Arrays that do
        not exist are empty.
        """
        absent = [(0,)] * (3 - self.branches)
        keys, values = (
            [(*tokens, self.Hkv, width)] * self.branches + absent for width in (self.D, self.Dv)
        )
        mean = (*tokens, self.Hkv, self.D) if self.means else (0,)
        gates = (*tokens, self.H, self.gates) if self.gates else (0,)
        return [(*tokens, self.H, self.D), *keys, *values, mean, gates]


def split_heads(
    heads: Heads, tokens: int, back: bool, norm_eps: float | None = None
) -> TritonKernel:
    """Describe the launch that splits a projection into heads.

    If `back` is true, the launch joins the gradients of heads into the gradient of the projection.
    The launch writes in place. `split_heads.split_heads` lists the arrays. For arrays that are not
    read, pass any array.
    """
    means = 0 if back else heads.means
    of_row = heads.H + (2 * heads.branches + means) * heads.Hkv + min(heads.gates, 1)
    return TritonKernel.of(
        "split_heads:split_heads",
        cdiv(tokens, heads.rows) * of_row,
        (tokens, norm_eps or 0.0),
        (),
        HEADS=heads.Hkv,
        GROUP=heads.H // heads.Hkv,
        WIDTH=heads.D,
        VALUE_WIDTH=heads.Dv,
        GATES=heads.H * heads.gates,
        BRANCHES=heads.branches,
        MEANS=heads.means,
        RAW_KEYS=heads.raw_keys,
        ROW=heads.row,
        ROWS=heads.rows,
        BACK=back,
        NORMS=norm_eps is not None,
    )
