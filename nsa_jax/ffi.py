"""Runs Mosaic kernels in JAX programs, from machine code that serves every sequence length.

    trace    kernel -> custom call `TARGET`; its attributes are the kernel's description (JSON) and
             a number that identifies it
    compile  XLA compiles the rest of the program; the kernel exists already, or is built meanwhile
    run      XLA -> call frame -> BoundKernel of the description -> the driver, on XLA's stream

For a new shape JAX only traces the call, since the machine code serves every length. The process
that runs a program needs only the store of kernels (`kernels_pallas.runtime.store`), even if the
program comes from JAX's persistent cache. The host reads the call frame in Python (`xla_call`).
"""

import collections
import functools
import hashlib
import json
import logging
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.kernel import ALIGNMENT, Kernel
from kernels_pallas.mosaic import capability
from kernels_pallas.runtime import build, description, loaded
from nsa_jax import jax_problem, xla_call
from nsa_jax.xla_call import Call

TARGET = "nsa_launch_mosaic_kernel"
PREFETCHED = 128  # kernels that were traced but have not run yet; they are built together
LAUNCHES = 4096  # maximum number of remembered kernels; loaded code is not freed
LOG = logging.getLogger("kernels_pallas.runtime")

_launches: dict[tuple[int, int], Callable[[int, Sequence[int]], None]] = {}
_prefetch: collections.OrderedDict[Kernel, None] = collections.OrderedDict()
_lock = threading.RLock()


def serves(kernel: Kernel) -> bool:
    """Return whether `call` can run `kernel` on JAX's default device. The device must be a
    Hopper GPU, and the kernel must be on disk or be buildable on this machine.
    """
    if capability.interpret.get() or not _is_hopper() or not _registered():
        return False
    if loaded.on_disk(kernel.for_any_length()) or loaded.can_build():
        return True
    _tell(build.why_not())
    return False


def call(kernel: Kernel, *arrays: Any) -> Sequence[jax.Array]:
    """Run `kernel` as a custom call of XLA. All transforms of JAX are supported, except `vmap`
    and derivatives.

    Args:
      arrays: As in `Kernel.__call__`.

    Returns:
      The outputs of the kernel. If the kernel is `in_place`, the first outputs may reuse the
      memory of the last arrays, unless other operations read those arrays.
    """
    text, key = text_and_key(kernel)
    with _lock:
        _prefetch[kernel] = None
        _prefetch.move_to_end(kernel)
        while len(_prefetch) > PREFETCHED:
            _prefetch.popitem(last=False)
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kernel.outputs]
    first = len(kernel.inputs) - kernel.in_place
    aliases = {first + i: i for i in range(kernel.in_place)} or None
    custom = jax.ffi.ffi_call(TARGET, results, input_output_aliases=aliases)
    operands = kernel.shaped(arrays)
    for i, x in enumerate(operands[:first]):
        operands[i] = x if _starts_aligned(x) else jax.lax.optimization_barrier(x)
    return tuple(custom(*operands, kernel=text, key=key))


def _starts_aligned(x: Any) -> bool:
    """Return whether every contiguous slice of this shape starts at a multiple of `ALIGNMENT`.

    If a slice of a larger array starts at a multiple of 128 bytes, XLA passes the slice to a custom
    call without a copy. A barrier between the slice and the call forces a copy.
    """
    inner = next((i for i, size in enumerate(x.shape) if size > 1), len(x.shape)) + 1
    return math.prod(x.shape[inner:]) * jnp.dtype(x.dtype).itemsize % ALIGNMENT == 0


def prepare(kernels: Iterable[Kernel], device: int = 0, jobs: int | None = None) -> int:
    """Load kernels on a GPU. Kernels that are not on disk are built.

    Returns:
      The number of kernels. Kernels that differ only in lengths count once.

    Raises:
      RuntimeError: A kernel cannot be built or loaded.
    """
    generic = list(dict.fromkeys(x.for_any_length() for x in kernels))
    loaded.load(generic, device, jobs)
    return len(generic)


@functools.cache
def text_and_key(kernel: Kernel) -> tuple[str, np.int64]:
    """Return a kernel's description and its key. The key is a hash of the description, which
    identifies the kernel in any process."""
    text = description.canonical(description.describe(kernel))
    digest = hashlib.sha256(text.encode()).digest()
    return text, np.frombuffer(digest[:8], np.int64)[0]


@functools.cache
def _is_hopper() -> bool:
    return jax.default_backend() == "gpu" and jax_problem.capability() == capability.HOPPER


@functools.cache
def _tell(reason: str | None) -> None:
    """Log once why kernels for any length are not used."""
    LOG.warning("JAX compiles each kernel for each length, in each process, because %s", reason)


@functools.cache
def _registered() -> bool:
    """Register the handler with XLA. Return whether XLA accepts the handler."""
    try:
        jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(HANDLER), platform="CUDA")
    except Exception as error:
        _tell(f"XLA accepts no custom call: {error}")
        return False
    return True


def _run(given: Call) -> None:
    """Run the kernel that XLA requests, on the stream of XLA."""
    launch = _launches.get((given.key, given.device)) or _bound(given)
    assert given.stream is not None
    launch(given.stream, given.addresses)


def _bound(given: Call) -> Callable[[int, Sequence[int]], None]:
    with _lock:
        key = given.key, given.device
        if key not in _launches:
            kernel = description.kernel_of(json.loads(given.text()))
            found = loaded.bound(kernel, given.device, _wanted)
            if len(_launches) >= LAUNCHES:
                _launches.pop(next(iter(_launches)))
            _launches[key] = found.launch
        return _launches[key]


def _wanted() -> Sequence[Kernel]:
    """Return the traced kernels that have not run yet. Each kernel is returned only once."""
    with _lock:
        found = list(_prefetch)
        _prefetch.clear()
    return found


HANDLER = xla_call.handler(_run)
