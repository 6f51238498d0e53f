"""Kernels that are never compiled, for tests of the store. Imports no JAX."""

import dataclasses
import time

from kernels_pallas.kernel import Array, Kernel
from kernels_pallas.runtime import build as building
from kernels_pallas.runtime import store
from kernels_pallas.runtime.build import Built
from kernels_pallas.runtime.cubin import Cubin


@dataclasses.dataclass(frozen=True)
class Width:
    """Of `kernel`."""

    D: int


def kernel(width, name="sample"):
    x = Array((width,), "float32")
    return Kernel(name, Width(width), "", (x,), (x,), source=f"{__name__}:{name}")


def built_of(kernel, image=b"\x7fELF image"):
    """As if it had been compiled."""
    head, versions = (
        (kernel.name, "body", (128, 1, 1), 1, 0),
        {"jax": store._jax_version() or ""},
    )
    cubin = Cubin(*head, (), (0, 1), 8, 0, 0, 0, (), versions)
    return Built(cubin, image + str(kernel.spec.D).encode())


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
