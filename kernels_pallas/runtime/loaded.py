"""Kernels for any length, loaded once a GPU, for whichever framework launches them.

    Kernel -> its form for any length -> store (disk, or built) -> driver -> BoundKernel

What is loaded stays loaded, and the kernel alive, until the process ends: CUDA graphs and
queued launches refer to the machine code, and nothing says when the last one is gone.
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
    """`kernel` on a GPU, loaded.

    Args:
      prefetch: what is launched next. It is asked for where something has to be built, and built
        and loaded at once with it.

    Raises:
      RuntimeError: as `load`.
    """
    generic = kernel.for_any_length()
    load([generic], device, prefetch=prefetch)
    shapes = [x.shape for x in (*kernel.inputs, *kernel.outputs)]
    return BoundKernel(*_loaded[generic, device], shapes, kernel.sizes, kernel.grid)


def is_loaded(kernel: Kernel, device: int) -> bool:
    """Of a kernel for any length."""
    return (kernel, device) in _loaded


def load(
    kernels: Sequence[Kernel],
    device: int,
    jobs: int | None = None,
    prefetch: Callable[[], Sequence[Kernel]] = lambda: (),
) -> None:
    """Loads kernels for any length, built where they are not on disk.

    Args:
      jobs: processes that build; by default one a core.
      prefetch: as in `bound`.

    Raises:
      RuntimeError: a kernel is on no disk and could not be built, or could not be loaded.
    """
    with _lock:
        missing = [x for x in kernels if not is_loaded(x, device)]
        found: Sequence[Any] = [store().get(kernel) for kernel in missing]
        if None in found:
            if reason := build.why_not():
                name = missing[found.index(None)].name
                raise RuntimeError(
                    f"{name} is none of the kernels on disk, and this machine cannot build it: "
                    f"{reason}; a layer's scale is part of its kernels"
                )
            others = [x.for_any_length() for x in prefetch()]
            others = [x for x in others if not is_loaded(x, device)]
            missing = list(dict.fromkeys((*missing, *others)))
            found = store().fetch(missing, jobs, build.progress())
        for kernel, built in zip(missing, found, strict=True):
            _loaded[kernel, device] = built.cubin, driver.load(*built, device)


@functools.lru_cache(DESCRIPTIONS)
def on_disk(kernel: Kernel) -> bool:
    """Whether a kernel, for any length, is there."""
    return store().get(kernel) is not None


@functools.cache
def store() -> Store:
    """That of this process."""
    return Store()


@functools.cache
def can_build() -> bool:
    """Whether kernels can be made here."""
    return build.why_not() is None
