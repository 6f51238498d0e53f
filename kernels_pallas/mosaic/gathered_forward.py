"""Gathered attention, forward: partial outputs of each token and far block.

Algorithm: a softmax of one block, O_j = softmax(scale Q K_j^T) V_j with its lse_log2, which
`gathered_merge.py` merges:

    S = Q K_j^T [64, block],  P = 2^(c S - m),  O_j = P V_j / l      formulas: softmax.py

Loop order: key-stationary, queries gathered by list (`gathered_walk.py`). Tiles: 64 // G tokens
x G heads, a block of 64 or 128 keys.

Bound: HBM, which writes the partial outputs. Floors at B=1 H=32 Hkv=8 D=Dv=128 T=32768, 13 far
blocks a token, on an H100: 0.45 TFLOP = 0.45 ms; partial outputs are 3.5 GB, written and read 2.1
ms.
"""

import jax.numpy as jnp
from jax import lax

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import softmax
from kernels_pallas.mosaic.gathered_walk import GatheredWalk
from kernels_pallas.mosaic.operands import LOG2E, ROWS, across


def build(kernel: Kernel):
    """The body of `specs.gathered.partials`."""
    spec = kernel.spec
    walk = GatheredWalk(spec, {"query_tile": spec.D}, spec.Dv)
    buffers, gathered_rows = walk.buffers, walk.gathered_rows
    c, dtype = spec.scale * LOG2E, jnp.dtype(spec.dtype)

    def body(refs):
        def store_lse(rows, lse_log2):
            """To `[slot, tile, row of the tile]`, where the row's token stands."""
            slot, tile_tokens = lax.rem(rows.entry, jnp.int32(spec.n)), spec.tile.tokens
            token, tiles = rows.token - rows.segment_token, refs.sizes.tiles
            index = (slot * tiles + lax.div(token, jnp.int32(tile_tokens))) * ROWS
            index += lax.rem(token, jnp.int32(tile_tokens)) * spec.group + gathered_rows.head()
            exists = gathered_rows.in_step(rows.first, rows.end)
            of_head = rows.b, rows.kv_head, spec.n * tiles * ROWS
            gathered_rows.put(refs.partial_lse, lse_log2, *of_head, index, exists)

        def work(rows):
            def compute(scores):
                acc, *state = softmax.initial_state(spec.Dv)
                state = softmax.SoftmaxState(None, *state)
                p, (_, row_max, row_sum) = softmax.online_softmax(state, scores, c)
                acc = buffers.add_product(acc, p.astype(dtype), (refs.value_tile, 0))
                acc *= across(1 / row_sum, acc.shape)  # [64, Dv]
                store_lse(rows, row_max + jnp.log2(row_sum))
                return acc

            return compute

        walk.run(refs, [refs.query], work)

    return walk.build(kernel, body)
