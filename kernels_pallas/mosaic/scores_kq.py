"""Scores and the best blocks by S^T = K Q^T (swap A and B): groups of more than 16 heads.

Algorithm: P^T = exp2(scale * log2(e) * K Q^T - lse_log2); the sum over the heads of a group
runs along a row of registers. While a product runs, the probabilities of the one before it are
made. The score rows of a tile stay in shared memory, where a warp a token takes out the best
blocks that are not forced.

Loop order: query-stationary. For each tile of query rows (a CTA of one warpgroup): for each
chunk of blocks, if there are several: for each step of 64 blocks: for each of their `ratio`
phases one product; at the end of a chunk its top-k.
Tile: up to 128 query rows, 8 tokens; 64 keys a product; 2 stages, as with more an SM holds one
CTA. Bound by the instructions around the products; floors as in `scores_qk.py`.
"""

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import vector

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import operands, warp
from kernels_pallas.mosaic.operands import LOG2E, MATRIX, PER_COLUMN, ROWS, div, div_rem, rem
from kernels_pallas.mosaic.refs import build_kernel
from kernels_pallas.mosaic.scores_common import (
    NO_BLOCK,
    lse_log2_of_rows,
    tokens_of_tile,
    walk_chunk,
)
from kernels_pallas.mosaic.warp import Word
from kernels_pallas.specs.scores import KEYS, KQ_WARPS, Scores

# One row of 128 * k columns a warp, four neighbours a lane.
ROW_PER_WARP = plgpu.Layout.TILED(
    plgpu.Tiling(((KQ_WARPS, 128), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)


def best_blocks(kernel: Kernel):
    """The body of `specs.scores.best_blocks` for any group."""
    spec: Scores = kernel.spec
    tile, r, free = spec.tile, spec.ratio, spec.free
    buffers = operands.Buffers(jnp.dtype(spec.dtype), tile, bool(spec.interpret))
    heads, rows, score_rows, chunk, stages = dataclasses.astuple(spec.tiling)
    scale_log2 = spec.scale * LOG2E
    several_chunks = spec.chunks > 1 and free > 0
    winners = -(-spec.chunks * free // 128) * 128 if several_chunks else 1
    step_keys = KEYS * r
    # Score rows in fours, one a warp.
    fours = [pl.ds(first, KQ_WARPS) for first in range(0, score_rows, KQ_WARPS)]

    def body(refs):
        b, g = div_rem(refs.cta.bg, spec.Hkv)
        tiles = refs.sizes.tiles
        tile_index = tiles - 1 - refs.cta.tile  # later tokens have more to do
        mine = b * tiles + tile_index
        first_of_tile, last_of_tile = tokens_of_tile(spec, refs, mine, tile_index)
        tokens = pl.ds(first_of_tile, tile.tokens)
        group = pl.ds(g * spec.group, heads)
        buffers.load_rows(
            lambda columns: refs.query.at[b, tokens, group, columns],
            refs.query_s,
            0,
            spec.D,
            refs.query_full,
        )
        base = refs.base_block[mine, 0]
        last_begin = refs.key_begin[mine, rows - 1]
        first_end = refs.key_end[mine, 0]
        last_end = refs.key_end[mine, rows - 1]
        keys = jnp.maximum(last_end - base * r, 0)
        steps = div(keys + step_keys - 1, step_keys)
        products = jnp.maximum(steps * r, 1)  # the first is made in any case

        def load(q):
            """Starts the copies of the keys of product `q`: one phase of 64 blocks."""

            @pl.when(q < products)
            def _():
                stage = rem(q, stages)
                blocks = pl.ds(base + div(q, r) * ROWS, ROWS)
                phase = rem(q, r)
                buffers.load_keys(
                    lambda columns: refs.key.at[b, blocks, phase, g, columns],
                    refs.key_s,
                    stage,
                    refs.key_full.at[stage],
                )

        def multiply(q, meanwhile):
            """Logits K Q^T `[64, rows]` of product `q`, and what `meanwhile` returns: it runs
            beside it.
            """
            stage = rem(q, stages)

            @pl.when(q < products)
            def _():
                plgpu.barrier_wait(refs.key_full.at[stage])

            logits, found = buffers.products(
                ((refs.key_s, stage), (refs.query_s, 0)), meanwhile=meanwhile
            )
            plgpu.commit_smem()
            load(q + stages)
            return logits, found

        for q in range(stages):
            load(jnp.int32(q))

        def columns(ref):
            return plgpu.load(ref, layout=PER_COLUMN, optimized=False)

        def down(row):
            return lax.broadcast_in_dim(row, (ROWS, rows), [1])

        for row in range(0, rows, ROWS):
            count = min(ROWS, tile.used - row) // heads
            first_token = first_of_tile + row // heads
            refs.lse_log2_s.at[pl.ds(row, ROWS)][...] = lse_log2_of_rows(
                spec, count, refs.lse, b, first_token, g, refs.sizes.T
            )
        plgpu.commit_smem()

        def fold(p):
            """For each token the columns of its heads, 8 apart, added up: `[64, 8]` each."""
            sums = []
            for token in range(0, rows, heads):
                folded = p[:, token : token + 8]
                for column in range(token + 8, token + heads, 8):
                    folded += p[:, column : column + 8]
                sums.append(folded)
            return sums

        def store(scores_s, place, sums, add=False):
            """Puts what is left to add of each token's `sums` `[64, 8]` in its score row."""
            for t, folded in enumerate(sums):
                blocks = scores_s.at[t, pl.ds(place, ROWS)]
                score = folded.sum(axis=1)  # [64]
                if add:
                    score += plgpu.load(blocks, layout=operands.PER_ROW, optimized=False)
                blocks[...] = score

        def step(chunk_begin, under_mask, i, logits):
            """Scores of 64 blocks, from the logits of their first phase to the next ones."""
            place = i * ROWS - chunk_begin

            def one_phase(phase, carry):
                """own += times * P and next += (cover - times) * P of one phase, while the
                product of the phase after it runs.
                """
                logits, *own = carry
                times = jnp.minimum(spec.cover, r - phase)

                def add_phase():
                    # Registers are short: lse_log2 stays in shared memory.
                    p = jnp.exp2(logits * scale_log2 - down(columns(refs.lse_log2_s)))
                    folded = fold(p)
                    if under_mask:  # heads of a token see the same
                        shape = (ROWS, 8)
                        block = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=MATRIX)
                        token = (block + (base + i * ROWS)) * r + phase
                        for t, p_of_token in enumerate(folded):
                            seen = token >= refs.key_begin[mine, t * heads]
                            seen &= token < refs.key_end[mine, t * heads]
                            folded[t] = jnp.where(seen, p_of_token, 0.0)

                    @pl.when(times < spec.cover)
                    def _():
                        over = (spec.cover - times).astype(jnp.float32)
                        several_phases = spec.cover > 2
                        if several_phases:
                            plgpu.commit_smem()
                        store(
                            refs.next_s, place + 1, [x * over for x in folded], several_phases
                        )

                    factor = times.astype(jnp.float32)
                    return [x + y * factor for x, y in zip(own, folded, strict=True)]

                logits, own = multiply(i * r + phase + 1, add_phase)
                return logits, *own

            zeros = operands.full((ROWS, 8), 0.0, MATRIX)
            state = (logits, *[zeros] * tile.tokens)
            logits, *own = lax.fori_loop(0, r, one_phase, state)
            store(refs.own_s, place, own)
            return logits

        def values_of_rows(ref):
            return plgpu.load(ref, layout=ROW_PER_WARP.reduce(1), optimized=False)

        def scores_of_rows(ref):
            return plgpu.load(ref, layout=ROW_PER_WARP, optimized=False)

        def along(row, shape):
            return plgpu.layout_cast(lax.broadcast_in_dim(row, shape, [0]), ROW_PER_WARP)

        def extract(scores, indices, keep):
            """Calls `keep(four, i, value, index)` with the `i`-th best of each score row, ties
            to the lower index. All rows go together: one's reductions hide another's latency.
            """

            def one(i, scores):
                left = []
                for four, score, index in zip(fours, scores, indices, strict=True):
                    top = score.max(axis=1)
                    hit = score == along(top, score.shape)
                    at = -jnp.where(hit, -index, -NO_BLOCK).max(axis=1)
                    keep(four, i, top, jnp.where(top < 0, NO_BLOCK, at))
                    left.append(jnp.where(index == along(at, score.shape), -1.0, score))
                return tuple(left)

            lax.fori_loop(0, free, one, tuple(scores))

        def choose(four, i, value, index):
            refs.chosen_s.at[i, four][...] = index

        zero = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), operands.PER_ROW)
        plgpu.barrier_wait(refs.query_full)
        ahead, _ = multiply(jnp.int32(0), lambda: None)

        def take(k, ahead):
            """The best of chunk `k`; `ahead`: the logits of its first product."""
            chunk_begin = k * chunk
            for t in range(score_rows):
                over = refs.next_s.at[t, pl.ds(chunk, ROWS)]
                carried = plgpu.load(over, layout=operands.PER_ROW, optimized=False)
                carried = jnp.where(k > 0, carried, zero)
                plgpu.commit_smem()
                for j in range(chunk // KEYS):
                    refs.own_s.at[t, pl.ds(j * ROWS, ROWS)][...] = zero
                    refs.next_s.at[t, pl.ds(j * ROWS, ROWS)][...] = zero if j else carried
                over[...] = zero
            plgpu.commit_smem()
            step_of_chunk = functools.partial(step, chunk_begin)
            ahead = walk_chunk(
                spec, step_of_chunk, ahead, k, steps, base, last_begin, first_end
            )
            plgpu.commit_smem()
            best_of_chunk(k)
            return ahead

        def best_of_chunk(k):
            scores, indices = [], []
            for four in fours:
                score = scores_of_rows(refs.own_s.at[four, pl.ds(0, chunk)])
                score += scores_of_rows(refs.next_s.at[four, pl.ds(0, chunk)])
                shape = score.shape  # [4, chunk]
                index = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=ROW_PER_WARP)
                base_of_row = values_of_rows(refs.base_block.at[mine, four])
                index = index - along(base_of_row - base - k * chunk, shape)
                own_block = along(values_of_rows(refs.own_block.at[mine, four]), shape)
                final = own_block - spec.num_local  # those after it are forced
                free_to_choose = (index >= spec.num_initial) & (index <= final)
                scores.append(jnp.where(free_to_choose, score, -1.0))
                indices.append(index)

            def keep(four, i, value, index):
                refs.value_s.at[four, k * free + i][...] = value
                refs.index_s.at[four, k * free + i][...] = index

            extract(scores, indices, keep if several_chunks else choose)

        def best_of_all():
            scores, indices = (
                [scores_of_rows(ref.at[four]) for four in fours]
                for ref in (refs.value_s, refs.index_s)
            )
            extract(scores, indices, choose)

        def finish(four):
            """Adds the forced blocks of four score rows, sorts and writes them out."""
            own_block = values_of_rows(refs.own_block.at[mine, four])
            chosen = [values_of_rows(refs.chosen_s.at[i, four]) for i in range(free)]
            for block in range(spec.num_initial):
                chosen.append(jnp.where(own_block >= block, own_block * 0 + block, NO_BLOCK))
            for back in range(spec.num_local):
                block = own_block - back
                chosen.append(jnp.where(block >= spec.num_initial, block, NO_BLOCK))
            for low, high in _batcher(len(chosen)):
                x, y = chosen[low], chosen[high]
                chosen[low], chosen[high] = jnp.minimum(x, y), jnp.maximum(x, y)
            chosen = [jnp.where(index == NO_BLOCK, -1, index) for index in chosen]
            places = first_of_tile + four.start, g, refs.sizes.T, last_of_tile
            _write(spec, chosen, refs.selection, four.start, b, *places)

        if several_chunks:
            refs.value_s[...] = jnp.full((score_rows, winners), -1.0, jnp.float32)
            plgpu.commit_smem()
            chunks = div(refs.span[mine] + chunk - 1, chunk)
            lax.fori_loop(0, chunks, take, ahead)
            plgpu.commit_smem()
            best_of_all()
        else:
            take(jnp.int32(0), ahead)
        plgpu.commit_smem()
        for four in fours:
            finish(four)

    slabs = spec.D // tile.slab
    return build_kernel(
        kernel,
        body,
        scratch={
            "query_s": buffers.rows(1, spec.D),
            "lse_log2_s": plgpu.SMEM((rows,), jnp.float32),
            "key_s": buffers.ring(stages, KEYS, spec.D),
            "own_s": plgpu.SMEM((score_rows, chunk), jnp.float32),
            "next_s": plgpu.SMEM((score_rows, chunk + KEYS), jnp.float32),
            "chosen_s": plgpu.SMEM((max(free, 1), score_rows), jnp.int32),
            "value_s": plgpu.SMEM((score_rows, winners), jnp.float32),
            "index_s": plgpu.SMEM((score_rows, winners), jnp.int32),
            "query_full": plgpu.Barrier(num_arrivals=slabs),
            "key_full": plgpu.Barrier(num_arrivals=slabs, num_barriers=stages),
        },
        grid_names=("bg", "tile"),
        interpret=spec.interpret,
    )


def _write(spec: Scores, chosen, selection, first: int, b, token, g, length, end):
    """Puts the blocks of four tokens, a warp each, from the tile's token `first` on, which is
    `token`: `chosen`, `n` arrays `[4]`, into `selection` `[B, T, Hkv, n]`; `length` is T, `end`
    where the tile's tokens end.
    """
    tokens = min(KQ_WARPS, spec.tile.tokens - first)
    if spec.interpret:
        for i in range(tokens):

            @pl.when(token + i < end)
            def _(i=i):
                selection.at[b, token + i, g][...] = jnp.stack([x[i] for x in chosen])

        return

    def put(selection, b, token, g, length, end, *chosen):
        number, n = warp.warp(), spec.n
        token = token + number
        only = warp.same(warp.lane(), 0) & (number < tokens) & (token < end)
        address = (b * length + token, 4 * n * spec.Hkv), (g, 4 * n)
        for i, x in enumerate(chosen):
            block = Word(vector.extract(x.registers.flat[0], [], [0]))
            warp.put(warp.element(selection, *address, (i, 4)), block, only)

    warp.each(put, [selection], [b, token, g, length, end], chosen, ROW_PER_WARP.reduce(1))


def _batcher(n: int):
    """Comparisons of Batcher's odd-even merge sort of `n` places, in order."""
    p = 1
    while p < n:
        k = p
        while k >= 1:
            for j in range(k % p, n - k, 2 * k):
                for i in range(j, min(j + k, n - k)):
                    if i // (2 * p) == (i + k) // (2 * p):
                        yield i, i + k
            k //= 2
        p *= 2
