"""Defines the sizes that all attention kernels share, and describes query-stationary kernels.

| description      | kernels                                                                 |
|------------------|-------------------------------------------------------------------------|
| `AttentionSizes` | forward and gradients of each branch, gathered or not                   |
| `forward`, `dq`  | kernels whose queries loop over the keys (`interval.py`, `selected.py`) |
"""

import dataclasses
from functools import cached_property
from typing import Any

from kernels_pallas.kernel import Array, Kernel, Spec, float32
from kernels_pallas.specs import tile
from kernels_pallas.specs.fp8 import rounded


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSizes(Spec):
    """Static sizes.

    Attributes:
      B: Number of batch rows.
      T: Number of query tokens.
      S: Number of keys.
      H: Number of query heads.
      Hkv: Number of key/value heads, each for G = H / Hkv query heads.
      D: Width of queries and keys.
      Dv: Width of values and outputs.
      scale: Factor of the logits.
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
    fp8: bool = (
        False  # whether keys and values are in e4m3; S then counts slots (`specs/fp8.py`)
    )

    @cached_property
    def group(self) -> int:
        """Number of query heads per key/value head."""
        return self.H // self.Hkv

    def rows(self, width: int, tokens: int | None = None) -> Array:
        """Describe queries, outputs or their gradients, `[B, tokens, H, width]`.

        `tokens` defaults to T.
        """
        return Array((self.B, self.T if tokens is None else tokens, self.H, width), self.dtype)

    def by_head(self, tokens: int | None = None) -> Array:
        """Describe a float32 array with a value per query head, `[B, tokens, H]`. `tokens`
        defaults to T.
        """
        return float32(self.B, self.T if tokens is None else tokens, self.H)

    def keys(self, width: int) -> Array:
        """Describe keys, values or their gradients, `[B, S, Hkv, width]`."""
        return Array((self.B, self.S, self.Hkv, width), self.dtype)

    @property
    def operands(self) -> dict[str, Array]:
        query = {"query": self.rows(self.D)}
        if self.fp8:
            return query | rounded(self.B, self.S, self.Hkv, self.D, self.Dv)
        return query | {"key": self.keys(self.D), "value": self.keys(self.Dv)}


def forward(branch: str, spec: Any, inputs: dict[str, Array], **more: Array) -> Kernel:
    """Describe a kernel that returns an output and a log-sum-exp. The kernel's inputs are `inputs`,
    then the gate if `gated` is true, and the previous sum if `added` is true. For keys in e4m3, if
    `added` is false, the last input is the mean that was subtracted from the keys. `more` describes
    further outputs of the kernel.
    """
    out = spec.rows(spec.Dv)
    return Kernel.named(
        spec,
        {
            **inputs,
            "gate": spec.gated and spec.by_head(),
            "added": spec.added and out,
            "key_mean": spec.fp8 and not spec.added and inputs["key_scale"],
        },
        {"out": out, "lse": spec.by_head(), **more},
        name=f"{branch}_forward",
        in_place=spec.added,
        sizes=spec.sizes,
        grid=spec.grid,
    )


def dq(branch: str, spec: Any, inputs: dict[str, Array], before: bool = False) -> Kernel:
    """Describe a kernel that returns dq. The kernel's inputs are `inputs`, dO, the statistics of
    query rows in tiles of `spec.stats_tile`, and the previous sum if `added` is true. If `before`
    is true, dq is written into an existing array.
    """
    out = spec.rows(spec.D)
    return Kernel.named(
        spec,
        {
            **inputs,
            "do": spec.rows(spec.Dv),
            "row_stats": tile.row_stats(spec, *spec.stats_tile),
            "added": spec.added and out,
            "before": before and out,
        },
        {"dq": out},
        name=f"{branch}_dq",
        in_place=spec.added or before,
        sizes=spec.sizes | {"stats_tiles": tile.cdiv(spec.T, spec.stats_tile[0])},
        grid=spec.grid,
    )
