"""The work items of query lists (`specs/work_items.py`).

Algorithm, a warp a row of `[B, Hkv]` and a segment of the tokens:

    for 32 tiles of keys at a time, a lane a tile
        the list of the tile in this segment lies between two `edges`, and is cut into work
        items of `longest` entries; a prefix sum over the lanes gives each its place
        the partials of a tile stand together, so for these the warp counts the items of the
        tile in all segments, and takes a prefix sum of the totals too
    mark the rows of the table that are left in the segment as empty

Bound by latency: two or three loads of `edges` a tile, and a store of 28 bytes an item; some
microseconds beside the milliseconds of what reads the table.
"""

import functools
import itertools
from typing import Any

from kernels_pallas.mosaic.warp_kernel import WARPS, warp_kernel
from kernels_pallas.specs.tile import LANES, ROWS, WORK_ITEM_INTS
from kernels_pallas.specs.work_items import MAX_HALVES, WorkItem, WorkItems

SEGMENT_SIZES = "cut", "offset", "capacity"  # of `WorkItems.sizes`: of each segment
NUMBER_BITS = 19  # of a work item in its row; above them its entries, 2048 at most


def make_items(warp: Any, spec: WorkItems, sizes, refs) -> None:
    """The work items of row `refs.row` and segment `WARPS * group + warp`."""
    lists, lane, row = spec.lists, warp.lane(), refs.row
    tiles, chunks, longest = sizes.key_tiles, sizes.chunks, sizes.longest
    segment = refs.group * WARPS + warp.warp()
    exists = segment < sizes.segments

    def of_segment(values):
        """`values[segment]`."""
        found = warp.word(values[0])
        for i, x in enumerate(values[1:], 1):
            found = warp.where(segment >= i, x, found)
        return found

    # Its first chunk and that of the next one, where its work items begin for row 0, and how many
    # it has room for.
    if spec.halving:
        ends, offsets, capacities = (_of_segments(sizes, x) for x in SEGMENT_SIZES)
        bounds = [0, *ends[:-1]], ends, offsets, capacities
        low, high, offset, capacity = map(of_segment, bounds)
    else:
        low, high = (warp.smaller((segment + i) * sizes.step, sizes.chunks) for i in (0, 1))
        offset, capacity = segment * (sizes.rows * sizes.most), warp.word(sizes.most)
    b = row // lists.Hkv
    first_position = 0
    if not spec.placed:
        first_position = warp.fetch(warp.element(refs.position, (b * sizes.T, 4)))

    def first_key(tile):
        if not spec.placed:
            return tile * ROWS
        at = b * tiles + warp.smaller(tile, tiles - 1)
        return warp.fetch(warp.element(refs.first_key, (at, 4)))

    def edge(tile, chunk):
        tile = row * tiles + warp.smaller(tile, tiles - 1)
        return warp.fetch(warp.element(refs.edges, (tile * chunks + chunk, 4)))

    def put(index, item, exists):
        """Writes the item `index` of this row and segment."""
        index = warp.where(exists, offset + row * sizes.items + index, 0)
        for column, x in enumerate(item):
            at = (index, 4 * WORK_ITEM_INTS), (warp.word(column), 4)
            warp.put(warp.element(refs.table, *at), x, exists)

    def items_of(tile, begin, end):
        """How many a list has."""
        return warp.where(tile < tiles, (end - begin + (longest - 1)) // longest, 0)

    def partials_of(tile, count):
        """The first partials of the tiles in this segment; `count` after these 32 tiles."""
        ends = [edge(tile, warp.word(cut)) for cut in [0, *_of_segments(sizes, "cut")]]
        counts = [items_of(tile, *x) for x in itertools.pairwise(ends)]
        total = functools.reduce(lambda x, y: x + y, counts)
        before = _prefix_sum(warp, total)
        in_segment = first = row * sizes.items + count + before
        for i, x in enumerate(counts):
            in_segment = in_segment + warp.where(segment > i, x, 0)
        writes = (tile < tiles) & warp.same(segment, 0)
        at = row * tiles + warp.smaller(tile, tiles - 1), 4
        for output, x in ((refs.first, first), (refs.count, total)):
            warp.put(warp.element(output, at), x, writes)
        return [in_segment], [count + warp.shuffle(before + total, LANES - 1)]

    def some_tiles(r, state):
        count, *partial_count = state
        tile = r * LANES + lane
        begin, end = edge(tile, low), edge(tile, high)
        key, unmasked = first_key(tile), end
        if not lists.clipped:
            # The first token that sees the tile to its end, and its chunk.
            first_query = sizes.first_query if spec.placed else first_position
            token = warp.larger(key + (ROWS - 1) - first_query, 0)
            if spec.placed:
                behind = warp.larger(token - sizes.half - sizes.gap, 0)
                token = warp.smaller(token, sizes.half) + behind
            tokens = sizes.tokens_of_chunk
            chunk = (token + (tokens - 1)) // tokens
            unmasked = edge(tile, warp.smaller(warp.larger(chunk, low), high))
        items = warp.where(exists, items_of(tile, begin, end), 0)
        before = _prefix_sum(warp, items)
        first_partial = []
        if spec.halving:
            first_partial, partial_count = partials_of(tile, *partial_count)

        def write(i, nothing):
            start = begin + i * longest
            stop = warp.smaller(start + longest, end)
            unmasked_begin = warp.smaller(warp.larger(unmasked, start), stop)
            item = row, key, start, unmasked_begin, stop, stop
            item = *item, *(x + i for x in first_partial)
            put(count + before + i, item, i < items)
            return nothing

        warp.repeat(warp.largest(items), write, [])
        return [count + warp.shuffle(before + items, LANES - 1), *partial_count]

    counts, empty = [warp.word(0)] * (1 + spec.halving), (-1, *[0] * (5 + spec.halving))
    count, *_ = warp.repeat((tiles + (LANES - 1)) // LANES, some_tiles, counts)

    def clear(r, nothing):
        index = r * LANES + lane
        put(index, empty, (index >= count) & (index < capacity) & exists)
        return nothing

    warp.repeat((sizes.most + (LANES - 1)) // LANES, clear, [])


def _prefix_sum(warp: Any, x):
    """The sum of the lanes before."""
    total, distance = x, 1
    while distance < LANES:
        other = warp.shuffle(total, warp.larger(warp.lane() - distance, 0))
        total = total + warp.where(warp.lane() >= distance, other, 0)
        distance *= 2
    return total - x


def _of_segments(sizes, name):
    """A size of each segment (`WorkItems.sizes`)."""
    return [getattr(sizes, f"{name}_{i}") for i in range(MAX_HALVES + 1)]


def order_items(warp: Any, spec: WorkItems, sizes, refs) -> None:
    """Where 32 work items of row `refs.row` go, one a lane.

    An item counts those of its segment that are before it: that have more entries, or as many and
    a lower number. The lanes read 32 others at a time, and show them to each other.
    """
    lane, columns = warp.lane(), WorkItem._fields
    own = (refs.group * WARPS + warp.warp()) * LANES + lane
    exists = own < sizes.items
    own = warp.smaller(own, sizes.items - 1)
    offset, capacity = (_of_segments(sizes, name) for name in SEGMENT_SIZES[1:])
    low, room = warp.word(0), warp.word(capacity[0])
    for i, first in enumerate(offset[1:], 1):
        low = warp.where(own >= first, first, low)
        room = warp.where(own >= first, capacity[i], room)

    def at(item, column):
        return (refs.row * sizes.items + item, 4 * WORK_ITEM_INTS), (warp.word(column), 4)

    def order(item):
        """Higher for what comes first: entries, then the lower number."""
        begin, end = (
            warp.fetch(warp.element(refs.table, *at(item, columns.index(name))))
            for name in ("begin", "end")
        )
        return (end - begin << NUMBER_BITS) | ((1 << NUMBER_BITS) - 1 - item)

    mine = order(own)
    first, last = warp.smallest(low), warp.largest(low + room)

    def count(r, state):
        (before,) = state
        begin = first + r * LANES
        others = order(warp.smaller(begin + lane, last - 1))
        for i in range(LANES):
            other = warp.shuffle(others, warp.word(i))
            inside = warp.below(begin + i - low, room)
            before = before + warp.number((other > mine) & inside)
        return [before]

    (before,) = warp.repeat((last - first + (LANES - 1)) // LANES, count, [warp.word(0)])
    for column in range(len(columns)):
        x = warp.fetch(warp.element(refs.table, *at(own, column)))
        warp.put(warp.element(refs.ordered, *at(low + before, column)), x, exists)


work_items = warp_kernel(make_items)
ordered_work_items = warp_kernel(order_items)
