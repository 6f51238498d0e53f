"""Defines tiles of query rows, and the constants that kernels and descriptions share.

A tile has up to 64 rows, for `64 // G` tokens times the `G` query heads of one key/value head. Row
`token * G + head` is one head of a token, so padding heads have no rows.
"""

import dataclasses
import math
from functools import cached_property
from typing import Any

from kernels_pallas.kernel import Array, float32

LOG2E = math.log2(math.e)
ROWS = 64  # the size M of every wgmma
SMS = 132  # number of SMs of an H100 SXM; with fewer SMs, some CTAs run one after the other
LANES = 32  # lanes per warp, and bits per word
ROW_STATS = (
    4  # statistics per query row for the backward pass: shift, delta, first_key, key_end
)
ROW_STATS_MIN_ROWS = 8  # rows whose statistics are 128 bytes, the minimum size of a TMA copy
LANE_COPY_HEADS = 4  # groups of up to 4 heads, which would start too many TMA copies
# int32 per row of the table of work items: 32 bytes, so that no row crosses a sector
WORK_ITEM_INTS = 8
INTERVAL_ITEM_INTS = 16  # int32 per row of the table of work items of intervals
SMEM_BYTES = 227 * 1024  # maximum shared memory per CTA
SMEM_BUDGET = 224 * 1024  # the part of `SMEM_BYTES` for arrays; the rest is for barriers
SMEM_HALF = 112 * 1024  # shared memory for the arrays of each of two CTAs on one SM
SMEM_THIRD = 74 * 1024  # shared memory for the arrays of each of three CTAs on one SM
SELECTED = 64  # maximum number of blocks per token
WARPS = 4  # warps of a CTA with one warpgroup, the minimum that Mosaic launches


@dataclasses.dataclass(frozen=True)
class Tile:
    """A tile of query rows: `tokens` tokens times `group` query heads in `rows` rows, with
    columns in slabs of `slab`.
    """

    group: int
    slab: int
    rows: int = ROWS

    @cached_property
    def tokens(self) -> int:
        """The number of tokens of one TMA copy, which must move a multiple of 128 bytes. If no
        number of tokens that fits in the tile has a multiple of 128 bytes, the result is 0.
        """
        rows = 128 // (2 * self.slab)  # number of rows whose columns in a slab have 128 bytes
        multiple = rows // math.gcd(rows, self.group)
        return self.rows // self.group // multiple * multiple

    @cached_property
    def used(self) -> int:
        """The number of rows that are query heads."""
        return self.tokens * self.group


def gathered_tile(group: int, slab: int) -> Tile:
    """Return the tile with the smallest number of rows, at least 16, that holds the tokens of a
    TMA copy.
    """
    tiles = (Tile(group, slab, rows) for rows in (16, 32, ROWS))
    return next((tile for tile in tiles if tile.tokens), Tile(group, slab))


def cdiv(a: Any, b: int) -> Any:
    """Return `ceil(a / b)` of integers, words of a kernel or arrays of integers."""
    return (a + (b - 1)) // b


def parts_of_block(block: int, entries: int) -> int:
    """Return the number of parts into which kernels split each of a token's `entries` selection
    blocks. A block of 128 keys is split in two parts, so that an SM holds more CTAs and dS can be
    stored.
    """
    return 2 if block == 2 * ROWS and 2 * entries <= SELECTED else 1


def warp_grid(rows: int, warps: int) -> tuple[int, int]:
    """Return the grid for `warps` warps in each of `rows` rows. The grid is the number of rows
    and the number of CTAs per row. The last CTA of a row may have warps without work.
    """
    return rows, cdiv(warps, WARPS)


def slab_width(*widths: int) -> int:
    """Return the number of columns of a slab. All `widths` are multiples of the slab's width.

    Raises:
      ValueError: a width is no multiple of 16.
    """
    common = math.gcd(*widths)
    if common % 16:
        raise ValueError(f"widths must be multiples of 16, got {widths}")
    return min(64, common & -common)  # the largest power of two that divides all widths


def copied_by_lanes(group: int, slab: int) -> bool:
    """Return whether the rows of single tokens are copied by lanes (`mosaic/row_copies.py`)."""
    return group <= LANE_COPY_HEADS and slab == 64


def row_stats(spec: Any, tokens: int, rows: int) -> Array:
    """Return the statistics of query rows, `[B, Hkv, tiles, rows, 4]`, by tiles of `tokens` tokens.

    Args:
      spec: An object with `B`, `T` and `Hkv`.
      tokens: Number of tokens per tile.
      rows: Number of rows per tile, at least `tokens * G`.
    """
    return float32(spec.B, spec.Hkv, cdiv(spec.T, tokens), rows, ROW_STATS)
