"""Checks the limits of the Triton kernels before any of them is imported."""

import functools
import importlib.metadata
import importlib.util
import os
import shutil
import sysconfig
from typing import Any

from packaging.version import Version

from kernels_pallas.triton.decode_descriptions import QUERIES
from kernels_pallas.triton.tiling import HEADS, choose, itemsize, power, scores_tiling

AMPERE = (8, 0)
ADA = (8, 9)  # the lowest capability that converts 8-bit floats
WIDTH = 256  # maximum of D and of Dv
BLOCK = 128  # maximum number of keys per selection block
SELECTED = 64  # maximum number of selected blocks per token
DTYPES = ("float16", "bfloat16", "float32")
NUMBERED = 2**31  # number of rows that 32 bits can count


def why_not(problem: Any) -> str | None:
    """Return the reason why the Triton kernels cannot run `problem`, or None. If the forward pass
    can run, the backward pass can run too.
    """
    if problem.platform not in ("gpu", "cuda"):
        return f"needs an NVIDIA GPU, got {problem.platform}"
    if reason := copies_why_not(problem.capability, problem.dtype, problem.framework):
        return reason
    group, config = problem.H // problem.Hkv, problem.config
    if group > HEADS:
        return f"supports up to {HEADS} query heads per key/value head, got {group}"
    for name in ("D", "Dv"):
        width = getattr(problem, name)
        if width > WIDTH:
            return f"supports widths up to {WIDTH}, got {name}={width}"
    if config.select_block > BLOCK:
        return f"supports selection blocks up to {BLOCK}, got {config.select_block}"
    if config.num_selected > SELECTED:
        return f"supports up to {SELECTED} selected blocks, got {config.num_selected}"
    found, size = tuple(problem.capability), itemsize(problem.dtype)
    of, rows = (problem.D, problem.Dv, size, found), min(power(group), 64)
    tilings = [choose(kernel, rows, 64, *of) for kernel in ("forward", "dq")]
    tilings += [choose("dkv", 64, 64, *of), scores_tiling(group, problem.D, size, found)]
    if None in tilings:
        return (
            f"needs widths and groups whose tiles fit in the shared memory of compute capability "
            f"{found}, got {problem.dtype} with D={problem.D}, Dv={problem.Dv}, "
            f"{group} query heads per key/value head"
        )
    # In the backward pass of packed rows, a block counts twice.
    rows = 2 * problem.T * group * config.num_selected
    return f"needs 2 T G n < 2**31, got {rows}" if rows >= NUMBERED else None


def decode_why_not(problem: Any) -> str | None:
    """Return the reason why `decode.py` cannot run a paged call of `T` queries per row of `S`
    tokens, or None.
    """
    if problem.packed or not 1 <= problem.T <= QUERIES:
        rows = "different numbers" if problem.packed else f"{problem.T} per row"
        return f"needs the same number of queries, 1 to {QUERIES}, in all rows, got {rows}"
    return why_not(problem) or (fp8_why_not(problem.capability) if problem.is_fp8 else None)


def fp8_why_not(found: tuple[int, int]) -> str | None:
    """Return the reason why kernels on a GPU of the given capability cannot read or write pages in
    fp8, or None.
    """
    if found < ADA:
        return f"needs compute capability {ADA} or more for pages in fp8, got {found}"
    return None


def copies_why_not(
    found: tuple[int, int] | None, dtype: object, framework: str = "torch"
) -> str | None:
    """Return the reason why kernels whose tiles always fit (`paged_append.py`, `split_heads.py`,
    `index.py`) cannot run with a dtype on a GPU of the given capability, or None.
    """
    name = str(dtype).removeprefix("torch.")
    if found is None or found < AMPERE:
        return f"needs compute capability {AMPERE} or more, got {found}"
    if name not in DTYPES:
        return f"supports {', '.join(DTYPES)}, got {name}"
    return _missing(framework)


@functools.cache
def _missing(framework: str) -> str | None:
    """Return a sentence that names a missing package or tool, or packages that do not work
    together. Return None if nothing is missing and all packages work together.
    """
    wanted = ("triton", "jax_triton") if framework == "jax" else ("triton",)
    for name in wanted:
        if importlib.util.find_spec(name) is None:
            return f"needs {name}, which is not installed"
    return launcher_why_not() if framework == "torch" else _pair_why_not()


def _pair_why_not() -> str | None:
    """Return the reason why the installed jax-triton and Triton do not work together, or None.
    Version 0.4 of jax-triton cannot pass the name of a GPU to Triton 3.6, although its metadata
    allows this pair of versions.
    """
    try:
        caller, compiler = (
            Version(importlib.metadata.version(x)) for x in ("jax-triton", "triton")
        )
    except importlib.metadata.PackageNotFoundError:
        return None  # a build with a custom version name
    if caller < Version("0.4") or compiler >= Version("3.7"):
        return None
    return f"jax-triton {caller} needs triton 3.7, got {compiler}; install jax-triton 0.3.1"


def launcher_why_not() -> str | None:
    """Return a sentence that names the tool that Triton lacks to build its C launcher for
    torch, or None.
    """
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "needs a C compiler, with which Triton builds its launcher; install gcc"
    # The installation scheme is chosen as in Triton.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    if not os.path.exists(os.path.join(sysconfig.get_path("include", scheme), "Python.h")):
        return "needs Python.h, with which Triton builds its launcher; install python3-dev"
    return None
