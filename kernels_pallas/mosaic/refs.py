"""Gives names to the refs of a kernel's body. The refs are the inputs, the outputs and the
scratch of the kernel.
"""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from kernels_pallas.kernel import SCALAR_STEP, Kernel
from kernels_pallas.mosaic import operands, warp

INT = plgpu.ShapeDtypeStruct((), jnp.int32, layout=warp.SCALAR)


def build_kernel(
    kernel: Kernel,
    body: Callable[[SimpleNamespace], None],
    *,
    scratch: Mapping[str, Any] | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """Build a `plgpu.kernel` from `body(refs)`.

    Each ref is an attribute with its name, such as `refs.query`.

    `plgpu.kernel` also accepts scratch by name, but lays out named scratch in alphabetical
    order.

    Args:
      kernel: A kernel from `Kernel.named`.
      body: A function of one object whose attributes are the refs. An input that the
        kernel's description omits has no attribute on this object. `refs.sizes`
        has the numbers of `kernel.sizes`: Python integers, or scalars that the kernel reads at
        launch. `refs.cta` has the CTA's index on each axis of the grid (`cta_index`).
      scratch: Types of the scratch refs, in their order in memory.
      options: Other options of `plgpu.kernel`, such as `grid_names`.

    Raises:
      ValueError: An array has no name, or two refs have the same name.
    """
    scratch = dict(scratch or {})
    names = *kernel.names, *scratch
    expected = len(kernel.inputs) + len(kernel.outputs) + len(scratch)
    if len(set(names)) != expected:
        raise ValueError(f"{kernel.name} must name each of its {expected} refs, got {names}")

    def named(*refs):
        by_name = dict(zip(names, refs, strict=True))
        by_name["sizes"] = sizes_of(kernel, [by_name.pop(x) for x in kernel.scalars])
        axes = options.get("grid_names", ())
        by_name["cta"] = SimpleNamespace(**{name: cta_index(kernel, name) for name in axes})
        body(SimpleNamespace(**by_name))

    named.__name__ = kernel.name  # the name in profiles
    return plgpu.kernel(
        named,
        grid=kernel.grid,
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kernel.outputs],
        scratch_types=list(scratch.values()),
        compiler_params=operands.PARAMS,
        interpret=getattr(kernel.spec, "interpret", False),
        **options,
    )


def sizes_of(kernel: Kernel, scalars: Sequence[Any]) -> SimpleNamespace:
    """Return the numbers of `kernel.sizes`, by name."""
    numbers = map(scalar_of, scalars) if kernel.any_length else kernel.sizes.values()
    return SimpleNamespace(**dict(zip(kernel.sizes, numbers, strict=True)))


def scalar_of(argument: Any) -> Any:
    """Return, as int32, the number in a scalar argument's address (`Kernel.for_any_length`)."""

    def read(ref):
        i64, i32 = (ir.IntegerType.get_signless(bits) for bits in (64, 32))
        address = llvm.ptrtoint(i64, utils.memref_ptr(ref))
        step = arith.constant(i64, SCALAR_STEP.bit_length() - 1)
        number = arith.trunci(i32, arith.shrui(address, step))
        return mgpu.FragmentedArray.splat(number, (), is_signed=True)

    return warp.each(read, [argument], [], result=INT)


def cta_index(kernel: Kernel, axis: str) -> Any:
    """Return the CTA's index on an axis of the grid, as an int32 scalar.

    In a kernel that serves all lengths, the compiler must not know that the index is less than the
    grid of the placeholder lengths. If the grid of a batch of 2 were known, the compiler would
    replace `index // Hkv` by `index >= Hkv`.
    """
    index = lax.axis_index(axis)
    if not kernel.any_length:
        return index

    def hide(index):
        i32, known = ir.IntegerType.get_signless(32), index.value
        number: Any = llvm.inline_asm(i32, [known], "mov.b32 $0, $1;", "=r,r", asm_dialect=0)
        return mgpu.FragmentedArray.splat(number, (), is_signed=True)

    return warp.each(hide, [], [index], result=INT)
