"""What the Triton kernels of attention can do; asked before any of them is imported."""

import importlib.util
from typing import Any

AMPERE = (8, 0)
HEADS = 64  # of a group: rows of a tile
WIDTH = 256
BLOCK = 128
DTYPES = ("float16", "bfloat16", "float32")


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
    if importlib.util.find_spec("triton") is None:
        return "needs triton, which is not installed"
    return None
