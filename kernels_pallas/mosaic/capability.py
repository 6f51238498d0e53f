"""Checks the limits of the Mosaic kernels. The checks import no kernel."""

import contextlib
import contextvars
import functools
from typing import Any

from kernels_pallas.specs.tile import (
    ROWS,
    SELECTED,
    SMEM_BUDGET,
    Tile,
    parts_of_block,
    slab_width,
)

HOPPER = (9, 0)
WIDTH = 256  # maximum of D and of Dv
BLOCK = 128  # maximum number of keys of a selection block
GRID_ROWS = 2**16 - 1  # CUDA's limit for the second axis of a grid
FP8_STEP = 32  # number of numbers in e4m3 over which one instruction of a product sums
# maximum number of keys, since the backward pass stores the bounds of a row's keys in float32
LONGEST = 2**24

# Parameters of Pallas' GPU interpreter while `interpreted`, otherwise False.
interpret: contextvars.ContextVar[Any] = contextvars.ContextVar("interpret", default=False)


@contextlib.contextmanager
def interpreted(params):
    """Run kernels in Pallas' GPU interpreter, on any device (tests)."""
    token = interpret.set(params)
    try:
        yield
    finally:
        interpret.reset(token)


def why_not(problem: Any) -> str | None:
    """Return the reason why no Mosaic kernel can run `problem`, or None. If the forward pass
    can run, the backward pass can run too.
    """
    if not interpret.get():
        if problem.platform not in ("gpu", "cuda"):
            return f"needs a Hopper GPU, got {problem.platform}"
        if problem.capability != HOPPER:
            return f"needs compute capability {HOPPER}, got {problem.capability}"
    if problem.dtype not in ("bfloat16", "float16"):
        return f"supports only bfloat16 and float16, got {problem.dtype}"
    if problem.S > LONGEST:
        return f"supports up to {LONGEST} keys, got {problem.S}"
    if problem.B * problem.Hkv > GRID_ROWS:
        return f"supports up to {GRID_ROWS} rows of B Hkv, got {problem.B * problem.Hkv}"
    group, config = problem.H // problem.Hkv, problem.config
    in_fp8 = config.compute_dtype is not None and problem.step not in ("compressed", "scores")
    if in_fp8 and (reason := _fp8_why_not(problem)):
        return f"compute_dtype={config.compute_dtype!r} {reason}"
    return _why_not(group, problem.D, problem.Dv, config.select_block, config.num_selected)


def _fp8_why_not(problem: Any) -> str | None:
    """Return the reason why products in e4m3 do not support `problem`, or None."""
    if problem.requires_grad:
        return "has no gradient; compute under torch.no_grad(), or leave compute_dtype out to train"
    if problem.cached:
        return "supports only whole sequences, got a cache"
    for name, width in (("D", problem.D), ("select_block", problem.config.select_block)):
        if width % FP8_STEP:
            return f"needs {name} to be a multiple of {FP8_STEP}, got {width}"
    return None


@functools.cache  # called for every step of every call
def _why_not(group: int, D: int, Dv: int, block: int, num_selected: int) -> str | None:
    """Check the sizes that are not lengths, and return the reason why no Mosaic kernel supports
    them, or None.
    """
    if group > ROWS:
        return f"supports up to {ROWS} query heads per key/value head, got {group}"
    for name, width in (("D", D), ("Dv", Dv)):
        if width % 16 or width > WIDTH:
            return f"supports widths that are multiples of 16 up to {WIDTH}, got {name}={width}"
    if block % 16 or block > BLOCK:
        return f"supports selection blocks that are multiples of 16 up to {BLOCK}, got {block}"
    if num_selected > SELECTED:
        return f"supports up to {SELECTED} selected blocks, got {num_selected}"
    parts = parts_of_block(block, num_selected)
    block, num_selected = block // parts, num_selected * parts
    slab = slab_width(D, Dv, block)
    if not Tile(group, slab).tokens:
        least = next(slab for slab in (32, 64) if Tile(group, slab).tokens)
        return (
            f"needs D, Dv and select_block to be multiples of {least} if {group} query "
            f"heads share a key/value head, got D={D}, Dv={Dv}, select_block={block}"
        )
    needed = selected_bytes(D, Dv, block, num_selected, Tile(group, slab))
    if needed > SMEM_BUDGET:
        return (
            "needs D, Dv, select_block and num_selected that fit in "
            f"{SMEM_BUDGET} bytes of shared memory, got {needed}"
        )
    return None


def selected_bytes(D: int, Dv: int, block: int, num_selected: int, tile: Tile) -> int:
    """Return the bytes of shared memory that the kernels of the selected branch need.

    The result is the larger number of forward and dq. The shared memory holds the query rows, keys,
    values and block list of a tile. The kernels of other branches never need more than
    `SMEM_BUDGET` bytes.
    """
    forward = ROWS * max(D, Dv) + block * (2 * D + Dv)
    dq = ROWS * (D + Dv) + block * (D + Dv)
    words = 1 + -(-tile.tokens // 32)  # words per block: its first key, and a bit per token
    return 2 * max(forward, dq) + 4 * words * tile.tokens * num_selected
