"""Gradients of keys and values: a tile of keys stays, the queries that saw it pass by.

An item is a tile of keys and a part of its queries: a range of tiles of tokens (`band`), or of
a list (`selected`: queries gathered one by one, so that no product is wasted on a query that
did not choose the block). Popular keys are several items; their partial sums, float32, are
added in a fixed order by `merged`, so every run gives the same bits.

Products are transposed, keys x queries: probabilities and their gradients are made where the
next products take them from, in registers, and the heads of a group add up by themselves.

Floors at B=1 H=64 Hkv=4 D=Dv=128 T=65536 on an H100, four products a pair: compressed 8.8
TFLOP = 8.9 ms, sliding 2.2 TFLOP, selected 4.4 TFLOP = 4.4 ms, and 34 GB of gathered rows.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import bwd_preprocess, operands
from kernels_pallas.mosaic.operands import (
    LOG2E,
    MATRIX,
    PER_COLUMN,
    ROW_STATS,
    ROW_STATS_MIN_ROWS,
    ROWS,
)
from kernels_pallas.mosaic.row_io import GatheredRows
from kernels_pallas.specs.tile import SMEM_HALF

ITEM = 8  # integers of an item
REACH = 128  # what is added to the place of a block in a tile of keys, so that it is positive


@dataclasses.dataclass(frozen=True)
class Dkv:
    """The static part of a problem; shapes as in `partial_sums`.

    `listed`: queries come from lists, in units of a few tokens of 16 rows or more, or, if
    `single`, of one token (groups of up to 8 heads); `block`: each entry says which of its
    tokens chose which `block` keys, else all of them all keys.
    """

    B: int
    T: int
    S: int
    H: int
    Hkv: int
    D: int
    Dv: int
    dtype: str
    scale: float
    items: int
    gated: bool = False
    listed: int = 0
    block: int = 0
    single: bool = False
    want_key: bool = True
    want_value: bool = True
    interpret: bool | object = False

    @property
    def consumers(self) -> int:
        """Warpgroups, of 64 keys each, that share the queries that pass by."""
        return 1 if self.listed or self.D + self.Dv > 384 else 2

    @property
    def keys(self) -> int:
        """Keys of an item."""
        return ROWS * self.consumers

    @property
    def stages(self) -> int:
        """Steps in flight: from lists as many as two blocks of threads a multiprocessor have
        shared memory for, since what they copy lies anywhere.
        """
        if not self.listed:
            return 2
        keys = ROWS * (self.D + self.Dv) * 2
        numbers = ROWS // self.unit.rows * self.rows_of_unit * ROW_STATS * 4
        return min(max((SMEM_HALF - keys) // (keys + numbers), 2), 4)

    @property
    def unit(self) -> operands.Tile:
        """What is copied at a time."""
        group = self.H // self.Hkv
        return operands.Tile(group, operands.slab_width(self.D, self.Dv), unit_rows(self))

    @property
    def rows_of_unit(self) -> int:
        """Rows of numbers that are copied with a unit."""
        return ROW_STATS_MIN_ROWS if self.single else self.unit.rows

    @property
    def units(self) -> int:
        return -(-self.T // self.unit.tokens)

    @property
    def tiles(self) -> int:
        """Tiles of `keys` keys."""
        return -(-self.S // self.keys)


def unit_rows(spec) -> int:
    group = spec.H // spec.Hkv
    if spec.single:
        return group
    return next(rows for rows in (16, 32, ROWS) if group <= rows) if spec.listed else ROWS


@functools.cache
def partial_sums(spec: Dkv) -> Kernel:
    """Inputs: query `[B, T, H, D]`, key `[B, S, Hkv, D]`, value `[B, S, Hkv, Dv]`, gradient of
    the output `[B, T, H, Dv]`; what `bwd_preprocess.of_units` gives (of a single token 8 rows, of
    which G count); int32 `items` `[items, 8]`: row of `[B, Hkv]`, first key; begin, begin and
    end of what sees all keys, and end, in units; place in the outputs. Then `first`, the first
    key by row, int32 `[B, units, rows]`; or, if `listed`, the lists, int32 `[listed]`: units,
    and if `block` `marks`, `(128 + first key of the block - first key of the tile) * 2**16 +
    one bit a token`.
    Outputs: float32 `[items, keys, D]` if `want_key` and `[items, keys, Dv]` if `want_value`;
    an item with a negative row writes none.
    """
    unit, dtype = spec.unit, jnp.dtype(spec.dtype)
    buffers = operands.Buffers(dtype, unit, bool(spec.interpret))
    stages, group = spec.stages, unit.group
    per_step = ROWS // unit.rows
    c = spec.scale * LOG2E
    if not spec.listed:
        operands.check_registers(*[240] * spec.consumers, 24)
    interpret = bool(spec.interpret)

    def body(*refs):
        query, key, value, grad, rows, items, *refs = refs
        first: Any = None if spec.listed else refs.pop(0)
        lists: Any = refs.pop(0) if spec.listed else None
        marks: Any = refs.pop(0) if spec.block else None
        key_out: Any = refs.pop(0) if spec.want_key else None
        value_out: Any = refs.pop(0) if spec.want_value else None
        key_s, value_s, query_s, grad_s, rows_s, keys_in, rows_in, rows_free = refs
        # `shard_map` lets nothing that varies along its mesh into `warp_map`.
        varies = any(jax.typeof(x).manual_axis_type.varying for x in (query, grad, rows))
        item = lax.axis_index("item")
        row = jnp.maximum(items[item, 0], 0)
        b, g = lax.div(row, jnp.int32(spec.Hkv)), lax.rem(row, jnp.int32(spec.Hkv))
        first_key, begin, whole_from, whole_to, end, place_out = (
            items[item, i] + 0 for i in range(1, 7)
        )
        per, single = jnp.int32(per_step), group if spec.single else 0
        steps = lax.div(end - begin + (per_step - 1), per)
        left = jnp.clip(lax.div(whole_from - begin + (per_step - 1), per), 0, steps)
        right = jnp.clip(lax.div(whole_to - begin, per), left, steps)

        def heads(array, index):
            tokens = pl.ds(index * unit.tokens, unit.tokens)
            return lambda columns: array.at[b, tokens, pl.ds(g * group, group), columns]

        def entries(array, i):
            """Of the lists, what belongs to step `i`."""
            places = [begin + i * per_step + u for u in range(per_step)]
            # An item without entries, which must not look before the first place of all.
            places = [jnp.maximum(jnp.minimum(place, end - 1), begin) for place in places]
            return [array[place] + 0 for place in places]

        def load_unit(i, u, index):
            """Starts the copies of the `u`-th unit of step `i`."""
            slot = lax.rem(i, jnp.int32(stages))
            here = rows_in.at[slot]
            buffers.load_rows(heads(query, index), query_s, slot, spec.D, here, u)
            buffers.load_rows(heads(grad, index), grad_s, slot, spec.Dv, here, u)
            numbers = rows_s.at[slot, pl.ds(u * spec.rows_of_unit, spec.rows_of_unit)]
            plgpu.copy_gmem_to_smem(rows.at[b, g, index], numbers, here)

        def of_warp(warp, units):
            index = units[0]
            for u, other in enumerate(units[1:]):
                index = jnp.where(warp > u, other, index)
            return index

        def load_listed(i, units):
            """Starts the copies of step `i`, a warp a unit; `units`: of them, if few."""

            def load(u):
                if units:
                    load_unit(i, u, of_warp(u, units))
                    return
                place = jnp.minimum(begin + i * per_step + u, end - 1)
                load_unit(i, u, lists[place] + 0)

            pl.when(i < steps)(lambda: operands.by_warps(per_step, load, varies))

        def ask(i):
            """The units of step `i`, or where these are many the cache is asked for them."""
            if not single:
                return entries(lists, i)
            GatheredRows(single, interpret).ask(lists, begin + i * per_step, end)
            return ()

        def clear():
            buffers.clear_rows(query_s, per_step)
            buffers.clear_rows(grad_s, per_step)
            plgpu.commit_smem()

        def down(column):
            return lax.broadcast_in_dim(column, (ROWS, 8), [1])

        def step(wg, under_mask, i, carry):
            slot = lax.rem(i, jnp.int32(stages))
            place = begin + i * per_step
            following = ask(i + stages) if spec.listed else ()
            found = entries(marks, i) if spec.block else ()
            plgpu.barrier_wait(rows_in.at[slot])
            logits, weights, _ = buffers.products(
                ((key_s, wg), (query_s, slot)), ((value_s, wg), (grad_s, slot))
            )
            # Eight columns at a time, so that their numbers need few registers.
            changes, scaled = [], []
            for j in range(0, ROWS, 8):
                columns = slice(j, j + 8)
                place_in = (rows_s.at[slot], j) if single else (rows_s.at[slot, columns], 0)
                norm, *rest = operands.column_numbers(*place_in, interpret, single)
                if spec.block and not under_mask:
                    norm = jnp.where(chosen(j, found), norm, jnp.inf)
                norm, last, gate, offset = map(down, (norm, *rest))
                probs = jnp.exp2(logits[:, columns] * c - norm)
                if under_mask:
                    seen = mask(wg, j, last.astype(jnp.int32), place, found)
                    probs = jnp.where(seen, probs, 0.0)
                weight = weights[:, columns]
                if spec.gated:
                    weight = weight * gate
                changes.append((probs * (weight - offset)).astype(dtype))
                scaled.append((probs * gate if spec.gated else probs).astype(dtype))
            parts = []
            if spec.want_key:
                parts += [(operands.side_by_side(changes, interpret), (query_s, slot))]
            if spec.want_value:
                parts += [(operands.side_by_side(scaled, interpret), (grad_s, slot))]
            terms = [(acc, *part) for acc, part in zip(carry, parts, strict=True)]
            sums = buffers.add_weighted(*terms)
            if spec.listed:
                plgpu.commit_smem()  # all four warps are done with this slot
                load_listed(i + stages, following)
            else:
                plgpu.barrier_arrive(rows_free.at[slot])
            return tuple(sums)

        def mask(wg, j, last, place, found):
            """Which query of columns `j .. j + 7` of a step sees which key."""
            key_index = plgpu.broadcasted_iota(jnp.int32, (ROWS, 8), 0, layout=MATRIX)
            key_index += first_key + wg * ROWS
            if not spec.listed:
                row = first.at[b, place, pl.ds(j, 8)]
                row = plgpu.load(row, layout=PER_COLUMN, optimized=False)
                return (key_index >= down(row)) & (key_index < last)
            if single:
                there = place + tokens_from(j) < end
                return key_index < jnp.where(down(there), last, 0)
            u = j // unit.rows
            last = jnp.where(place + u < end, last, 0)
            if not spec.block:
                return key_index < last
            begins = lax.shift_right_logical(found[u], 16) - REACH + first_key
            last = jnp.minimum(last, begins + spec.block)
            last = jnp.where(down(chosen(j, found)), last, 0)
            return (key_index >= begins) & (key_index < last)

        def chosen(j, found):
            """Of columns `j .. j + 7` of a step, whether their tokens chose the block."""
            token = tokens_from(j % unit.rows)
            return lax.shift_right_logical(found[j // unit.rows], token) & 1 == 1

        def tokens_from(row):
            """Of eight columns, whose first one is row `row`, the tokens."""
            column = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (8,), 0), PER_COLUMN)
            return lax.div(column + row, jnp.int32(group))

        def compute(wg):
            for source, ref in ((key, key_s), (value, value_s)):
                mine = source.at[b, pl.ds(first_key + wg * ROWS, ROWS), g]
                buffers.load_keys(
                    lambda columns, mine=mine: mine.at[:, columns], ref, wg, keys_in.at[wg]
                )
            plgpu.barrier_wait(keys_in.at[wg])
            sums = tuple(
                operands.full((ROWS, width), 0.0, MATRIX)
                for width, wanted in ((spec.D, spec.want_key), (spec.Dv, spec.want_value))
                if wanted
            )
            masked, plain = (functools.partial(step, wg, mask) for mask in (True, False))
            sums = lax.fori_loop(0, left, masked, sums)
            sums = lax.fori_loop(left, right, plain, sums)
            sums = list(lax.fori_loop(right, steps, masked, sums))

            @pl.when(items[item, 0] >= 0)
            def _():
                mine = pl.ds(wg * ROWS, ROWS)
                if spec.want_value:
                    value_out.at[place_out, mine][...] = sums.pop()
                if spec.want_key:
                    key_out.at[place_out, mine][...] = sums.pop() * spec.scale

        if spec.listed:
            clear()
            for i in range(stages):
                load_listed(jnp.int32(i), ask(jnp.int32(i)))
            compute(0)
            return
        wg = lax.axis_index("wg")

        @pl.when(wg < spec.consumers)
        def _():
            if not interpret:
                plgpu.set_max_registers(240, action="increase")
            compute(wg)

        @pl.when(wg == spec.consumers)
        def _():
            clear()
            if not interpret:
                plgpu.set_max_registers(24, action="decrease")

            def load(i, _):
                slot = lax.rem(i, jnp.int32(stages))

                @pl.when(i >= stages)
                def _():
                    plgpu.barrier_wait(rows_free.at[slot])

                load_unit(i, 0, begin + i)

            lax.fori_loop(0, steps, load, None)
            if interpret:  # which wants every completed phase waited for

                def drain(i, _):
                    plgpu.barrier_wait(rows_free.at[lax.rem(i, jnp.int32(stages))])

                lax.fori_loop(jnp.maximum(steps - stages, 0), steps, drain, None)

    slabs, value_slabs = spec.D // unit.slab, spec.Dv // unit.slab
    shape = jax.ShapeDtypeStruct
    inputs = [
        shape((spec.B, spec.T, spec.H, spec.D), dtype),
        shape((spec.B, spec.S, spec.Hkv, spec.D), dtype),
        shape((spec.B, spec.S, spec.Hkv, spec.Dv), dtype),
        shape((spec.B, spec.T, spec.H, spec.Dv), dtype),
        bwd_preprocess.array(spec, unit.tokens, spec.rows_of_unit),
        shape((spec.items, ITEM), jnp.int32),
    ]
    if spec.listed:
        inputs += [shape((spec.listed,), jnp.int32)] * (1 + bool(spec.block))
    else:
        inputs += [shape((spec.B, spec.units, unit.rows), jnp.int32)]
    outputs = tuple(
        shape((spec.items, spec.keys, width), jnp.float32)
        for width, wanted in ((spec.D, spec.want_key), (spec.Dv, spec.want_value))
        if wanted
    )
    call = plgpu.kernel(
        body,
        out_type=outputs,
        grid=(spec.items,),
        grid_names=("item",),
        num_threads=None if spec.listed else spec.consumers + 1,
        thread_name=None if spec.listed else "wg",
        scratch_types=[
            buffers.ring(spec.consumers, ROWS, spec.D),
            buffers.ring(spec.consumers, ROWS, spec.Dv),
            buffers.rows(stages, spec.D, per_step),
            buffers.rows(stages, spec.Dv, per_step),
            plgpu.SMEM((stages, per_step * spec.rows_of_unit, ROW_STATS), jnp.float32),
            plgpu.Barrier(num_arrivals=slabs + value_slabs, num_barriers=spec.consumers),
            plgpu.Barrier(
                num_arrivals=(slabs + value_slabs + 1) * per_step, num_barriers=stages
            ),
            plgpu.Barrier(num_arrivals=spec.consumers, num_barriers=stages),
        ],
        compiler_params=operands.PARAMS,
        interpret=spec.interpret,
    )
    return Kernel("key_gradient", spec, call, tuple(inputs), outputs)


@functools.cache
def merged(spec: Dkv) -> Kernel:
    """Inputs: the outputs of `partial_sums`, and int32 `first`, `count` `[B, Hkv, tiles]`: the
    items of each tile of keys. Outputs: the gradients of key `[B, S, Hkv, D]` and value
    `[B, S, Hkv, Dv]`, as wanted.
    """
    dtype = jnp.dtype(spec.dtype)
    buffers = operands.Buffers(dtype, spec.unit, bool(spec.interpret))
    widths = [spec.D] * spec.want_key + [spec.Dv] * spec.want_value

    def body(*refs):
        parts, (first, count, *refs) = refs[: len(widths)], refs[len(widths) :]
        outs, scratch = refs[: len(widths)], refs[len(widths) :]
        row, tile = lax.axis_index("bg"), lax.axis_index("tile")
        b, g = lax.div(row, jnp.int32(spec.Hkv)), lax.rem(row, jnp.int32(spec.Hkv))
        whole = lax.div(tile, jnp.int32(spec.consumers))
        half = pl.ds((tile - whole * spec.consumers) * ROWS, ROWS)
        begin = first[b, g, whole] + 0
        for width, part, out, staged in zip(widths, parts, outs, scratch, strict=True):

            def add(i, total, part=part):
                more = plgpu.load(part.at[begin + i, half], layout=MATRIX, optimized=False)
                return total + more

            total = operands.full((ROWS, width), 0.0, MATRIX)
            total = lax.fori_loop(0, count[b, g, whole] + 0, add, total)
            buffers.write_keys(staged, 0, total)
            plgpu.commit_smem()
            mine = out.at[b, pl.ds(tile * ROWS, ROWS), g]
            buffers.store_keys(staged, 0, lambda columns, mine=mine: mine.at[:, columns])
        plgpu.wait_smem_to_gmem(0)

    shape = jax.ShapeDtypeStruct
    places = shape((spec.B, spec.Hkv, spec.tiles), jnp.int32)
    sums = [shape((spec.items, spec.keys, width), jnp.float32) for width in widths]
    outputs = tuple(shape((spec.B, spec.S, spec.Hkv, width), dtype) for width in widths)
    call = plgpu.kernel(
        body,
        out_type=outputs,
        grid=(spec.B * spec.Hkv, -(-spec.S // ROWS)),
        grid_names=("bg", "tile"),
        scratch_types=[buffers.ring(1, ROWS, width) for width in widths],
        compiler_params=operands.PARAMS,
        interpret=spec.interpret,
    )
    return Kernel("merged_key_gradient", spec, call, (*sums, places, places), outputs)
