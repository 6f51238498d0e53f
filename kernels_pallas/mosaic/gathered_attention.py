"""Attention to selected blocks, block by block: a block stays, tokens that chose it pass by.

For tokens whose neighbours chose other blocks, so that the union that `selected.py` walks over
is long. A step gathers the rows of as many tokens as 64 rows have room for, and no product is
wasted; each token and block then has an output and a log-sum-exp of its own
(`partial_outputs`), which `merged` puts together. Sums have a fixed order.

The gradient of the query is the same: partial gradients, and their sum.

Floors at B=1 H=32 Hkv=8 D=Dv=128 T=32768 n=16 on an H100: 0.55 TFLOP = 0.55 ms; partial outputs
are 4.3 GB, written and read 2.6 ms.
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
from kernels_pallas.mosaic import bwd_preprocess, operands, softmax
from kernels_pallas.mosaic.dkv import ITEM
from kernels_pallas.mosaic.operands import LOG2E, MATRIX, PER_ROW, ROWS, across
from kernels_pallas.mosaic.row_io import GatheredRows, TileRows
from kernels_pallas.mosaic.selected_attention import tile_leaves

STAGES = 4  # of `merged`
PLACE = 64  # integers of a part, 256 bytes as launches want them; the first three count


@dataclasses.dataclass(frozen=True)
class GatheredAttention:
    """The static part of a problem; shapes as in `partial_outputs`. A block has 64 keys.

    The tokens are taken in parts: there are partial outputs of one part at a time.
    """

    B: int
    T: int
    S: int
    H: int
    Hkv: int
    D: int
    Dv: int
    n: int
    dtype: str
    scale: float
    limit: int  # `selected_attention.Selected.limit`
    tokens: int  # of a part
    parts: int
    items: int  # of a part
    gated: bool = False
    gradient: bool = False  # of the query
    numbers_unit: tuple[int, int] = (0, 0)  # `selected_attention.Selected.numbers_unit`
    interpret: bool | object = False

    @property
    def group(self) -> int:
        return self.H // self.Hkv

    @property
    def unit(self) -> operands.Tile:
        """What is copied at a time: a token."""
        return operands.Tile(self.group, operands.slab_width(self.D, self.Dv), self.group)

    @property
    def tile(self) -> operands.Tile:
        """Neighbours that are merged together."""
        return operands.Tile(self.group, operands.slab_width(self.D, self.Dv))

    @property
    def tiles(self) -> int:
        """Of a part."""
        return -(-self.tokens // self.tile.tokens)

    @property
    def all_tiles(self) -> int:
        return -(-self.T // self.tile.tokens)

    @property
    def width(self) -> int:
        """Columns of the output."""
        return self.D if self.gradient else self.Dv

    @property
    def places(self) -> int:
        """Of a part's batch row: one a token, key/value head and selected block."""
        return self.tokens * self.Hkv * self.n

    @property
    def partial(self) -> jax.ShapeDtypeStruct:
        shape = self.B, self.places, self.group, self.width
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))

    @property
    def norms(self) -> jax.ShapeDtypeStruct:
        """Log-sum-exp, in bits, of the partial outputs."""
        shape = self.B, self.Hkv, self.n * self.tiles * ROWS
        return jax.ShapeDtypeStruct(shape, jnp.float32)


@functools.cache
def partial_outputs(spec: GatheredAttention) -> Kernel:
    """Inputs: query `[B, T, H, D]`, key `[B, S, Hkv, D]`, value `[B, S, Hkv, Dv]`; int32
    `items` `[parts, items, 8]`: row of `[B, Hkv]` (negative: nothing to do), first key of a
    block, where the entries begin of tokens that chose it, and of those that see it to its
    end, and where they end; `entries` `[B * Hkv * T * n]`: `(token * Hkv + head) * n + slot`;
    `last` `[B, T]`: the end of the keys that a token may see; `place` `[64]` of the part: its
    number, first token and first tile. Outputs: `[B, tokens * Hkv * n, G, Dv]`, and float32
    `[B, Hkv, n * tiles * 64]`, the log-sum-exp in bits by slot and row of `tile`; what no entry
    is about is left undefined.

    With `gradient`: at the end the gradient of the output `[B, T, H, Dv]` and the numbers that
    `selected_attention.attention` takes. Output: `[B, tokens * Hkv * n, G, D]`.
    """
    unit, tile, dtype = spec.unit, spec.tile, jnp.dtype(spec.dtype)
    buffers = operands.Buffers(dtype, unit, bool(spec.interpret))
    group = spec.group
    by_row = GatheredRows(group, bool(spec.interpret))
    per_step = by_row.count
    c = spec.scale * LOG2E

    def body(*refs):
        query, key, value, items, entries, last, place, *refs = refs
        grad: Any = refs.pop(0) if spec.gradient else None
        rows: Any = refs.pop(0) if spec.gradient else None
        out = refs.pop(0)
        norms: Any = None if spec.gradient else refs.pop(0)
        key_s, value_s, query_s = (refs.pop(0) for _ in range(3))
        grad_s: Any = refs.pop(0) if spec.gradient else None
        out_s, keys_in, rows_in = refs
        varies = any(jax.typeof(x).manual_axis_type.varying for x in (query, key, items))
        part, first_token = place[0] + 0, place[1] + 0
        mine = items.at[part, lax.axis_index("item")]
        exists, row = mine[0] >= 0, jnp.maximum(mine[0], 0)
        b, g = lax.div(row, jnp.int32(spec.Hkv)), lax.rem(row, jnp.int32(spec.Hkv))
        first_key, begin, whole, end = (mine[i] + 0 for i in range(1, 5))
        per = jnp.int32(per_step)
        steps = jnp.where(exists, lax.div(end - begin + (per_step - 1), per), 0)
        left = lax.div(whole - begin + (per_step - 1), per)

        def load(i):
            def load_unit(u):
                place = jnp.minimum(begin + i * per_step + u, end - 1)
                token = lax.div(entries[place] + 0, jnp.int32(spec.Hkv * spec.n))
                for source, ref, width in ((query, query_s, spec.D), (grad, grad_s, spec.Dv)):
                    if ref is not None:
                        heads = functools.partial(_heads, source, b, token, g * group, group)
                        buffers.load_rows(heads, ref, 0, width, rows_in, u)

            pl.when(i < steps)(lambda: operands.by_warps(per_step, load_unit, varies))

        def store(i):
            def store_unit(u):
                place = begin + i * per_step + u

                @pl.when(place < end)
                def _():
                    entry = entries[place] - first_token * (spec.Hkv * spec.n)
                    here = functools.partial(_heads, out, b, entry, 0, group)
                    buffers.store_rows(out_s, 0, spec.width, here, u)

            operands.by_warps(per_step, store_unit, varies)

        def entries_of(i):
            return by_row.entries(entries, begin + i * per_step, end)

        def step(under_mask, i, mine):
            place = begin + i * per_step
            following = entries_of(i + 1)  # so that the next copies find them in the cache
            token = lax.div(mine, jnp.int32(spec.Hkv * spec.n))
            seen = None
            if under_mask:
                shape = (ROWS, ROWS)
                index = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=MATRIX)
                ends = by_row.element(last, b, token)
                seen = index < across(ends - first_key, shape)
            found: Any = None
            if spec.gradient:
                found = by_row.numbers(rows, b, g, token, spec.numbers_unit[0], spec.gated)
            plgpu.barrier_wait(rows_in)
            pairs = [((query_s, 0), (key_s, 0))]
            pairs += [((grad_s, 0), (value_s, 0))] * spec.gradient
            logits, *rest = buffers.products(*pairs)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.commit_smem()  # all four warps are done with these rows and the last output
            load(i + 1)
            nothing, *state = softmax.nothing(spec.width)
            if spec.gradient:
                norm, gate, offset = found
                found = softmax.softmax_backward(logits, rest[0], c, norm, gate, offset, seen)
                (acc,) = buffers.add_weighted((nothing, found.astype(dtype), (key_s, 0)))
                acc *= spec.scale
            else:
                probs, (_, top, total) = softmax.probabilities((None, *state), logits, c, seen)
                (acc,) = buffers.add_weighted((nothing, probs.astype(dtype), (value_s, 0)))
                acc *= across(1 / total, acc.shape)
                norm = top + jnp.log2(total)
                at, of_tile = lax.rem(mine, jnp.int32(spec.n)), jnp.int32(tile.tokens)
                token = token - first_token
                at = (at * spec.tiles + lax.div(token, of_tile)) * ROWS
                at += lax.rem(token, of_tile) * group + by_row.head()
                by_row.put(norms, norm, b, g, at, by_row.of_step(place, end))
            buffers.write_rows(out_s, 0, acc)
            plgpu.commit_smem()
            store(i)
            return following

        @pl.when(steps > 0)
        def _():
            keys = pl.ds(first_key, ROWS)
            buffers.load_keys(lambda columns: key.at[b, keys, g, columns], key_s, 0, keys_in)
            buffers.load_keys(
                lambda columns: value.at[b, keys, g, columns], value_s, 0, keys_in
            )
            load(jnp.int32(0))
            plgpu.barrier_wait(keys_in)
            mine = lax.fori_loop(0, left, functools.partial(step, True), entries_of(0))
            lax.fori_loop(left, steps, functools.partial(step, False), mine)
            plgpu.wait_smem_to_gmem(0)

    slabs, value_slabs = spec.D // unit.slab, spec.Dv // unit.slab
    shape = jax.ShapeDtypeStruct
    inputs = [
        shape((spec.B, spec.T, spec.H, spec.D), dtype),
        shape((spec.B, spec.S, spec.Hkv, spec.D), dtype),
        shape((spec.B, spec.S, spec.Hkv, spec.Dv), dtype),
        shape((spec.parts, spec.items, ITEM), jnp.int32),
        shape((spec.B * spec.Hkv * spec.T * spec.n,), jnp.int32),
        shape((spec.B, spec.T), jnp.int32),
        shape((PLACE,), jnp.int32),
    ]
    if spec.gradient:
        inputs += [shape((spec.B, spec.T, spec.H, spec.Dv), dtype)]
        inputs += [bwd_preprocess.array(spec, *spec.numbers_unit)]
    outputs = (spec.partial,) if spec.gradient else (spec.partial, spec.norms)
    gradients = [buffers.rows(1, spec.Dv, per_step)] * spec.gradient
    arrivals = per_step * (slabs + value_slabs * spec.gradient)
    call = plgpu.kernel(
        body,
        out_type=outputs,
        grid=(spec.items,),
        grid_names=("item",),
        scratch_types=[
            buffers.ring(1, ROWS, spec.D),
            buffers.ring(1, ROWS, spec.Dv),
            buffers.rows(1, spec.D, per_step),
            *gradients,
            buffers.rows(1, spec.width, per_step),
            plgpu.Barrier(num_arrivals=slabs + value_slabs),
            plgpu.Barrier(num_arrivals=arrivals),
        ],
        compiler_params=operands.PARAMS,
        interpret=spec.interpret,
    )
    name = "gathered_query_gradient" if spec.gradient else "gathered_attention"
    return Kernel(name, spec, call, tuple(inputs), outputs)


def _heads(array, b, index, head, group, columns):
    return array.at[b, pl.ds(index, 1), pl.ds(head, group), columns]


@functools.cache
def merged(spec: GatheredAttention) -> Kernel:
    """Inputs: the outputs of `partial_outputs`; int32 `counts` of `selected_attention.attention`, the
    selection `[B, T, Hkv, n]`, `position` `[B, T]`; of attention `lse` float32 `[B, T, H]`, the
    natural log-sum-exp of tiles that stay, and with `gated` the gate, alike; `place`; `added`
    `[B, tokens, H, .]`. Outputs: the sum of what is added and the gated output, or the
    gradient; of attention the log-sum-exp `[B, tokens, H]`.
    """
    tile, dtype = spec.tile, jnp.dtype(spec.dtype)
    buffers = operands.Buffers(dtype, tile, bool(spec.interpret))
    group, slabs = spec.group, spec.width // tile.slab
    stages, by_row = min(STAGES, spec.n), GatheredRows(group, bool(spec.interpret))
    of_tile = TileRows(tile.tokens, group, group, bool(spec.interpret))
    weighted = not spec.gradient

    def body(*refs):
        partial, *refs = refs
        norms: Any = refs.pop(0) if weighted else None
        counts, indices, position, *refs = refs
        lse: Any = refs.pop(0) if weighted else None
        gates: Any = refs.pop(0) if weighted and spec.gated else None
        place, added, out, *refs = refs
        lse_out: Any = refs.pop(0) if weighted else None
        norms_s: Any = refs.pop(0) if weighted else None
        rows_s, added_s, rows_in, added_in = refs
        b = lax.div(lax.axis_index("bg"), jnp.int32(spec.Hkv))
        g = lax.rem(lax.axis_index("bg"), jnp.int32(spec.Hkv))
        mine = lax.axis_index("tile")
        tokens = pl.ds(mine * tile.tokens, tile.tokens)

        all_mine = place[2] + mine

        def by_tile(array):
            return of_tile.values(array, b, all_mine * tile.tokens, g * group)

        def put(norm):
            of_tile.put(lse_out, norm, b, mine * tile.tokens, g * group)

        def heads(array):
            return lambda columns: array.at[b, tokens, pl.ds(g * group, group), columns]

        def load(j):
            slot, column = lax.rem(j, jnp.int32(stages)), g * spec.n + j
            here = rows_in.at[slot]
            buffers.load_rows(
                lambda columns: partial.at[b, tokens, column, pl.ds(0, group), columns],
                rows_s,
                slot,
                spec.width,
                here,
            )
            if weighted:
                rows = pl.ds((j * spec.tiles + mine) * ROWS, ROWS)
                plgpu.copy_gmem_to_smem(norms.at[b, g, rows], norms_s.at[slot], here)

        def add(bits, j, state):
            slot = lax.rem(j, jnp.int32(stages))
            acc, top, total = state
            there = lax.shift_right_logical(bits, j) & 1 == 1
            plgpu.barrier_wait(rows_in.at[slot])
            parts = [x.astype(jnp.float32) for x in buffers.read_rows(rows_s, slot, spec.width)]
            if weighted:
                norm = plgpu.load(norms_s.at[slot], layout=PER_ROW, optimized=False)
                norm = jnp.where(there, norm, softmax.MASKED)
                new = jnp.maximum(top, norm)
                decay, weight = jnp.exp2(top - new), jnp.exp2(norm - new)
                top, total = new, total * decay + jnp.where(there, weight, 0.0)
                acc = [x * across(decay, x.shape) for x in acc]
                parts = [x * across(weight, x.shape) for x in parts]
            # What no entry wrote may be anything.
            parts = [jnp.where(across(there, x.shape), x, 0.0) for x in parts]
            plgpu.commit_smem()  # all four warps are done with this slot
            pl.when(j + stages < spec.n)(functools.partial(load, j + stages))
            return [x + y for x, y in zip(acc, parts, strict=True)], top, total

        def merge():
            for j in range(stages):
                load(jnp.int32(j))
            _, top, total = softmax.nothing(tile.slab)
            acc = [operands.full((ROWS, tile.slab), 0.0, MATRIX) for _ in range(slabs)]
            first = all_mine * tile.tokens
            step = functools.partial(add, by_row.chosen(indices, position, b, g, first))
            state = lax.fori_loop(0, spec.n, step, (acc, top, total))
            acc = state[0]
            if weighted:
                weight, norm = softmax.result(state)
                put(norm)
                if gates is not None:
                    weight *= by_tile(gates)
                acc = [x * across(weight, x.shape) for x in acc]
            added = buffers.read_rows(added_s, 0, spec.width)
            for i, (x, y) in enumerate(zip(acc, added, strict=True)):
                buffers.write_slab(added_s, 0, i, x + y.astype(jnp.float32))

        merges = tile_leaves(counts, b, g, all_mine, spec.limit)
        buffers.load_rows(heads(added), added_s, 0, spec.width, added_in)
        plgpu.barrier_wait(added_in)
        pl.when(merges)(merge)
        if weighted:
            pl.when(~merges)(lambda: put(by_tile(lse)))

        plgpu.commit_smem()
        buffers.store_rows(added_s, 0, spec.width, heads(out))
        plgpu.wait_smem_to_gmem(0)

    shape = jax.ShapeDtypeStruct
    tiles = spec.B, spec.Hkv, spec.all_tiles
    by_head, mine = (shape((spec.B, x, spec.H), jnp.float32) for x in (spec.T, spec.tokens))
    by_token = (spec.B, spec.T, spec.Hkv, spec.n), (spec.B, spec.T)
    selection = [shape(x, jnp.int32) for x in ((*tiles, 2), *by_token)]
    output = shape((spec.B, spec.tokens, spec.H, spec.width), dtype)
    slots = spec.B, spec.tokens, spec.Hkv * spec.n, group, spec.width
    inputs = [shape(slots, dtype), *[spec.norms] * weighted, *selection]
    inputs += [by_head] * (weighted + (weighted and spec.gated))
    inputs += [shape((PLACE,), jnp.int32), output]
    outputs = (output, *[mine] * weighted)
    call = plgpu.kernel(
        body,
        out_type=outputs,
        grid=(spec.B * spec.Hkv, spec.tiles),
        grid_names=("bg", "tile"),
        scratch_types=[
            *[plgpu.SMEM((stages, ROWS), jnp.float32)] * weighted,
            buffers.rows(stages, spec.width),
            buffers.rows(1, spec.width),
            plgpu.Barrier(num_arrivals=slabs + weighted, num_barriers=stages),
            plgpu.Barrier(num_arrivals=slabs),
        ],
        compiler_params=operands.PARAMS,
        interpret=spec.interpret,
    )
    return Kernel("merged_gathered", spec, call, tuple(inputs), outputs, in_place=True)
