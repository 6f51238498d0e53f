"""Gradients of keys and values: key-stationary, split over work items, then merged.

A work item is a tile of keys and a run of the query tiles that see it. `partials` sums over one
work item, `merge` adds the float32 partials of a tile of keys in a fixed order, so every run
gives the same bits.

| branch              | query tiles of a work item                       | rows of a query tile |
|---------------------|--------------------------------------------------|----------------------|
| compressed, sliding | an interval: `begin .. end - 1`                  | 64                   |
| selected            | gathered: entries `begin .. end - 1` of a query  | 16, 32 or 64; G, one |
|                     | list of the block (`specs/block_query_lists.py`) | token, if single     |

A work item is eight int32, and sixteen of an interval:

| int      | what                                                                          |
|----------|-------------------------------------------------------------------------------|
| 0        | row of `[B, Hkv]`; negative: an empty place in the table                      |
| 1        | first key                                                                     |
| 2, 5     | begin and end of its query tiles, or list entries                             |
| 3, 4     | of a list, begin and end of those that see all keys of the tile: no key is    |
|          | compared; with token bits, tokens that did not select the block have shift = +inf  |
| 6        | which partial it writes                                                       |
| 7        | nothing                                                                       |
| 8 to 11  | of an interval, what 2 to 5 are, of the first 64 keys of the tile; not before |
|          | 2 nor after 5                                                                 |
| 12 to 15 | and of the second 64 keys, where the tile has as many                         |
"""

import dataclasses
import functools
from typing import Self

from kernels_pallas.kernel import NOMINAL_LENGTH, Array, Kernel, described
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

BOTH_WIDTHS = 320  # D + Dv at most where registers hold the sums of both gradients
WHOLE_STEP_WIDTHS = 256  # and, beside these, the products of all 64 rows of a step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dkv(AttentionSizes):
    """Sizes of the problem, and of the work that it is cut into.

    Attributes:
      work_items: in the table; some may be empty.
      interval_partials: of intervals, how many partials there may be.
      list_entries: of the query lists, for the selected branch; 0: intervals.
      block: keys of a selected block, if each list entry has token bits, which say where its
        block begins and which tokens of the query tile selected it; 0: all tokens of an entry
        selected all keys of the tile.
      single_token: a list entry is one token, not neighbours that share a copy; for groups of
        up to `ROW_STATS_MIN_ROWS` query heads.
      want_dk, want_dv: which gradients this kernel makes.
      selection_entries: list entries are places in a selection of so many blocks per token; 0:
        query tiles.
      stored_rows: dS is written too, of so many rows of `[B, Hkv]` (`specs/stored_ds.py`), which
        needs `selection_entries`; 0: it is not.
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

    def for_any_length(self) -> Self:
        """The same with nominal lengths, of tables and lists too."""
        length = "list_entries" if self.gathered else "interval_partials"
        nominal = {"work_items": NOMINAL_LENGTH, length: NOMINAL_LENGTH}
        if self.stored_rows:
            nominal["stored_rows"] = 2
        return super().for_any_length(**nominal)

    # Sizes of a CTA: no length counts.

    @property
    def gathered(self) -> bool:
        """Query tiles come from lists."""
        return self.list_entries > 0

    @property
    def consumers(self) -> int:
        """Warpgroups of 64 keys each, which share the query tiles in shared memory."""
        return 1 if self.gathered or self.D + self.Dv > 384 else 2

    @property
    def keys_in_registers(self) -> bool:
        """K and V, the left operands of the first two products, are read from registers, not from
        shared memory, where the sums leave room for them.
        """
        return self.D + self.Dv <= 128

    @property
    def item_ints(self) -> int:
        """Of a work item."""
        return WORK_ITEM_INTS if self.gathered else INTERVAL_ITEM_INTS

    @property
    def tile_keys(self) -> int:
        """Keys of a work item."""
        return ROWS * self.consumers

    @functools.cached_property
    def query_tile(self) -> Tile:
        """What one TMA copy per slab brings: neighbouring tokens, or a single one. Gathered
        tiles have the fewest rows in which the tokens of a copy have room.
        """
        slab = tile.slab_width(self.D, self.Dv)
        if self.single_token:
            return Tile(self.group, slab, self.group)
        return tile.gathered_tile(self.group, slab) if self.gathered else Tile(self.group, slab)

    @property
    def copied_by_lanes(self) -> bool:
        """Whether lanes copy the rows of a step, not TMA."""
        return self.single_token and tile.copied_by_lanes(self.group, self.query_tile.slab)

    @property
    def tiles_per_step(self) -> int:
        """Query tiles of a step, which has 64 rows."""
        return ROWS // self.query_tile.rows

    @property
    def rows_at_once(self) -> int:
        """Rows of a step that are multiplied together: half where the sums of both gradients
        leave no more registers.
        """
        both = not self.gathered and self.want_dk and self.want_dv
        wide = self.D + self.Dv > WHOLE_STEP_WIDTHS
        return ROWS // 2 if both and wide else ROWS

    @property
    def stats_rows(self) -> int:
        """Rows of statistics that are copied with a query tile."""
        return ROW_STATS_MIN_ROWS if self.single_token else self.query_tile.rows

    @property
    def stages(self) -> int:
        """Steps in flight. Gathered rows lie anywhere in memory, so they take as many stages as
        two CTAs on one SM have room for.
        """
        if not self.gathered:
            return 2
        operands = ROWS * (self.D + self.Dv) * 2  # K and V; as large again: Q and dO of a stage
        stats = self.tiles_per_step * self.stats_rows * ROW_STATS * 4
        return min(max((SMEM_HALF - operands) // (operands + stats), 2), 4)

    @property
    def passes(self) -> list[Self]:
        """One kernel for dk and dv, or one each; dS is dk's."""
        if self.D + self.Dv <= BOTH_WIDTHS:
            return [self]
        parts: list[dict] = [{"want_dv": False}, {"want_dk": False, "stored_rows": 0}]
        return [dataclasses.replace(self, **part) for part in parts]

    @property
    def gradients(self) -> list[Self]:
        """One for each gradient that is wanted."""
        wanted = [{f"want_{x}": x == name for x in ("dk", "dv")} for name in self.widths]
        return [dataclasses.replace(self, **want) for want in wanted]

    @property
    def widths(self) -> dict[str, int]:
        """The gradients that are wanted, by name."""
        widths = {"dk": self.D} if self.want_dk else {}
        return widths | ({"dv": self.Dv} if self.want_dv else {})

    @property
    def merged_slabs(self) -> int:
        """Of columns, of the gradients that are wanted: each is a CTA's of `merge`."""
        return sum(self.widths.values()) // self.query_tile.slab

    # Sizes that grow with a length.

    @property
    def query_tiles(self) -> int:
        return tile.cdiv(self.T, self.query_tile.tokens)

    @property
    def key_tiles(self) -> int:
        return tile.cdiv(self.S, self.tile_keys)

    @property
    def partials(self) -> dict[str, Array]:
        """Float32 sums: one a work item, or as many as intervals may have."""
        count = self.work_items if self.gathered else self.interval_partials
        return {
            f"{name}_partials": Array((count, self.tile_keys, width), "float32")
            for name, width in self.widths.items()
        }


@described
def partials(spec: Dkv) -> Kernel:
    """Sums of dk and dv over the query tiles of each work item.

    Inputs:
      query `[B, T, H, D]`, key `[B, S, Hkv, D]`, value `[B, S, Hkv, Dv]`, do `[B, T, H, Dv]`;
      row_stats: of `specs.bwd_preprocess` by `query_tile`; of a single token 8 rows, of which
        G count;
      work_items: int32 `[work_items, 8]`, of intervals `[work_items, 16]`;
      query_list: if `gathered`, int32 `[list_entries]`, the query tile of each entry; with
        `selection_entries` `(token * Hkv + head) * selection_entries + slot`;
      token_bits: if `block`, int32 `[list_entries]`, `(BLOCK_OFFSET_BIAS + first key of the block -
        first key of the tile) << BLOCK_OFFSET_SHIFT`, and one bit a token that selected it;
      ds_chunk: with `selection_entries`, of `stored_ds`: partials are counted from its first one.

    Outputs, as wanted: dk_partials float32 `[count, tile_keys, D]` and dv_partials
    `[count, tile_keys, Dv]`, of lists one a work item, of intervals `interval_partials`; an empty
    work item writes none. Of `stored_rows` also ds.
    """
    query_tile, ints = spec.query_tile, functools.partial(Array, dtype="int32")
    inputs = {
        **spec.operands,
        "do": spec.rows(spec.Dv),
        "row_stats": tile.row_stats(spec, query_tile.tokens, spec.stats_rows),
        "work_items": ints((spec.work_items, spec.item_ints)),
    }
    if spec.gathered:
        inputs["query_list"] = ints((spec.list_entries,))
        if spec.block:
            inputs["token_bits"] = ints((spec.list_entries,))
    outputs, sizes = spec.partials, {}
    if spec.selection_entries:
        inputs["ds_chunk"] = stored_ds.DS_CHUNK
    if spec.stored_rows:
        stored = spec.stored_rows, spec.T, spec.selection_entries
        outputs["ds"] = stored_ds.array(*stored, query_tile.rows, spec.dtype)
    if spec.stored_rows or spec.copied_by_lanes:
        sizes["T"] = spec.T
    return Kernel.named(
        "dkv_partials",
        spec,
        f"kernels_pallas.mosaic.dkv:partials_of_{'lists' if spec.gathered else 'intervals'}",
        inputs,
        outputs,
        sizes=sizes,
        grid=(spec.work_items,),
        source="kernels_pallas.specs.dkv:partials",
    )


@described
def merge(spec: Dkv) -> Kernel:
    """dk and dv: the sums of the partials of each tile of keys.

    Inputs: the outputs of `partials`; `first` and `count`, int32 `[B * Hkv * key_tiles]`: which
    partials belong to a tile of keys. Of `stored_rows` also ds_chunk, and the output of one
    gradient before: other rows of `[B, Hkv]` are not written. Outputs, as wanted: dk
    `[B, S, Hkv, D]` and dv `[B, S, Hkv, Dv]`.
    """
    by_tile = Array((spec.B * spec.Hkv * spec.key_tiles,), "int32")
    inputs = spec.partials | {"first": by_tile, "count": by_tile}
    outputs = {name: spec.keys(width) for name, width in spec.widths.items()}
    if spec.stored_rows:
        (before,) = outputs.values()
        inputs |= {"ds_chunk": stored_ds.DS_CHUNK, "before": before}
    return Kernel.named(
        "dkv_merge",
        spec,
        "kernels_pallas.mosaic.dkv:merge",
        inputs,
        outputs,
        in_place=spec.stored_rows > 0,
        sizes={"key_tiles": spec.key_tiles},
        grid=(
            spec.stored_rows or spec.B * spec.Hkv,
            tile.cdiv(spec.S, ROWS) * spec.merged_slabs,
        ),
        source="kernels_pallas.specs.dkv:merge",
    )
