"""The sizes of a branch on Triton kernels, and the kernels behind a layer's projection.

No Triton is imported. The steps (`nsa_core.steps.triton_forward`, ..) describe what they launch.
"""

import dataclasses
from typing import Any, NamedTuple

from kernels_pallas.kernel import Array
from kernels_pallas.triton import tiling as tilings
from kernels_pallas.triton.kernel import LOG2E, TritonKernel, cdiv
from kernels_pallas.triton.tiling import Tiling, power, precision


class Problem(NamedTuple):
    """Sizes of one branch (shapes: `nsa_core.types`), and where it runs.

    Attributes:
      capability: of the GPU, which bounds the tiles.
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
        """Batch rows times key/value heads."""
        return self.B * self.Hkv

    @property
    def log2_scale(self) -> float:
        return self.scale * LOG2E

    def tiling(self, kernel: str, rows: int | None = None, keys: int | None = None) -> Tiling:
        """That of a kernel (`tiling.needed`), of at most so many rows and keys a tile; a bound of
        the rows holds alone.
        """
        largest = tilings.most(kernel, self.capability, self.D, self.Dv)
        limits = rows or largest[0], min(keys or largest[1], largest[1])
        widths = self.D, self.Dv, tilings.itemsize(self.dtype)
        found = tilings.choose(kernel, *limits, *widths, self.capability)
        if found is None:
            raise NotImplementedError(
                f"triton: no tiles of {self.dtype}, D={self.D}, Dv={self.Dv} fit in the shared "
                f"memory of compute capability {self.capability}"
            )
        return found

    def kernel(
        self, launch: tuple[str, Tiling, int], scalars, outputs, **constants: Any
    ) -> TritonKernel:
        """One of attention, told T, S and the `scalars`; `launch`: function, tiles, and programs of
        a pair.
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
    """What a row of a layer's fused projection holds: query heads of D columns, then the key heads
    of D of 1 to 3 branches, then the value heads of Dv of as many, then `gates` numbers of each
    query head, and what fills the row up to 16 bytes.

    `means`: 1 where the mean of each key/value head's query heads is made beside them, or 0.
    `raw_keys`: so many branches, the first, have keys that are not rotated.
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
        """Columns of the projection."""
        heads = self.H * self.D + self.branches * self.Hkv * (self.D + self.Dv)
        return heads + self.gate_columns

    @property
    def gate_columns(self) -> int:
        """Columns of the gates, with what fills the row."""
        return cdiv(self.H * self.gates, 8) * 8

    def split_shapes(self, *tokens: int) -> list[tuple[int, ...]]:
        """Shapes of query, three keys, three values, mean, gates; what is absent is empty."""
        absent = [(0,)] * (3 - self.branches)
        keys, values = (
            [(*tokens, self.Hkv, width)] * self.branches + absent for width in (self.D, self.Dv)
        )
        mean = (*tokens, self.Hkv, self.D) if self.means else (0,)
        gates = (*tokens, self.H, self.gates) if self.gates else (0,)
        return [(*tokens, self.H, self.D), *keys, *values, mean, gates]


def split_heads(
    heads: Heads, tokens: int, dtype: str, norm_eps: float | None = None
) -> TritonKernel:
    """Arrays: the projection `[tokens, heads.row]`, where `norm_eps` is given the norms' weights of
    query and keys `[D]`, cos and sin, float32 `[tokens, D / 2]`.

    Results: those of `heads.split_shapes`.
    """
    outputs = tuple(Array(shape, dtype) for shape in heads.split_shapes(tokens))
    name = "split_heads" if norm_eps is None else "split_normed_heads"
    return _heads(name, heads, tokens, outputs, heads.means, norm_eps)


def join_heads(
    heads: Heads, tokens: int, dtype: str, norm_eps: float | None = None
) -> TritonKernel:
    """Arrays: gradients of the results of `split_heads`, where `norm_eps` is given the projection
    and the norms' weights, cos and -sin.

    Results: the projection's gradient; those of the norms' weights as float32 partials
    `[.., heads of query and keys, D]`.
    """
    outputs = (Array((tokens, heads.row), dtype),)
    if norm_eps is None:
        return _heads("join_heads", heads, tokens, outputs, 0, None)
    normed = heads.H + heads.branches * heads.Hkv
    partials = Array((cdiv(tokens, _rows(heads)), normed, heads.D), "float32")
    return _heads("join_normed_heads", heads, tokens, (*outputs, partials), 0, norm_eps)


def _rows(heads: Heads) -> int:
    """Tokens of a program."""
    return max(4096 // max(power(heads.D), power(heads.Dv)), 1)


def _heads(
    function: str, heads: Heads, tokens: int, outputs, means: int, norm_eps: float | None
) -> TritonKernel:
    rows = _rows(heads)
    of_row = heads.H + (2 * heads.branches + means) * heads.Hkv + min(heads.gates, 1)
    return TritonKernel.of(
        f"split_heads:{function}",
        cdiv(tokens, rows) * of_row,
        (tokens,) if norm_eps is None else (tokens, norm_eps),
        outputs,
        HEADS=heads.Hkv,
        GROUP=heads.H // heads.Hkv,
        WIDTH=heads.D,
        VALUE_WIDTH=heads.Dv,
        GATES=heads.H * heads.gates,
        BRANCHES=heads.branches,
        MEANS=heads.means,
        RAW_KEYS=heads.raw_keys,
        ROW=heads.row,
        ROWS=rows,
    )
