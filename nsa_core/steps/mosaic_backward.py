"""Computes the gradients of the branches on Mosaic kernels, for either framework
(`array_ops.ArrayOps`).

    delta_c = rowsum(dO * O_c) = dg_c
    gP_c    = g_c exp(scale * Q K_c^T - lse_c)
    dS_c    = gP_c * (dO V_c^T - delta_c)
    dQ      = scale * sum_c dS_c K_c
    dK_c    = scale * dS_c^T Q
    dV_c    = gP_c^T dO

If a single branch runs, there is no gate, and delta_c - dlse_c replaces delta_c. The kernel of dq
is query-stationary and has the loop of the forward kernels. The kernel of dk and dv is
key-stationary. The queries of a key tile are determined on the device before the kernel of dk and
dv runs. In branches with intervals of keys, a search finds the queries of a key tile. In the
selected branch, the queries of a key tile are read from query lists. A long query list is divided
into several work items, and another kernel merges the partial sums of the work items. For groups of
8 or more heads, `dkv` of the selected branch also stores dS. With stored dS, dq is the product of
dS with the keys (`mosaic_stored_ds.py`). No gradient passes through the scores and the selection of
blocks. Every sum has a fixed order.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels_pallas.kernel import int32
from kernels_pallas.specs import bwd_preprocess, combine, dkv, interval, work_items
from kernels_pallas.specs import selected as selected_spec
from kernels_pallas.specs.block_query_lists import BlockQueryLists, fill_lists
from kernels_pallas.specs.bwd_preprocess import RowStats
from kernels_pallas.specs.dkv import Dkv
from kernels_pallas.specs.tile import ROW_STATS_MIN_ROWS, ROWS, cdiv
from nsa_core.array_ops import ArrayOps, Places, QueryLayout, derived
from nsa_core.steps import key_bounds, mosaic_gather, mosaic_lists, mosaic_stored_ds
from nsa_core.steps.key_bounds import Bounds, VisibleCompressed, Window
from nsa_core.steps.mosaic_forward import combine_spec, sizes_of
from nsa_core.steps.params import Interval, LaterDq, Params, Qkv, RowResiduals
from nsa_core.varlen import Capacity


class NumpyOps(ArrayOps):
    """The operations of `nsa_core.array_ops.ArrayOps` that compute the bounds and the work items of
    intervals. During tracing, `NumpyOps` applies the operations to NumPy arrays, for results
    that depend only on sizes.
    """

    xp: Any = np

    def arange(self, like, count):
        return np.arange(count, dtype=np.int32)[None]

    def cast(self, x, dtype):
        return np.asarray(x, dtype)

    def searchsorted(self, rows, values, side):
        pairs = zip(rows, values, strict=True)
        return np.stack([np.searchsorted(*pair, side) for pair in pairs]).astype(np.int32)


# `ArrayOps` is a protocol, whose methods without a body count as abstract.
NUMPY_OPS: Any = NumpyOps()  # pyrefly: ignore[bad-instantiation]


# Maximum number of work items that are stored as a constant of a program. The constant then has
# 2 MiB.
MAX_KNOWN_ITEMS = 2**21 // (4 * work_items.INTERVAL_ITEM_INTS)


def delta_of(ops: ArrayOps, do, *outputs):
    """Return rowsum(dO * O) of each output, as float32 `[B, T, H]`."""
    deltas = ops.run_together(combine.deltas(combine_spec(outputs)), do, *outputs)
    return [delta.reshape(do.shape[:-1]) for delta in deltas]


def intervals(
    ops: ArrayOps, do, branches: Sequence[Interval], params: Params, added=None
) -> tuple:
    """Return the gradients of one or two branches in which each query attends to an interval of
    keys. The gradients are dq, as one array or a `LaterDq`, and dk and dv of each branch.

    Args:
      do: Gradient of the gated sum `[B, T, H, Dv]`. Without gates, `do` is the gradient of the
        output.
      added: An array `[B, T, H, D]` that is added to dq, possibly in place.
    """
    layout, _, scale, _ = params
    first, *others = branches
    query = first.qkv.query
    tiles: dict[str, Any] = interval.dq_blocks(query.shape[-1], do.shape[-1])
    spec = interval.IntervalAttention(
        **sizes_of(first.qkv, scale),
        added=added is not None,
        longest_first=isinstance(first.bounds, VisibleCompressed),
        second_keys=others[0].qkv.key.shape[1] if others else None,
        **tiles,
    )
    if others and not spec.has_room_for_dq:
        pairs = []
        for branch in branches:
            added, pair = intervals(ops, do, [branch], params, added)
            pairs.append(pair)
        return added, *pairs
    arrays: list[Any] = []
    of_keys: list[Any] = []
    for qkv, rows, bounds in branches:
        base = Dkv(**sizes_of(qkv, scale), work_items=0, gated=rows.gate is not None)
        seen = bounds.of(ops, layout)
        stats = row_stats(ops, rows, base, *seen)
        by_row = key_bounds.bounds_by_row(ops, layout, bounds, spec.tile, spec.tiles)
        arrays.append((qkv.key, qkv.value, *by_row, stats))
        of_keys.append((base, bounds, seen, (*qkv, do, stats)))
    (*of_first, stats), *of_others = arrays
    extra = [] if added is None else [added]
    inputs = query, *of_first, *itertools.chain(*of_others), do, stats, *extra
    if others and ops.has_streams:
        describe = lambda **some: interval.dq(dataclasses.replace(spec, **some))
        dq: Any = LaterDq(describe, inputs)
    else:
        (dq,) = ops.run(interval.dq(spec), *inputs)
    return dq, *(_interval_dkv(ops, layout, *each) for each in of_keys)


def _interval_dkv(ops, layout, base: Dkv, bounds: Bounds, seen, arrays):
    """Return dk and dv of a branch with intervals of keys. `seen` has the bounds of the keys to
    which each token attends.
    """
    capacity = None if layout.varlen is None else layout.varlen.capacity
    split = _interval_split(base, bounds, layout.packed, capacity)
    heads = base.B * base.Hkv
    items = heads * split.segments * split.tiles
    spec = dataclasses.replace(base, work_items=items, interval_partials=heads * split.partials)
    num_keys = layout.num_keys
    if num_keys is None or items > MAX_KNOWN_ITEMS:
        table, *sums = ops.derive(_interval_items, *seen, spec=spec, split=split)
    else:
        table, *sums = _known_items(spec, split, bounds, num_keys)
    return _dkv(ops, spec, (*arrays, table), sums)


def _item_shapes(first, last, *, spec, split):
    by_tile = int32(spec.B, spec.Hkv, spec.key_tiles)
    return int32(spec.work_items, work_items.INTERVAL_ITEM_INTS), by_tile, by_tile


@derived(_item_shapes)
def _interval_items(ops, first, last, *, spec, split):
    return work_items.interval_work_items(ops, (first, last), spec, split)


@functools.lru_cache(64)
def _known_items(spec: Dkv, split: work_items.IntervalSplit, bounds: Bounds, num_keys: int):
    """Return `_interval_items` of rows that are not packed, as constants of a program.

    Compiling code that computes the work items would cost more time than compiling the rest of a
    backward pass.
    """
    index = np.arange(num_keys - spec.T, num_keys, dtype=np.int32)
    position = np.broadcast_to(index, (spec.B, spec.T))
    places: Any = Places(position, np.zeros_like(position), np.zeros_like(position))
    return _interval_items(NUMPY_OPS, *bounds.of(NUMPY_OPS, places), spec=spec, split=split)


@functools.lru_cache(1024)
def _interval_split(
    base: Dkv, bounds: Bounds, packed: bool, capacity: Capacity | None = None
) -> work_items.IntervalSplit:
    sizes = base.T, base.S, base.tile_keys

    def tiles_seen(first, end):
        if isinstance(bounds, Window) and capacity is not None:
            return bounds.tiles_seen(0, capacity.span(first, end), *sizes)
        if not packed or isinstance(bounds, Window):
            return bounds.tiles_seen(first, end, *sizes)
        if capacity is None:
            return np.full_like(end, base.key_tiles)
        return bounds.tiles_seen_packed(first, end, base.tile_keys, capacity)

    if isinstance(bounds, Window):
        halves = 2 if capacity is not None and capacity.gap else 1
        return work_items.split_window(base, tiles_seen, halves)
    if capacity is None:
        return work_items.split_causal(base, tiles_seen)
    stride = bounds.config.compress_stride

    def sees(end):
        """Return the number of key tiles to which the query `end - 1` attends if all sequences have
        the maximum length.
        """
        last = (capacity.key_end(end) - 1) % capacity.max_seqlen
        return cdiv(cdiv(last + 1, stride), base.tile_keys)

    return work_items.split_causal(base, tiles_seen, sees)


def selected(
    ops: ArrayOps,
    qkv: Qkv,
    block_indices,
    do,
    rows: RowResiduals,
    params: Params,
    added=None,
    block_lists=None,
    by_places: bool = False,
) -> Qkv:
    """Return the gradients of the selected branch.

    Args:
      block_lists: The result of `mosaic_forward.tile_block_lists`, if it exists.
      by_places: Whether dk and dv of packed rows may be returned in slots (`nsa_core.varlen`),
        `[B, places, Hkv, .]`.
      do, added: as in `intervals`.
    """
    layout, config, scale, _ = params
    whole = block_indices
    block_indices, block = mosaic_lists.cut(ops, whole, config.select_block)
    sizes = sizes_of(qkv, scale)
    base = Dkv(**sizes, work_items=0, gated=rows.gate is not None, list_entries=1)
    keys, packed = mosaic_lists.list_keys(layout, base.S)
    list_sizes = base.B, base.T, keys, base.Hkv, block_indices.shape[-1], block
    alone = base.query_tile.group <= ROW_STATS_MIN_ROWS and base.query_tile.slab == ROWS
    if alone and not BlockQueryLists(*list_sizes, 1, packed).has_token_bits:
        base = dataclasses.replace(base, single_token=True)
    if mosaic_stored_ds.serves(ops, base, block_indices.shape[-1], block, packed):
        stats = row_stats(ops, rows, base, None, key_bounds.causal_end(ops, layout))
        return mosaic_stored_ds.gradients(
            ops, base, qkv, block_indices, do, stats, layout, added, block_lists, by_places
        )
    if isinstance(added, LaterDq):
        added = added.rows(ops)
    stages: dict[str, Any] = selected_spec.dq_stages(base.D, base.Dv, block)
    spec = selected_spec.of_blocks(
        sizes,
        whole.shape[-1],
        config.select_block,
        added=added is not None,
        stats_tile=(base.query_tile.tokens, base.stats_rows),
        gather_limit=mosaic_gather.gather_limit(*qkv, whole, config, layout.packed),
        **stages,
    )
    if block_lists is None:
        block_lists = mosaic_lists.tile_block_lists(ops, block_indices, layout, spec)
    stats = row_stats(ops, rows, base, None, key_bounds.causal_end(ops, layout))
    last = key_bounds.causal_end_by_row(ops, layout, spec.tile, spec.tiles)
    extra = [] if added is None else [added]
    kernel = selected_spec.dq(spec)
    (dq,) = ops.run(kernel, *qkv, *block_lists, last, do, stats, *extra)
    if spec.gather_limit:
        selection = whole, block_lists[-1], layout
        dq = mosaic_gather.query_gradient(ops, spec, qkv, selection, do, stats, dq)

    lists = BlockQueryLists(
        *list_sizes, base.query_tile.tokens, packed, interpret=base.interpret
    )
    edges, *queries = mosaic_lists.query_lists(ops, fill_lists, block_indices, layout, lists)
    work = work_items.dkv_work_items(lists, **mosaic_lists.queries_of(layout))
    table, *sums = mosaic_lists.work_items(ops, edges, layout, work)
    spec = dataclasses.replace(
        base,
        work_items=table.shape[0],
        list_entries=lists.entries,
        block=block if lists.has_token_bits else 0,
    )
    gradients = _dkv(ops, spec, (*qkv, do, stats, table, *queries), sums, layout)
    return Qkv(dq, *(gradients if by_places else mosaic_lists.of_keys(layout, gradients)))


def _dkv(ops, spec: Dkv, arrays, sums, layout: QueryLayout | None = None) -> list:
    """Run `dkv` and return dk and dv. For each key tile, `sums` has the index of the first partial
    sum and the number of partial sums. `layout` is the layout of query lists, with the tiles of
    `mosaic_lists.list_keys`.
    """
    gradients = []
    for part in spec.passes:
        partial = ops.run(dkv.partials(part), *arrays)
        part = part if layout is None else mosaic_lists.merge_spec(part, layout)
        gradients += ops.run(dkv.merge(part), *partial, *sums)
    return gradients


def row_stats(ops: ArrayOps, rows: RowResiduals, base, first, last):
    """Return the result of `bwd_preprocess.row_stats` for the query tiles of `base`, a `Dkv`.

    `first` and `last` `[B, T]` bound the keys to which each query attends. If `first` is None, the
    lower bound of the keys is 0.
    """
    keys = [ops.to_int32(x) for x in (last, first) if x is not None]
    extra = [ops.to_float32(x) for x in (rows.gate, rows.dlse) if x is not None]
    arrays = rows.lse, rows.delta, *keys, *extra
    spec = RowStats(
        *(base.B, base.T, base.H, base.Hkv, base.query_tile.tokens, base.stats_rows),
        interval=first is not None,
        gated=rows.gate is not None,
        lse_grad=rows.dlse is not None,
        interpret=base.interpret,
    )
    return ops.run(bwd_preprocess.row_stats(spec), *arrays)[0]
