"""One step of dk and dv, which the bodies for intervals and for gathered queries share.

A step brings Q and dO of 64 query rows and their statistics (`specs/bwd_preprocess.py`) to a
warpgroup's 64 keys. Products are transposed, keys x queries, of all rows or of half of them at
once (`Dkv.rows_at_once`), the other half after it:

    1. S^T   = K Q^T                                       [64 keys, rows at once]
    2. gP^T  = +-exp2(scale * log2(e) * S^T - shift)
    3. dP^T  = V dO^T                                      [64, rows at once]
    4. dV   += gP^T dO                                     [64, Dv]
    5. dS^T  = gP^T * (dP^T - delta)
    6. dK   += dS^T Q                                      [64, D], times scale at the end

shift and delta are those of `row_stats`; shift holds the gate. gP^T and dS^T stay in registers,
as the left operand of 4 and 6. 3 is multiplied beside 4, and 5 is made beside the latter. The G
query heads of a key/value head are rows of the query tile, so these products sum over them: GQA
needs no reduction of its own.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.mosaic import operands, softmax
from kernels_pallas.mosaic.operands import LOG2E, MATRIX, ROW_STATS, ROWS, div, div_rem, rem
from kernels_pallas.specs.dkv import Dkv
from kernels_pallas.specs.stored_ds import FIRST_PARTIAL

COLUMNS = 8  # query rows whose statistics are in registers at a time


def down(column):
    """A value by column, repeated along the keys: `[8]` to `[64, 8]`."""
    return lax.broadcast_in_dim(column, (ROWS, COLUMNS), [1])


def key_index(first_key, wg=0):
    """Of a product's rows, which key each is: float32 `[64, 8]`, of the warpgroup `wg`."""
    key = plgpu.broadcasted_iota(jnp.int32, (ROWS, COLUMNS), 0, layout=MATRIX)
    return (key + (first_key + wg * ROWS)).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class QueryMask:
    """Which queries of a step count; each is called with the first of eight columns.

    Attributes:
      visible: with first and last key of the columns' statistics: which query sees which key,
        `[64, 8]`; None: all see all.
      selected: whether the token of a column selected the block of its entry, `[8]`; None: all did,
        or `visible` knows.
    """

    visible: Callable[..., Any] | None = None
    selected: Callable[[int], Any] | None = None


@dataclasses.dataclass(frozen=True)
class KeyTile:
    """A work item as its CTA knows it: a tile of keys, and the query tiles to be summed over.

    Attributes:
      b, g: batch row and key/value head.
      begin, end: of its query tiles, or of its entries in the query lists.
      partial: where the sums are written.
      steps: how many the queries are.
    """

    spec: Dkv
    buffers: operands.Buffers
    refs: Any
    row: Any
    b: Any
    g: Any
    first_key: Any
    begin: Any
    end: Any
    partial: Any
    steps: Any

    @classmethod
    def of_cta(cls, spec: Dkv, buffers: operands.Buffers, refs: Any) -> "KeyTile":
        item, per_step = refs.cta.item, spec.tiles_per_step
        row = jnp.maximum(refs.work_items[item, 0], 0)
        b, g = div_rem(row, spec.Hkv)
        first_key, begin, _, _, end, partial = (
            refs.work_items[item, i] + 0 for i in range(1, 7)
        )
        if spec.selection_entries:
            partial -= refs.ds_chunk[FIRST_PARTIAL]
        steps = div(end - begin + (per_step - 1), per_step)
        return cls(spec, buffers, refs, row, b, g, first_key, begin, end, partial, steps)

    def exists(self):
        """Whether there is a work item, and not an empty place in the table."""
        return self.refs.work_items[self.refs.cta.item, 0] >= 0

    def bounds(self, column) -> list:
        """Four columns of the work item from `column` on, counted from `begin`: where the queries
        begin, where those that see all keys begin and end, and where all end.
        """
        item = self.refs.cta.item
        return [self.refs.work_items[item, column + i] - self.begin for i in range(4)]

    def unmasked(self, begin, end, first, last) -> tuple:
        """The steps, from `first` to `last - 1`, of the query tiles `begin .. end - 1` alone."""
        per_step = self.spec.tiles_per_step
        unmasked_first = div(begin + (per_step - 1), per_step)
        unmasked_first = jnp.clip(unmasked_first, first, last)
        unmasked_last = div(end, per_step)
        return unmasked_first, jnp.clip(unmasked_last, unmasked_first, last)

    def stage(self, i):
        """Of the ring buffer, that of step `i`."""
        return rem(i, self.spec.stages)

    def load_query_tile(self, i, t, tile) -> None:
        """Starts the copies of query tile `tile`, the `t`-th of step `i`."""
        spec, refs, query_tile = self.spec, self.refs, self.spec.query_tile
        stage = self.stage(i)
        full = refs.step_full.at[stage]

        def rows_of(array):
            """The query tile in `array` `[B, T, H, width]`, by columns."""
            tokens, group = pl.ds(tile * query_tile.tokens, query_tile.tokens), query_tile.group
            return lambda columns: array.at[
                self.b, tokens, pl.ds(self.g * group, group), columns
            ]

        load = self.buffers.load_rows
        load(rows_of(refs.query), refs.query_s, stage, spec.D, full, t)
        load(rows_of(refs.do), refs.do_s, stage, spec.Dv, full, t)
        stats = refs.stats_s.at[stage, pl.ds(t * spec.stats_rows, spec.stats_rows)]
        plgpu.copy_gmem_to_smem(refs.row_stats.at[self.b, self.g, tile], stats, full)

    def clear_padding_rows(self) -> None:
        """Zeros for the padding rows of the query tiles."""
        self.buffers.clear_rows(self.refs.query_s, self.spec.tiles_per_step)
        self.buffers.clear_rows(self.refs.do_s, self.spec.tiles_per_step)
        plgpu.commit_smem()

    def sum_steps(self, wg, walk: Callable[..., Sequence[Any]]) -> None:
        """Writes dK and dV of the 64 keys of warpgroup `wg`: what `walk(keys, sums)` returns, from
        the left operands K and V and from zeros.
        """
        spec, refs, buffers = self.spec, self.refs, self.buffers
        for source, ring in ((refs.key, refs.key_s), (refs.value, refs.value_s)):
            keys = source.at[self.b, pl.ds(self.first_key + wg * ROWS, ROWS), self.g]
            buffers.load_keys(
                lambda columns, keys=keys: keys.at[:, columns],
                ring,
                wg,
                refs.keys_full.at[wg],
            )
        plgpu.barrier_wait(refs.keys_full.at[wg])
        zeros = tuple(
            operands.full((ROWS, width), 0.0, MATRIX) for width in spec.widths.values()
        )
        left = (refs.key_s, wg), (refs.value_s, wg)
        if spec.keys_in_registers:
            left = tuple(buffers.in_registers(*operand) for operand in left)
        sums = list(walk(left, zeros))
        keys = pl.ds(wg * ROWS, ROWS)
        if spec.want_dv:
            refs.dv_partials.at[self.partial, keys][...] = sums.pop()
        if spec.want_dk:
            refs.dk_partials.at[self.partial, keys][...] = sums.pop() * spec.scale

    def add_step(self, stage, keys, sums, mask: QueryMask, take_ds=lambda ds: None) -> tuple:
        """The sums of dK and dV after the query rows of a step, whose copies have arrived.

        Args:
          stage: where they lie.
          keys: the left operands K and V, 64 keys.
          take_ds: called with dS^T, in 16 bits.
        """
        spec, refs, buffers = self.spec, self.refs, self.buffers
        key, value = keys
        c, dtype = spec.scale * LOG2E, jnp.dtype(spec.dtype)
        interpret = bool(spec.interpret)

        def stats_of_columns(j):
            """shift, delta, first_key and key_end of eight columns, `[8]`."""
            stats = refs.stats_s.at[stage], j
            if not spec.single_token:
                stats = refs.stats_s.at[stage, slice(j, j + COLUMNS)], 0
            of_single = spec.query_tile.group if spec.single_token else 0
            return operands.column_stats(*stats, interpret, of_single)

        sums = list(sums)
        for first in range(0, ROWS, spec.rows_at_once):
            rows = first, spec.rows_at_once
            columns = range(first, sum(rows), COLUMNS)
            # 1. S^T = K Q^T
            s = buffers.start_product(key, (refs.query_s, stage), rows)
            (s,) = buffers.finish(s)
            # 2. gP^T
            p = []
            for j in columns:
                shift, _, key_begin, key_end = stats_of_columns(j)
                if mask.selected is not None:
                    shift = jnp.where(mask.selected(j), shift, jnp.inf)
                seen = mask.visible and mask.visible(j, key_begin, key_end)
                part = s[:, j - first : j - first + COLUMNS]
                part = softmax.probabilities(part, c, down(shift), seen)
                if spec.gated:
                    part = operands.with_sign_bit(part, down(shift), interpret)
                p.append(part)  # [64, 8]
            dp = None
            if spec.want_dk:  # 3. dP^T = V dO^T
                dp = buffers.start_product(value, (refs.do_s, stage), rows)
            if spec.want_dv:  # 4. dV += gP^T dO
                left = operands.side_by_side([part.astype(dtype) for part in p], interpret)
                sums[-1] = buffers.start_sum(sums[-1], left, (refs.do_s, stage), rows)
            if dp is not None:
                (dp,) = buffers.finish(dp, running=int(spec.want_dv))
                ds = []  # 5. dS^T
                for j, of_column in zip(columns, p, strict=True):
                    # Read again: kept from above they would take 16 registers.
                    delta = stats_of_columns(j)[1]
                    part = dp[:, j - first : j - first + COLUMNS] - down(delta)
                    ds.append((of_column * part).astype(dtype))
                ds = operands.side_by_side(ds, interpret)
                take_ds(ds)
                # 6. dK += dS^T Q
                sums[0] = buffers.start_sum(sums[0], ds, (refs.query_s, stage), rows)
            sums = buffers.finish(*sums)
        return tuple(sums)


def scratch(spec: Dkv, buffers: operands.Buffers) -> dict[str, Any]:
    """What lies in shared memory, in this order."""
    copies = (
        spec.D + spec.Dv
    ) // spec.query_tile.slab  # of K and V, and of Q and dO: one a slab
    per_step, stages = spec.tiles_per_step, spec.stages
    stats = stages, per_step * spec.stats_rows, ROW_STATS
    return {
        "key_s": buffers.ring(spec.consumers, ROWS, spec.D),
        "value_s": buffers.ring(spec.consumers, ROWS, spec.Dv),
        "query_s": buffers.rows(stages, spec.D, per_step),
        "do_s": buffers.rows(stages, spec.Dv, per_step),
        "stats_s": plgpu.SMEM(stats, jnp.float32),
        "keys_full": plgpu.Barrier(num_arrivals=copies, num_barriers=spec.consumers),
        "step_full": plgpu.Barrier(num_arrivals=(copies + 1) * per_step, num_barriers=stages),
        "step_free": plgpu.Barrier(num_arrivals=spec.consumers, num_barriers=stages),
    }
