"""Interval attention, forward: the compressed and the sliding branch.

Algorithm: FlashAttention's online softmax, O = softmax(scale Q K^T) V; per block of keys

    S = Q K^T [64, block],  P = 2^(c S - m),  O += P V      formulas: softmax.py

Loop order: query-stationary, persistent, two computing warpgroups and a copying one
(`interval_walk.py`), S of the next block beside P V of this one. Tiles: 64 rows x 128 keys a
warpgroup, two or three stages; wide heads take 64 keys, and a window has blocks that it fills
(`specs/interval.py`).

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
    walk = IntervalWalk(spec, {"query_tile": spec.D}, spec.Dv, registers=(232, 40), ahead=True)
    buffers, tile = walk.buffers, spec.tile
    tile_rows = TileRows(tile.tokens, tile.group, tile.group, bool(spec.interpret))
    c, dtype = spec.scale * LOG2E, jnp.dtype(spec.dtype)

    def body(refs):
        def work(at):
            def attend(block, before, state):
                stage, acc = block.stage, state.acc
                plgpu.barrier_wait(refs.key_ready.at[stage])
                key = refs.key_ring, stage
                scores = buffers.start_product((refs.query_tile, at.wg), key)
                if before is not None:
                    acc = start_multiply(before, acc)
                (scores,) = buffers.finish(scores, running=0 if before is None else 1)
                plgpu.barrier_arrive(refs.key_free.at[stage])
                p, row_max = softmax.block_softmax(state.row_max, scores, c, block.visible())
                if before is not None:
                    acc = finish_multiply(before, acc)
                state = softmax.rescaled(state._replace(acc=acc), row_max, p)
                # Converted before the wait, P would serialize the products (`wgmma.py`).
                return state, p.astype(dtype)

            def start_multiply(before, acc):
                plgpu.barrier_wait(refs.value_ready.at[before.stage])
                return buffers.start_sum(acc, before.matrix, (refs.value_ring, before.stage))

            def finish_multiply(before, acc):
                (acc,) = buffers.finish(acc)
                plgpu.barrier_arrive(refs.value_free.at[before.stage])
                return acc  # [64, Dv]

            def multiply(factor, state):
                acc = finish_multiply(factor, start_multiply(factor, state.acc))
                return state._replace(acc=acc)

            def finish(state):
                inverse, lse = softmax.normalizer(state)
                rows = at.b, at.index * tile.tokens, at.kv_head * tile.group, refs.sizes.T
                tile_rows.put(refs.lse, lse, *rows)
                if spec.gated:
                    inverse *= tile_rows.values(refs.gate, *rows)
                return state.acc * across(inverse, state.acc.shape)

            return Work(softmax.initial_state(spec.Dv), attend, multiply, finish)

        walk.run(refs, [refs.query], refs.out, work)

    return walk.build(kernel, body)
