"""Attention of every query to its selected blocks, query tiles over the union of their blocks.

The gradient of the query is the same walk over the same lists (`gradient`).

One warpgroup and one list a block of threads: the tokens of a tile of 64 rows share every block
that one of them selected, and rows of tokens without it are masked. Small independent blocks of
threads, three on a multiprocessor, hide each other's latency; the key/value head is the slowest
grid axis, so that the keys of one head stay in L2. A tile after one whose union is long may
leave its tokens to `gathered.py`.

Floors at B=1 H=64 Hkv=4 D=Dv=128 T=65536 n=16 on an H100: 2.2 TFLOP = 2.2 ms; query and output
once 0.64 ms; what bounds it is L2 to shared memory, the union of the tile's tokens once:
108 GB on random selections, 14 ms at the 7.7 TB/s that copies alone reach.
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
from kernels_pallas.mosaic.operands import LOG2E, MATRIX, PER_ROW, ROWS, across
from kernels_pallas.mosaic.row_io import GatheredRows, TileRows
from kernels_pallas.specs.tile import SMEM_BUDGET, SMEM_HALF

CHUNK = 64  # list entries a copy
MOST_LISTS = 48 * 1024


@dataclasses.dataclass(frozen=True)
class SelectedAttention:
    """The static part of a problem; shapes as in `attention`."""

    B: int
    T: int
    S: int
    H: int
    Hkv: int
    D: int
    Dv: int
    n: int
    block: int
    dtype: str
    scale: float
    gated: bool = False
    added: bool = False
    gradient: bool = False  # of the query
    numbers_unit: tuple[int, int] = (0, 0)  # tokens and rows, of the numbers of the gradient
    limit: int = 0  # blocks of a list beyond which the next tile leaves; 0: none does
    key_stages: int = 2
    value_stages: int = 1
    interpret: bool | object = False

    @property
    def tile(self) -> operands.Tile:
        return operands.Tile(
            self.H // self.Hkv, operands.slab_width(self.D, self.Dv, self.block)
        )

    @property
    def width(self) -> int:
        """Columns of the output."""
        return self.D if self.gradient else self.Dv

    @property
    def tiles(self) -> int:
        return -(-self.T // self.tile.tokens)

    @property
    def entries(self) -> int:
        """Places in a tile's list, a multiple of `CHUNK`."""
        return -(-self.tile.tokens * self.n // CHUNK) * CHUNK

    @property
    def words(self) -> int:
        """int32 words of one bit a token."""
        return -(-self.tile.tokens // 32)


def gradient_stages(key_width: int, value_width: int, block: int) -> dict[str, int]:
    """Blocks in flight for the gradient of the query: as many as two blocks of threads a
    multiprocessor can have, else what one can have.
    """
    rows, block = ((key_width + value_width) * 2 * n for n in (ROWS, block))
    if rows + 2 * block <= SMEM_HALF:
        return {"key_stages": 2, "value_stages": 2}
    stages = 2 if rows + 2 * block <= SMEM_BUDGET - MOST_LISTS else 1
    return {"key_stages": stages, "value_stages": 1}


def tile_leaves(counts, b, g, tile, limit: int):
    """Whether the tokens of a tile leave its union, to `gathered`: where the union before is
    longer than `limit`, since no output may depend on tokens after its own.
    """
    before = counts[b, g, jnp.maximum(tile - 1, 0), 1]
    return (tile > 0) & (before > limit)


@functools.cache
def attention(spec: SelectedAttention) -> Kernel:
    """Inputs: query `[B, T, H, D]`, key `[B, S, Hkv, D]`, value `[B, S, Hkv, Dv]`; int32 lists
    of each tile: `starts` `[B, Hkv, tiles, entries]`, first keys of blocks; `members` `[B, Hkv,
    tiles, words, entries]`, bit `token % 32` of word `token // 32`; `counts` `[B, Hkv, tiles,
    2]`, blocks in front that every member sees to their end, all blocks (`tile_leaves` says
    where a list counts as empty); `last` `[B, tiles, 64]`, by row the end of the keys that it
    may see. Then `gate`, `added` and outputs as in `kernels_pallas.mosaic.interval_attention.attention`; with
    `gradient`, what it takes and returns then, `numbers` in units of `numbers_unit`.
    """
    tile, dtype, size = spec.tile, jnp.dtype(spec.dtype), spec.block
    interpret = bool(spec.interpret)
    buffers = operands.Buffers(dtype, tile, interpret)
    group, words, entries = tile.group, spec.words, spec.entries
    of_tile = TileRows(tile.tokens, group, group, interpret)
    c = spec.scale * LOG2E

    def body(*refs):
        query, key, value, starts, members, counts, last, *refs = refs
        grad: Any = refs.pop(0) if spec.gradient else None
        rows: Any = refs.pop(0) if spec.gradient else None
        gates = refs.pop(0) if spec.gated and not spec.gradient else None
        addend = refs.pop(0) if spec.added else None
        out = refs.pop(0)
        lse: Any = None if spec.gradient else refs.pop(0)
        rows_s = refs.pop(0)
        grad_s = refs.pop(0) if spec.gradient else None
        key_s, value_s, starts_s, members_s, *refs = refs
        query_in, list_in, key_in, value_in, addend_in = refs
        b = lax.div(lax.axis_index("bg"), jnp.int32(spec.Hkv))
        g = lax.rem(lax.axis_index("bg"), jnp.int32(spec.Hkv))
        mine = lax.axis_index("tile")

        def at(array):
            tokens = pl.ds(mine * tile.tokens, tile.tokens)
            return lambda columns: array.at[b, tokens, pl.ds(g * group, group), columns]

        for i in range(0, entries, CHUNK):
            part = pl.ds(i, CHUNK)
            plgpu.copy_gmem_to_smem(starts.at[b, g, mine, part], starts_s.at[part], list_in)
            for w in range(words):
                plgpu.copy_gmem_to_smem(
                    members.at[b, g, mine, w, part], members_s.at[w, part], list_in
                )
        buffers.load_rows(at(query), rows_s, 0, spec.D, query_in)
        if grad is not None:
            buffers.load_rows(at(grad), grad_s, 0, spec.Dv, query_in)
        # Sums, not loads: under `shard_map` only they have the type of what varies.
        whole, blocks = counts[b, g, mine, 0] + 0, counts[b, g, mine, 1] + 0
        if spec.limit:
            leaves = tile_leaves(counts, b, g, mine, spec.limit)
            whole, blocks = (jnp.where(leaves, 0, x) for x in (whole, blocks))
        last_row = plgpu.load(last.at[b, mine], layout=PER_ROW, optimized=False)
        token = lax.div(operands.row_index(), jnp.int32(group))

        def load(source, ring, here, stages, i):
            @pl.when(i < blocks)
            def _():
                slot = lax.rem(i, jnp.int32(stages))
                keys = pl.ds(starts_s[i], size)
                buffers.load_keys(
                    lambda columns: source.at[b, keys, g, columns], ring, slot, here.at[slot]
                )

        load_key = functools.partial(load, key, key_s, key_in, spec.key_stages)
        load_value = functools.partial(load, value, value_s, value_in, spec.value_stages)

        plgpu.barrier_wait(list_in)
        for i in range(spec.key_stages):
            load_key(jnp.int32(i))
        for i in range(spec.value_stages):
            load_value(jnp.int32(i))
        plgpu.barrier_wait(query_in)

        def seen_by(i):
            """Rows that have a block; which of its keys each sees."""
            bits = lax.broadcast(members_s[0, i], (ROWS,))
            if words == 2:
                bits = jnp.where(token < 32, bits, lax.broadcast(members_s[1, i], (ROWS,)))
            member = (lax.shift_right_logical(bits, token & 31) & 1) == 1
            shape = (ROWS, size)
            index = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=MATRIX)
            return member, index < across(last_row - starts_s[i], shape)

        def attend(at_edge, i, state):
            key_slot = lax.rem(i, jnp.int32(spec.key_stages))
            value_slot = lax.rem(i, jnp.int32(spec.value_stages))
            member, seen = seen_by(i)
            plgpu.barrier_wait(key_in.at[key_slot])
            logits, _ = buffers.products(((rows_s, 0), (key_s, key_slot)))
            plgpu.commit_smem()  # all four warps are done with this slot
            load_key(i + spec.key_stages)
            seen = seen if at_edge else None
            probs, state = softmax.probabilities(state, logits, c, seen, member)
            plgpu.barrier_wait(value_in.at[value_slot])
            (acc,) = buffers.add_weighted(
                (state[0], probs.astype(dtype), (value_s, value_slot))
            )
            plgpu.commit_smem()
            load_value(i + spec.value_stages)
            return acc, *state[1:]

        def differentiate(at_edge, i, acc):
            key_slot = lax.rem(i, jnp.int32(spec.key_stages))
            value_slot = lax.rem(i, jnp.int32(spec.value_stages))
            member, seen = seen_by(i)
            plgpu.barrier_wait(key_in.at[key_slot])
            plgpu.barrier_wait(value_in.at[value_slot])
            logits, weights, _ = buffers.products(
                ((rows_s, 0), (key_s, key_slot)), ((grad_s, 0), (value_s, value_slot))
            )
            plgpu.commit_smem()
            load_value(i + spec.value_stages)
            base, seen = jnp.where(member, norm, jnp.inf), seen if at_edge else None
            found = softmax.softmax_backward(logits, weights, c, base, gate, offset, seen)
            (acc,) = buffers.add_weighted((acc, found.astype(dtype), (key_s, key_slot)))
            plgpu.commit_smem()
            load_key(i + spec.key_stages)
            return acc

        state, step = softmax.nothing(spec.width), attend
        if spec.gradient:
            state, step = state[0], differentiate
            tokens = of_tile.token(mine * tile.tokens, spec.T)
            norm, gate, offset = GatheredRows(group, interpret).numbers(
                rows, b, g, tokens, spec.numbers_unit[0], spec.gated
            )
        state = lax.fori_loop(0, whole, functools.partial(step, False), state)
        state = lax.fori_loop(whole, blocks, functools.partial(step, True), state)
        if spec.gradient:
            acc = state * spec.scale
        else:
            weight, norm = softmax.result(state)
            at_rows = b, mine * tile.tokens, g * group
            of_tile.put(lse, norm, *at_rows)
            if gates is not None:
                weight *= of_tile.values(gates, *at_rows)
            acc = state[0] * across(weight, state[0].shape)
        added = None
        if addend is not None:
            plgpu.commit_smem()  # all four warps are done with the query
            buffers.load_rows(at(addend), rows_s, 0, spec.width, addend_in)
            plgpu.barrier_wait(addend_in)
            added = buffers.read_rows(rows_s, 0, spec.width)
        buffers.write_rows(rows_s, 0, acc, added)
        plgpu.commit_smem()
        buffers.store_rows(rows_s, 0, spec.width, at(out))
        plgpu.wait_smem_to_gmem(0)

    slabs, value_slabs = spec.D // tile.slab, spec.Dv // tile.slab
    shape = jax.ShapeDtypeStruct
    lists = (spec.B, spec.Hkv, spec.tiles)
    output = shape((spec.B, spec.T, spec.H, spec.width), dtype)
    by_head = shape((spec.B, spec.T, spec.H), jnp.float32)
    inputs = [
        shape((spec.B, spec.T, spec.H, spec.D), dtype),
        shape((spec.B, spec.S, spec.Hkv, spec.D), dtype),
        shape((spec.B, spec.S, spec.Hkv, spec.Dv), dtype),
        shape((*lists, entries), jnp.int32),
        shape((*lists, words, entries), jnp.int32),
        shape((*lists, 2), jnp.int32),
        shape((spec.B, spec.tiles, ROWS), jnp.int32),
    ]
    if spec.gradient:
        inputs += [shape((spec.B, spec.T, spec.H, spec.Dv), dtype)]
        inputs += [bwd_preprocess.array(spec, *spec.numbers_unit)]
    elif spec.gated:
        inputs += [by_head]
    inputs += [output] * spec.added
    outputs = (output,) if spec.gradient else (output, by_head)
    scratch = [buffers.rows(1, max(spec.D, spec.width))]
    scratch += [buffers.rows(1, spec.Dv)] * spec.gradient
    scratch += [
        buffers.ring(spec.key_stages, size, spec.D),
        buffers.ring(spec.value_stages, size, spec.Dv),
        plgpu.SMEM((entries,), jnp.int32),
        plgpu.SMEM((words, entries), jnp.int32),
        plgpu.Barrier(num_arrivals=slabs + value_slabs * spec.gradient),
        plgpu.Barrier(num_arrivals=(1 + words) * entries // CHUNK),
        plgpu.Barrier(num_arrivals=slabs, num_barriers=spec.key_stages),
        plgpu.Barrier(num_arrivals=value_slabs, num_barriers=spec.value_stages),
        plgpu.Barrier(num_arrivals=spec.width // tile.slab),
    ]
    call = plgpu.kernel(
        body,
        out_type=outputs,
        grid=(spec.B * spec.Hkv, spec.tiles),
        grid_names=("bg", "tile"),
        scratch_types=scratch,
        compiler_params=operands.PARAMS,
        interpret=spec.interpret,
    )
    name = "selected_query_gradient" if spec.gradient else "selected_attention"
    return Kernel(name, spec, call, tuple(inputs), outputs, in_place=spec.added)
