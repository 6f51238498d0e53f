"""Interval attention, forward: the compressed and the sliding branch.

Algorithm: FlashAttention's online softmax, O = softmax(scale Q K^T) V; per block of keys

    S = Q K^T [64, block],  P = 2^(c S - m),  O += P V      formulas: softmax.py

Loop order: query-stationary, persistent, two computing warpgroups and a copying one
(`interval_walk.py`). Tiles: 64 rows x 128 keys a warpgroup, two stages; the widest heads take
64 keys (`specs/interval.py`).

Bound: compute. Floors at B=1 H=64 Hkv=4 D=Dv=128 T=65536 on an H100 (989 TFLOP/s, 3.35 TB/s):
compressed 4.40 TFLOP = 4.4 ms, sliding 1.10 TFLOP = 1.1 ms; query and output once, 2.1 GB =
0.64 ms.
"""

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import softmax
from kernels_pallas.mosaic.interval_walk import IntervalWalk, Work
from kernels_pallas.mosaic.operands import LOG2E, across
from kernels_pallas.mosaic.row_io import TileRows


def build(kernel: Kernel):
    """The body of `specs.interval.forward`."""
    spec = kernel.spec
    walk = IntervalWalk(spec, {"query_tile": spec.D}, spec.Dv, registers=(232, 40))
    buffers, tile = walk.buffers, spec.tile
    tile_rows = TileRows(tile.tokens, tile.group, tile.group, bool(spec.interpret))
    c, dtype = spec.scale * LOG2E, jnp.dtype(spec.dtype)

    def body(refs):
        def work(at):
            def step(block, state):
                stage = block.stage
                plgpu.barrier_wait(refs.key_ready.at[stage])
                scores, _ = buffers.products(((refs.query_tile, at.wg), (refs.key_ring, stage)))
                plgpu.barrier_arrive(refs.key_free.at[stage])
                p, state = softmax.online_softmax(state, scores, c, block.visible())
                plgpu.barrier_wait(refs.value_ready.at[stage])
                (acc,) = buffers.add_weighted(
                    (state.acc, p.astype(dtype), (refs.value_ring, stage))
                )
                plgpu.barrier_arrive(refs.value_free.at[stage])
                return state._replace(acc=acc)

            def finish(state):
                inverse, lse = softmax.normalizer(state)
                rows = at.b, at.index * tile.tokens, at.kv_head * tile.group, refs.sizes.T
                tile_rows.put(refs.lse, lse, *rows)
                if spec.gated:
                    inverse *= tile_rows.values(refs.gate, *rows)
                return state.acc * across(inverse, state.acc.shape)

            return Work(softmax.initial_state(spec.Dv), step, finish)

        walk.run(refs, [refs.query], refs.out, work)

    return walk.build(kernel, body)
