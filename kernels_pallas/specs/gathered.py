"""Describes attention to selected blocks, one block at a time.

For each block, the kernels gather the queries that selected the block. The kernels process gathered
tiles (`mosaic.selected.tile_is_gathered`). The block list of a gathered tile is long, since the
tile's tokens selected different blocks. The kernels of `specs/selected.py` loop over the near
blocks of a gathered tile. The kernels of this module process the far blocks of a gathered tile.
Forward has two kernels (`partials`, `merge`), and dq has two kernels (`partial_dq`, `merge_dq`):

| kernel     | results                                                                     |
|------------|-----------------------------------------------------------------------------|
| `partials` | one result per token, key/value head and far block                          |
| `merge`    | one result per token, from the loop's result and the partials of far blocks |

The kernel `merge` adds the partials of a token in a fixed order. To limit the memory of partials,
the kernels process the tokens in segments, one after the other. Bodies: `mosaic/gathered.py`.
"""

import dataclasses
from functools import cached_property
from typing import Any

from kernels_pallas.kernel import NOMINAL_LENGTH, Array, Kernel, described, float32, int32
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

MERGE_STAGES = 4  # number of partials that `merge` loads at a time
# Number of tiles that a CTA merges one after the other. With several tiles, few CTAs have
# nothing to merge.
TILES_OF_CTA = 4
# number of int32 words that identify the segment: 256 bytes, the alignment of launches
SEGMENT_WORDS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatheredAttention(AttentionSizes):
    """Static sizes. A selection block has `parts` times 64 keys, and positions are in units of
    `parts` tokens.
    """

    n: int  # number of selected blocks per token
    gather_limit: int  # as in `SelectedAttention`
    segment_tokens: int
    segments: int
    # Number of work items per segment. Each row of [B, Hkv] has the same number of work items.
    items: int
    parts: int = 1
    gated: bool = False  # merge multiplies the output by a gate
    added: bool = False  # whether merge adds the output to an array
    stays: bool = False  # whether the output already holds the rows that merge does not change
    stats_tile: tuple[int, int] = (0, 0)  # as in `SelectedAttention`

    @property
    def nominal(self) -> dict[str, Any]:
        lengths = dict.fromkeys(("segment_tokens", "items"), NOMINAL_LENGTH)
        return super().nominal | lengths | {"segments": 1}

    @cached_property
    def block(self) -> int:
        """Keys of a selection block."""
        return ROWS * self.parts

    @cached_property
    def token_tile(self) -> Tile:
        """The rows that are gathered together, which are the heads of one token."""
        return Tile(self.group, slab_width(self.D, self.Dv), self.group)

    @cached_property
    def copied_by_lanes(self) -> bool:
        """Whether lanes copy the rows of a step instead of TMA."""
        return copied_by_lanes(self.group, self.token_tile.slab)

    @cached_property
    def tile(self) -> Tile:
        """The tile of adjacent tokens that one CTA merges."""
        return Tile(self.group, slab_width(self.D, self.Dv))

    @cached_property
    def tiles(self) -> int:
        """Number of tiles per segment."""
        return cdiv(self.segment_tokens, self.tile.tokens)

    @cached_property
    def all_tiles(self) -> int:
        return cdiv(self.T, self.tile.tokens)

    @cached_property
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

    @cached_property
    def partial_lse(self) -> Array:
        """The array with lse_log2 of partial outputs, by slot and row of `tile`."""
        return float32(self.B, self.Hkv, self.n * self.tiles * ROWS)

    def partial_rows(self, width: int) -> Array:
        """Describe an array of partials, `[B, (token, kv_head, slot), G, width]`."""
        count = self.segment_tokens * self.Hkv * self.n
        return Array((self.B, count, self.group, width), self.dtype)

    @cached_property
    def _segment(self) -> Array:
        return int32(SEGMENT_WORDS)

    @cached_property
    def _items(self) -> Array:
        return int32(self.segments * self.items, WORK_ITEM_INTS)

    @property
    def _partial_inputs(self) -> dict[str, Array]:
        return {
            **self.operands,
            "items": self._items,
            "entries": int32(self.B * self.Hkv * self.T * self.n),
            "segment": self._segment,
        }

    def _partials_by_token(self, width: int) -> Array:
        """Return `partial_rows` as `[B, segment_tokens, Hkv * n, G, width]`."""
        shape = self.B, self.segment_tokens, self.Hkv * self.n, self.group, width
        return Array(shape, self.dtype)

    @property
    def _selection(self) -> dict[str, Array | bool]:
        return {
            "items": self.stays and self._items,
            "block_counts": int32(self.B * self.Hkv * self.all_tiles, COUNTS),
            "indices": int32(self.B, self.T, self.Hkv, self.n),
            "position": int32(self.B, self.T),
        }


@described
def partials(spec: GatheredAttention) -> Kernel:
    """Describe the kernel that computes O_j = softmax(scale Q K_j^T) V_j for each token and each
    far block j that the token selected.

    Inputs:
      query: `[B, T, H, D]`.
      key: `[B, S, Hkv, D]`.
      value: `[B, S, Hkv, Dv]`.
      items: int32 `[segments * items, 8]`. A `WorkItem` is a block and some of the entries that
        selected the block. In each row, empty items follow all other items. The tokens of the
        entries attend to the whole block. Keys are counted in units of `parts` keys.
      entries: int32 `[B * Hkv * T * n]`, `(token * Hkv + kv_head) * n + slot`.
      segment: int32 `[64]`, with the index of the segment, its first token and its first tile.

    Outputs, which are undefined for slots without an entry:
      partials: `[B, segment_tokens * Hkv * n, G, Dv]`.
      partial_lse: float32 `[B, Hkv, n * tiles * 64]`, lse_log2 by slot and row of `tile`.
    """
    outputs = {"partials": spec.partial_rows(spec.Dv), "partial_lse": spec.partial_lse}
    return Kernel.named(
        spec,
        spec._partial_inputs,
        outputs,
        name="gathered_forward",
        sizes=spec.sizes,
        grid=(spec.items,),
    )


@described
def partial_dq(spec: GatheredAttention) -> Kernel:
    """Describe the kernel that computes scale dS_j K_j for each token and each far block j that
    the token selected.

    The first inputs are the inputs of the kernel `partials`. The further inputs are:
      do: `[B, T, H, Dv]`, the gradient of the output.
      row_stats: float32, the output of `bwd_preprocess` in tiles of `stats_tile`.

    Output, which is undefined for slots without an entry:
      partials: `[B, segment_tokens * Hkv * n, G, D]`.
    """
    inputs = spec._partial_inputs
    inputs["do"] = spec.rows(spec.Dv)
    inputs["row_stats"] = row_stats(spec, *spec.stats_tile)
    return Kernel.named(
        spec,
        inputs,
        {"partials": spec.partial_rows(spec.D)},
        name="gathered_dq",
        sizes=spec.sizes | {"stats_tiles": cdiv(spec.T, spec.stats_tile[0])},
        grid=(spec.items,),
    )


@described
def merge(spec: GatheredAttention) -> Kernel:
    """Describe the kernel that computes added + gate * O for the tokens of a segment. In
    gathered tiles O = sum_j 2^(lse_j - lse) O_j, where j stands for the loop over near blocks or
    for a far block. In other tiles O is the output of the loop.

    If `gated` is false, the gate is 1. If `added` is false, nothing is added.

    Inputs:
      partials, partial_lse: The outputs of `partials`.
      items: As in the kernel `partials`, an input only if `stays` is true. A row without work items
        is skipped.
      block_counts: int32 `[B * Hkv * tiles of T, 6]`, as in `selected.forward`.
      indices: int32 `[B, T, Hkv, n]`, the selected blocks.
      position: int32 `[B, T]`, the position of each token among the keys, in units of `parts`
        tokens.
      gate: float32 `[B, T, H]`, if `gated` is true.
      segment: as in the kernel `partials`.
      looped: `[B, segment_tokens, H, Dv]`, the output of the loop.
      added: `[B, segment_tokens, H, Dv]`, if `added` is true.
      looped_lse: float32 `[B, segment_tokens, H]`, the natural log-sum-exp of the loop.

    Outputs, in place of the last two inputs:
      out: `[B, segment_tokens, H, Dv]`.
      lse: float32 `[B, segment_tokens, H]`, natural.
    """
    lse, out = spec.by_head(spec.segment_tokens), spec.rows(spec.Dv, spec.segment_tokens)
    return Kernel.named(
        spec,
        {
            "partials": spec._partials_by_token(spec.Dv),
            "partial_lse": spec.partial_lse,
            **spec._selection,
            "gate": spec.gated and spec.by_head(),
            "segment": spec._segment,
            "looped": out,
            "added": spec.added and out,
            "looped_lse": lse,
        },
        {"out": out, "lse": lse},
        name="gathered_merge",
        in_place=2,
        sizes=spec.sizes,
        grid=spec.tile_grid,
    )


@described
def merge_dq(spec: GatheredAttention) -> Kernel:
    """Describe the kernel that computes dQ for the tokens of a segment.

    In tiles that are not gathered, dQ is the result of the loop over blocks. In gathered tiles, dQ
    is the result of the loop plus the sum of dQ_j over the far blocks j.

    Inputs:
      partials: The output of `partial_dq`.
      items, block_counts, indices, position, segment: as in the kernel `merge`.
      looped: `[B, segment_tokens, H, D]`, dQ of the loop, which includes the array to which dQ
        is added.

    Output:
      dq: `[B, segment_tokens, H, D]`, in place of `looped`.
    """
    out = spec.rows(spec.D, spec.segment_tokens)
    inputs = {"partials": spec._partials_by_token(spec.D)} | spec._selection
    inputs |= {"segment": spec._segment, "looped": out}
    return Kernel.named(
        spec,
        inputs,
        {"dq": out},
        name="gathered_merge_dq",
        body="kernels_pallas.mosaic.gathered:merge",
        in_place=1,
        sizes=spec.sizes,
        grid=spec.tile_grid,
    )
