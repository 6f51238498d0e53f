"""Which blocks a tile of tokens reads, and for which of its tokens: the lists of `selected`.

All pairs of the tile's wanted blocks are compared in registers, 64 by 64: those that want the
same block merge into one entry with one bit a token, and an entry's place is the number of
entries before it. No sort and no scatter; the work grows with the square of the list, so it is
for short ones (`nsa_jax.unions` has the other way, which sorts).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import operands
from kernels_pallas.mosaic.operands import MATRIX, PER_COLUMN, PER_ROW, across
from kernels_pallas.mosaic.selected import Selected

NOTHING = 2**31 - 1  # in place of a wanted block: none
SIDE = 64
LONGEST = 256  # entries of a list: from there on, sorting is faster


@functools.cache
def lists(spec: Selected) -> Kernel:
    """Input: int32 `wanted` `[B, Hkv, tiles, entries]`, `(first key * 64 + token) * 2 + cut`,
    distinct, or `NOTHING`; `cut`: the block ends after the token's last key. Outputs: int32
    `starts` and `members` of `selected.attention`, and `counts` `[B, Hkv, tiles, 2, 64]`, the
    same 64 times.
    """
    words, entries = spec.words, spec.entries
    sides = entries // SIDE

    def body(wanted, starts, members, counts, order_s, place_s, start_s, members_s, totals_s):
        b = lax.div(lax.axis_index("bg"), jnp.int32(spec.Hkv))
        g = lax.rem(lax.axis_index("bg"), jnp.int32(spec.Hkv))
        tile = lax.axis_index("tile")
        mine = wanted.at[b, g, tile]
        square = (SIDE, SIDE)

        def part(ref, i, layout):
            return plgpu.load(ref.at[pl.ds(i * SIDE, SIDE)], layout=layout, optimized=False)

        def down(row):
            return lax.broadcast_in_dim(row, square, [1])

        def number(condition):
            return jnp.where(condition, 1, 0)

        line = plgpu.broadcasted_iota(jnp.int32, square, 0, layout=MATRIX)
        none = plgpu.layout_cast(jnp.zeros((SIDE,), jnp.int32), PER_ROW)

        # 1. Merge: the first token that wants a block stands for all that do.
        def merge(i, blocks):
            own = part(mine, i, PER_ROW)
            start = lax.shift_right_logical(own, 7)

            def against(j, carry):
                earlier, *bits = carry
                other = down(part(mine, j, PER_COLUMN))
                same = across(start, square) == lax.shift_right_logical(other, 7)
                earlier += number(same & (other < across(own, square))).sum(axis=1)
                token = lax.shift_right_logical(other, 1) & 63
                bit = lax.shift_left(jnp.full(square, 1, jnp.int32), token & 31)
                bits = [
                    word + jnp.where(same & (token // 32 == w), bit, 0).sum(axis=1)
                    for w, word in enumerate(bits)
                ]
                return earlier, *bits

            earlier, *bits = lax.fori_loop(0, sides, against, (none,) * (1 + words))
            stands = (earlier == 0) & (own < NOTHING)
            here = pl.ds(i * SIDE, SIDE)
            order_s.at[here][...] = jnp.where(stands, start, NOTHING)
            start_s.at[here][...] = start
            for w, word in enumerate(bits):
                members_s.at[w, here][...] = word
            return blocks + number(stands)

        blocks = lax.fori_loop(0, sides, merge, none)
        plgpu.commit_smem()

        # 2. Place: how many entries come before. `cut` is the largest distance of a cut entry
        # from the end of the list.
        def place(i, cut):
            own = part(order_s, i, PER_ROW)

            def against(j, before):
                other = down(part(order_s, j, PER_COLUMN))
                return before + number(other < across(own, square)).sum(axis=1)

            before = lax.fori_loop(0, sides, against, none)
            stands = own < NOTHING
            place_s.at[pl.ds(i * SIDE, SIDE)][...] = jnp.where(stands, before, -1)
            is_cut = stands & (part(mine, i, PER_ROW) & 1 == 1)
            return jnp.maximum(cut, jnp.where(is_cut, entries - before, 0))

        cut = lax.fori_loop(0, sides, place, none)
        totals_s.at[0][...] = cut
        totals_s.at[1][...] = blocks
        plgpu.commit_smem()

        # 3. Compact: the value of place k is the sum of the values whose place is k.
        def compact(i, _):
            def against(j, sums):
                there = down(part(place_s, j, PER_COLUMN)) == line + i * SIDE
                columns = [start_s, *(members_s.at[w] for w in range(words))]
                return tuple(
                    total + jnp.where(there, down(part(ref, j, PER_COLUMN)), 0).sum(axis=1)
                    for total, ref in zip(sums, columns, strict=True)
                )

            start, *bits = lax.fori_loop(0, sides, against, (none,) * (1 + words))
            here = pl.ds(i * SIDE, SIDE)
            starts.at[b, g, tile, here][...] = start
            for w, word in enumerate(bits):
                members.at[b, g, tile, w, here][...] = word

        lax.fori_loop(0, sides, compact, None)
        blocks = down(part(totals_s.at[1], 0, PER_COLUMN)).sum(axis=1)
        cut = down(part(totals_s.at[0], 0, PER_COLUMN)).max(axis=1)
        counts.at[b, g, tile, 0][...] = jnp.minimum(blocks, entries - cut)
        counts.at[b, g, tile, 1][...] = blocks

    shape = jax.ShapeDtypeStruct
    places = (spec.B, spec.Hkv, spec.tiles)
    outputs = (
        shape((*places, entries), jnp.int32),
        shape((*places, words, entries), jnp.int32),
        shape((*places, 2, SIDE), jnp.int32),
    )
    call = plgpu.kernel(
        body,
        out_type=outputs,
        grid=(spec.B * spec.Hkv, spec.tiles),
        grid_names=("bg", "tile"),
        scratch_types=[
            plgpu.SMEM((entries,), jnp.int32),
            plgpu.SMEM((entries,), jnp.int32),
            plgpu.SMEM((entries,), jnp.int32),
            plgpu.SMEM((words, entries), jnp.int32),
            plgpu.SMEM((2, SIDE), jnp.int32),
        ],
        compiler_params=operands.PARAMS,
        interpret=spec.interpret,
    )
    return Kernel("union_lists", call, (shape((*places, entries), jnp.int32),), outputs)
