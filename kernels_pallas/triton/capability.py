"""What the Triton kernels of attention can do; asked before any of them is imported."""

import functools
import importlib.util
from typing import Any

AMPERE = (8, 0)
HEADS = 64  # of a group: rows of a tile
WIDTH = 256
BLOCK = 128
DTYPES = ("float16", "bfloat16", "float32")
SMEM_BYTES = 96 * 1024  # what every GPU from Ampere on gives a program, less a little
LEAST = 16  # rows and columns of an operand of a product


def power(size: int) -> int:
    """The least power of two that is as large, from `LEAST` on."""
    return max(1 << (size - 1).bit_length(), LEAST)


def smem_bytes(
    itemsize: int, rows: int, keys: int, width: int, value_width: int, stages: int
) -> int:
    """Of the query's rows, the probabilities, and `stages` steps of keys and values."""
    return itemsize * (rows * (width + keys) + stages * keys * (width + value_width))


def why_not(problem: Any) -> str | None:
    """Why the kernel of the selected branch cannot run `problem`, or None."""
    if problem.framework != "torch":
        return f"is called from torch only, got {problem.framework}"
    if problem.platform != "cuda":
        return f"needs CUDA tensors, got {problem.platform}"
    if problem.capability is None or problem.capability < AMPERE:
        return f"needs compute capability {AMPERE} or more, got {problem.capability}"
    if problem.dtype not in DTYPES:
        return f"computes in {', '.join(DTYPES)}, got {problem.dtype}"
    group = problem.H // problem.Hkv
    if group > HEADS:
        return f"takes up to {HEADS} query heads a key/value head, got {group}"
    for name, width in (("D", problem.D), ("Dv", problem.Dv)):
        if width > WIDTH:
            return f"takes widths up to {WIDTH}, got {name}={width}"
    if problem.config.select_block > BLOCK:
        return f"takes selection blocks up to {BLOCK}, got {problem.config.select_block}"
    itemsize = 4 if problem.dtype == "float32" else 2
    rows, width, value_width = map(power, (group, problem.D, problem.Dv))
    least = smem_bytes(itemsize, rows, LEAST, width, value_width, 2)
    if least > SMEM_BYTES:
        return (
            f"takes widths and groups that fit in {SMEM_BYTES} bytes of shared memory, "
            f"got {least}"
        )
    return None if _installed() else "needs triton, which is not installed"


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None
