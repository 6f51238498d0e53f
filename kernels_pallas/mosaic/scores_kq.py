"""Scores and the best blocks by S^T = K Q^T (swap A and B): groups of more than 16 heads.

Algorithm: P^T = exp2(scale * log2(e) * K Q^T - lse_log2); the sum over the heads of a group
runs along a row of registers. While a product runs, the probabilities of the one before it are
made. The score rows of a tile stay in shared memory, where a warp a token takes out the best
blocks that are not forced. Pallas' interpreter runs this order for every group.

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

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import operands
from kernels_pallas.mosaic.operands import LOG2E, MATRIX, PER_COLUMN, ROWS
from kernels_pallas.mosaic.refs import build_kernel
from kernels_pallas.mosaic.scores_common import NO_BLOCK, lse_log2_of_rows, walk_chunk
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
        first, last, own, base = refs.key_begin, refs.key_end, refs.own_block, refs.base_block
        query_s, key_s, lse_log2_s = refs.query_s, refs.key_s, refs.lse_log2_s
        own_s, next_s, chosen_s = refs.own_s, refs.next_s, refs.chosen_s
        value_s, index_s = refs.value_s, refs.index_s
        b = lax.div(lax.axis_index("bg"), jnp.int32(spec.Hkv))
        g = lax.rem(lax.axis_index("bg"), jnp.int32(spec.Hkv))
        tile_index = spec.tiles - 1 - lax.axis_index("tile")  # later tokens have more to do
        tokens = pl.ds(tile_index * tile.tokens, tile.tokens)
        group = pl.ds(g * spec.group, heads)
        buffers.load_rows(
            lambda columns: refs.query.at[b, tokens, group, columns],
            query_s,
            0,
            spec.D,
            refs.query_full,
        )
        begin = base[b, tile_index, 0]
        first1 = first[b, tile_index, rows - 1]
        last0, last1 = last[b, tile_index, 0], last[b, tile_index, rows - 1]
        steps = lax.div(jnp.maximum(last1 - begin * r, 0) + step_keys - 1, jnp.int32(step_keys))
        products = jnp.maximum(steps * r, 1)  # the first is made in any case

        def load(q):
            @pl.when(q < products)
            def _():
                stage = lax.rem(q, jnp.int32(stages))
                blocks = pl.ds(begin + lax.div(q, jnp.int32(r)) * ROWS, ROWS)
                phase = lax.rem(q, jnp.int32(r))
                buffers.load_keys(
                    lambda columns: refs.key.at[b, blocks, phase, g, columns],
                    key_s,
                    stage,
                    refs.key_full.at[stage],
                )

        def multiply(q, meanwhile):
            """Logits of product `q`, whose keys are loaded, and what `meanwhile` returns."""
            stage = lax.rem(q, jnp.int32(stages))

            @pl.when(q < products)
            def _():
                plgpu.barrier_wait(refs.key_full.at[stage])

            logits, found = buffers.products(
                ((key_s, stage), (query_s, 0)), meanwhile=meanwhile
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
            first_token = tile_index * tile.tokens + row // heads
            lse_log2_s.at[pl.ds(row, ROWS)][...] = lse_log2_of_rows(
                spec, count, refs.lse, b, first_token, g
            )
        plgpu.commit_smem()

        def fold(probs):
            """Sums over the heads of each token, up to 8 columns."""
            parts = []
            for token in range(0, rows, heads):
                part = probs[:, token : token + 8]
                for column in range(token + 8, token + heads, 8):
                    part += probs[:, column : column + 8]
                parts.append(part)
            return parts

        def store(scores_s, place, parts, more=False):
            for t, part in enumerate(parts):
                here = scores_s.at[t, pl.ds(place, ROWS)]
                score = part.sum(axis=1)
                if more:
                    score += plgpu.load(here, layout=operands.PER_ROW, optimized=False)
                here[...] = score

        def step(chunk0, under_mask, i, logits):
            """Scores of 64 blocks, from the logits of their first phase to the next ones."""
            place = i * ROWS - chunk0

            def one_phase(phase, carry):
                logits, *sums = carry
                weight = jnp.minimum(spec.cover, r - phase)

                def count():
                    # Registers are short: the normalisation stays in shared memory.
                    probs = jnp.exp2(logits * scale_log2 - down(columns(lse_log2_s)))
                    folded = fold(probs)
                    if under_mask:  # heads of a token see the same
                        shape = (ROWS, 8)
                        block = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=MATRIX)
                        token = (block + (begin + i * ROWS)) * r + phase
                        for t, part in enumerate(folded):
                            seen = token >= first[b, tile_index, t * heads]
                            seen &= token < last[b, tile_index, t * heads]
                            folded[t] = jnp.where(seen, part, 0.0)

                    @pl.when(weight < spec.cover)
                    def _():
                        over = (spec.cover - weight).astype(jnp.float32)
                        more = spec.cover > 2
                        if more:
                            plgpu.commit_smem()
                        store(next_s, place + 1, [part * over for part in folded], more)

                    scale = weight.astype(jnp.float32)
                    return [x + y * scale for x, y in zip(sums, folded, strict=True)]

                logits, sums = multiply(i * r + phase + 1, count)
                return logits, *sums

            nothing = operands.full((ROWS, 8), 0.0, MATRIX)
            state = (logits, *[nothing] * tile.tokens)
            logits, *sums = lax.fori_loop(0, r, one_phase, state)
            store(own_s, place, sums)
            return logits

        def values_of_rows(ref):
            return plgpu.load(ref, layout=ROW_PER_WARP.reduce(1), optimized=False)

        def scores_of_rows(ref):
            return plgpu.load(ref, layout=ROW_PER_WARP, optimized=False)

        def along(row, shape):
            return plgpu.layout_cast(lax.broadcast_in_dim(row, shape, [0]), ROW_PER_WARP)

        def extract(scores, indices, keep):
            """Calls `keep(four, i, value, index)` for the best of each score row, ties to
            the lower. All rows go together: one's reductions hide the other's latency.
            """

            def one(i, scores):
                left = []
                for here, score, index in zip(fours, scores, indices, strict=True):
                    top = score.max(axis=1)
                    hit = score == along(top, score.shape)
                    at = -jnp.where(hit, -index, -NO_BLOCK).max(axis=1)
                    keep(here, i, top, jnp.where(top < 0, NO_BLOCK, at))
                    left.append(jnp.where(index == along(at, score.shape), -1.0, score))
                return tuple(left)

            lax.fori_loop(0, free, one, tuple(scores))

        def choose(here, i, value, index):
            chosen_s.at[i, here][...] = index

        zero = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), operands.PER_ROW)
        plgpu.barrier_wait(refs.query_full)
        ahead, _ = multiply(jnp.int32(0), lambda: None)

        def take(k, ahead):
            chunk0 = k * chunk
            for t in range(score_rows):
                over = next_s.at[t, pl.ds(chunk, ROWS)]
                carried = plgpu.load(over, layout=operands.PER_ROW, optimized=False)
                carried = jnp.where(k > 0, carried, zero)
                plgpu.commit_smem()
                for j in range(chunk // KEYS):
                    own_s.at[t, pl.ds(j * ROWS, ROWS)][...] = zero
                    next_s.at[t, pl.ds(j * ROWS, ROWS)][...] = zero if j else carried
                over[...] = zero
            plgpu.commit_smem()
            step_of_chunk = functools.partial(step, chunk0)
            ahead = walk_chunk(spec, step_of_chunk, ahead, k, steps, begin, first1, last0)
            plgpu.commit_smem()
            best_of_chunk(k)
            return ahead

        def best_of_chunk(k):
            scores, indices = [], []
            for here in fours:
                score = scores_of_rows(own_s.at[here, pl.ds(0, chunk)])
                score += scores_of_rows(next_s.at[here, pl.ds(0, chunk)])
                shape = score.shape
                index = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=ROW_PER_WARP)
                shift = values_of_rows(base.at[b, tile_index, here]) - begin - k * chunk
                index = index - along(shift, shape)
                final = (
                    along(values_of_rows(own.at[b, tile_index, here]), shape) - spec.num_local
                )
                free_to_choose = (index >= spec.num_initial) & (index <= final)
                scores.append(jnp.where(free_to_choose, score, -1.0))
                indices.append(index)

            def keep(here, i, value, index):
                value_s.at[here, k * free + i][...] = value
                index_s.at[here, k * free + i][...] = index

            extract(scores, indices, keep if several_chunks else choose)

        def best_of_all():
            scores, indices = (
                [scores_of_rows(ref.at[here]) for here in fours] for ref in (value_s, index_s)
            )
            extract(scores, indices, choose)

        def finish(here):
            """Adds the forced blocks of four score rows, sorts and writes them out."""
            final = values_of_rows(own.at[b, tile_index, here])
            places = [values_of_rows(chosen_s.at[i, here]) for i in range(free)]
            for block in range(spec.num_initial):
                places.append(jnp.where(final >= block, final * 0 + block, NO_BLOCK))
            for back in range(spec.num_local):
                block = final - back
                places.append(jnp.where(block >= spec.num_initial, block, NO_BLOCK))
            for low, high in _batcher(len(places)):
                x, y = places[low], places[high]
                places[low], places[high] = jnp.minimum(x, y), jnp.maximum(x, y)
            for i, index in enumerate(places):
                index = jnp.where(index == NO_BLOCK, -1, index)
                refs.selection.at[b, g, tile_index, i, here][...] = index

        if several_chunks:
            value_s[...] = jnp.full((score_rows, winners), -1.0, jnp.float32)
            plgpu.commit_smem()
            chunks = lax.div(refs.span[b, tile_index] + chunk - 1, jnp.int32(chunk))
            lax.fori_loop(0, chunks, take, ahead)
            plgpu.commit_smem()
            best_of_all()
        else:
            take(jnp.int32(0), ahead)
        plgpu.commit_smem()
        for here in fours:
            finish(here)

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
        grid=(spec.B * spec.Hkv, spec.tiles),
        grid_names=("bg", "tile"),
        interpret=spec.interpret,
    )


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
