"""Computes the statistics of FlashAttention's backward preprocess: delta = rowsum(dO * O) - dlse
and shift = lse * log2(e) - log2|gate|. The delta and the shift of a row are stored with the bounds
of the row's keys, in the layout that the backward kernels read (`specs/bwd_preprocess.py`).
`combine.py` computes rowsum(dO * O), which is also the gradient of the gate.

There is no loop, since a lane computes one row. A warp computes 32 adjacent rows of the query
tiles.
Tile: 128 rows per CTA of four warps; no shared memory. Bound: bandwidth. Per row, 12 to 20
bytes are read and 16 bytes are written.
"""

import math
from typing import Any

from kernels_pallas.mosaic.warp_kernel import WARPS, warp_kernel
from kernels_pallas.specs.bwd_preprocess import RowStats
from kernels_pallas.specs.tile import LANES, LOG2E, ROW_STATS


def write_row(warp: Any, spec: RowStats, sizes, refs) -> None:
    """Write the statistics of one row per lane.

    `refs.row` is `b * Hkv + g` for batch row `b` and key/value head `g`.
    """
    head = refs.row
    place = (refs.group * WARPS + warp.warp()) * LANES + warp.lane()
    exists = place < sizes.tiles * spec.rows
    tile, row = place // spec.rows, place % spec.rows
    token = tile * spec.tokens + row // spec.group
    is_query = (row < spec.tokens * spec.group) & (token < sizes.T)
    token = warp.smaller(token, sizes.T - 1)
    b, g = head // spec.Hkv, head % spec.Hkv
    query_head = g * spec.group + row % spec.group

    def of_head(source):
        """Load this row's float32 value from `source` `[B, T, H]`."""
        at = warp.element(source, (b * sizes.T + token, 4 * spec.H), (query_head, 4))
        return warp.real(warp.fetch(at))

    lse, delta = of_head(refs.lse), of_head(refs.delta)

    def key_of(source):
        """Load the int32 number of this row's token.

        Float32 represents the number exactly, since lengths are at most `capability.LONGEST`.
        """
        key = warp.fetch_int(source, b * sizes.T + token)
        return warp.bits(warp.floating(key))

    key_end = key_of(refs.key_end)
    first_key = key_of(refs.first_key) if spec.interval else warp.word(0)
    shift = warp.bits(lse * warp.real(warp.word(warp.integer(LOG2E))))
    if spec.gated:
        gate = warp.bits(of_head(refs.gate))
        size = warp.log2(warp.real(gate & 0x7FFFFFFF))
        shift = warp.bits(warp.real(shift) - size)
        signed = (shift & ~1) | warp.number(gate < 0)
        # The last bit would turn infinity into NaN if the gate is 0. (A gate that is not finite has
        # gradients that are not finite.)
        shift = warp.where(warp.same(shift, warp.integer(math.inf)), shift, signed)
    else:
        shift = shift & ~1
    if spec.lse_grad:
        delta = delta - of_head(refs.dlse)  # d lse / dS = P, so P * dlse is added to dS
    # Queries that see no key and padding rows may have NaN, which must not reach a sum.
    sees = is_query & warp.different(warp.bits(lse), warp.integer(-math.inf))
    shift_of_none = warp.where(is_query, warp.integer(math.inf), 0)
    columns = shift, warp.bits(delta), first_key, key_end
    lead = head * (sizes.tiles * spec.rows) + place, ROW_STATS * 4
    for i, x in enumerate(columns):
        x = warp.where(sees, x, 0 if i else shift_of_none)
        warp.put(warp.element(refs.row_stats, lead, (warp.word(i), 4)), x, exists)


row_stats = warp_kernel(write_row)  # the body of `specs.bwd_preprocess.row_stats`
