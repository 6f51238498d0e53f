"""Builds kernels in which each warp runs a program.

The first axis of the grid counts rows, and the second axis counts the CTAs of a row.

    program(instructions, spec, sizes, refs)

`instructions` is the module `warp`, which emits PTX. In interpret mode, `instructions` is an object
with the same functions (`interpreter.py`), so one program serves kernels and the interpreter.
`sizes` has the numbers of `Kernel.sizes`, as integers or as words that the kernel reads at launch.
`refs` has the arrays of the kernel and the arrays in shared memory by name. `refs.row` is the index
of the CTA's row. If `by_head` is true, `refs` has the batch row `b` and the key/value head `g`
instead of `row`. `refs.group` is the index of the CTA among the CTAs of the row. Warp `w` of CTA
`group` has the index `WARPS * group + w` in the row.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import interpreter, operands, refs, warp
from kernels_pallas.specs.tile import WARPS


def warp_kernel(
    program: Callable[[Any, Any, Any, Any], None],
    shared: Callable[[Any], dict[str, tuple[int, ...]]] = lambda spec: {},
    *,
    by_head: bool = False,
    in_clusters: bool = False,
    warps: Callable[[Any], int] = lambda spec: WARPS,
) -> Callable[[Kernel], Callable]:
    """Return the body of a kernel that runs `program` in every warp of the kernel's grid.

    The kernel's description determines inputs, outputs, sizes and the grid. If `in_clusters` is
    false, the grid is the result of `specs.tile.warp_grid`. If `in_clusters` is true, the grid has
    one cluster per row. If `spec.interpret` is set, `interpreter.machine` runs the warps on the
    host, on NumPy or JAX arrays, also in `jit`.

    Args:
      program: The program, as the module's docstring describes. Lanes without work must not
        write.
      shared: Function of a spec that returns names and shapes of a CTA's int32 arrays in shared
        memory.
      by_head: Whether a row of the grid is a batch row and a key/value head, `[B, spec.Hkv]`.
      in_clusters: Whether the program uses the instructions of clusters. If `in_clusters` is true,
        `refs.group` is the CTA's index in its cluster.
      warps: Function of a spec that returns the number of warps per CTA, a multiple of 4.
    """

    def build(kernel: Kernel) -> Callable:
        spec, cluster = kernel.spec, kernel.cluster
        rooms, kv_heads = shared(spec), spec.Hkv if by_head else None
        places = ("b", "g", "group") if by_head else ("row", "group")
        names = (*kernel.names[len(kernel.scalars) :], *rooms, *places)
        grid = (kernel.grid[0] // cluster, cluster) if cluster > 1 else kernel.grid
        outputs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kernel.outputs)

        def run(instructions, sizes, *arguments):
            named = SimpleNamespace(**dict(zip(names, arguments, strict=True)))
            program(instructions, spec, sizes, named)

        def emulated(*arrays):
            return interpreter.machine().run(
                run,
                SimpleNamespace(**kernel.sizes),
                arrays,
                kernel.outputs,
                grid=grid,
                warps=warps(spec),
                shared=tuple(rooms.values()),
                kv_heads=kv_heads,
                cluster=cluster if in_clusters else None,
            )

        def call(*arrays):
            if all(isinstance(x, np.ndarray) for x in arrays):
                return emulated(*arrays)
            return jax.pure_callback(emulated, outputs, *arrays)

        def body(*arrays):
            scalars, arrays = arrays[: len(kernel.scalars)], arrays[len(kernel.scalars) :]
            sizes = vars(refs.sizes_of(kernel, scalars))
            at = [refs.cta_index(kernel, "row")]
            if by_head:
                at = [*operands.div_rem(at[0], kv_heads)]
            # The number of CTAs of a cluster does not depend on lengths.
            at += [lax.axis_index("rank") if cluster > 1 else refs.cta_index(kernel, "group")]
            traced = kernel.any_length  # if false, the sizes are constants

            def with_sizes(*arguments):
                words = arguments[len(names) :] if traced else sizes.values()
                named = SimpleNamespace(**dict(zip(sizes, words, strict=True)))
                run(warp, named, *arguments[: len(names)])

            warp.each(with_sizes, arrays, [*at, *(sizes.values() if traced else ())])

        if spec.interpret:
            return call
        body.__name__ = kernel.name  # the name in profiles
        warpgroups = warps(spec) // WARPS
        return plgpu.kernel(
            body,
            out_type=outputs,
            grid=grid[:1] if cluster > 1 else grid,
            grid_names=("row",) if cluster > 1 else ("row", "group"),
            cluster=(cluster,) if cluster > 1 else (),
            cluster_names=("rank",) if cluster > 1 else (),
            num_threads=warpgroups if warpgroups > 1 else None,
            thread_name="warpgroup" if warpgroups > 1 else None,
            scratch_types=[plgpu.SMEM(shape, jnp.int32) for shape in rooms.values()],
            compiler_params=operands.PARAMS,
        )

    return build
