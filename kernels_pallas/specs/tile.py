"""How query rows are cut into tiles, and the constants that kernels and descriptions share.

A tile has up to 64 rows: `64 // G` tokens times the `G` query heads of one key/value head, row
`token * G + head`, so no row is wasted on padding heads.
"""

import dataclasses
import functools
import math
from typing import Any

from kernels_pallas.kernel import Array

LOG2E = math.log2(math.e)
ROWS = 64  # the M of every wgmma
SMS = 132  # of an H100 SXM; on fewer, some CTAs take turns
LANES = 32  # of a warp, and bits of a word
ROW_STATS = 4  # of a query row for the backward pass: shift, delta, first_key, key_end
ROW_STATS_MIN_ROWS = 8  # whose statistics are 128 bytes, the least that a TMA copy moves
LANE_COPY_HEADS = 4  # of a group: with so few, too many TMA copies would be started
WORK_ITEM_INTS = (
    8  # of a row of a table of work items: 32 bytes, so that no row crosses a sector
)
INTERVAL_ITEM_INTS = 16  # the same, of intervals
SMEM_BYTES = 227 * 1024  # of shared memory that one CTA can have
SMEM_BUDGET = 224 * 1024  # of these, what a kernel plans with: barriers take some
SMEM_HALF = 112 * 1024  # what each of two CTAs on one SM plans with
SMEM_THIRD = 74 * 1024  # of three
SELECTED = 64  # blocks of a token that kernels take
WARPS = 4  # of a CTA of one warpgroup, which is what Mosaic launches at least


@dataclasses.dataclass(frozen=True)
class Tile:
    """`tokens` tokens x `group` query heads in `rows` rows; columns in slabs of `slab`."""

    group: int
    slab: int
    rows: int = ROWS

    @functools.cached_property
    def tokens(self) -> int:
        """One TMA copy moves a multiple of 128 bytes; 0 where no number of tokens has that."""
        rows = 128 // (2 * self.slab)  # whose slabs are 128 bytes
        multiple = rows // math.gcd(rows, self.group)
        return self.rows // self.group // multiple * multiple

    @property
    def used(self) -> int:
        """Rows that stand for a query head."""
        return self.tokens * self.group


def gathered_tile(group: int, slab: int) -> Tile:
    """The fewest rows in which the tokens of a TMA copy have room, at least 16."""
    tiles = (Tile(group, slab, rows) for rows in (16, 32, ROWS))
    return next((tile for tile in tiles if tile.tokens), Tile(group, slab))


def cdiv(a: int, b: int) -> int:
    """`a / b`, rounded up."""
    return -(-a // b)


def parts_of_block(block: int, entries: int) -> int:
    """Into how many blocks kernels cut a selection block, of `entries` of a token: one of 128 keys
    into two, with which an SM holds more CTAs and dS is stored.
    """
    return 2 if block == 2 * ROWS and 2 * entries <= SELECTED else 1


def warp_grid(rows: int, warps: int) -> tuple[int, int]:
    """The CTAs of `warps` warps for each of `rows` rows; the last one of a row may have more."""
    return rows, cdiv(warps, WARPS)


def slab_width(*widths: int) -> int:
    """Columns of a slab: all `widths`, which are multiples of 16, are multiples of it."""
    common = math.gcd(*widths)
    return next(slab for slab in (64, 32, 16) if common % slab == 0)


def copied_by_lanes(group: int, slab: int) -> bool:
    """Whether the rows of single tokens are copied by lanes (`mosaic/row_copies.py`)."""
    return group <= LANE_COPY_HEADS and slab == 64


def row_stats(spec: Any, tokens: int, rows: int) -> Array:
    """The statistics of query rows, `[B, Hkv, tiles, rows, 4]`, by tiles of `tokens` tokens.

    Args:
      spec: has `B`, `T` and `Hkv`.
      tokens: of a tile.
      rows: of a tile; at least `tokens * G`.
    """
    return Array((spec.B, spec.Hkv, -(-spec.T // tokens), rows, ROW_STATS), "float32")
