"""The block scores of a token, a line of shared memory, and the warp that it belongs to.

All here is what one warp does (`warp.py`), so nothing waits for another warp: it adds the heads
of a token and writes the sums to its line, takes out the best of the line, and writes the
selection. Places and values are 32-bit words of each lane; scores, which are not negative, are
compared as integers, -1.0 is below all of them.

A line has `front` entries for the winners of the chunks before, where a problem has several,
then those of the chunk, and the carry into the next one. 2 words of padding follow every 32
entries: lanes that read a column, one row of 32 each, meet in a bank two by two only.
"""

import dataclasses

from kernels_pallas.mosaic import warp
from kernels_pallas.mosaic.operands import ROWS
from kernels_pallas.mosaic.scores import NO_BLOCK, Scores

LANES = 32
ROW = LANES + 2  # words of 32 entries
MOST = LANES * LANES  # entries: a lane keeps one column, a column has at most 32
NOTHING = warp.integer(-1.0)  # in place of a score


def winners_kept(free: int) -> int:
    """Words for the winners of a line, up to a multiple of the lanes."""
    return -(-max(free, 1) // LANES) * LANES


def entries_in(words: int) -> int:
    """How many entries a line of so many words has."""
    return (words - 2) // ROW * LANES


@dataclasses.dataclass(frozen=True)
class ScoreLines:
    """The lines of a tile.

    In all functions: `scores` `[lines, words]` and `winners` `[lines, kept]` in shared memory;
    `wg`, the number of the warpgroup, whose 64 rows are its own; `k`, that of the chunk.
    """

    spec: Scores

    @property
    def several(self) -> bool:
        return self.spec.chunks > 1

    @property
    def kept(self) -> int:
        return winners_kept(self.spec.free)

    @property
    def front(self) -> int:
        return self.kept if self.several else 0

    @property
    def chunk(self) -> int:
        return self.spec.cut.chunk

    @property
    def rows(self) -> int:
        """Rows of 32 entries of a line."""
        return (self.front + self.chunk) // LANES

    @property
    def words(self) -> int:
        return ROW * self.rows + 2

    @property
    def heads(self) -> int:
        return self.spec.cut.heads

    @property
    def tokens(self) -> int:
        """Tokens of a warp, which has 16 rows."""
        return 16 // self.heads

    def _numbers(self, wg) -> list:
        """Which lines are this warp's."""
        first = wg * (ROWS // self.heads) + warp.warp() * self.tokens
        return [first + token for token in range(self.tokens)]

    def _line(self, scores, number):
        return warp.shared(scores) + number * (4 * self.words)

    def _winners(self, winners, number):
        return warp.shared(winners) + number * (4 * self.kept)

    def open(self, scores, wg, k) -> None:
        """Begins a chunk with the carry of the one before; the first has no winners before."""
        lane, new = warp.lane(), warp.same(k, 0)
        warp.sync()
        for number in self._numbers(wg):
            line = self._line(scores, number)
            carried = warp.where(new, 0, warp.read(line, 4 * ROW * self.rows))
            warp.sync()
            start = 4 * ROW * self.front // LANES
            warp.write(line, carried, start, only=warp.same(lane, 0))
            for row in range(self.front // LANES):
                warp.write(line + lane * 4, NOTHING, 4 * ROW * row, only=new)
        warp.sync()

    def add(self, scores, wg, place, own, following) -> None:
        """Writes the scores of 64 blocks from `place` on in the chunk.

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
            column = column + (column >> 5) * (ROW - LANES)
        start = (place >> 5) * ROW + ROW * self.front // LANES
        token = (lane >> 2) // self.heads
        tokens = [token, token + 8 // self.heads][: len(own)]
        base = wg * (ROWS // self.heads) + warp.warp() * self.tokens
        for token, mine, over in zip(tokens, own, following, strict=True):
            line = self._line(scores, base + token) + start * 4
            mine, over = (_sums_of_heads(x, lane, sharing) for x in (mine, over))
            carry = warp.real(warp.read(line))
            for m, ((a, b), (x, y)) in enumerate(zip(mine, over, strict=True)):
                turned = warp.real(warp.shuffle(warp.bits(y), left))
                before = warp.where(first, carry, turned)
                carry = turned
                at = width * m // LANES * ROW + width * m % LANES
                warp.write_pair(line + column * 4, a + before, b + x, 4 * at)
            warp.write(line, warp.bits(carry), 4 * ROW * ROWS // LANES, only=first)

    def extract(self, scores, winners, own, base, wg, k, begin) -> None:
        """Takes the best out of the lines of a chunk, ties to the lower block.

        A lane knows the best of its column, the entries `32 * row + lane`. After each winner
        its column is read once more, a row a lane. `own` and `base` `[lines]`: as in
        `best_blocks`; `begin`: the first block of the tile. All lines of a warp go together:
        one's latency hides another's.
        """
        spec, lane, front = self.spec, warp.lane(), self.front
        parts = self.kept // LANES
        warp.sync()
        state, fixed = [], []
        for number in self._numbers(wg):
            line, known = self._line(scores, number), self._winners(winners, number)
            shift = warp.fetch(warp.element(base, (number, 4))) - begin - k * self.chunk
            low = shift + spec.num_initial
            final = warp.fetch(warp.element(own, (number, 4)))
            count = warp.larger(shift + (final - spec.num_local) - low + 1, 0)
            low = low + front
            top, at = warp.word(NOTHING), warp.word(0)
            for row in range(self.rows):
                value = warp.read(line + lane * 4, 4 * ROW * row)
                if row >= front // LANES:
                    free = warp.below(lane + LANES * row - low, count)
                    value = warp.where(free, value, NOTHING)
                better = value > top
                top, at = warp.larger(value, top), warp.where(better, row, at)
            values = [warp.word(NOTHING)] * (front // LANES)
            state.append([top, at, [warp.word(NO_BLOCK)] * parts, values])
            fixed.append((line, known, shift, low, count))

        def one(i, state):
            return [self._take(i, *each, *now) for each, now in zip(fixed, state, strict=True)]

        state = warp.repeat(spec.free, one, state)
        warp.sync()
        for (line, known, *_), (_, _, indices, values) in zip(fixed, state, strict=True):
            for t, index in enumerate(indices):
                warp.write(known + lane * 4, index, 4 * LANES * t)
            for t, value in enumerate(values):
                warp.write(line + lane * 4, value, 4 * ROW * t)
        warp.sync()

    def _take(self, i, line, known, shift, low, count, top, at, indices, values):
        """Winner `i` of a line: `[top, at, indices, values]` without and with it."""
        lane, front = warp.lane(), self.front
        most = warp.largest(top)
        entry = warp.smallest(warp.where(warp.same(top, most), at * LANES + lane, 2**31 - 1))
        column, row = entry & 31, entry >> 5
        block = entry - front - shift
        if front:
            before = warp.read(known + warp.smaller(entry, self.kept - 1) * 4)
            block = warp.where(entry < front, before, block)
        block = warp.where(most < 0, NO_BLOCK, block)
        hits = [warp.same(lane + LANES * t, i) for t in range(len(indices))]
        indices = [warp.where(hit, block, x) for hit, x in zip(hits, indices, strict=True)]
        if front:
            values = [warp.where(hit, most, x) for hit, x in zip(hits, values, strict=True)]
        place = line + (column + warp.smaller(lane, self.rows - 1) * ROW) * 4
        value = warp.read(place)
        free = warp.below(column + lane * LANES - low, count)
        if front:
            free = free | (lane < front // LANES)
        if self.rows < LANES:
            free = free & (lane < self.rows)
        gone = warp.same(lane, row)
        warp.write(place, NOTHING, only=gone)
        value = warp.where(gone, NOTHING, warp.where(free, value, NOTHING))
        next_top = warp.largest(value)
        next_at = warp.first_equal(value, next_top)
        owner = warp.same(lane, column)
        top, at = warp.where(owner, next_top, top), warp.where(owner, next_at, at)
        return [top, at, indices, values]

    def write(self, winners, own, out, wg) -> None:
        """Adds the forced blocks to the winners and writes all to `out` `[n, lines]`.

        They are distinct: the place of a block is the number of smaller ones.
        """
        spec, lane = self.spec, warp.lane()
        n, free, initial = spec.n, spec.free, spec.num_initial
        warp.sync()
        for number in self._numbers(wg):
            known = self._winners(winners, number)
            final = warp.fetch(warp.element(own, (number, 4)))
            blocks = []
            for t in range(-(-n // LANES)):
                place = lane + LANES * t
                block = warp.word(NO_BLOCK)
                if LANES * t < free:
                    block = warp.read(known + warp.smaller(place, self.kept - 1) * 4)
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
            step = 4 * spec.lines
            for t, (rank, block) in enumerate(zip(ranks, blocks, strict=True)):
                place = lane + LANES * t
                here = warp.element(out, (rank, step), (number, 4))
                warp.put(here, block, only=block < NO_BLOCK)
                empty = (place >= filled) & (place < n)
                warp.put(warp.element(out, (place, step), (number, 4)), -1, only=empty)


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
