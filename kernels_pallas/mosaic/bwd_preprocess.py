"""The numbers that gradients need of each query head, four side by side, unit by unit.

`dkv.py` copies them with the queries of a unit, a few neighbouring tokens; the
gradients of the query find theirs among them (`row_io.py`). A lane makes those of a row.

Pallas' interpreter runs nothing that is written for a warp: there `nsa_jax.mosaic_backward` makes
the same.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import operands, warp
from kernels_pallas.mosaic.block_bitmap import LANES
from kernels_pallas.mosaic.operands import LOG2E, ROW_STATS

WARPS = 4  # of a block of threads


@dataclasses.dataclass(frozen=True)
class RowStats:
    """`tokens` and `rows` of a unit: `rows` may be more than its tokens have heads."""

    B: int
    T: int
    H: int
    Hkv: int
    tokens: int
    rows: int
    gated: bool = False
    lse_grad: bool = False

    @property
    def group(self) -> int:
        return self.H // self.Hkv

    @property
    def units(self) -> int:
        return -(-self.T // self.tokens)


@dataclasses.dataclass(frozen=True)
class Row:
    """What a lane does, on the words of `warp.py`."""

    spec: RowStats

    def make(self, lse, dots, last, *refs) -> None:
        """One row; after the arrays of `of_units`, the row of `[B, Hkv]` and the number of a
        block of threads.
        """
        spec, (*refs, found, head, block) = self.spec, refs
        gates = refs.pop(0) if spec.gated else None
        lse_grads = refs.pop(0) if spec.lse_grad else None
        place = (block * WARPS + warp.warp()) * LANES + warp.lane()
        exists = place < spec.units * spec.rows
        unit, row = place // spec.rows, place % spec.rows
        token = unit * spec.tokens + row // spec.group
        there = (row < spec.tokens * spec.group) & (token < spec.T)
        token = warp.smaller(token, spec.T - 1)
        b, g = head // spec.Hkv, head % spec.Hkv
        size = 4 * spec.H
        member = g * spec.group + row % spec.group

        def of_head(array):
            at = (b, spec.T * size), (token, size), (member, 4)
            return warp.real(warp.fetch(warp.element(array, *at)))

        norm, dot = of_head(lse), of_head(dots)
        end = warp.fetch(warp.element(last, (b, 4 * spec.T), (token, 4)))
        gate, offset = warp.integer(1.0), dot
        if gates is not None:
            gate = warp.bits(of_head(gates))
            offset = warp.real(gate) * dot
        if lse_grads is not None:
            offset = offset - of_head(lse_grads)
        # Of what sees nothing, or is padding, they may be NaN.
        sees = there & warp.different(warp.bits(norm), warp.integer(-math.inf))
        nothing = warp.where(there, warp.integer(math.inf), 0)
        numbers = norm * warp.real(warp.word(warp.integer(LOG2E))), warp.floating(end)
        numbers = *(warp.bits(x) for x in numbers), gate, warp.bits(offset)
        lead = (head, spec.units * spec.rows * ROW_STATS * 4), (place, ROW_STATS * 4)
        for i, x in enumerate(numbers):
            x = warp.where(sees, x, 0 if i else nothing)
            warp.put(warp.element(found, *lead, (warp.word(i), 4)), x, exists)


def array(spec, tokens: int, rows: int) -> jax.ShapeDtypeStruct:
    """The output of `of_units`, for a problem with `B`, `T` and `Hkv`."""
    shape = spec.B, spec.Hkv, -(-spec.T // tokens), rows, ROW_STATS
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@functools.cache
def of_units(spec: RowStats) -> Kernel:
    """Inputs, float32 `[B, T, H]` but for the third: the natural log-sum-exp of a branch, -inf
    where a query sees nothing; its output times the gradient; int32 `last` `[B, T]`, the end of
    the keys that a token may see; with `gated` the gate; with `lse_grad` the gradient of the
    log-sum-exp. Output: float32 `[B, Hkv, units, rows, 4]`: log-sum-exp in bits (+inf where a
    row sees nothing), last key + 1, gate or 1, and gate times the product less the gradient of
    the log-sum-exp. Zeros in rows that stand for no query: as these are zero too, they add
    nothing.
    """

    def body(*refs):
        warp.each(Row(spec).make, refs, [lax.axis_index("head"), lax.axis_index("block")])

    shape = jax.ShapeDtypeStruct
    by_head = shape((spec.B, spec.T, spec.H), jnp.float32)
    inputs = by_head, by_head, shape((spec.B, spec.T), jnp.int32)
    inputs += (by_head,) * (spec.gated + spec.lse_grad)
    output = array(spec, spec.tokens, spec.rows)
    call = plgpu.kernel(
        body,
        out_type=(output,),
        grid=(spec.B * spec.Hkv, -(-spec.units * spec.rows // (WARPS * LANES))),
        grid_names=("head", "block"),
        compiler_params=operands.PARAMS,
    )
    return Kernel("numbers", spec, call, inputs, (output,))
