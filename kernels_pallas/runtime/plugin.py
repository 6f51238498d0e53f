"""What JAX's CUDA plugin is asked for beside what JAX documents: its compiler of Mosaic kernels."""

import contextlib
import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

from packaging.version import Version

PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
DEVICE_SINCE = Version("0.12.0.dev0")  # launchers take the kernel and the device too


def installed() -> bool:
    """Whether one is there; it is not imported."""
    return any(map(_found, PLUGINS))


@functools.cache
def compiler() -> Callable[[bytes, int], Any]:
    """The plugin's compiler: a pointer to the function and its launcher (`launcher`), or NULL.

    Raises:
      RuntimeError: no plugin is installed.
    """
    for name in PLUGINS:
        with contextlib.suppress(ModuleNotFoundError):
            path = importlib.import_module(name)._get_library_path()
            break
    else:
        raise RuntimeError("JAX's CUDA plugin is missing: pip install 'jax[cuda13]'")
    found = ctypes.CDLL(str(path)).MosaicGpuCompile
    found.argtypes = [ctypes.c_char_p, ctypes.c_int]
    found.restype = ctypes.POINTER(ctypes.c_void_p)
    return found


def launcher(compiled: Any, device: int) -> Callable[[int, Any], None]:
    """A function of the stream and of an array of addresses that queues one run.

    Args:
      compiled: what `compiler` gave; its first entry is the function in the current context.
      device: the GPU of that context.
    """
    function, address = compiled[0], compiled[1]
    pointer = ctypes.c_void_p
    if Version(importlib.metadata.version("jaxlib")) < DEVICE_SINCE:
        start = ctypes.CFUNCTYPE(None, *[pointer] * 3)(address)
        return lambda stream, addresses: start(function, stream, addresses)
    start, kernel = ctypes.CFUNCTYPE(None, *[pointer] * 4, ctypes.c_int)(address), compiled[2]
    return lambda stream, addresses: start(kernel, function, stream, addresses, device)


def _found(name: str) -> bool:
    with contextlib.suppress(ModuleNotFoundError):  # of what it is in
        return importlib.util.find_spec(name) is not None
    return False
