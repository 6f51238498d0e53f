"""Computes O = sum_c g_c O_c over the branches c, and delta_c = rowsum(dO * O_c) = dg_c.

Loop order: a CTA of one warpgroup has one tile of 64 rows, a row per token and query head. The CTA
first starts the TMA copies of the tile's rows in all arrays. After the copies have started, the CTA
adds the arrays in slabs of 64 columns.
Tile: `[64, width]` of each array in shared memory. Bound: memory bandwidth. Each array is read or
written once. At B=1 T=65536 H=64 Dv=128 and three branches, the gated sum moves 4.3 GB, which takes
1.3 ms.
"""

from collections.abc import Callable

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import operands
from kernels_pallas.mosaic.operands import PER_ROW, ROWS
from kernels_pallas.mosaic.refs import build_kernel
from kernels_pallas.mosaic.row_io import TileRows
from kernels_pallas.specs.combine import Combine


def gated_sum(kernel: Kernel) -> Callable:
    """The body of the kernel `specs.combine.gated_sum`."""
    spec: Combine = kernel.spec
    rows_of = TileRows(ROWS, 1, 1, spec.interpret)
    branches = range(spec.branches)

    def body(refs, buffers, load):
        rows_s, rows_full, tile = refs.rows_s, refs.rows_full, refs.cta.tile
        for c in branches:
            load(getattr(refs, f"out_{c}"), c)
        places = 0, tile * ROWS, 0, refs.sizes.rows
        g = [rows_of.values(getattr(refs, f"gate_{c}"), *places) for c in branches]  # [64] each
        for c in branches:
            plgpu.barrier_wait(rows_full.at[c])
        for i in range(spec.width // buffers.slab):
            total = operands.zeros(buffers.slab)  # [64, slab]
            for c, gate in enumerate(g):
                o = buffers.read_keys(rows_s, c, i)
                total += o * operands.across(gate, o.shape)
            # The sum overwrites the first branch's slab, which has been read.
            staged = rows_s.at[0, i] if spec.interpret else rows_s[0].at[0, i]
            staged[...] = total.astype(buffers.dtype)
        plgpu.commit_smem()
        rows = pl.ds(tile * ROWS, ROWS)
        buffers.store_keys(rows_s, 0, lambda columns: refs.total.at[rows, columns])
        plgpu.wait_smem_to_gmem(0)

    return _build(kernel, body, spec.branches)


def deltas(kernel: Kernel) -> Callable:
    """The body of the kernel `specs.combine.deltas`."""
    spec: Combine = kernel.spec
    rows_of = TileRows(ROWS, 1, 1, spec.interpret)

    def body(refs, buffers, load):
        # Slot 0 has dO, slot 1 + c has O_c.
        load(refs.do, 0)
        for c in range(spec.branches):
            load(getattr(refs, f"out_{c}"), 1 + c)
        plgpu.barrier_wait(refs.rows_full.at[0])
        for c in range(spec.branches):
            plgpu.barrier_wait(refs.rows_full.at[1 + c])
            delta = operands.full((ROWS,), 0.0, PER_ROW)  # [64]
            for i in range(spec.width // buffers.slab):
                do, o = (buffers.read_keys(refs.rows_s, slot, i) for slot in (0, 1 + c))
                delta += (do * o).sum(axis=1)
            places = 0, refs.cta.tile * ROWS, 0, refs.sizes.rows
            rows_of.put(getattr(refs, f"delta_{c}"), delta, *places)

    return _build(kernel, body, 1 + spec.branches)


def _build(kernel: Kernel, body: Callable, slots: int) -> Callable:
    """Build a kernel with `slots` arrays of `[64, width]` in shared memory. Each array has a
    barrier. `load(array, slot)` starts the copies of the CTA's rows of an array `[rows,
    width]`.
    """
    spec: Combine = kernel.spec
    buffers = operands.Buffers.of(spec, operands.Tile(1, operands.slab_width(spec.width)))

    def run(refs):
        def load(array, slot):
            rows, ready = pl.ds(refs.cta.tile * ROWS, ROWS), refs.rows_full.at[slot]
            buffers.load_keys(lambda columns: array.at[rows, columns], refs.rows_s, slot, ready)

        body(refs, buffers, load)

    return build_kernel(
        kernel,
        run,
        scratch={
            "rows_s": buffers.ring(slots, ROWS, spec.width),
            "rows_full": operands.barriers(spec.width // buffers.slab, slots),
        },
        grid_names=("tile",),
    )
