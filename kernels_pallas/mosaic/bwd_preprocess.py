"""delta = gate * rowsum(dO * O) - dlse, lse_log2 = lse * log2(e): FlashAttention's preprocess.

Both stand beside the end of a row's keys and its gate, as the backward kernels read them
(`specs/bwd_preprocess.py`). rowsum(dO * O), also the gradient of the gate, is of `combine.py`.

Loop order: no loop; a lane makes one row, a warp 32 neighbouring rows of the query tiles.
Tile: 128 rows a CTA of four warps; no shared memory.
Bandwidth bound: 12 to 20 bytes in and 16 out a row.

Pallas' interpreter runs nothing that is written for a warp: there
`nsa_jax.mosaic_backward` makes the same with array operations.
"""

import functools
import math
from types import SimpleNamespace

from jax import lax

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import warp
from kernels_pallas.mosaic.block_bitmap import LANES
from kernels_pallas.mosaic.refs import build_kernel
from kernels_pallas.specs.bwd_preprocess import RowStats
from kernels_pallas.specs.tile import LOG2E, ROW_STATS

WARPS = 4  # of a CTA


def row_stats(kernel: Kernel):
    """The body of `specs.bwd_preprocess.row_stats`."""
    spec: RowStats = kernel.spec

    def body(refs):
        cta = [lax.axis_index("head"), lax.axis_index("cta")]
        warp.each(functools.partial(write_row, kernel), list(vars(refs).values()), cta)

    return build_kernel(
        kernel,
        body,
        grid=(spec.B * spec.Hkv, -(-spec.tiles * spec.rows // (WARPS * LANES))),
        grid_names=("head", "cta"),
    )


def write_row(kernel: Kernel, *arguments) -> None:
    """A lane writes the statistics of one row.

    Arguments: the arrays of `kernel`; then words: the row of `[B, Hkv]` and the number of the
    CTA.
    """
    spec: RowStats = kernel.spec
    *arrays, head, cta = arguments
    refs = SimpleNamespace(**dict(zip(kernel.names, arrays, strict=True)))
    place = (cta * WARPS + warp.warp()) * LANES + warp.lane()
    exists = place < spec.tiles * spec.rows
    tile, row = place // spec.rows, place % spec.rows
    token = tile * spec.tokens + row // spec.group
    is_query = (row < spec.tokens * spec.group) & (token < spec.T)
    token = warp.smaller(token, spec.T - 1)
    b, g = head // spec.Hkv, head % spec.Hkv
    bytes_of_token = 4 * spec.H
    query_head = g * spec.group + row % spec.group

    def of_head(source):
        """The float32 of this row in `source` `[B, T, H]`."""
        at = (b, spec.T * bytes_of_token), (token, bytes_of_token), (query_head, 4)
        return warp.real(warp.fetch(warp.element(source, *at)))

    lse, delta = of_head(refs.lse), of_head(refs.delta)
    key_end = warp.fetch(warp.element(refs.key_end, (b, 4 * spec.T), (token, 4)))
    gate = warp.integer(1.0)
    if spec.gated:
        gate = warp.bits(of_head(refs.gate))
        delta = warp.real(gate) * delta  # dO_c = g_c dO, so rowsum(dO_c * O_c) = g_c delta_c
    if spec.lse_grad:
        delta = delta - of_head(refs.dlse)  # d lse / dS = P, so P * dlse is added to dS
    # Of a query that sees nothing, and of padding, they may be NaN: none may reach a sum.
    sees = is_query & warp.different(warp.bits(lse), warp.integer(-math.inf))
    lse_log2_of_none = warp.where(is_query, warp.integer(math.inf), 0)
    lse_log2 = lse * warp.real(warp.word(warp.integer(LOG2E)))
    # The end of the keys is exact in a float32: there are at most `capability.LONGEST` keys.
    columns = lse_log2, warp.floating(key_end)
    columns = *(warp.bits(x) for x in columns), gate, warp.bits(delta)
    lead = (head, spec.tiles * spec.rows * ROW_STATS * 4), (place, ROW_STATS * 4)
    for i, x in enumerate(columns):
        x = warp.where(sees, x, 0 if i else lse_log2_of_none)
        warp.put(warp.element(refs.row_stats, *lead, (warp.word(i), 4)), x, exists)
