"""The merge of dk and dv: the sums of the partials of each tile of keys (`dkv_step.py`)."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import operands
from kernels_pallas.mosaic.operands import MATRIX, ROWS
from kernels_pallas.mosaic.refs import build_kernel
from kernels_pallas.specs.dkv import Dkv


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
