"""Selected attention, forward: tiles of queries walk over their block lists.

Algorithm: FlashAttention's online softmax, O = softmax(scale Q K^T) V (`tile_steps.forward`), in
which P = 0 and the maximum stays for the rows of tokens that did not select the block.

Loop order: query-stationary, one tile a CTA (`selected_walk.py`), S of the next block beside P V
of this one where registers hold both. Tiles: 64 rows x one selection block; stages:
`specs.selected.forward_stages`.

Bound: the latency of a block's steps (wait for the keys, S, softmax), and on random selections
L2 to shared memory, which reads the blocks of a tile's list once (docs/kernels/selected.md).
Floors at B=1 H=64 Hkv=4 D=Dv=128 T=65536 n=16 on an H100: 2.2 TFLOP = 2.2 ms; query and output
once 0.64 ms; the lists are 108 GB on random selections, 13 ms at 8.3 TB/s.
"""

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import tile_steps
from kernels_pallas.mosaic.selected_walk import SelectedWalk


def build(kernel: Kernel):
    """The body of `specs.selected.forward`."""
    spec = kernel.spec
    walk = SelectedWalk(spec, {"query_tile": spec.D}, spec.Dv, overlap_pv=spec.overlap_pv)

    def body(refs):
        mainloop_of = lambda at: tile_steps.forward(spec, walk.buffers, refs, at)
        walk.run(refs, [refs.query], refs.out, mainloop_of)

    return walk.build(kernel, body)
