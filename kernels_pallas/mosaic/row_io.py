"""Loads and stores of one value a row, for the 64 query rows of a tile, without shared memory.

    TileRows       rows of neighbouring tokens: their addresses follow from the first one
    GatheredRows   rows of tokens from a list: each lane reads its own address

Row `r` is query head `r % G` of the `r // G`-th token. Values are in registers, `[64]`, laid
out as `operands.PER_ROW`: a quad of lanes holds each row, and its first lane stores. Addresses
are computed by lane on the words of `warp.py`; Pallas' interpreter indexes the arrays instead.
"""

import dataclasses
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from kernels_pallas.mosaic import warp
from kernels_pallas.mosaic.operands import (
    PER_ROW,
    ROW_STATS,
    ROWS,
    div,
    rem,
    row_index,
    with_sign_bit,
)
from kernels_pallas.mosaic.softmax import SoftmaxStats
from kernels_pallas.mosaic.warp import Word
from kernels_pallas.specs.selected import first_near

QUAD = 4  # lanes that hold the same row


@dataclasses.dataclass(frozen=True)
class GatheredRows:
    """Rows of the `tokens` tokens, `group` rows each, that a list names for a step."""

    group: int
    interpret: bool

    @property
    def tokens(self) -> int:
        """Of a step."""
        return ROWS // self.group

    def load_entries(self, lists, first, end):
        """Of each row, the entry `first + row // group` of an int32 list that ends at `end`;
        past it the last one.
        """
        if self.interpret:
            entries = [lists[jnp.minimum(first + i, end - 1)] for i in range(self.tokens)]
            return self._repeated(entries)

        def load(row, refs, words):
            (lists,), (first, end) = refs, words
            index = warp.smaller(first + self._token(row), end - 1)
            return [warp.fetch(warp.element(lists, (index, 4)))]

        return _by_row(load, [lists], [first, end], [], [jnp.int32])[0]

    def prefetch_entries(self, lists, first, end):
        """Prefetches what `load_entries` will read into L1."""
        if self.interpret:
            return

        def prefetch(row, refs, words):
            (lists,), (first, end) = refs, words
            index = warp.larger(warp.smaller(first + self._token(row), end - 1), 0)
            warp.prefetch(warp.element(lists, (index, 4)))

        _by_row(prefetch, [lists], [first, end], [], [])

    def softmax_stats(self, row_stats, b, kv_head, token, stats_tiles: tuple):
        """Of `token`, by row, what dq needs of `row_stats`; `stats_tiles`: the tokens of a
        query tile there, and how many of them there are.
        """
        stats_tile, count = stats_tiles
        if self.interpret:
            stats = []
            for i in range(self.tokens):
                own = token[i * self.group]
                first = rem(own, stats_tile) * self.group
                rows = pl.ds(first, self.group)
                own = row_stats.at[b, kv_head, div(own, stats_tile), rows]
                stats.append(own[...])
            stats = jnp.concatenate(stats)
            stats = jnp.pad(stats, ((0, ROWS - stats.shape[0]), (0, 0)))
            shift, delta = stats[:, 0], stats[:, 1]
            sign = with_sign_bit(jnp.ones_like(shift), shift, interpret=True)
            return SoftmaxStats(shift, delta, sign)

        def load(row, refs, words, token):
            _, heads, _, rows, _ = refs[0].type.shape
            b, kv_head, count = words
            address = warp.element(
                refs[0],
                ((b * heads + kv_head) * count + token // stats_tile, rows * 4 * ROW_STATS),
                (token % stats_tile * self.group + row % self.group, 4 * ROW_STATS),
            )
            shift, delta = (warp.fetch(address, 4 * i) for i in range(2))
            sign = shift << 31 | warp.integer(1.0)
            return [warp.real(x) for x in (shift, delta, sign)]

        dtypes = [jnp.float32] * len(SoftmaxStats._fields)
        return SoftmaxStats(*_by_row(load, [row_stats], [b, kv_head, count], [token], dtypes))

    def put(self, array, value, b, kv_head, length, index, only):
        """`array[b, kv_head, index] = value` where `only`, by row; float32 `[B, Hkv, length]`,
        in which the rows of a token are neighbours.
        """
        if self.interpret:
            for i in range(self.tokens):
                first = i * self.group
                mine = array.at[b, kv_head, pl.ds(index[first], self.group)]

                @pl.when(only[first])
                def _(mine=mine, part=value[first : first + self.group]):
                    mine[...] = part

            return

        def put(_, refs, words, value, index, only):
            heads = refs[0].type.shape[1]
            b, kv_head, length = words
            address = warp.element(refs[0], ((b * heads + kv_head) * length, 4), (index, 4))
            warp.put(address, value, only & warp.same(warp.lane() % QUAD, 0))

        _by_row(put, [array], [b, kv_head, length], [value, index, only], [])

    def far_slots(self, indices, position, b, kv_head, first, length):
        """Of each row a bit a slot of int32 `indices` `[B, T, Hkv, n]`: whether it has a block
        that the row's token may see and that is far from the tile of tokens from `first` on
        (`specs/selected.py`), which are at `position` `[B, T]`; `length` is T.
        """
        _, _, heads, n = indices.shape
        if self.interpret:
            rows = []
            near = first_near(position[b, first], ROWS, jnp.maximum)
            for i in range(self.tokens):
                token = jnp.minimum(first + i, length - 1)
                own = div(jnp.maximum(position[b, token], 0), ROWS)
                slots = [indices[b, token, kv_head, j] for j in range(n)]
                bits = [
                    jnp.where((x > 0) & (x < near) & (x <= own), 1 << j, 0)
                    for j, x in enumerate(slots)
                ]
                exists = (first + i < length) & (position[b, token] >= 0)
                rows.append(jnp.where(exists, sum(bits), 0))
            rows = jnp.repeat(jnp.stack(rows), self.group)
            return jnp.pad(rows, (0, ROWS - rows.shape[0]))

        def far(row, refs, words):
            b, kv_head, first, length = words
            exists = (row < self.tokens * self.group) & (first + self._token(row) < length)
            token = warp.smaller(first + self._token(row), length - 1)
            token = b * length + token
            at = warp.fetch(warp.element(refs[1], (token, 4)))
            own = warp.larger(at, 0) // ROWS
            of_tile = warp.fetch(warp.element(refs[1], (b * length + first, 4)))
            near = first_near(of_tile, ROWS, warp.larger)
            size = 4 * n
            address = warp.element(refs[0], (token, heads * size), (kv_head, size))
            bits = warp.word(0)
            for j in range(n):
                block = warp.fetch(address, 4 * j)
                is_far = (block > 0) & (block < near) & (block <= own)
                bits = bits | (warp.number(is_far) << j)
            return [warp.where(exists & (at >= 0), bits, 0)]

        arrays, words = [indices, position], [b, kv_head, first, length]
        return _by_row(far, arrays, words, [], [jnp.int32])[0]

    def _token(self, row):
        return warp.smaller(row // self.group, self.tokens - 1)

    def _repeated(self, values):
        """Values of tokens by row."""
        values = jnp.repeat(jnp.stack(values), self.group)
        return jnp.pad(values, (0, ROWS - values.shape[0]), mode="edge")


@dataclasses.dataclass(frozen=True)
class TileRows:
    """Rows of `tokens` neighbouring tokens, of float32 arrays `[B, T, H]`: `heads` rows each,
    of which the first `group` stand for a query head. `length` is T.
    """

    tokens: int
    group: int
    heads: int
    interpret: bool

    @classmethod
    def of(cls, spec: Any) -> "TileRows":
        """Of a kernel whose tiles have a row for each head."""
        tile = spec.tile
        return cls(tile.tokens, tile.group, tile.group, bool(spec.interpret))

    def values(self, array, b, first, head, length, otherwise: float = 0.0):
        """Of each row the array's value, from token `first` and head `head` on; `otherwise` in
        padding rows. Rows past the last token have its values.
        """
        if self.interpret:
            row, heads = jnp.arange(ROWS), array.shape[2]
            token, member = jnp.minimum(first + row // self.heads, length - 1), row % self.heads
            values = array.at[b][...][token, jnp.minimum(head + member, heads - 1)]
            return jnp.where(member < self.group, values, otherwise)

        def load(row, refs, words):
            value = warp.fetch(self._address(row, refs[0], words))
            if self.heads > self.group:
                member = row % self.heads
                value = warp.where(member < self.group, value, warp.integer(otherwise))
            return [warp.real(value)]

        return _by_row(load, [array], [b, first, head, length], [], [jnp.float32])[0]

    def put(self, array, value, b, first, head, length):
        """Stores a value of each row where `values` loads it; nothing past the last token."""
        if self.interpret:
            heads = pl.ds(head, self.group)
            value = value[: self.tokens * self.heads].reshape(self.tokens, self.heads)

            def write(tokens):
                mine = array.at[b, pl.ds(first, tokens), heads]
                mine[...] = value[:tokens, : self.group]

            pl.when(first + self.tokens <= length)(lambda: write(self.tokens))
            if last := length % self.tokens:
                pl.when(first + last == length)(lambda: write(last))
            return

        def put(row, refs, words, value):
            token, member = row // self.heads, row % self.heads
            exists = (token < self.tokens) & (words[1] + token < words[3])
            exists = exists & (member < self.group)
            first_lane = warp.same(warp.lane() % QUAD, 0)
            warp.put(self._address(row, refs[0], words), value, exists & first_lane)

        _by_row(put, [array], [b, first, head, length], [value], [])

    def _address(self, row, array, words):
        """Of a row's value; past the last token or head, of theirs."""
        heads = array.type.shape[2]
        b, first, head, length = words
        token = warp.smaller(first + row // self.heads, length - 1)
        member = warp.smaller(row % self.heads, self.group - 1)
        return warp.element(array, (b * length + token, heads * 4), (head + member, 4))

    def token(self, first, length):
        """Of each row its token, from `first` on; past the last one, that one."""
        return jnp.minimum(first + div(row_index(), self.heads), length - 1)


def _by_row(function, refs, scalars, rows, dtypes):
    """Arrays `[64]` of these types, from what `function` returns in each lane for its rows.

    `function(row, refs, words, *words_of_row)` takes and returns words of `warp.py`: `words`
    are the scalars, `words_of_row` the row's elements of `rows`, arrays `[64]`.
    """
    types = [plgpu.RefType()] * len(refs) + [warp.SCALAR] * len(scalars)
    results = [plgpu.ShapeDtypeStruct((ROWS,), dtype, layout=PER_ROW) for dtype in dtypes]

    @plgpu.inline_mgpu(arg_types=(*types, *[PER_ROW] * len(rows)), return_type=results)
    def call(_, *arguments):
        refs_, scalars_ = arguments[: len(refs)], arguments[len(refs) :][: len(scalars)]
        rows_ = arguments[len(refs) + len(scalars) :]
        words = [warp.scalar(x) for x in scalars_]
        layout, shape = PER_ROW.to_mgpu(), (ROWS,)
        registers = [np.empty(layout.registers_shape(shape), object) for _ in dtypes]
        indices = list(np.ndindex(layout.registers_shape(shape)))
        i32 = ir.IntegerType.get_signless(32)
        for i, (index,) in zip(indices, layout.thread_idxs(shape), strict=True):
            row = Word(arith.index_cast(i32, index))
            own = [Word(vector.extract(x.registers[i], [], [0])) for x in rows_]
            for out, x in zip(registers, function(row, refs_, words, *own) or (), strict=True):
                out[i] = vector.broadcast(ir.VectorType.get((1,), x.value.type), x.value)
        return [
            mgpu.FragmentedArray(
                _registers=x, _layout=layout, _is_signed=True if d == jnp.int32 else None
            )
            for x, d in zip(registers, dtypes, strict=True)
        ]

    return call(*refs, *scalars, *rows)
