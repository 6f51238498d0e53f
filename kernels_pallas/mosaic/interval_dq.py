"""Gradient of the query of interval attention: the compressed and the sliding branch.

Algorithm: FlashAttention's backward with the queries standing still (`tile_steps.dq`); |g| P is
computed again from `shift`. One kernel has both branches where there is room for a tile of the
result: Q and dO are read once, and dQ is written once.

Loop order: query-stationary, persistent, two or three consumer warpgroups and a producer
(`interval_walk.py`). Tiles: 64 rows x 64 keys a warpgroup; 3 stages while D + Dv <= 256, then
2, then 1 (`specs/interval.py`).

Bound: compute, three products where forward has two. Floors at B=1 H=64 Hkv=4 D=Dv=128 T=65536
on an H100 (989 TFLOP/s): compressed 6.6 TFLOP = 6.7 ms, sliding 1.65 TFLOP = 1.7 ms.
"""

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import tile_steps
from kernels_pallas.mosaic.interval_walk import IntervalWalk


def build(kernel: Kernel):
    """The body of `specs.interval.dq`."""
    spec = kernel.spec
    rows = {"query_tile": spec.D, "do_tile": spec.Dv}
    walk = IntervalWalk(spec, rows, spec.D)

    def body(refs):
        tokens = spec.tile.tokens
        mainloop_of = lambda refs, at: tile_steps.dq(spec, walk.buffers, refs, at, tokens)
        walk.run(refs, [refs.query, refs.do], refs.dq, mainloop_of)

    return walk.build(kernel, body)
