"""Converts numbers to e4m3 for operands of products (`wgmma.py`). An int16 holds a pair of numbers.

In a left operand, a lane has four adjacent columns of a row. In the result of a product, a lane has
two adjacent columns, and two more at a distance of eight. The columns over which a product sums are
permuted in groups of 16, in both operands. The permutation makes a result a left operand without
exchanges between lanes. Column 8 j + 2 t + e of a group is stored at 4 t + 2 j + e, for t < 4 and
j, e < 2.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from kernels_pallas.mosaic import warp, wgmma
from kernels_pallas.specs.fp8 import LARGEST

MATRIX = plgpu.Layout.WGMMA


def pairs(x, interpret):
    """Round float32 `[64, n]` to e4m3, and return int16 `[64, n / 2]` in the order of operands."""
    rows, columns = x.shape
    if interpret:
        x = x.reshape(rows, -1, 2, 4, 2).swapaxes(2, 3).reshape(rows, -1, 2)
        x = jnp.clip(x, -LARGEST, LARGEST).astype(jnp.float8_e4m3fn)
        return lax.bitcast_convert_type(x, jnp.int16)

    def pack(x):
        # For each eight columns: two of a row, then two of the row eight below.
        values, words = wgmma.registers(x), []
        for first in range(0, len(values), 8):
            for row in range(2):
                four = [values[first + 4 * j + 2 * row + e] for j in range(2) for e in range(2)]
                words.append(_word(four))
        return wgmma.array_of_pairs(words, ir.IntegerType.get_signless(16))

    result = plgpu.ShapeDtypeStruct((rows, columns // 2), jnp.int16, layout=MATRIX)
    return warp.each(pack, [], [], [x], MATRIX, result=result)


def numbers(x):
    """Convert pairs `[.., n]` to float32 `[.., 2 n]` (interpret mode)."""
    x = lax.bitcast_convert_type(x, jnp.float8_e4m3fn)
    return x.reshape(*x.shape[:-2], -1).astype(jnp.float32)


def _word(four):
    """Return four float32 in a word, rounded and clamped to the range."""
    text = (
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
        "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }"
    )
    return llvm.inline_asm(wgmma.i32(), four, text, "=r,f,f,f,f", asm_dialect=0)
