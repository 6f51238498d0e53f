"""The block list of a tile (`specs/tile_block_lists.py`), made without a sort.

Algorithm, a warp a tile; for each sequence that the tile's tokens belong to, and each window of
`WINDOW` of its blocks:

    1. clear    one word a block and 32 tokens in shared memory
    2. join     every entry of the selection sets the bit of its token (`block_bitmap.py`)
    3. compact  32 blocks at a time, a lane a block: a vote says which have a bit; the number of
                votes of the lanes below is the place in the list

Beside it a warp counts what `specs.selected.BlockCounts` says.

    shared memory [WARPS, words, WINDOW] int32

        block        0      1      2      3    ...
        word 0     0b0011   0    0b1000   0         bits: tokens 0 to 31 of the tile
        word 1       0      0    0b0001   0         bits: tokens 32 to 63

Bitmaps come in the order of the blocks, so the list does too. Bound by latency: a warp waits
for `FETCHES` entries of the selection at a time, then for shared memory; the work grows with
the blocks of the sequence, not with those selected.
"""

import functools
from typing import Any

from kernels_pallas.mosaic.block_bitmap import NOWHERE, BlockBitmap
from kernels_pallas.mosaic.warp_kernel import WARPS, warp_kernel
from kernels_pallas.specs.selected import COUNTS, BlockCounts, SelectedAttention, first_near
from kernels_pallas.specs.tile import LANES

WINDOW = 1024  # blocks of a sequence that have their bits in shared memory at a time


def make_list(warp: Any, spec: SelectedAttention, sizes, refs) -> None:
    """The block list of tile `WARPS * group + warp`."""
    lane = warp.lane()
    size, words = spec.block, spec.words
    bitmap = BlockBitmap(warp, sizes.T, spec.Hkv, spec.n, size, spec.tile.tokens)
    tile = refs.group * WARPS + warp.warp()
    token0 = tile * spec.tile.tokens
    bits = warp.shared(refs.bits) + warp.warp() * (4 * words * WINDOW)
    tokens = bitmap.load(refs, token0)
    # The first block that ends after the token's last key.
    cut = [(last + 1) // size for last in tokens.position]
    parts = spec.parts
    position0 = warp.shuffle(tokens.position[0], 0)
    near = first_near(position0, size * parts, warp.larger) * parts

    mine = (refs.b * spec.Hkv + refs.g) * sizes.tiles + tile

    def address(array, entry, words=1, word=0):
        """Of an entry of this tile's list in `starts` or `members`."""
        row = 4 * spec.entries
        lead = (mine, words * row), (warp.word(word), row)
        return warp.element(array, *lead, (entry, 4))

    def visit(entry, token, block, selected, state):
        first_cut, slot, slot_end = state
        is_cut = selected & (block >= bitmap.bound(cut, token))
        first_cut = warp.smaller(first_cut, warp.where(is_cut, block, NOWHERE))
        far = selected & (block >= parts) & (block < near)
        place = entry % spec.n // parts
        slot = warp.smaller(slot, warp.where(far, place, spec.n))
        slot_end = warp.larger(slot_end, warp.where(far, place + 1, 0))
        return [first_cut, slot, slot_end]

    def each_sequence(_, state):
        before, ended, *counted = state
        first_key, own, blocks = bitmap.next_sequence(tokens, before)

        def window(i, state):
            _, *counted, slot, slot_end = state
            low = i * WINDOW
            rows = (warp.smaller(blocks - low, WINDOW) + (LANES - 1)) // LANES
            bitmap.clear(bits, WINDOW, rows)
            warp.sync()
            of_lane = warp.word(NOWHERE), slot, slot_end
            joined = refs, token0, own, visit, of_lane
            first_cut, *slots = bitmap.join(bits, WINDOW, low, *joined)
            first_cut = warp.smallest(first_cut)
            warp.sync()

            def compact(row, state):
                whole, count, far_begin, far_end = state
                block = row * LANES + lane
                member = [
                    warp.read(bits + block * 4, 4 * WINDOW * word) for word in range(words)
                ]
                listed = warp.different(functools.reduce(lambda x, y: x | y, member), 0)
                votes = warp.votes(listed)
                entry = count + warp.ones(votes & (warp.bit(lane) - 1))
                start = first_key + (low + block) * size
                warp.put(address(refs.starts, entry), start, listed)
                for word, x in enumerate(member):
                    warp.put(address(refs.members, entry, words, word), x, listed)
                full = listed & (low + block < first_cut) & warp.same(ended, 0)
                before_near = listed & (low + block < near)
                first = before_near & (low + block < parts)
                return [
                    whole + warp.ones(warp.votes(full)),
                    count + warp.ones(votes),
                    far_begin + warp.ones(warp.votes(first)),
                    far_end + warp.ones(warp.votes(before_near)),
                ]

            counted = warp.repeat(rows, compact, counted)
            warp.sync()
            return [first_cut, *counted, *slots]

        windows = (blocks + (WINDOW - 1)) // WINDOW
        state = [warp.word(NOWHERE), *counted]
        first_cut, *counted = warp.repeat(windows, window, state)
        ended = ended | warp.number(first_cut < NOWHERE)
        return [first_key, ended, *counted]

    none = BlockCounts(0, 0, 0, 0, far_slot=spec.n, far_slot_end=0)
    state = [warp.word(-1), warp.word(0), *map(warp.word, none)]
    _, _, *counted = warp.repeat(bitmap.sequences(tokens), each_sequence, state)
    found = BlockCounts(*counted)
    found = found._replace(
        far_slot=warp.smallest(found.far_slot),
        far_slot_end=warp.largest(found.far_slot_end),
    )
    count = found.blocks

    def clear_entries(row, nothing):
        entry = row * LANES + lane
        past = (entry >= count) & (entry < spec.entries) & (tile < sizes.tiles)
        warp.put(address(refs.starts, entry), 0, past)
        for word in range(words):
            warp.put(address(refs.members, entry, words, word), 0, past)
        return nothing

    warp.repeat(-(-spec.entries // LANES), clear_entries, [])
    of_tile = warp.element(refs.counts, (mine, 4 * COUNTS), (lane, 4))
    exists = warp.below(lane, COUNTS) & (tile < sizes.tiles)
    own_count = found[0]
    for i, x in enumerate(found[1:], 1):
        own_count = warp.where(warp.same(lane, i), x, own_count)
    warp.put(of_tile, own_count, exists)


tile_block_lists = warp_kernel(
    make_list, lambda spec: {"bits": (WARPS, spec.words, WINDOW)}, by_head=True
)
