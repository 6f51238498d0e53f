"""`ArrayOps` for JAX arrays whose kernels are Triton's, called by jax-triton.

jax-triton sets or deletes `TRITON_CACHE_DIR` when it is imported, which would turn off Triton's
cache in the whole process. Here it is restored. Its versions have different names for the argument
of the outputs.
"""

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Iterator

import jax
import numpy as np

from nsa_jax.jax_ops import JaxOps

# For which GPU kernels are compiled; None means JAX's first device.
_posed: contextvars.ContextVar[tuple[int, int] | None]
_posed = contextvars.ContextVar("posed", default=None)


@contextlib.contextmanager
def compiled_for(capability: tuple[int, int]) -> Iterator[None]:
    """Within: kernels are compiled for a GPU that need not be there (lowering, tests)."""
    token = _posed.set(capability)
    try:
        yield
    finally:
        _posed.reset(token)


class TritonOps(JaxOps):
    """`run` calls a `kernels_pallas.triton.kernel.TritonKernel`."""

    def run(self, kernel, *arrays):
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kernel.outputs]
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
            outputs=results,
            c=kernel.constants,
        )

    def capability(self, x):
        return _posed.get() or super().capability(x)


TRITON_OPS = TritonOps()


@functools.cache
def _triton_call():
    """`jax_triton.triton_call`, whose outputs are `outputs` in every version.

    Fusing is requested by name, as in torch's calls, since newer versions of Triton warn otherwise.
    """
    import triton

    with triton.knobs.cache.scope():
        from jax_triton import triton_call
    if "out_shape" in inspect.signature(triton_call).parameters:  # before 0.4

        def call(*arguments, outputs, **rest):
            # A Python float would be a double there.
            arguments = [np.float32(x) if isinstance(x, float) else x for x in arguments]
            return triton_call(*arguments, out_shape=outputs, enable_fp_fusion=True, **rest)

        return call
    return lambda *arrays, outputs, **rest: triton_call(
        *arrays, out_type=outputs, backend_options={"enable_fp_fusion": True}, **rest
    )
