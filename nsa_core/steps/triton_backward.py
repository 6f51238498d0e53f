"""Defines the backward steps on Triton kernels, for either framework.

`mosaic_backward` is the counterpart for Mosaic kernels.

Query-stationary kernels compute dq, and key-stationary kernels compute dk and dv. Several programs
share the work of a tile of keys that has much more work than other tiles, or the work of a block
that has a long query list. The partial sums of the programs, in float32, are added in a fixed
order. A stable sort builds the query lists, so the order of every sum is fixed.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kernels_pallas.kernel import Array, float32, int32
from kernels_pallas.triton.descriptions import Problem
from kernels_pallas.triton.kernel import TritonKernel, cdiv
from kernels_pallas.triton.tiling import power
from nsa_core.array_ops import ArrayOps, derived
from nsa_core.steps.key_bounds import Bounds, VisibleCompressed
from nsa_core.steps.params import Interval, Params, Qkv, RowResiduals
from nsa_core.steps.triton_forward import (
    array_of,
    interval_of,
    of_tiles,
    places,
    problem_of,
    rowwise,
    tile_block_lists,
)

MERGED_ROWS = 16  # number of rows per program that adds partial sums
SEGMENT = 2048  # entries of a query list that one program processes
PROGRAMS = (
    1024  # the minimum number of programs into which dkv is split if there are few key tiles
)


def delta_of(ops: ArrayOps, do, *outputs):
    """For each output O in `outputs`, return rowsum(dO * O) as float32 `[B, T, H]`. There are one
    or three outputs.
    """
    results = [float32(*do.shape[:-1])] * len(outputs)
    name = "delta" if len(outputs) == 1 else "deltas"
    return ops.run(rowwise(name, do, results), do, *outputs)


def intervals(
    ops: ArrayOps, do, branches: Sequence[Interval], params: Params, added=None
) -> tuple:
    """Return the same gradients as `mosaic_backward.intervals`. One kernel per branch computes
    dq.
    """
    pairs = []
    for branch in branches:
        added, *pair = _interval(ops, do, *branch, params, added)
        pairs.append(pair)
    return added, *pairs


def _interval(ops, do, qkv: Qkv, rows, bounds: Bounds, params: Params, added) -> Qkv:
    p = problem_of(ops, qkv, params.scale)
    interval = interval_of(ops, params.layout, bounds)
    residuals = do, *_statistics(ops, rows, unused=interval[0])
    tiling = p.tiling("dq")
    launch = "interval:dq", tiling, cdiv(p.T * p.group, tiling.rows)
    dq = _dq(ops, p, launch, (*qkv, *interval), residuals, interval[0], rows, added)

    # Nearly all queries attend to the first compressed keys. A few tiles of keys therefore have
    # most of the work.
    popular, tiling = isinstance(bounds, VisibleCompressed), p.tiling("dkv")
    tiles = cdiv(p.S, tiling.keys)
    segments = min(cdiv(PROGRAMS, tiles * p.pairs), 16) if popular else 1
    sizes = {"tiles": tiles, "keys": tiling.keys, "num_keys": p.S}
    (edges,) = ops.derive(_edges, *interval, **sizes)
    items, gradients = tiles * segments, [array_of(qkv.key), array_of(qkv.value)]
    kernel = p.kernel(
        ("dkv:of_intervals", tiling, items),
        (segments, p.log2_scale, p.scale),
        _partials(p, items, tiling.keys) if popular else gradients,
        DIRECT=not popular,
        **_switches(rows),
    )
    found = ops.run(kernel, *qkv, *interval, *residuals, edges)
    if popular:
        sizes = {"tiles": p.pairs * tiles, "row": tiles, "segments": segments}
        (ends,) = ops.derive(_last_items, interval[0], **sizes)
        found = _merged(ops, p, found, ends, gradients, tiles, items, tiling.keys, tiling.keys)
    return Qkv(dq, *found)


def _switches(rows: RowResiduals) -> dict[str, bool]:
    return {"GATED": rows.gate is not None, "LSE_GRAD": rows.dlse is not None}


def _dq(ops, p: Problem, launch, arrays, residuals, unused, rows, added, **constants):
    outputs = [array_of(arrays[0])]
    switches = {"ADDED": added is not None} | _switches(rows)
    kernel = p.kernel(launch, (p.log2_scale, p.scale), outputs, **switches, **constants)
    return ops.run(kernel, *arrays, *residuals, unused if added is None else added)[0]


def _partials(p: Problem, items: int, keys: int) -> list[Array]:
    """Return arrays for the partial sums of dk and dv, for `items` segments of tiles of `keys`
    keys per key/value head.
    """
    return [float32(p.pairs * items, keys, x) for x in (p.D, p.Dv)]


def _merged(ops, p: Problem, partials, ends, outputs, tiles, items, block: int, keys: int):
    """Merge partial sums to dk and dv. `ends` has the end of the work items of each tile."""
    kernel = TritonKernel.of(
        "dkv:merge",
        p.pairs * tiles * (keys // MERGED_ROWS),
        (p.S, tiles, items),
        outputs,
        HEADS=p.Hkv,
        WIDTH=p.D,
        VALUE_WIDTH=p.Dv,
        BLOCK=block,
        KEYS=keys,
        PART=MERGED_ROWS,
    )
    return ops.run(kernel, *partials, ends)


def _statistics(ops, rows: RowResiduals, unused):
    """Return the arrays lse, delta, gate and dlse as every backward kernel reads them."""
    gate, dlse = (unused if x is None else ops.to_float32(x) for x in (rows.gate, rows.dlse))
    return rows.lse, rows.delta, gate, dlse


@derived(lambda like, *, tiles, **sizes: [int32(1, tiles)])
def _last_items(ops, like, *, tiles: int, row: int, segments: int):
    """For each tile, return the end of its work items in the tile's row, as int32 `[1, tiles]`."""
    return [ops.to_int32((ops.arange(like, tiles) % row + 1) * segments)]


@derived(lambda first, last, *, tiles, **sizes: [int32(first.shape[0], tiles, 4)])
def _edges(ops, first, last, *, tiles: int, keys: int, num_keys: int):
    """Return int32 `[B, tiles, 4]`, which bounds the queries of each tile of keys. The first
    two entries of a tile are the start and the end of the queries that attend to at least one key
    of the tile. The last two entries are the start and the end of the queries that attend to all
    keys of the tile. The bounds `first` and `last` never decrease along the queries.
    """
    begin = ops.numbers(first, tiles) * keys
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
) -> Qkv:
    """Return the gradients of the selected branch.

    The arguments are the same as in `mosaic_backward.selected`.
    """
    layout, config, scale, _ = params
    if block_lists is None:
        block_lists = tile_block_lists(ops, qkv, block_indices, params)
    p = problem_of(ops, qkv, scale)
    position, key_start = places(ops, layout)
    residuals = do, *_statistics(ops, rows, unused=position)
    arrays = *qkv, block_indices, position, key_start
    launch, constants = of_tiles(p, "dq", block_indices, params)
    of_lists = *arrays, *block_lists
    dq = _dq(ops, p, launch, of_lists, residuals, position, rows, added, **constants)

    n, block = block_indices.shape[-1], config.select_block
    sizes = list_sizes(p.T, n, p.S, block, layout.packed)
    lists = ops.derive(block_query_lists, block_indices, position, key_start, sizes=sizes)
    tiling = p.tiling("dkv", keys=power(block))
    parts = max(power(block) // tiling.keys, 1)
    kernel = p.kernel(
        ("dkv:of_blocks", tiling, sizes.items * parts),
        (sizes.tiles, sizes.items, sizes.entries, p.log2_scale, p.scale),
        _partials(p, sizes.items, parts * tiling.keys),
        N=n,
        COPIES=1 + layout.packed,
        BLOCK=block,
        SEGMENT=SEGMENT,
        PARTS=parts,
        **_switches(rows),
    )
    partials = ops.run(kernel, *arrays, *residuals, *lists)
    outputs = [array_of(qkv.key), array_of(qkv.value)]
    of_tile = sizes.tiles, sizes.items, block, parts * tiling.keys
    return Qkv(dq, *_merged(ops, p, partials, lists[2], outputs, *of_tile))


class ListSizes(NamedTuple):
    """Sizes of the query lists of tiles of `block` keys, per key/value head and batch row.

    Attributes:
      entries: The maximum number of entries.
      items: The maximum number of work items. Every tile has at least one work item.
      packed: Whether sequences may begin at any key. If `packed` is true, a block may be in two
        tiles.
    """

    tiles: int
    entries: int
    items: int
    block: int
    packed: bool


def list_sizes(tokens: int, n: int, keys: int, block: int, packed: bool) -> ListSizes:
    tiles, entries = cdiv(keys, block), tokens * n * (1 + packed)
    return ListSizes(tiles, entries, tiles + entries // SEGMENT, block, packed)


def _list_shapes(block_indices, *arrays, sizes):
    rows = block_indices.shape[0] * block_indices.shape[2]
    columns = sizes.entries, sizes.tiles + 1, sizes.tiles, sizes.items
    return [int32(rows, x) for x in columns]


@derived(_list_shapes)
def block_query_lists(ops, block_indices, position, key_start, *, sizes: ListSizes):
    """Return the query list of each tile of keys, and the work items, in the form that the
    kernel `of_blocks` reads.
    """
    xp, tiles = ops.xp, sizes.tiles
    keys = _chosen_tiles(ops, block_indices, position, key_start, sizes)
    few = tiles < 2**15
    keys, order = ops.sort(
        ops.cast(keys, xp.int16) if few else keys
    )  # sorting by an int32 needs half as many passes as sorting by an int64
    order = ops.to_int32(order)  # no name refers to the larger array any more
    starts = ops.searchsorted(keys, ops.numbers(keys, tiles + 1), "left")
    items = ((starts[:, 1:] - starts[:, :-1] + SEGMENT - 1) // SEGMENT).clip(1, None)
    ends = xp.cumsum(items, 1, dtype=xp.int32)
    tile_of = ops.searchsorted(ends, ops.numbers(keys, sizes.items), "right")
    return order, starts, ends, tile_of


def _chosen_tiles(ops, block_indices, position, key_start, sizes):
    """Return the key tile of each entry, as int32 `[B * Hkv, entries]`. An entry that belongs to
    no tile has the value `tiles`.
    """
    xp, tiles = ops.xp, sizes.tiles
    batch, _, heads, _ = block_indices.shape
    first = block_indices * sizes.block  # index of the token in its sequence
    # If no listed block is after its query, `of_blocks` can derive which entries attend only to a
    # part of a block.
    own = position[..., None, None] // sizes.block
    valid = (block_indices >= 0) & (block_indices <= own)
    start = key_start[..., None, None] + first
    tile = start // sizes.block
    found = [xp.where(valid, tile, tiles)]
    if sizes.packed:
        # The rest of a block that begins inside a tile is in the next tile.
        inside = (start % sizes.block > 0) & (tile + 1 < tiles)
        found.append(xp.where(valid & inside, tile + 1, tiles))
    keys = xp.moveaxis(xp.stack(found, -1), 2, 1).reshape(batch * heads, -1)
    return ops.to_int32(keys)
