"""Computes the work items for the CTAs of the key-stationary kernels (`dkv`, `gathered`).

A work item is a tile of keys and some of its queries. In the compressed and the sliding branch, the
queries of a work item are an interval of query tiles. In the selected branch, the queries of a work
item are entries of a query list. A tile of keys with many queries has several work items, so that
CTAs have similar amounts of work. In `dkv` each work item writes a partial, and a second kernel
adds the partials of a tile in order.

Tokens are divided into segments. Items of one segment run together and read the same queries,
which therefore stay in L2. If `streams` is true, items of a segment that read the same queries are
also neighbours in the table.

| array   | shape              | content                                                     |
|---------|--------------------|-------------------------------------------------------------|
| `table` | `[items, 8 or 16]` | one `WorkItem` per row: 16 int32 for intervals, 8 for lists |
| `first` | `[B, Hkv, tiles]`  | index of the first partial of a tile of keys                |
| `count` | `[B, Hkv, tiles]`  | number of partials of a tile of keys                        |

| elements                               | order, by the slowest axis first                 |
|----------------------------------------|--------------------------------------------------|
| work items of intervals                | segment from last to first, tile, row of B x Hkv |
| work items of intervals with `streams` | tile of a segment, segment, row                  |
| work items of lists                    | segment, row, tile, work item of the list        |
| work items of lists with `halving`     | row, segment, tile, work item of the list        |
| partials                               | row, tile, segment, work item of the list        |

If `halving` is true and dS is stored, `ordered_work_items` sorts the work items of a segment by
length.
"""

import dataclasses
import itertools
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np

from kernels_pallas.kernel import Array, Kernel, described, int32
from kernels_pallas.mosaic.capability import LONGEST
from kernels_pallas.specs.block_query_lists import BlockQueryLists
from kernels_pallas.specs.tile import (
    INTERVAL_ITEM_INTS,
    LANES,
    ROWS,
    SMS,
    WORK_ITEM_INTS,
    cdiv,
    warp_grid,
)

GPU_ITEMS = 16 * SMS  # number of work items that fill a GPU
# Maximum number of work items of intervals with several segments. More work items would need
# more partials, since each work item has its own partial.
MAX_ITEMS = 20 * SMS
# numbers of segments that `split_causal` compares, for intervals
SEGMENTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
MIN_INTERVAL = 16  # for intervals: minimum number of query tiles per segment
# For intervals: the cost of an item's begin, end and merge, in units of a step of 64 rows. If
# all items run at once, the steps of the last item cost 1.15 times as much, since the last item
# masks all its steps.
ITEM_STEPS, COMPARED = 12, 1.15
# Maximum number of entries per work item of a list. A smaller maximum would cost more partials,
# since each item has its own partial.
MAX_ENTRIES = 2048
MIN_ENTRIES = 256  # the maximum number of entries of a list's work item is at least this
MIN_SEGMENT = (
    4096  # query tiles of a segment: with 16 rows each, 34 MB of Q and dO at D=Dv=128 fit in L2
)
# maximum number of times that tokens are halved, if query tiles have one token
MAX_HALVES = (LONGEST // MIN_SEGMENT).bit_length() - 1


class WorkItem(NamedTuple):
    """The first columns of a row of the table.

    For intervals, queries are counted in query tiles. For lists, queries are counted in entries
    from the begin of all lists. In the table of intervals, the columns `PART_COLUMNS` follow, once
    per 64 keys of the tile. `PART_COLUMNS` replace `unmasked_begin` and `unmasked_end`.
    """

    row: Any  # row of [B, Hkv]; a negative row means that there is no work item
    first_key: Any  # first key of the tile
    begin: Any  # begin of the queries, whose end is `end`
    unmasked_begin: Any  # begin and end of the queries that attend to all keys of the tile
    unmasked_end: Any
    end: Any
    partial: Any  # index of the item's partial; `dkv` only


# The columns after those of `WorkItem`, for each 64 keys of an interval's tile.
PART_COLUMNS = "begin", "unmasked_begin", "unmasked_end", "end"


def part_column(part: Any) -> Any:
    """Return the first table column for the 64 keys with index `part` in an interval's tile."""
    return WORK_ITEM_INTS + len(PART_COLUMNS) * part


def entries_of_item(entries: int, items: int = GPU_ITEMS // 2) -> int:
    """Return the maximum number of entries of a work item, given the number of entries of all
    lists. If the lists have few entries, the entries are spread over `items` work items.
    """
    return min(max(cdiv(entries, items), MIN_ENTRIES), MAX_ENTRIES)


# Intervals: the queries that attend to a key are neighbours.


@dataclasses.dataclass(frozen=True)
class IntervalSplit:
    """The split of an interval branch into work items, as static sizes.

    Attributes:
      segments: Segments of the tokens.
      tiles: Maximum number of key tiles to which the tokens of a segment attend.
      partials: Maximum number of partials per row of `[B, Hkv]`.
      streams: Whether the order of work items is `[tile of a segment, segment, row]`. If False, the
        order is `[segment, tile, row]`, with the last segment first.
    """

    segments: int
    tiles: int
    partials: int
    streams: bool = False


def split_causal(
    spec: Any,
    tiles_seen: Callable[[Any, Any], Any],
    sees: Callable[[Any], Any] | None = None,
) -> IntervalSplit:
    """Return the split for queries that attend to all earlier keys.

    `split_causal` compares several numbers of segments, and uses the number with the fewest steps
    per SM. The last segment, which has the most items, comes first.

    Args:
      spec: A `Dkv`.
      tiles_seen: Function that returns the maximum number of tiles of keys to which the tokens
        `first .. end - 1` attend. `tiles_seen` accepts arrays, since hundreds of results are needed
        for each new length.
      sees: Function that returns approximately the number of tiles to which the token `end - 1`
        attends. By default, `sees` counts all tiles to which earlier tokens attend.
    """

    heads, query_tiles, samples = spec.B * spec.Hkv, spec.query_tiles, 64
    ends = spec.T * (2 * np.arange(samples) + 1) // (2 * samples)
    seen = tiles_seen(np.zeros_like(ends), ends) if sees is None else sees(ends)
    total = heads * query_tiles / samples * int(seen.sum())

    def steps(split):
        """Estimate the number of steps of the SM that finishes last. The formula was fitted to
        measurements on an H200 (bench/records/log/dkv.md).
        """
        items, longest = split.partials * heads, cdiv(query_tiles, split.segments)
        if items <= SMS:
            return COMPARED * longest + ITEM_STEPS
        return (total + ITEM_STEPS * items) / SMS + longest

    counts = [x for x in SEGMENTS if x == 1 or query_tiles // x >= MIN_INTERVAL]
    splits = [_split_into(spec, tiles_seen, x) for x in counts]
    few = [x for x in splits if x.partials * heads <= MAX_ITEMS] or splits[:1]
    return min(few, key=steps)


def split_window(
    spec: Any, tiles_seen: Callable[[Any, Any], Any], multiple: int = 1
) -> IntervalSplit:
    """Return the split for queries that attend to a window.

    Each segment has one SM for each tile of keys to which a query attends. With one SM per tile,
    the tiles of a segment follow one another as a stream. Tiles that run together read the same
    queries at about the same time, so the queries stay in L2.

    Args:
      spec, tiles_seen: As in `split_causal`.
      multiple: Divisor of the number of segments.
    """
    streams = SMS // (int(tiles_seen(0, 1)) * spec.B * spec.Hkv)
    streams = min(streams, spec.query_tiles // MIN_INTERVAL) // multiple * multiple
    streams = max(streams, multiple)
    return dataclasses.replace(_split_into(spec, tiles_seen, streams), streams=True)


def _split_into(
    spec: Any, tiles_seen: Callable[[Any, Any], Any], segments: int
) -> IntervalSplit:
    tokens = cdiv(spec.query_tiles, segments) * spec.query_tile.tokens
    ends = np.minimum(np.arange(segments + 1) * tokens, spec.T)
    seen = np.minimum(tiles_seen(ends[:-1], ends[1:]), spec.key_tiles)
    return IntervalSplit(segments, int(seen.max()), int(seen.sum()))


def interval_work_items(ops: Any, bounds, spec: Any, split: IntervalSplit):
    """Return `table`, `first` and `count`, computed with the array operations of a framework.

    Args:
      ops: A `nsa_core.array_ops.ArrayOps`.
      bounds: The keys `first .. last - 1` to which each token attends. `first` and `last` are `[B,
        T]` and never decrease.
      spec: A `Dkv`.
      split: The split of the work.
    """
    first, last = bounds
    tokens, tiles, heads = spec.query_tile.tokens, spec.key_tiles, spec.B * spec.Hkv
    segments, span = split.segments, cdiv(spec.query_tiles, split.segments)
    xp, integers = ops.xp, ops.to_int32

    # For each 64 keys: the query tiles that attend to at least one of these keys, and the query
    # tiles that attend to all of these keys. The arrays are `[B, tiles, .]`.
    parts = tiles * spec.consumers
    start = ops.numbers(first, parts) * ROWS
    begin = ops.searchsorted(last, start, "right")
    # A tile after all visible keys has no queries. Without this condition `begin` could be the
    # last query tile.
    begin = xp.where(begin < spec.T, begin // tokens, spec.query_tiles)
    unmasked_begin = cdiv(ops.searchsorted(last, start + ROWS, "left"), tokens)
    unmasked_end = ops.searchsorted(first, start, "right") // tokens
    end = cdiv(ops.searchsorted(first, start + (ROWS - 1), "right"), tokens)
    bounds = xp.stack([begin, unmasked_begin, unmasked_end, xp.maximum(begin, end)], -1)
    bounds = bounds.reshape(spec.B, tiles, spec.consumers * len(PART_COLUMNS))
    begin = bounds[..., 0]
    end = xp.maximum(begin, bounds[..., -1])

    # The partials of a tile are contiguous, in the order of its segments: `[B, tiles]`.
    first_segment = begin // span
    count = xp.where(begin < end, cdiv(end, span) - first_segment, 0)
    before = xp.cumsum(count, 1, dtype=xp.int32) - count

    # Items, `[tile of a segment, segment, row]`: `n` counts tiles from the first visible one.
    shape = split.tiles, segments, heads
    n = ops.arange(first, split.tiles).reshape(-1, 1, 1)
    segment = ops.arange(first, segments).reshape(1, -1, 1)
    row = ops.arange(first, heads).reshape(1, 1, -1)
    first_token = (segment * (span * tokens)).clip(0, spec.T - 1)
    batch, segment, row = (xp.broadcast_to(x, shape) for x in (row // spec.Hkv, segment, row))
    tile = integers(first[batch, xp.broadcast_to(first_token, shape)]) // spec.tile_keys + n
    exists, tile = tile < tiles, tile.clip(0, tiles - 1)

    lower = xp.maximum(begin[batch, tile], segment * span)
    upper = xp.minimum(end[batch, tile], (segment + 1) * span)
    upper = xp.maximum(lower, upper)
    item = WorkItem(
        row=xp.where(exists & (lower < upper), row, -1),
        first_key=tile * spec.tile_keys,
        begin=lower,
        unmasked_begin=lower,
        unmasked_end=lower,
        end=upper,
        partial=row * split.partials
        + (before[batch, tile] + segment - first_segment[batch, tile]),
    )
    own = xp.maximum(bounds[batch, tile], lower[..., None])
    own = xp.minimum(own, upper[..., None])
    columns = [x[..., None] for x in item]
    unused = WORK_ITEM_INTS - len(columns), INTERVAL_ITEM_INTS - part_column(spec.consumers)
    fill, more = (columns[:1] * missing for missing in unused)
    table = integers(xp.concatenate([*columns, *fill, own, *more], -1))
    if not split.streams:
        table = xp.flip(xp.swapaxes(table, 0, 1), (0,))

    by_row = spec.B, spec.Hkv, tiles
    place = ops.arange(first, heads).reshape(spec.B, spec.Hkv, 1) * split.partials
    firsts = place + before[:, None]
    counts = xp.broadcast_to(count[:, None], by_row)
    return table.reshape(-1, INTERVAL_ITEM_INTS), integers(firsts), integers(counts)


# Lists: the queries that selected a block are the entries of a list.


@dataclasses.dataclass(frozen=True)
class WorkItems:
    """The work items of query lists, as static sizes.

    If `halving` is false, all segments have the same capacity and `segment` query tiles, a multiple
    of the query tiles of a chunk. If `halving` is true, each segment, from the last to the first,
    is the second half of the remaining tokens. The first segment has at least `segment` query
    tiles. If `halving` is true, the lists of a segment have similar lengths. There is a single
    segment if `halving` is true and `square` is false, since the last key to which a token attends
    is then not known.

    Attributes:
      lists: The query lists.
      segment: Number of query tiles per segment. If `halving` is true, the minimum number of query
        tiles.
      longest: Maximum number of entries of a work item.
      halving: Whether the tokens are divided into halves. `halving` is True for `dkv` and False for
        `gathered`.
      first_query: Key index of the first query, if the lists are indexed by slots of packed rows
        (`nsa_core.varlen`). With `first_query`, `first_key` has the keys of the slots. If
        `first_query` is None, the lists are indexed by keys.
      gap: With `first_query`, the number of keys between the first and the second half of the
        queries.
    """

    lists: BlockQueryLists
    segment: int
    longest: int
    halving: bool = False
    first_query: int | None = None
    gap: int = 0

    @cached_property
    def any_length(self) -> bool:
        return self.lists.any_length

    @cached_property
    def interpret(self) -> Any:
        return self.lists.interpret

    def for_any_length(self) -> Self:
        """A copy of the spec with placeholder values of the lengths of the lists, `segment` and
        `longest`.
        """
        lists = self.lists.for_any_length()
        numbers = {"segment": MIN_SEGMENT, "longest": MAX_ENTRIES}
        if self.placed:
            numbers |= {"first_query": 0, "gap": 0}
        return dataclasses.replace(self, lists=lists, **numbers)

    @cached_property
    def placed(self) -> bool:
        """Whether tiles are indexed by slots, not by keys."""
        return self.first_query is not None

    @cached_property
    def square(self) -> bool:
        """Whether token t attends to no key after t."""
        return not self.placed and not self.lists.packed and self.lists.T == self.lists.S

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """The first chunk of each segment, followed by the number of chunks."""
        lists = self.lists
        if self.halving:  # at most `MAX_HALVES` times
            halves = (lists.query_tiles // self.segment).bit_length() - 1 if self.square else 0
            inner = [(lists.query_tiles >> i) // lists.chunk for i in range(halves, 0, -1)]
        else:
            step = self.segment // lists.chunk
            inner = range(step, lists.chunks, step)
        return 0, *inner, lists.chunks

    @cached_property
    def segments(self) -> int:
        return len(self.cuts) - 1

    @cached_property
    def capacities(self) -> tuple[int, ...]:
        """The maximum number of work items per row in each segment. No work item is empty. Each
        tile of keys to which the tokens of the segment attend has at most one work item that is
        not full.
        """
        lists, capacities = self.lists, []
        tokens = lists.chunk * lists.tokens
        for low, high in itertools.pairwise(self.cuts):
            end = min(high * tokens, lists.T)
            entries = (end - low * tokens) * lists.n * lists.key_tiles_of_block
            tiles = min(cdiv(end, ROWS) if self.square else lists.key_tiles, entries)
            capacities.append(tiles + (entries - tiles) // self.longest)
        return tuple(capacities if self.halving else [max(capacities)] * self.segments)

    @cached_property
    def items(self) -> int:
        """The distance in the table between the work items of two neighbouring rows. If `halving`
        is true, a row's items are contiguous, and the distance is the number of the row's items in
        all segments. If `halving` is false, the distance is the number of the row's items in one
        segment.
        """
        return sum(self.capacities) if self.halving else self.capacities[0]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The index of the first work item of each segment in row 0. The index in row `i` is
        larger by `i * items`.
        """
        step = 1 if self.halving else self.lists.rows
        return tuple(step * sum(self.capacities[:i]) for i in range(self.segments))

    @property
    def outputs(self) -> dict[str, Array]:
        """The arrays `table` and, with `halving`, `first` and `count`."""
        lists = self.lists
        by_tile = int32(lists.B, lists.Hkv, lists.key_tiles)
        table = {"table": int32(lists.rows * sum(self.capacities), WORK_ITEM_INTS)}
        return table | ({"first": by_tile, "count": by_tile} if self.halving else {})

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the lists and of the segments. If `halving` is true, the sizes of each
        segment are included, and the sizes of the last segment are repeated.
        """
        lists = self.lists
        sizes = {
            "T": lists.T,
            "key_tiles": lists.key_tiles,
            "chunks": lists.chunks,
            "tokens_of_chunk": lists.chunk * lists.tokens,
            "segments": self.segments,
            "items": self.items,
            "longest": self.longest,
            "most": max(self.capacities),
        }
        if self.first_query is not None:
            half = lists.T // 2 if self.gap else lists.T
            sizes |= {"first_query": self.first_query, "half": half, "gap": self.gap}
        if not self.halving:
            return sizes | {"step": self.segment // lists.chunk, "rows": lists.rows}
        values = {"cut": self.cuts[1:], "offset": self.offsets, "capacity": self.capacities}
        for name, each in values.items():
            padded = [*each, *[each[-1]] * (MAX_HALVES + 1 - len(each))]
            sizes |= {f"{name}_{i}": x for i, x in enumerate(padded)}
        return sizes


def dkv_work_items(
    lists: BlockQueryLists,
    most: int = MAX_ENTRIES,
    items: int = GPU_ITEMS // 2,
    first_query: int | None = None,
    gap: int = 0,
) -> WorkItems:
    """Return the work items of the kernel `dkv` for the selected branch. `most` is the maximum
    number of entries of a work item. `items` is the same as in `entries_of_item`. `first_query` and
    `gap` are the same as in the class `WorkItems`.
    """
    longest = min(entries_of_item(lists.entries, items), most)
    return WorkItems(lists, MIN_SEGMENT, longest, True, first_query, gap)


@described
def work_items(spec: WorkItems) -> Kernel:
    """Inputs, int32: `edges` of the lists; `position` `[B, T]`, which increases by one per
    token in rows that are not packed, or `first_key` `[B, key_tiles]` if tiles are `placed`.

    Outputs: `table`, whose empty rows have `row` -1 and no entries; if `halving` also `first` and
    `count`.
    """
    lists = spec.lists
    inputs = {
        "edges": lists.edges,
        "first_key": spec.placed and int32(lists.B, lists.key_tiles),
        "position": not spec.placed and int32(lists.B, lists.T),
    }
    return _kernel("work_items", spec, inputs, spec.outputs, spec.segments)


@described
def ordered_work_items(spec: WorkItems) -> Kernel:
    """Describe the kernel that sorts the table of a `halving` spec. In each row and segment,
    work items with more entries come first. Work items with the same number of entries keep
    their order.
    """
    table = {"table": spec.outputs["table"]}
    warps = cdiv(spec.items, LANES)
    return _kernel("ordered_work_items", spec, table, {"ordered": table["table"]}, warps)


def _kernel(name: str, spec: WorkItems, inputs, outputs, warps: int) -> Kernel:
    """Return a kernel with `warps` warps per row."""
    return Kernel.named(
        spec,
        inputs,
        outputs,
        body=f"kernels_pallas.mosaic.lists:{name}",
        sizes=spec.sizes,
        grid=warp_grid(spec.lists.rows, warps),
    )
