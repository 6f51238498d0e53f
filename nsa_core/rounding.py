"""Rounds tokens to fp8 for both frameworks, as float8_e4m3fn with a float32 scale per token and
head.

    scale = max |x| / 448        code = e4m3(x 448 / max |x|)        x ~ code * scale

e4m3 has 3 mantissa bits. The largest value of e4m3 is 448, and its smallest positive value is 2^-9.
The scale maps the largest element of a row to 448, which is exact except for the rounding of
float32. The error of every other element x is bounded:

    |code * scale - x| <= max(2^-4 |x|, 2^-10 scale)

The scale of a row of zeros is not 0, so that no division by 0 occurs. If one element of a row
is not finite, no element of the row is finite.
"""

from typing import Any

from nsa_core.array_ops import ArrayOps

DTYPE = "float8_e4m3fn"
LARGEST = 448.0
LEAST = 1e-30  # lower bound of a row's maximum, so that 448 / LEAST is finite
# Bounds of |token - read token|, relative to the read token and to the scale. These bounds cover
# rounding to e4m3 (2^-4 and 2^-10) and to 16 bits.
NEAR, LEAST_NEAR = 2**-4 + 2**-7, 2**-9


def rounded(ops: ArrayOps, x: Any) -> tuple[Any, Any]:
    """Return the codes, in the shape of `x`, and one scale per row of the last axis."""
    x = ops.to_float32(x)
    largest = ops.xp.clip(ops.xp.amax(ops.xp.abs(x), -1), min=LEAST)
    # A single division, since torch computes a number divided by a tensor as a product with the
    # reciprocal.
    factor = ops.xp.full_like(largest, LARGEST) / largest
    codes = ops.cast(x * factor[..., None], getattr(ops.xp, DTYPE))
    return codes, largest * (1 / LARGEST)


def is_of(ops: ArrayOps, x: Any, found: Any, scale: Any) -> Any:
    """Return whether each token of `x` may have been rounded to `found`, which was read from codes
    and scale. The result is True if no element differs by much more than the rounding error. If the
    result is True, the token of `x` may replace the token that was read, even if `x` has a token of
    another row.
    """
    off = ops.xp.abs(ops.to_float32(x) - ops.to_float32(found))
    most = ops.xp.abs(ops.to_float32(found)) * NEAR + scale[..., None] * LEAST_NEAR
    return (off <= most).all(-1)


def restored(ops: ArrayOps, codes: Any, scale: Any, dtype: Any) -> Any:
    """Compute values from codes and scales, in the dtype `dtype` of `ops.xp`."""
    return ops.cast(ops.to_float32(codes) * scale[..., None], dtype)
