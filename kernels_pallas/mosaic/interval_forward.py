"""Interval attention, forward: the compressed and the sliding branch.

Algorithm: FlashAttention's online softmax, O = softmax(scale Q K^T) V (`tile_steps.forward`).

Loop order: query-stationary, persistent, two or three consumer warpgroups and a producer
(`interval_walk.py`), S of the next block beside P V of this one. Tiles: 64 rows x 128 keys a
warpgroup, two or three stages; wide heads take 64 keys, and a window has blocks that it fills
(`specs/interval.py`).

Bound: compute. Floors at B=1 H=64 Hkv=4 D=Dv=128 T=65536 on an H100 (989 TFLOP/s, 3.35 TB/s):
compressed 4.40 TFLOP = 4.4 ms, sliding 1.10 TFLOP = 1.1 ms; query and output once, 2.1 GB =
0.64 ms.
"""

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import tile_steps
from kernels_pallas.mosaic.interval_walk import IntervalWalk


def build(kernel: Kernel):
    """The body of `specs.interval.forward`."""
    spec = kernel.spec
    walk = IntervalWalk(spec, {"query_tile": spec.D}, spec.Dv, overlap_pv=True)

    def body(refs):
        mainloop_of = lambda refs, at: tile_steps.forward(spec, walk.buffers, refs, at)
        walk.run(refs, [refs.query], refs.out, mainloop_of)

    return walk.build(kernel, body)
