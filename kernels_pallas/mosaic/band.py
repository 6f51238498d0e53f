"""Attention of every query to one interval of keys: the compressed and the sliding branch.

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

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import operands
from kernels_pallas.mosaic.operands import EMPTY, LOG2E, MASKED, MATRIX, PER_ROW, ROWS, across

CONSUMERS = 2
PROGRAMS = 132  # multiprocessors of an H100 SXM; on fewer, some of them take turns


@dataclasses.dataclass(frozen=True)
class Band:
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
    block: int = 128
    stages: int = 2
    interpret: bool | object = False

    @property
    def tile(self) -> operands.Tile:
        return operands.Tile(self.H // self.Hkv, operands.slab_width(self.D, self.Dv))

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


@functools.cache
def attention(band: Band) -> Kernel:
    """Inputs: query `[B, T, H, D]`, key `[B, S, Hkv, D]`, value `[B, S, Hkv, Dv]`, int32 bounds
    `first`, `last` `[B, tiles, 64]` by row, then `gate` float32 `[B, Hkv, tiles, 64]` if
    `gated` and `[B, T, H, Dv]` if `added`. Outputs: `[B, T, H, Dv]` and the natural
    log-sum-exp by row, float32 `[B, Hkv, tiles, 64]`.
    """
    tile, dtype = band.tile, jnp.dtype(band.dtype)
    buffers = operands.Buffers(dtype, tile, bool(band.interpret))
    stages, block, group = band.stages, band.block, tile.group
    c = band.scale * LOG2E
    operands.check_registers(*[232] * CONSUMERS, 40)
    rows_of_heads = band.B * band.Hkv
    pairs = rows_of_heads * band.tiles // CONSUMERS
    programs = min(pairs, PROGRAMS)
    ring = 2 * stages * block * (band.D + band.Dv)
    # Where there is room, the output has a place of its own, so that the next query can come.
    apart = ring + 2 * CONSUMERS * ROWS * (band.D + band.Dv) <= operands.SMEM_BYTES - 1024

    def body(*refs):
        query, key, value, first, last, *refs = refs
        gate = refs.pop(0) if band.gated else None
        addend = refs.pop(0) if band.added else None
        out, lse, query_s, *refs = refs
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
            if not band.interpret:
                plgpu.set_max_registers(232, action="increase")

            def load_query(placed):
                source = at(query, placed[:3])
                buffers.load_rows(source, query_s, wg, band.D, query_in.at[wg])

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
                        buffers.load_rows(source, out_s, wg, band.Dv, addend_in.at[wg])
                plgpu.barrier_wait(query_in.at[wg])

                def step(under_mask, i, state):
                    acc, top, total = state
                    slot = lax.rem(done + i, jnp.int32(stages))
                    plgpu.barrier_wait(key_in.at[slot])
                    logits = buffers.query_key((query_s, wg), key_s, slot)
                    plgpu.barrier_arrive(key_free.at[slot])
                    if under_mask:
                        shape = (ROWS, block)
                        index = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=MATRIX)
                        index += key_at(i)
                        seen = index >= across(first_row, shape)
                        seen &= index < across(last_row, shape)
                        logits = jnp.where(seen, logits, MASKED)
                    new = jnp.maximum(top, logits.max(axis=1) * c)
                    base = jnp.maximum(new, EMPTY) if under_mask else new
                    probs = jnp.exp2(logits * c - across(base, logits.shape))
                    decay = jnp.exp2(top - new)
                    total = total * decay + probs.sum(axis=1)
                    acc = acc * across(decay, acc.shape)
                    plgpu.barrier_wait(value_in.at[slot])
                    acc = buffers.add_weighted(acc, probs.astype(dtype), value_s, slot)
                    plgpu.barrier_arrive(value_free.at[slot])
                    return acc, new, total

                state = (
                    operands.full((ROWS, band.Dv), 0.0, MATRIX),
                    operands.full((ROWS,), MASKED, PER_ROW),
                    operands.full((ROWS,), 0.0, PER_ROW),
                )
                state = lax.fori_loop(0, masked, functools.partial(step, True), state)
                state = lax.fori_loop(masked, blocks, functools.partial(step, False), state)
                acc, top, total = state
                seen = total > 0
                weight = jnp.where(seen, 1 / total, 0.0)
                sums = jnp.where(seen, (top + jnp.log2(total)) / LOG2E, -jnp.inf)
                lse.at[b, g, mine][...] = sums
                if gate is not None:
                    gates = gate.at[b, g, mine]
                    weight *= plgpu.load(gates, layout=PER_ROW, optimized=False)
                acc = acc * across(weight, acc.shape)

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
                        buffers.load_rows(source, out_s, wg, band.Dv, addend_in.at[wg])
                    plgpu.barrier_wait(addend_in.at[wg])
                    added = buffers.read_rows(out_s, wg, band.Dv)
                buffers.write_rows(out_s, wg, acc, added)
                plgpu.commit_smem()
                buffers.store_rows(out_s, wg, band.Dv, at(out, here))
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
            if not band.interpret:
                plgpu.set_max_registers(40, action="decrease")

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
            if band.interpret:  # which wants every completed phase waited for

                def drain(i, _):
                    slot = lax.rem(i, jnp.int32(stages))
                    plgpu.barrier_wait(key_free.at[slot])
                    plgpu.barrier_wait(value_free.at[slot])

                lax.fori_loop(jnp.maximum(done - stages, 0), done, drain, None)

    slabs, value_slabs = band.D // tile.slab, band.Dv // tile.slab
    shape = jax.ShapeDtypeStruct
    rows = (band.B, band.tiles, ROWS)
    by_head = (band.B, band.Hkv, band.tiles, ROWS)
    output = shape((band.B, band.T, band.H, band.Dv), dtype)
    inputs = [
        shape((band.B, band.T, band.H, band.D), dtype),
        shape((band.B, band.S, band.Hkv, band.D), dtype),
        shape((band.B, band.S, band.Hkv, band.Dv), dtype),
        shape(rows, jnp.int32),
        shape(rows, jnp.int32),
    ]
    inputs += [shape(by_head, jnp.float32)] * band.gated + [output] * band.added
    outputs = (output, shape(by_head, jnp.float32))
    if apart:
        rows_s = [buffers.rows(CONSUMERS, band.D), buffers.rows(CONSUMERS, band.Dv)]
    else:
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
            plgpu.Barrier(num_arrivals=slabs, num_barriers=CONSUMERS),
            plgpu.Barrier(num_arrivals=slabs, num_barriers=stages),
            plgpu.Barrier(num_arrivals=value_slabs, num_barriers=stages),
            plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
            plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
            plgpu.Barrier(num_arrivals=value_slabs, num_barriers=CONSUMERS),
        ],
        compiler_params=operands.PARAMS,
        interpret=band.interpret,
    )
    return Kernel("band_attention", call, tuple(inputs), outputs)
