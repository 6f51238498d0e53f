"""Attention of every query to one interval of keys: the compressed and the sliding branch.

The gradient of the query is the same walk over the same keys (`gradient`).

Token `t` sees the keys `first[t] <= i < last[t]`; both bounds never decrease along `t`. One
block of threads a multiprocessor walks over pairs of tiles, the longest first. Its two
computing warpgroups share the keys, which a third one streams through a ring of shared memory,
ahead of them and across the borders of tiles: of each pair first the blocks that some row sees
in part, under a mask, then the others without one.

Floors at B=1 H=64 Hkv=4 D=Dv=128 T=65536 on an H100 (989 TFLOP/s, 3.35 TB/s): compressed
4.40 TFLOP = 4.4 ms, sliding 1.10 TFLOP = 1.1 ms; query and output once, 2.1 GB = 0.64 ms.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import bwd_preprocess, operands, softmax
from kernels_pallas.mosaic.operands import LOG2E, MATRIX, PER_ROW, ROWS, across
from kernels_pallas.mosaic.row_io import GatheredRows, TileRows

CONSUMERS = 2
PROGRAMS = 132  # multiprocessors of an H100 SXM; on fewer, some of them take turns


@dataclasses.dataclass(frozen=True)
class IntervalAttention:
    """The static part of a problem; shapes as in `attention`."""

    B: int
    T: int
    S: int
    H: int
    Hkv: int
    D: int
    Dv: int
    dtype: str
    scale: float
    gated: bool = False  # multiply by a gate, and write no log-sum-exp
    added: bool = False  # add to an array like the output
    longest_first: bool = False  # later tokens see more keys: start them first
    gradient: bool = False  # of the query
    block: int = 128
    stages: int = 2
    interpret: bool | object = False

    @property
    def tile(self) -> operands.Tile:
        return operands.Tile(self.H // self.Hkv, operands.slab_width(self.D, self.Dv))

    @property
    def width(self) -> int:
        """Columns of the output."""
        return self.D if self.gradient else self.Dv

    @property
    def tiles(self) -> int:
        """Tiles of 64 rows along the tokens, a multiple of the warpgroups that share keys."""
        return -(-self.T // (self.tile.tokens * CONSUMERS)) * CONSUMERS


def blocks_for(key_width: int, value_width: int, *, long: bool) -> dict[str, int]:
    """Keys of a block and stages of the ring; `long`: many blocks to a tile."""
    if max(key_width, value_width) > 192:
        return {"block": 64, "stages": 2}
    if max(key_width, value_width) > 128 and not long:  # else it spills with an array to add
        return {"block": 64, "stages": 3}
    return {"block": 128, "stages": 2}


def gradient_blocks(key_width: int, value_width: int) -> dict[str, int]:
    """As `blocks_for`, for the gradient of the query."""
    width = key_width + value_width
    return {"block": 64, "stages": 3 if width <= 256 else 2 if width <= 384 else 1}


@functools.cache
def attention(band: IntervalAttention) -> Kernel:
    """Inputs: query `[B, T, H, D]`, key `[B, S, Hkv, D]`, value `[B, S, Hkv, Dv]`, int32 bounds
    `first`, `last` `[B, tiles, 64]` by row, then `gate` float32 `[B, T, H]` if `gated` and `[B,
    T, H, Dv]` if `added`. Outputs: `[B, T, H, Dv]` and the natural log-sum-exp, float32 `[B, T,
    H]`.

    With `gradient`, after the bounds: the gradient of the output `[B, T, H, Dv]`, `numbers` as
    in `kernels_pallas.mosaic.numbers`, in units of a tile's tokens, and `[B, T, H, D]` if
    `added`. Output: the gradient of the query.
    """
    tile, dtype = band.tile, jnp.dtype(band.dtype)
    interpret = bool(band.interpret)
    buffers = operands.Buffers(dtype, tile, interpret)
    stages, block, group = band.stages, band.block, tile.group
    of_tile = TileRows(tile.tokens, group, group, interpret)
    c = band.scale * LOG2E
    wide = band.gradient and band.D + band.Dv > 256
    computing, copying = (240, 24) if wide else (232, 40)
    operands.check_registers(*[computing] * CONSUMERS, copying)
    rows_of_heads = band.B * band.Hkv
    pairs = rows_of_heads * band.tiles // CONSUMERS
    programs = min(pairs, PROGRAMS)
    ring = 2 * stages * block * (band.D + band.Dv)
    # Where there is room, the output has a place of its own, so that the next query can come.
    rows_bytes = 2 * CONSUMERS * ROWS * (band.D + band.Dv + band.D * band.gradient)
    apart = ring + rows_bytes <= operands.SMEM_BYTES - 1024

    def body(*refs):
        query, key, value, first, last, *refs = refs
        grad: Any = refs.pop(0) if band.gradient else None
        rows: Any = refs.pop(0) if band.gradient else None
        gates = refs.pop(0) if band.gated and not band.gradient else None
        addend = refs.pop(0) if band.added else None
        out = refs.pop(0)
        lse: Any = None if band.gradient else refs.pop(0)
        query_s = refs.pop(0)
        grad_s = refs.pop(0) if band.gradient else None
        out_s = refs.pop(0) if apart else query_s
        key_s, value_s, query_in, key_in, value_in, *refs = refs
        key_free, value_free, addend_in = refs
        wg, program = lax.axis_index("wg"), lax.axis_index("program")
        rounds = lax.div(pairs - 1 - program, jnp.int32(programs)) + 1

        def place(turn_number):
            """Batch row, key/value head, first tile and bounds of a pair."""
            index = jnp.minimum(turn_number * programs + program, pairs - 1)
            tile0 = lax.div(index, jnp.int32(rows_of_heads)) * CONSUMERS
            head = lax.rem(index, jnp.int32(rows_of_heads))
            if band.longest_first:
                tile0 = band.tiles - CONSUMERS - tile0
            b, g = lax.div(head, jnp.int32(band.Hkv)), lax.rem(head, jnp.int32(band.Hkv))
            # Bounds never decrease: those of a pair are those of its first and its last row.
            final = tile0 + CONSUMERS - 1
            bounds = first[b, tile0, 0], first[b, final, ROWS - 1]
            return b, g, tile0, *bounds, last[b, tile0, 0], last[b, final, ROWS - 1]

        def split(bounds):
            """Number of blocks, and of those under a mask; the first key of the i-th."""
            begin, full_from, full_to, end = bounds
            blocks = lax.div(jnp.maximum(end - begin, 0) + (block - 1), jnp.int32(block))
            # Blocks [left, right) are seen by every row in full; the others come first.
            left = lax.div(full_from - begin + (block - 1), jnp.int32(block))
            left = jnp.minimum(left, blocks)
            right = lax.div(jnp.maximum(full_to - begin, 0), jnp.int32(block))
            right = jnp.clip(right, left, blocks)
            masked = left + blocks - right

            def key_at(i):
                edge = jnp.where(i < left, i, i - left + right)
                return begin + jnp.where(i < masked, edge, i - masked + left) * block

            return blocks, masked, key_at

        def at(array, here):
            b, g, tile0 = here
            tokens = pl.ds((tile0 + wg) * tile.tokens, tile.tokens)
            return lambda columns: array.at[b, tokens, pl.ds(g * group, group), columns]

        @pl.when(wg < CONSUMERS)
        def _():
            if not interpret:
                plgpu.set_max_registers(computing, action="increase")

            def load_query(placed):
                here = placed[:3]
                buffers.load_rows(at(query, here), query_s, wg, band.D, query_in.at[wg])
                if grad is not None:
                    buffers.load_rows(at(grad, here), grad_s, wg, band.Dv, query_in.at[wg])

            def between(first_row, last_row, first_key):
                shape = (ROWS, block)
                index = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=MATRIX)
                index += first_key
                return (index >= across(first_row, shape)) & (index < across(last_row, shape))

            def pair(turn_number, carry):
                done, b, g, tile0, *bounds = carry
                here = b, g, tile0
                mine = tile0 + wg
                following = place(turn_number + 1)
                blocks, masked, key_at = split(bounds)
                first_row = plgpu.load(first.at[b, mine], layout=PER_ROW, optimized=False)
                last_row = plgpu.load(last.at[b, mine], layout=PER_ROW, optimized=False)
                if apart:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    if addend is not None:
                        source = at(addend, here)
                        buffers.load_rows(source, out_s, wg, band.width, addend_in.at[wg])
                plgpu.barrier_wait(query_in.at[wg])

                def visible(under_mask, i):
                    return between(first_row, last_row, key_at(i)) if under_mask else None

                def attend(under_mask, i, state):
                    slot = lax.rem(done + i, jnp.int32(stages))
                    plgpu.barrier_wait(key_in.at[slot])
                    logits, _ = buffers.products(((query_s, wg), (key_s, slot)))
                    plgpu.barrier_arrive(key_free.at[slot])
                    probs, state = softmax.probabilities(
                        state, logits, c, visible(under_mask, i)
                    )
                    plgpu.barrier_wait(value_in.at[slot])
                    (acc,) = buffers.add_weighted(
                        (state[0], probs.astype(dtype), (value_s, slot))
                    )
                    plgpu.barrier_arrive(value_free.at[slot])
                    return acc, *state[1:]

                def differentiate(under_mask, i, acc):
                    slot = lax.rem(done + i, jnp.int32(stages))
                    plgpu.barrier_wait(key_in.at[slot])
                    plgpu.barrier_wait(value_in.at[slot])
                    logits, weights, _ = buffers.products(
                        ((query_s, wg), (key_s, slot)), ((grad_s, wg), (value_s, slot))
                    )
                    plgpu.barrier_arrive(value_free.at[slot])
                    seen = visible(under_mask, i)
                    found = softmax.softmax_backward(
                        logits, weights, c, norm, gate, offset, seen
                    )
                    (acc,) = buffers.add_weighted((acc, found.astype(dtype), (key_s, slot)))
                    plgpu.barrier_arrive(key_free.at[slot])
                    return acc

                state = softmax.nothing(band.width)
                step = attend
                if band.gradient:
                    step, state = differentiate, state[0]
                    token = of_tile.token(mine * tile.tokens, band.T)
                    norm, gate, offset = GatheredRows(group, interpret).numbers(
                        rows, b, g, token, tile.tokens, band.gated
                    )
                state = lax.fori_loop(0, masked, functools.partial(step, True), state)
                state = lax.fori_loop(masked, blocks, functools.partial(step, False), state)
                if band.gradient:
                    acc = state * band.scale
                else:
                    weight, norm = softmax.result(state)
                    at_rows = b, mine * tile.tokens, g * group
                    of_tile.put(lse, norm, *at_rows)
                    if gates is not None:
                        weight *= of_tile.values(gates, *at_rows)
                    acc = state[0] * across(weight, state[0].shape)

                def load_next_query():
                    @pl.when(turn_number + 1 < rounds)
                    def _():
                        load_query(following)

                if apart:
                    plgpu.commit_smem()  # the warpgroup is done with its query
                    load_next_query()
                added = None
                if addend is not None:
                    if not apart:
                        plgpu.commit_smem()  # the warpgroup is done with its query
                        source = at(addend, here)
                        buffers.load_rows(source, out_s, wg, band.width, addend_in.at[wg])
                    plgpu.barrier_wait(addend_in.at[wg])
                    added = buffers.read_rows(out_s, wg, band.width)
                buffers.write_rows(out_s, wg, acc, added)
                plgpu.commit_smem()
                buffers.store_rows(out_s, wg, band.width, at(out, here))
                if not apart:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    load_next_query()
                return done + blocks, *following

            foremost = place(0)
            load_query(foremost)
            lax.fori_loop(0, rounds, pair, (jnp.int32(0), *foremost))

            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == CONSUMERS)
        def _():
            if not interpret:
                plgpu.set_max_registers(copying, action="decrease")

            def pair(turn_number, carry):
                done, b, g, _, *bounds = carry
                following = place(turn_number + 1)
                blocks, _, key_at = split(bounds)

                def load(i, _):
                    slot = lax.rem(done + i, jnp.int32(stages))
                    keys = pl.ds(key_at(i), block)
                    for source, ring, here, free in (
                        (key, key_s, key_in, key_free),
                        (value, value_s, value_in, value_free),
                    ):

                        @pl.when(done + i >= stages)
                        def _(free=free):
                            plgpu.barrier_wait(free.at[slot])

                        buffers.load_keys(
                            lambda columns, source=source: source.at[b, keys, g, columns],
                            ring,
                            slot,
                            here.at[slot],
                        )

                lax.fori_loop(0, blocks, load, None)
                return done + blocks, *following

            done, *_ = lax.fori_loop(0, rounds, pair, (jnp.int32(0), *place(0)))
            if interpret:  # which wants every completed phase waited for

                def drain(i, _):
                    slot = lax.rem(i, jnp.int32(stages))
                    plgpu.barrier_wait(key_free.at[slot])
                    plgpu.barrier_wait(value_free.at[slot])

                lax.fori_loop(jnp.maximum(done - stages, 0), done, drain, None)

    slabs, value_slabs = band.D // tile.slab, band.Dv // tile.slab
    shape = jax.ShapeDtypeStruct
    rows = (band.B, band.tiles, ROWS)
    by_head = shape((band.B, band.T, band.H), jnp.float32)
    output = shape((band.B, band.T, band.H, band.width), dtype)
    inputs = [
        shape((band.B, band.T, band.H, band.D), dtype),
        shape((band.B, band.S, band.Hkv, band.D), dtype),
        shape((band.B, band.S, band.Hkv, band.Dv), dtype),
        shape(rows, jnp.int32),
        shape(rows, jnp.int32),
    ]
    if band.gradient:
        inputs += [shape((band.B, band.T, band.H, band.Dv), dtype)]
        inputs += [bwd_preprocess.array(band, tile.tokens, ROWS)]
    elif band.gated:
        inputs += [by_head]
    inputs += [output] * band.added
    outputs = (output,) if band.gradient else (output, by_head)
    rows_s = [buffers.rows(CONSUMERS, band.D)]
    if band.gradient:
        rows_s += [buffers.rows(CONSUMERS, band.Dv)]
    if apart:
        rows_s += [buffers.rows(CONSUMERS, band.width)]
    elif not band.gradient:
        rows_s = [buffers.rows(CONSUMERS, max(band.D, band.Dv))]
    call = plgpu.kernel(
        body,
        out_type=outputs,
        grid=(programs,),
        grid_names=("program",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        scratch_types=[
            *rows_s,
            buffers.ring(stages, block, band.D),
            buffers.ring(stages, block, band.Dv),
            plgpu.Barrier(
                num_arrivals=slabs + value_slabs * band.gradient, num_barriers=CONSUMERS
            ),
            plgpu.Barrier(num_arrivals=slabs, num_barriers=stages),
            plgpu.Barrier(num_arrivals=value_slabs, num_barriers=stages),
            plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
            plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
            plgpu.Barrier(num_arrivals=band.width // tile.slab, num_barriers=CONSUMERS),
        ],
        compiler_params=operands.PARAMS,
        interpret=band.interpret,
    )
    name = "band_query_gradient" if band.gradient else "band_attention"
    return Kernel(name, band, call, tuple(inputs), outputs, in_place=band.added)
