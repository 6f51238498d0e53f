"""The query lists of blocks (`specs/block_query_lists.py`), by counting, without a sort.

    count_entries    entries of (row, tile of keys, chunk of tokens)
    running sum      where they begin, by the framework
    fill_lists       the same walk again; each entry goes to its place

The walk, a warp a chunk of tokens:

    for each window of tiles of keys                `next_entry`: a counter a tile
        for each word of tokens of the chunk
            for each sequence of these tokens
                set the bits of its blocks          `block_bitmap.py`
                a lane a tile of keys: pass over the words of the blocks that touch the tile,
                and count or write the query tiles with a bit

    shared memory   bits [WARPS, bits]      a word a block, a bit a token
                    next_entry [WARPS, window]  entries counted, or where the next one goes

No two warps write to one counter, so there are no atomics in global memory and the order is
fixed. Bound by latency, as `tile_block_lists.py`; the passes over bitmaps grow with the product
of chunks and blocks, entries are written once.
"""

import functools
from typing import Any

from kernels_pallas.mosaic.block_bitmap import NOWHERE, BlockBitmap
from kernels_pallas.mosaic.warp_kernel import WARPS, warp_kernel
from kernels_pallas.specs.block_query_lists import (
    BLOCK_OFFSET_BIAS,
    BLOCK_OFFSET_SHIFT,
    BlockQueryLists,
)
from kernels_pallas.specs.selected import COUNTS, BlockCounts, first_near
from kernels_pallas.specs.tile import LANES, ROWS

BLOCKS = BlockCounts._fields.index("blocks")


def walk(warp: Any, spec: BlockQueryLists, sizes, refs, *, fill: bool, gather=False) -> None:
    """The walk over chunk `WARPS * group + warp` of row `refs.row`; `fill`: entries are written,
    else counted; `gather`: entries are those of `fill_gather_lists`.
    """
    lane, row = warp.lane(), refs.row
    refs.b, refs.g = row // spec.Hkv, row % spec.Hkv
    chunk = refs.group * WARPS + warp.warp()
    bits = warp.shared(refs.bits) + warp.warp() * (4 * spec.bits)
    next_entry = warp.shared(refs.next_entry) + warp.warp() * (4 * spec.window)
    tokens_of_word = spec.query_tiles_of_word * spec.tokens
    first = 1 if spec.limit else 0  # block 0 is near
    bitmap = BlockBitmap(warp, sizes.T, spec.Hkv, spec.n, spec.block, tokens_of_word, first)

    def far_end(token):
        """Where the far blocks end of a token whose tile is gathered, as
        `selected.tile_is_gathered` says; else 0.
        """
        tile = token // spec.tile
        before = (refs.b * spec.Hkv + refs.g) * sizes.tiles + warp.larger(tile - 1, 0)
        blocks = warp.element(refs.counts, (before, 4 * COUNTS), (BLOCKS, 4))
        gathered = (warp.fetch(blocks) > spec.limit) & (tile > 0)
        of_tile = refs.b * sizes.T + tile * spec.tile, 4
        at = warp.fetch(warp.element(refs.position, of_tile))
        near = first_near(at, spec.block, warp.larger)
        return warp.where(gathered, near, 0)

    most_of = far_end if spec.limit else None

    def edge(tile, after=0):
        """The element of `edges` of the tile and this chunk, or the one after it."""
        tile = row * sizes.key_tiles + warp.smaller(tile, sizes.key_tiles - 1)
        place = tile * sizes.chunks + warp.smaller(chunk, sizes.chunks - 1)
        return warp.element(refs.edges, (place, 4), (after, 4))

    # Of the first token of every query tile, as an int32.
    first_bits = sum(1 << (u * spec.tokens) for u in range(spec.query_tiles_of_word))
    first_bits -= 2**32 if first_bits >= 2**31 else 0

    def tile_entries(low, high, seen, low_block, query_tile0):
        """Counts or writes the entries of the tiles `low .. high - 1`, a lane a tile."""
        first_key, blocks, last, end_of_bit0 = seen
        tile_from = warp.larger(first_key // ROWS, low)
        tile_to = warp.smaller((last + (ROWS - 1)) // ROWS, high)
        row_from = warp.larger(tile_from - low, 0) // LANES
        row_to = warp.larger(tile_to - low + (LANES - 1), 0) // LANES

        def row(i, nothing):
            offset = (row_from + i) * LANES + warp.lane()
            tile = low + offset
            key = tile * ROWS
            seen = (tile >= tile_from) & (tile < tile_to)
            # Bits below `early` are tokens that end before the tile: positions grow by one a bit.
            # early < 32 wherever `seen` holds.
            early = warp.larger(key + 1 - end_of_bit0, 0) & (LANES - 1)
            first_block = warp.larger(key - first_key, 0) // spec.block

            def block(j, state):
                index = first_block + j
                begins = first_key + index * spec.block
                touches = seen & (index < blocks) & (begins < key + ROWS)
                at = warp.smaller(warp.larger(index - low_block, 0), spec.bits - 1)
                members = warp.where(touches, warp.read(bits + at * 4), 0)
                members = (members >> early) << early
                query_tiles = functools.reduce(
                    lambda x, y: x | y, (members >> i for i in range(spec.tokens))
                )
                query_tiles = query_tiles & first_bits
                if not fill:
                    return [state[0] + warp.ones(query_tiles)]
                offset = (begins - key + BLOCK_OFFSET_BIAS) << BLOCK_OFFSET_SHIFT
                return write_entries(state[0], query_tiles, members, offset, query_tile0)

            before = warp.read(next_entry + offset * 4)
            (after,) = warp.repeat(spec.blocks_of_key_tile, block, [before])
            warp.write(next_entry + offset * 4, after)
            return nothing

        warp.repeat(warp.larger(row_to - row_from, 0), row, [])

    def gather_entries(token0, own, first, count):
        """Writes the entries of a sequence, of which `bits` has `count` blocks. Every block is a
        tile of keys, block 0 the tile `first` of the window: a lane an entry of the selection,
        whose place in the list follows from the bits of the tokens before.
        """
        begin = warp.larger(first, 0)  # the tile of the first word of `bits`

        def write(entry, token, block, exists, nothing):
            tile = block + first
            exists = exists & bitmap.counts(block, own, token)
            exists = exists & warp.below(tile, spec.window)
            word, tile = (warp.where(exists, x, 0) * 4 for x in (tile - begin, tile))
            before = warp.read(bits + word) & (warp.bit(token) - 1)
            to = warp.read(next_entry + tile) + warp.ones(before)
            value = ((token0 + token) * spec.Hkv + refs.g) * spec.n + entry % spec.n
            warp.put(warp.element(refs.entries, (warp.where(exists, to, 0), 4)), value, exists)
            return nothing

        end = warp.smaller(begin + count, spec.window)
        row = begin // LANES

        def advance(r, nothing):
            tile = (row + r) * LANES + warp.lane()
            own = (tile >= begin) & (tile < end)
            members = warp.read(bits + warp.where(own, tile - begin, 0) * 4)
            before = warp.read(next_entry + tile * 4)
            warp.write(next_entry + tile * 4, before + warp.where(own, warp.ones(members), 0))
            return nothing

        bitmap.each(refs, token0, write, [])
        warp.sync()
        warp.repeat(warp.larger((end + (LANES - 1)) // LANES - row, 0), advance, [])

    def write_entries(entry, query_tiles, members, offset, query_tile0):
        """Writes an entry for each bit of `query_tiles`, from place `entry` on."""

        def write(_, state):
            entry, query_tiles = state
            exists = warp.different(query_tiles, 0)
            bit = warp.ones((query_tiles & (warp.word(0) - query_tiles)) - 1) & (LANES - 1)
            query_tile = query_tile0 + bit // spec.tokens
            warp.put(warp.element(refs.query_list, (entry, 4)), query_tile, exists)
            if spec.has_token_bits:
                token_bits = ((members >> bit) & ((1 << spec.tokens) - 1)) + offset
                warp.put(warp.element(refs.token_bits, (entry, 4)), token_bits, exists)
            return [entry + warp.number(exists), query_tiles & (query_tiles - 1)]

        entry, _ = warp.repeat(
            warp.largest(warp.ones(query_tiles)), write, [entry, query_tiles]
        )
        return [entry]

    def window(i, nothing):
        low = i * spec.window
        high = warp.smaller(low + spec.window, sizes.key_tiles)
        rows = (high - low + (LANES - 1)) // LANES

        def begin(r, nothing):
            offset = r * LANES + lane
            start = warp.fetch(edge(low + offset)) if fill else 0
            warp.write(next_entry + offset * 4, start)
            return nothing

        def end(r, nothing):
            offset = r * LANES + lane
            exists = (low + offset < high) & (chunk < sizes.chunks)
            after = edge(low + offset, after=1)
            warp.put(after, warp.read(next_entry + offset * 4), exists)
            return nothing

        def some_tokens(k, nothing):
            query_tile0 = chunk * sizes.chunk + k * spec.query_tiles_of_word
            token0 = query_tile0 * spec.tokens
            tokens = bitmap.load(refs, token0, most_of)

            def sequence(_, state):
                first_key, own, blocks = bitmap.next_sequence(tokens, state[0])
                low_block = warp.larger(low * ROWS - first_key, 0) // spec.block
                count = warp.smaller(warp.larger(blocks - low_block, 0), spec.bits)
                bitmap.clear(bits, spec.bits, (count + (LANES - 1)) // LANES)
                warp.sync()
                bitmap.join(bits, spec.bits, low_block, refs, token0, own)
                warp.sync()
                if gather:
                    gather_entries(token0, own, first_key // ROWS - low, count)
                else:
                    # Of the sequence: the end of the keys that its last token sees, and of those
                    # that a token at bit 0 would see.
                    (sequence,), (position,) = tokens.sequence, tokens.position
                    mine, ends = warp.same(sequence, first_key), first_key + position + 1
                    last = warp.largest(warp.where(mine, ends, 0))
                    of_bit0 = warp.smallest(warp.where(mine, ends - warp.lane(), NOWHERE))
                    seen = first_key, blocks, last, of_bit0
                    tile_entries(low, high, seen, low_block, query_tile0)
                warp.sync()
                return [first_key]

            (first_key,), (last,) = tokens.sequence, tokens.position
            end = warp.largest(warp.where(first_key >= 0, first_key + last + 1, 0))
            reached = warp.number(end > low * ROWS)
            warp.repeat(bitmap.sequences(tokens) * reached, sequence, [warp.word(-1)])
            return nothing

        warp.repeat(rows, begin, [])
        warp.repeat(sizes.words_of_chunk, some_tokens, [])
        if not fill:
            warp.repeat(rows, end, [])
        return nothing

    warp.repeat((sizes.key_tiles + (spec.window - 1)) // spec.window, window, [])
    if not fill:
        first = warp.same(lane + row + chunk, 0)
        warp.put(warp.element(refs.edges, (lane, 4)), 0, first)


def _walk(**options: bool):
    return warp_kernel(
        functools.partial(walk, **options),
        lambda spec: {"bits": (WARPS, spec.bits), "next_entry": (WARPS, spec.window)},
    )


count_entries = _walk(fill=False)
fill_lists = _walk(fill=True)
fill_gather_lists = _walk(fill=True, gather=True)
