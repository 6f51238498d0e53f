"""Describes the row statistics that the backward kernels read.

The statistics are those of FlashAttention's backward preprocess. A row is a query head of a token.
The rows of a query tile are contiguous. A row has four float32:

    shift    = lse * log2(e) - log2|g_c|     gP = g_c P = +-exp2(scale * log2(e) * Q K^T - shift)
    delta    = delta_c, or delta_c - dlse    dS = gP * (dO V^T - delta),  dV += gP^T dO
    first_key, key_end                       gP = 0 before first_key and from key_end on

The formulas use delta_c = rowsum(dO * O_c) with the branch's own output (`specs.combine.deltas`).
The gate g_c is part of the exponent, so no loop multiplies by the gate. The last bit of `shift` is
1 if the gate is negative. The last bit is at most 2^-23 of the value of `shift`. Without a gate,
g_c is
1. The log-sum-exp may have a gradient dlse only if there is no gate.
"""

import dataclasses
from functools import cached_property
from typing import Any

from kernels_pallas.kernel import NOMINAL_LENGTH, Kernel, Spec, described, float32, int32
from kernels_pallas.specs import tile


@dataclasses.dataclass(frozen=True)
class RowStats(Spec):
    """Static sizes.

    A query tile has `tokens` tokens and `rows` rows. The first `tokens * group` rows are query
    heads, and the other rows are padding. If `interval` is true, each row has a first key. If
    `interval` is false, the first key is 0.
    """

    B: int
    T: int
    H: int
    Hkv: int
    tokens: int
    rows: int
    interval: bool = False
    gated: bool = False
    lse_grad: bool = False

    @property
    def nominal(self) -> dict[str, Any]:
        return {"B": 2, "T": NOMINAL_LENGTH}

    @cached_property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.H // self.Hkv

    @cached_property
    def tiles(self) -> int:
        """Number of query tiles per sequence."""
        return tile.cdiv(self.T, self.tokens)


@described
def row_stats(spec: RowStats) -> Kernel:
    """Inputs, as float32 `[B, T, H]` except for `key_end` and `first_key`:

      lse: Natural log-sum-exp of a branch, -inf if a query has no keys.
      delta: delta_c = rowsum(dO * O_c).
      key_end: int32 `[B, T]`, end of the keys to which a token may attend.
      first_key: int32 `[B, T]`, if `interval` is true.
      gate: The gate, if `gated` is true.
      dlse: Gradient of the log-sum-exp, if `lse_grad` is true.

    Output: float32 `[B, Hkv, tiles, rows, 4]`: shift, delta, first_key, key_end. A row without
    keys has +inf, 0, 0, 0. A padding row has 0, 0, 0, 0. The query and dO of a padding row are
    zeros, so a padding row adds nothing. If the gate is 0, shift is +inf.
    """
    by_head, key = float32(spec.B, spec.T, spec.H), int32(spec.B, spec.T)
    return Kernel.named(
        spec,
        {
            "lse": by_head,
            "delta": by_head,
            "key_end": key,
            "first_key": spec.interval and key,
            "gate": spec.gated and by_head,
            "dlse": spec.lse_grad and by_head,
        },
        {"row_stats": tile.row_stats(spec, spec.tokens, spec.rows)},
        name="bwd_preprocess",
        sizes={"T": spec.T, "tiles": spec.tiles},
        grid=tile.warp_grid(spec.B * spec.Hkv, tile.cdiv(spec.tiles * spec.rows, tile.LANES)),
    )
