"""Merges the partials of gathered attention: of each token, those of its selected blocks.

Algorithm: per slot j of a token's selection, in the order of slots,

    forward   m'  = max(m, lse_j)                        lse_j in log2
              O'  = O 2^(m - m') + O_j 2^(lse_j - m')
              l'  = l 2^(m - m') + 2^(lse_j - m')
              result O / l,  lse = (m + log2 l) ln 2
    dq        dQ' = dQ + dQ_j

Tiles that are not gathered keep what `added` has. Slots without a block are passed over: what
their partials hold is undefined.

Loop order: query-stationary, one tile of 64 rows a CTA; the partials of the next slots are in
flight. Bound: HBM, which reads the partials once (floors: `gathered_forward.py`).
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import operands, softmax
from kernels_pallas.mosaic.operands import PER_ROW, across
from kernels_pallas.mosaic.refs import build_kernel
from kernels_pallas.mosaic.row_io import GatheredRows, TileRows
from kernels_pallas.mosaic.selected_walk import tile_is_gathered
from kernels_pallas.specs.gathered import MERGE_STAGES, GatheredAttention
from kernels_pallas.specs.tile import ROWS


def build_forward(kernel: Kernel):
    """The body of `specs.gathered.merge`."""
    spec = kernel.spec
    lse_ring = {"lse_ring": plgpu.SMEM((_stages(spec), ROWS), jnp.float32)}
    return _build(kernel, spec.Dv, lambda refs: MergeOutputs(spec, refs, refs.out), lse_ring)


def build_dq(kernel: Kernel):
    """The body of `specs.gathered.merge_dq`."""
    spec = kernel.spec
    return _build(kernel, spec.D, lambda refs: Merge(spec, refs, refs.dq), {})


def _build(kernel: Kernel, width: int, merge, scratch):
    spec, stages = kernel.spec, _stages(kernel.spec)
    buffers, slabs = _buffers(spec), width // spec.tile.slab
    return build_kernel(
        kernel,
        lambda refs: merge(refs).run(),
        scratch={
            **scratch,
            "partial_ring": buffers.rows(stages, width),
            "out_tile": buffers.rows(1, width),
            "partial_ready": plgpu.Barrier(
                num_arrivals=slabs + len(scratch), num_barriers=stages
            ),
            "added_ready": plgpu.Barrier(num_arrivals=slabs),
        },
        grid_names=("head", "tile"),
        interpret=spec.interpret,
    )


def _stages(spec: GatheredAttention) -> int:
    return min(MERGE_STAGES, spec.n)


def _buffers(spec: GatheredAttention) -> operands.Buffers:
    return operands.Buffers(jnp.dtype(spec.dtype), spec.tile, bool(spec.interpret))


class Merge:
    """Merges a tile's partials by adding them up.

    A result is a list of slabs, `[64, slab]` each.
    """

    def __init__(self, spec: GatheredAttention, refs, out):
        self.spec, self.refs, self.out = spec, refs, out
        self.width, self.buffers, self.stages = out.shape[-1], _buffers(spec), _stages(spec)
        self.b = lax.div(refs.cta.head, jnp.int32(spec.Hkv))
        self.kv_head = lax.rem(refs.cta.head, jnp.int32(spec.Hkv))
        self.tile = refs.cta.tile  # of the segment
        self.tokens = pl.ds(self.tile * spec.tile.tokens, spec.tile.tokens)
        self.all_tile = refs.segment[2] + self.tile  # of all tokens

    # What forward does besides.

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

    def keep(self, kept):
        """What is left to do in a tile that is `kept`: not gathered."""

    # What both do.

    def run(self):
        spec, refs, buffers, width = self.spec, self.refs, self.buffers, self.width
        gathered = tile_is_gathered(
            refs.block_counts,
            self.all_tile,
            refs.cta.head * refs.sizes.all_tiles + self.all_tile,
            spec.gather_limit,
        )
        buffers.load_rows(self._heads(refs.added), refs.out_tile, 0, width, refs.added_ready)
        plgpu.barrier_wait(refs.added_ready)
        pl.when(gathered)(self._merge)
        self.keep(~gathered)
        plgpu.commit_smem()
        buffers.store_rows(refs.out_tile, 0, width, self._heads(self.out))
        plgpu.wait_smem_to_gmem(0)

    def _merge(self):
        """Adds the merged partials to `out_tile`."""
        spec, refs, buffers = self.spec, self.refs, self.buffers
        for j in range(self.stages):
            self._load(jnp.int32(j))
        carry = self.initial()
        slab = spec.tile.slab
        acc = [softmax.zeros(slab) for _ in range(self.width // slab)]
        gathered_rows = GatheredRows(spec.group, bool(spec.interpret))
        first = self.all_tile * spec.tile.tokens
        slots = gathered_rows.visible_slots(
            refs.indices, refs.position, self.b, self.kv_head, first, refs.sizes.T
        )  # [64], a bit a slot
        step = functools.partial(self._add, slots)
        acc, carry = lax.fori_loop(0, spec.n, step, (acc, carry))
        acc = self.finish(acc, carry)
        added = buffers.read_rows(refs.out_tile, 0, self.width)
        for i, (x, y) in enumerate(zip(acc, added, strict=True)):
            buffers.write_slab(refs.out_tile, 0, i, x + y.astype(jnp.float32))

    def _load(self, j):
        """Starts the copies of slot `j`."""
        refs = self.refs
        stage, column = lax.rem(j, jnp.int32(self.stages)), self.kv_head * self.spec.n + j
        ready, heads = refs.partial_ready.at[stage], pl.ds(0, self.spec.group)

        def rows(columns):
            return refs.partials.at[self.b, self.tokens, column, heads, columns]

        self.buffers.load_rows(rows, refs.partial_ring, stage, self.width, ready)
        self.load_weight(j, stage, ready)

    def _add(self, slots, j, state):
        refs, (acc, carry) = self.refs, state
        stage = lax.rem(j, jnp.int32(self.stages))
        exists = lax.shift_right_logical(slots, j) & 1 == 1  # [64]
        plgpu.barrier_wait(refs.partial_ready.at[stage])
        partial = self.buffers.read_rows(refs.partial_ring, stage, self.width)
        partial = [x.astype(jnp.float32) for x in partial]
        acc, partial, carry = self.weigh(stage, exists, acc, partial, carry)
        # What no entry wrote may be anything.
        partial = [jnp.where(across(exists, x.shape), x, 0.0) for x in partial]
        plgpu.commit_smem()  # all four warps are done with this stage
        following = j + self.stages
        pl.when(following < self.spec.n)(functools.partial(self._load, following))
        return [x + y for x, y in zip(acc, partial, strict=True)], carry

    def _heads(self, array):
        """The tile of `[B, segment_tokens, H, width]`, by columns."""
        group = self.spec.group
        heads = pl.ds(self.kv_head * group, group)
        return lambda columns: array.at[self.b, self.tokens, heads, columns]


class MergeOutputs(Merge):
    """Merges partial outputs by their log-sum-exps; the carry is (row_max, row_sum)."""

    def __init__(self, spec: GatheredAttention, refs, out):
        super().__init__(spec, refs, out)
        tile = spec.tile
        self.rows = TileRows(tile.tokens, tile.group, tile.group, bool(spec.interpret))

    def initial(self):
        _, *carry = softmax.initial_state(self.spec.tile.slab)
        return carry

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
        if self.spec.gated:
            inverse *= self._of_tile(self.refs.gate)
        return [x * across(inverse, x.shape) for x in acc]

    def keep(self, kept):
        pl.when(kept)(lambda: self._store_lse(self._of_tile(self.refs.selected_lse)))

    def _of_tile(self, array):
        """Of the rows of the tile, from an array of all tokens."""
        first, group = self.all_tile * self.spec.tile.tokens, self.spec.group
        length = self.refs.sizes.T
        return self.rows.values(array, self.b, first, self.kv_head * group, length)

    def _store_lse(self, lse):
        first, group = self.tile * self.spec.tile.tokens, self.spec.group
        length = self.refs.sizes.segment_tokens
        self.rows.put(self.refs.lse, lse, self.b, first, self.kv_head * group, length)
