"""What the Mosaic kernels can do; asked before any of them is imported."""

import contextlib
import contextvars
from typing import Any

from kernels_pallas.specs.tile import SMEM_BUDGET

HOPPER = (9, 0)
HEADS = 64  # of a group: a token's rows fit in one tile
WIDTH = 256
LONGEST = 2**24  # keys: gradients hold the last one of a row in a float32

# Parameters of Pallas' GPU interpreter while `interpreted`, else False.
interpret: contextvars.ContextVar[Any] = contextvars.ContextVar("interpret", default=False)


@contextlib.contextmanager
def interpreted(params):
    """Within: kernels run in Pallas' GPU interpreter, on any device (tests)."""
    token = interpret.set(params)
    try:
        yield
    finally:
        interpret.reset(token)


def why_not(problem: Any) -> str | None:
    """Why no Mosaic kernel can run `problem`, or None."""
    config = problem.config
    if not interpret.get():
        if problem.platform not in ("gpu", "cuda"):
            return f"needs a Hopper GPU, got {problem.platform}"
        if problem.capability != HOPPER:
            return f"needs compute capability {HOPPER}, got {problem.capability}"
    if problem.dtype not in ("bfloat16", "float16"):
        return f"computes in bfloat16 and float16, got {problem.dtype}"
    group = problem.H // problem.Hkv
    if group > HEADS:
        return f"takes up to {HEADS} query heads a key/value head, got {group}"
    for name, width in (("D", problem.D), ("Dv", problem.Dv)):
        if width % 16 or width > WIDTH:
            return f"takes widths that are multiples of 16 up to {WIDTH}, got {name}={width}"
    if config.select_block % 16 or config.select_block > 128:
        return (
            "takes selection blocks that are multiples of 16 up to 128, "
            f"got {config.select_block}"
        )
    if problem.S > LONGEST:
        return f"takes up to {LONGEST} keys, got {problem.S}"
    keys = max(
        config.select_block * (2 * problem.D + problem.Dv) + 64 * max(problem.D, problem.Dv),
        (config.select_block + 64) * (problem.D + problem.Dv),  # gradients
    )
    tokens = 64 // group
    lists = tokens * config.num_selected * (1 + -(-tokens // 32))
    if 2 * keys + 4 * lists > SMEM_BUDGET:
        return (
            f"keeps {2 * keys + 4 * lists} bytes of keys and lists in shared memory, "
            f"which has {SMEM_BUDGET}"
        )
    if config.num_selected > 64:
        return f"takes up to 64 selected blocks, got {config.num_selected}"
    return None
