"""Merges what gathered attention is made of: of each token the walk over its tile's near blocks
(`selected_walk.py`), and the partials of its far blocks (`gathered_forward.py`).

Algorithm: (O, m, l) begins as the output of the walk, its log-sum-exp in log2, and 1. Then, per
slot j of a token's selection that has a far block, in the order of slots,

    forward   m'  = max(m, lse_j)                        lse_j in log2
              O'  = O 2^(m - m') + O_j 2^(lse_j - m')
              l'  = l 2^(m - m') + 2^(lse_j - m')
              result O / l,  lse = (m + log2 l) ln 2
    dq        dQ' = dQ + dQ_j

Tiles that are not gathered have the walk's. Slots without a far block are passed over: what their
partials hold is undefined. Those before the first and after the last one that a token of the tile
has are not read.

Loop order: query-stationary, some tiles of 64 rows a CTA, one after the other; the partials of the
next slots are in flight. Where a row of a segment has no work items, nothing else is read. Bound:
HBM, which reads the partials once (floors: `gathered_forward.py`).
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import operands, softmax
from kernels_pallas.mosaic.operands import LOG2E, PER_ROW, across
from kernels_pallas.mosaic.refs import build_kernel
from kernels_pallas.mosaic.row_io import GatheredRows, TileRows
from kernels_pallas.mosaic.selected_walk import list_counts, tile_is_gathered
from kernels_pallas.specs.gathered import MERGE_STAGES, TILES_OF_CTA, GatheredAttention
from kernels_pallas.specs.tile import ROWS


def build_forward(kernel: Kernel):
    """The body of `specs.gathered.merge`."""
    spec = kernel.spec
    lse_ring = {"lse_ring": plgpu.SMEM((_stages(spec), ROWS), jnp.float32)}
    merge = lambda refs, tile: MergeOutputs(spec, refs, refs.out, tile)
    return _build(kernel, spec.Dv, merge, lse_ring)


def build_dq(kernel: Kernel):
    """The body of `specs.gathered.merge_dq`."""
    spec = kernel.spec
    return _build(kernel, spec.D, lambda refs, tile: Merge(spec, refs, refs.dq, tile), {})


def _build(kernel: Kernel, width: int, merge, scratch):
    spec, stages = kernel.spec, _stages(kernel.spec)

    def run(refs):
        def of_tile(i, nothing):
            tile = refs.cta.tiles * TILES_OF_CTA + i
            pl.when(tile < refs.sizes.tiles)(merge(refs, tile).run)
            return nothing

        count = jnp.int32(TILES_OF_CTA)
        if spec.stays:  # empty work items are the last of a row
            item = refs.segment[0] * refs.sizes.items + refs.cta.row * refs.sizes.row_items
            count = jnp.where(refs.items[item, 0] + 0 >= 0, count, 0)
        lax.fori_loop(0, count, of_tile, None)

    buffers, slabs = _buffers(spec), width // spec.tile.slab
    added = {"added_tile": buffers.rows(1, width)} if spec.added else {}
    return build_kernel(
        kernel,
        run,
        scratch={
            **scratch,
            **added,
            "partial_ring": buffers.rows(stages, width),
            "out_tile": buffers.rows(1, width),
            "partial_ready": plgpu.Barrier(
                num_arrivals=slabs + len(scratch), num_barriers=stages
            ),
            "rows_ready": plgpu.Barrier(num_arrivals=slabs * (1 + len(added))),
        },
        grid_names=("row", "tiles"),
        interpret=spec.interpret,
    )


def _stages(spec: GatheredAttention) -> int:
    return min(MERGE_STAGES, spec.n)


def _buffers(spec: GatheredAttention) -> operands.Buffers:
    return operands.Buffers(jnp.dtype(spec.dtype), spec.tile, bool(spec.interpret))


class Merge:
    """Merges a tile by adding up.

    A result is a list of slabs, float32 `[64, slab]` each.
    """

    def __init__(self, spec: GatheredAttention, refs, out, tile):
        self.spec, self.refs, self.out, self.tile = spec, refs, out, tile
        self.width, self.buffers, self.stages = out.shape[-1], _buffers(spec), _stages(spec)
        self.b = lax.div(refs.cta.row, jnp.int32(spec.Hkv))
        self.kv_head = lax.rem(refs.cta.row, jnp.int32(spec.Hkv))
        self.tokens = pl.ds(self.tile * spec.tile.tokens, spec.tile.tokens)
        self.all_tile = refs.segment[2] + self.tile  # of all tokens

    # What forward does besides.

    def load_added(self):
        """Starts the copy of what the result is added to."""

    def initial(self) -> Any:
        """What is carried from slot to slot beside the result."""

    def load_weight(self, j, stage, ready):
        """Starts the copy of what `weigh` reads of slot `j`."""

    def weigh(self, stage, exists, acc, partial, carry):
        """The result so far and a slot's, each with its weight, and the carry."""
        return acc, partial, carry

    def finish(self, acc, carry):
        """The result, after the last slot."""
        return acc

    def keep(self):
        """What is left to do in a tile that is not gathered, whose rows are the walk's."""

    # What both do.

    def run(self):
        spec, refs, buffers, width = self.spec, self.refs, self.buffers, self.width
        index = refs.cta.row * refs.sizes.all_tiles + self.all_tile
        gathered = tile_is_gathered(refs.block_counts, self.all_tile, index, spec.gather_limit)
        counts = list_counts(refs.block_counts, index)
        far_slots = counts.far_slot, jnp.where(gathered, counts.far_slot_end, 0)

        def rewrite(merged):
            """Writes the walk's rows, after `merged` changed them."""
            buffers.load_rows(
                self._heads(refs.walked), refs.out_tile, 0, width, refs.rows_ready
            )
            self.load_added()
            for i in range(self.stages):
                self._load(*far_slots, i)
            plgpu.barrier_wait(refs.rows_ready)
            merged()
            plgpu.commit_smem()
            buffers.store_rows(refs.out_tile, 0, width, self._heads(self.out))
            plgpu.wait_smem_to_gmem(0)

        def merge_or_keep():
            pl.when(gathered)(functools.partial(self._merge, *far_slots))
            pl.when(~gathered)(self.keep)

        if not spec.stays:
            rewrite(merge_or_keep)
            return
        pl.when(gathered)(lambda: rewrite(lambda: self._merge(*far_slots)))

    def walked(self):
        """The walk's result."""
        rows = self.buffers.read_rows(self.refs.out_tile, 0, self.width)
        return [x.astype(jnp.float32) for x in rows]

    def write(self, result):
        """Puts a result where the copy to `out` reads it."""
        for i, x in enumerate(result):
            self.buffers.write_slab(self.refs.out_tile, 0, i, x)

    def _merge(self, first, end):
        """The walk's result, with those of the slots `first .. end - 1`."""
        spec, refs = self.spec, self.refs
        gathered_rows = GatheredRows(spec.group, bool(spec.interpret))
        token = self.all_tile * spec.tile.tokens
        slots = gathered_rows.far_slots(
            refs.indices, refs.position, self.b, self.kv_head, token, refs.sizes.T
        )  # [64], a bit a slot
        step = functools.partial(self._add, slots, first, end)
        acc, carry = lax.fori_loop(0, end - first, step, (self.walked(), self.initial()))
        self.write(self.finish(acc, carry))

    def _load(self, first, end, i):
        """Starts the copies of slot `first + i`, if there is one."""

        @pl.when(first + i < end)
        def _():
            refs, heads = self.refs, pl.ds(0, self.spec.group)
            stage, slot = lax.rem(jnp.int32(i), jnp.int32(self.stages)), first + i
            ready, column = refs.partial_ready.at[stage], self.kv_head * self.spec.n + slot

            def rows(columns):
                return refs.partials.at[self.b, self.tokens, column, heads, columns]

            self.buffers.load_rows(rows, refs.partial_ring, stage, self.width, ready)
            self.load_weight(slot, stage, ready)

    def _add(self, slots, first, end, i, state):
        refs, (acc, carry) = self.refs, state
        stage = lax.rem(i, jnp.int32(self.stages))
        exists = lax.shift_right_logical(slots, first + i) & 1 == 1  # [64]
        plgpu.barrier_wait(refs.partial_ready.at[stage])
        partial = self.buffers.read_rows(refs.partial_ring, stage, self.width)
        partial = [x.astype(jnp.float32) for x in partial]
        acc, partial, carry = self.weigh(stage, exists, acc, partial, carry)
        # What no entry wrote may be anything.
        partial = [jnp.where(across(exists, x.shape), x, 0.0) for x in partial]
        plgpu.commit_smem()  # all four warps are done with this stage
        self._load(first, end, i + self.stages)
        return [x + y for x, y in zip(acc, partial, strict=True)], carry

    def _heads(self, array):
        """The tile of `[B, segment_tokens, H, width]`, by columns."""
        group = self.spec.group
        heads = pl.ds(self.kv_head * group, group)
        return lambda columns: array.at[self.b, self.tokens, heads, columns]


class MergeOutputs(Merge):
    """Merges outputs by their log-sum-exps; the carry is (row_max, row_sum)."""

    def __init__(self, spec: GatheredAttention, refs, out, tile):
        super().__init__(spec, refs, out, tile)
        tile = spec.tile
        self.rows = TileRows(tile.tokens, tile.group, tile.group, bool(spec.interpret))

    def load_added(self):
        if self.spec.added:
            refs, buffers = self.refs, self.buffers
            rows = self._heads(refs.added)
            buffers.load_rows(rows, refs.added_tile, 0, self.width, refs.rows_ready)

    def initial(self):
        lse = self._walked_lse() * LOG2E
        seen = lse > softmax.EMPTY
        return [jnp.where(seen, lse, softmax.MASKED), jnp.where(seen, 1.0, 0.0)]

    def load_weight(self, j, stage, ready):
        rows = pl.ds((j * self.refs.sizes.tiles + self.tile) * ROWS, ROWS)
        source = self.refs.partial_lse.at[self.b, self.kv_head, rows]
        plgpu.copy_gmem_to_smem(source, self.refs.lse_ring.at[stage], ready)

    def weigh(self, stage, exists, acc, partial, carry):
        row_max, row_sum = carry
        lse = plgpu.load(self.refs.lse_ring.at[stage], layout=PER_ROW, optimized=False)
        lse = jnp.where(exists, lse, softmax.MASKED)
        new_max = jnp.maximum(row_max, lse)
        decay, weight = jnp.exp2(row_max - new_max), jnp.exp2(lse - new_max)  # [64]
        row_sum = row_sum * decay + jnp.where(exists, weight, 0.0)
        acc = [x * across(decay, x.shape) for x in acc]
        partial = [x * across(weight, x.shape) for x in partial]
        return acc, partial, [new_max, row_sum]

    def finish(self, acc, carry):
        inverse, lse = softmax.normalizer(softmax.SoftmaxState(acc, *carry))
        self._store_lse(lse)
        return self._gated_and_added(acc, inverse)

    def keep(self):
        self._store_lse(self._walked_lse())
        if self.spec.gated or self.spec.added:
            one = operands.full((ROWS,), 1.0, PER_ROW)
            self.write(self._gated_and_added(self.walked(), one))

    def _gated_and_added(self, rows, factor):
        """`added + gate * factor * rows`; `factor`: `[64]`."""
        if self.spec.gated:
            factor *= self._of_tile(self.refs.gate)
        rows = [x * across(factor, x.shape) for x in rows]
        if not self.spec.added:
            return rows
        added = self.buffers.read_rows(self.refs.added_tile, 0, self.width)
        return [x + y.astype(jnp.float32) for x, y in zip(rows, added, strict=True)]

    def _of_tile(self, array):
        """Of the rows of the tile, from an array of all tokens."""
        first, group = self.all_tile * self.spec.tile.tokens, self.spec.group
        length = self.refs.sizes.T
        return self.rows.values(array, self.b, first, self.kv_head * group, length)

    def _walked_lse(self):
        return self.rows.values(self.refs.walked_lse, *self._in_segment())

    def _store_lse(self, lse):
        self.rows.put(self.refs.lse, lse, *self._in_segment())

    def _in_segment(self):
        first, group = self.tile * self.spec.tile.tokens, self.spec.group
        return self.b, first, self.kv_head * group, self.refs.sizes.segment_tokens
