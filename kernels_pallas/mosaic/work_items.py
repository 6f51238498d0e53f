"""The items of `gathered` and of `key_gradient`: pieces of the lists of `block_query_lists.py`.

Tokens are taken in sections, of which each has fixed room for every row of `[B, Hkv]`. A warp
makes the items of a section and row: it counts the pieces of 32 tiles of keys at a time, a sum
over its lanes gives each its place, and what is left at the end is marked as empty. Sums of
`key_gradient` stand together by tile, so there the warp counts the other sections' pieces too.

Pallas' interpreter has no shuffles: there `nsa_jax.sorted_lists` makes the same.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import operands, warp
from kernels_pallas.mosaic.block_bitmap import LANES
from kernels_pallas.mosaic.block_query_lists import BlockQueryLists
from kernels_pallas.mosaic.dkv import ITEM
from kernels_pallas.mosaic.operands import ROWS

WARPS = 4  # of a block of threads


@dataclasses.dataclass(frozen=True)
class WorkItems:
    """`inverse`: of the lists; `longest`: entries of an item at most.

    Sections are parts of `size` units, a multiple of those of a chunk: items are in the order
    [part, row, tile of keys, piece], and all parts have the same room. Or they are `windows`,
    each half of what is before the next one, the first of `size` units or more, and a single
    one where a token's last key is not known: items are in the order [row, window, tile,
    piece], and their sums in the order [row, tile, window, piece].
    """

    inverse: BlockQueryLists
    size: int
    longest: int
    windows: bool = False

    @property
    def square(self) -> bool:
        """Token t sees no key after t."""
        return not self.inverse.packed and self.inverse.T == self.inverse.S

    @property
    def cuts(self) -> tuple[int, ...]:
        """The chunk that each section begins with, and how many chunks there are."""
        inverse = self.inverse
        if self.windows:
            halves = (inverse.units // self.size).bit_length() - 1 if self.square else 0
            inner = [(inverse.units >> i) // inverse.chunk for i in range(halves, 0, -1)]
        else:
            step = self.size // inverse.chunk
            inner = range(step, inverse.chunks, step)
        return 0, *inner, inverse.chunks

    @property
    def parts(self) -> int:
        """How many sections there are."""
        return len(self.cuts) - 1

    @property
    def rooms(self) -> tuple[int, ...]:
        """Items of a row in each section at most: none is empty, and a tile of keys that its
        tokens see has one at most that is not full.
        """
        inverse, rooms = self.inverse, []
        tokens = inverse.chunk * inverse.tokens
        for low, high in itertools.pairwise(self.cuts):
            end = min(high * tokens, inverse.T)
            entries = (end - low * tokens) * inverse.n * inverse.tiles_of_block
            tiles = min(-(-end // ROWS) if self.square else inverse.tiles, entries)
            rooms.append(tiles + (entries - tiles) // self.longest)
        return tuple(rooms if self.windows else [max(rooms)] * self.parts)

    @property
    def items(self) -> int:
        """Of a row, in all windows or in one part."""
        return sum(self.rooms) if self.windows else self.rooms[0]

    @property
    def starts(self) -> tuple[int, ...]:
        """Where the items of each section begin for row 0; a row's are `items` further on."""
        step = 1 if self.windows else self.inverse.rows
        return tuple(step * sum(self.rooms[:i]) for i in range(self.parts))

    @property
    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Of `items`."""
        inverse = self.inverse
        shapes = [(inverse.rows * sum(self.rooms), ITEM)]
        if self.windows:
            shapes += [(inverse.B, inverse.Hkv, inverse.tiles)] * 2
        return tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)


@dataclasses.dataclass(frozen=True)
class Table:
    """What a warp does, on the words of `warp.py`."""

    spec: WorkItems

    def make(self, edges, position, table, *rest) -> None:
        """The items of row `row` and section `WARPS * group + warp`; arrays as in `items`."""
        spec, inverse, lane = self.spec, self.spec.inverse, warp.lane()
        *sums, row, group = rest
        tiles, chunks = inverse.tiles, inverse.chunks
        section = group * WARPS + warp.warp()
        exists = section < spec.parts
        values = spec.cuts, spec.cuts[1:], spec.starts, spec.rooms
        low, high, origin, room = (self._of_section(section, x[: spec.parts]) for x in values)
        b = row // inverse.Hkv
        first = warp.fetch(warp.element(position, (b, 4 * inverse.T)))

        def edge(tile, chunk):
            tile = warp.smaller(tile, tiles - 1), 4 * chunks
            return warp.fetch(warp.element(edges, (row, 4 * chunks * tiles), tile, (chunk, 4)))

        def put(slot, columns, there):
            slot = warp.where(there, origin + row * spec.items + slot, 0)
            for i, x in enumerate(columns):
                place = (slot, 4 * ITEM), (warp.word(i), 4)
                warp.put(warp.element(table, *place), x, there)

        def pieces(tile, begin, end):
            return warp.where(
                tile < tiles, (end - begin + (spec.longest - 1)) // spec.longest, 0
            )

        def sums_of(tile, count):
            """The places of the tiles' sums: of this section, and after those of all 32."""
            ends = [edge(tile, warp.word(cut)) for cut in spec.cuts]
            counts = [pieces(tile, *x) for x in itertools.pairwise(ends)]
            total = functools.reduce(lambda x, y: x + y, counts)
            before = self._before(total)
            mine = place = row * spec.items + count + before
            for i, x in enumerate(counts):
                mine = mine + warp.where(section > i, x, 0)
            there = (tile < tiles) & warp.same(section, 0)
            at = (row, 4 * tiles), (warp.smaller(tile, tiles - 1), 4)
            for output, x in zip(sums, (place, total), strict=True):
                warp.put(warp.element(output, *at), x, there)
            return [mine], [count + warp.shuffle(before + total, LANES - 1)]

        def some_tiles(r, state):
            count, *rest = state
            tile = r * LANES + lane
            begin, end = edge(tile, low), edge(tile, high)
            whole = end
            if not inverse.clipped:
                # The first token that sees the tile to its end, and its chunk.
                token = warp.larger(tile * ROWS + (ROWS - 1) - first, 0)
                tokens = inverse.chunk * inverse.tokens
                chunk = (token + (tokens - 1)) // tokens
                whole = edge(tile, warp.smaller(warp.larger(chunk, low), high))
            here = warp.where(exists, pieces(tile, begin, end), 0)
            before = self._before(here)
            places, rest = sums_of(tile, *rest) if sums else ([], rest)

            def write(i, nothing):
                start = begin + i * spec.longest
                stop = warp.smaller(start + spec.longest, end)
                masked = warp.smaller(warp.larger(whole, start), stop)
                columns = row, tile * ROWS, start, masked, stop, stop, *(x + i for x in places)
                put(count + before + i, columns, i < here)
                return nothing

            warp.repeat(warp.largest(here), write, [])
            return [count + warp.shuffle(before + here, LANES - 1), *rest]

        counts, empty = [warp.word(0)] * (1 + spec.windows), (-1, *[0] * (5 + spec.windows))
        count, *_ = warp.repeat(-(-tiles // LANES), some_tiles, counts)

        def clear(r, nothing):
            slot = r * LANES + lane
            put(slot, empty, (slot >= count) & (slot < room) & exists)
            return nothing

        warp.repeat(-(-max(spec.rooms) // LANES), clear, [])

    def _of_section(self, section, numbers):
        found = warp.word(numbers[0])
        for i, x in enumerate(numbers[1:], 1):
            found = warp.where(section >= i, x, found)
        return found

    def _before(self, x):
        """The sum of the lanes before."""
        total, distance = x, 1
        while distance < LANES:
            other = warp.shuffle(total, warp.larger(warp.lane() - distance, 0))
            total = total + warp.where(warp.lane() >= distance, other, 0)
            distance *= 2
        return total - x


@functools.cache
def items(spec: WorkItems) -> Kernel:
    """Inputs, int32: the running sum of the output of `block_query_lists.counted`, and `position` `[B,
    T]`, which grows by one a token in rows that are not packed. Outputs, int32: `[items, 8]`,
    as `specs.gathered.partials` and `dkv.partial_sums` read it, with row -1 and no
    entries in empty places; and if `windows`, `first` and `count` of `dkv.merged`.
    """
    inverse = spec.inverse

    def body(*refs):
        warp.each(Table(spec).make, refs, [lax.axis_index("row"), lax.axis_index("group")])

    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    edges = shape((1 + inverse.rows * inverse.tiles * inverse.chunks,))
    call = plgpu.kernel(
        body,
        out_type=spec.outputs,
        grid=(inverse.rows, -(-spec.parts // WARPS)),
        grid_names=("row", "group"),
        compiler_params=operands.PARAMS,
    )
    return Kernel("pieces", spec, call, (edges, shape((inverse.B, inverse.T))), spec.outputs)
