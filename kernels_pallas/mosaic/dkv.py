"""dk and dv of a branch: the key-stationary loop of the backward pass, and its merge.

For one tile of keys, K and V stay in shared memory, dK and dV in registers; each step brings Q
and dO of 64 query rows and their statistics (`specs/bwd_preprocess.py`). Products are
transposed, keys x queries:

    S^T   = K Q^T                                       [64 keys, 64 rows]
    dP^T  = V dO^T                                      [64, 64]
    gP^T  = +-exp2(scale * log2(e) * S^T - shift)
    dS^T  = gP^T * (dP^T - delta)
    dV   += gP^T dO                                     [64, Dv]
    dK   += dS^T Q                                      [64, D], times scale at the end

shift and delta are those of `row_stats`; shift holds the gate. gP^T and dS^T stay in registers,
as the left operand of the last two wgmma. The G query heads of a key/value head are rows of the
query tile, so these products sum over them: GQA needs no reduction of its own.

Loop order: for each work item (a CTA): its tile of keys; for each step: one query tile of 64
rows, or several smaller ones that are gathered. Steps at both ends of an interval are masked;
between them no key is compared. A warpgroup leaves out the steps of which no query sees its 64
keys. dP is multiplied beside dV, and dS is made beside the latter. Of the selected branch dS may
also be written to memory, where `stored_ds_dq.py` finds it.

| queries   | a CTA                                        | keys | stages                    |
|-----------|----------------------------------------------|------|---------------------------|
| intervals | a producer warpgroup and 2 consumers, or 1   | 128, | 2                         |
|           | where D + Dv > 384                           | 64   |                           |
| gathered  | 1 warpgroup; each warp starts the copies of  | 64   | as many as two CTAs on an |
|           | every fourth query tile                      |      | SM have room for, 2 to 4  |

Floors at B=1 H=64 Hkv=4 D=Dv=128 T=65536 on an H100, four products a pair: compressed 8.8
TFLOP = 8.9 ms, sliding 2.2 TFLOP, selected 4.4 TFLOP = 4.4 ms, and 34 GB of gathered rows.
Products that read their operands from shared memory bound all three: at D=Dv=128 a step of two
warpgroups takes 2048 cycles of the tensor cores, in which shared memory moves 192 KB to them
(1536 cycles), 32 KB of copies (256) and statistics (256). Where K and V fit in registers
(D + Dv <= 128), products read a third less. Gathered rows come from L2 for work items that run
together.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import operands, softmax
from kernels_pallas.mosaic.operands import LOG2E, MATRIX, PER_COLUMN, ROW_STATS, ROWS
from kernels_pallas.mosaic.refs import build_kernel
from kernels_pallas.mosaic.row_io import GatheredRows
from kernels_pallas.mosaic.stored_ds import NO_ENTRY, StoredDs
from kernels_pallas.specs.block_query_lists import BLOCK_OFFSET_BIAS, BLOCK_OFFSET_SHIFT
from kernels_pallas.specs.dkv import Dkv
from kernels_pallas.specs.stored_ds import FIRST_PARTIAL, FIRST_ROW
from kernels_pallas.specs.work_items import PART_COLUMNS, WorkItem, part_column

COLUMNS = 8  # query rows whose statistics are in registers at a time
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24  # a thread


def partials(kernel: Kernel):
    """The body of `specs.dkv.partials`."""
    spec: Dkv = kernel.spec
    query_tile, stages, per_step = spec.query_tile, spec.stages, spec.tiles_per_step
    group = query_tile.group
    interpret = bool(spec.interpret)
    dtype = jnp.dtype(spec.dtype)
    buffers = operands.Buffers(dtype, query_tile, interpret)
    c = spec.scale * LOG2E
    stored = StoredDs(query_tile.rows, spec.slots, interpret)
    if not spec.gathered:
        operands.check_registers(*[CONSUMER_REGISTERS] * spec.consumers, PRODUCER_REGISTERS)

    def body(refs):
        # `shard_map` lets nothing that varies along its mesh into `warp_map`.
        varies = any(
            jax.typeof(x).manual_axis_type.varying
            for x in (refs.query, refs.do, refs.row_stats)
        )
        item = refs.cta.item
        row = jnp.maximum(refs.work_items[item, 0], 0)
        b, g = lax.div(row, jnp.int32(spec.Hkv)), lax.rem(row, jnp.int32(spec.Hkv))
        # Bounds are query tiles, or list entries.
        first_key, begin, _, _, end, partial = (
            refs.work_items[item, i] + 0 for i in range(1, 7)
        )
        if spec.slots:
            partial -= refs.window[FIRST_PARTIAL]
        step_tiles = jnp.int32(per_step)
        steps = lax.div(end - begin + (per_step - 1), step_tiles)

        def steps_of(wg):
            """Warpgroup `wg` computes the steps from `first` to `last - 1`, and compares no key in
            those from `unmasked_first` to `unmasked_last - 1`.
            """
            bounds = WorkItem._fields.index("begin") if spec.gathered else part_column(wg)
            low, unmasked_low, unmasked_high, high = (
                refs.work_items[item, bounds + i] - begin for i in range(len(PART_COLUMNS))
            )
            first, last = (jnp.int32(0), steps) if spec.gathered else (low, high)
            unmasked_first = lax.div(unmasked_low + (per_step - 1), step_tiles)
            unmasked_first = jnp.clip(unmasked_first, first, last)
            unmasked_last = lax.div(unmasked_high, step_tiles)
            return first, unmasked_first, jnp.clip(unmasked_last, unmasked_first, last), last

        # Copies.

        def stage_of(i):
            return lax.rem(i, jnp.int32(stages))

        def rows_of(array, tile):
            """Query tile `tile` of `array` `[B, T, H, width]`, by columns."""
            tokens = pl.ds(tile * query_tile.tokens, query_tile.tokens)
            return lambda columns: array.at[b, tokens, pl.ds(g * group, group), columns]

        def load_tile(i, t, tile):
            """Starts the copies of query tile `tile`, the `t`-th of step `i`."""
            stage = stage_of(i)
            full = refs.step_full.at[stage]
            buffers.load_rows(rows_of(refs.query, tile), refs.query_s, stage, spec.D, full, t)
            buffers.load_rows(rows_of(refs.do, tile), refs.do_s, stage, spec.Dv, full, t)
            stats = refs.stats_s.at[stage, pl.ds(t * spec.stats_rows, spec.stats_rows)]
            plgpu.copy_gmem_to_smem(refs.row_stats.at[b, g, tile], stats, full)

        def entries_of_step(array, i):
            """What `array`, the query list or the marks, has for the entries of step `i`."""
            at = [begin + i * per_step + t for t in range(per_step)]
            # A work item without entries must not read before the first one of all.
            at = [jnp.maximum(jnp.minimum(entry, end - 1), begin) for entry in at]
            return [array[entry] + 0 for entry in at]

        def token_of(entry):
            """Of an entry that is a place in the selection."""
            return lax.div(entry, jnp.int32(spec.Hkv * spec.slots))

        def places_of_step(i):
            """The places in ds of the tokens of step `i`; past the last one nowhere."""
            slots, places = jnp.int32(spec.slots), []
            first = (row - refs.window[FIRST_ROW]) * refs.sizes.T
            for t, entry in enumerate(entries_of_step(refs.query_list, i)):
                place = (first + token_of(entry)) * slots + lax.rem(entry, slots)
                places.append(jnp.where(begin + i * per_step + t < end, place, NO_ENTRY))
            return places

        def query_tiles_of_step(i):
            """The query tiles of step `i`; none if they are single tokens, which are many:
            these are prefetched into L1, and `load_step` reads them there.
            """
            if spec.slots:
                return [token_of(entry) for entry in entries_of_step(refs.query_list, i)]
            if not spec.single_token:
                return entries_of_step(refs.query_list, i)
            GatheredRows(group, interpret).prefetch_entries(
                refs.query_list, begin + i * per_step, end
            )
            return ()

        def load_step(i, tiles):
            """Starts the copies of step `i`, gathered: a warp takes every fourth query tile."""

            def load(t):
                if tiles:
                    tile = tiles[0]
                    for later, other in enumerate(tiles[1:]):
                        tile = jnp.where(t > later, other, tile)
                    load_tile(i, t, tile)
                    return
                entry = jnp.minimum(begin + i * per_step + t, end - 1)
                load_tile(i, t, refs.query_list[entry] + 0)

            pl.when(i < steps)(lambda: operands.by_warps(per_step, load, varies))

        def clear_rows_of_no_head():
            buffers.clear_rows(refs.query_s, per_step)
            buffers.clear_rows(refs.do_s, per_step)
            plgpu.commit_smem()

        # Masks, for columns `j .. j + 7` of a step; values by column are `[8]`.

        def down(column):
            return lax.broadcast_in_dim(column, (ROWS, COLUMNS), [1])  # [64, 8]

        def token_of_column(row):
            """The tokens of eight columns of a query tile, the first of which is `row`."""
            column = lax.broadcasted_iota(jnp.int32, (COLUMNS,), 0)
            column = plgpu.layout_cast(column, PER_COLUMN)
            return lax.div(column + row, jnp.int32(group))

        def selected(j, marks):
            """Whether the token of a column selected the block of its entry, `[8]`."""
            token = token_of_column(j % query_tile.rows)
            mark = marks[j // query_tile.rows]
            return lax.shift_right_logical(mark, token) & 1 == 1

        def visible(wg, j, key_begin, key_end, first, marks):
            """Which query of these columns sees which key, `[64, 8]`; `key_begin`, `key_end`: of
            their statistics, float32; `first`: the first query tile or entry of the step.
            """
            key = plgpu.broadcasted_iota(jnp.int32, (ROWS, COLUMNS), 0, layout=MATRIX)
            key = (key + (first_key + wg * ROWS)).astype(jnp.float32)
            if not spec.gathered:
                return (key >= down(key_begin)) & (key < down(key_end))
            if spec.single_token:
                exists = first + token_of_column(j) < end
                return key < down(jnp.where(exists, key_end, 0.0))
            t = j // query_tile.rows
            key_end = jnp.where(first + t < end, key_end, 0.0)
            if not spec.block:
                return key < down(key_end)
            offset = lax.shift_right_logical(marks[t], BLOCK_OFFSET_SHIFT)
            key_begin = (offset - BLOCK_OFFSET_BIAS + first_key).astype(jnp.float32)
            key_end = jnp.minimum(key_end, key_begin + spec.block)
            key_end = jnp.where(selected(j, marks), key_end, 0.0)
            return (key >= key_begin) & (key < down(key_end))

        # Products.

        def step(wg, key, value, under_mask, i, carry):
            """Adds the query rows of step `i` to dK `[64, D]` and dV `[64, Dv]`.

            `key`, `value`: the left operands, 64 keys.
            """
            stage = stage_of(i)
            first = begin + i * per_step
            following = query_tiles_of_step(i + stages) if spec.gathered else ()
            marks = entries_of_step(refs.marks, i) if spec.block else ()
            plgpu.barrier_wait(refs.step_full.at[stage])

            def stats_of_columns(j):
                """shift, delta, first_key and key_end of eight columns, `[8]`."""
                stats = refs.stats_s.at[stage], j
                if not spec.single_token:
                    stats = refs.stats_s.at[stage, slice(j, j + COLUMNS)], 0
                of_single = group if spec.single_token else 0
                return operands.column_stats(*stats, interpret, of_single)

            s = buffers.start_product(key, (refs.query_s, stage))  # K Q^T
            (s,) = buffers.finish(s)
            # Eight columns at a time, so that their statistics need few registers.
            p = []
            for j in range(0, ROWS, COLUMNS):
                shift, _, key_begin, key_end = stats_of_columns(j)
                if spec.block and not under_mask:
                    shift = jnp.where(selected(j, marks), shift, jnp.inf)
                seen = None
                if under_mask:
                    seen = visible(wg, j, key_begin, key_end, first, marks)
                part = softmax.probabilities(s[:, j : j + COLUMNS], c, down(shift), seen)
                if spec.gated:
                    part = operands.with_sign_bit(part, down(shift), interpret)
                p.append(part)  # gP^T [64, 8]
            sums = list(carry)
            dp = None
            if spec.want_dk:
                dp = buffers.start_product(value, (refs.do_s, stage))  # V dO^T
            if spec.want_dv:  # dV += gP^T dO
                left = operands.side_by_side([part.astype(dtype) for part in p], interpret)
                sums[-1] = buffers.start_sum(sums[-1], left, (refs.do_s, stage))
            if dp is not None:  # dK += dS^T Q
                (dp,) = buffers.finish(dp, running=int(spec.want_dv))
                ds = []
                for j in range(0, ROWS, COLUMNS):
                    # Read again: kept from above they would take 16 registers.
                    delta = stats_of_columns(j)[1]
                    part = dp[:, j : j + COLUMNS] - down(delta)
                    ds.append((p[j // COLUMNS] * part).astype(dtype))
                ds = operands.side_by_side(ds, interpret)
                if spec.stored_rows:
                    stored.write(refs.ds, ds, places_of_step(i))
                sums[0] = buffers.start_sum(sums[0], ds, (refs.query_s, stage))
            sums = buffers.finish(*sums)
            if spec.gathered:
                plgpu.commit_smem()  # all four warps have read this stage
                load_step(i + stages, following)
            else:
                plgpu.barrier_arrive(refs.step_free.at[stage])
            return tuple(sums)

        def skip(i, _):
            """Leaves a step of which no query sees a key of this warpgroup."""
            stage = stage_of(i)
            plgpu.barrier_wait(refs.step_full.at[stage])
            plgpu.barrier_arrive(refs.step_free.at[stage])

        def consume(wg):
            """dK and dV of the 64 keys of warpgroup `wg`."""
            for source, ring in ((refs.key, refs.key_s), (refs.value, refs.value_s)):
                keys = source.at[b, pl.ds(first_key + wg * ROWS, ROWS), g]
                buffers.load_keys(
                    lambda columns, keys=keys: keys.at[:, columns],
                    ring,
                    wg,
                    refs.keys_full.at[wg],
                )
            plgpu.barrier_wait(refs.keys_full.at[wg])
            sums = tuple(
                operands.full((ROWS, width), 0.0, MATRIX) for width in spec.widths.values()
            )
            left = (refs.key_s, wg), (refs.value_s, wg)
            if spec.keys_in_registers:
                left = tuple(buffers.in_registers(*operand) for operand in left)
            step_here = functools.partial(step, wg, *left)
            masked, unmasked = (functools.partial(step_here, mask) for mask in (True, False))
            first, unmasked_first, unmasked_last, last = steps_of(wg)
            if not spec.gathered:
                lax.fori_loop(0, first, skip, None)
            sums = lax.fori_loop(first, unmasked_first, masked, sums)
            sums = lax.fori_loop(unmasked_first, unmasked_last, unmasked, sums)
            sums = list(lax.fori_loop(unmasked_last, last, masked, sums))
            if not spec.gathered:
                lax.fori_loop(last, steps, skip, None)

            keys = pl.ds(wg * ROWS, ROWS)
            if spec.want_dv:
                refs.dv_partials.at[partial, keys][...] = sums.pop()
            if spec.want_dk:
                refs.dk_partials.at[partial, keys][...] = sums.pop() * spec.scale

        def produce():
            """Fills the stages with query tiles, as consumers leave them."""

            def load(i, _):
                stage = stage_of(i)

                @pl.when(i >= stages)
                def _():
                    plgpu.barrier_wait(refs.step_free.at[stage])

                load_tile(i, 0, begin + i)

            lax.fori_loop(0, steps, load, None)
            if interpret:  # which wants every completed phase waited for

                def drain(i, _):
                    plgpu.barrier_wait(refs.step_free.at[stage_of(i)])

                lax.fori_loop(jnp.maximum(steps - stages, 0), steps, drain, None)

        exists = refs.work_items[item, 0] >= 0
        if spec.gathered:

            @pl.when(exists)
            def _():
                clear_rows_of_no_head()
                for i in range(stages):
                    load_step(jnp.int32(i), query_tiles_of_step(jnp.int32(i)))
                consume(0)

            return
        wg = lax.axis_index("wg")

        @pl.when(exists & (wg < spec.consumers))
        def _():
            if not interpret:
                plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            consume(wg)

        @pl.when(exists & (wg == spec.consumers))
        def _():
            clear_rows_of_no_head()
            if not interpret:
                plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            produce()

    copies = (spec.D + spec.Dv) // query_tile.slab  # of K and V, and of Q and dO: one a slab
    stats_rows = per_step * spec.stats_rows
    return build_kernel(
        kernel,
        body,
        scratch={
            "key_s": buffers.ring(spec.consumers, ROWS, spec.D),
            "value_s": buffers.ring(spec.consumers, ROWS, spec.Dv),
            "query_s": buffers.rows(stages, spec.D, per_step),
            "do_s": buffers.rows(stages, spec.Dv, per_step),
            "stats_s": plgpu.SMEM((stages, stats_rows, ROW_STATS), jnp.float32),
            "keys_full": plgpu.Barrier(num_arrivals=copies, num_barriers=spec.consumers),
            "step_full": plgpu.Barrier(
                num_arrivals=(copies + 1) * per_step, num_barriers=stages
            ),
            "step_free": plgpu.Barrier(num_arrivals=spec.consumers, num_barriers=stages),
        },
        grid_names=("item",),
        num_threads=None if spec.gathered else spec.consumers + 1,
        thread_name=None if spec.gathered else "wg",
        interpret=spec.interpret,
    )


def merge(kernel: Kernel):
    """The body of `specs.dkv.merge`: a CTA of one warpgroup adds the partials of 64 keys, in
    their order. Bandwidth bound.
    """
    spec: Dkv = kernel.spec
    buffers = operands.Buffers(jnp.dtype(spec.dtype), spec.query_tile, bool(spec.interpret))

    def body(refs):
        row, tile = refs.cta.bg, refs.cta.tile
        b, g = lax.div(row, jnp.int32(spec.Hkv)), lax.rem(row, jnp.int32(spec.Hkv))
        # Which work items' tile these 64 keys belong to, and which half of it they are.
        key_tile = lax.div(tile, jnp.int32(spec.consumers))
        keys = pl.ds((tile - key_tile * spec.consumers) * ROWS, ROWS)
        mine = row * refs.sizes.key_tiles + key_tile
        first = refs.first[mine] + 0
        for name, width in spec.widths.items():
            partial, out, staged = (
                getattr(refs, key) for key in (f"{name}_partials", name, f"{name}_s")
            )

            def add(i, total, partial=partial):
                more = plgpu.load(partial.at[first + i, keys], layout=MATRIX, optimized=False)
                return total + more

            total = operands.full((ROWS, width), 0.0, MATRIX)  # [64, width]
            total = lax.fori_loop(0, refs.count[mine] + 0, add, total)
            buffers.write_keys(staged, 0, total)
            plgpu.commit_smem()
            rows = out.at[b, pl.ds(tile * ROWS, ROWS), g]
            buffers.store_keys(staged, 0, lambda columns, rows=rows: rows.at[:, columns])
        plgpu.wait_smem_to_gmem(0)

    return build_kernel(
        kernel,
        body,
        scratch={
            f"{name}_s": buffers.ring(1, ROWS, width) for name, width in spec.widths.items()
        },
        grid_names=("bg", "tile"),
        interpret=spec.interpret,
    )
