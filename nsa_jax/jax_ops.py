"""`ArrayOps` for JAX arrays. Everything is traced, and nothing is shared between calls.

On a Hopper GPU, Mosaic kernels run from machine code that serves any sequence length (`ffi`). If
Mosaic kernels are interpreted, or lowered for a GPU that is not present, they are Pallas calls.
jax-triton calls the Triton kernels.
"""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.triton.kernel import TritonKernel
from nsa_core.array_ops import ArrayOps
from nsa_jax import ffi, jax_problem
from nsa_jax.numerics import product, put

COMPARISONS = 2**26  # an H100 needs 5 us for this number of elements


class JaxOps(ArrayOps):
    xp: Any = jnp
    nn: Any = jax.nn
    # XLA may pass the address of a slice as an input, and other memory for the output
    parts_stay = False

    def run(self, kernel, *arrays):
        if isinstance(kernel, TritonKernel):
            return self._run_triton(kernel, arrays)
        return ffi.call(kernel, *arrays) if ffi.serves(kernel) else kernel(*arrays)

    def _run_triton(self, kernel, arrays):
        major, minor = self.capability(arrays[0])
        return _triton_call()(
            *arrays,
            *kernel.scalars,
            kernel=kernel.jitted,
            grid=(kernel.programs,),
            name=kernel.name,
            num_warps=kernel.warps,
            num_stages=kernel.stages,
            compute_capability=10 * major + minor,
            outputs=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kernel.outputs],
            c=kernel.constants,
        )

    def writes_in_place(self, kernel):
        return bool(kernel.in_place) and ffi.serves(kernel)

    def after(self, x, done):
        bits = jax.lax.bitcast_convert_type(done.reshape(-1)[0], jnp.uint16)
        # XLA does not know that this value is zero, and therefore waits for it.
        zero = jax.lax.optimization_barrier(bits.astype(jnp.uint32)) >> 16
        return x + zero.astype(x.dtype)

    def capability(self, x):
        found = jax_problem.capability()
        if found is None:
            raise NotImplementedError("JAX's first device must be an NVIDIA GPU")
        return found

    def arange(self, like, count):
        return jnp.arange(count, dtype=jnp.int32)[None]

    def cast(self, x, dtype):
        return jnp.asarray(x, dtype)

    def contiguous(self, x):
        return x

    def take_rows(self, x, index):
        return jax.vmap(lambda row, at: row[at])(x, index)

    def searchsorted(self, rows, values, side):
        # XLA copies the steps of an unrolled search into every reader of its result, and
        # compilation then takes seconds. If there are few comparisons, they are therefore all
        # computed at once. In a loop, the default of JAX, each step of a search would be four
        # kernels.
        few = rows.shape[-1] * values.size <= COMPARISONS
        options = {"side": side, "method": "compare_all" if few else "scan_unrolled"}
        return jax.vmap(functools.partial(jnp.searchsorted, **options))(
            rows, values.astype(rows.dtype)
        )

    def sort(self, rows):
        index = jax.lax.broadcasted_iota(jnp.int32, rows.shape, 1)
        return jax.lax.sort((rows, index), num_keys=1, is_stable=True)

    def pad_end(self, x, axis, count, value):
        widths = [(0, count if i == axis else 0) for i in range(x.ndim)]
        return jnp.pad(x, widths, constant_values=value)

    def product(self, subscripts, x, y):
        return product(subscripts, x, y)

    def top(self, x, count):
        return jax.lax.top_k(x, count)[0]

    def take_along(self, x, index):
        return jnp.take_along_axis(x, index, axis=-1)

    def stop_gradient(self, x):
        return jax.lax.stop_gradient(x)

    def if_any(self, condition, made, otherwise):
        on_cpu = lambda: jax.lax.cond(condition.any(), made, lambda: otherwise)
        return jax.lax.platform_dependent(cpu=on_cpu, default=lambda: otherwise)

    def zeros(self, like, shape):
        return jnp.zeros_like(like, shape=shape)

    def put(self, pages, at, new):
        page = jnp.where(at.there, at.page, pages.shape[0])
        return put(pages, (page, at.offset), new)

    def write(self, x, index, part):
        # `x.at[index].set` would be a scatter.
        starts = [each.start or 0 for each in index] + [0] * (x.ndim - len(index))
        return jax.lax.dynamic_update_slice(x, part, starts)


JAX_OPS = JaxOps()


@functools.cache
def _triton_call():
    """Return `jax_triton.triton_call`, wrapped so that every version of jax-triton accepts the
    outputs as `outputs`. jax-triton sets or deletes `TRITON_CACHE_DIR` when it is imported.
    Without the variable, Triton's cache would be disabled in the whole process, so this function
    restores the variable. FP fusion is requested explicitly, since newer versions of Triton warn
    otherwise.
    """
    import triton

    with triton.knobs.cache.scope():
        from jax_triton import triton_call
    if "out_shape" in inspect.signature(triton_call).parameters:  # jax-triton before 0.4

        def call(*arguments, outputs, **rest):
            # A Python float would become a double in the kernel.
            arguments = [np.float32(x) if isinstance(x, float) else x for x in arguments]
            return triton_call(*arguments, out_shape=outputs, enable_fp_fusion=True, **rest)

        return call
    return lambda *arrays, outputs, **rest: triton_call(
        *arrays, out_type=outputs, backend_options={"enable_fp_fusion": True}, **rest
    )
