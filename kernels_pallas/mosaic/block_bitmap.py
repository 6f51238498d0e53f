"""Which blocks some tokens want, as bits in shared memory: a word a block, a bit a token.

What `tile_block_lists.py` and `block_query_lists.py` make lists from. One warp does it, on the words of `warp.py`.
"""

import dataclasses
import functools
from typing import NamedTuple

from kernels_pallas.mosaic import warp
from kernels_pallas.mosaic.warp import Word

LANES = 32
NOWHERE = 2**31 - 1
FETCHES = 4  # entries of the selection that a lane waits for at once


class Tokens(NamedTuple):
    """Of each token, by word and lane; those that want nothing have no sequence."""

    sequence: list[Word]  # its first key, or -1
    position: list[Word]  # in the sequence
    bound: list[Word]  # how many blocks of the sequence it may want


@dataclasses.dataclass(frozen=True)
class BlockBitmap:
    """`tokens` neighbours, 64 at most, of the problem of `indices` `[B, T, Hkv, n]`."""

    T: int
    Hkv: int
    n: int
    block: int
    tokens: int

    @property
    def words(self) -> int:
        """Words a block."""
        return -(-self.tokens // LANES)

    def load(self, position, key_start, b: Word, token0: Word, only=None) -> Tokens:
        """The tokens from `token0` on; `position`, `key_start`: int32 `[B, T]`; `only`: of a
        token, whether it may want anything.
        """
        found = Tokens([], [], [])
        for word in range(self.words):
            token = warp.lane() + LANES * word
            exists = warp.smaller(token0 + token, self.T - 1)
            at = (b, 4 * self.T), (exists, 4)
            place = warp.fetch(warp.element(position, *at))
            first = warp.fetch(warp.element(key_start, *at))
            there = warp.below(token, self.tokens) & warp.below(token0 + token, self.T)
            there = there & (place >= 0)
            if only is not None:
                there = there & only(exists)
            place = warp.larger(place, 0)
            found.sequence.append(warp.where(there, first, -1))
            found.position.append(place)
            found.bound.append(warp.where(there, place // self.block + 1, 0))
        return found

    def sequences(self, tokens: Tokens) -> Word:
        """How many there are; tokens of one stand beside each other."""
        count, before = warp.word(0), warp.word(-1)
        for first in tokens.sequence:
            previous = warp.shuffle(first, warp.larger(warp.lane() - 1, 0))
            previous = warp.where(warp.same(warp.lane(), 0), before, previous)
            opens = (first >= 0) & warp.different(first, previous)
            count = count + warp.ones(warp.votes(opens))
            before = warp.shuffle(first, LANES - 1)
        return count

    def next_sequence(self, tokens: Tokens, before: Word) -> tuple[Word, list[Word], Word]:
        """The first key of the sequence after the one that begins at `before`, its tokens'
        `bound`, and the largest of these.
        """
        later = [warp.where(x > before, x, NOWHERE) for x in tokens.sequence]
        here = warp.smallest(functools.reduce(warp.smaller, later))
        own = [
            warp.where(warp.same(x, here), n, 0)
            for x, n in zip(tokens.sequence, tokens.bound, strict=True)
        ]
        return here, own, warp.largest(functools.reduce(warp.larger, own))

    def clear(self, bits: Word, window: int, rows: Word) -> None:
        """Clears `32 * rows` blocks of `bits`, an address of `[words, window]`."""

        def clear_row(row, nothing):
            for word in range(self.words):
                warp.write(bits + (row * LANES + warp.lane()) * 4, 0, 4 * window * word)
            return nothing

        warp.repeat(rows, clear_row, [])

    def join(self, bits, window: int, low: Word, indices, b, g, token0, own, cut=()) -> Word:
        """Sets the bits of the blocks `low .. low + window - 1` that tokens with the bounds
        `own` want. Returns each lane's first wanted block from its token's `cut` on, of any
        window, or `NOWHERE`.
        """

        def visit(_, token, block, there, state):
            wanted = there & warp.below(block, self.bound(own, token))
            place = block - low
            warp.join(
                bits + (place + token // LANES * window) * 4,
                warp.bit(token & (LANES - 1)),
                only=wanted & warp.below(place, window),
            )
            if cut:
                is_cut = wanted & (block >= self.bound(cut, token))
                state = [warp.smaller(state[0], warp.where(is_cut, block, NOWHERE))]
            return state

        (first_cut,) = self.each(indices, b, g, token0, visit, [warp.word(NOWHERE)])
        return first_cut

    def each(self, indices, b, g, token0, visit, state):
        """`state = visit(entry, token, block, there, state)` for all entries of the tokens'
        selections, an entry a lane, some at a time; `there`: whether the lane has one.
        """

        def some(step, state):
            entries = [(step * fetches + i) * LANES + warp.lane() for i in range(fetches)]
            blocks = [self._fetch(indices, b, g, token0, entry) for entry in entries]
            for entry, block in zip(entries, blocks, strict=True):
                there = warp.below(entry, self.tokens * self.n)
                state = visit(entry, self._token(entry), block, there, state)
            return state

        steps = -(-self.tokens * self.n // LANES)
        fetches = min(steps, FETCHES)
        return warp.repeat(-(-steps // fetches), some, state)

    def _token(self, entry: Word) -> Word:
        return warp.smaller(entry // self.n, self.tokens - 1)

    def _fetch(self, indices, b, g, token0, entry) -> Word:
        places = (
            (b, 4 * self.T * self.Hkv * self.n),
            (warp.smaller(token0 + self._token(entry), self.T - 1), 4 * self.Hkv * self.n),
            (g, 4 * self.n),
            (entry % self.n, 4),
        )
        return warp.fetch(warp.element(indices, *places))

    def bound(self, values: list[Word], token: Word) -> Word:
        """The value of a token, of `Tokens.bound` or alike."""
        found = warp.shuffle(values[0], token & (LANES - 1))
        if self.words == 1:
            return found
        other = warp.shuffle(values[1], token & (LANES - 1))
        return warp.where(token < LANES, found, other)
