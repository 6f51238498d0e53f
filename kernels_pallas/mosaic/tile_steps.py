"""What forward and dq of attention do with a tile of queries, on either walk (`tile_walk.py`).

Per block of keys, formulas as in `softmax.py`:

    forward   S = Q K^T [64, block],  P = 2^(c S - m),  O += P V           c = scale * log2(e)
    dq        S = Q K^T, dP = dO V^T,  dS = |g| P * (dP - delta),  dQ += dS K

in which P = 0 for keys that a row must not see and for rows that do not have the block. At the
end out = gate * O / l + added, and dQ is scaled and takes the gate's sign.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.mosaic import fp8, softmax
from kernels_pallas.mosaic.operands import (
    LOG2E,
    ROWS,
    Buffers,
    across,
    by_column,
    side_by_side,
)
from kernels_pallas.mosaic.ring import rings
from kernels_pallas.mosaic.row_io import GatheredRows, TileRows
from kernels_pallas.mosaic.tile_walk import Mainloop, TilePlace
from kernels_pallas.specs.fp8 import LARGEST, OFFSET, SMALLEST
from kernels_pallas.specs.interval import IntervalAttention
from kernels_pallas.specs.selected import SelectedAttention

type Spec = IntervalAttention | SelectedAttention


def forward(spec: Spec, buffers: Buffers, refs: Any, at: TilePlace) -> Mainloop:
    """What forward does with the tile `at`."""
    tile, c, interpret = spec.tile, spec.scale * LOG2E, bool(spec.interpret)
    tile_rows = TileRows(tile.tokens, tile.group, tile.group, interpret)
    keys, values = (ring.buffers for ring in rings(spec))
    query, offset = (refs.query_tile, at.slot), 0.0
    if spec.fp8:
        query, divisor = _rounded_query(spec, buffers, refs, at)
        c, offset = c * divisor, OFFSET

    def attend(block, before, state):
        acc = state.acc
        plgpu.barrier_wait(refs.key_ready.at[block.key_stage])
        key = refs.key_ring, block.key_stage
        scores = keys.start_product(query, key)
        if before is not None:
            acc = start_multiply(before, acc)
        (scores,) = buffers.finish(scores, running=0 if before is None else 1)
        block.free_key()
        visible = block.visible()
        p, row_max = softmax.block_softmax(
            state.row_max, scores, c, visible, block.row_mask, offset
        )
        if before is not None:
            acc = finish_multiply(before, acc)
        state = softmax.rescaled(state._replace(acc=acc), row_max, p)
        # Converted before the wait, P would serialize the products (`wgmma.py`).
        return state, fp8.pairs(p, interpret) if spec.fp8 else p.astype(values.dtype)

    def start_multiply(before, acc):
        stage = before.block.value_stage
        plgpu.barrier_wait(refs.value_ready.at[stage])
        return values.start_sum(acc, before.matrix, (refs.value_ring, stage))

    def finish_multiply(before, acc):
        (acc,) = buffers.finish(acc)
        before.block.free_value()
        return acc  # [64, Dv]

    def multiply(factor, state):
        acc = finish_multiply(factor, start_multiply(factor, state.acc))
        return state._replace(acc=acc)

    def finish(state):
        inverse, lse = softmax.normalizer(state, offset)  # [64]
        if spec.fp8 and not spec.added:  # a branch alone, whose keys have their mean again
            lse += _logit(spec, buffers, refs, at, refs.key_mean)
        rows = at.b, at.index * tile.tokens, at.kv_head * tile.group, refs.sizes.T
        tile_rows.put(refs.lse, lse, *rows)
        if spec.gated:
            inverse *= tile_rows.values(refs.gate, *rows)
        out = state.acc * across(inverse, state.acc.shape)
        if spec.fp8:
            out *= by_column(refs.value_scale.at[at.b, at.kv_head], out.shape, interpret)
        return out

    return Mainloop(softmax.initial_state(spec.Dv), attend, multiply, finish)


def _rounded_query(spec: Spec, buffers: Buffers, refs: Any, at: TilePlace):
    """The tile's query times the scales of keys in e4m3, a left operand in registers, and what its
    rows were divided by, `[64]`.
    """
    interpret, slab = bool(spec.interpret), buffers.slab
    slabs = range(spec.D // slab)
    part = functools.partial(_query_times, spec, buffers, refs, at, refs.key_scale)
    largest = [jnp.abs(part(i)).max(axis=1) for i in slabs]
    divisor = functools.reduce(jnp.maximum, largest) / LARGEST
    divisor = jnp.maximum(divisor, SMALLEST)
    inverse = across(1 / divisor, (ROWS, slab))
    parts = [fp8.pairs(part(i) * inverse, interpret) for i in slabs]
    return side_by_side(parts, interpret), divisor


def _logit(spec: Spec, buffers: Buffers, refs: Any, at: TilePlace, key):
    """Of the tile's query rows, `[64]`, with a key `[B, Hkv, D]`, float32."""
    logit = 0.0
    for i in range(spec.D // buffers.slab):
        logit += _query_times(spec, buffers, refs, at, key, i).sum(axis=1)
        plgpu.commit_smem()  # or registers would hold all slabs at once
    return logit * spec.scale


def _query_times(spec: Spec, buffers: Buffers, refs: Any, at: TilePlace, columns, i):
    """Slab `i` of the tile's query, each column times its number of `[B, Hkv, D]`; float32."""
    query = buffers.read_slab(refs.query_tile, at.slot, i).astype(jnp.float32)
    own = columns.at[at.b, at.kv_head, pl.ds(i * buffers.slab, buffers.slab)]
    return query * by_column(own, query.shape, bool(spec.interpret))


def dq(spec: Spec, buffers: Buffers, refs: Any, at: TilePlace, stats_tokens: int) -> Mainloop:
    """What dq does with the tile `at`; `stats_tokens`: tokens of a query tile of
    `refs.row_stats` (`specs/bwd_preprocess.py`).
    """
    tile, c, dtype = spec.tile, spec.scale * LOG2E, jnp.dtype(spec.dtype)
    interpret = bool(spec.interpret)
    tile_rows = TileRows(tile.tokens, tile.group, tile.group, interpret)
    token = tile_rows.token(at.index * tile.tokens, refs.sizes.T)  # [64]
    stats_tiles = stats_tokens, refs.sizes.stats_tiles
    gathered_rows = GatheredRows(tile.group, interpret)
    stats = gathered_rows.softmax_stats(refs.row_stats, at.b, at.kv_head, token, stats_tiles)

    def attend(block, _, acc):
        plgpu.barrier_wait(refs.key_ready.at[block.key_stage])
        plgpu.barrier_wait(refs.value_ready.at[block.value_stage])
        query, do = (refs.query_tile, at.slot), (refs.do_tile, at.slot)
        scores = buffers.start_product(query, (refs.key_ring, block.key_stage))  # [64, block]
        dp = buffers.start_product(do, (refs.value_ring, block.value_stage))
        scores, dp = buffers.finish(scores, dp)
        block.free_value()
        of_rows = stats
        if block.row_mask is not None:
            of_rows = stats._replace(shift=jnp.where(block.row_mask, stats.shift, jnp.inf))
        ds = softmax.softmax_backward(scores, dp, c, of_rows, block.visible())
        return acc, ds.astype(dtype)

    def multiply(factor, acc):
        block, ds = factor
        acc = buffers.start_sum(acc, ds, (refs.key_ring, block.key_stage))
        (acc,) = buffers.finish(acc)
        block.free_key()
        return acc  # [64, D]

    def finish(acc):
        return acc * across(stats.sign * spec.scale, acc.shape)

    return Mainloop(softmax.zeros(spec.D), attend, multiply, finish)
