"""Computes tables of the positions of sequences in packed rows, for the kernels.

The tables are computed once per batch.

Each key has a slot ("place") in a layout in which every sequence begins at the start of a block and
of a tile. A sequence begins at a multiple of `unit`. 64 and `select_block` are divisors of `unit`.
Tiles and blocks are aligned in packed rows in the same way as in rows of one sequence.

    key       | 0            69 | 70        133 | 134 ..
    slot      | 0 ..  127       | 128 ..    191 | 192 ..
    tiles     | 0      1        | 2             | 3 ..

`place / 64` is a tile of keys, `place / select_block` a selection block, and
`place / compress_stride` the slot of a compressed token. Of all arrays, only compressed tokens and
gradients of keys are stored by slots.

| table | shape | contents |
|---|---|---|
| `Sequences` | `[B, sequences]` | the position of each sequence |
| `Tokens` | `[B, T]` | the position of each query, and the keys to which the query attends |
| `KeyTiles` | `[B, key_tiles]` | for each 64 slots, the first key, and the end of its sequence |
| `QueryTiles` | `[B, tiles]` | tiles of neighbouring queries of one sequence |

All tables are int32. Functions of this module are derived steps (`array_ops.derived`), so that
JAX and torch share them. Padding after the last sequence counts as a further sequence of length
0.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

from kernels_pallas.kernel import int32
from kernels_pallas.specs.tile import ROWS, cdiv
from nsa_core.array_ops import derived, like, masked
from nsa_core.config import NSAConfig


class Sequences(NamedTuple):
    """A table with an entry per sequence, including padding, `[B, sequences]`. Starts and slots
    never decrease."""

    start: Any  # index of its first key
    length: Any  # number of keys; 0 for padding
    end: Any  # index of its last key + 1, also for padding
    place: Any  # slot of its first key
    window: Any  # index of its first compressed token in the array without gaps (`compress`)


class Tokens(NamedTuple):
    """A table with an entry per query, `[B, T]`. Adjacent padding counts as a sequence without
    keys that begins at the first token of the padding.
    """

    position: Any  # position in its sequence; -1 for padding, which attends to no key
    key_start: Any  # index of the first key of its sequence
    place_start: Any  # the slot of that key
    compressed_start: Any  # first slot to which it attends
    compressed_end: Any  # last slot to which it attends, + 1
    window_start: Any  # index of the first key of its window
    causal_end: Any  # index of the key after its own


class KeyTiles(NamedTuple):
    """A table with an entry per tile of 64 slots, `[B, key_tiles]`. Unused tiles have no key."""

    first: Any  # key
    end: Any  # end of the sequence's keys; at most `first` if the tile has no key


class QueryTiles(NamedTuple):
    """A table of tiles, `[B, tiles]`. Each tile has neighbouring queries of one sequence, or of
    padding."""

    first: Any
    end: Any  # at most `first` if the tile has no query


@dataclasses.dataclass(frozen=True)
class Capacity:
    """The sizes of the tables, which are static and are part of the keys of plans.

    Attributes:
      B: Number of batch rows.
      T: Number of queries, which are the last of the keys.
      S: Number of keys.
      gap: Number of keys between the two halves of the queries. The halves are the chunks of a
        rank in context parallelism. `gap=0` means that there is no gap.
      max_sequences: The maximum number of sequences per row, without padding.
      max_seqlen: The maximum number of keys per sequence.
    """

    B: int
    T: int
    S: int
    max_sequences: int
    max_seqlen: int
    config: NSAConfig
    gap: int = 0

    @property
    def first_query(self) -> int:
        """The index in the key array of the first query's own token."""
        return self.S - self.T - self.gap

    @property
    def half(self) -> int:
        """The number of queries before the gap."""
        return self.T // 2 if self.gap else self.T

    def key_end(self, query: Any) -> Any:
        """Return the end of the keys up to the query with index `query - 1`. `query` may be an
        array.
        """
        return query + self.first_query + self.gap * (query > self.half)

    def span(self, first: Any, end: Any) -> Any:
        """Return the number of keys from the token of query `first` to the token of query `end -
        1`. The arguments may be arrays.
        """
        return end - first + self.gap * ((first < self.half) & (self.half < end))

    def key_of(self, ops, query):
        """Return the index in the key array of each query's own token."""
        key = query + self.first_query
        return key + ops.to_int32(query >= self.half) * self.gap if self.gap else key

    def queries_before(self, key):
        """Return the number of queries before `key`."""
        key = key - self.first_query
        if not self.gap:
            return key.clip(0, self.T)
        return key.clip(0, self.half) + (key - self.half - self.gap).clip(0, self.half)

    @property
    def sequences(self) -> int:
        """The number of sequences per row, including padding."""
        return self.max_sequences + 1

    @property
    def unit(self) -> int:
        """The divisor of each sequence's number of slots."""
        return math.lcm(ROWS, self.config.select_block)

    @property
    def places(self) -> int:
        """The number of slots per row."""
        return self._multiples(self.S, self.unit) * self.unit

    @property
    def key_tiles(self) -> int:
        """The number of tiles of 64 slots."""
        return self.places // ROWS

    @property
    def slots(self) -> int:
        """The number of slots of compressed tokens."""
        return self.places // self.config.compress_stride

    def query_tiles(self, tokens: int) -> int:
        """Return the maximum number of tiles with at most `tokens` queries."""
        return self._multiples(self.T, tokens)

    def _multiples(self, length: int, unit: int) -> int:
        """Return the maximum number of parts of `unit` tokens into which `length` tokens are
        divided, if no part contains two sequences.
        """
        return (length + (unit - 1) * min(self.sequences, length)) // unit


class Varlen:
    """The tables of packed rows, each computed on its first use. `borders` is the argument of
    `sequences`. If all tables exist already, `borders` is None and `known` has the tables by
    name.
    """

    def __init__(self, ops, capacity: Capacity, borders=None, **known: Any):
        self.ops, self.capacity, self.borders = ops, capacity, borders
        vars(self).update(known)

    def _made(self, function, *arrays, **static) -> Any:
        return self.ops.derive(function, *arrays, capacity=self.capacity, **static)

    @functools.cached_property
    def sequences(self) -> Sequences:
        """Compute the table `Sequences`.

        `borders` is int32 or int64 `[B, n + 1]`, where n is at most `max_sequences`. The first
        entry is 0, and the other entries are the ends of the sequences. An end beyond S counts as
        S.
        """
        return Sequences(*self._made(_sequences, self.borders))

    @functools.cached_property
    def tokens(self) -> Tokens:
        """The table `Tokens`, with the positions of the queries."""
        start, length, _, place, _ = self.sequences
        return Tokens(*self._made(_tokens, start, length, place))

    @functools.cached_property
    def key_tiles(self) -> KeyTiles:
        """The table `KeyTiles`, with the keys of each tile of slots."""
        start, _, end, place, _ = self.sequences
        return KeyTiles(*self._made(_key_tiles, start, end, place))

    def query_tiles(self, tokens: int) -> QueryTiles:
        """Return a table `QueryTiles` with tiles of at most `tokens` queries, in order. No tile
        has two sequences."""
        start, _, end, *_ = self.sequences
        return QueryTiles(*self._made(_query_tiles, start, end, tokens=tokens))

    def of_keys(self, x) -> Any:
        """For each key, return the entry of `x` `[B, places, ...]` at the slot of the key. The
        result is `[B, S, ...]`.
        """
        start, _, _, place, _ = self.sequences
        return self.ops.derive(taken, x, *self._made(_places_of_keys, start, place))[0]

    def in_slots(self, x) -> Any:
        """Move compressed tokens `[B, C, ...]`, which are stored without gaps, to the slots of
        their sequences, `[B, slots, ...]`. Empty slots are zero.
        """
        if x.shape[1] == 0:
            return x
        _, length, _, place, window = self.sequences
        sources = self._made(_tokens_of_slots, length, place, window)
        return self.ops.derive(taken, x, *sources)[0]

    def of_slots(self, x, count: int) -> Any:
        """For each compressed token, return the entry of `x` at the slot of the token. `x` has
        the layout of the result of `in_slots`. The result is `[B, count, ...]`.
        """
        if x.shape[1] == 0:
            return x
        *_, place, window = self.sequences
        slots = self._made(_slots_of_tokens, place, window, count=count)
        return self.ops.derive(taken, x, *slots)[0]


def sequences_of_segments(ops, segment_ids, capacity: Capacity) -> Sequences:
    """Return the table `Sequences` of packed rows.

    Each run of equal ids is one sequence, and negative ids are padding. All tokens count as padding
    if there are more than `capacity.sequences` runs or if a run is too long, so that nothing is
    written outside the tables.
    """
    return Sequences(*ops.derive(_sequences_of_segments, segment_ids, capacity=capacity))


@derived(lambda ids, *, capacity: [int32(capacity.B, capacity.sequences)] * 5)
def _sequences_of_segments(ops, ids, *, capacity):
    xp = ops.xp
    opens = xp.concatenate([ids[:, :1] == ids[:, :1], ids[:, 1:] != ids[:, :-1]], 1)
    runs = xp.cumsum(ops.to_int32(opens), 1)
    start = ops.searchsorted(runs, ops.numbers(ids, capacity.sequences) + 1, "left")
    end = ops.pad_end(start[:, 1:], 1, 1, capacity.S)
    there = ops.take_rows(ids, start.clip(0, capacity.S - 1)) >= 0
    length = xp.where(there, end - start, 0)
    longest = xp.amax(length, 1)
    fits = (runs[:, -1:] <= capacity.sequences) & (longest[:, None] <= capacity.max_seqlen)
    start, length = xp.where(fits, start, 0), xp.where(fits, length, 0)
    return _following(ops, start, length, capacity)


@derived(lambda borders, *, capacity: [int32(capacity.B, capacity.sequences)] * 5)
def _sequences(ops, borders, *, capacity):
    borders = ops.to_int32(borders).clip(0, capacity.S)
    start = ops.extend(borders, 1, capacity.sequences)
    keys = (start[:, 1:] - start[:, :-1]).clip(0, None)
    return _following(ops, start, ops.pad_end(keys, 1, 1, 0), capacity)


def _following(ops, start, length, capacity):
    """Return the table `Sequences`, given the first key and the length of each sequence."""
    config, xp = capacity.config, ops.xp
    end = ops.pad_end(start[:, 1:], 1, 1, capacity.S)
    keys = (end - start).clip(0, None)
    units = cdiv(keys, capacity.unit)
    spare = length - config.compress_block
    windows = (spare // config.compress_stride + 1).clip(0, None)
    before = lambda x: xp.cumsum(x, 1, dtype=xp.int32) - x
    return start, length, end, before(units) * capacity.unit, before(windows)


@derived(lambda start, *others, capacity: [int32(capacity.B, capacity.T)] * len(Tokens._fields))
def _tokens(ops, start, length, place, *, capacity):
    config, xp = capacity.config, ops.xp
    block, stride = config.compress_block, config.compress_stride
    key = capacity.key_of(ops, ops.numbers(start, capacity.T))
    key_start, length, place = _at_last(ops, start, key, start, length, place)
    position = xp.where(key - key_start < length, key - key_start, -1)
    slot = place // stride
    seen = ((position + (1 + stride - block)) // stride).clip(0, None)
    end = key_start + position + 1
    window = xp.maximum(key_start, end - config.window)
    return position, key_start, place, slot, slot + seen, window, end


@derived(lambda *arrays, capacity: [int32(capacity.B, capacity.key_tiles)] * 2)
def _key_tiles(ops, start, end, place, *, capacity):
    at = ops.numbers(start, capacity.key_tiles) * ROWS
    start, end, place = _at_last(ops, place, at, start, end, place)
    return (start + at - place).clip(0, capacity.S), end


@derived(lambda x, at: [like(x, *at.shape, *x.shape[2:])])
def taken(ops, x, at):
    """Return `x[b, at[b]]`, with zeros if `at` is negative."""
    return masked(ops.xp, at >= 0, ops.take_rows(x, at.clip(0, None)))


@derived(lambda *arrays, capacity: [int32(capacity.B, capacity.S)])
def _places_of_keys(ops, start, place, *, capacity):
    key = ops.numbers(start, capacity.S)
    start, place = _at_last(ops, start, key, start, place)
    return [place + key - start]


@derived(lambda *arrays, capacity: [int32(capacity.B, capacity.slots)])
def _tokens_of_slots(ops, length, place, window, *, capacity):
    config, slot = capacity.config, ops.numbers(place, capacity.slots)
    first = place // config.compress_stride
    first, length, window = _at_last(ops, first, slot, first, length, window)
    last = (slot - first) * config.compress_stride + config.compress_block
    return [ops.xp.where(last <= length, window + (slot - first), -1)]


@derived(lambda *arrays, capacity, count: [int32(capacity.B, count)])
def _slots_of_tokens(ops, place, window, *, capacity, count):
    token, stride = ops.numbers(place, count), capacity.config.compress_stride
    exists = token < window[:, -1:]  # the entry of padding
    place, window = _at_last(ops, window, token, place, window)
    return [ops.xp.where(exists, place // stride + token - window, -1)]


@derived(
    lambda *arrays, capacity, tokens: [int32(capacity.B, capacity.query_tiles(tokens))] * 2
)
def _query_tiles(ops, start, end, *, capacity, tokens):
    xp, count = ops.xp, capacity.query_tiles(tokens)
    first, end = (capacity.queries_before(x) for x in (start, end))
    tiles = cdiv((end - first).clip(0, None), tokens)
    before = xp.cumsum(tiles, 1, dtype=xp.int32) - tiles
    at = ops.numbers(start, count)
    first, end, before = _at_last(ops, before, at, first, end, before)
    first = (first + (at - before) * tokens).clip(0, capacity.T)
    return first, xp.minimum(first + tokens, end)


def _at_last(ops, starts, at, *arrays):
    """For each number in `at`, find the last entry of `starts` that is at most this number. Return
    the entries of `arrays` at the same index. Sequences without keys are never found.
    """
    index = (ops.searchsorted(starts, at, "right") - 1).clip(0, None)
    return [ops.take_rows(x, index) for x in arrays]
