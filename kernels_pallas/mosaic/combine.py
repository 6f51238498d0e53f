"""O = sum_c g_c O_c over the branches c, and delta_c = rowsum(dO * O_c) = dg_c.

Loop order: a CTA of one warpgroup takes one tile of 64 rows, a row a token's query head. It
starts the TMA copies of that tile of every array, then adds slab by slab (64 columns).
Tile: `[64, width]` of each array in shared memory.
Bandwidth bound: each array moves once. At B=1 T=65536 H=64 Dv=128 and three branches the gated
sum moves 4.3 GB, 1.3 ms.
"""

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import operands
from kernels_pallas.mosaic.operands import PER_ROW, ROWS
from kernels_pallas.mosaic.refs import build_kernel
from kernels_pallas.mosaic.row_io import TileRows
from kernels_pallas.specs.combine import Combine


def gated_sum(kernel: Kernel):
    """The body of `specs.combine.gated_sum`."""
    spec: Combine = kernel.spec
    buffers, slabs = _buffers(spec)
    rows_of = TileRows(ROWS, 1, 1, bool(spec.interpret))

    def body(refs):
        gates, outs = _each(refs, "gate", spec.branches), _each(refs, "out", spec.branches)
        rows_s, rows_full = refs.rows_s, refs.rows_full
        tile = refs.cta.tile
        for c, out in enumerate(outs):
            _load(buffers, out, tile, rows_s, c, rows_full)
        places = 0, tile * ROWS, 0, refs.sizes.rows
        g = [rows_of.values(gate, *places) for gate in gates]  # [64] each
        for c in range(spec.branches):
            plgpu.barrier_wait(rows_full.at[c])
        for slab in range(slabs):
            total = operands.full((ROWS, buffers.slab), 0.0, operands.MATRIX)  # [64, slab]
            for c, gate in enumerate(g):
                o = buffers.read_keys(rows_s, c, slab)
                total += o * operands.across(gate, o.shape)
            # The sum takes the place of the first branch's slab, which has been read.
            staged = rows_s.at[0, slab] if spec.interpret else rows_s[0].at[0, slab]
            staged[...] = total.astype(buffers.dtype)
        plgpu.commit_smem()
        rows = pl.ds(tile * ROWS, ROWS)
        buffers.store_keys(rows_s, 0, lambda columns: refs.total.at[rows, columns])
        plgpu.wait_smem_to_gmem(0)

    return _launch(kernel, body, spec.branches)


def deltas(kernel: Kernel):
    """The body of `specs.combine.deltas`."""
    spec: Combine = kernel.spec
    buffers, slabs = _buffers(spec)
    rows_of = TileRows(ROWS, 1, 1, bool(spec.interpret))

    def body(refs):
        rows_s, rows_full = refs.rows_s, refs.rows_full
        tile = refs.cta.tile
        # Slot 0 has dO, slot 1 + c has O_c.
        for slot, array in enumerate([refs.do, *_each(refs, "out", spec.branches)]):
            _load(buffers, array, tile, rows_s, slot, rows_full)
        plgpu.barrier_wait(rows_full.at[0])
        for c, delta_out in enumerate(_each(refs, "delta", spec.branches)):
            plgpu.barrier_wait(rows_full.at[1 + c])
            delta = operands.full((ROWS,), 0.0, PER_ROW)  # [64]
            for slab in range(slabs):
                do, o = (buffers.read_keys(rows_s, slot, slab) for slot in (0, 1 + c))
                delta += (do * o).sum(axis=1)
            rows_of.put(delta_out, delta, 0, tile * ROWS, 0, refs.sizes.rows)

    return _launch(kernel, body, 1 + spec.branches)


def _each(refs, name: str, branches: int):
    """The refs of an array that each branch has."""
    return [getattr(refs, f"{name}_{c}") for c in range(branches)]


def _buffers(spec: Combine):
    tile = operands.Tile(1, operands.slab_width(spec.width))
    buffers = operands.Buffers.of(spec, tile)
    return buffers, spec.width // tile.slab


def _load(buffers, array, tile, ring, slot, full):
    """Starts the copies of tile `tile` of `array` `[rows, width]` to `slot`."""
    rows = pl.ds(tile * ROWS, ROWS)
    buffers.load_keys(lambda columns: array.at[rows, columns], ring, slot, full.at[slot])


def _launch(kernel: Kernel, body, slots: int):
    """`slots` arrays of `[64, width]` in shared memory, a barrier each."""
    spec: Combine = kernel.spec
    buffers, slabs = _buffers(spec)
    return build_kernel(
        kernel,
        body,
        scratch={
            "rows_s": buffers.ring(slots, ROWS, spec.width),
            "rows_full": plgpu.Barrier(num_arrivals=slabs, num_barriers=slots),
        },
        grid_names=("tile",),
        interpret=spec.interpret,
    )
