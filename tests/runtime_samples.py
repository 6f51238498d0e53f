"""Kernels that are never compiled, for tests of the store. Imports no JAX."""

import dataclasses
import time

from kernels_pallas.kernel import Array, Kernel
from kernels_pallas.runtime import build as building
from kernels_pallas.runtime import store
from kernels_pallas.runtime.build import Built
from kernels_pallas.runtime.cubin import Argument, Cubin, Parameter, Pointer


@dataclasses.dataclass(frozen=True)
class Width:
    """Of `kernel`."""

    D: int


def kernel(width, name="sample"):
    x = Array((width,), "float32")
    return Kernel(name, Width(width), "", (x,), (x,), source=f"{__name__}:{name}")


def built_of(kernel, image=b"\x7fELF image"):
    """As if it had been compiled."""
    parameters = tuple(Parameter(8 * i, 8, Pointer(i)) for i in range(2))
    width = str(kernel.spec.D).encode()
    cubin = Cubin(
        name=kernel.name,
        entry="body",
        block=(128, 1, 1),
        cluster=1,
        shared_bytes=0,
        attributes=(),
        parameters=parameters,
        arguments=(Argument(1, "float32"),) * 2,
        registers=8,
        stack_bytes=0,
        spill_store_bytes=0,
        spill_load_bytes=0,
        remarks=(),
        versions={"jax": store._jax_version() or ""},
    )
    return Built(cubin, image + width)


def fetch(folder):
    """Fetches two kernels that take a while to build, and prints their widths."""

    def build(kernels, jobs=None, progress=None):
        for i, x in enumerate(kernels):
            time.sleep(0.2)
            with (folder / "builds").open("a") as file:
                print(x.spec.D, file=file)
            yield i, built_of(x)

    building.build = build
    found = store.Store(folder / "kernels").fetch([kernel(1), kernel(2)])
    print(*(x.image.removeprefix(b"\x7fELF image").decode() for x in found))
