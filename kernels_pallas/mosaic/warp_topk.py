"""Top-k of a token's block scores by one warp: iterated extraction of the maximum.

Scores of a token stand in its score row in shared memory, in stripes of 32 entries, one a lane:

    stripe 0        winners of the chunks before, if there are several chunks
    stripe 1 ...    scores of the blocks of this chunk
    after the last  the carry into the next chunk

A lane owns a column and knows its best entry. To extract one winner, a warp takes the maximum
of its lanes (`redux`) and the lowest entry among equals; then it reads the winner's column once
more, a stripe a lane, for the next best of that column.

Cost: `stripes` reads a lane once, then for each winner a read, three reductions and a vote,
however many scores there are. Bound by the latency of shared memory: a warp extracts for all
its tokens at once, so that one's latency hides another's.

All of it is what one warp does (`warp.py`), so nothing waits for another warp. Scores, which
are not negative, are compared as integers; -1.0 is below all of them.
"""

import dataclasses

from kernels_pallas.mosaic import warp
from kernels_pallas.mosaic.operands import ROWS
from kernels_pallas.mosaic.scores_common import NO_BLOCK
from kernels_pallas.specs.scores import LANES, STRIPE_WORDS, Scores, winner_slots

NO_SCORE = warp.integer(-1.0)  # in place of a score
WARP_ROWS = 16  # of a product of 64 rows


@dataclasses.dataclass(frozen=True)
class WarpTopK:
    """What the warps of a CTA do with their score rows.

    In all functions: `scores` `[score_rows, words]` and `winners` `[score_rows, winner_slots]`
    are in shared memory; `wg` is the number of the warpgroup, whose tokens are its own; `k` is
    that of the chunk.
    """

    spec: Scores

    @property
    def several_chunks(self) -> bool:
        return self.spec.chunks > 1

    @property
    def winner_slots(self) -> int:
        return winner_slots(self.spec.free)

    @property
    def front(self) -> int:
        """Entries for the winners of the chunks before."""
        return self.winner_slots if self.several_chunks else 0

    @property
    def chunk(self) -> int:
        return self.spec.tiling.chunk

    @property
    def stripes(self) -> int:
        """Stripes of 32 entries of a score row."""
        return (self.front + self.chunk) // LANES

    @property
    def words(self) -> int:
        """Words of a score row."""
        return STRIPE_WORDS * self.stripes + 2

    @property
    def heads(self) -> int:
        return self.spec.tiling.heads

    @property
    def tokens(self) -> int:
        """Tokens of a warp."""
        return WARP_ROWS // self.heads

    def _own_rows(self, wg) -> list:
        """Which score rows are this warp's."""
        first = wg * (ROWS // self.heads) + warp.warp() * self.tokens
        return [first + token for token in range(self.tokens)]

    def _score_row(self, scores, number):
        return warp.shared(scores) + number * (4 * self.words)

    def _winners(self, winners, number):
        return warp.shared(winners) + number * (4 * self.winner_slots)

    def begin_chunk(self, scores, wg, k) -> None:
        """Begins a chunk with the carry of the one before; the first has no winners before."""
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
        """Puts the scores of 64 blocks in the score rows, from `place` on in the chunk.

        `own` and `following` are sums over phases, as a product's registers have them: by token
        of the lane (one, or two 8 rows apart) and 8 columns the pair of neighbours `8 * j +
        2 * (lane % 4)`. A block's score is its `own` and the `following` of the one before.
        """
        lane = warp.lane()
        sharing = min(self.heads, 8)  # lanes, 4 apart, that have rows of one token
        width = 8 * sharing  # columns that these lanes share out, a pair each
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
        warp.sync()  # the lane that wrote a carry is not the one that reads it,
        carries = [warp.real(warp.read(row)) for row in rows]
        warp.sync()  # nor is the one that writes over it
        for score_row, carry, mine, over in zip(rows, carries, own, following, strict=True):
            mine, over = (_sums_of_heads(x, lane, sharing) for x in (mine, over))
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
        """Takes the best out of the score rows of a chunk, ties to the lower block.

        `own_block` and `base_block` `[score_rows]`: as in `specs.scores.best_blocks`; `begin`:
        the first block of the tile.
        """
        spec, lane, front = self.spec, warp.lane(), self.front
        slot_words = self.winner_slots // LANES
        warp.sync()
        state, fixed = [], []
        for number in self._own_rows(wg):
            score_row, slots = self._score_row(scores, number), self._winners(winners, number)
            shift = warp.fetch(warp.element(base_block, (number, 4))) - begin - k * self.chunk
            low = shift + spec.num_initial
            final = warp.fetch(warp.element(own_block, (number, 4)))
            count = warp.larger(shift + (final - spec.num_local) - low + 1, 0)
            low = low + front
            top, at = warp.word(NO_SCORE), warp.word(0)
            for row in range(self.stripes):
                value = warp.read(score_row + lane * 4, 4 * STRIPE_WORDS * row)
                if row >= front // LANES:
                    free = warp.below(lane + LANES * row - low, count)
                    value = warp.where(free, value, NO_SCORE)
                better = value > top
                top, at = warp.larger(value, top), warp.where(better, row, at)
            values = [warp.word(NO_SCORE)] * (front // LANES)
            state.append([top, at, [warp.word(NO_BLOCK)] * slot_words, values])
            fixed.append((score_row, slots, shift, low, count))

        warp.sync()  # a lane read its column; the lane of a stripe writes to it

        def one(i, state):
            return [self._take(i, *each, *now) for each, now in zip(fixed, state, strict=True)]

        state = warp.repeat(spec.free, one, state)
        warp.sync()
        for (score_row, slots, *_), (_, _, indices, values) in zip(fixed, state, strict=True):
            for t, index in enumerate(indices):
                warp.write(slots + lane * 4, index, 4 * LANES * t)
            for t, value in enumerate(values):
                warp.write(score_row + lane * 4, value, 4 * STRIPE_WORDS * t)
        warp.sync()

    def _take(self, i, score_row, slots, shift, low, count, top, at, indices, values):
        """Winner `i` of a score row: `[top, at, indices, values]` without and with it."""
        lane, front = warp.lane(), self.front
        most = warp.largest(top)
        entry = warp.smallest(warp.where(warp.same(top, most), at * LANES + lane, 2**31 - 1))
        column, row = entry & 31, entry >> 5
        block = entry - front - shift
        if front:
            before = warp.read(slots + warp.smaller(entry, self.winner_slots - 1) * 4)
            block = warp.where(entry < front, before, block)
        block = warp.where(most < 0, NO_BLOCK, block)
        hits = [warp.same(lane + LANES * t, i) for t in range(len(indices))]
        indices = [warp.where(hit, block, x) for hit, x in zip(hits, indices, strict=True)]
        if front:
            values = [warp.where(hit, most, x) for hit, x in zip(hits, values, strict=True)]
        place = score_row + (column + lane * STRIPE_WORDS) * 4
        if self.stripes < LANES:  # the other lanes read what nobody writes to now
            place = warp.where(lane < self.stripes, place, slots)
        value = warp.read(place)
        free = warp.below(column + lane * LANES - low, count)
        if front:
            free = free | (lane < front // LANES)
        if self.stripes < LANES:
            free = free & (lane < self.stripes)
        gone = warp.same(lane, row)
        warp.write(place, NO_SCORE, only=gone)
        value = warp.where(gone, NO_SCORE, warp.where(free, value, NO_SCORE))
        next_top = warp.largest(value)
        next_at = warp.first_equal(value, next_top)
        owner = warp.same(lane, column)
        top, at = warp.where(owner, next_top, top), warp.where(owner, next_at, at)
        return [top, at, indices, values]

    def write(self, winners, own_block, selection, wg, b, tile, g, length) -> None:
        """Adds the forced blocks to the winners and writes them, ascending.

        They are distinct: the place of a block is the number of smaller ones. `selection`:
        `[B, T, Hkv, n]`; `length` is T.
        """
        spec, lane = self.spec, warp.lane()
        n, free, initial = spec.n, spec.free, spec.num_initial
        warp.sync()
        for number in self._own_rows(wg):
            slots = self._winners(winners, number)
            final = warp.fetch(warp.element(own_block, (number, 4)))
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
            token = tile * spec.tile.tokens + number
            exists = token < length
            row = (b * length + token, 4 * n * spec.Hkv), (g, 4 * n)
            for t, (rank, block) in enumerate(zip(ranks, blocks, strict=True)):
                place = lane + LANES * t
                here = warp.element(selection, *row, (rank, 4))
                warp.put(here, block, only=exists & (block < NO_BLOCK))
                empty = exists & (place >= filled) & (place < n)
                warp.put(warp.element(selection, *row, (place, 4)), -1, only=empty)


def _sums_of_heads(pairs, lane, sharing: int):
    """Pairs summed over `sharing` lanes, 4 apart; each keeps those of one in `sharing`."""
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
