"""Kernels whose warps each run a program, on a grid of rows and CTAs of a row.

    program(instructions, sizes, *inputs, *outputs, *shared, row, group)
    program(instructions, sizes, *inputs, *outputs, *shared, b, g, group)   rows [B, kv_heads]

`instructions` is the module `warp`, which emits PTX, or in interpret mode an object with the
same functions (`interpreter.py`): one text of a program, two machines. `sizes` has the numbers
of `Kernel.sizes`: integers, or words that the kernel learns at its launch.
Warp `w` of CTA `group` is the `WARPS * group + w`-th of its row.
"""

import functools
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import interpreter, operands, refs, warp
from kernels_pallas.specs.tile import WARPS


def warp_kernel(
    kernel: Kernel,
    program: Callable[..., None],
    *,
    shared: Sequence[tuple[int, ...]] = (),
    kv_heads: int | None = None,
    interpret: object = False,
    warps: int = WARPS,
    instructions: ModuleType = warp,
) -> Callable:
    """`program` in every warp of the kernel's grid, rows and CTAs of a row.

    Args:
      kernel: states inputs, outputs, sizes and the grid (`specs.tile.warp_grid`; of a kernel
        in clusters rows times cluster).
      program: as above; lanes that have nothing to do must not write.
      shared: shapes of the int32 arrays in shared memory, for the whole CTA.
      kv_heads: what divides a row's index into the `b` and `g` of the program, if given.
      interpret: whether `interpreter.machine` runs the warps on the host, from NumPy or JAX
        arrays, in `jit` too; any value that is true.
      warps: of a CTA, a multiple of 4.
      instructions: `warp`, or `warp_cluster`, whose `group` is the number in the cluster.
    """
    cluster = kernel.cluster
    in_clusters = cluster > 1
    grid = (kernel.grid[0] // cluster, cluster) if in_clusters else kernel.grid
    outputs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kernel.outputs)
    if interpret:
        emulated = functools.partial(
            interpreter.machine().run,
            program,
            SimpleNamespace(**kernel.sizes),
            outputs=kernel.outputs,
            grid=grid,
            warps=warps,
            shared=shared,
            kv_heads=kv_heads,
            cluster=None if instructions is warp else cluster,
        )

        def call(*arrays):
            if all(isinstance(x, np.ndarray) for x in arrays):
                return emulated(arrays)
            return jax.pure_callback(lambda *x: emulated(x), outputs, *arrays)

        return call

    def body(*arrays):
        scalars, arrays = arrays[: len(kernel.scalars)], arrays[len(kernel.scalars) :]
        sizes = vars(refs.sizes_of(kernel, scalars))
        places = [refs.cta_index(kernel, "row")]
        if kv_heads is not None:
            places = [f(places[0], jnp.int32(kv_heads)) for f in (lax.div, lax.rem)]
        # A cluster has as many CTAs at any length.
        places += [lax.axis_index("rank") if in_clusters else refs.cta_index(kernel, "group")]
        traced = kernel.any_length  # else integers of the program's text

        def run(*arguments):
            words = arguments[len(arrays) + len(places) :] if traced else sizes.values()
            named = SimpleNamespace(**dict(zip(sizes, words, strict=True)))
            program(instructions, named, *arguments[: len(arrays) + len(places)])

        warp.each(run, arrays, [*places, *(sizes.values() if traced else ())])

    body.__name__ = kernel.name  # in profiles
    warpgroups = warps // WARPS
    return plgpu.kernel(
        body,
        out_type=outputs,
        grid=grid[:1] if in_clusters else grid,
        grid_names=("row",) if in_clusters else ("row", "group"),
        cluster=(cluster,) if in_clusters else (),
        cluster_names=("rank",) if in_clusters else (),
        num_threads=warpgroups if warpgroups > 1 else None,
        thread_name="warpgroup" if warpgroups > 1 else None,
        scratch_types=[plgpu.SMEM(shape, jnp.int32) for shape in shared],
        compiler_params=operands.PARAMS,
    )
