"""The walk that forward and dq of interval attention share: tiles of queries over their keys.

Query-stationary and persistent: one CTA an SM takes work items, the longest first if asked to. A
work item is two or three neighbouring tiles of 64 query rows. A warpgroup a tile computes
(`spec.consumers`), and one more copies the keys and values that all of them read.

    producer warpgroup    for each work item, for each block:
                               wait free[stage], copy to ring[stage]
    consumer warpgroups   for each work item:
                               start the loads of the next query as soon as this one is done with
                               for each block:  wait ready[stage], compute, arrive free[stage]

A query may see two intervals, each of arrays of its own (`spec.second_keys`): a work item walks
over one after the other. Its tile of the result holds what the first gave, rounded.

With `overlap_pv` a block's P V is multiplied beside the work on the next block.
The producer warpgroup runs ahead by the stages of the ring buffer, into the next work item.
Of the keys of a work item come first the blocks that some row sees in part, under a mask, then
those that every row sees in full, without one:

    keys of the work item   begin |--- edge ---|------- full -------|--- edge ---| end
    blocks                  0     ..           left        ..       right        ..

Tiles: 64 rows x `block` keys a warpgroup (64 to 128 forward, 64 dq; `specs/interval.py`).
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
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
from kernels_pallas.specs.tile import ROWS

NO_KEY = 1 << 30  # beyond every array: copies from there read zeros


class KeyBounds(NamedTuple):
    """Which keys of an interval a work item sees: every row those from `full_from` to `full_to`,
    some row those from `begin` to `end`.
    """

    begin: Any
    full_from: Any
    full_to: Any
    end: Any


class WorkItem(NamedTuple):
    """What the consumer warpgroups do at a time; `bounds`: of each interval."""

    b: Any
    kv_head: Any
    tile0: Any
    bounds: tuple[KeyBounds, ...]


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """Hands out work items: `turns` of them to this CTA, every `ctas`-th.

    Attributes:
      intervals: refs of the kernel, in which arrays of keys are those of each interval.
    """

    walk: "IntervalWalk"
    intervals: Sequence[Any]
    cta: Any
    turns: Any

    @classmethod
    def of(cls, walk: "IntervalWalk", refs, cta) -> Self:
        sizes, arrays = refs.sizes, vars(refs)
        turns = lax.div(sizes.work_items - 1 - cta, jnp.int32(sizes.ctas)) + 1
        intervals = []
        for prefix in walk.spec.intervals:
            own = {
                name.removeprefix(prefix): ref
                for name, ref in arrays.items()
                if name.startswith(prefix)
            }
            intervals.append(SimpleNamespace(**arrays | own))
        return cls(walk, intervals, cta, turns)

    def work_item(self, turn) -> WorkItem:
        """What this CTA takes at a turn; past the last one, the last work item."""
        spec, sizes = self.walk.spec, self.intervals[0].sizes
        index = jnp.minimum(turn * sizes.ctas + self.cta, sizes.work_items - 1)
        tile0 = lax.div(index, jnp.int32(sizes.heads)) * spec.consumers
        head = lax.rem(index, jnp.int32(sizes.heads)) + getattr(sizes, "first_row", 0)
        if spec.longest_first:
            tile0 = sizes.tiles - spec.consumers - tile0
        b, kv_head = lax.div(head, jnp.int32(spec.Hkv)), lax.rem(head, jnp.int32(spec.Hkv))
        # Bounds never decrease: those of a work item are those of its first and its last row.
        at0 = b * sizes.tiles + tile0
        at1, row = at0 + spec.consumers - 1, ROWS - 1
        bounds = (
            KeyBounds(
                each.first_key[at0, 0],
                each.first_key[at1, row],
                each.key_end[at0, 0],
                each.key_end[at1, row],
            )
            for each in self.intervals
        )
        return WorkItem(b, kv_head, tile0, tuple(bounds))


def split(bounds: KeyBounds, spec: IntervalAttention):
    """Number of blocks, at least one, number of those under a mask, and the first key of the
    i-th. Of a work item that sees no key the block lies where copies read zeros.
    """
    block = spec.block
    begin, full_from, full_to, end = bounds
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
        return self.spec.has_room(*self.rows.values(), self.out_width)

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
        self, refs, sources: Iterable, out, mainloop_of: Callable[[Any, TilePlace], Mainloop]
    ) -> None:
        """The body of a kernel.

        Args:
          refs: of the kernel.
          sources: arrays `[B, T, H, .]` that are loaded into the scratch of `rows`.
          out: array `[B, T, H, out_width]`.
          mainloop_of: what to do with a tile, of refs with the keys of an interval.
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

        def attend(each, bounds, tile, done):
            """The result of an interval of the tile, `[64, width]`, and its blocks; `done`: blocks
            before it.
            """
            blocks, masked, key_at = split(bounds, spec)
            first_key, key_end = (
                plgpu.load(
                    bound.at[tile.b * refs.sizes.tiles + tile.index],
                    layout=PER_ROW,
                    optimized=False,
                )
                for bound in (each.first_key, each.key_end)
            )  # [64]

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

            mainloop = mainloop_of(each, tile)
            state = over_blocks(
                mainloop,
                block_at,
                masked,
                blocks,
                masked_first=True,
                overlap_pv=self.overlap_pv,
            )
            return mainloop.finish(state), blocks

        def take(turn, carry):
            done, work_item = carry
            tile = TilePlace(work_item.b, work_item.kv_head, work_item.tile0 + wg, wg)
            following = scheduler.work_item(turn + 1)
            if self.has_out_tile:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                if spec.added:
                    load_added(work_item)
            plgpu.barrier_wait(refs.rows_ready.at[wg])
            result = None
            for each, bounds in zip(scheduler.intervals, work_item.bounds, strict=True):
                if result is not None:
                    buffers.write_rows(out_tile, wg, result)
                result, blocks = attend(each, bounds, tile, done)
                done += blocks

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
            if spec.added or len(scheduler.intervals) > 1:
                added = buffers.read_rows(out_tile, wg, width)
            buffers.write_rows(out_tile, wg, result, added)
            plgpu.commit_smem()
            buffers.store_rows(out_tile, wg, width, self._rows_of(out, work_item, wg))
            if not self.has_out_tile:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                load_next_rows()
            return done, following

        first = scheduler.work_item(0)
        load_rows(first)
        lax.fori_loop(0, scheduler.turns, take, (jnp.int32(0), first))
        plgpu.wait_smem_to_gmem(0)

    def _produce(self, refs, scheduler):
        """The loop of the producer warpgroup: keys and values of every block, in turn."""
        spec = self.spec
        stages, turns = spec.stages, scheduler.turns
        keys, values = rings(spec)

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
                    stage = lax.rem(done + i, jnp.int32(stages))
                    place = work_item.b, work_item.kv_head, key_at(i)
                    for ring, source, blocks, ready, free in sources:

                        @pl.when(done + i >= stages)
                        def _(free=free):
                            plgpu.barrier_wait(free.at[stage])

                        ring.load(source, *place, blocks, stage, ready.at[stage])

                lax.fori_loop(0, blocks, load, None)
                done += blocks
            return done, following

        done, _ = lax.fori_loop(0, turns, take, (jnp.int32(0), scheduler.work_item(0)))
        if spec.interpret:  # which wants every completed phase waited for

            def drain(i, _):
                stage = lax.rem(i, jnp.int32(stages))
                plgpu.barrier_wait(refs.key_free.at[stage])
                plgpu.barrier_wait(refs.value_free.at[stage])

            lax.fori_loop(jnp.maximum(done - stages, 0), done, drain, None)
