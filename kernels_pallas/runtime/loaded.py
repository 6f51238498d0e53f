"""Loads kernels for any length once per GPU, and shares them between the frameworks.

A `Kernel` is converted to its form for any length, fetched from the store (from disk, or built),
loaded by the driver and bound to sizes as a `BoundKernel`.

Loaded code and its kernel object stay alive until the process ends, since CUDA graphs and queued
launches may still refer to the code.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from kernels_pallas.kernel import DESCRIPTIONS, Kernel
from kernels_pallas.runtime import build, driver
from kernels_pallas.runtime.bound_kernel import BoundKernel
from kernels_pallas.runtime.cubin import Cubin
from kernels_pallas.runtime.store import Store

_loaded: dict[tuple[Kernel, int], tuple[Cubin, driver.Function]] = {}
_lock = threading.RLock()


def bound(
    kernel: Kernel, device: int, prefetch: Callable[[], Sequence[Kernel]] = lambda: ()
) -> BoundKernel:
    """Return `kernel` as a `BoundKernel` on a GPU, after its code is loaded.

    Args:
      kernel: A kernel with the lengths of a problem.
      device: Index of the GPU.
      prefetch: Function that returns the kernels that will be launched next. If `kernel` must
        be built, the next kernels are built and loaded together with `kernel`. Defaults to
        none.

    Raises:
      RuntimeError: The same errors as in the function `load`.
    """
    generic = kernel.for_any_length()
    load([generic], device, prefetch=prefetch)
    shapes = [x.shape for x in (*kernel.inputs, *kernel.outputs)]
    return BoundKernel(*_loaded[generic, device], shapes, kernel.sizes, kernel.grid)


def is_loaded(kernel: Kernel, device: int) -> bool:
    """Return whether `kernel` is loaded on the GPU `device`.

    `kernel` must serve all lengths (`Kernel.for_any_length`).
    """
    return (kernel, device) in _loaded


def load(
    kernels: Sequence[Kernel],
    device: int,
    jobs: int | None = None,
    prefetch: Callable[[], Sequence[Kernel]] = lambda: (),
) -> None:
    """Load kernels, and build the kernels that are not stored.

    Args:
      kernels: Kernels that serve all lengths (`Kernel.for_any_length`).
      device: Index of the GPU.
      jobs: Number of processes that build, by default one per core.
      prefetch: The same as in `bound`.

    Raises:
      RuntimeError: A kernel could not be loaded, or is not on disk and could not be built.
    """
    with _lock:
        missing = [x for x in kernels if not is_loaded(x, device)]
        found: Sequence[Any] = [store().get(kernel) for kernel in missing]
        if None in found:
            if reason := build.why_not():
                name = missing[found.index(None)].name
                raise RuntimeError(
                    f"{name} is not stored on disk, and this machine cannot build it: {reason}; "
                    "note that kernels depend on the layer's scale"
                )
            others = [x.for_any_length() for x in prefetch()]
            others = [x for x in others if not is_loaded(x, device)]
            missing = list(dict.fromkeys((*missing, *others)))
            found = store().fetch(missing, jobs, build.progress())
        for kernel, built in zip(missing, found, strict=True):
            _loaded[kernel, device] = built.cubin, driver.load(*built, device)


@functools.lru_cache(DESCRIPTIONS)
def on_disk(kernel: Kernel) -> bool:
    """Return whether `kernel` is stored, on disk or in memory.

    `kernel` must serve all lengths (`Kernel.for_any_length`). The first result of `on_disk` for a
    kernel is cached.
    """
    return store().get(kernel) is not None


@functools.cache
def store() -> Store:
    """Return the store of this process."""
    return Store()


@functools.cache
def can_build() -> bool:
    """Return whether this machine can build kernels."""
    return build.why_not() is None
