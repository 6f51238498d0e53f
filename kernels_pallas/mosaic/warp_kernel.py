"""Kernels whose warps each run a program, on a grid of rows and CTAs of a row.

    program(instructions, *inputs, *outputs, *shared, row, group)
    program(instructions, *inputs, *outputs, *shared, b, g, group)      rows [B, kv_heads]

`instructions` is the module `warp`, which emits PTX, or in interpret mode an object with the
same functions on NumPy (`warp_emulation.Warps`): one text of a program, two machines.
Warp `w` of CTA `group` is the `WARPS * group + w`-th of its row.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import operands, warp, warp_emulation

WARPS = 4  # of a CTA: a warpgroup, which is what Mosaic launches at least


def warp_kernel(
    kernel: Kernel,
    program: Callable[..., None],
    rows: int,
    warps: int,
    *,
    shared: Sequence[tuple[int, ...]] = (),
    kv_heads: int | None = None,
    interpret: object = False,
) -> Callable:
    """`program` in `warps` warps of each of `rows` rows; the last CTA of a row may have more.

    Args:
      kernel: states inputs and outputs.
      program: as above; lanes that have nothing to do must not write.
      rows: the slower axis of the grid.
      warps: of a row.
      shared: shapes of the int32 arrays in shared memory, for the whole CTA.
      kv_heads: what divides a row's index into the `b` and `g` of the program, if given.
      interpret: whether to emulate the warps on the host, from NumPy or JAX arrays, in `jit`
        too; any value that is true.
    """
    grid = rows, -(-warps // WARPS)
    outputs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kernel.outputs)
    if interpret:
        emulated = functools.partial(
            warp_emulation.run,
            program,
            outputs=kernel.outputs,
            grid=grid,
            warps=WARPS,
            shared=shared,
            kv_heads=kv_heads,
        )

        def call(*arrays):
            if all(isinstance(x, np.ndarray) for x in arrays):
                return emulated(arrays)
            return jax.pure_callback(lambda *x: emulated(x), outputs, *arrays)

        return call

    def body(*refs):
        places = [lax.axis_index("row")]
        if kv_heads is not None:
            places = [f(places[0], jnp.int32(kv_heads)) for f in (lax.div, lax.rem)]
        places += [lax.axis_index("group")]
        warp.each(functools.partial(program, warp), refs, places)

    return plgpu.kernel(
        body,
        out_type=outputs,
        grid=grid,
        grid_names=("row", "group"),
        scratch_types=[plgpu.SMEM(shape, jnp.int32) for shape in shared],
        compiler_params=operands.PARAMS,
    )
