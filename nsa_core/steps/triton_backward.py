"""The backward steps on Triton kernels, for either framework; as `mosaic_backward`.

Query-stationary kernels give dq, key-stationary ones dk and dv. Where few tiles of keys have
much work, or a block has a long query list, float32 partials are added in their order. The
query lists come from a stable sort, so every sum has a fixed order.
"""

import dataclasses
from typing import NamedTuple

from kernels_pallas.triton import descriptions
from kernels_pallas.triton.descriptions import IntervalDkv, Selected, SelectedDkv
from nsa_core.array_ops import ArrayOps, derived, int32
from nsa_core.steps import triton_forward
from nsa_core.steps.gradients import Gradients, RowResiduals
from nsa_core.steps.key_bounds import Bounds, VisibleCompressed, Window
from nsa_core.steps.mosaic_backward import nothing_flows
from nsa_core.steps.params import Params, Qkv
from nsa_core.steps.triton_forward import array_of


def delta_of(ops: ArrayOps, do, *outputs):
    """rowsum(dO * O) of each output, float32 `[B, T, H]`."""
    return ops.run(descriptions.deltas(array_of(do), len(outputs)), do, *outputs)


def compressed(
    ops: ArrayOps, qkv: Qkv, do, rows: RowResiduals, params: Params, added=None
) -> Gradients:
    """Of the compressed branch; arguments as of `mosaic_backward.compressed`."""
    if qkv.key.shape[1] == 0:
        return nothing_flows(ops, qkv, added)
    return _interval(ops, qkv, do, rows, VisibleCompressed(params.config), params, added)


def sliding(
    ops: ArrayOps, qkv: Qkv, do, rows: RowResiduals, params: Params, added=None
) -> Gradients:
    """Of the sliding branch; arguments as of `mosaic_backward.compressed`."""
    bounds = Window(params.config, qkv.key.shape[1])
    return _interval(ops, qkv, do, rows, bounds, params, added)


def compressed_and_sliding(ops: ArrayOps, qkvs, do, rows, params: Params) -> tuple:
    """As of `mosaic_backward`, a kernel each for dq."""
    dq, *compressed_pair = compressed(ops, qkvs[0], do, rows[0], params)
    dq, *sliding_pair = sliding(ops, qkvs[1], do, rows[1], params, dq)
    return dq, compressed_pair, sliding_pair


def _interval(ops, qkv: Qkv, do, rows, bounds: Bounds, params: Params, added) -> Gradients:
    options = rows.gate, added, rows.dlse
    problem = triton_forward.problem_of(ops, qkv, params.scale, *options)
    interval = triton_forward.interval_of(ops, params.layout, bounds)
    arrays = *qkv, *interval, do, *_statistics(ops, rows, unused=interval[0])
    unused = interval[0] if added is None else added
    (dq,) = ops.run(descriptions.interval_dq(problem), *arrays, unused)

    dkv = IntervalDkv(problem, popular=isinstance(bounds, VisibleCompressed))
    sizes = {"tiles": dkv.tiles, "keys": dkv.tiling.keys, "num_keys": problem.S}
    (edges,) = ops.derive(_edges, *interval, **sizes)
    found = ops.run(dkv.partials(), *arrays, edges)
    if dkv.popular:
        sizes = {"tiles": problem.pairs * dkv.tiles, "row": dkv.tiles, "segments": dkv.segments}
        (ends,) = ops.derive(_last_items, interval[0], **sizes)
        found = ops.run(dkv.merge(), *found, ends)
    return Gradients(dq, *found)


def _statistics(ops, rows: RowResiduals, unused):
    """lse, delta, gate, dlse, as every backward kernel reads them."""
    gate, dlse = (unused if x is None else ops.to_float32(x) for x in (rows.gate, rows.dlse))
    return rows.lse, rows.delta, gate, dlse


@derived(lambda like, *, tiles, **sizes: [int32(1, tiles)])
def _last_items(ops, like, *, tiles: int, row: int, segments: int):
    """int32 `[1, tiles]`: the item after each tile's, of its row."""
    return [ops.to_int32((ops.arange(like, tiles) % row + 1) * segments)]


@derived(lambda first, last, *, tiles, **sizes: [int32(first.shape[0], tiles, 4)])
def _edges(ops, first, last, *, tiles: int, keys: int, num_keys: int):
    """int32 `[B, tiles, 4]`: where the queries that see some key of a tile begin and end, and
    those that see all of them. Bounds never decrease along the queries.
    """
    batch = first.shape[0]
    begin = ops.xp.broadcast_to(ops.arange(first, tiles) * keys, (batch, tiles))
    end = (begin + keys).clip(None, num_keys)
    edges = (
        ops.searchsorted(last, begin, "right"),
        ops.searchsorted(first, end, "left"),
        ops.searchsorted(last, end, "left"),
        ops.searchsorted(first, begin, "right"),
    )
    return [ops.xp.stack(edges, -1)]


def selected(
    ops: ArrayOps,
    qkv: Qkv,
    block_indices,
    do,
    rows: RowResiduals,
    params: Params,
    added=None,
    block_lists=None,
) -> Gradients:
    """Of the selected branch; arguments as of `mosaic_backward.selected`."""
    layout, config, scale = params
    if block_lists is None:
        block_lists = triton_forward.tile_block_lists(ops, qkv, block_indices, params)
    problem = triton_forward.problem_of(ops, qkv, scale, rows.gate, added, rows.dlse)
    n, block = block_indices.shape[-1], config.select_block
    position, key_start = triton_forward.places(ops, layout)
    statistics = _statistics(ops, rows, unused=position)
    arrays = *qkv, block_indices, position, key_start
    unused = position if added is None else added
    kernel = Selected(problem, n, block).dq()
    (dq,) = ops.run(kernel, *arrays, *block_lists, do, *statistics, unused)

    problem = dataclasses.replace(problem, added=False)
    dkv = SelectedDkv(problem, n, block, layout.packed)
    sizes = ListSizes(dkv.tiles, dkv.entries, dkv.items, block, layout.packed)
    lists = ops.derive(block_query_lists, block_indices, position, key_start, sizes=sizes)
    partials = ops.run(dkv.partials(), *arrays, do, *statistics, *lists)
    _, _, ends, _ = lists
    return Gradients(dq, *ops.run(dkv.merge(), *partials, ends))


class ListSizes(NamedTuple):
    """Of a `SelectedDkv`."""

    tiles: int
    entries: int
    items: int
    block: int
    packed: bool


def _list_shapes(block_indices, *arrays, sizes):
    rows = block_indices.shape[0] * block_indices.shape[2]
    columns = sizes.entries, sizes.tiles + 1, sizes.tiles, sizes.items
    return [int32(rows, x) for x in columns]


@derived(_list_shapes)
def block_query_lists(ops, block_indices, position, key_start, *, sizes: ListSizes):
    """Which queries chose each tile of keys, and the work items: `of_blocks` describes them."""
    xp, tiles = ops.xp, sizes.tiles
    keys = _chosen_tiles(ops, block_indices, position, key_start, sizes)
    rows = keys.shape[0]
    few = tiles < 2**15
    keys, order = ops.sort(ops.cast(keys, xp.int16) if few else keys)  # half as many passes
    order = ops.to_int32(order)  # no name stays with one of more bytes
    borders = xp.broadcast_to(ops.arange(keys, tiles + 1), (rows, tiles + 1))
    starts = ops.searchsorted(keys, borders, "left")
    segment = descriptions.SEGMENT
    items = ((starts[:, 1:] - starts[:, :-1] + segment - 1) // segment).clip(1, None)
    ends = xp.cumsum(items, 1, dtype=xp.int32)
    numbers = xp.broadcast_to(ops.arange(keys, sizes.items), (rows, sizes.items))
    return order, starts, ends, ops.searchsorted(ends, numbers, "right")


def _chosen_tiles(ops, block_indices, position, key_start, sizes):
    """The tile of keys of each entry, int32 `[B * Hkv, entries]`; `tiles`: none."""
    xp, tiles = ops.xp, sizes.tiles
    batch, _, heads, _ = block_indices.shape
    first = block_indices * sizes.block  # token of the sequence
    # Without a block of the future, `of_blocks` knows which entries see a block in part.
    own = position[..., None, None] // sizes.block
    valid = (block_indices >= 0) & (block_indices <= own)
    start = key_start[..., None, None] + first
    tile = start // sizes.block
    found = [xp.where(valid, tile, tiles)]
    if sizes.packed:
        # The rest of a block that begins inside a tile lies in the next one.
        inside = (start % sizes.block > 0) & (tile + 1 < tiles)
        found.append(xp.where(valid & inside, tile + 1, tiles))
    keys = xp.moveaxis(xp.stack(found, -1), 2, 1).reshape(batch * heads, -1)
    return ops.to_int32(keys)
