"""Small kernels for the runtime's tests: any-length or not, by tensor maps and by pointers."""

import dataclasses
import functools
import os
import sys

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from kernels_pallas.kernel import Array, Kernel
from kernels_pallas.mosaic import operands, warp

ROWS = 64  # a CTA copies


@dataclasses.dataclass(frozen=True)
class Copy:
    """Sizes: `[B, T, heads, 64]`; with `any_length` B and T are capacities."""

    B: int
    T: int
    heads: int = 2
    any_length: bool = False


@functools.cache
def copy(spec: Copy) -> Kernel:
    """Inputs: bfloat16 `[B, T, heads, 64]`. Outputs: the same, and int32 `[B, heads]`: T."""
    lead = (Array((64,), "int32"),) if spec.any_length else ()
    x = Array((spec.B, spec.T, spec.heads, 64), "bfloat16")
    return Kernel(
        "copy",
        spec,
        f"{__name__}:copy_body",
        (*lead, x),
        (x, Array((spec.B, spec.heads), "int32")),
        sizes={"T": spec.T},
        grid=(spec.B * spec.heads, -(-spec.T // ROWS)),
        source=f"{__name__}:copy",
        any_length=spec.any_length,
    )


def copy_body(kernel: Kernel):
    spec: Copy = kernel.spec

    def body(*refs):
        *size, x, out, lengths, rows_s, full = refs
        row, tile = jax.lax.axis_index("row"), jax.lax.axis_index("tile")
        b, head = jax.lax.div(row, spec.heads), jax.lax.rem(row, spec.heads)
        part = b, pl.ds(tile * ROWS, ROWS), head
        plgpu.copy_gmem_to_smem(x.at[part], rows_s, full)
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(rows_s, out.at[part])
        lengths[b, head] = carried(size[0]) if size else jnp.int32(spec.T)
        plgpu.wait_smem_to_gmem(0)

    swizzled = (plgpu.SwizzleTransform(128),)
    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(o.shape, o.dtype) for o in kernel.outputs],
        scratch_types=[
            plgpu.SMEM((ROWS, 64), jnp.bfloat16, transforms=swizzled),
            plgpu.Barrier(),
        ],
        grid=kernel.grid,
        grid_names=("row", "tile"),
        compiler_params=operands.PARAMS,
    )


def carried(ref):
    """The number that the address of a ref is, `value << 8`."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=warp.SCALAR),
    )
    def read(_, ref):
        i64, i32 = (ir.IntegerType.get_signless(bits) for bits in (64, 32))
        address = llvm.ptrtoint(i64, utils.memref_ptr(ref))
        value = arith.trunci(i32, arith.shrui(address, arith.constant(i64, 8)))
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return read(ref)


@dataclasses.dataclass(frozen=True)
class Broken:
    """Of `broken`."""

    words: str


def broken(spec: Broken) -> Kernel:
    """A kernel whose body raises these words."""
    x = Array((64,), "float32")
    place = f"{__name__}:broken"
    return Kernel("broken", spec, f"{place}_body", (x,), (x,), source=place)


def broken_body(kernel: Kernel):
    raise ValueError(kernel.spec.words)


def ending(spec: Broken) -> Kernel:
    """A kernel whose body ends the process, as a crash of the compiler would."""
    x = Array((64,), "float32")
    place = f"{__name__}:ending"
    return Kernel("ending", spec, f"{place}_body", (x,), (x,), source=place)


def ending_body(kernel: Kernel):
    print(kernel.spec.words, file=sys.stderr, flush=True)
    os._exit(3)
