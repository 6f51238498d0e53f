"""Computes attention to selected blocks, forward and dq. Each tile of queries loops over its block
list.

Algorithm: FlashAttention's online softmax, and FlashAttention's query-stationary backward
(`mainloop.py`). If a token did not select a block, forward uses P = 0 and an unchanged maximum for
the rows of the token. In dq, shift = +inf makes P = 0 in the rows of a token that did not select
the block.

Query-stationary: a CTA is one warpgroup with one tile of 64 query rows. The loop includes every
block that a token of the tile selected (`lists.py`). The rows of tokens that did not select the
block are masked. There is no producer: the warpgroup itself starts the copies of its blocks. A
stage of a ring buffer is refilled as soon as all four warps have read the stage.

Several small CTAs on an SM hide each other's latency. At D = Dv = 128 and blocks of 64 keys, an SM
has three CTAs in forward (64 KiB each and the block list) and two CTAs in dq (96 KiB each). Batch
and key/value head are the slowest grid axis, so that the keys of one head stay in L2.

In a block list, the first `full_blocks` blocks need no mask by key: every token that selected one
of these blocks attends to all keys of the block. For each of the other blocks, some tokens may
attend to only a part of the block.

A gathered tile skips the far blocks of its list. `specs/selected.py` defines gathered tiles and
far blocks.

With `specs.selected.overlap_pv`, forward computes P V of a block during the work on the next
block.
Tiles: 64 rows x one selection block. Stages: `specs.selected` computes `key_stages` and
`value_stages` with `forward_stages`, `FP8_STAGES` (for e4m3) and `dq_stages`.

Bound: the latency of a block's steps (wait for the keys, S, softmax). On random selections the
bound is the traffic from L2 to shared memory. Each block of a tile's list is copied once
(docs/kernels/selected.md). Floors at B=1 H=64 Hkv=4 D=Dv=128 T=65536 n=16 on an H100: forward
2.2 TFLOP = 2.2 ms, dq 3.3 TFLOP = 3.3 ms; query and output, each moved once, 0.64 ms; the
blocks of the lists, 108 GB on random selections, 13 ms at 8.3 TB/s.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import mainloop, operands
from kernels_pallas.mosaic.mainloop import Block, TilePlace, over_blocks, rings, rows_of
from kernels_pallas.mosaic.operands import MATRIX, PER_ROW, Buffers, across, div, div_rem, rem
from kernels_pallas.mosaic.refs import build_kernel
from kernels_pallas.mosaic.row_io import TileRows
from kernels_pallas.specs.selected import COUNTS, LIST_CHUNK, BlockCounts, SelectedAttention
from kernels_pallas.specs.tile import ROWS


def forward(kernel: Kernel) -> Callable:
    """The body of the kernel `specs.selected.forward`."""
    spec = kernel.spec
    rows = {"query": spec.D}
    return _build(kernel, mainloop.forward, rows, "out", spec.Dv, spec.overlap_pv)


def dq(kernel: Kernel) -> Callable:
    """The body of the kernel `specs.selected.dq`."""
    spec = kernel.spec
    return _build(kernel, mainloop.dq, {"query": spec.D, "do": spec.Dv}, "dq", spec.D, False)


def list_counts(block_counts, index) -> BlockCounts:
    """Return the `BlockCounts` at row `index` of `block_counts`."""
    # Sums, not loads: under `shard_map` only sums have the type of varying values.
    return BlockCounts(*(block_counts[index, i] + 0 for i in range(COUNTS)))


class LoopBlocks(NamedTuple):
    """The blocks over which a tile loops."""

    full_blocks: Any  # number of first blocks, which need no mask by key
    blocks: Any  # number of all blocks
    far_begin: Any  # from this loop index on, list indices are `far` larger than loop indices
    far: Any  # number of skipped blocks of the list; None means that no tile skips blocks

    def place(self, i):
        """Return the index in the list of the `i`-th block of the loop."""
        return i if self.far is None else i + jnp.where(i >= self.far_begin, self.far, 0)


def tile_is_gathered(block_counts, tile, index, gather_limit: int):
    """Return whether `specs/gathered.py` computes the far blocks of a tile.

    The far blocks are gathered if the block list of the previous tile is longer than
    `gather_limit`. The tile's own list cannot decide, since this list includes blocks of later
    tokens, and no output may depend on later tokens.

    Args:
      block_counts: int32 `[lists, 6]`, the array of all tiles.
      tile: Index of the tile along the tokens.
      index: Index of the tile's list in `block_counts` (`specs.selected.BlockCounts`).
      gather_limit: A positive number of blocks.
    """
    before = list_counts(block_counts, jnp.where(tile > 0, index - 1, index)).blocks
    return (tile > 0) & (before > gather_limit)


def _build(
    kernel: Kernel,
    mainloop_of: Callable[[SelectedAttention, Any, TilePlace], mainloop.Mainloop],
    rows: dict[str, int],
    out: str,
    width: int,
    overlap_pv: bool,
) -> Callable:
    """Return a kernel.

    Args:
      kernel: The description of the kernel.
      mainloop_of: Function that returns the operations on a tile.
      rows: Widths of the arrays of query rows that are read. The tile of the first array also
        holds `added` and the result.
      out, width: The array `[B, T, H, width]` of the result.
      overlap_pv: Whether P V of a block is computed during the work on the next block.
    """
    spec: SelectedAttention = kernel.spec
    buffers, size = Buffers.of(spec, spec.tile), spec.tile
    keys, values = rings(spec)

    def body(refs):
        b, kv_head = div_rem(refs.cta.head, spec.Hkv)
        tile = TilePlace(b, kv_head, refs.cta.tile, 0)
        for i in range(0, spec.entries, LIST_CHUNK):
            chunk = pl.ds(i, LIST_CHUNK)
            starts = refs.block_starts.at[b, kv_head, tile.index, chunk]
            plgpu.copy_gmem_to_smem(starts, refs.starts.at[chunk], refs.list_ready)
            for word in range(spec.words):
                members = refs.block_members.at[b, kv_head, tile.index, word, chunk]
                to = refs.members.at[word, chunk]
                plgpu.copy_gmem_to_smem(members, to, refs.list_ready)
        for name, columns in rows.items():
            source = rows_of(size, getattr(refs, name), tile)
            to = getattr(refs, f"{name}_tile")
            buffers.load_rows(source, to, 0, columns, refs.rows_ready)
        looped = _loop_blocks(spec, refs, tile)
        key_end = refs.key_end.at[b * refs.sizes.tiles + tile.index]
        key_end = operands.load(key_end, PER_ROW)  # [64]
        token = div(operands.row_index(), size.group)  # [64]

        def load(ring, source, blocks, ready, stages, i):
            """Start the copy of block `i` of the loop, if there is such a block."""

            @pl.when(i < looped.blocks)
            def _():
                stage = rem(i, stages)
                start = refs.starts[looped.place(i)]

                def copy(array, row, first):
                    ring.load(array, row, kv_head, first, blocks, stage, ready.at[stage])

                if not spec.pages:
                    copy(getattr(refs, source), b, start)
                    return
                is_last = start + spec.block > refs.lengths[b]
                page = div(start, spec.block)
                first = refs.page_table[b * refs.sizes.pages + page] * spec.block
                pl.when(is_last)(lambda: copy(getattr(refs, f"last_{source}"), b, 0))
                pl.when(~is_last)(lambda: copy(getattr(refs, source), 0, first))

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
            key_stage, value_stage = rem(i, spec.key_stages), rem(i, spec.value_stages)
            place = looped.place(i)
            bits = lax.broadcast(refs.members[0, place], (ROWS,))
            if spec.words == 2:
                high = lax.broadcast(refs.members[1, place], (ROWS,))
                bits = jnp.where(token < 32, bits, high)
            row_mask = (lax.shift_right_logical(bits, token & 31) & 1) == 1  # [64]

            def free_key():
                plgpu.commit_smem()  # all four warps have read this stage
                load_key(i + spec.key_stages)

            def free_value():
                plgpu.commit_smem()
                load_value(i + spec.value_stages)

            seen = (lambda: visible(place)) if under_mask else (lambda: None)
            return Block(key_stage, value_stage, row_mask, seen, free_key, free_value)

        loop, blocks = mainloop_of(spec, refs, tile), looped.blocks
        state = lax.cond(
            blocks > 0,
            lambda: over_blocks(loop, block_at, looped.full_blocks, blocks, False, overlap_pv),
            lambda: loop.state,
        )
        result = loop.finish(state)  # [64, width]

        out_tile, added = refs.query_tile, None
        if spec.added:
            plgpu.commit_smem()  # all four warps have read the query
            source = rows_of(size, refs.added, tile)
            buffers.load_rows(source, out_tile, 0, width, refs.added_ready)
            plgpu.barrier_wait(refs.added_ready)
            added = buffers.read_rows(out_tile, 0, width)
        buffers.write_rows(out_tile, 0, result, added)
        plgpu.commit_smem()
        buffers.store_rows(out_tile, 0, width, rows_of(size, getattr(refs, out), tile))
        if spec.summed:
            _store_total(spec, refs, tile, result)
        plgpu.wait_smem_to_gmem(0)

    barriers, tiles = operands.barriers, rows | {"query": max(spec.D, width)}
    return build_kernel(
        kernel,
        body,
        scratch={
            **{f"{name}_tile": buffers.rows(1, columns) for name, columns in tiles.items()},
            "key_ring": keys.scratch(spec.key_stages),
            "value_ring": values.scratch(spec.value_stages),
            "starts": plgpu.SMEM((spec.entries,), jnp.int32),
            "members": plgpu.SMEM((spec.words, spec.entries), jnp.int32),
            "rows_ready": barriers(sum(rows.values()) // size.slab),
            "list_ready": barriers((1 + spec.words) * spec.entries // LIST_CHUNK),
            "key_ready": barriers(keys.copies, spec.key_stages),
            "value_ready": barriers(values.copies, spec.value_stages),
            "added_ready": barriers(width // size.slab),
        },
        grid_names=("head", "tile"),
    )


def _loop_blocks(spec: SelectedAttention, refs, tile: TilePlace) -> LoopBlocks:
    """Return the blocks of a tile's loop.

    A gathered tile loops over the near blocks of its list, and any other tile loops over all blocks
    of its list.
    """
    counts = refs.block_counts
    index = refs.cta.head * refs.sizes.tiles + tile.index
    found = list_counts(counts, index)
    if not spec.gather_limit:
        return LoopBlocks(found.full_blocks, found.blocks, None, None)
    gathered = tile_is_gathered(counts, tile.index, index, spec.gather_limit)
    far = jnp.where(gathered, found.far_end - found.far_begin, 0)
    far_full = jnp.clip(found.full_blocks - found.far_begin, 0, far)
    return LoopBlocks(found.full_blocks - far_full, found.blocks - far, found.far_begin, far)


def _store_total(spec: SelectedAttention, refs, tile: TilePlace, result) -> None:
    """Store the sum over the branches of the output times the gate.

    As in `combine.gated_sum`, the outputs are added in the order of branches. `result` is the
    output of the selected branch. The copy of `result` from the query's tile to memory may still be
    running.
    """
    size, width, out_tile = spec.tile, spec.Dv, refs.query_tile
    buffers = Buffers.of(spec, size)
    tile_rows = TileRows.of(spec)
    places = tile.b, tile.index * size.tokens, tile.kv_head * size.group, refs.sizes.T
    gates = refs.gate_0, refs.gate_1, refs.gate_2
    of_compressed, own, of_sliding = (tile_rows.values(gate, *places) for gate in gates)
    slabs = range(0, width, size.slab)

    def added(total, outputs, gate):
        terms = (x.astype(jnp.float32) * across(gate, x.shape) for x in outputs)
        return [x + term for x, term in zip(total, terms, strict=True)]

    def loaded(array):
        source = rows_of(size, array, tile)
        buffers.load_rows(source, out_tile, 0, width, refs.added_ready)
        plgpu.barrier_wait(refs.added_ready)
        return buffers.read_rows(out_tile, 0, width)

    total = [operands.zeros(size.slab) for _ in slabs]
    rounded = [result[:, i : i + size.slab].astype(buffers.dtype) for i in slabs]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    total = added(total, loaded(refs.out_0), of_compressed)
    total = added(total, rounded, own)
    plgpu.commit_smem()  # all four warps have read the tile
    total = added(total, loaded(refs.out_2), of_sliding)
    for i, part in enumerate(total):
        buffers.write_slab(out_tile, 0, i, part)
    plgpu.commit_smem()
    buffers.store_rows(out_tile, 0, width, rows_of(size, refs.total, tile))
