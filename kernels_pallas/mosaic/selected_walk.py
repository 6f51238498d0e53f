"""The walk that forward and dq of selected attention share: a tile over its block list.

Query-stationary: a CTA is one warpgroup with one tile of 64 query rows. The tokens of a tile
share every block that one of them selected (`tile_block_lists.py`); rows of tokens that did not
are masked. The warpgroup copies for itself: a stage of a ring buffer is refilled as soon as all
four warps are done with it.

Several small CTAs on an SM hide each other's latency: at D = Dv = 128 and blocks of 64 keys three
in forward (64 KiB each and the block list), two in dq (96 KiB). Batch and key/value head are the
slowest grid axis, so that the keys of one head stay in L2.

    block list    |--- every member sees the whole block ---|--- some see a part ---|
    blocks        0                    ..              full_blocks      ..       blocks

A tile that is gathered passes over the far blocks of its list (`specs/selected.py`).

Forward overlaps P V (`tile_walk.py`) where `specs.variants.overlap_pv`.

Tiles: 64 rows x one selection block. Stages: `key_stages` and `value_stages` of the spec; forward
has those of `specs.selected.forward_stages` unless it is tuned (`tiles.py`), dq those of
`specs.selected.dq_stages`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import operands
from kernels_pallas.mosaic.operands import MATRIX, PER_ROW, across
from kernels_pallas.mosaic.refs import build_kernel
from kernels_pallas.mosaic.ring import rings
from kernels_pallas.mosaic.row_io import TileRows
from kernels_pallas.mosaic.tile_walk import Block, Mainloop, TilePlace, over_blocks
from kernels_pallas.specs.selected import COUNTS, LIST_CHUNK, BlockCounts, SelectedAttention
from kernels_pallas.specs.tile import ROWS


def list_counts(block_counts, index) -> BlockCounts:
    """Row `index` of `block_counts`."""
    # Sums, not loads: under `shard_map` only they have the type of what varies.
    return BlockCounts(*(block_counts[index, i] + 0 for i in range(COUNTS)))


class Walked(NamedTuple):
    """The blocks that a tile walks over."""

    full_blocks: Any  # need no mask by key, and come first
    blocks: Any
    far_begin: Any  # places in the list from here on are `far` further than in the walk
    far: Any  # how many blocks of the list are passed over; None: none is in any tile

    def place(self, i):
        """Of the `i`-th one in the list."""
        return i if self.far is None else i + jnp.where(i >= self.far_begin, self.far, 0)


def tile_is_gathered(block_counts, tile, index, gather_limit: int):
    """Whether far blocks of a tile are left to `specs/gathered.py`: the block list of the tile
    before it is longer than `gather_limit`. Its own list cannot decide, as no output may depend
    on tokens after its own.

    Args:
      tile: along the tokens.
      index: of its list in `block_counts` (`specs.selected.BlockCounts`).
    """
    before = list_counts(block_counts, jnp.where(tile > 0, index - 1, index)).blocks
    return (tile > 0) & (before > gather_limit)


@dataclasses.dataclass(frozen=True)
class SelectedWalk:
    """Sizes that follow from those of the problem.

    Attributes:
      spec: of the problem.
      rows: scratch for the tile's rows of each source of `run`, width by name. The first one,
        the query, is reused to stage `added` and the output, so it has the larger width.
      out_width: columns of the output.
      overlap_pv: whether the product of a block's factor runs beside the work on the next block.
    """

    spec: SelectedAttention
    rows: Mapping[str, int]
    out_width: int
    overlap_pv: bool = False

    @property
    def buffers(self) -> operands.Buffers:
        spec = self.spec
        return operands.Buffers(jnp.dtype(spec.dtype), spec.tile, bool(spec.interpret))

    def build(self, kernel: Kernel, body: Callable) -> Callable:
        """The kernel of `body(refs)`, which calls `run`."""
        spec, buffers, slab = self.spec, self.buffers, self.spec.tile.slab
        keys, values = rings(spec)
        rows = dict(self.rows)
        query = next(iter(rows))
        rows[query] = max(rows[query], self.out_width)

        def barriers(arrivals, count=1):
            return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)

        return build_kernel(
            kernel,
            body,
            scratch={
                **{name: buffers.rows(1, width) for name, width in rows.items()},
                "key_ring": keys.scratch(spec.key_stages),
                "value_ring": values.scratch(spec.value_stages),
                "starts": plgpu.SMEM((spec.entries,), jnp.int32),
                "members": plgpu.SMEM((spec.words, spec.entries), jnp.int32),
                "rows_ready": barriers(sum(self.rows.values()) // slab),
                "list_ready": barriers((1 + spec.words) * spec.entries // LIST_CHUNK),
                "key_ready": barriers(keys.copies, spec.key_stages),
                "value_ready": barriers(values.copies, spec.value_stages),
                "added_ready": barriers(self.out_width // slab),
            },
            grid_names=("head", "tile"),
            interpret=spec.interpret,
        )

    def run(
        self, refs, sources: Iterable, out, mainloop_of: Callable[[TilePlace], Mainloop]
    ) -> None:
        """The body of a kernel.

        Args:
          refs: of the kernel.
          sources: arrays `[B, T, H, .]` that are loaded into the scratch of `rows`.
          out: array `[B, T, H, out_width]`.
          mainloop_of: what to do with the tile.
        """
        spec, buffers = self.spec, self.buffers
        b = lax.div(refs.cta.head, jnp.int32(spec.Hkv))
        kv_head = lax.rem(refs.cta.head, jnp.int32(spec.Hkv))
        tile = TilePlace(b, kv_head, refs.cta.tile, 0)
        self._load_list(refs, tile)
        tiles = [getattr(refs, name) for name in self.rows]
        for source, scratch, width in zip(sources, tiles, self.rows.values(), strict=True):
            rows = self._rows_of(source, tile)
            buffers.load_rows(rows, scratch, 0, width, refs.rows_ready)
        walked = self._walked(refs, tile)
        key_end = refs.key_end.at[b * refs.sizes.tiles + tile.index]
        key_end = plgpu.load(key_end, layout=PER_ROW, optimized=False)  # [64]
        token = lax.div(operands.row_index(), jnp.int32(spec.tile.group))  # [64]

        def load(ring, source, blocks, ready, stages, i):
            """Starts the copy of block `i`, if there is one."""

            @pl.when(i < walked.blocks)
            def _():
                stage = lax.rem(i, jnp.int32(stages))
                start = refs.starts[walked.place(i)]

                def copy(array, row, first):
                    ring.load(array, row, kv_head, first, blocks, stage, ready.at[stage])

                if not spec.pages:
                    copy(getattr(refs, source), b, start)
                    return
                is_last = start + spec.block > refs.lengths[b]
                page = lax.div(start, jnp.int32(spec.block))
                first = refs.page_table[b * refs.sizes.pages + page] * spec.block
                pl.when(is_last)(lambda: copy(getattr(refs, f"last_{source}"), b, 0))
                pl.when(~is_last)(lambda: copy(getattr(refs, source), 0, first))

        keys, values = rings(spec)
        load_key = functools.partial(
            load, keys, "key", refs.key_ring, refs.key_ready, spec.key_stages
        )
        load_value = functools.partial(
            load, values, "value", refs.value_ring, refs.value_ready, spec.value_stages
        )

        plgpu.barrier_wait(refs.list_ready)
        for i in range(spec.key_stages):
            load_key(jnp.int32(i))
        for i in range(spec.value_stages):
            load_value(jnp.int32(i))
        plgpu.barrier_wait(refs.rows_ready)

        def visible(place):
            shape = (ROWS, spec.block)
            index = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=MATRIX)
            return index < across(key_end - refs.starts[place], shape)

        def block_at(under_mask, i):
            key_stage = lax.rem(i, jnp.int32(spec.key_stages))
            value_stage = lax.rem(i, jnp.int32(spec.value_stages))
            place = walked.place(i)
            bits = lax.broadcast(refs.members[0, place], (ROWS,))
            if spec.words == 2:
                high = lax.broadcast(refs.members[1, place], (ROWS,))
                bits = jnp.where(token < 32, bits, high)
            row_mask = (lax.shift_right_logical(bits, token & 31) & 1) == 1  # [64]

            def free_key():
                plgpu.commit_smem()  # all four warps are done with this stage
                load_key(i + spec.key_stages)

            def free_value():
                plgpu.commit_smem()
                load_value(i + spec.value_stages)

            seen = (lambda: visible(place)) if under_mask else (lambda: None)
            return Block(key_stage, value_stage, row_mask, seen, free_key, free_value)

        mainloop = mainloop_of(tile)
        border, blocks = walked.full_blocks, walked.blocks
        state = lax.cond(
            blocks > 0,
            lambda: over_blocks(
                mainloop,
                block_at,
                border,
                blocks,
                masked_first=False,
                overlap_pv=self.overlap_pv,
            ),
            lambda: mainloop.state,
        )
        result = mainloop.finish(state)  # [64, width]

        out_tile, width, added = tiles[0], self.out_width, None
        if spec.added:
            plgpu.commit_smem()  # all four warps are done with the query
            rows = self._rows_of(refs.added, tile)
            buffers.load_rows(rows, out_tile, 0, width, refs.added_ready)
            plgpu.barrier_wait(refs.added_ready)
            added = buffers.read_rows(out_tile, 0, width)
        buffers.write_rows(out_tile, 0, result, added)
        plgpu.commit_smem()
        buffers.store_rows(out_tile, 0, width, self._rows_of(out, tile))
        if spec.summed:
            self._store_total(refs, tile, out_tile, result)
        plgpu.wait_smem_to_gmem(0)

    def _store_total(self, refs, tile: TilePlace, out_tile, result):
        """Stores the sum of the branches' outputs, each times its gate, in the order of branches,
        as `combine.gated_sum` does; `result`: of this one, which is on its way from `out_tile`.
        """
        size, width, buffers = self.spec.tile, self.out_width, self.buffers
        rows_of = TileRows(size.tokens, size.group, size.group, bool(self.spec.interpret))
        places = tile.b, tile.index * size.tokens, tile.kv_head * size.group, refs.sizes.T
        gates = refs.gate_0, refs.gate_1, refs.gate_2
        of_compressed, own, of_sliding = (rows_of.values(gate, *places) for gate in gates)
        slabs = range(0, width, size.slab)

        def added(total, outputs, gate):
            terms = (x.astype(jnp.float32) * across(gate, x.shape) for x in outputs)
            return [x + term for x, term in zip(total, terms, strict=True)]

        def loaded(array):
            rows = self._rows_of(array, tile)
            buffers.load_rows(rows, out_tile, 0, width, refs.added_ready)
            plgpu.barrier_wait(refs.added_ready)
            return buffers.read_rows(out_tile, 0, width)

        total = [operands.full((ROWS, size.slab), 0.0, MATRIX) for _ in slabs]
        rounded = [result[:, i : i + size.slab].astype(buffers.dtype) for i in slabs]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        total = added(total, loaded(refs.out_0), of_compressed)
        total = added(total, rounded, own)
        plgpu.commit_smem()  # all four warps have read the tile
        total = added(total, loaded(refs.out_2), of_sliding)
        for i, part in enumerate(total):
            buffers.write_slab(out_tile, 0, i, part)
        plgpu.commit_smem()
        buffers.store_rows(out_tile, 0, width, self._rows_of(refs.total, tile))

    def _load_list(self, refs, tile: TilePlace):
        """Starts copies of the tile's block list and its members."""
        b, kv_head, index, _ = tile
        for i in range(0, self.spec.entries, LIST_CHUNK):
            chunk = pl.ds(i, LIST_CHUNK)
            plgpu.copy_gmem_to_smem(
                refs.block_starts.at[b, kv_head, index, chunk],
                refs.starts.at[chunk],
                refs.list_ready,
            )
            for word in range(self.spec.words):
                plgpu.copy_gmem_to_smem(
                    refs.block_members.at[b, kv_head, index, word, chunk],
                    refs.members.at[word, chunk],
                    refs.list_ready,
                )

    def _walked(self, refs, tile: TilePlace) -> Walked:
        """All blocks of the list, or of a gathered tile those that are near."""
        counts, gather_limit = refs.block_counts, self.spec.gather_limit
        index = refs.cta.head * refs.sizes.tiles + tile.index
        found = list_counts(counts, index)
        if not gather_limit:
            return Walked(found.full_blocks, found.blocks, None, None)
        gathered = tile_is_gathered(counts, tile.index, index, gather_limit)
        far = jnp.where(gathered, found.far_end - found.far_begin, 0)
        far_full = jnp.clip(found.full_blocks - found.far_begin, 0, far)
        return Walked(found.full_blocks - far_full, found.blocks - far, found.far_begin, far)

    def _rows_of(self, array, tile: TilePlace):
        """The tile of `[B, T, H, .]`, by columns."""
        size = self.spec.tile
        tokens = pl.ds(tile.index * size.tokens, size.tokens)
        heads = pl.ds(tile.kv_head * size.group, size.group)
        return lambda columns: array.at[tile.b, tokens, heads, columns]
