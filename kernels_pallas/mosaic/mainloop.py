"""Defines the loop of forward and dq, in which a tile of queries iterates over blocks of keys.

| module        | blocks of a tile                                          |
|---------------|-----------------------------------------------------------|
| `interval.py` | blocks of an interval of keys, which adjacent tiles share |
| `selected.py` | blocks of the tile's list                                 |

The formulas for a block of keys are those of `softmax.py`:

    forward   S = Q K^T [64, block],  P = 2^(c S - m),  O += P V           c = scale * log2(e)
    dq        S = Q K^T, dP = dO V^T,  dS = |g| P * (dP - delta),  dQ += dS K

P = 0 for keys to which a row must not attend, and for rows whose token did not select the block. At
the end, out = gate * O / l + added and dQ = scale * sign(gate) * dQ.

By default, P of a block is multiplied immediately by V (forward), and dS is multiplied immediately
by K (dq). If `overlap_pv` is true, P of a block is multiplied during the elementwise work on the
next block:

    at once      S(i)   softmax(i)   P(i) V(i)   S(i+1)   softmax(i+1)   ...
    overlap_pv   S(i)   softmax(i)   S(i+1), P(i) V(i)
                                     softmax(i+1)          S(i+2), P(i+1) V(i+1)   ...
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.mosaic import fp8, softmax
from kernels_pallas.mosaic.operands import (
    LOG2E,
    ROWS,
    Buffers,
    across,
    by_column,
    div,
    side_by_side,
    zeros,
)
from kernels_pallas.mosaic.row_io import GatheredRows, TileRows
from kernels_pallas.specs.fp8 import GROUP, LARGEST, OFFSET, SMALLEST
from kernels_pallas.specs.interval import IntervalAttention
from kernels_pallas.specs.selected import SelectedAttention
from kernels_pallas.specs.tile import Tile, slab_width

type Spec = IntervalAttention | SelectedAttention


class TilePlace(NamedTuple):
    """The indices of a warpgroup's tile."""

    b: Any
    kv_head: Any
    index: Any  # index of the tile along the tokens
    slot: Any  # index of the tile's memory among the tiles of the CTA


def rows_of(size: Tile, array, at: TilePlace):
    """Return a function that maps a slice of columns to these columns of a tile's rows in `array`
    `[B, T, H, .]`.
    """
    tokens = pl.ds(at.index * size.tokens, size.tokens)
    heads = pl.ds(at.kv_head * size.group, size.group)
    return lambda columns: array.at[at.b, tokens, heads, columns]


class Block(NamedTuple):
    """The stages of a block of keys and values in the ring buffers.

    `free_key` releases the stage of the keys for the next copy, and `free_value` releases the stage
    of the values. `free_key` and `free_value` are called once each, after the last read of their
    stage.
    """

    key_stage: Any
    value_stage: Any
    row_mask: Any  # [64], the rows that have this block; None means all
    visible: Callable[[], Any]  # [64, block]; None means that all rows see the whole block
    free_key: Callable[[], None]
    free_value: Callable[[], None]


# A block, and the P or dS of this block, `[64, block]` in 16 bits.
type Factor = tuple[Block, Any]


class Mainloop(NamedTuple):
    """The operations of a kernel on a tile whose rows have arrived. The operations wait until
    the key and the value stage of a block are ready (`key_ready`, `value_ready`), and release
    both stages.

    `attend(block, before, state)` returns the next state and a factor, which is the matrix P or
    dS of the block. `multiply(factor, state)` adds the product of a factor to the state. If
    `overlap_pv` is true, `attend` multiplies the previous block's factor, `before`, during its
    elementwise work. `before` is None for the first block, and for all blocks if `overlap_pv` is
    false. `finish(state)` returns the result, float32 `[64, width]`.
    """

    state: Any
    attend: Callable[[Block, Factor | None, Any], tuple[Any, Any]]
    multiply: Callable[[Factor, Any], Any]
    finish: Callable[[Any], Any]


def over_blocks(
    mainloop: Mainloop,
    block_at: Callable[[bool, Any], Block],
    boundary: Any,
    blocks: Any,
    masked_first: bool,
    overlap_pv: bool,
) -> Any:
    """Return the last state of `mainloop` on a tile.

    Args:
      mainloop: The operations on the tile.
      block_at: Function that returns a block. The arguments of `block_at` are whether some keys are
        masked, and the index of the block.
      boundary: Number of blocks after which masking begins or ends. Either only the first
        `boundary` blocks or only the remaining blocks are masked.
      blocks: Number of all blocks.
      masked_first: True if the first blocks are masked, False if the remaining blocks are
        masked.
      overlap_pv: Whether a factor is multiplied during the next block. If `overlap_pv` is true,
        `blocks` must be at least 1. If `overlap_pv` is true, the first block is always masked.
    """

    def step(under_mask, i, carried):
        state, matrix = carried
        before = block_at(False, i - 1), matrix
        return mainloop.attend(block_at(under_mask, i), before, state)

    def step_without_overlap(under_mask, i, state):
        block = block_at(under_mask, i)
        state, matrix = mainloop.attend(block, None, state)
        return mainloop.multiply((block, matrix), state)

    def loop(first, body, carried):
        middle = jnp.maximum(boundary, first)
        body_before, body_after = (
            functools.partial(body, under_mask)
            for under_mask in (masked_first, not masked_first)
        )
        carried = lax.fori_loop(first, middle, body_before, carried)
        return lax.fori_loop(middle, blocks, body_after, carried)

    if not overlap_pv:
        return loop(0, step_without_overlap, mainloop.state)
    carried = mainloop.attend(block_at(True, jnp.int32(0)), None, mainloop.state)
    state, matrix = loop(1, step, carried)
    return mainloop.multiply((block_at(False, blocks - 1), matrix), state)


class Ring(NamedTuple):
    """A ring buffer of blocks.

    Attributes:
      buffers: The `Buffers` object that allocates and multiplies the blocks.
      rows: Number of rows of a block.
      width: Number of columns of a block.
      by_column: Whether blocks are transposed. In a transposed block, a row is a column of V, and a
        column is a pair of keys.
    """

    buffers: Buffers
    rows: int
    width: int
    by_column: bool = False

    def scratch(self, stages: int):
        """Return the type of the ring buffer."""
        return self.buffers.ring(stages, self.rows, self.width)

    @property
    def copies(self) -> int:
        """The number of copies per block."""
        return self.width // self.buffers.slab

    def load(self, array, b, kv_head, first, ref, stage, barrier) -> None:
        """Start the copies of the block of `array` whose first key is `first`. If `by_column` is
        true, `first` must be a multiple of `GROUP`.
        """

        def by_token(columns):
            return array.at[b, pl.ds(first, self.rows), kv_head, columns]

        def by_column(columns):
            pair = div(first, 2) + columns.start
            if not self.buffers.interpret:
                pair = pl.multiple_of(pair, GROUP // 2)
            return array.at[b, kv_head, pl.ds(0, self.rows), pl.ds(pair, columns.size)]

        source: Callable[[Any], Any] = by_column if self.by_column else by_token
        self.buffers.load_keys(source, ref, stage, barrier)


def rings(spec: Any) -> tuple[Ring, Ring]:
    """Return the ring buffers of a kernel's keys and values. `spec` is an `AttentionSizes` with
    `tile` and `block`.
    """
    if not spec.fp8:
        buffers = Buffers.of(spec, spec.tile)
        return Ring(buffers, spec.block, spec.D), Ring(buffers, spec.block, spec.Dv)
    keys, values = (
        Buffers.of(spec, Tile(spec.tile.group, slab_width(pairs)), "int16")
        for pairs in (spec.D // 2, spec.block // 2)
    )
    return (
        Ring(keys, spec.block, spec.D // 2),
        Ring(values, spec.Dv, spec.block // 2, by_column=True),
    )


def forward(spec: Spec, refs: Any, at: TilePlace) -> Mainloop:
    """Return the `Mainloop` of forward for the tile `at`."""
    buffers = Buffers.of(spec, spec.tile)
    tile, c, interpret = spec.tile, spec.scale * LOG2E, spec.interpret
    tile_rows = TileRows.of(spec)
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
        # If P were converted before the wait, the products would be serialized (`wgmma.py`).
        return state, fp8.pairs(p, interpret) if spec.fp8 else p.astype(values.dtype)

    def start_multiply(before, acc):
        stage = before[0].value_stage
        plgpu.barrier_wait(refs.value_ready.at[stage])
        return values.start_sum(acc, before[1], (refs.value_ring, stage))

    def finish_multiply(before, acc):
        (acc,) = buffers.finish(acc)
        before[0].free_value()
        return acc  # [64, Dv]

    def multiply(factor, state):
        acc = finish_multiply(factor, start_multiply(factor, state.acc))
        return state._replace(acc=acc)

    def finish(state):
        inverse, lse = softmax.normalizer(state, offset)  # [64]
        # The mean of the keys was subtracted from the keys. S therefore lacks the product of
        # the query with this mean. The lse must include the product, unless the result is added
        # to another branch and the lse is not used.
        if spec.fp8 and not spec.added:
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
    """Return the tile's scaled query as a left operand in registers, and the divisors of its rows,
    `[64]`. The query is multiplied by the scales of keys in e4m3.
    """
    interpret, slab = spec.interpret, buffers.slab
    slabs = range(spec.D // slab)
    part = functools.partial(_query_times, spec, buffers, refs, at, refs.key_scale)
    largest = [jnp.abs(part(i)).max(axis=1) for i in slabs]
    divisor = functools.reduce(jnp.maximum, largest) / LARGEST
    divisor = jnp.maximum(divisor, SMALLEST)
    inverse = across(1 / divisor, (ROWS, slab))
    parts = [fp8.pairs(part(i) * inverse, interpret) for i in slabs]
    return side_by_side(parts, interpret), divisor


def _logit(spec: Spec, buffers: Buffers, refs: Any, at: TilePlace, key):
    """Return the logits of the tile's 64 query rows with one key per head from `[B, Hkv, D]`, as
    float32 `[64]`.
    """
    logit = 0.0
    for i in range(spec.D // buffers.slab):
        logit += _query_times(spec, buffers, refs, at, key, i).sum(axis=1)
        # `commit_smem` prevents the compiler from loading all slabs into registers at once.
        plgpu.commit_smem()
    return logit * spec.scale


def _query_times(spec: Spec, buffers: Buffers, refs: Any, at: TilePlace, columns, i):
    """Return slab `i` of the tile's query in float32. Each column of the query is multiplied by
    a factor from an array `[B, Hkv, D]`.
    """
    query = buffers.read_slab(refs.query_tile, at.slot, i).astype(jnp.float32)
    own = columns.at[at.b, at.kv_head, pl.ds(i * buffers.slab, buffers.slab)]
    return query * by_column(own, query.shape, spec.interpret)


def dq(spec: Spec, refs: Any, at: TilePlace) -> Mainloop:
    """Return the `Mainloop` of dq for the tile `at`."""
    buffers = Buffers.of(spec, spec.tile)
    tile, c, dtype = spec.tile, spec.scale * LOG2E, jnp.dtype(spec.dtype)
    interpret = spec.interpret
    tile_rows = TileRows.of(spec)
    token = tile_rows.token(at.index * tile.tokens, refs.sizes.T)  # [64]
    stats_tiles = spec.stats_tile[0], refs.sizes.stats_tiles
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

    return Mainloop(zeros(spec.D), attend, multiply, finish)
