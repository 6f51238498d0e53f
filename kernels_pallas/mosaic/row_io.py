"""Numbers of 64 rows that stand for heads of tokens: of neighbours (`OfTile`), or of tokens
from a list, wherever these lie in memory (`ByRow`).

Row `r` is head `r % G` of token or entry `r // G`. In registers there is a value a row,
laid out as `operands.PER_ROW`. Pallas' interpreter has the same by plain indexing.
"""

import dataclasses

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from kernels_pallas.mosaic import warp
from kernels_pallas.mosaic.operands import PER_ROW, ROW_STATS, ROWS, row_index
from kernels_pallas.mosaic.warp import Word

LANES = 4  # that hold the same row


@dataclasses.dataclass(frozen=True)
class GatheredRows:
    """`count` entries a step, of `group` rows each."""

    group: int
    interpret: bool

    @property
    def count(self) -> int:
        return ROWS // self.group

    def entries(self, lists, place, end):
        """The entry at `place + row // group` of an int32 array, or the one before `end`."""
        if self.interpret:
            found = [lists[jnp.minimum(place + u, end - 1)] for u in range(self.count)]
            return self._repeated(found)

        def entry(row, refs, words):
            (lists,), (place, end) = refs, words
            at = warp.smaller(place + self._unit(row), end - 1)
            return [warp.fetch(warp.element(lists, (at, 4)))]

        return _each(entry, [lists], [place, end], [], [jnp.int32])[0]

    def ask(self, lists, place, end):
        """Asks the cache for what `entries` will read."""
        if self.interpret:
            return

        def ask(row, refs, words):
            (lists,), (place, end) = refs, words
            at = warp.larger(warp.smaller(place + self._unit(row), end - 1), 0)
            warp.prefetch(warp.element(lists, (at, 4)))

        _each(ask, [lists], [place, end], [], [])

    def element(self, array, b, index):
        """`array[b, index]` of an int32 array of two axes, `index` by row."""
        if self.interpret:
            units = range(self.count)
            return self._repeated([array[b, index[u * self.group]] for u in units])

        def element(_, refs, words, index):
            size = refs[0].type.shape[1]
            return [warp.fetch(warp.element(refs[0], (words[0], 4 * size), (index, 4)))]

        return _each(element, [array], [b], [index], [jnp.int32])[0]

    def numbers(self, array, b, g, token, unit: int, gated: bool):
        """Of `token`, by row, what the gradient of a query takes of `bwd_preprocess.of_units`, of
        units of `unit` tokens: log-sum-exp, gate or None, and offset.
        """
        norm, _, gate, offset = self._numbers(array, b, g, token, unit)
        return norm, gate if gated else None, offset

    def _numbers(self, array, b, g, token, unit):
        if self.interpret:
            found = []
            for u in range(self.count):
                mine = token[u * self.group]
                place = lax.rem(mine, jnp.int32(unit)) * self.group
                rows = pl.ds(place, self.group)
                found.append(array.at[b, g, lax.div(mine, jnp.int32(unit)), rows][...])
            found = jnp.concatenate(found)
            found = jnp.pad(found, ((0, ROWS - found.shape[0]), (0, 0)))
            return [found[:, i] for i in range(ROW_STATS)]

        def number(row, refs, words, token):
            _, heads, units, rows, _ = refs[0].type.shape
            size = 4 * ROW_STATS
            address = warp.element(
                refs[0],
                (words[0], heads * units * rows * size),
                (words[1], units * rows * size),
                (token // unit, rows * size),
                (token % unit * self.group + row % self.group, size),
            )
            return [warp.real(warp.fetch(address, 4 * i)) for i in range(ROW_STATS)]

        return _each(number, [array], [b, g], [token], [jnp.float32] * ROW_STATS)

    def put(self, array, value, b, g, index, only):
        """`array[b, g, index] = value` where `only`, both by row; float32 `[B, Hkv, .]`, in
        which the rows of an entry stand side by side.
        """
        if self.interpret:
            for u in range(self.count):
                first = u * self.group
                mine = array.at[b, g, pl.ds(index[first], self.group)]

                @pl.when(only[first])
                def _(mine=mine, part=value[first : first + self.group]):
                    mine[...] = part

            return

        def put(_, refs, words, value, index, only):
            _, heads, size = refs[0].type.shape
            lead = (words[0], heads * size * 4), (words[1], size * 4)
            first = warp.same(warp.lane() % LANES, 0)
            warp.put(warp.element(refs[0], *lead, (index, 4)), value, only & first)

        _each(put, [array], [b, g], [value, index, only], [])

    def chosen(self, indices, position, b, g, first):
        """One bit a slot of int32 `indices` `[B, T, Hkv, n]`, where it has a block that the
        row's token may see; the tokens are those from `first` on, `position` `[B, T]`.
        """
        _, length, heads, n = indices.shape
        if self.interpret:
            found = []
            for u in range(self.count):
                token = jnp.minimum(first + u, length - 1)
                own = lax.div(jnp.maximum(position[b, token], 0), jnp.int32(ROWS))
                slots = [indices[b, token, g, j] for j in range(n)]
                bits = [
                    jnp.where((x >= 0) & (x <= own), 1 << j, 0) for j, x in enumerate(slots)
                ]
                there = (first + u < length) & (position[b, token] >= 0)
                found.append(jnp.where(there, sum(bits), 0))
            found = jnp.repeat(jnp.stack(found), self.group)
            return jnp.pad(found, (0, ROWS - found.shape[0]))

        def chosen(row, refs, words):
            b, g, first = words
            there = (row < self.count * self.group) & (first + self._unit(row) < length)
            token = warp.smaller(first + self._unit(row), length - 1)
            place = warp.fetch(warp.element(refs[1], (b, 4 * length), (token, 4)))
            own = warp.larger(place, 0) // ROWS
            size = 4 * n
            at = (b, length * heads * size), (token, heads * size), (g, size)
            address, bits = warp.element(refs[0], *at), warp.word(0)
            for j in range(n):
                block = warp.fetch(address, 4 * j)
                seen = (block >= 0) & (block <= own)
                bits = bits | (warp.number(seen) << j)
            return [warp.where(there & (place >= 0), bits, 0)]

        return _each(chosen, [indices, position], [b, g, first], [], [jnp.int32])[0]

    def of_step(self, place, end):
        """Of each row, whether it stands for an entry before `end`."""
        unit = lax.div(row_index(), jnp.int32(self.group))
        return (unit < self.count) & (place + unit < end)

    def head(self):
        """Of each row, which head of the group it is."""
        return lax.rem(row_index(), jnp.int32(self.group))

    def _unit(self, row):
        return warp.smaller(row // self.group, self.count - 1)

    def _repeated(self, found):
        found = jnp.repeat(jnp.stack(found), self.group)
        return jnp.pad(found, (0, ROWS - found.shape[0]), mode="edge")


@dataclasses.dataclass(frozen=True)
class TileRows:
    """`tokens` neighbours in float32 arrays `[B, T, H]`: `heads` rows each, of which `group`
    stand for a head.
    """

    tokens: int
    group: int
    heads: int
    interpret: bool

    def values(self, array, b, first, head, otherwise: float = 0.0):
        """By row, from token `first` and head `head` on; `otherwise` in rows of no head. Those
        past the end are of the last token.
        """
        if self.interpret:
            row, (length, heads) = jnp.arange(ROWS), array.shape[1:]
            token, member = jnp.minimum(first + row // self.heads, length - 1), row % self.heads
            found = array.at[b][...][token, jnp.minimum(head + member, heads - 1)]
            return jnp.where(member < self.group, found, otherwise)

        def value(row, refs, words):
            found = warp.fetch(self._address(row, refs[0], words))
            if self.heads > self.group:
                member = row % self.heads
                found = warp.where(member < self.group, found, warp.integer(otherwise))
            return [warp.real(found)]

        return _each(value, [array], [b, first, head], [], [jnp.float32])[0]

    def put(self, array, value, b, first, head):
        """Writes what is given by row where `values` reads it; nothing past the end."""
        if self.interpret:
            length, heads = array.shape[1], pl.ds(head, self.group)
            value = value[: self.tokens * self.heads].reshape(self.tokens, self.heads)

            def write(tokens):
                mine = array.at[b, pl.ds(first, tokens), heads]
                mine[...] = value[:tokens, : self.group]

            pl.when(first + self.tokens <= length)(lambda: write(self.tokens))
            if rest := length % self.tokens:
                pl.when(first + rest == length)(lambda: write(rest))
            return

        def put(row, refs, words, value):
            _, length, _ = refs[0].type.shape
            token, member = row // self.heads, row % self.heads
            there = (token < self.tokens) & (words[1] + token < length) & (member < self.group)
            first_lane = warp.same(warp.lane() % LANES, 0)
            warp.put(self._address(row, refs[0], words), value, there & first_lane)

        _each(put, [array], [b, first, head], [value], [])

    def _address(self, row, array, words):
        """Of a row's number; past the last token or head, of those."""
        _, length, heads = array.type.shape
        b, first, head = words
        token = warp.smaller(first + row // self.heads, length - 1)
        member = warp.smaller(row % self.heads, self.group - 1)
        at = (b, length * heads * 4), (token, heads * 4), (head + member, 4)
        return warp.element(array, *at)

    def token(self, first, length: int):
        """By row; past the end the last one."""
        return jnp.minimum(first + lax.div(row_index(), jnp.int32(self.heads)), length - 1)


def _each(function, refs, numbers, rows, dtypes):
    """What `function(row, refs, words, *words_of_row)` gives in each lane for each of its rows:
    words, as arrays by row of these types.
    """
    types = [plgpu.RefType()] * len(refs) + [warp.SCALAR] * len(numbers)
    found = [plgpu.ShapeDtypeStruct((ROWS,), dtype, layout=PER_ROW) for dtype in dtypes]

    @plgpu.inline_mgpu(arg_types=(*types, *[PER_ROW] * len(rows)), return_type=found)
    def call(_, *arguments):
        refs_, rest = arguments[: len(refs)], arguments[len(refs) :]
        words = [warp.scalar(x) for x in rest[: len(numbers)]]
        layout, shape = PER_ROW.to_mgpu(), (ROWS,)
        registers = [np.empty(layout.registers_shape(shape), object) for _ in dtypes]
        places = list(np.ndindex(layout.registers_shape(shape)))
        i32 = ir.IntegerType.get_signless(32)
        for place, (index,) in zip(places, layout.thread_idxs(shape), strict=True):
            row = Word(arith.index_cast(i32, index))
            mine = [
                Word(vector.extract(x.registers[place], [], [0])) for x in rest[len(numbers) :]
            ]
            for out, x in zip(registers, function(row, refs_, words, *mine) or (), strict=True):
                out[place] = vector.broadcast(ir.VectorType.get((1,), x.value.type), x.value)
        return [
            mgpu.FragmentedArray(
                _registers=x, _layout=layout, _is_signed=True if d == jnp.int32 else None
            )
            for x, d in zip(registers, dtypes, strict=True)
        ]

    return call(*refs, *numbers, *rows)
