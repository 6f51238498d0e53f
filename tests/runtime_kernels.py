"""Small kernels for the runtime's tests: any-length or not, by tensor maps and by pointers."""

import dataclasses
import functools
import os
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Array, Kernel
from kernels_pallas.mosaic.refs import build_kernel
from kernels_pallas.runtime.description import PLACES

ROWS = 64  # a CTA copies


class Pair(NamedTuple):
    """Of `Paired`."""

    first: int
    second: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Paired:
    """A spec that holds a tuple with names."""

    pair: Pair | None = None


def paired(spec: Paired) -> Kernel:
    """Is never compiled."""
    return Kernel("paired", spec, "", (), (), source=f"{__name__}:paired")


if __name__ not in PLACES:
    PLACES.append(__name__)


@dataclasses.dataclass(frozen=True)
class Copy:
    """Sizes: `[B, T, heads, 64]`; with `any_length` B and T are capacities."""

    B: int
    T: int
    heads: int = 2
    any_length: bool = False

    def for_any_length(self) -> "Copy":
        return Copy(2, 128, self.heads, any_length=True)


@functools.cache
def copy(spec: Copy) -> Kernel:
    """Inputs: bfloat16 `[B, T, heads, 64]`. Outputs: the same, and int32 `[B, heads]`: T."""
    x = Array((spec.B, spec.T, spec.heads, 64), "bfloat16")
    return Kernel.named(
        spec,
        {"x": x},
        {"out": x, "lengths": Array((spec.B, spec.heads), "int32")},
        name="copy",
        body=f"{__name__}:copy_body",
        sizes={"T": spec.T},
        grid=(spec.B * spec.heads, -(-spec.T // ROWS)),
        source=f"{__name__}:copy",
    )


def copy_body(kernel: Kernel):
    spec: Copy = kernel.spec

    def body(refs):
        row, tile = jax.lax.axis_index("row"), jax.lax.axis_index("tile")
        b, head = jax.lax.div(row, spec.heads), jax.lax.rem(row, spec.heads)
        part = b, pl.ds(tile * ROWS, ROWS), head
        plgpu.copy_gmem_to_smem(refs.x.at[part], refs.rows_s, refs.full)
        plgpu.barrier_wait(refs.full)
        plgpu.copy_smem_to_gmem(refs.rows_s, refs.out.at[part])
        refs.lengths[b, head] = jnp.int32(refs.sizes.T)
        plgpu.wait_smem_to_gmem(0)

    swizzled = (plgpu.SwizzleTransform(128),)
    return build_kernel(
        kernel,
        body,
        scratch={
            "rows_s": plgpu.SMEM((ROWS, 64), jnp.bfloat16, transforms=swizzled),
            "full": plgpu.Barrier(),
        },
        grid_names=("row", "tile"),
    )


@dataclasses.dataclass(frozen=True)
class Broken:
    """Of `broken`."""

    words: str


def named(name: str, spec: Broken) -> Kernel:
    x, place = Array((64,), "float32"), f"{__name__}:{name}"
    return Kernel(name, spec, f"{place}_body", (x,), (x,), source=place)


def broken(spec: Broken) -> Kernel:
    """A kernel whose body raises these words."""
    return named("broken", spec)


def broken_body(kernel: Kernel):
    raise ValueError(kernel.spec.words)


def ending(spec: Broken) -> Kernel:
    """A kernel whose body ends the process, as a crash of the compiler would."""
    return named("ending", spec)


def ending_body(kernel: Kernel):
    print(kernel.spec.words, file=sys.stderr, flush=True)
    os._exit(3)
