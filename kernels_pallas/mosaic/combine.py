"""The gated sum of the branches' outputs, and its gradient: one pass over memory each.

At B=1 T=65536 H=64 Dv=128 and three branches 4.3 GB, 1.3 ms.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import operands
from kernels_pallas.mosaic.operands import PER_ROW, ROWS
from kernels_pallas.mosaic.row_io import TileRows


@dataclasses.dataclass(frozen=True)
class Combine:
    """The static part of a problem: `count` outputs of `rows` rows."""

    rows: int
    width: int
    count: int
    dtype: str
    interpret: bool | object = False

    @property
    def tiles(self) -> int:
        return -(-self.rows // ROWS)


@functools.cache
def dots(spec: Combine) -> Kernel:
    """Products of the output's gradient with each output, row by row.

    Inputs: the gradient, then `count` outputs, all `[rows, width]`. Outputs: `count` times
    float32 `[1, rows, 1]`.
    """
    buffers, slabs = _buffers(spec)
    of_tile = TileRows(ROWS, 1, 1, bool(spec.interpret))

    def body(*refs):
        arrays, (*found, rows_s, rows_in) = refs[: spec.count + 1], refs[spec.count + 1 :]
        mine = lax.axis_index("tile")
        for i, array in enumerate(arrays):
            _load(buffers, array, mine, rows_s, i, rows_in)
        plgpu.barrier_wait(rows_in.at[0])
        for i in range(spec.count):
            plgpu.barrier_wait(rows_in.at[i + 1])
            total = operands.full((ROWS,), 0.0, PER_ROW)
            for slab in range(slabs):
                grad, out = (buffers.read_keys(rows_s, copy, slab) for copy in (0, i + 1))
                total += (grad * out).sum(axis=1)
            of_tile.put(found[i], total, 0, mine * ROWS, 0)

    inputs, outputs = (_array(spec),) * (spec.count + 1), (_numbers(spec),) * spec.count
    return _kernel("dots", spec, body, inputs, outputs, spec.count + 1)


@functools.cache
def gated_sum(spec: Combine) -> Kernel:
    """Inputs: `count` gates, float32 `[1, rows, 1]`, then as many outputs `[rows, width]`.
    Output: their sum, each times its gate, `[rows, width]`.
    """
    buffers, slabs = _buffers(spec)
    interpret = bool(spec.interpret)
    of_tile = TileRows(ROWS, 1, 1, interpret)

    def body(*refs):
        gates, arrays = refs[: spec.count], refs[spec.count : -3]
        out, rows_s, rows_in = refs[-3:]
        mine = lax.axis_index("tile")
        for i, array in enumerate(arrays):
            _load(buffers, array, mine, rows_s, i, rows_in)
        weights = [of_tile.values(gate, 0, mine * ROWS, 0) for gate in gates]
        for i in range(spec.count):
            plgpu.barrier_wait(rows_in.at[i])
        for slab in range(slabs):
            total = operands.full((ROWS, buffers.slab), 0.0, operands.MATRIX)
            for i, weight in enumerate(weights):
                part = buffers.read_keys(rows_s, i, slab)
                total += part * operands.across(weight, part.shape)
            staged = rows_s.at[0, slab] if interpret else rows_s[0].at[0, slab]
            staged[...] = total.astype(buffers.dtype)
        plgpu.commit_smem()
        here = pl.ds(mine * ROWS, ROWS)
        buffers.store_keys(rows_s, 0, lambda columns: out.at[here, columns])
        plgpu.wait_smem_to_gmem(0)

    inputs = (_numbers(spec),) * spec.count + (_array(spec),) * spec.count
    return _kernel("gated_sum", spec, body, inputs, (_array(spec),), spec.count)


def _buffers(spec):
    tile = operands.Tile(1, operands.slab_width(spec.width))
    buffers = operands.Buffers(jnp.dtype(spec.dtype), tile, bool(spec.interpret))
    return buffers, spec.width // tile.slab


def _load(buffers, array, tile, rows_s, slot, barriers):
    rows = pl.ds(tile * ROWS, ROWS)
    buffers.load_keys(lambda columns: array.at[rows, columns], rows_s, slot, barriers.at[slot])


def _array(spec):
    return jax.ShapeDtypeStruct((spec.rows, spec.width), jnp.dtype(spec.dtype))


def _numbers(spec):
    return jax.ShapeDtypeStruct((1, spec.rows, 1), jnp.float32)


def _kernel(name, spec, body, inputs, outputs, slots):
    buffers, slabs = _buffers(spec)
    call = plgpu.kernel(
        body,
        out_type=outputs,
        grid=(spec.tiles,),
        grid_names=("tile",),
        scratch_types=[
            buffers.ring(slots, ROWS, spec.width),
            plgpu.Barrier(num_arrivals=slabs, num_barriers=slots),
        ],
        compiler_params=operands.PARAMS,
        interpret=spec.interpret,
    )
    return Kernel(name, spec, call, inputs, outputs)
