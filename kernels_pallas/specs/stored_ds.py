"""Describes the memory layout of dS of the selected branch.

`dkv` writes dS, and `dq` multiplies dS with the keys.

The array `ds` is `[rows * T * n, group_rows, 64]`. At index (row * T + token) * n + slot, `ds` has
dS for the heads of the group and the keys of the block in a slot of the token's selection.

`group_rows` is G, which is at least 8, rounded up to 8, 16, 32 or 64. The numbers of 16 heads and a
block (2 KB) are stored in the order of registers (`mosaic/stored_ds.py`). The memory of a slot is
not written if the slot is empty or if the token does not attend to the block. A token must not
select a block twice, since only one of the block's two slots would be written.

Rows of `[B, Hkv]` are processed in chunks, since ds of all rows is 8.6 GB at B=1 T=65536 Hkv=4 n=16
G=16. The array `ds_chunk`, int32 `[64]`, has the first row of a chunk at index 0, and the index of
that row's first partial at index 1.
"""

import dataclasses
from functools import cached_property
from typing import Any

from kernels_pallas.kernel import Array, Kernel, described, int32
from kernels_pallas.specs.selected import COUNTS, BlockListSizes
from kernels_pallas.specs.tile import LANES, ROWS, Tile, gathered_tile, slab_width

CHUNK_WORDS = 64  # 256 bytes, the alignment of launches
FIRST_ROW, FIRST_PARTIAL = range(2)  # words of `ds_chunk`
DS_CHUNK = int32(CHUNK_WORDS)
KEYS = ROWS  # keys per block
HEADS = 8  # heads of a matrix of 8 x 8 that `mosaic/stored_ds.py` transposes
MAX_SELECTION_ENTRIES = LANES  # maximum number of blocks per token, one per lane of a warp


def array(rows: int, length: int, selection_entries: int, group_rows: int, dtype: str) -> Array:
    """Return the array ds of `rows` rows of `[B, Hkv]` and `length` tokens."""
    return Array((rows * length * selection_entries, group_rows, KEYS), dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredDsQuery(BlockListSizes):
    """Sizes of the problem, of a chunk and of a CTA.

    Attributes:
      stored_rows: Number of rows of `[B, Hkv]` in the chunk.
      added: Whether the result is added to an array of the same shape.
      packed: Whether sequences may begin at any key.
    """

    stored_rows: int
    added: bool = False
    packed: bool = False

    block = KEYS

    @property
    def nominal(self) -> dict[str, Any]:
        return super().nominal | {"stored_rows": 2}

    @cached_property
    def query_tile(self) -> Tile:
        """The tile of one token, whose rows are its heads and padding."""
        slab = slab_width(self.D, self.Dv)
        if self.group == HEADS:
            return Tile(HEADS, slab, HEADS)
        return gathered_tile(self.group, slab)

    @cached_property
    def tile(self) -> Tile:
        """A tile of 64 rows, with `query_tile.rows` rows per token. The tokens of a tile share
        a block list.
        """
        return Tile(self.query_tile.rows, self.query_tile.slab)


@described
def dq(spec: StoredDsQuery) -> Kernel:
    """Describe the kernel that computes dQ = added + scale dS K for the rows of a chunk.

    Rows outside the chunk are not written. If the kernel runs in place, rows outside the chunk keep
    the contents of the array `added`.

    Inputs:
      key: `[B, S, Hkv, D]`.
      block_starts, block_counts: `starts` and `counts` of `tile_block_lists`, for this spec.
      indices: int32 `[B, T, Hkv, n]`, the input of `tile_block_lists`. The inputs position and, if
        `packed` is true, key_start, int32 `[B, T]`, are also those of `tile_block_lists`.
      ds_chunk: int32 `[64]`, with the first row and the first partial of the chunk.
      ds: The array ds of the rows in the chunk.
      added: `[B, T, H, D]`, if `added` is true.

    Output:
      dq: `[B, T, H, D]`.
    """
    out, by_token = spec.rows(spec.D), int32(spec.B, spec.T)
    return Kernel.named(
        spec,
        {
            "key": spec.keys(spec.D),
            "block_starts": int32(spec.B, spec.Hkv, spec.tiles, spec.entries),
            "block_counts": int32(spec.B * spec.Hkv * spec.tiles, COUNTS),
            "indices": int32(spec.B, spec.T, spec.Hkv, spec.n),
            "position": by_token,
            "key_start": spec.packed and by_token,
            "ds_chunk": DS_CHUNK,
            "ds": array(spec.stored_rows, spec.T, spec.n, spec.query_tile.rows, spec.dtype),
            "added": spec.added and out,
        },
        {"dq": out},
        name="stored_ds_dq",
        in_place=spec.added,
        sizes={"T": spec.T, "tiles": spec.tiles},
        grid=(spec.stored_rows, spec.tiles),
    )
