"""Which blocks a tile of tokens reads, and for which of its tokens: the lists of `selected`.

A warp makes the list of a tile. In shared memory every block of the tile's sequence has one bit
a token: those of the wanted blocks are set, and the blocks with a bit are written in their
order, each at the place that a vote of the lanes gives it. No sort: a tile reads what its
tokens want once, and passes over the blocks before them once.

Pallas' interpreter has no shuffles and votes: there `nsa_jax.sorted_lists` makes the same.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import operands, warp
from kernels_pallas.mosaic.block_bitmap import LANES, NOWHERE, BlockBitmap
from kernels_pallas.specs.selected import SelectedAttention

WARPS = 4  # of a block of threads
WINDOW = 1024  # blocks of a sequence that have their bits in shared memory at a time


@dataclasses.dataclass(frozen=True)
class Lists:
    """What a warp does, on the words of `warp.py`."""

    spec: SelectedAttention

    def make(
        self, indices, position, key_start, starts, members, counts, bits, b, g, group
    ) -> None:
        """The list of tile `WARPS * group + warp`; arrays as in `lists`, `bits` in shared
        memory `[WARPS, words, WINDOW]`.
        """
        spec, lane = self.spec, warp.lane()
        size, words = spec.block, spec.words
        wanted = BlockBitmap(spec.T, spec.Hkv, spec.n, size, spec.tile.tokens)
        tile = group * WARPS + warp.warp()
        token0 = tile * spec.tile.tokens
        mine = warp.shared(bits) + warp.warp() * (4 * words * WINDOW)
        tokens = wanted.load(position, key_start, b, token0)
        # The first block that ends after the token's last key.
        cut = [(place + 1) // size for place in tokens.position]

        def of_list(array, place, words=1, word=0):
            row = 4 * spec.entries
            lead = (b, spec.Hkv * spec.tiles), (g, spec.tiles), (tile, 1)
            lead = *((i, n * words * row) for i, n in lead), (warp.word(word), row)
            return warp.element(array, *lead, (place, 4))

        def each_sequence(_, state):
            before, count, whole, ended = state
            here, own, blocks = wanted.next_sequence(tokens, before)

            def window(i, state):
                count, whole, _ = state
                low = i * WINDOW
                rows = (warp.smaller(blocks - low, WINDOW) + (LANES - 1)) // LANES
                wanted.clear(mine, WINDOW, rows)
                warp.sync()
                first_cut = wanted.join(mine, WINDOW, low, indices, b, g, token0, own, cut)
                first_cut = warp.smallest(first_cut)
                warp.sync()

                def list_row(row, state):
                    count, whole = state
                    place = row * LANES + lane
                    found = [
                        warp.read(mine + place * 4, 4 * WINDOW * word) for word in range(words)
                    ]
                    listed = warp.different(functools.reduce(lambda x, y: x | y, found), 0)
                    votes = warp.votes(listed)
                    slot = count + warp.ones(votes & (warp.bit(lane) - 1))
                    start = here + (low + place) * size
                    warp.put(of_list(starts, slot), start, listed)
                    for word, x in enumerate(found):
                        warp.put(of_list(members, slot, words, word), x, listed)
                    uncut = listed & (low + place < first_cut) & warp.same(ended, 0)
                    return [
                        count + warp.ones(votes),
                        whole + warp.ones(warp.votes(uncut)),
                    ]

                count, whole = warp.repeat(rows, list_row, [count, whole])
                warp.sync()
                return [count, whole, first_cut]

            windows = (blocks + (WINDOW - 1)) // WINDOW
            state = [count, whole, warp.word(NOWHERE)]
            count, whole, first_cut = warp.repeat(windows, window, state)
            ended = ended | warp.number(first_cut < NOWHERE)
            return [here, count, whole, ended]

        state = [warp.word(-1), *(warp.word(0) for _ in range(3))]
        _, count, whole, _ = warp.repeat(wanted.sequences(tokens), each_sequence, state)

        def clear_row(row, nothing):
            slot = row * LANES + lane
            rest = (slot >= count) & (slot < spec.entries) & (tile < spec.tiles)
            warp.put(of_list(starts, slot), 0, rest)
            for word in range(words):
                warp.put(of_list(members, slot, words, word), 0, rest)
            return nothing

        warp.repeat(-(-spec.entries // LANES), clear_row, [])
        address = warp.element(
            counts,
            (b, 8 * spec.Hkv * spec.tiles),
            (g, 8 * spec.tiles),
            (tile, 8),
            (lane, 4),
        )
        there = warp.below(lane, 2) & (tile < spec.tiles)
        warp.put(address, warp.where(warp.same(lane, 0), whole, count), there)


@functools.cache
def lists(spec: SelectedAttention) -> Kernel:
    """Inputs, int32: `indices` `[B, T, Hkv, n]`, the blocks that each token wants in any order,
    -1 in empty places, those past the token's own not counted; `position` and `key_start`
    `[B, T]`: its place in its sequence (negative: it wants nothing), and the sequence's first
    key, never decreasing where tokens are. Outputs: `starts`, `members` and `counts` of
    `specs.selected.forward`, zeros past the count of a list.
    """
    words, entries = spec.words, spec.entries

    def body(*refs):
        bg = lax.axis_index("bg")
        b, g = (f(bg, jnp.int32(spec.Hkv)) for f in (lax.div, lax.rem))
        warp.each(Lists(spec).make, refs, [b, g, lax.axis_index("group")])

    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    places = spec.B, spec.Hkv, spec.tiles
    by_token = shape((spec.B, spec.T))
    inputs = shape((spec.B, spec.T, spec.Hkv, spec.n)), by_token, by_token
    outputs = shape((*places, entries)), shape((*places, words, entries)), shape((*places, 2))
    call = plgpu.kernel(
        body,
        out_type=outputs,
        grid=(spec.B * spec.Hkv, -(-spec.tiles // WARPS)),
        grid_names=("bg", "group"),
        scratch_types=[plgpu.SMEM((WARPS, words, WINDOW), jnp.int32)],
        compiler_params=operands.PARAMS,
    )
    return Kernel("union_lists", spec, call, inputs, outputs)
