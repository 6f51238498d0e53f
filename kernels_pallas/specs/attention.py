"""What kernels of attention share: the sizes of the problem, and the descriptions of a branch.

AttentionSizes   forward and gradients of each branch, gathered or not
forward, dq      of a branch whose queries loop over the keys: `interval.py`, `selected.py`
"""

import dataclasses
from typing import Any, Self

from kernels_pallas.kernel import NOMINAL_LENGTH, Array, Kernel
from kernels_pallas.specs import tile
from kernels_pallas.specs.fp8 import rounded


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """Static sizes.

    B: batch; T: query tokens; S: keys; H: query heads; Hkv: key/value heads, each for
    G = H / Hkv query heads; D: width of query and key; Dv: width of value and output.
    any_length: B, T and S are nominal, and the kernel learns the sizes at its launch.
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
    interpret: bool | object = False
    any_length: bool = False
    fp8: bool = False  # keys and values are in e4m3, and S counts places (`specs/fp8.py`)

    def for_any_length(self, **nominal: Any) -> Self:
        """The same with nominal lengths; `nominal`: those of other fields."""
        lengths = {"B": 2, "T": NOMINAL_LENGTH, "S": NOMINAL_LENGTH}
        return dataclasses.replace(self, any_length=True, **lengths, **nominal)

    @property
    def group(self) -> int:
        """Query heads of a key/value head."""
        return self.H // self.Hkv

    def rows(self, width: int, tokens: int | None = None) -> Array:
        """`[B, tokens, H, width]`: query, output or a gradient of them; by default all T tokens."""
        return Array((self.B, self.T if tokens is None else tokens, self.H, width), self.dtype)

    def by_head(self, tokens: int | None = None) -> Array:
        """`[B, tokens, H]`, float32: a value of each query head; by default all T tokens."""
        return Array((self.B, self.T if tokens is None else tokens, self.H), "float32")

    def keys(self, width: int) -> Array:
        """`[B, S, Hkv, width]`: key, value or a gradient of them."""
        return Array((self.B, self.S, self.Hkv, width), self.dtype)

    @property
    def operands(self) -> dict[str, Array]:
        query = {"query": self.rows(self.D)}
        if self.fp8:
            return query | rounded(self.B, self.S, self.Hkv, self.D, self.Dv)
        return query | {"key": self.keys(self.D), "value": self.keys(self.Dv)}


def forward(branch: str, spec: Any, inputs: dict[str, Array], **more: Array) -> Kernel:
    """Output and log-sum-exp for `inputs`, the gate if `gated`, and the sum if `added`; of keys in
    e4m3, where nothing is added, the mean that they are less by. `more`: outputs.
    """
    out, inputs = spec.rows(spec.Dv), dict(inputs)
    if spec.gated:
        inputs["gate"] = spec.by_head()
    if spec.added:
        inputs["added"] = out
    elif spec.fp8:
        inputs["key_mean"] = inputs["key_scale"]
    return Kernel.named(
        f"{branch}_forward",
        spec,
        f"kernels_pallas.mosaic.{branch}:forward",
        inputs,
        {"out": out, "lse": spec.by_head(), **more},
        in_place=spec.added,
        sizes=spec.sizes,
        grid=spec.grid,
        source=f"kernels_pallas.specs.{branch}:forward",
    )


def dq(branch: str, spec: Any, inputs: dict[str, Array], before: bool = False) -> Kernel:
    """dq for `inputs`, dO, the statistics of query rows in tiles as `spec.stats_tile`, and the sum
    if `added`; `before`: written into an array that is there.
    """
    out = spec.rows(spec.D)
    inputs = inputs | {"do": spec.rows(spec.Dv)}
    inputs["row_stats"] = tile.row_stats(spec, *spec.stats_tile)
    if spec.added:
        inputs["added"] = out
    if before:
        inputs["before"] = out
    return Kernel.named(
        f"{branch}_dq",
        spec,
        f"kernels_pallas.mosaic.{branch}:dq",
        inputs,
        {"dq": out},
        in_place=spec.added or before,
        sizes=spec.sizes | {"stats_tiles": tile.cdiv(spec.T, spec.stats_tile[0])},
        grid=spec.grid,
        source=f"kernels_pallas.specs.{branch}:dq",
    )
