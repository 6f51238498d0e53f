"""Scores and the best blocks, keys x query rows: groups of more than 16 heads, interpreter.

The sum over the heads of a group runs along a row of registers. While a product runs, the
probabilities of the one before it are made. The block scores of a tile stay in shared memory,
where a warp a token takes out the best that are not forced.
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
from kernels_pallas.mosaic.scores import NO_BLOCK, Cut, Scores, norms, shapes

COLUMNS = 128  # query rows of a tile at most
LINES = 8  # tokens of a tile at most
HELD = 4096  # scores in shared memory at most
WARPS = 4
STAGES = 2  # with more, a multiprocessor holds one block of threads
# One row of 128 * k columns a warp, four neighbours a lane.
ROW_PER_WARP = plgpu.Layout.TILED(
    plgpu.Tiling(((WARPS, 128), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)


def cut(spec: Scores) -> Cut:
    heads = -(-spec.group // 8) * 8
    tokens = min(COLUMNS // heads, LINES)
    lines = -(-tokens // WARPS) * WARPS
    most = max(min(spec.held, HELD // lines) // 128 * 128, 128)
    chunk = min(most, -(-spec.candidates // 128) * 128)
    return Cut(heads, tokens * heads, lines, chunk, min(spec.stages, STAGES))


def best_blocks(spec: Scores) -> Kernel:
    """`scores.best_blocks`, for any group."""
    tile, r, free = spec.tile, spec.ratio, spec.free
    buffers = operands.Buffers(jnp.dtype(spec.dtype), tile, bool(spec.interpret))
    heads, rows, lines, chunk, stages = dataclasses.astuple(spec.cut)
    c = spec.scale * LOG2E
    supers = chunk // ROWS
    several = spec.chunks > 1 and free > 0
    winners = -(-spec.chunks * free // 128) * 128 if several else 1
    wide = ROWS * r
    quarters = [pl.ds(line, WARPS) for line in range(0, lines, WARPS)]  # a line a warp

    def body(query, key, lse, first, last, own, base, span, out, *scratch):
        query_s, norm_s, key_s, own_s, next_s, chosen_s, value_s, index_s, query_in, key_in = (
            scratch
        )
        b = lax.div(lax.axis_index("bg"), jnp.int32(spec.Hkv))
        g = lax.rem(lax.axis_index("bg"), jnp.int32(spec.Hkv))
        mine = spec.tiles - 1 - lax.axis_index("tile")  # later tokens have more to do
        tokens = pl.ds(mine * tile.tokens, tile.tokens)
        group = pl.ds(g * spec.group, heads)
        buffers.load_rows(
            lambda columns: query.at[b, tokens, group, columns], query_s, 0, spec.D, query_in
        )
        begin = base[b, mine, 0]
        first1 = first[b, mine, rows - 1]
        last0, last1 = last[b, mine, 0], last[b, mine, rows - 1]
        steps = lax.div(jnp.maximum(last1 - begin * r, 0) + wide - 1, jnp.int32(wide))
        products = jnp.maximum(steps * r, 1)  # the first is made in any case

        def load(q):
            @pl.when(q < products)
            def _():
                slot = lax.rem(q, jnp.int32(stages))
                blocks = pl.ds(begin + lax.div(q, jnp.int32(r)) * ROWS, ROWS)
                phase = lax.rem(q, jnp.int32(r))
                buffers.load_keys(
                    lambda columns: key.at[b, blocks, phase, g, columns],
                    key_s,
                    slot,
                    key_in.at[slot],
                )

        def multiply(q, meanwhile):
            """Logits of product `q`, whose keys are loaded, and what `meanwhile` returns."""
            slot = lax.rem(q, jnp.int32(stages))

            @pl.when(q < products)
            def _():
                plgpu.barrier_wait(key_in.at[slot])

            logits, found = buffers.products(((key_s, slot), (query_s, 0)), meanwhile=meanwhile)
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
            first_token = mine * tile.tokens + row // heads
            norm_s.at[pl.ds(row, ROWS)][...] = norms(spec, count, lse, b, first_token, g)
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

        def step(under_mask, chunk0, i, logits):
            """Scores of 64 blocks, from the logits of their first phase to the next ones."""
            place = i * ROWS - chunk0

            def one_phase(phase, carry):
                logits, *sums = carry
                weight = jnp.minimum(spec.cover, r - phase)

                def count():
                    # Registers are short: the normalisation stays in shared memory.
                    probs = jnp.exp2(logits * c - down(columns(norm_s)))
                    folded = fold(probs)
                    if under_mask:  # heads of a token see the same
                        shape = (ROWS, 8)
                        block = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=MATRIX)
                        token = (block + (begin + i * ROWS)) * r + phase
                        for t, part in enumerate(folded):
                            seen = token >= first[b, mine, t * heads]
                            seen &= token < last[b, mine, t * heads]
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

        def line_values(ref):
            return plgpu.load(ref, layout=ROW_PER_WARP.reduce(1), optimized=False)

        def line_scores(ref):
            return plgpu.load(ref, layout=ROW_PER_WARP, optimized=False)

        def along(row, shape):
            return plgpu.layout_cast(lax.broadcast_in_dim(row, shape, [0]), ROW_PER_WARP)

        def extract(scores, indices, keep):
            """Calls `keep(lines, i, value, index)` for the best of each line, ties to the
            lower. All lines go together: one's reductions hide the other's latency.
            """

            def one(i, scores):
                left = []
                for here, score, index in zip(quarters, scores, indices, strict=True):
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
        plgpu.barrier_wait(query_in)
        ahead, _ = multiply(jnp.int32(0), lambda: None)

        def take(k, ahead):
            chunk0 = k * chunk
            for t in range(lines):
                over = next_s.at[t, pl.ds(chunk, ROWS)]
                carried = plgpu.load(over, layout=operands.PER_ROW, optimized=False)
                carried = jnp.where(k > 0, carried, zero)
                plgpu.commit_smem()
                for j in range(supers):
                    own_s.at[t, pl.ds(j * ROWS, ROWS)][...] = zero
                    next_s.at[t, pl.ds(j * ROWS, ROWS)][...] = zero if j else carried
                over[...] = zero
            plgpu.commit_smem()
            start = jnp.minimum(k * supers, steps)
            stop = jnp.minimum(start + supers, steps)
            edge = (begin + start * ROWS) * r
            left = lax.div(jnp.maximum(first1 - edge, 0) + wide - 1, jnp.int32(wide))
            left = jnp.minimum(start + left, stop) if spec.packed else start
            right = lax.div(jnp.maximum(last0 - begin * r, 0), jnp.int32(wide))
            right = jnp.clip(right, left, stop)
            masked, plain = (functools.partial(step, mask, chunk0) for mask in (True, False))
            if spec.packed:
                ahead = lax.fori_loop(start, left, masked, ahead)
            ahead = lax.fori_loop(left, right, plain, ahead)
            ahead = lax.fori_loop(right, stop, masked, ahead)
            plgpu.commit_smem()
            best_of_chunk(k)
            return ahead

        def best_of_chunk(k):
            scores, indices = [], []
            for here in quarters:
                score = line_scores(own_s.at[here, pl.ds(0, chunk)])
                score += line_scores(next_s.at[here, pl.ds(0, chunk)])
                shape = score.shape
                index = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=ROW_PER_WARP)
                shift = line_values(base.at[b, mine, here]) - begin - k * chunk
                index = index - along(shift, shape)
                final = along(line_values(own.at[b, mine, here]), shape) - spec.num_local
                free_to_choose = (index >= spec.num_initial) & (index <= final)
                scores.append(jnp.where(free_to_choose, score, -1.0))
                indices.append(index)

            def keep(here, i, value, index):
                value_s.at[here, k * free + i][...] = value
                index_s.at[here, k * free + i][...] = index

            extract(scores, indices, keep if several else choose)

        def best_of_all():
            scores, indices = (
                [line_scores(ref.at[here]) for here in quarters] for ref in (value_s, index_s)
            )
            extract(scores, indices, choose)

        def finish(here):
            """Adds the forced blocks of four lines, sorts and writes them out."""
            final = line_values(own.at[b, mine, here])
            places = [line_values(chosen_s.at[i, here]) for i in range(free)]
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
                out.at[b, g, mine, i, here][...] = index

        if several:
            value_s[...] = jnp.full((lines, winners), -1.0, jnp.float32)
            plgpu.commit_smem()
            chunks = lax.div(span[b, mine] + chunk - 1, jnp.int32(chunk))
            lax.fori_loop(0, chunks, take, ahead)
            plgpu.commit_smem()
            best_of_all()
        else:
            take(jnp.int32(0), ahead)
        plgpu.commit_smem()
        for here in quarters:
            finish(here)

    slabs = spec.D // tile.slab
    inputs, output = shapes(spec)
    call = plgpu.kernel(
        body,
        out_type=[output],
        grid=(spec.B * spec.Hkv, spec.tiles),
        grid_names=("bg", "tile"),
        scratch_types=[
            buffers.rows(1, spec.D),
            plgpu.SMEM((rows,), jnp.float32),
            buffers.ring(stages, ROWS, spec.D),
            plgpu.SMEM((lines, chunk), jnp.float32),
            plgpu.SMEM((lines, chunk + ROWS), jnp.float32),
            plgpu.SMEM((max(free, 1), lines), jnp.int32),
            plgpu.SMEM((lines, winners), jnp.float32),
            plgpu.SMEM((lines, winners), jnp.int32),
            plgpu.Barrier(num_arrivals=slabs),
            plgpu.Barrier(num_arrivals=slabs, num_barriers=stages),
        ],
        compiler_params=operands.PARAMS,
        interpret=spec.interpret,
    )
    return Kernel("best_blocks", spec, call, inputs, (output,))


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
