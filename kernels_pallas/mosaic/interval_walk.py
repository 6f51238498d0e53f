"""The walk that forward and dq of interval attention share: tiles of queries over their keys.

Query-stationary and persistent: one CTA an SM takes work items, the longest first if asked to. A
work item is two or three neighbouring tiles of 64 query rows. A warpgroup a tile computes
(`spec.consumers`), and one more copies the keys and values that all of them read.

    producer warpgroup    for each work item, for each block:
                               wait free[stage], copy to ring[stage]
    consumer warpgroups   for each work item:
                               start the loads of the next query as soon as this one is done with
                               for each block:  wait ready[stage], compute, arrive free[stage]

With `overlap_pv` a block's P V is multiplied beside the work on the next block.
The producer warpgroup runs ahead by the stages of the ring buffer, into the next work item.
Of the keys of a work item come first the blocks that some row sees in part, under a mask, then
those that every row sees in full, without one:

    keys of the work item   begin |--- edge ---|------- full -------|--- edge ---| end
    blocks                  0     ..           left        ..       right        ..

Tiles: 64 rows x `block` keys a warpgroup (64 to 128 forward, 64 dq; `specs/interval.py`).
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import operands
from kernels_pallas.mosaic.operands import MATRIX, PER_ROW, across
from kernels_pallas.mosaic.refs import build_kernel
from kernels_pallas.mosaic.ring import rings
from kernels_pallas.mosaic.tile_walk import Block, Mainloop, TilePlace, over_blocks
from kernels_pallas.specs.fp8 import GROUP
from kernels_pallas.specs.interval import IntervalAttention
from kernels_pallas.specs.tile import ROWS, SMEM_BYTES

NO_KEY = 1 << 30  # beyond every array: copies from there read zeros


class WorkItem(NamedTuple):
    """What the consumer warpgroups do at a time, and its bounds: every row sees the keys
    from `full_from` to `full_to`, some row those from `begin` to `end`.
    """

    b: Any
    kv_head: Any
    tile0: Any
    begin: Any
    full_from: Any
    full_to: Any
    end: Any


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """Hands out work items: `turns` of them to this CTA, every `ctas`-th."""

    walk: "IntervalWalk"
    refs: Any
    cta: Any
    turns: Any

    @classmethod
    def of(cls, walk: "IntervalWalk", refs, cta) -> Self:
        sizes = refs.sizes
        turns = lax.div(sizes.work_items - 1 - cta, jnp.int32(sizes.ctas)) + 1
        return cls(walk, refs, cta, turns)

    def work_item(self, turn) -> WorkItem:
        """What this CTA takes at a turn; past the last one, the last work item."""
        spec, sizes = self.walk.spec, self.refs.sizes
        index = jnp.minimum(turn * sizes.ctas + self.cta, sizes.work_items - 1)
        tile0 = lax.div(index, jnp.int32(sizes.heads)) * spec.consumers
        head = lax.rem(index, jnp.int32(sizes.heads))
        if spec.longest_first:
            tile0 = sizes.tiles - spec.consumers - tile0
        b, kv_head = lax.div(head, jnp.int32(spec.Hkv)), lax.rem(head, jnp.int32(spec.Hkv))
        # Bounds never decrease: those of a work item are those of its first and its last row.
        at0 = b * sizes.tiles + tile0
        at1, row = at0 + spec.consumers - 1, ROWS - 1
        first_key, key_end = self.refs.first_key, self.refs.key_end
        begin, full_from = first_key[at0, 0], first_key[at1, row]
        full_to, end = key_end[at0, 0], key_end[at1, row]
        return WorkItem(b, kv_head, tile0, begin, full_from, full_to, end)


def split(work_item: WorkItem, spec: IntervalAttention):
    """Number of blocks, at least one, number of those under a mask, and the first key of the
    i-th. Of a work item that sees no key the block lies where copies read zeros.
    """
    block = spec.block
    begin, full_from, full_to, end = work_item[3:]
    begin = jnp.where(begin < end, begin, NO_KEY)
    if spec.fp8:
        begin = lax.div(begin, jnp.int32(GROUP)) * GROUP
    blocks = lax.div(jnp.maximum(end - begin, 1) + (block - 1), jnp.int32(block))
    # Every row sees the blocks [left, right) in full; the others come first.
    left = lax.div(full_from - begin + (block - 1), jnp.int32(block))
    left = jnp.clip(left, 0, blocks)
    right = lax.div(jnp.maximum(full_to - begin, 0), jnp.int32(block))
    right = jnp.clip(right, left, blocks)
    masked = left + blocks - right

    def key_at(i):
        edge = jnp.where(i < left, i, i - left + right)
        return begin + jnp.where(i < masked, edge, i - masked + left) * block

    return blocks, masked, key_at


@dataclasses.dataclass(frozen=True)
class IntervalWalk:
    """Sizes that follow from those of the problem.

    Attributes:
      spec: of the problem.
      rows: names of scratch for rows of queries, and their widths; the first one may become
        that of the output.
      out_width: of the output.
      overlap_pv: whether the product of a block's factor runs beside the work on the next block.
    """

    spec: IntervalAttention
    rows: Mapping[str, int]
    out_width: int
    overlap_pv: bool = False

    @property
    def buffers(self) -> operands.Buffers:
        spec = self.spec
        return operands.Buffers(jnp.dtype(spec.dtype), spec.tile, bool(spec.interpret))

    @property
    def has_out_tile(self) -> bool:
        """Whether there is room for the output beside the query, so that the next query can be
        copied while the output is.
        """
        spec = self.spec
        ring = spec.stages * sum(ring.bytes for ring in rings(spec))
        rows = 2 * spec.consumers * ROWS * (sum(self.rows.values()) + self.out_width)
        return ring + rows <= SMEM_BYTES - 1024

    def build(self, kernel: Kernel, body: Callable) -> Callable:
        """The kernel of `body(refs)`, which calls `run`."""
        spec, buffers, slab = self.spec, self.buffers, self.spec.tile.slab
        keys, values = rings(spec)
        consumer, producer = spec.registers
        operands.check_registers(*[consumer] * spec.consumers, producer)
        rows = dict(self.rows)
        if self.has_out_tile:
            rows["out_tile"] = self.out_width
        else:
            query = next(iter(rows))
            rows[query] = max(rows[query], self.out_width)
        loaded = sum(self.rows.values()) // slab

        def barriers(arrivals, count):
            return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)

        return build_kernel(
            kernel,
            body,
            scratch={
                **{name: buffers.rows(spec.consumers, width) for name, width in rows.items()},
                "key_ring": keys.scratch(spec.stages),
                "value_ring": values.scratch(spec.stages),
                "rows_ready": barriers(loaded, spec.consumers),
                "key_ready": barriers(keys.copies, spec.stages),
                "value_ready": barriers(values.copies, spec.stages),
                "key_free": barriers(spec.consumers, spec.stages),
                "value_free": barriers(spec.consumers, spec.stages),
                "added_ready": barriers(self.out_width // slab, spec.consumers),
            },
            grid_names=("worker",),
            num_threads=spec.consumers + 1,
            thread_name="wg",
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
          mainloop_of: what to do with a tile.
        """
        wg, cta = lax.axis_index("wg"), refs.cta.worker
        scheduler = Scheduler.of(self, refs, cta)

        spec = self.spec
        consumer, producer = spec.registers

        @pl.when(wg < spec.consumers)
        def _():
            if not spec.interpret:
                plgpu.set_max_registers(consumer, action="increase")
            self._consume(refs, scheduler, wg, sources, out, mainloop_of)

        @pl.when(wg == spec.consumers)
        def _():
            if not spec.interpret:
                plgpu.set_max_registers(producer, action="decrease")
            self._produce(refs, scheduler)

    def _rows_of(self, array, work_item: WorkItem, wg):
        """A warpgroup's tile of `[B, T, H, .]`, by columns."""
        tile = self.spec.tile
        tokens = pl.ds((work_item.tile0 + wg) * tile.tokens, tile.tokens)
        heads = pl.ds(work_item.kv_head * tile.group, tile.group)
        return lambda columns: array.at[work_item.b, tokens, heads, columns]

    def _consume(self, refs, scheduler, wg, sources, out, mainloop_of):
        """The loop of a consumer warpgroup over its tiles."""
        spec, buffers = self.spec, self.buffers
        block, width = spec.block, self.out_width
        tiles = [(getattr(refs, name), width) for name, width in self.rows.items()]
        out_tile = refs.out_tile if self.has_out_tile else tiles[0][0]

        def load_rows(work_item):
            for source, (tile, width) in zip(sources, tiles, strict=True):
                rows = self._rows_of(source, work_item, wg)
                buffers.load_rows(rows, tile, wg, width, refs.rows_ready.at[wg])

        def load_added(work_item):
            rows = self._rows_of(refs.added, work_item, wg)
            buffers.load_rows(rows, out_tile, wg, width, refs.added_ready.at[wg])

        def take(turn, carry):
            done, work_item = carry
            tile = TilePlace(work_item.b, work_item.kv_head, work_item.tile0 + wg, wg)
            following = scheduler.work_item(turn + 1)
            blocks, masked, key_at = split(work_item, spec)
            first_key, key_end = (
                plgpu.load(
                    bound.at[tile.b * refs.sizes.tiles + tile.index],
                    layout=PER_ROW,
                    optimized=False,
                )
                for bound in (refs.first_key, refs.key_end)
            )  # [64]
            if self.has_out_tile:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                if spec.added:
                    load_added(work_item)
            plgpu.barrier_wait(refs.rows_ready.at[wg])

            def visible(i):
                shape, first = (ROWS, block), key_at(i)
                index = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=MATRIX) + first
                return (index >= across(first_key, shape)) & (index < across(key_end, shape))

            def block_at(under_mask, i):
                stage = lax.rem(done + i, jnp.int32(spec.stages))
                return Block(
                    key_stage=stage,
                    value_stage=stage,
                    row_mask=None,
                    visible=lambda: visible(i) if under_mask else None,
                    free_key=lambda: plgpu.barrier_arrive(refs.key_free.at[stage]),
                    free_value=lambda: plgpu.barrier_arrive(refs.value_free.at[stage]),
                )

            mainloop = mainloop_of(tile)
            state = over_blocks(
                mainloop,
                block_at,
                masked,
                blocks,
                masked_first=True,
                overlap_pv=self.overlap_pv,
            )
            result = mainloop.finish(state)  # [64, width]

            def load_next_rows():
                @pl.when(turn + 1 < scheduler.turns)
                def _():
                    load_rows(following)

            if self.has_out_tile:
                plgpu.commit_smem()  # the warpgroup is done with its query
                load_next_rows()
            added = None
            if spec.added:
                if not self.has_out_tile:
                    plgpu.commit_smem()  # the warpgroup is done with its query
                    load_added(work_item)
                plgpu.barrier_wait(refs.added_ready.at[wg])
                added = buffers.read_rows(out_tile, wg, width)
            buffers.write_rows(out_tile, wg, result, added)
            plgpu.commit_smem()
            buffers.store_rows(out_tile, wg, width, self._rows_of(out, work_item, wg))
            if not self.has_out_tile:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                load_next_rows()
            return done + blocks, following

        first = scheduler.work_item(0)
        load_rows(first)
        lax.fori_loop(0, scheduler.turns, take, (jnp.int32(0), first))
        plgpu.wait_smem_to_gmem(0)

    def _produce(self, refs, scheduler):
        """The loop of the producer warpgroup: keys and values of every block, in turn."""
        spec = self.spec
        stages, turns = spec.stages, scheduler.turns
        keys, values = rings(spec)
        sources = (
            (keys, refs.key, refs.key_ring, refs.key_ready, refs.key_free),
            (values, refs.value, refs.value_ring, refs.value_ready, refs.value_free),
        )

        def take(turn, carry):
            done, work_item = carry
            following = scheduler.work_item(turn + 1)
            blocks, _, key_at = split(work_item, spec)

            def load(i, _):
                stage = lax.rem(done + i, jnp.int32(stages))
                place = work_item.b, work_item.kv_head, key_at(i)
                for ring, source, blocks, ready, free in sources:

                    @pl.when(done + i >= stages)
                    def _(free=free):
                        plgpu.barrier_wait(free.at[stage])

                    ring.load(source, *place, blocks, stage, ready.at[stage])

            lax.fori_loop(0, blocks, load, None)
            return done + blocks, following

        done, _ = lax.fori_loop(0, turns, take, (jnp.int32(0), scheduler.work_item(0)))
        if spec.interpret:  # which wants every completed phase waited for

            def drain(i, _):
                stage = lax.rem(i, jnp.int32(stages))
                plgpu.barrier_wait(refs.key_free.at[stage])
                plgpu.barrier_wait(refs.value_free.at[stage])

            lax.fori_loop(jnp.maximum(done - stages, 0), done, drain, None)
