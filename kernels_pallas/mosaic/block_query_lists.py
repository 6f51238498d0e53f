"""Which queries chose a tile of keys: the lists of `key_gradient` and of `gathered`.

Counting, no sort. The tokens are cut into chunks. `counted` has the number of entries of every
tile of keys from every chunk; their running sum is where these entries begin; `filled` writes
them there. Both are one walk: a warp a chunk sets the bits of some tokens in shared memory, and
then a lane a tile of keys passes over the bits of the blocks that touch it.

A list is the same in every run: chunk after chunk, and within one in the order of the queries
unless blocks end within tiles.

Pallas' interpreter has no shuffles and votes: there `nsa_jax.sorted_lists` makes such lists.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import operands, warp
from kernels_pallas.mosaic.block_bitmap import LANES, NOWHERE, BlockBitmap
from kernels_pallas.mosaic.dkv import REACH
from kernels_pallas.mosaic.operands import ROWS

WARPS = 4  # of a block of threads
CHUNKS = 512  # of a row of tokens at most
BITS = 1024  # blocks that have their bits in shared memory at a time, and a few more


@dataclasses.dataclass(frozen=True)
class BlockQueryLists:
    """The static part of a problem; shapes as in `counted`.

    An entry is a unit of `tokens` neighbours (`KeyGradient.unit`) and a block that some of them
    chose, in the list of every tile of keys that the block touches. `packed`: sequences may
    begin at any key. With `limit` there are entries of those tokens alone that leave their tile
    of `tile` tokens (`selected_walk.tile_is_gathered`).
    """

    B: int
    T: int
    S: int
    Hkv: int
    n: int
    block: int
    tokens: int
    packed: bool
    tile: int = 0
    limit: int = 0

    @property
    def aligned(self) -> bool:
        """No tile or block crosses a border of the other kind's."""
        return not self.packed and (ROWS % self.block == 0 or self.block % ROWS == 0)

    @property
    def clipped(self) -> bool:
        """A block may end within a tile of keys."""
        return not self.aligned or self.block < ROWS

    @property
    def marked(self) -> bool:
        """An entry must say which tokens and which keys it is about."""
        return self.tokens > 1 or self.clipped

    @property
    def tiles_of_block(self) -> int:
        """Tiles of keys that a block touches at most."""
        if self.aligned:
            return max(self.block // ROWS, 1)
        return (self.block + ROWS - 2) // ROWS + 1

    @property
    def blocks_of_tile(self) -> int:
        """Blocks of a sequence that touch a tile of keys at most."""
        if self.aligned:
            return max(ROWS // self.block, 1)
        return (ROWS + self.block - 2) // self.block + 1

    @property
    def tiles(self) -> int:
        """Of keys."""
        return -(-self.S // ROWS)

    @property
    def rows(self) -> int:
        return self.B * self.Hkv

    @property
    def entries(self) -> int:
        """Of all lists at most."""
        return self.rows * self.T * self.n * self.tiles_of_block

    @property
    def units(self) -> int:
        return -(-self.T // self.tokens)

    @property
    def units_of_word(self) -> int:
        return LANES // self.tokens

    @property
    def words_of_chunk(self) -> int:
        tokens = self.units_of_word * self.tokens
        return -(-self.T // (tokens * CHUNKS))

    @property
    def chunk(self) -> int:
        """Units of a chunk."""
        return self.units_of_word * self.words_of_chunk

    @property
    def chunks(self) -> int:
        return -(-self.T // (self.chunk * self.tokens))

    @property
    def window(self) -> int:
        """Tiles of keys that a warp looks at at a time."""
        return max(min(BITS, BITS * self.block // ROWS) // LANES, 1) * LANES

    @property
    def bits(self) -> int:
        """Blocks that touch a window at most."""
        return (-(-self.window * ROWS // self.block) // LANES + 1) * LANES


@dataclasses.dataclass(frozen=True)
class Walk:
    """What a warp does, on the words of `warp.py`: it counts entries, or writes them (`fill`);
    with `slots` as `slots` says.
    """

    spec: BlockQueryLists
    fill: bool
    slots: bool = False

    def make(self, indices, position, key_start, *rest) -> None:
        """Goes through chunk `WARPS * group + warp` of row `row`; arrays as in `counted` or
        `filled`, then in shared memory `bits` `[WARPS, spec.bits]` and `done` `[WARPS,
        spec.window]`.
        """
        spec, lane = self.spec, warp.lane()
        counts, rest = (rest[0], rest[1:]) if spec.limit else (None, rest)
        edges, *outputs, bits, done, row, group = rest
        b, g = row // spec.Hkv, row % spec.Hkv
        chunk = group * WARPS + warp.warp()
        bits = warp.shared(bits) + warp.warp() * (4 * spec.bits)
        done = warp.shared(done) + warp.warp() * (4 * spec.window)
        wanted = BlockBitmap(
            spec.T, spec.Hkv, spec.n, spec.block, spec.units_of_word * spec.tokens
        )

        def leaves(token):
            """As `selected_walk.tile_is_gathered`."""
            tiles, tile = -(-spec.T // spec.tile), token // spec.tile
            before = warp.larger(tile - 1, 0)
            lead = (b, 8 * spec.Hkv * tiles), (g, 8 * tiles), (before, 8)
            long = warp.fetch(warp.element(counts, *lead), 4) > spec.limit
            return long & (tile > 0)

        only = leaves if spec.limit else None

        def edge(tile, after=0):
            """What is said of the tile's entries from this chunk, or those after them."""
            tile = warp.smaller(tile, spec.tiles - 1), 4 * spec.chunks
            from_chunk = warp.smaller(chunk, spec.chunks - 1), 4
            lead = row, 4 * spec.chunks * spec.tiles
            return warp.element(edges, lead, tile, from_chunk, (after, 4))

        def window(i, nothing):
            low = i * spec.window
            high = warp.smaller(low + spec.window, spec.tiles)
            rows = (high - low + (LANES - 1)) // LANES

            def begin(r, nothing):
                place = r * LANES + lane
                start = warp.fetch(edge(low + place)) if self.fill else 0
                warp.write(done + place * 4, start)
                return nothing

            def end(r, nothing):
                place = r * LANES + lane
                there = (low + place < high) & (chunk < spec.chunks)
                warp.put(edge(low + place, after=1), warp.read(done + place * 4), there)
                return nothing

            def some_tokens(k, nothing):
                unit0 = chunk * spec.chunk + k * spec.units_of_word
                token0 = unit0 * spec.tokens
                tokens = wanted.load(position, key_start, b, token0, only)

                def sequence(_, state):
                    first, own, blocks = wanted.next_sequence(tokens, state[0])
                    low_block = warp.larger(low * ROWS - first, 0) // spec.block
                    count = warp.smaller(warp.larger(blocks - low_block, 0), spec.bits)
                    wanted.clear(bits, spec.bits, (count + (LANES - 1)) // LANES)
                    warp.sync()
                    wanted.join(bits, spec.bits, low_block, indices, b, g, token0, own)
                    warp.sync()
                    if self.slots:
                        selection = indices, b, g, token0
                        self._slots(wanted, selection, own, low, count, bits, done, outputs[0])
                    else:
                        seen = first, blocks, *self._ends(tokens, first)
                        self._visit(low, high, seen, low_block, bits, done, unit0, outputs)
                    warp.sync()
                    return [first]

                (first,), (place,) = tokens.sequence, tokens.position
                end_of_all = warp.largest(warp.where(first >= 0, first + place + 1, 0))
                reached = warp.number(end_of_all > low * ROWS)
                warp.repeat(wanted.sequences(tokens) * reached, sequence, [warp.word(-1)])
                return nothing

            warp.repeat(rows, begin, [])
            warp.repeat(spec.words_of_chunk, some_tokens, [])
            if not self.fill:
                warp.repeat(rows, end, [])
            return nothing

        warp.repeat(-(-spec.tiles // spec.window), window, [])
        if not self.fill:
            first = warp.same(lane + row + chunk, 0)
            warp.put(warp.element(edges, (lane, 4)), 0, first)

    def _ends(self, tokens, first):
        """Of the sequence that begins at `first`: the end of the keys that its last token sees,
        and of those that a token at bit 0 would see.
        """
        (sequence,), (position,) = tokens.sequence, tokens.position
        own, ends = warp.same(sequence, first), first + position + 1
        last = warp.largest(warp.where(own, ends, 0))
        return last, warp.smallest(warp.where(own, ends - warp.lane(), NOWHERE))

    def _visit(self, low, high, seen, low_block, bits, done, unit0, outputs):
        """Passes over the tiles `low .. high - 1` that a sequence's tokens see."""
        spec = self.spec
        first, blocks, last, end_of_bit0 = seen
        tile_from = warp.larger(first // ROWS, low)
        tile_to = warp.smaller((last + (ROWS - 1)) // ROWS, high)
        row_from = warp.larger(tile_from - low, 0) // LANES
        row_to = warp.larger(tile_to - low + (LANES - 1), 0) // LANES

        def row(i, nothing):
            place = (row_from + i) * LANES + warp.lane()
            tile = low + place
            key = tile * ROWS
            there = (tile >= tile_from) & (tile < tile_to)
            # Tokens whose last key lies before the tile: not all, in a tile that one sees.
            early = warp.larger(key + 1 - end_of_bit0, 0) & (LANES - 1)
            first_block = warp.larger(key - first, 0) // spec.block

            def block(j, state):
                index = first_block + j
                begins = first + index * spec.block
                touches = there & (index < blocks) & (begins < key + ROWS)
                slot = warp.smaller(warp.larger(index - low_block, 0), spec.bits - 1)
                members = warp.where(touches, warp.read(bits + slot * 4), 0)
                members = (members >> early) << early
                units = functools.reduce(
                    lambda x, y: x | y, (members >> i for i in range(spec.tokens))
                )
                units = units & self._first_bits
                if not self.fill:
                    return [state[0] + warp.ones(units)]
                offset = (begins - key + REACH) << 16
                return self._write(state[0], units, members, offset, unit0, outputs)

            before = warp.read(done + place * 4)
            (after,) = warp.repeat(spec.blocks_of_tile, block, [before])
            warp.write(done + place * 4, after)
            return nothing

        warp.repeat(warp.larger(row_to - row_from, 0), row, [])

    def _slots(self, wanted, selection, own, low, count, bits, done, output):
        """Writes the places in the selection of what the tokens want from block `low` on, where
        `bits` has `count` blocks and every block is a tile of keys.
        """
        spec = self.spec
        _, _, g, token0 = selection

        def write(entry, token, block, there, nothing):
            at = warp.smaller(warp.larger(block - low, 0), spec.window - 1) * 4
            there = there & warp.below(block, wanted.bound(own, token))
            there = there & warp.below(block - low, spec.window)
            before = warp.read(bits + at) & (warp.bit(token) - 1)
            place = warp.read(done + at) + warp.ones(before)
            slot = ((token0 + token) * spec.Hkv + g) * spec.n + entry % spec.n
            warp.put(warp.element(output, (warp.where(there, place, 0), 4)), slot, there)
            return nothing

        def advance(r, nothing):
            at = (r * LANES + warp.lane()) * 4
            warp.write(done + at, warp.read(done + at) + warp.ones(warp.read(bits + at)))
            return nothing

        wanted.each(*selection, write, [])
        warp.sync()
        rows = warp.smaller((count + (LANES - 1)) // LANES, spec.window // LANES)
        warp.repeat(rows, advance, [])

    @property
    def _first_bits(self) -> int:
        """The bits of the first token of every unit, as an int32."""
        spec = self.spec
        bits = sum(1 << (u * spec.tokens) for u in range(spec.units_of_word))
        return bits - 2**32 if bits >= 2**31 else bits

    def _write(self, slot, units, members, offset, unit0, outputs):
        """Writes an entry for each bit of `units`, from place `slot` on."""
        spec = self.spec

        def write(_, state):
            slot, units = state
            there = warp.different(units, 0)
            bit = warp.ones((units & (warp.word(0) - units)) - 1) & (LANES - 1)
            unit = unit0 + bit // spec.tokens
            warp.put(warp.element(outputs[0], (slot, 4)), unit, there)
            if spec.marked:
                mark = ((members >> bit) & ((1 << spec.tokens) - 1)) + offset
                warp.put(warp.element(outputs[1], (slot, 4)), mark, there)
            return [slot + warp.number(there), units & (units - 1)]

        slot, _ = warp.repeat(warp.largest(warp.ones(units)), write, [slot, units])
        return [slot]


@functools.cache
def counted(spec: BlockQueryLists) -> Kernel:
    """Inputs, int32: `indices` `[B, T, Hkv, n]`, -1 in empty places, blocks past the token's
    own not counted; `position` and `key_start` `[B, T]` as in `tile_block_lists.lists`. Output: int32
    `[1 + B * Hkv * tiles * chunks]`, zero and the number of entries of each row, tile of keys
    and chunk of tokens. With `limit` there is one more input, the `counts` of `tile_block_lists.lists`.
    """
    return _kernel("inverse_counts", Walk(spec, fill=False), (), (_edges(spec),))


@functools.cache
def filled(spec: BlockQueryLists) -> Kernel:
    """Inputs: those of `counted`, and the running sum of its output. Outputs, int32
    `[entries]`: the unit of each entry, and if `marked` its mark
    (`dkv.partial_sums`); what stands past the last entry is undefined.
    """
    lists = jax.ShapeDtypeStruct((spec.entries,), jnp.int32)
    outputs = (lists,) * (1 + spec.marked)
    return _kernel("inverse_lists", Walk(spec, fill=True), (_edges(spec),), outputs)


@functools.cache
def slots(spec: BlockQueryLists) -> Kernel:
    """As `filled`, of a spec of single tokens whose blocks are tiles of keys. Output: int32
    `[entries]`: where in the selection each entry stands, `(token * Hkv + head) * n + slot`.
    """
    if spec.tokens != 1 or spec.packed or spec.block != ROWS:
        raise ValueError(f"slots are of single tokens and tiles of keys, got {spec}")
    lists = jax.ShapeDtypeStruct((spec.entries,), jnp.int32)
    return _kernel("inverse_slots", Walk(spec, True, slots=True), (_edges(spec),), (lists,))


def _edges(spec):
    return jax.ShapeDtypeStruct((1 + spec.rows * spec.tiles * spec.chunks,), jnp.int32)


def _kernel(name, walk, more, outputs):
    spec = walk.spec

    def body(*refs):
        warp.each(walk.make, refs, [lax.axis_index("row"), lax.axis_index("group")])

    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    by_token = shape((spec.B, spec.T))
    inputs = [shape((spec.B, spec.T, spec.Hkv, spec.n)), by_token, by_token]
    if spec.limit:
        inputs += [shape((spec.B, spec.Hkv, -(-spec.T // spec.tile), 2))]
    call = plgpu.kernel(
        body,
        out_type=outputs,
        grid=(spec.rows, -(-spec.chunks // WARPS)),
        grid_names=("row", "group"),
        scratch_types=[
            plgpu.SMEM((WARPS, spec.bits), jnp.int32),
            plgpu.SMEM((WARPS, spec.window), jnp.int32),
        ],
        compiler_params=operands.PARAMS,
    )
    return Kernel(name, spec, call, (*inputs, *more), outputs)
