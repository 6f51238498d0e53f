"""The items of `gathered`: pieces of the lists that `inverse.slots` writes.

Tokens are taken in parts; each part has a table with the same room for every row of `[B, Hkv]`.
A warp makes the table of a part and row: it counts the pieces of 32 tiles of keys at a time, a
sum over its lanes gives each its places, and what is left at the end is marked as empty.

Pallas' interpreter has no shuffles: there `nsa_jax.sorted_lists` makes the same.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import operands, warp
from kernels_pallas.mosaic.inverse import Inverse
from kernels_pallas.mosaic.key_gradient import ITEM
from kernels_pallas.mosaic.operands import ROWS
from kernels_pallas.mosaic.wanted import LANES

WARPS = 4  # of a block of threads


@dataclasses.dataclass(frozen=True)
class Pieces:
    """`inverse`: of the lists; `size`: tokens of a part, a multiple of those of a chunk;
    `longest`: entries of an item at most.
    """

    inverse: Inverse
    size: int
    longest: int

    @property
    def parts(self) -> int:
        return -(-self.inverse.T // self.size)

    @property
    def chunks(self) -> int:
        """Of a part."""
        return self.size // self.inverse.chunk

    @property
    def items(self) -> int:
        """Of a part and row: a tile of keys has one at most that is not full."""
        entries = min(self.size, self.inverse.T) * self.inverse.n
        return self.inverse.tiles + entries // self.longest

    @property
    def table(self) -> jax.ShapeDtypeStruct:
        shape = self.parts, self.inverse.rows, self.items, ITEM
        return jax.ShapeDtypeStruct(shape, jnp.int32)


@dataclasses.dataclass(frozen=True)
class Table:
    """What a warp does, on the words of `warp.py`."""

    spec: Pieces

    def make(self, edges, position, table, row, group) -> None:
        """The items of row `row` and part `WARPS * group + warp`; arrays as in `items`."""
        spec, inverse, lane = self.spec, self.spec.inverse, warp.lane()
        tiles, chunks = inverse.tiles, inverse.chunks
        part = group * WARPS + warp.warp()
        exists = part < spec.parts
        low = warp.smaller(part * spec.chunks, chunks)
        high = warp.smaller(low + spec.chunks, chunks)
        b = row // inverse.Hkv
        first = warp.fetch(warp.element(position, (b, 4 * inverse.T)))

        def edge(tile, chunk):
            tile = warp.smaller(tile, tiles - 1), 4 * chunks
            return warp.fetch(warp.element(edges, (row, 4 * chunks * tiles), tile, (chunk, 4)))

        def column(slot, i):
            size = 4 * ITEM
            lead = (part, inverse.rows * spec.items * size), (row, spec.items * size)
            return warp.element(table, *lead, (slot, size), (warp.word(i), 4))

        def some_tiles(r, state):
            (count,) = state
            tile = r * LANES + lane
            # The first token that sees the tile to its end, and its chunk.
            token = warp.larger(tile * ROWS + (ROWS - 1) - first, 0)
            chunk = (token + (inverse.chunk - 1)) // inverse.chunk
            chunk = warp.smaller(warp.larger(chunk, low), high)
            begin, whole, end = (edge(tile, x) for x in (low, chunk, high))
            pieces = (end - begin + (spec.longest - 1)) // spec.longest
            pieces = warp.where((tile < tiles) & exists, pieces, 0)
            before = self._before(pieces)

            def write(i, nothing):
                there = i < pieces
                slot = warp.where(there, count + before + i, 0)
                start = begin + i * spec.longest
                stop = warp.smaller(start + spec.longest, end)
                masked = warp.smaller(warp.larger(whole, start), stop)
                for j, x in enumerate((row, tile * ROWS, start, masked, stop)):
                    warp.put(column(slot, j), x, there)
                return nothing

            warp.repeat(warp.largest(pieces), write, [])
            return [count + warp.shuffle(before + pieces, LANES - 1)]

        (count,) = warp.repeat(-(-tiles // LANES), some_tiles, [warp.word(0)])

        def clear(r, nothing):
            slot = r * LANES + lane
            rest = (slot >= count) & (slot < spec.items) & exists
            warp.put(column(warp.where(rest, slot, 0), 0), -1, rest)
            return nothing

        warp.repeat(-(-spec.items // LANES), clear, [])

    def _before(self, x):
        """The sum of the lanes before."""
        total, distance = x, 1
        while distance < LANES:
            other = warp.shuffle(total, warp.larger(warp.lane() - distance, 0))
            total = total + warp.where(warp.lane() >= distance, other, 0)
            distance *= 2
        return total - x


@functools.cache
def items(spec: Pieces) -> Kernel:
    """Inputs, int32: the running sum of the output of `inverse.counted`, and `position` `[B,
    T]`, which grows by one a token. Output: int32 `[parts, B * Hkv, items, 8]`, as
    `gathered.partial_outputs` reads it.
    """
    inverse = spec.inverse

    def body(*refs):
        warp.each(Table(spec).make, refs, [lax.axis_index("row"), lax.axis_index("group")])

    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    edges = shape((1 + inverse.rows * inverse.tiles * inverse.chunks,))
    call = plgpu.kernel(
        body,
        out_type=(spec.table,),
        grid=(inverse.rows, -(-spec.parts // WARPS)),
        grid_names=("row", "group"),
        compiler_params=operands.PARAMS,
    )
    return Kernel("pieces", call, (edges, shape((inverse.B, inverse.T))), (spec.table,))
