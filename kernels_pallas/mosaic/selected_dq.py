"""dq of selected attention: tiles of queries walk over their block lists.

Algorithm: FlashAttention's backward with the queries standing still (`tile_steps.dq`). Rows of
tokens that did not select the block have shift = +inf, so P = 0.

Loop order: query-stationary, one tile a CTA (`selected_walk.py`). Tiles: 64 rows x one
selection block; two stages of keys and of values where two CTAs then fit on an SM
(`specs/selected.py`).

Bound, as forward: the latency of a block's steps, and L2 to shared memory, which reads the blocks
of a tile's list once. Floors at B=1 H=64 Hkv=4 D=Dv=128 T=65536 n=16 on an H100: 3.3 TFLOP = 3.3
ms; the lists are 108 GB on random selections, 13 ms at 8.3 TB/s.
"""

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import tile_steps
from kernels_pallas.mosaic.selected_walk import SelectedWalk


def build(kernel: Kernel):
    """The body of `specs.selected.dq`."""
    spec = kernel.spec
    walk = SelectedWalk(spec, {"query_tile": spec.D, "do_tile": spec.Dv}, spec.D)

    def body(refs):
        mainloop_of = lambda at: tile_steps.dq(spec, walk.buffers, refs, at, spec.stats_tile[0])
        walk.run(refs, [refs.query, refs.do], refs.dq, mainloop_of)

    return walk.build(kernel, body)
