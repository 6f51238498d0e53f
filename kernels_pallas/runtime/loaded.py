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
from kernels_pallas.runtime.build import LOG
from kernels_pallas.runtime.cubin import Cubin
from kernels_pallas.runtime.store import Store

_loaded: dict[tuple[Kernel, int], tuple[Cubin, driver.Function]] = {}
_lock = threading.RLock()


def bound(
    kernel: Kernel, device: int, prefetch: Callable[[], Sequence[Kernel]] = lambda: ()
) -> BoundKernel | None:
    """`kernel` on a GPU, loaded; None where its machine code is on no disk and this machine
    cannot build it, or it is compiled for one length only.

    Args:
      prefetch: what is launched next. It is asked for where something has to be built, and built
        and loaded at once with it.

    Raises:
      RuntimeError: a kernel could not be built, or loaded.
    """
    if not kernel.source:
        return None
    generic = kernel.for_any_length()
    load([generic], device, prefetch=prefetch)
    if (found := _loaded.get((generic, device))) is None:
        return None
    shapes = [x.shape for x in (*kernel.inputs, *kernel.outputs)]
    return BoundKernel.of(*found, shapes, kernel.sizes, kernel.grid)


def is_loaded(kernel: Kernel, device: int) -> bool:
    """Of a kernel for any length."""
    return (kernel, device) in _loaded


def load(
    kernels: Sequence[Kernel],
    device: int,
    jobs: int | None = None,
    prefetch: Callable[[], Sequence[Kernel]] = lambda: (),
) -> None:
    """Loads kernels for any length, built where they are not on disk; where this machine cannot
    build, says so and loads none.

    Args:
      jobs: processes that build; by default one a core.
      prefetch: as in `bound`.
    """
    with _lock:
        missing = [x for x in kernels if not is_loaded(x, device)]
        if not missing:
            return
        found: Sequence[Any] = [store().get(kernel) for kernel in missing]
        if None in found:
            if not can_build():
                return
            others = [x.for_any_length() for x in prefetch() if x.source]
            others = [x for x in others if not is_loaded(x, device)]
            missing = list(dict.fromkeys((*missing, *others)))
            found = store().fetch(missing, jobs, build.progress())
        for kernel, built in zip(missing, found, strict=True):
            _loaded[kernel, device] = built.cubin, driver.load(built.cubin, built.image, device)


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
    """Whether kernels for any length can be made; if not, says why, once."""
    reason = build.why_not()
    if reason:
        LOG.warning(
            "kernels are compiled for one length at a time, in each process: %s", reason
        )
    return not reason
