"""Defines the memory layout of dS, and the kernel that computes dq from dS.

The kernel `dkv` writes dS.

`dkv` has dS^T `[64 keys, 64 rows]` in registers as the left operand of a product. The dq kernel
needs dS `[64 rows, 64 keys]` as a left operand. A warp has 16 rows of a left operand, as matrices
of 8 x 8. In `dkv`, a warp's numbers for 16 keys and 16 query rows are four matrices of 8 x 8, which
`movmatrix` transposes. After the transposition, a lane has eight numbers that one lane of the dq
kernel needs. The lane stores the eight numbers with one instruction. A slot of a token is
`[group_rows / 16, 4, 32, 8]`:

| axis | index                                              |
|------|----------------------------------------------------|
| 0    | 16 heads, which belong to one warp of dq           |
| 1    | 16 keys, which belong to one warp of `dkv`         |
| 2    | lane l                                             |
| 3    | heads l / 4 (+ 8) x keys 2 (l % 4) (+ 1, + 8, + 9) |

With a group of eight heads the layout is `[4, 32, 4]`. With eight heads, the 16 rows of a warp
belong to two tokens, and each token has its own slot.

In Pallas' interpreter, a slot is `[group_rows, 64]` in row-major order.

The dq kernel reads the dS that `dkv` wrote, and adds dS K over the blocks of a token.

Query-stationary: a CTA is one warpgroup with one tile of 64 query rows. The CTA reads the blocks of
the tile's list, `[64 keys, D]` each, through a ring buffer. A warp holds dS of its 16 rows. The 16
rows of a warp belong to one token, or to two tokens if groups have eight heads. The warp reads dS
from global memory two blocks ahead. The kernel needs no masks, since dS is zero if a token did not
select a block. The kernel computes no exponentials, since dS is stored.

In dQ += dS K, K of a block is read from a ring buffer in shared memory, which TMA fills. The dS of
the block is loaded from global memory to registers.

Bound: the traffic from L2 to shared memory, which is half of the traffic of the kernel
`selected_dq`. dS is read once from HBM. At B=1 H=64 Hkv=4 D=128 T=65536 n=16, the kernel reads 54
GB of K on random selections, and 8.6 GB of dS.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import interpreter, operands, warp, wgmma
from kernels_pallas.mosaic.operands import MATRIX, div, div_rem, rem
from kernels_pallas.mosaic.refs import build_kernel
from kernels_pallas.mosaic.selected import list_counts
from kernels_pallas.mosaic.warp import Word
from kernels_pallas.specs.selected import LIST_CHUNK
from kernels_pallas.specs.stored_ds import FIRST_ROW, HEADS, KEYS, StoredDsQuery
from kernels_pallas.specs.tile import LANES, ROWS, WARPS

PART = 16  # rows, or keys, of a warp
HALF_BYTES = 8  # bytes per lane of 8 heads and 16 keys
NO_ENTRY = -1  # an index or a block where there is no entry


class StoredDs(NamedTuple):
    """Reads and writes the array ds (`specs/stored_ds.py`) with a warpgroup. A token has
    `group_rows` rows.
    """

    group_rows: int
    selection_entries: int
    interpret: Any

    @property
    def tokens(self) -> int:
        """The number of tokens that fill a tile of 64 rows."""
        return ROWS // self.group_rows

    @property
    def tokens_of_warp(self) -> int:
        """The number of tokens whose heads are in the 16 rows of a warp."""
        return max(PART // self.group_rows, 1)

    @property
    def _by_lane(self):
        """Return shape and thread layout of an array with one number per token of a warp."""
        shape = (WARPS * LANES * self.tokens_of_warp,)
        return shape, plgpu.Layout.WG_STRIDED(shape, self.tokens_of_warp)

    def write(self, ds, transposed, places) -> None:
        """Write `transposed`, which is dS^T `[64 keys, 64 rows]`, to `ds`. `places` has the
        index in `ds` of each token. A token with a negative index is not written.
        """
        if self.interpret:
            for t, place in enumerate(places):
                rows = slice(t * self.group_rows, (t + 1) * self.group_rows)

                @pl.when(place >= 0)
                def _(place=place, rows=rows):
                    ds[place] = transposed[:, rows].T.astype(ds.dtype)

            return

        def put(ds, *arguments):
            *places, transposed = arguments
            pairs = [Word(x) for x in wgmma.registers(transposed)]
            rows = HEADS * self._halves
            for row in range(0, ROWS, rows):
                place, part = places[row // self.group_rows], warp.word(row // rows)
                # The matrices of 8 x 8, by rows and keys: (0, 0), (1, 0), (0, 1), (1, 1).
                of_half = [pairs[i : i + 2] for i in range(row // 4, (row + rows) // 4, 2)]
                ordered = [x for pair in zip(*of_half, strict=True) for x in pair]
                address = self._address(ds, place, part, warp.warp())
                warp.put_several(address, [warp.transposed(x) for x in ordered], place >= 0)

        warp.each(put, [ds], places, [transposed], MATRIX)

    def blocks_of_tile(self, indices, places, b, kv_head, first, length):
        """Return the selected blocks to which the tokens of a tile of 64 rows attend.

        Args:
          indices: int32 `[B, T, Hkv, n]`.
          places: `position` `[B, T]`, and for packed rows also `key_start` `[B, T]`. With
            `key_start`, a block is identified by the index of its first key in the row. Without
            `key_start`, a block is identified by its index in the sequence.
          b: Batch row.
          kv_head: Key/value head.
          first: First token.
          length: T.
        """
        shape, layout = self._by_lane

        def load(*arguments):
            count = 1 + len(places)
            found = [x.value for x in slots(warp, arguments[:count], arguments[count:])]
            kind = ir.VectorType.get((len(found),), found[0].type)
            held = vector.from_elements(kind, found)
            return wgmma.fragments(np.array([held], object), layout.to_mgpu(), True)

        def slots(warp, arrays, words):
            """For each token of the warp, return the block in the slot with the lane's index."""
            b, kv_head, first, length = words
            own = [first + self._token(warp, half) for half in range(self.tokens_of_warp)]
            return [slot_of(warp, arrays, b, kv_head, token, length) for token in own]

        def slot_of(warp, arrays, b, kv_head, token, length):
            """Return the block in the lane's slot of a token."""
            indices, position, *key_start = arrays
            heads, slot = interpreter.shape_of(indices)[2], warp.lane()
            exists = (token < length) & (slot < self.selection_entries)
            token = b * length + warp.smaller(token, length - 1)
            slot = warp.smaller(slot, self.selection_entries - 1)
            size = 4 * self.selection_entries
            at = (token, heads * size), (kv_head, size), (slot, 4)
            block = warp.fetch(warp.element(indices, *at))
            own = warp.fetch_int(position, token)
            seen = exists & (own >= 0) & (block * KEYS <= own)
            for array in key_start:
                seen = seen & (block >= 0)
                block = block * KEYS + warp.fetch_int(array, token)
            return warp.where(seen, block, NO_ENTRY)

        arrays, scalars = [indices, *places], [b, kv_head, first, length]
        if self.interpret:
            tokens = self.tokens_of_warp

            def program(warp, arrays, words, places):
                at = places[0] + (warp.warp() * LANES + warp.lane()) * (4 * tokens)
                for half, block in enumerate(slots(warp, arrays, words)):
                    warp.write(at, block, 4 * half)

            result = jax.ShapeDtypeStruct((WARPS, LANES, tokens), jnp.int32)
            (found,) = interpreter.written(program, arrays, scalars, [result])
            # Each row of `found` has the slots of one token, to which 16 or 8 rows of the tile
            # belong.
            found = found.swapaxes(1, 2).reshape(-1, LANES)
            return found[:: len(found) // self.tokens]

        result = plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=layout)
        return warp.each(load, arrays, scalars, result=result)

    def read(self, ds, blocks, block, token):
        """Return dS `[64 rows, 64 keys]` of a block.

        The result is zero for tokens that did not select the block or do not attend to the block.

        Args:
          blocks: The result of `blocks_of_tile`.
          block: The identifier of a block, as in `blocks`.
          token: Index in ds of the first token of the 64 rows: `row * T + first`.
        """
        if self.interpret:
            return self._read_interpreted(ds, blocks, block, token)

        def load(ds, blocks, block, token):
            slots, own = [], blocks.registers.flat[0]
            for i in range(self.tokens_of_warp):
                slots.append(warp.first_equal(Word(vector.extract(own, [], [i])), block))
            pairs = []
            for keys in range(KEYS // PART):
                found = []
                for half, slot in enumerate(slots):
                    place = (token + self._token(warp, half)) * self.selection_entries + slot
                    part = warp.warp() * len(slots) + half
                    address = self._address(ds, place, part, warp.word(keys))
                    found.append(warp.fetch_several(address, 2 * self._halves, slot >= 0))
                # The matrices of 8 x 8, by rows and keys: (0, 0), (1, 0), (0, 1), (1, 1).
                pairs += [pair for both in zip(*found, strict=True) for pair in both]
            dtype = ir.MemRefType(ds.type).element_type
            return wgmma.array_of_pairs([x.value for x in pairs], dtype)

        types, result = [self._by_lane[1]], operands.matrix_type((ROWS, KEYS), ds.dtype)
        return warp.each(load, [ds, blocks], [block, token], types=types, result=result)

    def _read_interpreted(self, ds, blocks, block, token):
        parts = []
        for t in range(self.tokens):
            chosen = blocks[t] == block
            place = (token + t) * self.selection_entries + jnp.argmax(chosen).astype(jnp.int32)
            place = jnp.where(chosen.any(), place, 0)
            found = ds[place]
            parts.append(jnp.where(chosen.any(), found, jnp.zeros_like(found)))
        return jnp.concatenate(parts)

    def _token(self, warp, half: int):
        """Return the token of the tile to which 8 rows of the warp belong. `half` is 0 for the
        first 8 rows and 1 for the second 8 rows.
        """
        rows = warp.warp() * PART + half * HEADS
        return rows // self.group_rows

    @property
    def _halves(self) -> int:
        """Return the number of groups of 8 heads per token and lane."""
        return PART // HEADS // self.tokens_of_warp

    def _address(self, ds, place, part, keys):
        """Return the address of a lane's numbers of dS for 16 keys and 8 or 16 heads.

        `part` is the index of these 8 or 16 heads in the tile.
        """
        lane_bytes = HALF_BYTES * self._halves
        keys_bytes = LANES * lane_bytes
        part_bytes = KEYS // PART * keys_bytes
        parts = max(self.group_rows // PART, 1)
        sizes = parts * part_bytes, part_bytes, keys_bytes, lane_bytes
        numbers = place, part % parts, keys, warp.lane()
        return warp.element(ds, *zip(numbers, sizes, strict=True))


STAGES = 2  # number of blocks of keys that are loaded or read at a time
AHEAD = 2  # number of blocks from the load of dS to the product with dS


def dq(kernel: Kernel):
    """The body of the kernel `specs.stored_ds.dq`."""
    spec: StoredDsQuery = kernel.spec
    tile, tokens = spec.query_tile, spec.tile.tokens
    interpret = spec.interpret
    buffers = operands.Buffers.of(spec, tile)
    stored = StoredDs(tile.rows, spec.n, interpret)

    def body(refs):
        row = refs.ds_chunk[FIRST_ROW] + refs.cta.row
        b, kv_head = div_rem(row, spec.Hkv)
        index = refs.cta.tile
        first, length = index * tokens, refs.sizes.T
        for i in range(0, spec.entries, LIST_CHUNK):
            chunk = pl.ds(i, LIST_CHUNK)
            source = refs.block_starts.at[b, kv_head, index, chunk]
            plgpu.copy_gmem_to_smem(source, refs.starts.at[chunk], refs.list_ready)

        def heads_of(array, t):
            """Return a function that maps a slice of columns to these columns of token `t` of the
            tile.
            """
            heads = pl.ds(kv_head * tile.group, tile.group)
            return lambda columns: array.at[b, pl.ds(first + t, 1), heads, columns]

        if spec.added:
            for t in range(tokens):
                rows = heads_of(refs.added, t)
                buffers.load_rows(rows, refs.out_tile, 0, spec.D, refs.added_ready, t)
        count = list_counts(refs.block_counts, row * refs.sizes.tiles + index).blocks
        place = b, kv_head, first, length
        key_start = [refs.key_start] if spec.packed else []
        blocks = stored.blocks_of_tile(refs.indices, [refs.position, *key_start], *place)
        plgpu.barrier_wait(refs.list_ready)

        def load_key(i):
            """Start the copy of block `i`, if such a block exists."""

            @pl.when(i < count)
            def _():
                stage, keys = rem(i, STAGES), pl.ds(refs.starts[i], KEYS)
                buffers.load_keys(
                    lambda columns: refs.key.at[b, keys, kv_head, columns],
                    refs.key_ring,
                    stage,
                    refs.key_ready.at[stage],
                )

        def ds_of(i):
            """Return dS of block `i`, `[64, 64]`, which is zero after the last block."""
            start = refs.starts[jnp.minimum(i, spec.entries - 1)]
            if not spec.packed:
                start = div(start, KEYS)
            block = jnp.where(i < count, start, NO_ENTRY - 1)
            token = refs.cta.row * length + first
            return stored.read(refs.ds, blocks, block, token)

        for i in range(STAGES):
            load_key(jnp.int32(i))

        def step(i, state):
            acc, ds, *following = state
            following.append(ds_of(i + AHEAD))
            stage = rem(i, STAGES)
            plgpu.barrier_wait(refs.key_ready.at[stage])
            acc = buffers.start_sum(acc, ds, (refs.key_ring, stage))
            (acc,) = buffers.finish(acc)
            plgpu.commit_smem()  # all four warps are done with this stage
            load_key(i + STAGES)
            return acc, *following

        first_ds = [ds_of(jnp.int32(i)) for i in range(AHEAD)]
        state = operands.zeros(spec.D), *first_ds
        acc, *_ = lax.fori_loop(0, count, step, state)
        added = None
        if spec.added:
            plgpu.barrier_wait(refs.added_ready)
            added = buffers.read_rows(refs.out_tile, 0, spec.D)
        buffers.write_rows(refs.out_tile, 0, acc * spec.scale, added)
        plgpu.commit_smem()
        for t in range(tokens):
            buffers.store_rows(refs.out_tile, 0, spec.D, heads_of(refs.dq, t), t)
        plgpu.wait_smem_to_gmem(0)

    slabs = spec.D // tile.slab
    return build_kernel(
        kernel,
        body,
        scratch={
            "key_ring": buffers.ring(STAGES, KEYS, spec.D),
            "out_tile": buffers.rows(1, spec.D, tokens),
            "starts": plgpu.SMEM((spec.entries,), jnp.int32),
            "list_ready": operands.barriers(spec.entries // LIST_CHUNK),
            "key_ready": operands.barriers(slabs, STAGES),
            "added_ready": operands.barriers(slabs * tokens),
        },
        grid_names=("row", "tile"),
    )
