"""Gradient of the query of interval attention: the compressed and the sliding branch.

Algorithm: FlashAttention's backward with the queries standing still; per block of keys

    S = Q K^T, dP = dO V^T [64, block],  dS = |g| P * (dP - delta),  dQ += dS K

and dQ is scaled, and takes the gate's sign, at the end (formulas: `softmax.py`). |g| P is
computed again from `shift`.

Loop order: query-stationary, persistent, two computing warpgroups and a copying one
(`interval_walk.py`). Tiles: 64 rows x 64 keys a warpgroup; 3 stages while D + Dv <= 256, then
2, then 1 (`specs/interval.py`).

Bound: compute, three products where forward has two. Floors at B=1 H=64 Hkv=4 D=Dv=128 T=65536
on an H100 (989 TFLOP/s): compressed 6.6 TFLOP = 6.7 ms, sliding 1.65 TFLOP = 1.7 ms.
"""

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import softmax
from kernels_pallas.mosaic.interval_walk import IntervalWalk, Work
from kernels_pallas.mosaic.operands import LOG2E, across
from kernels_pallas.mosaic.row_io import GatheredRows, TileRows


def build(kernel: Kernel):
    """The body of `specs.interval.dq`."""
    spec = kernel.spec
    registers = (240, 24) if spec.D + spec.Dv > 256 else (232, 40)
    rows = {"query_tile": spec.D, "do_tile": spec.Dv}
    walk = IntervalWalk(spec, rows, spec.D, registers)
    buffers, tile, interpret = walk.buffers, spec.tile, bool(spec.interpret)
    tile_rows = TileRows(tile.tokens, tile.group, tile.group, interpret)
    gathered_rows = GatheredRows(tile.group, interpret)
    c, dtype = spec.scale * LOG2E, jnp.dtype(spec.dtype)

    def body(refs):
        def work(at):
            token = tile_rows.token(at.index * tile.tokens, refs.sizes.T)  # [64]
            units = tile.tokens, refs.sizes.stats_units
            stats = gathered_rows.softmax_stats(refs.row_stats, at.b, at.kv_head, token, units)

            def attend(block, _, acc):
                stage = block.stage
                plgpu.barrier_wait(refs.key_ready.at[stage])
                plgpu.barrier_wait(refs.value_ready.at[stage])
                query, do = (refs.query_tile, at.wg), (refs.do_tile, at.wg)
                scores = buffers.start_product(query, (refs.key_ring, stage))  # [64, block]
                dp = buffers.start_product(do, (refs.value_ring, stage))
                scores, dp = buffers.finish(scores, dp)
                plgpu.barrier_arrive(refs.value_free.at[stage])
                ds = softmax.softmax_backward(scores, dp, c, stats, block.visible())
                return acc, ds.astype(dtype)

            def multiply(factor, acc):
                stage, ds = factor
                acc = buffers.start_sum(acc, ds, (refs.key_ring, stage))
                (acc,) = buffers.finish(acc)
                plgpu.barrier_arrive(refs.key_free.at[stage])
                return acc  # [64, D]

            def finish(acc):
                return acc * across(stats.sign * spec.scale, acc.shape)

            return Work(softmax.zeros(spec.D), attend, multiply, finish)

        walk.run(refs, [refs.query, refs.do], refs.dq, work)

    return walk.build(kernel, body)
