"""Selected attention, forward: tiles of queries walk over their block lists.

Algorithm: FlashAttention's online softmax, O = softmax(scale Q K^T) V; per block of the list

    S = Q K^T [64, block],  m' = max(m, max_j c S),  P = 2^(c S - m')       c = scale * log2(e)
    O = O * 2^(m - m') + P V                                                as softmax.py

in which P = 0 and m' = m for the rows of tokens that did not select the block. At the end
out = gate * O / l + added.

Loop order: query-stationary, one tile a CTA (`selected_walk.py`). Tiles: 64 rows x one
selection block; by default keys in two stages, values in one.

Bound: L2 to shared memory, which reads the blocks of a tile's list once. Floors at B=1 H=64
Hkv=4 D=Dv=128 T=65536 n=16 on an H100: 2.2 TFLOP = 2.2 ms; query and output once 0.64 ms; the
lists are 108 GB on random selections, 14 ms at the 7.7 TB/s of the copies alone.
"""

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import softmax
from kernels_pallas.mosaic.operands import LOG2E, across
from kernels_pallas.mosaic.row_io import TileRows
from kernels_pallas.mosaic.selected_walk import SelectedWalk, Work


def build(kernel: Kernel):
    """The body of `specs.selected.forward`."""
    spec = kernel.spec
    walk = SelectedWalk(spec, {"query_tile": spec.D}, spec.Dv)
    buffers, tile = walk.buffers, spec.tile
    tile_rows = TileRows(tile.tokens, tile.group, tile.group, bool(spec.interpret))
    c, dtype = spec.scale * LOG2E, jnp.dtype(spec.dtype)

    def body(refs):
        def step(block, state):
            key, value = (refs.key_ring, block.key_stage), (refs.value_ring, block.value_stage)
            plgpu.barrier_wait(refs.key_ready.at[block.key_stage])
            scores, _ = buffers.products(((refs.query_tile, 0), key))  # [64, block]
            block.refill_key()
            p, state = softmax.online_softmax(state, scores, c, block.visible, block.member)
            plgpu.barrier_wait(refs.value_ready.at[block.value_stage])
            (acc,) = buffers.add_products((state.acc, p.astype(dtype), value))  # [64, Dv]
            block.refill_value()
            return state._replace(acc=acc)

        def work(at):
            def finish(state):
                inverse, lse = softmax.normalizer(state)  # [64]
                rows = at.b, at.index * tile.tokens, at.kv_head * tile.group, refs.sizes.T
                tile_rows.put(refs.lse, lse, *rows)
                if spec.gated:
                    inverse *= tile_rows.values(refs.gate, *rows)
                return state.acc * across(inverse, state.acc.shape)

            return Work(softmax.initial_state(spec.Dv), step, finish)

        walk.run(refs, [refs.query], refs.out, work)

    return walk.build(kernel, body)
