"""dq of selected attention from the dS that `dkv` wrote: the sum of dS K over a token's blocks.

Query-stationary: a CTA is one warpgroup with one tile of 64 query rows, and takes the blocks of
the tile's list, `[64 keys, D]` each, through a ring buffer. A warp holds dS of its 16 rows, which
are one token's: it reads them from global memory a block ahead, or takes zeros where its token
did not select the block. Nothing is masked and no exponential is made.

    K of block i    TMA, a ring in shared memory ─┐
                                                  ├─► dQ += dS K
    dS of block i   global memory ─► registers ───┘

Bound: L2 to shared memory, as the walk of `selected_dq`, but half of its bytes, and dS from HBM
once. At B=1 H=64 Hkv=4 D=128 T=65536 n=16: 54 GB of K on random selections, and 8.6 GB of dS.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import operands
from kernels_pallas.mosaic.operands import MATRIX, div, div_rem, rem
from kernels_pallas.mosaic.refs import build_kernel
from kernels_pallas.mosaic.selected import list_counts
from kernels_pallas.mosaic.stored_ds import NO_ENTRY, StoredDs
from kernels_pallas.specs.selected import LIST_CHUNK
from kernels_pallas.specs.stored_ds import FIRST_ROW, KEYS, StoredDsQuery
from kernels_pallas.specs.tile import ROWS

STAGES = 2  # blocks of keys in flight
AHEAD = 2  # blocks between the load of dS and its product


def build(kernel: Kernel):
    """The body of `specs.stored_ds.dq`."""
    spec: StoredDsQuery = kernel.spec
    tile, tokens = spec.query_tile, spec.tile.tokens
    interpret = bool(spec.interpret)
    buffers = operands.Buffers(jnp.dtype(spec.dtype), tile, interpret)
    stored = StoredDs(tile.rows, spec.n, interpret)

    def body(refs):
        row = refs.ds_chunk[FIRST_ROW] + refs.cta.row
        b, kv_head = div_rem(row, spec.Hkv)
        index = refs.cta.tile
        first, length = index * tokens, refs.sizes.T
        for i in range(0, spec.entries, LIST_CHUNK):
            chunk = pl.ds(i, LIST_CHUNK)
            source = refs.block_starts.at[b, kv_head, index, chunk]
            plgpu.copy_gmem_to_smem(source, refs.starts.at[chunk], refs.list_ready)

        def heads_of(array, t):
            """Token `t` of the tile, by columns."""
            heads = pl.ds(kv_head * tile.group, tile.group)
            return lambda columns: array.at[b, pl.ds(first + t, 1), heads, columns]

        if spec.added:
            for t in range(tokens):
                rows = heads_of(refs.added, t)
                buffers.load_rows(rows, refs.out_tile, 0, spec.D, refs.added_ready, t)
        count = list_counts(refs.block_counts, row * refs.sizes.tiles + index).blocks
        place = b, kv_head, first, length
        key_start = [refs.key_start] if spec.packed else []
        blocks = stored.blocks_of_tile(refs.indices, [refs.position, *key_start], *place)
        plgpu.barrier_wait(refs.list_ready)

        def load_key(i):
            """Starts the copy of block `i`, if there is one."""

            @pl.when(i < count)
            def _():
                stage, keys = rem(i, STAGES), pl.ds(refs.starts[i], KEYS)
                buffers.load_keys(
                    lambda columns: refs.key.at[b, keys, kv_head, columns],
                    refs.key_ring,
                    stage,
                    refs.key_ready.at[stage],
                )

        def ds_of(i):
            """dS of block `i`, zeros past the last one: `[64, 64]`."""
            start = refs.starts[jnp.minimum(i, spec.entries - 1)]
            if not spec.packed:
                start = div(start, KEYS)
            block = jnp.where(i < count, start, NO_ENTRY - 1)
            token = refs.cta.row * length + first
            return stored.read(refs.ds, blocks, block, token)

        for i in range(STAGES):
            load_key(jnp.int32(i))

        def step(i, state):
            acc, ds, *following = state
            following.append(ds_of(i + AHEAD))
            stage = rem(i, STAGES)
            plgpu.barrier_wait(refs.key_ready.at[stage])
            acc = buffers.start_sum(acc, ds, (refs.key_ring, stage))
            (acc,) = buffers.finish(acc)
            plgpu.commit_smem()  # all four warps are done with this stage
            load_key(i + STAGES)
            return acc, *following

        first_ds = [ds_of(jnp.int32(i)) for i in range(AHEAD)]
        state = operands.full((ROWS, spec.D), 0.0, MATRIX), *first_ds
        acc, *_ = lax.fori_loop(0, count, step, state)
        added = None
        if spec.added:
            plgpu.barrier_wait(refs.added_ready)
            added = buffers.read_rows(refs.out_tile, 0, spec.D)
        buffers.write_rows(refs.out_tile, 0, acc * spec.scale, added)
        plgpu.commit_smem()
        for t in range(tokens):
            buffers.store_rows(refs.out_tile, 0, spec.D, heads_of(refs.dq, t), t)
        plgpu.wait_smem_to_gmem(0)

    slabs = spec.D // tile.slab
    return build_kernel(
        kernel,
        body,
        scratch={
            "key_ring": buffers.ring(STAGES, KEYS, spec.D),
            "out_tile": buffers.rows(1, spec.D, tokens),
            "starts": plgpu.SMEM((spec.entries,), jnp.int32),
            "list_ready": plgpu.Barrier(num_arrivals=spec.entries // LIST_CHUNK),
            "key_ready": plgpu.Barrier(num_arrivals=slabs, num_barriers=STAGES),
            "added_ready": plgpu.Barrier(num_arrivals=slabs * tokens),
        },
        grid_names=("row", "tile"),
        interpret=spec.interpret,
    )
