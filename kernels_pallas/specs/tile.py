"""How query rows are cut into tiles, and the constants that kernels and descriptions share.

A tile has up to 64 rows: `64 // G` tokens times the `G` query heads of one key/value head, row
`token * G + head`, so no row is wasted on padding heads.
"""

import dataclasses
import math

LOG2E = math.log2(math.e)
ROWS = 64  # the M of every wgmma
LANES = 32  # of a warp, and bits of a word


@dataclasses.dataclass(frozen=True)
class Tile:
    """`tokens` tokens x `group` query heads in `rows` rows; columns in slabs of `slab`."""

    group: int
    slab: int
    rows: int = ROWS

    @property
    def tokens(self) -> int:
        """One TMA copy moves a multiple of 128 bytes; 0 where no number of tokens has that."""
        rows = 128 // (2 * self.slab)  # whose slabs are 128 bytes
        multiple = rows // math.gcd(rows, self.group)
        return self.rows // self.group // multiple * multiple

    @property
    def used(self) -> int:
        """Rows that stand for a query head."""
        return self.tokens * self.group


def slab_width(*widths: int) -> int:
    """Columns of a slab: all `widths`, which are multiples of 16, are multiples of it."""
    common = math.gcd(*widths)
    return next(slab for slab in (64, 32, 16) if common % slab == 0)
