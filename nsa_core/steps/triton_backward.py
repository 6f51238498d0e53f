"""The backward steps on Triton kernels, for either framework; as `mosaic_backward`.

Query-stationary kernels give dq, key-stationary ones dk and dv. Where few tiles of keys have
much work, or a block has a long query list, float32 partials are added in their order. The
query lists come from a stable sort, so every sum has a fixed order.
"""

import dataclasses

from kernels_pallas.kernel import Array
from kernels_pallas.triton import descriptions
from kernels_pallas.triton.descriptions import IntervalDkv, Selected, SelectedDkv
from nsa_core.array_ops import ArrayOps, QueryLayout
from nsa_core.config import NSAConfig
from nsa_core.steps import triton_forward
from nsa_core.steps.gradients import Gradients, RowResiduals
from nsa_core.steps.key_bounds import Bounds, VisibleCompressed, Window
from nsa_core.validate import dtype_name


def gated_sum(ops: ArrayOps, outputs, gates):
    """`sum_c gate[c] * out[c]`, `[B, T, H, Dv]`, of outputs in that shape."""
    gates = [ops.to_float32(gate) for gate in gates]
    (total,) = ops.run(descriptions.gated_sum(_array(outputs[0])), *outputs, *gates)
    return total


def delta_of(ops: ArrayOps, do, *outputs):
    """rowsum(dO * O) of each output, float32 `[B, T, H]`."""
    return ops.run(descriptions.deltas(_array(do), len(outputs)), do, *outputs)


def _array(x) -> Array:
    return Array(tuple(x.shape), dtype_name(x))


def compressed(
    ops: ArrayOps,
    query,
    key,
    value,
    do,
    rows: RowResiduals,
    layout: QueryLayout,
    config: NSAConfig,
    scale: float | None,
    added=None,
) -> Gradients:
    """Of the compressed branch; arguments as of `mosaic_backward.compressed`."""
    if key.shape[1] == 0:
        zero = ops.xp.zeros_like
        return Gradients(zero(query) if added is None else added, zero(key), zero(value))
    bounds = VisibleCompressed(config)
    arrays = query, key, value, do
    return _interval(ops, "compressed", *arrays, rows, bounds, layout, config, scale, added)


def sliding(
    ops: ArrayOps,
    query,
    key,
    value,
    do,
    rows: RowResiduals,
    layout: QueryLayout,
    config: NSAConfig,
    scale: float | None,
    added=None,
) -> Gradients:
    """Of the sliding branch; arguments as of `mosaic_backward.compressed`."""
    bounds = Window(config, key.shape[1])
    arrays = query, key, value, do
    return _interval(ops, "sliding", *arrays, rows, bounds, layout, config, scale, added)


def _interval(
    ops, step, query, key, value, do, rows, bounds: Bounds, layout, config, scale, added
) -> Gradients:
    problem = triton_forward.problem_of(
        ops, step, query, key, value, config, scale, rows.gate, added, rows.dlse is not None
    )
    interval = triton_forward.interval_of(ops, layout, bounds)
    arrays = query, key, value, *interval, do, *_statistics(ops, rows, unused=interval[0])
    unused = interval[0] if added is None else added
    (dq,) = ops.run(descriptions.interval_dq(problem), *arrays, unused)

    dkv = IntervalDkv(problem, popular=step == "compressed")

    def make():
        edges = _edges(ops, interval, dkv)
        ends = ops.arange(interval[0], problem.pairs * dkv.tiles) % dkv.tiles + 1
        return edges, ops.to_int32(ends * dkv.segments)

    edges, ends = ops.cached(
        layout, ("dkv", bounds, dkv.tiles, dkv.segments, problem.pairs), make
    )
    found = ops.run(dkv.partials(), *arrays, edges)
    if dkv.popular:
        found = ops.run(dkv.merge(), *found, ends)
    return Gradients(dq, *found)


def _statistics(ops, rows: RowResiduals, unused):
    """lse, delta, gate, dlse, as every backward kernel reads them."""
    gate, dlse = (unused if x is None else ops.to_float32(x) for x in (rows.gate, rows.dlse))
    return rows.lse, rows.delta, gate, dlse


def _edges(ops, interval, dkv: IntervalDkv):
    """int32 `[B, tiles, 4]`: where the queries that see some key of a tile begin and end, and
    those that see all of them. Bounds never decrease along the queries.
    """
    first, last = interval
    batch, keys = first.shape[0], dkv.tiling.keys
    begin = ops.xp.broadcast_to(ops.arange(first, dkv.tiles) * keys, (batch, dkv.tiles))
    end = (begin + keys).clip(None, dkv.problem.S)
    edges = (
        ops.searchsorted(last, begin, "right"),
        ops.searchsorted(first, end, "left"),
        ops.searchsorted(last, end, "left"),
        ops.searchsorted(first, begin, "right"),
    )
    return ops.xp.stack([ops.to_int32(x) for x in edges], -1)


def selected(
    ops: ArrayOps,
    query,
    key,
    value,
    block_indices,
    do,
    rows: RowResiduals,
    layout: QueryLayout,
    config: NSAConfig,
    scale: float | None,
    added=None,
    block_lists=None,
) -> Gradients:
    """Of the selected branch; arguments as of `mosaic_backward.selected`."""
    arrays = query, key, value, block_indices
    if block_lists is None:
        block_lists = triton_forward.tile_block_lists(ops, *arrays, layout, config, scale)
    problem = triton_forward.problem_of(
        ops,
        "selected",
        query,
        key,
        value,
        config,
        scale,
        rows.gate,
        added,
        rows.dlse is not None,
    )
    n, block = block_indices.shape[-1], config.select_block
    position, key_start = triton_forward.places(ops, layout)
    statistics = _statistics(ops, rows, unused=position)
    arrays = *arrays, position, key_start
    unused = position if added is None else added
    kernel = Selected(problem, n, block).dq()
    (dq,) = ops.run(kernel, *arrays, *block_lists, do, *statistics, unused)

    problem = dataclasses.replace(problem, added=False)
    dkv = SelectedDkv(problem, n, block, layout.packed)
    order, starts, ends, tile_of = block_query_lists(
        ops, block_indices, position, key_start, dkv
    )
    lists = order, starts, ends, tile_of
    partials = ops.run(dkv.partials(), *arrays, do, *statistics, *lists)
    return Gradients(dq, *ops.run(dkv.merge(), *partials, ends))


def block_query_lists(ops: ArrayOps, block_indices, position, key_start, dkv: SelectedDkv):
    """Which queries chose each tile of keys, and the work items: `of_blocks` describes them."""
    xp, tiles = ops.xp, dkv.tiles
    batch, _, heads, _ = block_indices.shape
    first = block_indices * dkv.block  # token of the sequence
    # Without a block of the future, `of_blocks` knows which entries see a block in part.
    valid = (block_indices >= 0) & (first <= position[..., None, None])
    start = key_start[..., None, None] + first
    tile = start // dkv.block
    found = [xp.where(valid, tile, tiles)]
    if dkv.copies == 2:
        # The rest of a block that begins inside a tile lies in the next one.
        inside = (start % dkv.block > 0) & (tile + 1 < tiles)
        found.append(xp.where(valid & inside, tile + 1, tiles))
    keys = xp.moveaxis(xp.stack(found, -1), 2, 1).reshape(batch * heads, -1)
    keys = ops.to_int32(keys)
    entry = xp.broadcast_to(ops.arange(keys, dkv.entries), keys.shape)
    keys, order = ops.sort_pairs(keys, entry)
    rows = batch * heads
    borders = xp.broadcast_to(ops.arange(keys, tiles + 1), (rows, tiles + 1))
    starts = ops.to_int32(ops.searchsorted(keys, borders, "left"))
    segment = descriptions.SEGMENT
    items = ((starts[:, 1:] - starts[:, :-1] + segment - 1) // segment).clip(1, None)
    ends = ops.to_int32(xp.cumsum(items, 1))
    numbers = xp.broadcast_to(ops.arange(keys, dkv.items), (rows, dkv.items))
    tile_of = ops.to_int32(ops.searchsorted(ends, numbers, "right"))
    return ops.to_int32(order), starts, ends, tile_of
