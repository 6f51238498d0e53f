"""Builds the lists of the selected branch without a sort, and the work items of query lists.

The bitmap of a selection is in shared memory. The bitmap has a word per block, and a word has a bit
per token. The word of a block shows all tokens that selected the block. The block lists of tiles
and the query lists of blocks are built from the bitmap. One warp handles up to 64 neighbouring
tokens, which may belong to several sequences. The warp handles the sequences one after the other,
since the indices of blocks begin at 0 in each sequence.

For each sequence of the tokens (`next_sequence`), the warp clears the bitmap (`clear`) and sets the
bits of the blocks low .. low + window - 1 (`join`).

The bitmap is `bits`, int32 `[words, window]`. Bit `token % 32` of `bits[token // 32, i]` is set if
the token selected block `low + i`.

Each lane handles one entry of the selection at a time, with loads of `FETCHES` entries in flight.
The lane sets the bit of the entry with an atomic OR. Several entries may set bits of the same word,
in any order.

One warp builds the block list of a tile. For each sequence of the tile's tokens, and each window of
`WINDOW` blocks of the sequence, the warp does these steps:

- Clear the bitmap in shared memory, which has one word per block and 32 tokens.
- For every entry of the selection, set the bit of the entry's token.
- Compact 32 blocks at a time, with a lane per block. A vote finds the blocks with a bit. The number
  of votes of lower lanes is the index of a lane's block in the list.

The warp also computes counts of the list's blocks (`specs.selected.BlockCounts`).

The bitmaps are int32 `[WARPS, words, WINDOW]` in shared memory. Word 0 of a block has the bits of
tokens 0 to 31 of the tile, and word 1 has the bits of tokens 32 to 63.

A bitmap is in the order of the blocks, so the block list is sorted too. Latency limits the kernel
of block lists, namely the latency of shared memory and of the loads of entries, `FETCHES` loads at
a time. The work of a warp grows with the number of blocks in the sequence, not with the number of
selected blocks.

The query lists of blocks (`specs/block_query_lists.py`) are built in three steps:

| step            | work                                                            |
|-----------------|-----------------------------------------------------------------|
| `count_entries` | counts the entries of each (row, tile of keys, chunk of tokens) |
| running sum     | computes the offsets of the entries, in the framework           |
| `fill_lists`    | traverses the tokens again, and writes each entry to its offset |

Each warp traverses one chunk of tokens, for one window of tiles of keys at a time. For each word of
tokens in the chunk, and each sequence of the word's tokens, the warp sets the bits of the blocks of
the sequence. Each lane handles one tile of keys. The lane iterates over the words of the blocks
that touch the tile, and counts or writes the query tiles with a bit.

| array in shared memory         | content                                                |
|--------------------------------|--------------------------------------------------------|
| `bits` `[WARPS, bits]`         | a word per block, with a bit per token                 |
| `next_entry` `[WARPS, window]` | number of counted entries, or offset of the next entry |

Only one warp writes each counter, so counters need no atomics in global memory, and the order of
entries is fixed. The kernels of query lists are bound by latency. The number of passes over bitmaps
grows with (number of chunks) x (number of blocks). Each entry of a query list is written once.

Work items of query lists (`specs/work_items.py`): one warp handles a batch row, a key/value head
and a segment of the tokens. A lane handles a tile of keys, and a warp handles 32 tiles at a time.
The list of a tile in the segment is between two `edges`, and is cut into work items of `longest`
entries. A prefix sum over the lanes gives the index of each work item. The partials of a tile are
contiguous, so the warp also counts the tile's work items in all segments, with another prefix sum
of the totals. The remaining rows of the segment in the table are marked as empty.

The kernel of work items is bound by the latency of two or three loads of `edges` per tile, and of
`MAX_HALVES + 2` more loads if partials are counted. The kernel of work items stores up to 28 bytes
per item. The kernel of work items takes a few microseconds, while the kernels that read the table
of work items take milliseconds.
"""

import functools
import itertools
from typing import Any, NamedTuple

from kernels_pallas.mosaic.warp_kernel import WARPS, warp_kernel
from kernels_pallas.specs.block_query_lists import (
    BLOCK_OFFSET_BIAS,
    BLOCK_OFFSET_SHIFT,
    BlockQueryLists,
)
from kernels_pallas.specs.selected import COUNTS, BlockCounts, SelectedAttention, first_near
from kernels_pallas.specs.tile import LANES, ROWS, WORK_ITEM_INTS, cdiv
from kernels_pallas.specs.work_items import MAX_HALVES, WorkItem, WorkItems

NOWHERE = 2**31 - 1  # in place of a block, sorts after all blocks
FETCHES = 4  # number of entries of the selection that a lane loads at once


type Word = Any  # a 32-bit value per lane, of `warp.py` or of `interpreter.py`


class Tokens(NamedTuple):
    """The properties of each token of a bitmap. Each element of a list holds one token per lane."""

    sequence: list[Word]  # first key of the token's sequence; -1 if no block may be selected
    position: list[Word]  # position of the token in the sequence
    bound: list[Word]  # number of blocks of its sequence that the token may select


class BlockBitmap(NamedTuple):
    """The bitmap of up to 64 neighbouring tokens of a selection.

    Attributes:
      warp: Object with the instructions of a warp (`warp.py`, `interpreter.py`).
      refs: `indices` `[B, T, Hkv, n]`, `position` and `key_start` `[B, T]`, int32, and the row `b`
        and the head `g`.
      T: The number of tokens per row of the selection, an integer or a word.
      tokens: Number of tokens of the bitmap.
      first: Index of the first block in the bitmap. Earlier blocks are ignored.
    """

    warp: Any
    spec: BlockQueryLists | SelectedAttention
    refs: Any
    T: Any
    tokens: int
    first: int = 0

    @property
    def words(self) -> int:
        """The number of words per block."""
        return cdiv(self.tokens, LANES)

    def load(self, token0: Word, most_of=None) -> Tokens:
        """Load the `Tokens` from `token0` on. `most_of` is a function that returns the maximum
        number of blocks that a token may select.
        """
        warp, found = self.warp, Tokens([], [], [])
        for word in range(self.words):
            token = warp.lane() + LANES * word
            exists = warp.smaller(token0 + token, self.T - 1)
            at = self.refs.b * self.T + exists, 4
            last = warp.fetch(warp.element(self.refs.position, at))
            first_key = warp.fetch(warp.element(self.refs.key_start, at))
            selects = warp.below(token, self.tokens) & warp.below(token0 + token, self.T)
            selects = selects & (last >= 0)
            last = warp.larger(last, 0)
            bound = last // self.spec.block + 1
            if most_of is not None:
                most = most_of(exists)
                selects, bound = selects & (most > 0), warp.smaller(bound, most)
            found.sequence.append(warp.where(selects, first_key, -1))
            found.position.append(last)
            found.bound.append(warp.where(selects, bound, 0))
        return found

    def sequences(self, tokens: Tokens) -> Word:
        """Return the number of sequences to which the tokens belong. The tokens of a sequence
        are adjacent.
        """
        warp = self.warp
        count, before = warp.word(0), warp.word(-1)
        for first_key in tokens.sequence:
            previous = warp.shuffle(first_key, warp.larger(warp.lane() - 1, 0))
            previous = warp.where(warp.same(warp.lane(), 0), before, previous)
            opens = (first_key >= 0) & warp.different(first_key, previous)
            count = count + warp.ones(warp.votes(opens))
            before = warp.shuffle(first_key, LANES - 1)
        return count

    def next_sequence(self, tokens: Tokens, before: Word) -> tuple[Word, list[Word], Word]:
        """Return the first key of the next sequence, the bounds `Tokens.bound` of its tokens,
        and the largest of these bounds. The next sequence follows the sequence whose first key
        is `before`. The bounds of tokens in other sequences are 0.
        """
        warp = self.warp
        later = [warp.where(x > before, x, NOWHERE) for x in tokens.sequence]
        first_key = warp.smallest(functools.reduce(warp.smaller, later))
        own = [
            warp.where(warp.same(x, first_key), n, 0)
            for x, n in zip(tokens.sequence, tokens.bound, strict=True)
        ]
        return first_key, own, warp.largest(functools.reduce(warp.larger, own))

    def clear(self, bits: Word, window: int, rows: Word) -> None:
        """Clear `32 * rows` blocks of the bitmap `[words, window]` at the address `bits`."""
        warp = self.warp

        def clear_row(row):
            for word in range(self.words):
                warp.write(bits + (row * LANES + warp.lane()) * 4, 0, 4 * window * word)

        warp.repeat(rows, clear_row)

    def join(self, bits, window: int, low, token0, own, also=None, *state):
        """Set the bits of the blocks `low .. low + window - 1` that tokens selected.

        The argument `own` is the same as in the method `counts`. For all entries of the tokens'
        selection, also compute a new `state` with the function `also`, and return the last `state`.
        The call is `also(entry, token, block, selected, *state)` (`each`). The entries may have
        blocks outside the window `low .. low + window - 1`.
        """
        warp = self.warp

        def visit(entry, token, block, exists, *state):
            selected = exists & self.counts(block, own, token)
            offset = block - low
            warp.join(
                bits + (offset + token // LANES * window) * 4,
                warp.bit(token & (LANES - 1)),
                only=selected & warp.below(offset, window),
            )
            return also(entry, token, block, selected, *state) if also else ()

        return self.each(token0, visit, *state)

    def counts(self, block: Word, own: list[Word], token: Word) -> Any:
        """Return whether `token` may select the block. For tokens of the current sequence,
        `own` has `Tokens.bound`, the number of blocks that the token may select. For tokens of
        other sequences, `own` has 0 (`next_sequence`).
        """
        found = self.warp.below(block, self.bound(own, token))
        return found & (block >= self.first) if self.first else found

    def each(self, token0, visit, *state):
        """Compute `state = visit(entry, token, block, exists, *state)` for all entries of the
        tokens' selection, with one entry per lane and a few entries at a time. `exists` is true
        if the lane has an entry.
        """
        warp = self.warp

        def fetch(entry):
            token = self.refs.b * self.T + warp.smaller(token0 + self._token(entry), self.T - 1)
            at = (
                (token, 4 * self.spec.Hkv * self.spec.n),
                (self.refs.g, 4 * self.spec.n),
                (entry % self.spec.n, 4),
            )
            return warp.fetch(warp.element(self.refs.indices, *at))

        def some(step, *state):
            entries = [(step * fetches + i) * LANES + warp.lane() for i in range(fetches)]
            blocks = [fetch(entry) for entry in entries]
            for entry, block in zip(entries, blocks, strict=True):
                exists = warp.below(entry, self.tokens * self.spec.n)
                state = visit(entry, self._token(entry), block, exists, *state) or state
            return state

        steps = cdiv(self.tokens * self.spec.n, LANES)
        fetches = min(steps, FETCHES)
        return warp.repeat(cdiv(steps, fetches), some, *state)

    def _token(self, entry: Word) -> Word:
        return self.warp.smaller(entry // self.spec.n, self.tokens - 1)

    def bound(self, values: list[Word], token: Word) -> Word:
        """Return the entry of a token in `Tokens.bound` or in a similar list."""
        warp = self.warp
        found = warp.shuffle(values[0], token & (LANES - 1))
        if self.words == 1:
            return found
        other = warp.shuffle(values[1], token & (LANES - 1))
        return warp.where(token < LANES, found, other)


WINDOW = 1024  # number of blocks whose bits are in shared memory at a time


def make_list(warp: Any, spec: SelectedAttention, sizes, refs) -> None:
    """Write the block list of tile `WARPS * group + warp`."""
    lane = warp.lane()
    size, words = spec.block, spec.words
    bitmap = BlockBitmap(warp, spec, refs, sizes.T, spec.tile.tokens)
    tile = refs.group * WARPS + warp.warp()
    token0 = tile * spec.tile.tokens
    bits = warp.shared(refs.bits) + warp.warp() * (4 * words * WINDOW)
    tokens = bitmap.load(token0)
    # The first block that ends after the token's last key.
    cut = [(last + 1) // size for last in tokens.position]
    parts = spec.parts
    position0 = warp.shuffle(tokens.position[0], 0)
    near = first_near(position0, size * parts, warp.larger) * parts

    mine = (refs.b * spec.Hkv + refs.g) * sizes.tiles + tile

    def address(array, entry, words=1, word=0):
        """Return the address in `array` of an entry of a tile's list. `array` is `starts` or
        `members`.
        """
        row = 4 * spec.entries
        lead = (mine, words * row), (warp.word(word), row)
        return warp.element(array, *lead, (entry, 4))

    def visit(entry, token, block, selected, first_cut, slot, slot_end):
        is_cut = selected & (block >= bitmap.bound(cut, token))
        first_cut = warp.smaller(first_cut, warp.where(is_cut, block, NOWHERE))
        far = selected & (block >= parts) & (block < near)
        place = entry % spec.n // parts
        slot = warp.smaller(slot, warp.where(far, place, spec.n))
        slot_end = warp.larger(slot_end, warp.where(far, place + 1, 0))
        return first_cut, slot, slot_end

    def each_sequence(_, before, ended, *counted):
        first_key, own, blocks = bitmap.next_sequence(tokens, before)

        def window(i, _, *state):
            *counted, slot, slot_end = state
            low = i * WINDOW
            rows = cdiv(warp.smaller(blocks - low, WINDOW), LANES)
            bitmap.clear(bits, WINDOW, rows)
            warp.sync()
            of_lane = warp.word(NOWHERE), slot, slot_end
            joined = token0, own, visit, *of_lane
            first_cut, *slots = bitmap.join(bits, WINDOW, low, *joined)
            first_cut = warp.smallest(first_cut)
            warp.sync()

            def compact(row, whole, count, far_begin, far_end):
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
                return (
                    whole + warp.ones(warp.votes(full)),
                    count + warp.ones(votes),
                    far_begin + warp.ones(warp.votes(first)),
                    far_end + warp.ones(warp.votes(before_near)),
                )

            counted = warp.repeat(rows, compact, *counted)
            warp.sync()
            return first_cut, *counted, *slots

        windows = cdiv(blocks, WINDOW)
        first_cut, *counted = warp.repeat(windows, window, NOWHERE, *counted)
        ended = ended | warp.number(first_cut < NOWHERE)
        return first_key, ended, *counted

    none = BlockCounts(0, 0, 0, 0, far_slot=spec.n, far_slot_end=0)
    state = [warp.word(x) for x in (-1, 0, *none)]
    _, _, *counted = warp.repeat(bitmap.sequences(tokens), each_sequence, *state)
    found = BlockCounts(*counted)
    found = found._replace(
        far_slot=warp.smallest(found.far_slot),
        far_slot_end=warp.largest(found.far_slot_end),
    )
    count = found.blocks

    def clear_entries(row):
        entry = row * LANES + lane
        past = (entry >= count) & (entry < spec.entries) & (tile < sizes.tiles)
        warp.put(address(refs.starts, entry), 0, past)
        for word in range(words):
            warp.put(address(refs.members, entry, words, word), 0, past)

    warp.repeat(cdiv(spec.entries, LANES), clear_entries)
    of_tile = warp.element(refs.counts, (mine, 4 * COUNTS), (lane, 4))
    exists = warp.below(lane, COUNTS) & (tile < sizes.tiles)
    own_count = found[0]
    for i, x in enumerate(found[1:], 1):
        own_count = warp.where(warp.same(lane, i), x, own_count)
    warp.put(of_tile, own_count, exists)


tile_block_lists = warp_kernel(
    make_list, lambda spec: {"bits": (WARPS, spec.words, WINDOW)}, by_head=True
)


BLOCKS = BlockCounts._fields.index("blocks")


def list_chunk(
    warp: Any, spec: BlockQueryLists, sizes, refs, *, fill: bool, gather=False
) -> None:
    """Traverse chunk `WARPS * group + warp` of row `refs.row`.

    If `fill` is true, the entries of query lists are written. If `fill` is false, the entries are
    counted. If the argument `gather` is true, the entries are those of the kernel
    `fill_gather_lists`.
    """
    lane, row = warp.lane(), refs.row
    refs.b, refs.g = row // spec.Hkv, row % spec.Hkv
    chunk = refs.group * WARPS + warp.warp()
    bits = warp.shared(refs.bits) + warp.warp() * (4 * spec.bits)
    next_entry = warp.shared(refs.next_entry) + warp.warp() * (4 * spec.window)
    tokens_of_word = spec.query_tiles_of_word * spec.tokens
    first = 1 if spec.limit else 0  # block 0 is always a near block
    bitmap = BlockBitmap(warp, spec, refs, sizes.T, tokens_of_word, first)

    def far_end(token):
        """Return the end of the far blocks of a token. If the token's tile is not gathered
        (`selected.tile_is_gathered`), return 0.
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
        """Return the element of `edges` for the tile and the warp's chunk of tokens.

        With `after`, return the next element.
        """
        tile = row * sizes.key_tiles + warp.smaller(tile, sizes.key_tiles - 1)
        place = tile * sizes.chunks + warp.smaller(chunk, sizes.chunks - 1)
        return warp.element(refs.edges, (place, 4), (after, 4))

    # An int32 in which the bit of the first token of every query tile is set.
    first_bits = sum(1 << (u * spec.tokens) for u in range(spec.query_tiles_of_word))
    first_bits -= 2**32 if first_bits >= 2**31 else 0

    def tile_entries(low, high, seen, low_block, query_tile0):
        """Count or write the list entries of the tiles of keys `low .. high - 1`. Each lane
        handles one tile.
        """
        first_key, blocks, last, end_of_bit0 = seen
        tile_from = warp.larger(first_key // ROWS, low)
        tile_to = warp.smaller(cdiv(last, ROWS), high)
        row_from = warp.larger(tile_from - low, 0) // LANES
        row_to = warp.larger(tile_to - low + (LANES - 1), 0) // LANES

        def row(i):
            offset = (row_from + i) * LANES + warp.lane()
            tile = low + offset
            key = tile * ROWS
            seen = (tile >= tile_from) & (tile < tile_to)
            # Bits below `early` belong to tokens whose keys end before the tile, since
            # positions grow by one per bit. early < 32 if `seen` holds.
            early = warp.larger(key + 1 - end_of_bit0, 0) & (LANES - 1)
            first_block = warp.larger(key - first_key, 0) // spec.block

            def block(j, entry):
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
                    return entry + warp.ones(query_tiles)
                offset = (begins - key + BLOCK_OFFSET_BIAS) << BLOCK_OFFSET_SHIFT
                return write_entries(entry, query_tiles, members, offset, query_tile0)

            before = warp.read(next_entry + offset * 4)
            after = warp.repeat(spec.blocks_of_key_tile, block, before)
            warp.write(next_entry + offset * 4, after)

        warp.repeat(warp.larger(row_to - row_from, 0), row)

    def gather_entries(token0, own, first, count):
        """Write the list entries of a sequence that has `count` blocks in `bits`.

        Every block is a tile of keys, and block 0 is the tile `first` of the window. Each lane has
        an entry of the selection. The bits of earlier tokens determine the index of an entry in the
        list.
        """
        begin = warp.larger(first, 0)  # the tile of the first word of `bits`

        def write(entry, token, block, exists):
            tile = block + first
            exists = exists & bitmap.counts(block, own, token)
            exists = exists & warp.below(tile, spec.window)
            word, tile = (warp.where(exists, x, 0) * 4 for x in (tile - begin, tile))
            before = warp.read(bits + word) & (warp.bit(token) - 1)
            to = warp.read(next_entry + tile) + warp.ones(before)
            value = ((token0 + token) * spec.Hkv + refs.g) * spec.n + entry % spec.n
            warp.put(warp.element(refs.entries, (warp.where(exists, to, 0), 4)), value, exists)

        end = warp.smaller(begin + count, spec.window)
        row = begin // LANES

        def advance(r):
            tile = (row + r) * LANES + warp.lane()
            own = (tile >= begin) & (tile < end)
            members = warp.read(bits + warp.where(own, tile - begin, 0) * 4)
            before = warp.read(next_entry + tile * 4)
            warp.write(next_entry + tile * 4, before + warp.where(own, warp.ones(members), 0))

        bitmap.each(token0, write)
        warp.sync()
        warp.repeat(warp.larger(cdiv(end, LANES) - row, 0), advance)

    def write_entries(entry, query_tiles, members, offset, query_tile0):
        """Write one list entry for each set bit of `query_tiles`, from index `entry` of the
        list on.
        """

        def write(_, entry, query_tiles):
            exists = warp.different(query_tiles, 0)
            bit = warp.ones((query_tiles & (warp.word(0) - query_tiles)) - 1) & (LANES - 1)
            query_tile = query_tile0 + bit // spec.tokens
            warp.put(warp.element(refs.query_list, (entry, 4)), query_tile, exists)
            if spec.has_token_bits:
                token_bits = ((members >> bit) & ((1 << spec.tokens) - 1)) + offset
                warp.put(warp.element(refs.token_bits, (entry, 4)), token_bits, exists)
            return entry + warp.number(exists), query_tiles & (query_tiles - 1)

        most = warp.largest(warp.ones(query_tiles))
        return warp.repeat(most, write, entry, query_tiles)[0]

    def window(i):
        low = i * spec.window
        high = warp.smaller(low + spec.window, sizes.key_tiles)
        rows = cdiv(high - low, LANES)

        def begin(r):
            offset = r * LANES + lane
            start = warp.fetch(edge(low + offset)) if fill else 0
            warp.write(next_entry + offset * 4, start)

        def end(r):
            offset = r * LANES + lane
            exists = (low + offset < high) & (chunk < sizes.chunks)
            after = edge(low + offset, after=1)
            warp.put(after, warp.read(next_entry + offset * 4), exists)

        def some_tokens(k):
            query_tile0 = chunk * sizes.chunk + k * spec.query_tiles_of_word
            token0 = query_tile0 * spec.tokens
            tokens = bitmap.load(token0, most_of)

            def sequence(_, before):
                first_key, own, blocks = bitmap.next_sequence(tokens, before)
                low_block = warp.larger(low * ROWS - first_key, 0) // spec.block
                count = warp.smaller(warp.larger(blocks - low_block, 0), spec.bits)
                bitmap.clear(bits, spec.bits, cdiv(count, LANES))
                warp.sync()
                bitmap.join(bits, spec.bits, low_block, token0, own)
                warp.sync()
                if gather:
                    gather_entries(token0, own, first_key // ROWS - low, count)
                else:
                    # `last` is the end of the keys that the sequence's last token sees.
                    # `end_of_bit0` is the end of the keys that a token at bit 0 would see.
                    (sequence,), (position,) = tokens.sequence, tokens.position
                    mine, ends = warp.same(sequence, first_key), first_key + position + 1
                    last = warp.largest(warp.where(mine, ends, 0))
                    of_bit0 = warp.smallest(warp.where(mine, ends - warp.lane(), NOWHERE))
                    seen = first_key, blocks, last, of_bit0
                    tile_entries(low, high, seen, low_block, query_tile0)
                warp.sync()
                return first_key

            (first_key,), (last,) = tokens.sequence, tokens.position
            end = warp.largest(warp.where(first_key >= 0, first_key + last + 1, 0))
            reached = warp.number(end > low * ROWS)
            warp.repeat(bitmap.sequences(tokens) * reached, sequence, -1)

        warp.repeat(rows, begin)
        warp.repeat(sizes.words_of_chunk, some_tokens)
        if not fill:
            warp.repeat(rows, end)

    warp.repeat(cdiv(sizes.key_tiles, spec.window), window)
    if not fill:
        first = warp.same(lane + row + chunk, 0)
        warp.put(warp.element(refs.edges, (lane, 4)), 0, first)


def _lists(**options: bool):
    return warp_kernel(
        functools.partial(list_chunk, **options),
        lambda spec: {"bits": (WARPS, spec.bits), "next_entry": (WARPS, spec.window)},
    )


count_entries = _lists(fill=False)
fill_lists = _lists(fill=True)
fill_gather_lists = _lists(fill=True, gather=True)


SEGMENT_SIZES = "cut", "offset", "capacity"  # the sizes in `WorkItems.sizes` of each segment
# A sort key has the index of a work item in its lower bits, and the number of the work item's
# entries, at most 2048, above them.
NUMBER_BITS = 19


def make_items(warp: Any, spec: WorkItems, sizes, refs) -> None:
    """Write the work items of row `refs.row` and segment `WARPS * group + warp`."""
    lists, lane, row = spec.lists, warp.lane(), refs.row
    tiles, chunks, longest = sizes.key_tiles, sizes.chunks, sizes.longest
    segment = refs.group * WARPS + warp.warp()
    exists = segment < sizes.segments

    def of_segment(values):
        """Return `values[segment]`."""
        found = warp.word(values[0])
        for i, x in enumerate(values[1:], 1):
            found = warp.where(segment >= i, x, found)
        return found

    # The first chunk of the segment and of the next segment. Then the index of the segment's
    # first work item for row 0, and the capacity of the segment.
    if spec.halving:
        ends, offsets, capacities = (_of_segments(sizes, x) for x in SEGMENT_SIZES)
        bounds = [0, *ends[:-1]], ends, offsets, capacities
        low, high, offset, capacity = map(of_segment, bounds)
    else:
        low, high = (warp.smaller((segment + i) * sizes.step, sizes.chunks) for i in (0, 1))
        offset, capacity = segment * (sizes.rows * sizes.most), warp.word(sizes.most)
    b = row // lists.Hkv
    first_position = 0
    if not spec.placed:
        first_position = warp.fetch_int(refs.position, b * sizes.T)

    def first_key(tile):
        if not spec.placed:
            return tile * ROWS
        at = b * tiles + warp.smaller(tile, tiles - 1)
        return warp.fetch_int(refs.first_key, at)

    def edge(tile, chunk):
        tile = row * tiles + warp.smaller(tile, tiles - 1)
        return warp.fetch_int(refs.edges, tile * chunks + chunk)

    def put(index, item, exists):
        """Write item `index` of the warp's row and segment."""
        index = warp.where(exists, offset + row * sizes.items + index, 0)
        for column, x in enumerate(item):
            at = (index, 4 * WORK_ITEM_INTS), (warp.word(column), 4)
            warp.put(warp.element(refs.table, *at), x, exists)

    def items_of(tile, begin, end):
        """Return the number of work items of a list."""
        return warp.where(tile < tiles, cdiv(end - begin, longest), 0)

    def partials_of(tile, count):
        """Return the first partial of each lane's tile in the segment, and the updated `count`."""
        ends = [edge(tile, warp.word(cut)) for cut in [0, *_of_segments(sizes, "cut")]]
        counts = [items_of(tile, *x) for x in itertools.pairwise(ends)]
        total = functools.reduce(lambda x, y: x + y, counts)
        before = _prefix_sum(warp, total)
        in_segment = first = row * sizes.items + count + before
        for i, x in enumerate(counts):
            in_segment = in_segment + warp.where(segment > i, x, 0)
        writes = (tile < tiles) & warp.same(segment, 0)
        at = row * tiles + warp.smaller(tile, tiles - 1), 4
        for output, x in ((refs.first, first), (refs.count, total)):
            warp.put(warp.element(output, at), x, writes)
        return [in_segment], [count + warp.shuffle(before + total, LANES - 1)]

    def some_tiles(r, counts):
        count, *partial_count = counts
        tile = r * LANES + lane
        begin, end = edge(tile, low), edge(tile, high)
        key, unmasked = first_key(tile), end
        if not lists.clipped:
            # The first token that sees the whole tile, and its chunk.
            first_query = sizes.first_query if spec.placed else first_position
            token = warp.larger(key + (ROWS - 1) - first_query, 0)
            if spec.placed:
                behind = warp.larger(token - sizes.half - sizes.gap, 0)
                token = warp.smaller(token, sizes.half) + behind
            tokens = sizes.tokens_of_chunk
            chunk = cdiv(token, tokens)
            unmasked = edge(tile, warp.smaller(warp.larger(chunk, low), high))
        items = warp.where(exists, items_of(tile, begin, end), 0)
        before = _prefix_sum(warp, items)
        first_partial = []
        if spec.halving:
            first_partial, partial_count = partials_of(tile, *partial_count)

        def write(i):
            start = begin + i * longest
            stop = warp.smaller(start + longest, end)
            unmasked_begin = warp.smaller(warp.larger(unmasked, start), stop)
            item = row, key, start, unmasked_begin, stop, stop
            item = *item, *(x + i for x in first_partial)
            put(count + before + i, item, i < items)

        warp.repeat(warp.largest(items), write)
        return [count + warp.shuffle(before + items, LANES - 1), *partial_count]

    counts, empty = [warp.word(0)] * (1 + spec.halving), (-1, *[0] * (5 + spec.halving))
    count, *_ = warp.repeat(cdiv(tiles, LANES), some_tiles, counts)

    def clear(r):
        index = r * LANES + lane
        put(index, empty, (index >= count) & (index < capacity) & exists)

    warp.repeat(cdiv(sizes.most, LANES), clear)


def _prefix_sum(warp: Any, x):
    """Return the sum of `x` over the lower lanes."""
    total, distance = x, 1
    while distance < LANES:
        other = warp.shuffle(total, warp.larger(warp.lane() - distance, 0))
        total = total + warp.where(warp.lane() >= distance, other, 0)
        distance *= 2
    return total - x


def _of_segments(sizes, name):
    """Return the values that the size `name` has in all segments (`WorkItems.sizes`)."""
    return [getattr(sizes, f"{name}_{i}") for i in range(MAX_HALVES + 1)]


def order_items(warp: Any, spec: WorkItems, sizes, refs) -> None:
    """Move 32 work items of row `refs.row` to their sorted positions, one per lane.

    The sorted position of an item is the number of items in its segment that precede it. An
    item precedes another item if it has more entries, or the same number of entries and a lower
    index. The lanes read 32 other items at a time, one item per lane, and exchange these items.
    """
    lane, columns = warp.lane(), WorkItem._fields
    own = (refs.group * WARPS + warp.warp()) * LANES + lane
    exists = own < sizes.items
    own = warp.smaller(own, sizes.items - 1)
    offset, capacity = (_of_segments(sizes, name) for name in SEGMENT_SIZES[1:])
    low, room = warp.word(0), warp.word(capacity[0])
    for i, first in enumerate(offset[1:], 1):
        low = warp.where(own >= first, first, low)
        room = warp.where(own >= first, capacity[i], room)

    def at(item, column):
        return (refs.row * sizes.items + item, 4 * WORK_ITEM_INTS), (warp.word(column), 4)

    def order(item):
        """Return a sort key, which is larger for items that come earlier. Items with more
        entries come first. Among items with the same number of entries, the lower index comes
        first.
        """
        begin, end = (
            warp.fetch(warp.element(refs.table, *at(item, columns.index(name))))
            for name in ("begin", "end")
        )
        return (end - begin << NUMBER_BITS) | ((1 << NUMBER_BITS) - 1 - item)

    mine = order(own)
    first, last = warp.smallest(low), warp.largest(low + room)

    def count(r, before):
        begin = first + r * LANES
        others = order(warp.smaller(begin + lane, last - 1))
        for i in range(LANES):
            other = warp.shuffle(others, warp.word(i))
            inside = warp.below(begin + i - low, room)
            before = before + warp.number((other > mine) & inside)
        return before

    before = warp.repeat(cdiv(last - first, LANES), count, 0)
    for column in range(len(columns)):
        x = warp.fetch(warp.element(refs.table, *at(own, column)))
        warp.put(warp.element(refs.ordered, *at(low + before, column)), x, exists)


work_items = warp_kernel(make_items)
ordered_work_items = warp_kernel(order_items)
