"""Selects the blocks with the highest scores of a token.

One warp repeatedly extracts the maximum from the token's scores.

Scores of a token are in its score row in shared memory, in stripes of 32 entries, one per lane:

| stripes               | entries                                                |
|-----------------------|--------------------------------------------------------|
| first stripes         | winners of earlier chunks, if there are several chunks |
| next stripes          | scores of the blocks of the current chunk              |
| after the last stripe | carry into the next chunk                              |

Each lane has a column of the score row, and stores the best entry or the best two entries of its
column in registers. To extract a winner, a warp finds the maximum over its lanes (`redux`), and the
lowest entry among equal entries. After an extraction, all lanes read the winner's column again, one
stripe each, to find the best remaining entry of the column. If a lane stores two entries, the
column is read again only after both entries are extracted.

A warp extracts the winners of up to four tokens at once, to hide latency. With a single chunk, a
warp reads no scores if each token that it handles at once has at most `free` candidate blocks. A
token with at most `free` candidate blocks selects all of them. Finding the first best entries of
all columns costs a read and a few instructions per stripe, and more if a lane stores two entries.
Each winner costs two reductions. Reading a column again costs a read, and a reduction and a vote
per stored entry.

A warp never waits for other warps (`warp.py`). Scores are not negative, and are compared as
integers. The value -1.0 is below all scores.
"""

from typing import Any, NamedTuple

from kernels_pallas.mosaic import warp
from kernels_pallas.mosaic.operands import ROWS
from kernels_pallas.specs.scores import LANES, STRIPE_WORDS, Scores, winner_slots

NO_BLOCK = 1 << 30  # in place of a block, sorts after all blocks
NO_SCORE = warp.integer(-1.0)  # in place of a score
TAKEN = -(2**31)  # in place of an extracted score, below `NO_SCORE`
TWO_KNOWN = 8  # with more stripes, a lane stores only its best entry (docs/kernels/scores.md)
WARP_ROWS = 16  # number of rows that a warp has in a product of 64 rows
TOGETHER = 4  # maximum number of tokens whose winners a warp extracts at once


class WarpTopK(NamedTuple):
    """The operations of the warps of a CTA on their score rows.

    In all functions, `scores` `[score_rows, words]` and `winners` `[score_rows, winner_slots]` are
    in shared memory. `wg` is the index of the warpgroup, which has its own tokens. `k` is the index
    of the chunk.

    Attributes:
      warp: The module `warp`, or an object with the same functions if kernels are interpreted.
    """

    spec: Scores
    warp: Any = warp

    @property
    def several_chunks(self) -> bool:
        return self.spec.chunks > 1

    @property
    def winner_slots(self) -> int:
        return winner_slots(self.spec.free)

    @property
    def front(self) -> int:
        """The number of entries that are reserved for the winners of earlier chunks."""
        return self.winner_slots if self.several_chunks else 0

    @property
    def chunk(self) -> int:
        return self.spec.tiling.chunk

    @property
    def stripes(self) -> int:
        """The number of stripes of 32 entries per score row."""
        return (self.front + self.chunk) // LANES

    @property
    def words(self) -> int:
        """The number of words per score row."""
        return STRIPE_WORDS * self.stripes + 2

    @property
    def heads(self) -> int:
        return self.spec.tiling.heads

    @property
    def tokens(self) -> int:
        """The number of tokens per warp."""
        return WARP_ROWS // self.heads

    def _own_rows(self, wg) -> list:
        """Return the score rows of this warp."""
        warp = self.warp
        first = wg * (ROWS // self.heads) + warp.warp() * self.tokens
        return [first + token for token in range(self.tokens)]

    def _score_row(self, scores, number):
        warp = self.warp
        return warp.shared(scores) + number * (4 * self.words)

    def _winners(self, winners, number):
        warp = self.warp
        return warp.shared(winners) + number * (4 * self.winner_slots)

    def begin_chunk(self, scores, wg, k) -> None:
        """Start the score rows of chunk `k` with the carry of the previous chunk. The first
        chunk has no carry and no earlier winners.
        """
        warp = self.warp
        lane, is_first = warp.lane(), warp.same(k, 0)
        warp.sync()
        for number in self._own_rows(wg):
            score_row = self._score_row(scores, number)
            carried = warp.where(
                is_first, 0, warp.read(score_row, 4 * STRIPE_WORDS * self.stripes)
            )
            warp.sync()
            start = 4 * STRIPE_WORDS * self.front // LANES
            warp.write(score_row, carried, start, only=warp.same(lane, 0))
            for stripe in range(self.front // LANES):
                warp.write(
                    score_row + lane * 4, NO_SCORE, 4 * STRIPE_WORDS * stripe, only=is_first
                )
        warp.sync()

    def add(self, scores, wg, place, own, following) -> None:
        """Write the scores of 64 blocks to the score rows.

        `place` is the index of the first of the 64 blocks in the chunk.

        `own` and `following` are sums over phases, in the layout of a product's registers. A lane
        has numbers of one token, or of two tokens at a distance of 8 rows. For each token and each
        group `j` of 8 columns, the lane has the two columns from `8 * j + 2 * (lane % 4)` on. The
        score of a block is the block's `own` plus `following` of the previous block.
        """
        warp = self.warp
        lane = warp.lane()
        sharing = min(self.heads, 8)  # lanes, at a distance of 4, with rows of one token
        width = 8 * sharing  # number of columns that these lanes divide, one pair per lane
        inner = lane & (width // 2 - 1)
        first = warp.same(inner, 0)
        left = (lane & (31 ^ (width // 2 - 1))) | ((lane + 31) & (width // 2 - 1))
        column = inner * 2
        if width > LANES:
            column = column + (column >> 5) * (STRIPE_WORDS - LANES)
        start = (place >> 5) * STRIPE_WORDS + STRIPE_WORDS * self.front // LANES
        token = (lane >> 2) // self.heads
        tokens = [token, token + 8 // self.heads][: len(own)]
        base = wg * (ROWS // self.heads) + warp.warp() * self.tokens
        rows = [self._score_row(scores, base + token) + start * 4 for token in tokens]
        # The lane that writes a carry, the lane that reads the carry and the lane that
        # overwrites it may differ.
        warp.sync()
        carries = [warp.real(warp.read(row)) for row in rows]
        warp.sync()
        for score_row, carry, mine, over in zip(rows, carries, own, following, strict=True):
            mine, over = (_sums_of_heads(warp, x, lane, sharing) for x in (mine, over))
            for m, ((a, b), (x, y)) in enumerate(zip(mine, over, strict=True)):
                turned = warp.real(warp.shuffle(warp.bits(y), left))
                before = warp.where(first, carry, turned)
                carry = turned
                at = width * m // LANES * STRIPE_WORDS + width * m % LANES
                warp.write_pair(score_row + column * 4, a + before, b + x, 4 * at)
            warp.write(
                score_row, warp.bits(carry), 4 * STRIPE_WORDS * ROWS // LANES, only=first
            )

    def extract(self, scores, winners, own_block, base_block, wg, k, begin) -> None:
        """Write the best blocks of the score rows of a chunk to `winners`.

        Of blocks with equal scores, the block with the lower index comes first. `own_block` and
        `base_block` `[score_rows]` are as in `specs.scores.best_blocks`. `begin` is the first block
        of the tile.
        """
        warp = self.warp
        rows, together = self._own_rows(wg), min(self.tokens, TOGETHER)

        def some(i):
            numbers = [number + i * together for number in rows[:together]]
            self._extract(numbers, scores, winners, own_block, base_block, k, begin)

        if together == self.tokens:
            some(0)
        else:
            warp.repeat(self.tokens // together, some)

    def _extract(self, numbers, scores, winners, own_block, base_block, k, begin) -> None:
        """Run `extract` for the score rows with the given indices."""
        warp = self.warp
        spec, lane, front = self.spec, warp.lane(), self.front
        places = [lane + LANES * t for t in range(self.winner_slots // LANES)]
        warp.sync()
        state, columns = [], []
        for number in numbers:
            score_row, slots = self._score_row(scores, number), self._winners(winners, number)
            shift = warp.fetch_int(base_block, number) - begin - k * self.chunk
            low = shift + spec.num_initial
            final = warp.fetch_int(own_block, number)
            count = warp.larger(shift + (final - spec.num_local) - low + 1, 0)
            column = _Columns(self, score_row, slots, shift, low + front, count)
            columns.append(column)
            nothing = [warp.word(NO_SCORE) for _ in places]
            state.append([column.best(), nothing, [warp.word(0) for _ in places]])

        def one(i, state):
            hits = [warp.same(place, i) for place in places]
            taken = [_take(warp, hits, *now) for now in state]
            return [
                [column.refilled(entry, most, best), values, entries]
                for column, (entry, most, best, values, entries) in zip(
                    columns, taken, strict=True
                )
            ]

        # `all_win` is true if every one of these tokens selects all its candidates.
        all_win = warp.same(int(not self.several_chunks), 1)
        for column in columns:
            all_win = all_win & (column.count <= spec.free)
        state = warp.repeat(warp.where(all_win, 0, spec.free), one, state)
        found = []
        for column, (_, values, entries) in zip(columns, state, strict=True):
            blocks = []
            for place, value, entry in zip(places, values, entries, strict=True):
                block = warp.where(value < 0, NO_BLOCK, column.block(entry))
                of_few = warp.where(place < column.count, place + spec.num_initial, NO_BLOCK)
                blocks.append(warp.where(all_win, of_few, block))
            found.append((column, blocks, values))
        warp.sync()  # all lanes have read the score rows that are now overwritten
        for column, blocks, values in found:
            for t, (block, value) in enumerate(zip(blocks, values, strict=True)):
                warp.write(column.slots + lane * 4, block, 4 * LANES * t)
                if front:
                    warp.write(column.score_row + lane * 4, value, 4 * STRIPE_WORDS * t)
        warp.sync()

    def write(self, winners, own_block, selection, wg, b, first, g, length, end) -> None:
        """Add the forced blocks to the winners and write all selected blocks to `selection` in
        ascending order. Blocks are distinct, so the slot of a block is the number of selected
        blocks with a lower index. `selection` is `[B, T, Hkv, n]`, and `length` is T. The tokens of
        the tile are among `first .. end - 1`.
        """
        warp = self.warp
        spec, lane = self.spec, warp.lane()
        n, free, initial = spec.n, spec.free, spec.num_initial
        warp.sync()
        for number in self._own_rows(wg):
            slots = self._winners(winners, number)
            final = warp.fetch_int(own_block, number)
            blocks = []
            for t in range(-(-n // LANES)):
                place = lane + LANES * t
                block = warp.word(NO_BLOCK)
                if LANES * t < free:
                    block = warp.read(slots + warp.smaller(place, self.winner_slots - 1) * 4)
                place = place - free
                local = final - place + initial
                local = warp.where(local >= initial, local, NO_BLOCK)
                forced = warp.where(place <= final, place, NO_BLOCK)
                forced = warp.where(place < initial, forced, local)
                block = warp.where(place < 0, block, forced)
                blocks.append(warp.where(place < n - free, block, NO_BLOCK))
            ranks, filled = [warp.word(0) for _ in blocks], warp.word(0)
            for p in range(n):
                other = warp.shuffle(blocks[p // LANES], p % LANES)
                filled = filled + warp.number(other < NO_BLOCK)
                ranks = [
                    rank + warp.number(other < block)
                    for rank, block in zip(ranks, blocks, strict=True)
                ]
            token = first + number
            exists = token < end
            row = (b * length + token, 4 * n * spec.Hkv), (g, 4 * n)
            for t, (rank, block) in enumerate(zip(ranks, blocks, strict=True)):
                place = lane + LANES * t
                here = warp.element(selection, *row, (rank, 4))
                warp.put(here, block, only=exists & (block < NO_BLOCK))
                empty = exists & (place >= filled) & (place < n)
                warp.put(warp.element(selection, *row, (place, 4)), -1, only=empty)


class _Columns(NamedTuple):
    """The columns of a score row. Each lane has one column. The index of an entry is `32 *
    stripe + column`.

    Attributes:
      of: The sizes of score rows.
      score_row: Address of the score row.
      slots: Address to which the selected entries are written.
      shift: Index of the entry of the first block in the token's sequence, minus `of.front`.
      low: The first entry that may be selected.
      count: The number of entries that may be selected.
    """

    of: WarpTopK
    score_row: warp.Word
    slots: warp.Word
    shift: warp.Word
    low: warp.Word
    count: warp.Word

    @property
    def known(self) -> int:
        """How many of the best entries of its column a lane stores."""
        return 2 if self.of.stripes <= TWO_KNOWN else 1

    def best(self) -> list:
        """Return the score and the stripe of the best entry of a lane's column. If a lane
        stores two entries, also return the score and the stripe of the second best entry.
        """
        warp = self.of.warp
        lane, front = warp.lane(), self.of.front
        best, second = warp.word(NO_SCORE), warp.word(NO_SCORE)
        at, second_at = warp.word(0), warp.word(0)
        for row in range(self.of.stripes):
            value = warp.read(self.score_row + lane * 4, 4 * STRIPE_WORDS * row)
            if row >= front // LANES:
                free = warp.below(lane + LANES * row - self.low, self.count)
                value = warp.where(free, value, NO_SCORE)
            first, better = value > best, value > second
            second_at = warp.where(first, at, warp.where(better, row, second_at))
            second = warp.larger(warp.smaller(value, best), second)
            best, at = warp.larger(value, best), warp.where(first, row, at)
        return [best, at, second, second_at][: 2 * self.known]

    def refilled(self, entry, most, known) -> list:
        """Return the entries that a lane stores, `known`, after `entry` was extracted with the
        score `most`. If a lane has no stored entry left, the warp finds the best remaining
        entries of the lane's column.
        """
        warp = self.of.warp
        if self.of.stripes <= self.known:
            return known

        def refill(_, known):
            lane, front, stripes = warp.lane(), self.of.front, self.of.stripes
            column, row = entry & 31, entry >> 5
            place = self.score_row + (column + lane * STRIPE_WORDS) * 4
            if stripes < LANES:  # the other lanes read memory that no lane writes meanwhile
                place = warp.where(lane < stripes, place, self.slots)
            value = warp.read(place)
            left = warp.below(column + lane * LANES - self.low, self.count)
            if front:
                left = left | (lane < front // LANES)
            if stripes < LANES:
                left = left & (lane < stripes)
            left = left & ((value < most) | (warp.same(value, most) & (lane > row)))
            value = warp.where(left, value, NO_SCORE)
            found = []
            for _ in range(self.known):
                best = warp.largest(value)
                stripe = warp.first_equal(value, best)
                value = warp.where(warp.same(lane, stripe), NO_SCORE, value)
                found += [best, stripe]
            owner = warp.same(lane, column)
            return [warp.where(owner, new, old) for new, old in zip(found, known, strict=True)]

        if self.known == 1:
            return refill(0, known)
        no_more = warp.different(warp.votes(warp.same(known[0], TAKEN)), 0)
        return warp.repeat(warp.number(no_more), refill, known)

    def block(self, entry):
        """Return the block of an entry."""
        warp = self.of.warp
        block = entry - self.of.front - self.shift
        if self.of.front:
            slot = warp.smaller(entry, self.of.winner_slots - 1)
            block = warp.where(entry < self.of.front, warp.read(self.slots + slot * 4), block)
        return block


def _take(warp, hits, known, values, entries):
    """Extract the next winner of a score row.

    Return the winner's entry and score, and the stored entries that remain. Also return the updated
    `values` and `entries`. If element i of `hits` is true in a lane, element i of the returned
    `values` and `entries` is the winner.
    """
    best, at = known[:2]
    mine = at * LANES + warp.lane()
    most = warp.largest(best)
    entry = warp.smallest(warp.where(warp.same(best, most), mine, 2**31 - 1))
    if len(known) > 2:
        owner, (second, second_at) = warp.same(mine, entry), known[2:]
        best, at = warp.where(owner, second, best), warp.where(owner, second_at, at)
        known = [best, at, warp.where(owner, TAKEN, second), second_at]
    values = [warp.where(hit, most, x) for hit, x in zip(hits, values, strict=True)]
    entries = [warp.where(hit, entry, x) for hit, x in zip(hits, entries, strict=True)]
    return entry, most, known, values, entries


def _sums_of_heads(warp, pairs, lane, sharing: int):
    """Sum pairs of columns over `sharing` lanes at a distance of 4. Of every `sharing` pairs, each
    lane keeps the sums of one pair.
    """
    distance = 4
    while distance < 4 * sharing:
        lower = warp.same(lane & distance, 0)
        pairs = [
            [
                warp.where(lower, x, y) + warp.exchange(warp.where(lower, y, x), distance)
                for x, y in zip(low, high, strict=True)
            ]
            for low, high in zip(pairs[::2], pairs[1::2], strict=True)
        ]
        distance *= 2
    return pairs
