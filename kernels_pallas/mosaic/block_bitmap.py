"""The bitmap of a selection in shared memory: a word a block, a bit a token.

`tile_block_lists.py` and `block_query_lists.py` make their lists from it: what a sort would
bring together stands in one word. One warp has up to 64 neighbouring tokens, which may belong
to several sequences; it takes these one after the other, since blocks count from the first key
of their sequence.

    for sequence in range(bitmap.sequences(tokens)):
        first_key, own, blocks = bitmap.next_sequence(tokens, first_key)
        bitmap.clear(...); bitmap.join(...)             blocks low .. low + window - 1

    bits [words, window] int32      word `token // 32`, bit `token % 32` of block `low + i`

Lanes read one entry of the selection each, `FETCHES` in flight, and set bits by atomic OR:
entries that meet in one word do no harm, and no order of them matters.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

from kernels_pallas.specs.tile import LANES

NOWHERE = 2**31 - 1  # a block after all others
FETCHES = 4  # entries of the selection that a lane waits for at once


type Word = Any  # a 32-bit value a lane, of either machine (`warp.py`, `interpreter.py`)


class Tokens(NamedTuple):
    """Of each token, by word and lane."""

    sequence: list[Word]  # first key of its sequence; -1: it may select nothing
    position: list[Word]  # in the sequence
    bound: list[Word]  # how many blocks of the sequence it may select


@dataclasses.dataclass(frozen=True)
class BlockBitmap:
    """Of `tokens` neighbours, 64 at most, of a selection: `refs` has `indices` `[B, T, Hkv, n]`,
    `position` and `key_start` `[B, T]`, int32, and the row `b` and the head `g`.

    `warp`: the instructions that the program runs on; `T`: an integer or a word; `first`: blocks
    before it do not count.
    """

    warp: Any
    T: Any
    Hkv: int
    n: int
    block: int
    tokens: int
    first: int = 0

    @property
    def words(self) -> int:
        """Words a block."""
        return -(-self.tokens // LANES)

    def load(self, refs, token0: Word, most_of=None) -> Tokens:
        """The tokens from `token0` on; `most_of`: of a token, how many blocks it may select at
        most.
        """
        warp, found = self.warp, Tokens([], [], [])
        for word in range(self.words):
            token = warp.lane() + LANES * word
            exists = warp.smaller(token0 + token, self.T - 1)
            at = refs.b * self.T + exists, 4
            last = warp.fetch(warp.element(refs.position, at))
            first_key = warp.fetch(warp.element(refs.key_start, at))
            selects = warp.below(token, self.tokens) & warp.below(token0 + token, self.T)
            selects = selects & (last >= 0)
            last = warp.larger(last, 0)
            bound = last // self.block + 1
            if most_of is not None:
                most = most_of(exists)
                selects, bound = selects & (most > 0), warp.smaller(bound, most)
            found.sequence.append(warp.where(selects, first_key, -1))
            found.position.append(last)
            found.bound.append(warp.where(selects, bound, 0))
        return found

    def sequences(self, tokens: Tokens) -> Word:
        """How many there are; tokens of one stand beside each other."""
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
        """The first key of the sequence after the one that begins at `before`, `Tokens.bound`
        of its tokens and 0 of others, and the largest of these.
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
        """Clears `32 * rows` blocks of `bits`, the address of `[words, window]`."""
        warp = self.warp

        def clear_row(row, nothing):
            for word in range(self.words):
                warp.write(bits + (row * LANES + warp.lane()) * 4, 0, 4 * window * word)
            return nothing

        warp.repeat(rows, clear_row, [])

    def join(self, bits, window: int, low, refs, token0, own, also=None, state=()):
        """Sets the bits of the blocks `low .. low + window - 1` that tokens with the bounds
        `own` selected. Returns the last `state = also(entry, token, block, selected, state)` of
        all entries of their selection, of any window (`each`).
        """
        warp = self.warp

        def visit(entry, token, block, exists, state):
            selected = exists & self.counts(block, own, token)
            offset = block - low
            warp.join(
                bits + (offset + token // LANES * window) * 4,
                warp.bit(token & (LANES - 1)),
                only=selected & warp.below(offset, window),
            )
            return also(entry, token, block, selected, state) if also else state

        return self.each(refs, token0, visit, list(state))

    def counts(self, block: Word, own: list[Word], token: Word) -> Any:
        """Whether a token with these bounds may select the block."""
        found = self.warp.below(block, self.bound(own, token))
        return found & (block >= self.first) if self.first else found

    def each(self, refs, token0, visit, state):
        """`state = visit(entry, token, block, exists, state)` for all entries of the tokens'
        selection, an entry a lane, some at a time; `exists`: whether the lane has one.
        """
        warp = self.warp

        def fetch(entry):
            token = refs.b * self.T + warp.smaller(token0 + self._token(entry), self.T - 1)
            at = (token, 4 * self.Hkv * self.n), (refs.g, 4 * self.n), (entry % self.n, 4)
            return warp.fetch(warp.element(refs.indices, *at))

        def some(step, state):
            entries = [(step * fetches + i) * LANES + warp.lane() for i in range(fetches)]
            blocks = [fetch(entry) for entry in entries]
            for entry, block in zip(entries, blocks, strict=True):
                exists = warp.below(entry, self.tokens * self.n)
                state = visit(entry, self._token(entry), block, exists, state)
            return state

        steps = -(-self.tokens * self.n // LANES)
        fetches = min(steps, FETCHES)
        return warp.repeat(-(-steps // fetches), some, state)

    def _token(self, entry: Word) -> Word:
        return self.warp.smaller(entry // self.n, self.tokens - 1)

    def bound(self, values: list[Word], token: Word) -> Word:
        """The value of a token, of `Tokens.bound` or alike."""
        warp = self.warp
        found = warp.shuffle(values[0], token & (LANES - 1))
        if self.words == 1:
            return found
        other = warp.shuffle(values[1], token & (LANES - 1))
        return warp.where(token < LANES, found, other)
