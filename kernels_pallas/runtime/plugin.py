"""What JAX's CUDA plugin is asked for beside what JAX documents: its compiler of Mosaic kernels."""

import contextlib
import ctypes
import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


def installed() -> bool:
    """Whether one is there; it is not imported."""
    return any(map(_found, PLUGINS))


@functools.cache
def compiler() -> Callable[[bytes, int], Any]:
    """The plugin's compiler: a pointer to the function and its launcher, or NULL.

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


def _found(name: str) -> bool:
    with contextlib.suppress(ModuleNotFoundError):  # of what it is in
        return importlib.util.find_spec(name) is not None
    return False
