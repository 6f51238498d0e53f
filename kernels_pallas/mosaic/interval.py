"""Computes interval attention for the compressed and the sliding branch, forward and dq.

Algorithm: FlashAttention's online softmax, and FlashAttention's query-stationary backward
(`mainloop.py`), which computes |g| P again from `shift`. If shared memory has room for a tile of
the result, one dq kernel handles both branches. With one dq kernel for both branches, Q and dO are
read once and dQ is written once.

Loop order: query-stationary and persistent. One CTA per SM processes work items, optionally the
longest first. A work item is two or three neighbouring tiles of 64 query rows. Each tile has a
consumer warpgroup (`spec.consumers`). One producer warpgroup copies the keys and values for all
consumers.

For each block of each work item, the producer warpgroup waits until a stage of the ring buffer is
free, and copies the block to the stage. For each block, a consumer warpgroup waits until the stage
is ready, computes, and releases the stage. After the last block of a work item, a consumer
warpgroup starts the loads of the next query, adds the previous sum (if any) to the result, and
stores the result.

A query may attend to two intervals, each with its own arrays (`spec.second_keys`). A consumer loops
over the two intervals one after the other. Between the two loops of a tile, the memory of the
tile's result stores the rounded result of the first interval. Forward computes P V of a block
during the work on the next block. The producer warpgroup fills all free stages of the ring buffer,
also with blocks of the next work item. A work item begins with masked blocks, to which some rows
attend only in part. The blocks to which all rows attend in full follow, without a mask:

    keys of the work item   begin |--- edge ---|------- full -------|--- edge ---| end
    blocks                  0     ..           left        ..       right        ..

Tiles: 64 rows x `block` keys per warpgroup. `block` is 64 to 128 in forward and 64 in dq.
`specs/interval.py` chooses the number of stages.

Bound: the tensor cores. The kernel of dq has three products per block, and the forward kernel has
two. Floors
at B=1 H=64 Hkv=4 D=Dv=128 T=65536 on an H100 (989 TFLOP/s, 3.35 TB/s):

| kernel  | compressed          | sliding             | query and output, each moved once |
|---------|---------------------|---------------------|-----------------------------------|
| forward | 4.40 TFLOP = 4.4 ms | 1.10 TFLOP = 1.1 ms | 2.1 GB = 0.64 ms                  |
| dq      | 6.6 TFLOP = 6.7 ms  | 1.65 TFLOP = 1.7 ms |                                   |
"""

from collections.abc import Callable
from types import SimpleNamespace
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
from kernels_pallas.specs.fp8 import GROUP
from kernels_pallas.specs.interval import IntervalAttention
from kernels_pallas.specs.tile import ROWS

NO_KEY = 1 << 30  # an index after the end of every array, from which copies read zeros


def forward(kernel: Kernel) -> Callable:
    """The body of the kernel `specs.interval.forward`."""
    spec = kernel.spec
    return _build(
        kernel, Tiles(spec, mainloop.forward, {"query": spec.D}, "out", spec.Dv, True)
    )


def dq(kernel: Kernel) -> Callable:
    """The body of the kernel `specs.interval.dq`."""
    spec = kernel.spec
    rows = {"query": spec.D, "do": spec.Dv}
    return _build(kernel, Tiles(spec, mainloop.dq, rows, "dq", spec.D, False))


class KeyBounds(NamedTuple):
    """The keys of an interval to which a work item attends. Every row attends to the keys from
    `full_from` to `full_to`. No row attends to a key before `begin` or from `end` on.
    """

    begin: Any
    full_from: Any
    full_to: Any
    end: Any


class WorkItem(NamedTuple):
    """A work item of the consumer warpgroups, with the bounds of its keys in each interval."""

    b: Any
    kv_head: Any
    tile0: Any
    bounds: tuple[KeyBounds, ...]


class Scheduler(NamedTuple):
    """The work items of this CTA. The CTA has `turns` work items. The indices of successive
    work items differ by `ctas`.
    """

    intervals: list  # for each interval, refs with the key arrays of that interval
    turns: Any
    work_item: Callable[[Any], WorkItem]  # by turn; past the last turn, the last item


class Tiles(NamedTuple):
    """Describes how a warpgroup processes its tiles.

    Attributes:
      mainloop_of: Function that returns the operations on a tile. The arguments of `mainloop_of`
        are the spec, refs with the keys of an interval, and the tile.
      rows: Widths of the arrays of query rows that are read. The tile of the first array also
        holds the result if there is no room for another tile.
      out, out_width: The array `[B, T, H, out_width]` of the result.
      overlap_pv: Whether P V of a block is computed during the work on the next block.
    """

    spec: IntervalAttention
    mainloop_of: Callable[[IntervalAttention, Any, TilePlace], mainloop.Mainloop]
    rows: dict[str, int]
    out: str
    out_width: int
    overlap_pv: bool

    @property
    def has_out_tile(self) -> bool:
        """Whether a tile of the output fits in addition to the query's tile.

        If both tiles fit, the copy of the next query overlaps with the copy of the output.
        """
        return self.spec.has_room(*self.rows.values(), self.out_width)


def _build(kernel: Kernel, tiles: Tiles) -> Callable:
    spec, slab = tiles.spec, tiles.spec.tile.slab
    buffers, consumers, stages = Buffers.of(spec, spec.tile), spec.consumers, spec.stages
    keys, values = rings(spec)
    consumer, producer = spec.registers
    operands.check_registers(*[consumer] * consumers, producer)
    rows = dict(tiles.rows)
    if tiles.has_out_tile:
        rows["out"] = tiles.out_width
    else:
        rows["query"] = max(rows["query"], tiles.out_width)

    def body(refs):
        wg = lax.axis_index("wg")
        scheduler = _schedule(spec, refs)

        @pl.when(wg < consumers)
        def _():
            if not spec.interpret:
                plgpu.set_max_registers(consumer, action="increase")
            _consume(tiles, refs, scheduler, wg)

        @pl.when(wg == consumers)
        def _():
            if not spec.interpret:
                plgpu.set_max_registers(producer, action="decrease")
            _produce(spec, refs, scheduler)

    barriers = operands.barriers
    return build_kernel(
        kernel,
        body,
        scratch={
            **{f"{name}_tile": buffers.rows(consumers, width) for name, width in rows.items()},
            "key_ring": keys.scratch(stages),
            "value_ring": values.scratch(stages),
            "rows_ready": barriers(sum(tiles.rows.values()) // slab, consumers),
            "key_ready": barriers(keys.copies, stages),
            "value_ready": barriers(values.copies, stages),
            "key_free": barriers(consumers, stages),
            "value_free": barriers(consumers, stages),
            "added_ready": barriers(tiles.out_width // slab, consumers),
        },
        grid_names=("worker",),
        num_threads=consumers + 1,
        thread_name="wg",
    )


def _schedule(spec: IntervalAttention, refs) -> Scheduler:
    sizes, arrays, cta = refs.sizes, vars(refs), refs.cta.worker
    turns = div(sizes.work_items - 1 - cta, sizes.ctas) + 1
    intervals = []
    for prefix in spec.intervals:
        own = {x.removeprefix(prefix): arrays[x] for x in arrays if x.startswith(prefix)}
        intervals.append(SimpleNamespace(**arrays | own))

    def work_item(turn) -> WorkItem:
        index = jnp.minimum(turn * sizes.ctas + cta, sizes.work_items - 1)
        tile0 = div(index, sizes.heads) * spec.consumers
        head = rem(index, sizes.heads) + getattr(sizes, "first_row", 0)
        if spec.longest_first:
            tile0 = sizes.tiles - spec.consumers - tile0
        b, kv_head = div_rem(head, spec.Hkv)
        # Bounds never decrease along the rows. The first and the last row of a work item
        # therefore give the bounds of the work item.
        at0 = b * sizes.tiles + tile0
        at1, row = at0 + spec.consumers - 1, ROWS - 1
        bounds = (
            KeyBounds(
                each.first_key[at0, 0],
                each.first_key[at1, row],
                each.key_end[at0, 0],
                each.key_end[at1, row],
            )
            for each in intervals
        )
        return WorkItem(b, kv_head, tile0, tuple(bounds))

    return Scheduler(intervals, turns, work_item)


def split(bounds: KeyBounds, spec: IntervalAttention):
    """Return the number of blocks, the number of masked blocks, and a function that returns the
    first key of the i-th block. The number of blocks is at least one. A work item without keys
    has one block, at a position from which copies read zeros.
    """
    block = spec.block
    begin, full_from, full_to, end = bounds
    begin = jnp.where(begin < end, begin, NO_KEY)
    if spec.fp8:
        begin = div(begin, GROUP) * GROUP
    blocks = div(jnp.maximum(end - begin, 1) + (block - 1), block)
    # Every row sees the blocks [left, right) in full. The loop processes the other blocks
    # first.
    left = div(full_from - begin + (block - 1), block)
    left = jnp.clip(left, 0, blocks)
    right = div(jnp.maximum(full_to - begin, 0), block)
    right = jnp.clip(right, left, blocks)
    masked = left + blocks - right

    def key_at(i):
        edge = jnp.where(i < left, i, i - left + right)
        return begin + jnp.where(i < masked, edge, i - masked + left) * block

    return blocks, masked, key_at


def _consume(tiles: Tiles, refs, scheduler: Scheduler, wg) -> None:
    """Loop over the tiles of a consumer warpgroup."""
    spec, width, intervals = tiles.spec, tiles.out_width, scheduler.intervals
    buffers = Buffers.of(spec, spec.tile)
    loads = [
        (getattr(refs, name), getattr(refs, f"{name}_tile"), columns)
        for name, columns in tiles.rows.items()
    ]
    has_out_tile = tiles.has_out_tile
    out_tile = refs.out_tile if has_out_tile else refs.query_tile

    def place(work_item: WorkItem) -> TilePlace:
        return TilePlace(work_item.b, work_item.kv_head, work_item.tile0 + wg, wg)

    def load(work_item, source, tile, columns, ready):
        rows = rows_of(spec.tile, source, place(work_item))
        buffers.load_rows(rows, tile, wg, columns, ready.at[wg])

    def load_rows(work_item):
        for each in loads:
            load(work_item, *each, refs.rows_ready)

    def load_added(work_item):
        load(work_item, refs.added, out_tile, width, refs.added_ready)

    def attend(each, bounds, tile, done):
        """Return the result of a tile over one interval, `[64, width]`, and the number of
        blocks of the interval. `done` is the number of blocks that were processed before the
        interval.
        """
        blocks, masked, key_at = split(bounds, spec)
        of_tile = (
            bound.at[tile.b * refs.sizes.tiles + tile.index]
            for bound in (each.first_key, each.key_end)
        )
        first_key, key_end = (  # [64]
            operands.load(bound, PER_ROW) for bound in of_tile
        )

        def visible(i):
            shape, first = (ROWS, spec.block), key_at(i)
            index = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=MATRIX) + first
            return (index >= across(first_key, shape)) & (index < across(key_end, shape))

        def block_at(under_mask, i):
            stage = rem(done + i, spec.stages)
            return Block(
                key_stage=stage,
                value_stage=stage,
                row_mask=None,
                visible=lambda: visible(i) if under_mask else None,
                free_key=lambda: plgpu.barrier_arrive(refs.key_free.at[stage]),
                free_value=lambda: plgpu.barrier_arrive(refs.value_free.at[stage]),
            )

        loop, overlap = tiles.mainloop_of(spec, each, tile), tiles.overlap_pv
        state = over_blocks(loop, block_at, masked, blocks, True, overlap)
        return loop.finish(state), blocks

    def take(turn, carry):
        done, work_item = carry
        tile = place(work_item)
        following = scheduler.work_item(turn + 1)
        if has_out_tile:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if spec.added:
                load_added(work_item)
        plgpu.barrier_wait(refs.rows_ready.at[wg])
        result = None
        for each, bounds in zip(intervals, work_item.bounds, strict=True):
            if result is not None:
                buffers.write_rows(out_tile, wg, result)
            result, blocks = attend(each, bounds, tile, done)
            done += blocks

        def load_next_rows():
            pl.when(turn + 1 < scheduler.turns)(lambda: load_rows(following))

        if has_out_tile:
            plgpu.commit_smem()  # all warps of the warpgroup have read the query
            load_next_rows()
        added = None
        if spec.added:
            if not has_out_tile:
                plgpu.commit_smem()  # all warps of the warpgroup have read the query
                load_added(work_item)
            plgpu.barrier_wait(refs.added_ready.at[wg])
        if spec.added or len(intervals) > 1:
            added = buffers.read_rows(out_tile, wg, width)
        buffers.write_rows(out_tile, wg, result, added)
        plgpu.commit_smem()
        out = rows_of(spec.tile, getattr(refs, tiles.out), place(work_item))
        buffers.store_rows(out_tile, wg, width, out)
        if not has_out_tile:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            load_next_rows()
        return done, following

    first = scheduler.work_item(0)
    load_rows(first)
    lax.fori_loop(0, scheduler.turns, take, (jnp.int32(0), first))
    plgpu.wait_smem_to_gmem(0)


def _produce(spec: IntervalAttention, refs, scheduler: Scheduler) -> None:
    """Run the loop of the producer warpgroup, which loads the keys and values of every block in
    order.
    """
    stages, (keys, values) = spec.stages, rings(spec)

    def take(turn, carry):
        done, work_item = carry
        following = scheduler.work_item(turn + 1)
        for each, bounds in zip(scheduler.intervals, work_item.bounds, strict=True):
            blocks, _, key_at = split(bounds, spec)
            sources = (
                (keys, each.key, refs.key_ring, refs.key_ready, refs.key_free),
                (values, each.value, refs.value_ring, refs.value_ready, refs.value_free),
            )

            def load(i, _, done=done, key_at=key_at, sources=sources):
                stage = rem(done + i, stages)
                at = work_item.b, work_item.kv_head, key_at(i)
                for ring, source, blocks, ready, free in sources:
                    pl.when(done + i >= stages)(lambda x=free.at[stage]: plgpu.barrier_wait(x))
                    ring.load(source, *at, blocks, stage, ready.at[stage])

            lax.fori_loop(0, blocks, load, None)
            done += blocks
        return done, following

    done, _ = lax.fori_loop(0, scheduler.turns, take, (jnp.int32(0), scheduler.work_item(0)))
    wait = lambda free: lambda i: plgpu.barrier_wait(free.at[rem(i, stages)])
    waits = wait(refs.key_free), wait(refs.value_free)
    operands.drain(spec.interpret, stages, done, *waits)
