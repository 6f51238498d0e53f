"""The merge of dk and dv: the sums of the partials of each tile of keys (`dkv_step.py`)."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import operands
from kernels_pallas.mosaic.operands import MATRIX, ROWS, div, div_rem, rem
from kernels_pallas.mosaic.refs import build_kernel
from kernels_pallas.specs.dkv import Dkv
from kernels_pallas.specs.stored_ds import FIRST_PARTIAL, FIRST_ROW

AT_ONCE = 2, 1  # partials that are on their way together


def merge(kernel: Kernel):
    """The body of `specs.dkv.merge`: a CTA of one warpgroup adds the partials of 64 keys and a slab
    of columns, in their order. Bandwidth bound, but where a tile has hundreds of partials.
    """
    spec: Dkv = kernel.spec
    buffers = operands.Buffers(jnp.dtype(spec.dtype), spec.query_tile, bool(spec.interpret))
    slab, slabs = buffers.slab, spec.merged_slabs

    def body(refs):
        row, tile = refs.cta.bg, div(refs.cta.tile, slabs)
        column = rem(refs.cta.tile, slabs)
        if spec.stored_rows:
            row += refs.ds_chunk[FIRST_ROW]
        b, g = div_rem(row, spec.Hkv)
        # Which work items' tile these 64 keys belong to, and which half of it they are.
        key_tile = div(tile, spec.consumers)
        keys = pl.ds((tile - key_tile * spec.consumers) * ROWS, ROWS)
        mine = row * refs.sizes.key_tiles + key_tile
        first, count = refs.first[mine] + 0, refs.count[mine] + 0
        if spec.stored_rows:
            first -= refs.ds_chunk[FIRST_PARTIAL]

        def add_up(partial, out, columns):
            def read(i):
                part = partial.at[first + i, keys, columns]
                return plgpu.load(part, layout=MATRIX, optimized=False)

            total = operands.full((ROWS, slab), 0.0, MATRIX)
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
        interpret=spec.interpret,
    )
