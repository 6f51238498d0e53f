"""Loads and stores one value per row for the 64 query rows of a tile. No shared memory is used.

| class          | rows                                                                 |
|----------------|----------------------------------------------------------------------|
| `TileRows`     | rows of adjacent tokens, whose addresses follow from the first token |
| `GatheredRows` | rows of listed tokens, for which each lane reads its own address     |

Row `r` is query head `r % G` of the `r // G`-th token. Values are in registers, `[64]`, with the
layout `operands.PER_ROW`. Four lanes hold the value of each row, and the first of these lanes
stores the value. Each lane computes its addresses with the integer operations of `warp.py`. In
interpret mode, Pallas itself stores the values, since the emulator of warps (`interpreter.py`)
would write whole arrays.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from kernels_pallas.mosaic import interpreter, warp, wgmma
from kernels_pallas.mosaic.operands import (
    PER_ROW,
    ROW_STATS,
    ROWS,
    div,
    row_index,
)
from kernels_pallas.mosaic.softmax import SoftmaxStats
from kernels_pallas.mosaic.warp import Word
from kernels_pallas.specs.selected import first_near

QUAD = 4  # lanes that hold the same row


class GatheredRows(NamedTuple):
    """The query rows of the tokens in one step of a list. A step has `tokens` tokens, and a
    token has `group` rows.
    """

    group: int
    interpret: Any

    @property
    def tokens(self) -> int:
        """The number of tokens per step."""
        return ROWS // self.group

    def load_entries(self, lists, first, end):
        """Return, for each row, the entry `first + row // group` of an int32 list.

        For an entry past `end - 1`, return the entry `end - 1`.
        """

        def load(warp, row, lists, first, end):
            index = warp.smaller(first + self._token(warp, row), end - 1)
            return [warp.fetch_int(lists, index)]

        return _by_row(load, [lists], [first, end], [], [jnp.int32], self.interpret)[0]

    def prefetch_entries(self, lists, first, end):
        """Prefetch into L1 the entries that `load_entries` loads."""
        if self.interpret:
            return

        def prefetch(warp, row, lists, first, end):
            index = warp.larger(warp.smaller(first + self._token(warp, row), end - 1), 0)
            warp.prefetch(warp.element(lists, (index, 4)))

        _by_row(prefetch, [lists], [first, end], [], [])

    def softmax_stats(self, row_stats, b, kv_head, token, stats_tiles: tuple):
        """Return the statistics that dq needs for each of the 64 rows, from `row_stats`: shift,
        delta and the sign of the gate. `token` has the token of each row. `stats_tiles` has the
        number of tokens per query tile of `row_stats`, and the number of query tiles.
        """
        stats_tile, count = stats_tiles

        def load(warp, row, row_stats, b, kv_head, count, token):
            _, heads, _, rows, _ = interpreter.shape_of(row_stats)
            address = warp.element(
                row_stats,
                ((b * heads + kv_head) * count + token // stats_tile, rows * 4 * ROW_STATS),
                (token % stats_tile * self.group + row % self.group, 4 * ROW_STATS),
            )
            shift, delta = (warp.fetch(address, 4 * i) for i in range(2))
            sign = shift << 31 | warp.integer(1.0)
            return [warp.real(x) for x in (shift, delta, sign)]

        dtypes = [jnp.float32] * len(SoftmaxStats._fields)
        words = [b, kv_head, count]
        return SoftmaxStats(*_by_row(load, [row_stats], words, [token], dtypes, self.interpret))

    def put(self, array, value, b, kv_head, length, index, only):
        """Store `array[b, kv_head, index] = value` for each row whose `only` is true. The array
        is float32 `[B, Hkv, length]`, in which the rows of a token are adjacent.
        """
        if self.interpret:
            for i in range(self.tokens):
                first = i * self.group
                mine = array.at[b, kv_head, pl.ds(index[first], self.group)]

                @pl.when(only[first])
                def _(mine=mine, part=value[first : first + self.group]):
                    mine[...] = part

            return

        def put(warp, _, array, b, kv_head, length, value, index, only):
            heads = interpreter.shape_of(array)[1]
            address = warp.element(array, ((b * heads + kv_head) * length, 4), (index, 4))
            warp.put(address, value, only & warp.same(warp.lane() % QUAD, 0))

        _by_row(put, [array], [b, kv_head, length], [value, index, only], [])

    def far_slots(self, indices, position, b, kv_head, first, length):
        """Return a word per row, with one bit for each slot of int32 `indices` `[B, T, Hkv, n]`.

        A set bit means that the row's token may attend to the block in the slot, and that the block
        is far for the tile. The tile begins at token `first` (`specs/selected.py`). `position` `[B,
        T]` has the positions of the tokens, and `length` is T.
        """
        _, _, heads, n = indices.shape

        def far(warp, row, indices, position, b, kv_head, first, length):
            exists = (row < self.tokens * self.group) & (
                first + self._token(warp, row) < length
            )
            token = warp.smaller(first + self._token(warp, row), length - 1)
            token = b * length + token
            at = warp.fetch_int(position, token)
            own = warp.larger(at, 0) // ROWS
            of_tile = warp.fetch_int(position, b * length + first)
            near = first_near(of_tile, ROWS, warp.larger)
            size = 4 * n
            address = warp.element(indices, (token, heads * size), (kv_head, size))
            bits = warp.word(0)
            for j in range(n):
                block = warp.fetch(address, 4 * j)
                is_far = (block > 0) & (block < near) & (block <= own)
                bits = bits | (warp.number(is_far) << j)
            return [warp.where(exists & (at >= 0), bits, 0)]

        arrays, words = [indices, position], [b, kv_head, first, length]
        return _by_row(far, arrays, words, [], [jnp.int32], self.interpret)[0]

    def _token(self, warp, row):
        return warp.smaller(row // self.group, self.tokens - 1)


class TileRows(NamedTuple):
    """The rows of `tokens` neighbouring tokens, for float32 arrays `[B, T, H]`. A token has
    `heads` rows, of which the first `group` are query heads. `length` is T.
    """

    tokens: int
    group: int
    heads: int
    interpret: Any

    @classmethod
    def of(cls, spec: Any) -> "TileRows":
        """Return the rows of a tile of a kernel, given its spec. The tile has one row per
        token and head.
        """
        tile = spec.tile
        return cls(tile.tokens, tile.group, tile.group, spec.interpret)

    def values(self, array, b, first, head, length, otherwise: float = 0.0):
        """Load a value of the array for each row, from token `first` and head `head` on.
        Padding rows get the value `otherwise`. Rows after the last token get the values of the
        last token.
        """

        def load(warp, row, *place):
            value = warp.fetch(self._address(warp, row, *place))
            if self.heads > self.group:
                member = row % self.heads
                value = warp.where(member < self.group, value, warp.integer(otherwise))
            return [warp.real(value)]

        words = [b, first, head, length]
        return _by_row(load, [array], words, [], [jnp.float32], self.interpret)[0]

    def put(self, array, value, b, first, head, length):
        """Store `value`, one number per row, at the addresses that the method `values` reads.
        Values of rows past the last token are not stored.
        """
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

        def put(warp, row, array, b, first, head, length, value):
            token, member = row // self.heads, row % self.heads
            exists = (token < self.tokens) & (first + token < length)
            exists = exists & (member < self.group)
            first_lane = warp.same(warp.lane() % QUAD, 0)
            address = self._address(warp, row, array, b, first, head, length)
            warp.put(address, value, exists & first_lane)

        _by_row(put, [array], [b, first, head, length], [value], [])

    def _address(self, warp, row, array, b, first, head, length):
        """Return the address of a row's value.

        The token and the head of the row are clamped to the last token and the last head.
        """
        heads = interpreter.shape_of(array)[2]
        token = warp.smaller(first + row // self.heads, length - 1)
        member = warp.smaller(row % self.heads, self.group - 1)
        return warp.element(array, (b * length + token, heads * 4), (head + member, 4))

    def token(self, first, length):
        """Return the index of each row's token. `first` is the token of the first row. For rows
        past the last token, return the last token.
        """
        return jnp.minimum(first + div(row_index(), self.heads), length - 1)


def _by_row(function, refs, scalars, rows, dtypes, interpret=False):
    """Return arrays `[64]` of the types `dtypes`.

    Each lane calls `function` for the rows of the lane.

    The call is `function(warp, row, *refs, *words, *words_of_row)`. The arguments and results of
    `function` are words (`warp.py`). `words` has the scalar arguments. `words_of_row` has the row's
    elements of the arrays `rows`, `[64]` each. In interpret mode, `refs` are read as whole arrays.
    """
    if interpret:

        def program(warp, arrays, words, places):
            given, of_rows = (*arrays[: len(refs)], *words), arrays[len(refs) :]
            for half in range(2):
                row = warp.warp() * 16 + (warp.lane() // QUAD + 8 * half)
                found = function(warp, row, *given, *(x[row] for x in of_rows))
                for place, x in zip(places, found, strict=True):
                    warp.write(place + row * 4, warp.bits(x))

        shapes = [jax.ShapeDtypeStruct((ROWS,), x) for x in dtypes]
        return interpreter.written(program, [*refs, *rows], scalars, shapes)

    def call(*arguments):
        count = len(refs) + len(scalars)
        layout, shape = PER_ROW.to_mgpu(), (ROWS,)
        registers = [np.empty(layout.registers_shape(shape), object) for _ in dtypes]
        indices = list(np.ndindex(layout.registers_shape(shape)))
        for i, (index,) in zip(indices, layout.thread_idxs(shape), strict=True):
            row = Word(arith.index_cast(wgmma.i32(), index))
            own = [Word(vector.extract(x.registers[i], [], [0])) for x in arguments[count:]]
            found = function(warp, row, *arguments[:count], *own) or ()
            for out, x in zip(registers, found, strict=True):
                out[i] = vector.broadcast(ir.VectorType.get((1,), x.value.type), x.value)
        signed = (True if x == jnp.int32 else None for x in dtypes)
        return [wgmma.fragments(x, layout, s) for x, s in zip(registers, signed, strict=True)]

    results = [plgpu.ShapeDtypeStruct((ROWS,), dtype, layout=PER_ROW) for dtype in dtypes]
    return warp.each(call, refs, scalars, rows, PER_ROW, result=results)
