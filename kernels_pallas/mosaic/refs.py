"""Names for the refs of a kernel's body: its inputs, its outputs and its scratch."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import operands


def build_kernel(
    kernel: Kernel,
    body: Callable[[SimpleNamespace], None],
    *,
    scratch: Mapping[str, Any] | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """`plgpu.kernel` of `body(refs)`, in which each ref has its name: `refs.query`.

    `plgpu.kernel` takes scratch by name too, but lays it out in alphabetical order.

    Args:
      kernel: made by `Kernel.named`.
      body: takes one object whose attributes are the refs. An input that a description leaves
        out has no attribute.
      scratch: types of the scratch refs, in the order in which they lie in memory.
      options: of `plgpu.kernel`, e.g. `grid`.

    Raises:
      ValueError: an array has no name, or two refs have the same one.
    """
    scratch = dict(scratch or {})
    names = *kernel.names, *scratch
    expected = len(kernel.inputs) + len(kernel.outputs) + len(scratch)
    if len(set(names)) != expected:
        raise ValueError(f"{kernel.name} must name each of its {expected} refs, got {names}")

    def named(*refs):
        body(SimpleNamespace(**dict(zip(names, refs, strict=True))))

    named.__name__ = kernel.name
    return plgpu.kernel(
        named,
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kernel.outputs],
        scratch_types=list(scratch.values()),
        compiler_params=operands.PARAMS,
        **options,
    )
