"""Computes dk and dv with key-stationary kernels.

The queries of a key tile come from intervals or from query lists. A second kernel merges the
partial sums.

A step combines Q and dO of 64 query rows and their statistics (`specs/bwd_preprocess.py`) with the
64 keys of a warpgroup. Products are transposed: their rows are keys, and their columns are queries.
A product has `Dkv.rows_at_once` query rows: all 64 rows, or first one half and then the other half.
One step computes:

    1. S^T   = K Q^T                                       [64 keys, rows at once]
    2. gP^T  = +-exp2(scale * log2(e) * S^T - shift)
    3. dP^T  = V dO^T                                      [64, rows at once]
    4. dV   += gP^T dO                                     [64, Dv]
    5. dS^T  = gP^T * (dP^T - delta)
    6. dK   += dS^T Q                                      [64, D], times scale at the end

shift and delta are in `row_stats`, and shift includes the gate. gP^T and dS^T stay in registers, as
the left operands of products 4 and 6. Products 3 and 4 run in parallel, and dS^T (line 5) is
computed during product 4. The G query heads of a key/value head are rows of the query tile, so the
products sum over these heads. GQA needs no separate reduction over heads, since the products sum
over the heads of a group.

Intervals: the queries that attend to a tile of keys are contiguous. A CTA has one producer
warpgroup and two consumer warpgroups of 64 keys each. If D + Dv > 384, the CTA has only one
consumer. When the consumers have released a stage of the ring buffer, the producer fills the stage
with a query tile of 64 rows. Only steps at both ends of an interval are masked. A consumer skips
the steps in which no query attends to the consumer's 64 keys.

Floors at B=1 H=64 Hkv=4 D=Dv=128 T=65536 on an H100, four products per pair of query and key:
compressed 8.8 TFLOP = 8.9 ms, sliding 2.2 TFLOP. The compressed and the sliding branch are bound by
products that read their operands from shared memory. A step of two warpgroups needs 2048 cycles of
the tensor cores. In 2048 cycles, shared memory moves 192 KB to the tensor cores (1536 cycles), 32
KB of copies (256 cycles) and statistics (256 cycles). If K and V fit in registers (D + Dv <= 128),
products read a third less from shared memory.

Query lists, for the selected branch: A CTA is one warpgroup with 64 keys. A step has 64 query rows,
which are several query tiles. As soon as all warps have read a stage, the four warps start the
copies of the next query tiles into the stage, one warp per tile. The matrix dS^T of product 6 may
also be written to memory, for `stored_ds.py`.

Stages: The ring buffer has 2 to 4 stages, the largest number with which two CTAs fit on an SM.
Floors at B=1 H=64 Hkv=4 D=Dv=128 T=65536 on an H100: 4.4 TFLOP = 4.4 ms, and 34 GB of gathered
rows. Work items that run at the same time read the gathered rows from L2.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import operands, softmax
from kernels_pallas.mosaic.operands import (
    LOG2E,
    MATRIX,
    PER_COLUMN,
    ROW_STATS,
    ROWS,
    Buffers,
    div,
    div_rem,
    rem,
)
from kernels_pallas.mosaic.refs import build_kernel
from kernels_pallas.mosaic.row_copies import RowCopies
from kernels_pallas.mosaic.row_io import GatheredRows
from kernels_pallas.mosaic.stored_ds import NO_ENTRY, StoredDs
from kernels_pallas.specs.block_query_lists import BLOCK_OFFSET_BIAS, BLOCK_OFFSET_SHIFT
from kernels_pallas.specs.dkv import Dkv
from kernels_pallas.specs.stored_ds import FIRST_PARTIAL, FIRST_ROW
from kernels_pallas.specs.work_items import WorkItem, part_column

COLUMNS = 8  # number of query rows whose statistics are in registers at a time
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24  # per thread, in kernels of intervals
AT_ONCE = 2, 1  # number of partials that the merge loads together


def down(column):
    """Broadcast one value per column, `[8]`, along the keys to `[64, 8]`."""
    return lax.broadcast_in_dim(column, (ROWS, COLUMNS), [1])


def key_index(first_key, wg=0):
    """Return the key index of each row of a product of warpgroup `wg`, as float32 `[64, 8]`."""
    key = plgpu.broadcasted_iota(jnp.int32, (ROWS, COLUMNS), 0, layout=MATRIX)
    return (key + (first_key + wg * ROWS)).astype(jnp.float32)


class KeyTile:
    """The work item of a CTA: a tile of keys, and the query tiles over which to sum.

    Attributes:
      b: Batch row.
      g: Key/value head.
      begin: Begin of the work item's query tiles, or of the work item's entries in the query lists.
      end: End of the work item's query tiles, or of the work item's entries in the query lists.
      partial: Index of the partial that the CTA writes.
      steps: Number of steps.
    """

    def __init__(self, spec: Dkv, refs: Any):
        self.spec, self.refs, self.buffers = spec, refs, Buffers.of(spec, spec.query_tile)
        item, per_step = refs.cta.item, spec.tiles_per_step
        self.row = jnp.maximum(refs.work_items[item, 0], 0)
        self.b, self.g = div_rem(self.row, spec.Hkv)
        self.first_key, self.begin, _, _, self.end, self.partial = (
            refs.work_items[item, i] + 0 for i in range(1, 7)
        )
        if spec.selection_entries:
            self.partial -= refs.ds_chunk[FIRST_PARTIAL]
        self.steps = div(self.end - self.begin + (per_step - 1), per_step)

    def exists(self):
        """Return whether the row of the table is a work item and not an empty row."""
        return self.refs.work_items[self.refs.cta.item, 0] >= 0

    def ranges(self, column, first=None, last=None) -> tuple:
        """Return four bounds of steps: the first step, the first unmasked step, the end of the
        unmasked steps, and the end of all steps.

        Args:
          column: Index of the work item's integer that is the begin of the queries. The next three
            integers are the begin and the end of the queries that attend to all keys, and the end
            of all queries.
          first: The first step, by default of the work item.
          last: The end of the steps, by default of the work item.
        """
        item, per_step = self.refs.cta.item, self.spec.tiles_per_step
        begin, full_begin, full_end, end = (
            self.refs.work_items[item, column + i] - self.begin for i in range(4)
        )
        first, last = (begin, end) if first is None else (first, last)
        unmasked_first = div(full_begin + (per_step - 1), per_step)
        unmasked_first = jnp.clip(unmasked_first, first, last)
        unmasked_last = jnp.clip(div(full_end, per_step), unmasked_first, last)
        return first, unmasked_first, unmasked_last, last

    def stage(self, i):
        """Return the stage of step `i` in the ring buffer."""
        return rem(i, self.spec.stages)

    def load_query_tile(self, i, t, tile) -> None:
        """Start the copies of query tile `tile`, the `t`-th of step `i`."""
        spec, refs, query_tile = self.spec, self.refs, self.spec.query_tile
        stage = self.stage(i)
        full = refs.step_full.at[stage]

        def rows_of(array):
            """Return a function that maps a slice of columns to these columns of the query tile's
            rows in `array` `[B, T, H, width]`.
            """
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
        """Set the padding rows of the query tiles to zero."""
        self.buffers.clear_rows(self.refs.query_s, self.spec.tiles_per_step)
        self.buffers.clear_rows(self.refs.do_s, self.spec.tiles_per_step)
        plgpu.commit_smem()

    def sum_steps(self, wg, loop: Callable[..., Sequence[Any]]) -> None:
        """Write dK and dV of the 64 keys of warpgroup `wg`, the result of `loop(keys, sums)`.

        `keys` are the left operands K and V, and `sums` are zeros.
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
        zeros = tuple(operands.zeros(width) for width in spec.widths.values())
        left = (refs.key_s, wg), (refs.value_s, wg)
        if spec.keys_in_registers:
            left = tuple(buffers.in_registers(*operand) for operand in left)
        sums = list(loop(left, zeros))
        keys = pl.ds(wg * ROWS, ROWS)
        if spec.want_dv:
            refs.dv_partials.at[self.partial, keys][...] = sums.pop()
        if spec.want_dk:
            refs.dk_partials.at[self.partial, keys][...] = sums.pop() * spec.scale

    def add_step(
        self, stage, keys, sums, visible=None, selected=None, take_ds=lambda ds: None
    ) -> tuple:
        """Add the query rows of a step, whose copies have arrived, and return the new sums of dK
        and dV.

        Args:
          stage: Stage of the rows.
          keys: The left operands K and V, 64 keys.
          sums: The sums of dK and dV before the step. A gradient that `spec` does not request has
            no sum.
          visible: Function that returns the mask of eight columns, `[64, 8]`. The arguments of
            `visible` are the first of the eight columns, and `first_key` and `key_end` from the
            statistics of the columns. If `visible` is None, all queries attend to all keys.
          selected: Function that returns a bool array `[8]`. A column belongs to a list entry,
            which is a query tile and a block. Element i is True if the token of column i selected
            the block of the column's list entry. The argument of the function `selected` is the
            first of the eight columns. If the argument `selected` is None, all tokens selected
            their block, or `visible` also checks the selection.
          take_ds: Function that is called with dS^T in 16 bits.
        """
        spec, refs, buffers = self.spec, self.refs, self.buffers
        key, value = keys
        c, dtype = spec.scale * LOG2E, jnp.dtype(spec.dtype)
        interpret = spec.interpret

        def stats_of_columns(j):
            """Return shift, delta, first_key and key_end of eight columns, `[8]` each."""
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
                if selected is not None:
                    shift = jnp.where(selected(j), shift, jnp.inf)
                seen = visible and visible(j, key_begin, key_end)
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
                    # The statistics are read again, since keeping delta from step 2 would need
                    # 16 registers.
                    delta = stats_of_columns(j)[1]
                    part = dp[:, j - first : j - first + COLUMNS] - down(delta)
                    ds.append((of_column * part).astype(dtype))
                ds = operands.side_by_side(ds, interpret)
                take_ds(ds)
                # 6. dK += dS^T Q
                sums[0] = buffers.start_sum(sums[0], ds, (refs.query_s, stage), rows)
            sums = buffers.finish(*sums)
        return tuple(sums)


def _scratch(spec: Dkv) -> dict[str, Any]:
    """Return the scratch types of the arrays in shared memory, in the order of the kernel's
    references.
    """
    buffers = Buffers.of(spec, spec.query_tile)
    # The number of copies for K and V of 64 keys, which is also the number for Q and dO of a
    # query tile.
    copies = (spec.D + spec.Dv) // buffers.slab
    per_step, stages = spec.tiles_per_step, spec.stages
    stats = stages, per_step * spec.stats_rows, ROW_STATS
    return {
        "key_s": buffers.ring(spec.consumers, ROWS, spec.D),
        "value_s": buffers.ring(spec.consumers, ROWS, spec.Dv),
        "query_s": buffers.rows(stages, spec.D, per_step),
        "do_s": buffers.rows(stages, spec.Dv, per_step),
        "stats_s": plgpu.SMEM(stats, jnp.float32),
        "keys_full": operands.barriers(copies, spec.consumers),
        "step_full": operands.barriers((copies + 1) * per_step, stages),
        "step_free": operands.barriers(spec.consumers, stages),
    }


def _over_steps(step, ranges, sums):
    """Compute `sums = step(under_mask, i, sums)` for all steps of `KeyTile.ranges`."""
    first, unmasked_first, unmasked_last, last = ranges
    masked, unmasked = (functools.partial(step, x) for x in (True, False))
    sums = lax.fori_loop(first, unmasked_first, masked, sums)
    sums = lax.fori_loop(unmasked_first, unmasked_last, unmasked, sums)
    return lax.fori_loop(unmasked_last, last, masked, sums)


def partials_of_intervals(kernel: Kernel) -> Callable:
    """The body of the kernel `specs.dkv.partials` for intervals."""
    spec: Dkv = kernel.spec
    operands.check_registers(*[CONSUMER_REGISTERS] * spec.consumers, PRODUCER_REGISTERS)

    def body(refs):
        tile = KeyTile(spec, refs)
        steps = tile.steps

        def step(wg, keys, under_mask, i, sums):
            stage = tile.stage(i)
            plgpu.barrier_wait(refs.step_full.at[stage])

            def visible(_, key_begin, key_end):
                key = key_index(tile.first_key, wg)
                return (key >= down(key_begin)) & (key < down(key_end))

            sums = tile.add_step(stage, keys, sums, visible if under_mask else None)
            plgpu.barrier_arrive(refs.step_free.at[stage])
            return sums

        def skip(i, _):
            """Skip a step in which no query attends to a key of the warpgroup."""
            stage = tile.stage(i)
            plgpu.barrier_wait(refs.step_full.at[stage])
            plgpu.barrier_arrive(refs.step_free.at[stage])

        def consume(wg, keys, sums):
            """Add all steps to the sums of warpgroup `wg`."""
            first, *_, last = ranges = tile.ranges(part_column(wg))
            lax.fori_loop(0, first, skip, None)
            sums = _over_steps(functools.partial(step, wg, keys), ranges, sums)
            lax.fori_loop(last, steps, skip, None)
            return sums

        def produce():
            """Fill each stage with the next query tile when the consumers have released the
            stage.
            """

            def load(i, _):
                stage = tile.stage(i)

                @pl.when(i >= spec.stages)
                def _():
                    plgpu.barrier_wait(refs.step_free.at[stage])

                tile.load_query_tile(i, 0, tile.begin + i)

            lax.fori_loop(0, steps, load, None)
            wait = lambda i: plgpu.barrier_wait(refs.step_free.at[tile.stage(i)])
            operands.drain(spec.interpret, spec.stages, steps, wait)

        exists = tile.exists()
        wg = lax.axis_index("wg")

        @pl.when(exists & (wg < spec.consumers))
        def _():
            if not spec.interpret:
                plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            tile.sum_steps(wg, functools.partial(consume, wg))

        @pl.when(exists & (wg == spec.consumers))
        def _():
            tile.clear_padding_rows()
            if not spec.interpret:
                plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            produce()

    return build_kernel(
        kernel,
        body,
        scratch=_scratch(spec),
        grid_names=("item",),
        num_threads=spec.consumers + 1,
        thread_name="wg",
    )


class Entries:
    """The entries of a work item in the query lists. A step has `tiles_per_step` entries."""

    def __init__(self, spec: Dkv, refs: Any, tile: KeyTile):
        self.spec, self.refs, self.tile = spec, refs, tile
        self.per_step, self.group = spec.tiles_per_step, spec.query_tile.group
        self.copies = None
        if spec.copied_by_lanes and not spec.interpret:
            divisor = spec.Hkv * spec.selection_entries or 1
            self.copies = RowCopies(tile.buffers, self.group, divisor)

    def of_step(self, array, i) -> list:
        """Return the elements of `array` for the entries of step `i`. `array` is the query list
        or the token bits.
        """
        begin, end = self.tile.begin, self.tile.end
        at = [begin + i * self.per_step + t for t in range(self.per_step)]
        # A work item without entries must not read before the first entry of all lists.
        at = [jnp.maximum(jnp.minimum(entry, end - 1), begin) for entry in at]
        return [array[entry] + 0 for entry in at]

    def token(self, entry):
        """Return the token of `entry`. The entry is an index into the selection."""
        return div(entry, self.spec.Hkv * self.spec.selection_entries)

    def ds_places(self, i) -> list:
        """Return the indices of the tokens of step `i` in the array `ds`.

        After the last token the index is `NO_ENTRY`.
        """
        refs, tile = self.refs, self.tile
        count, places = jnp.int32(self.spec.selection_entries), []
        first = (tile.row - refs.ds_chunk[FIRST_ROW]) * refs.sizes.T
        for t, entry in enumerate(self.of_step(refs.query_list, i)):
            place = (first + self.token(entry)) * count + lax.rem(entry, count)
            exists = tile.begin + i * self.per_step + t < tile.end
            places.append(jnp.where(exists, place, NO_ENTRY))
        return places

    def query_tiles(self, i) -> list:
        """Return the query tiles of step `i`.

        If the entries are tokens, return an empty list. Entries that are tokens are only prefetched
        into L1, and the method `load` reads them later.
        """
        refs, tile = self.refs, self.tile
        if self.spec.selection_entries:
            return [self.token(entry) for entry in self.of_step(refs.query_list, i)]
        if not self.spec.single_token:
            return self.of_step(refs.query_list, i)
        rows = GatheredRows(self.group, self.spec.interpret)
        rows.prefetch_entries(refs.query_list, tile.begin + i * self.per_step, tile.end)
        return []

    def wait(self, i) -> None:
        """Wait for the copies of step `i`."""
        if self.copies is None:
            plgpu.barrier_wait(self.refs.step_full.at[self.tile.stage(i)])
            return
        self.copies.wait(self.spec.stages - 1)
        plgpu.commit_smem()

    def load(self, i, tiles, varies: bool) -> None:
        """Start the copies of step `i`. Each warp copies every fourth query tile."""
        if (copies := self.copies) is not None:
            pl.when(i < self.tile.steps)(lambda: self._load_by_lanes(copies, i))
            copies.commit()
            return

        def load(t):
            if tiles:
                tile = tiles[0]
                for later, other in enumerate(tiles[1:]):
                    tile = jnp.where(t > later, other, tile)
                self.tile.load_query_tile(i, t, tile)
                return
            entry = jnp.minimum(self.tile.begin + i * self.per_step + t, self.tile.end - 1)
            self.tile.load_query_tile(i, t, self.refs.query_list[entry] + 0)

        pl.when(i < self.tile.steps)(lambda: operands.by_warps(self.per_step, load, varies))

    def _load_by_lanes(self, copies: RowCopies, i) -> None:
        refs, tile, stage = self.refs, self.tile, self.tile.stage(i)
        pairs = (refs.query, (refs.query_s, stage)), (refs.do, (refs.do_s, stage))
        stats, place = (refs.row_stats, refs.stats_s.at[stage]), (tile.b, tile.g, refs.sizes.T)
        first = tile.begin + i * self.per_step
        copies.load(refs.query_list, first, tile.end, place, pairs, stats)

    # Masks.

    def _token_of_column(self, row):
        """Return the tokens of eight columns of a query tile.

        `row` is the first of the eight columns.
        """
        column = lax.broadcasted_iota(jnp.int32, (COLUMNS,), 0)
        column = plgpu.layout_cast(column, PER_COLUMN)
        return div(column + row, self.group)

    def selected(self, token_bits, j):
        """Return a bool array `[8]` for the eight columns from `j` on. An element is True if
        the column's token selected the block of the column's list entry.
        """
        token = self._token_of_column(j % self.spec.query_tile.rows)
        bits = token_bits[j // self.spec.query_tile.rows]
        return lax.shift_right_logical(bits, token) & 1 == 1

    def visible(self, first, token_bits, j, key_begin, key_end):
        """Return the mask `[64, 8]` of the eight columns from `j` on.

        `key_end` comes from the statistics of the eight columns, and `first` is the first entry of
        the step.
        """
        spec, end, first_key = self.spec, self.tile.end, self.tile.first_key
        key = key_index(first_key)
        if spec.single_token:
            exists = first + self._token_of_column(j) < end
            return key < down(jnp.where(exists, key_end, 0.0))
        t = j // spec.query_tile.rows
        key_end = jnp.where(first + t < end, key_end, 0.0)
        if not spec.block:
            return key < down(key_end)
        offset = lax.shift_right_logical(token_bits[t], BLOCK_OFFSET_SHIFT)
        key_begin = (offset - BLOCK_OFFSET_BIAS + first_key).astype(jnp.float32)
        key_end = jnp.minimum(key_end, key_begin + spec.block)
        key_end = jnp.where(self.selected(token_bits, j), key_end, 0.0)
        return (key >= key_begin) & (key < down(key_end))


def partials_of_lists(kernel: Kernel) -> Callable:
    """The body of the kernel `specs.dkv.partials` for query lists."""
    spec: Dkv = kernel.spec
    stored = StoredDs(spec.query_tile.rows, spec.selection_entries, spec.interpret)

    def body(refs):
        # `shard_map` does not allow values that vary along its mesh in `warp_map`.
        varies = any(
            jax.typeof(x).manual_axis_type.varying
            for x in (refs.query, refs.do, refs.row_stats)
        )
        tile = KeyTile(spec, refs)
        entries = Entries(spec, refs, tile)

        def step(keys, under_mask, i, sums):
            stage = tile.stage(i)
            first = tile.begin + i * spec.tiles_per_step
            following = entries.query_tiles(i + spec.stages)
            token_bits = entries.of_step(refs.token_bits, i) if spec.block else []
            entries.wait(i)
            visible = selected = None
            if under_mask:
                visible = functools.partial(entries.visible, first, token_bits)
            elif spec.block:
                selected = functools.partial(entries.selected, token_bits)

            def write_ds(ds):
                if spec.stored_rows:
                    stored.write(refs.ds, ds, entries.ds_places(i))

            sums = tile.add_step(stage, keys, sums, visible, selected, write_ds)
            plgpu.commit_smem()  # all four warps have read this stage
            entries.load(i + spec.stages, following, varies)
            return sums

        def loop(keys, sums):
            ranges = tile.ranges(WorkItem._fields.index("begin"), jnp.int32(0), tile.steps)
            return _over_steps(functools.partial(step, keys), ranges, sums)

        @pl.when(tile.exists())
        def _():
            tile.clear_padding_rows()
            for i in range(spec.stages):
                entries.load(jnp.int32(i), entries.query_tiles(jnp.int32(i)), varies)
            tile.sum_steps(0, loop)

    return build_kernel(
        kernel,
        body,
        scratch=_scratch(spec),
        grid_names=("item",),
    )


def merge(kernel: Kernel) -> Callable:
    """The body of the kernel `specs.dkv.merge`. A CTA of one warpgroup adds partials in order, for
    64 keys and one slab of columns. The merge is bandwidth bound, unless a tile has hundreds of
    partials.
    """
    spec: Dkv = kernel.spec
    buffers = Buffers.of(spec, spec.query_tile)
    slab, slabs = buffers.slab, spec.merged_slabs

    def body(refs):
        row, tile = refs.cta.bg, div(refs.cta.tile, slabs)
        column = rem(refs.cta.tile, slabs)
        if spec.stored_rows:
            row += refs.ds_chunk[FIRST_ROW]
        b, g = div_rem(row, spec.Hkv)
        # The index of the key tile that contains these 64 keys, and the index of their half of
        # the tile.
        key_tile = div(tile, spec.consumers)
        keys = pl.ds((tile - key_tile * spec.consumers) * ROWS, ROWS)
        mine = row * refs.sizes.key_tiles + key_tile
        first, count = refs.first[mine] + 0, refs.count[mine] + 0
        if spec.stored_rows:
            first -= refs.ds_chunk[FIRST_PARTIAL]

        def add_up(partial, out, columns):
            def read(i):
                part = partial.at[first + i, keys, columns]
                return operands.load(part, MATRIX)

            total = operands.zeros(slab)
            done = jnp.int32(0)
            for at_once in AT_ONCE:

                def add(i, total, done=done, at_once=at_once):
                    parts = [read(done + i * at_once + j) for j in range(at_once)]
                    for part in parts:
                        total = total + part
                    return total

                turns = div(count - done, at_once)
                total = lax.fori_loop(0, turns, add, total)
                done += turns * at_once
            buffers.write_keys(refs.staged, 0, total)
            plgpu.commit_smem()
            rows = out.at[b, pl.ds(tile * ROWS, ROWS), g]
            buffers.store_keys(refs.staged, 0, lambda _: rows.at[:, columns])

        before = 0
        for name, width in spec.widths.items():
            here = (column >= before) & (column < before + width // slab)

            @pl.when(here)
            def _(name=name, before=before):
                columns = pl.ds((column - before) * slab, slab)
                add_up(getattr(refs, f"{name}_partials"), getattr(refs, name), columns)

            before += width // slab
        plgpu.wait_smem_to_gmem(0)

    return build_kernel(
        kernel,
        body,
        scratch={"staged": buffers.ring(1, ROWS, slab)},
        grid_names=("bg", "tile"),
    )
