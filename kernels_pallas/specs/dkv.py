"""Describes the kernels for gradients of keys and values.

The first kernel is key-stationary, and computes partial sums per work item. The second kernel
merges the partial sums.

A work item is a tile of keys, and some consecutive query tiles that attend to the tile of keys.
`partials` sums over the queries of one work item. The kernel `merge` adds the float32 partials of a
tile of keys in a fixed order, so the result has the same bits in every run.

| branch              | query tiles of a work item                        | rows of a query tile |
|---------------------|---------------------------------------------------|----------------------|
| compressed, sliding | the interval `begin .. end - 1`                   | 64                   |
| selected            | entries `begin .. end - 1` of a tile's query list | 16, 32 or 64         |

`specs/block_query_lists.py` describes query lists. If the entries of a list are single tokens, a
query tile of the selected branch has G rows.

A work item has eight int32, or sixteen for an interval:

| int      | content                                                                           |
|----------|-----------------------------------------------------------------------------------|
| 0        | row of `[B, Hkv]`; a negative number is an empty row of the table                 |
| 1        | first key                                                                         |
| 2, 5     | begin and end of the work item's query tiles or list entries                      |
| 3, 4     | for lists, begin and end of the entries that attend to all keys of the tile       |
| 6        | index of the partial that the work item writes                                    |
| 7        | unused                                                                            |
| 8 to 11  | for intervals, the integers 2 to 5 of the first 64 keys of the tile               |
| 12 to 15 | for intervals, the integers 2 to 5 of the second 64 keys of a tile of 128 keys    |

The list entries between the integers 3 and 4 need no mask by key. With token bits, shift = +inf
for the tokens of an entry that did not select the block.
"""

import dataclasses
from functools import cached_property
from typing import Any, Self

from kernels_pallas.kernel import NOMINAL_LENGTH, Array, Kernel, described, float32, int32
from kernels_pallas.specs import stored_ds, tile
from kernels_pallas.specs.attention import AttentionSizes
from kernels_pallas.specs.tile import (
    INTERVAL_ITEM_INTS,
    ROW_STATS,
    ROW_STATS_MIN_ROWS,
    ROWS,
    SMEM_HALF,
    WORK_ITEM_INTS,
    Tile,
)

BOTH_WIDTHS = 320  # maximum of D + Dv for which registers can hold the sums of both gradients
WHOLE_STEP_WIDTHS = 256  # maximum of D + Dv if registers also hold the products of 64 rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dkv(AttentionSizes):
    """Sizes of the problem and of its work items.

    Attributes:
      work_items: Number of work items in the table, some of which may be empty.
      interval_partials: Maximum number of partials of intervals.
      gated: Whether row statistics include a gate, whose sign is the last bit of shift.
      list_entries: Number of entries of the query lists, for the selected branch. `list_entries=0`
        means intervals.
      block: Number of keys per selection block, if list entries have token bits. Token bits
        state the start of the block, and the tokens of the query tile that selected the block.
        `block=0` means that all tokens of an entry selected all keys of the tile.
      single_token: Whether a list entry is one token. If `single_token` is false, a list entry is
        several neighbouring tokens that one copy moves. Single tokens are possible for groups of up
        to `ROW_STATS_MIN_ROWS` query heads.
      want_dk: Whether the kernel computes dk.
      want_dv: Whether the kernel computes dv.
      selection_entries: Number of blocks per token of the selection to which list entries refer by
        index. 0 means that list entries are query tiles.
      stored_rows: If not 0, the number of rows of `[B, Hkv]` whose dS is written
        (`specs/stored_ds.py`). This needs `selection_entries`.
    """

    work_items: int
    interval_partials: int = 0
    gated: bool = False
    list_entries: int = 0
    block: int = 0
    single_token: bool = False
    want_dk: bool = True
    want_dv: bool = True
    selection_entries: int = 0
    stored_rows: int = 0

    @property
    def nominal(self) -> dict[str, Any]:
        length = "list_entries" if self.gathered else "interval_partials"
        lengths = dict.fromkeys(("work_items", length), NOMINAL_LENGTH)
        return super().nominal | lengths | {"stored_rows": 2 * bool(self.stored_rows)}

    # Sizes of a CTA, which do not depend on lengths.

    @cached_property
    def gathered(self) -> bool:
        """Whether query tiles come from lists."""
        return self.list_entries > 0

    @cached_property
    def consumers(self) -> int:
        """The number of warpgroups that compute.

        Each consumer warpgroup has 64 keys, and all consumer warpgroups read the same query tiles
        in shared memory.
        """
        return 1 if self.gathered or self.D + self.Dv > 384 else 2

    @cached_property
    def keys_in_registers(self) -> bool:
        """Whether the first two products read their left operands K and V from registers instead of
        shared memory. Operands in registers need registers in addition to the registers of the
        sums.
        """
        return self.D + self.Dv <= 128

    @cached_property
    def item_ints(self) -> int:
        """The number of int32 per work item."""
        return WORK_ITEM_INTS if self.gathered else INTERVAL_ITEM_INTS

    @cached_property
    def tile_keys(self) -> int:
        """The number of keys per work item."""
        return ROWS * self.consumers

    @cached_property
    def query_tile(self) -> Tile:
        """The tile of query rows. One TMA copy per slab moves a tile. The rows belong to
        adjacent tokens, or to a single token. Gathered tiles have the smallest number of rows
        that holds the tokens of a copy.
        """
        slab = tile.slab_width(self.D, self.Dv)
        if self.single_token:
            return Tile(self.group, slab, self.group)
        return tile.gathered_tile(self.group, slab) if self.gathered else Tile(self.group, slab)

    @cached_property
    def copied_by_lanes(self) -> bool:
        """Whether lanes copy the rows of a step instead of TMA."""
        return self.single_token and tile.copied_by_lanes(self.group, self.query_tile.slab)

    @cached_property
    def tiles_per_step(self) -> int:
        """The number of query tiles per step of 64 rows."""
        return ROWS // self.query_tile.rows

    @cached_property
    def rows_at_once(self) -> int:
        """The number of rows of a step that one product multiplies. A product has only half of
        the rows if the sums of both gradients leave too few registers for all rows.
        """
        both = not self.gathered and self.want_dk and self.want_dv
        wide = self.D + self.Dv > WHOLE_STEP_WIDTHS
        return ROWS // 2 if both and wide else ROWS

    @cached_property
    def stats_rows(self) -> int:
        """The number of rows of statistics that are copied with a query tile."""
        return ROW_STATS_MIN_ROWS if self.single_token else self.query_tile.rows

    @cached_property
    def stages(self) -> int:
        """The number of pipeline stages. Gathered rows are scattered in memory. Kernels with
        gathered rows have the largest number of stages, from 2 to 4, with which two CTAs fit on
        an SM.
        """
        if not self.gathered:
            return 2
        operands = ROWS * (self.D + self.Dv) * 2  # bytes of K and V, and of Q and dO in a stage
        stats = self.tiles_per_step * self.stats_rows * ROW_STATS * 4
        return min(max((SMEM_HALF - operands) // (operands + stats), 2), 4)

    @property
    def passes(self) -> list[Self]:
        """The specs of the kernels that compute dk and dv.

        Either one kernel computes dk and dv together, or each gradient has its own kernel. If there
        are two kernels, the kernel of dk writes dS.
        """
        if self.D + self.Dv <= BOTH_WIDTHS:
            return [self]
        parts: list[dict] = [{"want_dv": False}, {"want_dk": False, "stored_rows": 0}]
        return [dataclasses.replace(self, **part) for part in parts]

    @property
    def gradients(self) -> list[Self]:
        """One spec per computed gradient, for a kernel that computes only this gradient."""
        wanted = [{f"want_{x}": x == name for x in ("dk", "dv")} for name in self.widths]
        return [dataclasses.replace(self, **want) for want in wanted]

    @property
    def widths(self) -> dict[str, int]:
        """The widths of the gradients that are computed, by name."""
        widths = {"dk": self.D} if self.want_dk else {}
        return widths | ({"dv": self.Dv} if self.want_dv else {})

    @cached_property
    def merged_slabs(self) -> int:
        """The number of slabs of columns that the computed gradients have. A CTA of the kernel
        `merge` has one slab.
        """
        return sum(self.widths.values()) // self.query_tile.slab

    # Sizes that grow with a length.

    @cached_property
    def query_tiles(self) -> int:
        return tile.cdiv(self.T, self.query_tile.tokens)

    @cached_property
    def key_tiles(self) -> int:
        return tile.cdiv(self.S, self.tile_keys)

    @property
    def partials(self) -> dict[str, Array]:
        """The arrays of the float32 partial sums, by name. Lists have one partial per work item,
        and intervals have `interval_partials`.
        """
        count = self.work_items if self.gathered else self.interval_partials
        return {
            f"{name}_partials": float32(count, self.tile_keys, width)
            for name, width in self.widths.items()
        }


@described
def partials(spec: Dkv) -> Kernel:
    """Describe the kernel that sums dk and dv over the query tiles of each work item.

    Inputs:
      query `[B, T, H, D]`, key `[B, S, Hkv, D]`, value `[B, S, Hkv, Dv]`, do `[B, T, H, Dv]`;
      row_stats: The output of `specs.bwd_preprocess` in tiles of `query_tile`. With single
        tokens, a query tile has 8 rows, and the first G rows are used.
      work_items: int32 `[work_items, 8]`, or `[work_items, 16]` for intervals.
      query_list: If `gathered` is true, int32 `[list_entries]`, the query tile of each entry. With
        `selection_entries`, an entry is `(token * Hkv + head) * selection_entries + slot`.
      token_bits: If `block`, int32 `[list_entries]`. The lower bits have one bit per token,
        which is set if the token selected the block. The upper bits are `(BLOCK_OFFSET_BIAS +
        first key of the block - first key of the tile) << BLOCK_OFFSET_SHIFT`.
      ds_chunk: With `selection_entries`, the chunk of rows as in `stored_ds`. The index of a
        partial is counted from the first partial of the chunk.

    Outputs that `spec` requests: dk_partials, float32 `[count, tile_keys, D]`;
    dv_partials, float32 `[count, tile_keys, Dv]`. `count` is the number of work items for
    lists, and `interval_partials` for intervals. An empty work item writes no partial. With
    `stored_rows`, ds is a further output.
    """
    query_tile, entries = spec.query_tile, int32(spec.list_entries)
    outputs, sizes = spec.partials, {}
    if spec.stored_rows:
        stored = spec.stored_rows, spec.T, spec.selection_entries
        outputs["ds"] = stored_ds.array(*stored, query_tile.rows, spec.dtype)
    if spec.stored_rows or spec.copied_by_lanes:
        sizes["T"] = spec.T
    kind = "lists" if spec.gathered else "intervals"
    return Kernel.named(
        spec,
        {
            **spec.operands,
            "do": spec.rows(spec.Dv),
            "row_stats": tile.row_stats(spec, query_tile.tokens, spec.stats_rows),
            "work_items": int32(spec.work_items, spec.item_ints),
            "query_list": spec.gathered and entries,
            "token_bits": spec.gathered and spec.block > 0 and entries,
            "ds_chunk": spec.selection_entries > 0 and stored_ds.DS_CHUNK,
        },
        outputs,
        name="dkv_partials",
        body=f"kernels_pallas.mosaic.dkv:partials_of_{kind}",
        sizes=sizes,
        grid=(spec.work_items,),
    )


@described
def merge(spec: Dkv) -> Kernel:
    """Describe the kernel that adds up the partials of each tile of keys, which gives dk and dv.

    Inputs are the outputs of the kernel `partials`, and the int32 arrays `first` and `count` `[B *
    Hkv * key_tiles]`. For each tile of keys, `first` has the index of the tile's first partial, and
    `count` has the number of the tile's partials. With `stored_rows` there are two more inputs:
    `ds_chunk`, and `before`, the gradient (dk or dv) that the kernel updates in place. Only the
    rows of `[B, Hkv]` in the chunk are written, and all other rows keep their contents. Outputs are
    dk `[B, S, Hkv, D]` and dv `[B, S, Hkv, Dv]`, or only one of dk and dv.
    """
    by_tile = int32(spec.B * spec.Hkv * spec.key_tiles)
    inputs = spec.partials | {"first": by_tile, "count": by_tile}
    outputs = {name: spec.keys(width) for name, width in spec.widths.items()}
    if spec.stored_rows:
        (before,) = outputs.values()
        inputs |= {"ds_chunk": stored_ds.DS_CHUNK, "before": before}
    return Kernel.named(
        spec,
        inputs,
        outputs,
        name="dkv_merge",
        in_place=spec.stored_rows > 0,
        sizes={"key_tiles": spec.key_tiles},
        grid=(
            spec.stored_rows or spec.B * spec.Hkv,
            tile.cdiv(spec.S, ROWS) * spec.merged_slabs,
        ),
    )
