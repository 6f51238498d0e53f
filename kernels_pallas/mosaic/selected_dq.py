"""dq of selected attention: tiles of queries walk over their block lists.

Algorithm: FlashAttention's backward with the queries standing still; per block of the list

    S = Q K^T, dP = dO V^T [64, block],  dS = |g| P * (dP - delta),  dQ += dS K

and dQ is scaled, and takes the gate's sign, at the end (formulas: `softmax.py`). Rows of tokens
that did not select the block have shift = +inf, so P = 0.

Loop order: query-stationary, one tile a CTA (`selected_walk.py`). Tiles: 64 rows x one
selection block; two stages of keys and of values where two CTAs then fit on an SM
(`specs/selected.py`).

Bound, as forward: L2 to shared memory, which reads the blocks of a tile's list once. Floors at
B=1 H=64 Hkv=4 D=Dv=128 T=65536 n=16 on an H100: 3.3 TFLOP = 3.3 ms; the lists are 108 GB on
random selections, 14 ms at the 7.7 TB/s of the copies alone.
"""

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import softmax
from kernels_pallas.mosaic.operands import LOG2E, across
from kernels_pallas.mosaic.row_io import GatheredRows, TileRows
from kernels_pallas.mosaic.selected_walk import SelectedWalk, Work


def build(kernel: Kernel):
    """The body of `specs.selected.dq`."""
    spec = kernel.spec
    walk = SelectedWalk(spec, {"query_tile": spec.D, "do_tile": spec.Dv}, spec.D)
    buffers, tile, interpret = walk.buffers, spec.tile, bool(spec.interpret)
    tile_rows = TileRows(tile.tokens, tile.group, tile.group, interpret)
    gathered_rows = GatheredRows(tile.group, interpret)
    c, dtype = spec.scale * LOG2E, jnp.dtype(spec.dtype)

    def body(refs):
        def work(at):
            token = tile_rows.token(at.index * tile.tokens, refs.sizes.T)  # [64]
            units = spec.stats_unit[0], refs.sizes.stats_units
            stats = gathered_rows.softmax_stats(refs.row_stats, at.b, at.kv_head, token, units)

            def step(block, acc):
                key = refs.key_ring, block.key_stage
                value = refs.value_ring, block.value_stage
                plgpu.barrier_wait(refs.key_ready.at[block.key_stage])
                plgpu.barrier_wait(refs.value_ready.at[block.value_stage])
                scores, dp, _ = buffers.products(
                    ((refs.query_tile, 0), key), ((refs.do_tile, 0), value)
                )  # [64, block]
                block.refill_value()
                shift = jnp.where(block.member, stats.shift, jnp.inf)
                member_stats = stats._replace(shift=shift)
                ds = softmax.softmax_backward(scores, dp, c, member_stats, block.visible)
                (acc,) = buffers.add_products((acc, ds.astype(dtype), key))
                block.refill_key()
                return acc  # [64, D]

            def finish(acc):
                return acc * across(stats.sign * spec.scale, acc.shape)

            return Work(softmax.zeros(spec.D), step, finish)

        walk.run(refs, [refs.query, refs.do], refs.dq, work)

    return walk.build(kernel, body)
