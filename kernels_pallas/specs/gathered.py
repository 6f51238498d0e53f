"""Selected attention block by block: of each block, the queries that selected it are gathered.

For tiles whose neighbours chose other blocks (`mosaic.selected.tile_is_gathered`), so that the
block list of a tile would be long. Blocks near the tile, which its tokens share, are walked over
(`specs/selected.py`); a block that is far is gathered. Two kernels, forward (`partials`, `merge`)
and for the query's gradient (`partial_dq`, `merge_dq`):

    partials   one result for each token, key/value head and far block
    merge      one for each token: the loop's and those of its far blocks, in a fixed order

Partials take memory, so the tokens are taken in segments, one after the other.
Bodies: `mosaic/gathered.py`.
"""

import dataclasses
from typing import Self

from kernels_pallas.kernel import NOMINAL_LENGTH, Array, Kernel, described
from kernels_pallas.specs.attention import AttentionSizes
from kernels_pallas.specs.selected import COUNTS
from kernels_pallas.specs.tile import (
    ROWS,
    WORK_ITEM_INTS,
    Tile,
    cdiv,
    copied_by_lanes,
    row_stats,
    slab_width,
)

MERGE_STAGES = 4  # partials that `merge` has in flight
TILES_OF_CTA = 4  # that are merged one after the other: few CTAs find that nothing was gathered
SEGMENT_WORDS = 64  # int32 words that say which segment; 256 bytes, as launches want them


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatheredAttention(AttentionSizes):
    """Sizes; a selection block has `parts` times 64 keys, positions count in so many tokens."""

    n: int  # selected blocks of a token
    gather_limit: int  # as in `SelectedAttention`
    segment_tokens: int
    segments: int
    items: int  # work items of a segment, as many for each row of [B, Hkv]
    parts: int = 1
    gated: bool = False  # merge multiplies the output by a gate
    added: bool = False  # merge adds the output to an array of its shape
    stays: bool = False  # merge finds what it does not change in the output
    stats_tile: tuple[int, int] = (0, 0)  # as in `SelectedAttention`

    def for_any_length(self) -> Self:
        """The same with nominal lengths, of segments too."""
        spec = super().for_any_length()
        lengths = {"segment_tokens": NOMINAL_LENGTH, "items": NOMINAL_LENGTH}
        return dataclasses.replace(spec, segments=1, **lengths)

    @property
    def block(self) -> int:
        """Keys of a selection block."""
        return ROWS * self.parts

    @property
    def token_tile(self) -> Tile:
        """What is gathered at a time: the heads of one token."""
        return Tile(self.group, slab_width(self.D, self.Dv), self.group)

    @property
    def copied_by_lanes(self) -> bool:
        """Whether lanes copy the rows of a step, not TMA."""
        return copied_by_lanes(self.group, self.token_tile.slab)

    @property
    def tile(self) -> Tile:
        """Neighbouring tokens that are merged by one CTA."""
        return Tile(self.group, slab_width(self.D, self.Dv))

    @property
    def tiles(self) -> int:
        """Of a segment."""
        return cdiv(self.segment_tokens, self.tile.tokens)

    @property
    def all_tiles(self) -> int:
        return cdiv(self.T, self.tile.tokens)

    @property
    def tile_grid(self) -> tuple[int, int]:
        return self.B * self.Hkv, cdiv(self.tiles, TILES_OF_CTA)

    @property
    def sizes(self) -> dict[str, int]:
        return {
            "T": self.T,
            "segment_tokens": self.segment_tokens,
            "tiles": self.tiles,
            "all_tiles": self.all_tiles,
            "items": self.items,
            "row_items": self.items // (self.B * self.Hkv),
        }

    @property
    def partial_lse(self) -> Array:
        """lse_log2 of partial outputs, by slot and row of `tile`."""
        return Array((self.B, self.Hkv, self.n * self.tiles * ROWS), "float32")

    def partial_rows(self, width: int) -> Array:
        """`[B, (token, kv_head, slot), G, width]`."""
        count = self.segment_tokens * self.Hkv * self.n
        return Array((self.B, count, self.group, width), self.dtype)

    @property
    def _segment(self) -> Array:
        return Array((SEGMENT_WORDS,), "int32")

    @property
    def _items(self) -> Array:
        return Array((self.segments * self.items, WORK_ITEM_INTS), "int32")

    @property
    def _partial_inputs(self) -> dict[str, Array]:
        return {
            **self.operands,
            "items": self._items,
            "entries": Array((self.B * self.Hkv * self.T * self.n,), "int32"),
            "segment": self._segment,
        }

    def _partials_by_token(self, width: int) -> Array:
        """`partial_rows` as `[B, segment_tokens, Hkv * n, G, width]`."""
        shape = self.B, self.segment_tokens, self.Hkv * self.n, self.group, width
        return Array(shape, self.dtype)

    @property
    def _selection(self) -> dict[str, Array]:
        items = {"items": self._items} if self.stays else {}
        return items | {
            "block_counts": Array((self.B * self.Hkv * self.all_tiles, COUNTS), "int32"),
            "indices": Array((self.B, self.T, self.Hkv, self.n), "int32"),
            "position": Array((self.B, self.T), "int32"),
        }


@described
def partials(spec: GatheredAttention) -> Kernel:
    """O_j = softmax(scale Q K_j^T) V_j of each token and each far block j that it selected.

    Inputs:
      query: `[B, T, H, D]`.
      key: `[B, S, Hkv, D]`.
      value: `[B, S, Hkv, Dv]`.
      items: int32 `[segments * items, 8]`, `WorkItem`: a block and some of the entries that chose
        it; empty ones are the last of their row. Its tokens see the block to its end. Keys count in
        `parts`.
      entries: int32 `[B * Hkv * T * n]`, `(token * Hkv + kv_head) * n + slot`.
      segment: int32 `[64]`: its index, first token and first tile.

    Outputs, undefined where there is no entry:
      partials: `[B, segment_tokens * Hkv * n, G, Dv]`.
      partial_lse: float32 `[B, Hkv, n * tiles * 64]`, lse_log2 by slot and row of `tile`.
    """
    outputs = {"partials": spec.partial_rows(spec.Dv), "partial_lse": spec.partial_lse}
    return Kernel.named(
        "gathered_forward",
        spec,
        "kernels_pallas.mosaic.gathered:forward",
        spec._partial_inputs,
        outputs,
        sizes=spec.sizes,
        grid=(spec.items,),
        source="kernels_pallas.specs.gathered:partials",
    )


@described
def partial_dq(spec: GatheredAttention) -> Kernel:
    """scale dS_j K_j of each token and each far block j that it selected.

    Inputs, after those of `partials`:
      do: `[B, T, H, Dv]`, the gradient of the output.
      row_stats: float32, as `bwd_preprocess` makes them, in tiles of `stats_tile`.

    Output, undefined where there is no entry:
      partials: `[B, segment_tokens * Hkv * n, G, D]`.
    """
    inputs = spec._partial_inputs
    inputs["do"] = spec.rows(spec.Dv)
    inputs["row_stats"] = row_stats(spec, *spec.stats_tile)
    return Kernel.named(
        "gathered_dq",
        spec,
        "kernels_pallas.mosaic.gathered:dq",
        inputs,
        {"partials": spec.partial_rows(spec.D)},
        sizes=spec.sizes | {"stats_tiles": cdiv(spec.T, spec.stats_tile[0])},
        grid=(spec.items,),
        source="kernels_pallas.specs.gathered:partial_dq",
    )


@described
def merge(spec: GatheredAttention) -> Kernel:
    """added + gate * O of a segment, with O = sum_j 2^(lse_j - lse) O_j in gathered tiles, where j
    is the loop or a far block, and O that of the loop elsewhere.

    Without `gated` the gate is 1; without `added` nothing is added.

    Inputs:
      partials, partial_lse: of `partials`.
      items: as in `partials`, if it `stays`: a row without any is passed over.
      block_counts: int32 `[B * Hkv * tiles of T, 6]`, as in `selected.forward`.
      indices: int32 `[B, T, Hkv, n]`, the selected blocks.
      position: int32 `[B, T]`, of each token among the keys, in `parts`.
      gate: float32 `[B, T, H]`, if `gated`.
      segment: as in `partials`.
      walked: `[B, segment_tokens, H, Dv]`, the output of the loop.
      added: `[B, segment_tokens, H, Dv]`, if `added`.
      walked_lse: float32 `[B, segment_tokens, H]`, natural, of the loop.

    Outputs, in place of the last two inputs:
      out: `[B, segment_tokens, H, Dv]`.
      lse: float32 `[B, segment_tokens, H]`, natural.
    """
    tokens, out = spec.segment_tokens, spec.rows(spec.Dv, spec.segment_tokens)
    inputs = {"partials": spec._partials_by_token(spec.Dv), "partial_lse": spec.partial_lse}
    inputs |= spec._selection
    if spec.gated:
        inputs["gate"] = spec.by_head()
    inputs |= {"segment": spec._segment, "walked": out}
    if spec.added:
        inputs["added"] = out
    inputs["walked_lse"] = spec.by_head(tokens)
    return Kernel.named(
        "gathered_merge",
        spec,
        "kernels_pallas.mosaic.gathered:merge",
        inputs,
        {"out": out, "lse": spec.by_head(tokens)},
        in_place=2,
        sizes=spec.sizes,
        grid=spec.tile_grid,
        source="kernels_pallas.specs.gathered:merge",
    )


@described
def merge_dq(spec: GatheredAttention) -> Kernel:
    """dQ of a segment: that of the loop, and in gathered tiles of far blocks j too, sum_j dQ_j.

    Inputs:
      partials: of `partial_dq`.
      items, block_counts, indices, position, segment: as in `merge`.
      walked: `[B, segment_tokens, H, D]`, dQ of the loop, plus what that was added to.

    Output:
      dq: `[B, segment_tokens, H, D]`, in place of `walked`.
    """
    out = spec.rows(spec.D, spec.segment_tokens)
    inputs = {"partials": spec._partials_by_token(spec.D)} | spec._selection
    inputs |= {"segment": spec._segment, "walked": out}
    return Kernel.named(
        "gathered_merge_dq",
        spec,
        "kernels_pallas.mosaic.gathered:merge",
        inputs,
        {"dq": out},
        in_place=1,
        sizes=spec.sizes,
        grid=spec.tile_grid,
        source="kernels_pallas.specs.gathered:merge_dq",
    )
