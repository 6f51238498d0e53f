"""Gradient of the query of gathered attention: a partial one of each token and far block.

Algorithm: with the statistics of the whole row, so that partials only have to be added up
(`gathered_merge.py`):

    S = Q K_j^T, dP = dO V_j^T [64, block],  dS = |g| P * (dP - delta),  dQ_j = scale dS K_j

(formulas: `softmax.py`).

Loop order: key-stationary, queries gathered by list (`gathered_walk.py`). Tiles: 64 // G tokens
x G heads, a block of 64 or 128 keys.

Bound: HBM, which writes the partial gradients. Floors at B=1 H=32 Hkv=8 D=Dv=128 T=32768, 13 far
blocks a token, on an H100: 0.67 TFLOP = 0.67 ms; partials are 3.5 GB, written and read 2.1 ms.
"""

import jax.numpy as jnp

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import softmax
from kernels_pallas.mosaic.gathered_walk import GatheredWalk
from kernels_pallas.mosaic.operands import LOG2E, across


def build(kernel: Kernel):
    """The body of `specs.gathered.partial_dq`."""
    spec = kernel.spec
    walk = GatheredWalk(spec, {"query_tile": spec.D, "do_tile": spec.Dv}, spec.D)
    buffers, gathered_rows = walk.buffers, walk.gathered_rows
    c, dtype = spec.scale * LOG2E, jnp.dtype(spec.dtype)

    def body(refs):
        def work(rows):
            stats = gathered_rows.softmax_stats(
                refs.row_stats,
                rows.b,
                rows.kv_head,
                rows.token,
                (spec.stats_tile[0], refs.sizes.stats_tiles),
            )

            def compute(scores, dp):
                acc = softmax.zeros(spec.D)
                ds = softmax.softmax_backward(scores, dp, c, stats)  # [64, block]
                acc = buffers.add_product(acc, ds.astype(dtype), (refs.key_tile, 0))
                return acc * across(stats.sign * spec.scale, acc.shape)  # [64, D]

            return compute

        walk.run(refs, [refs.query, refs.do], work)

    return walk.build(kernel, body)
