"""Row statistics that the backward kernels read: what FlashAttention's preprocess makes.

A row is a query head of a token; the rows of a query tile lie together, four float32 each:

    shift    = lse * log2(e) - log2|g_c|     gP = g_c P = +-exp2(scale * log2(e) * Q K^T - shift)
    delta    = delta_c, or delta_c - dlse    dS = gP * (dO V^T - delta),  dV += gP^T dO
    first_key, key_end                       gP = 0 before the one, and from the other on

where delta_c = rowsum(dO * O_c) is of the branch's own output (`specs.combine.deltas`). The gate
g_c stands in the exponent, so that nothing is multiplied by it in a loop; the last bit of `shift`,
worth 2^-23 of it at most, is 1 where the gate is negative. Without a gate g_c is 1, and only then
there may be a gradient dlse of the log-sum-exp.
"""

import dataclasses
from typing import Self

from kernels_pallas.kernel import NOMINAL_LENGTH, Array, Kernel, described
from kernels_pallas.specs import tile


@dataclasses.dataclass(frozen=True)
class RowStats:
    """Static sizes. A query tile has `tokens` tokens and `rows` rows, of which `tokens * group`
    stand for a query head and the others for none. `interval`: rows have a first key, else 0.
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
    interpret: bool | object = False
    any_length: bool = False

    def for_any_length(self) -> Self:
        """The same with nominal lengths."""
        return dataclasses.replace(self, any_length=True, B=2, T=NOMINAL_LENGTH)

    @property
    def group(self) -> int:
        """Query heads of a key/value head."""
        return self.H // self.Hkv

    @property
    def tiles(self) -> int:
        """Query tiles of a sequence."""
        return tile.cdiv(self.T, self.tokens)


@described
def row_stats(spec: RowStats) -> Kernel:
    """Inputs, float32 `[B, T, H]` but for the bounds of keys:

      lse: natural log-sum-exp of a branch, -inf where a query sees nothing;
      delta: delta_c = rowsum(dO * O_c);
      key_end: int32 `[B, T]`, end of the keys that a token may see;
      first_key: if `interval`, int32 `[B, T]`;
      gate: if `gated`;
      dlse: if `lse_grad`, the gradient of the log-sum-exp.

    Output: float32 `[B, Hkv, tiles, rows, 4]`: shift, delta, first_key, key_end. A row that sees
    nothing has +inf, 0, 0, 0; a row that stands for no query 0, 0, 0, 0: its query and dO are
    zeros too, so it adds nothing. Where the gate is 0, shift is +inf.
    """
    by_head = Array((spec.B, spec.T, spec.H), "float32")
    key = Array((spec.B, spec.T), "int32")
    inputs = {"lse": by_head, "delta": by_head, "key_end": key}
    inputs |= {"first_key": key} if spec.interval else {}
    inputs |= {"gate": by_head} if spec.gated else {}
    inputs |= {"dlse": by_head} if spec.lse_grad else {}
    outputs = {"row_stats": tile.row_stats(spec, spec.tokens, spec.rows)}
    return Kernel.named(
        "bwd_preprocess",
        spec,
        "kernels_pallas.mosaic.bwd_preprocess:row_stats",
        inputs,
        outputs,
        sizes={"T": spec.T, "tiles": spec.tiles},
        grid=tile.warp_grid(spec.B * spec.Hkv, tile.cdiv(spec.tiles * spec.rows, tile.LANES)),
        source="kernels_pallas.specs.bwd_preprocess:row_stats",
    )
