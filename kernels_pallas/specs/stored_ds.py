"""dS of the selected branch in memory: `dkv` writes it, and `dq` multiplies it with the keys.

    ds  [rows * T * n, group_rows, 64]    place (row * T + token) * n + slot: heads of the group x
                                          keys of the block in this slot of the token's selection

`group_rows` is G rounded up to 8, 16, 32 or 64. The numbers of 16 heads and a block, 2 KB, stand in
the order in which registers hold them (`mosaic/stored_ds.py`). Nothing is written for a slot that
is empty, or whose block the token does not see. A token must not select a block twice: only one
of the slots would be written.

Rows of `[B, Hkv]` go in chunks, since ds is 8.6 GB at B=1 T=65536 Hkv=4 n=16 G=16:

    ds_chunk  int32 [64]  0: its first row, 1: the number of the first partial of that row
"""

import dataclasses
import functools
from typing import Self

from kernels_pallas.kernel import Array, Kernel, described
from kernels_pallas.specs.selected import COUNTS, BlockListSizes
from kernels_pallas.specs.tile import LANES, ROWS, Tile, gathered_tile, slab_width

CHUNK_WORDS = 64  # 256 bytes, as launches want them
FIRST_ROW, FIRST_PARTIAL = range(2)  # words of a chunk
DS_CHUNK = Array((CHUNK_WORDS,), "int32")
KEYS = ROWS  # of a block
HEADS = 8  # of a token, whose numbers stand together
MAX_SELECTION_ENTRIES = LANES  # a lane of a warp looks after each


def array(rows: int, length: int, selection_entries: int, group_rows: int, dtype: str) -> Array:
    """ds of `rows` rows of `[B, Hkv]` and `length` tokens."""
    return Array((rows * length * selection_entries, group_rows, KEYS), dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredDsQuery(BlockListSizes):
    """Sizes of the problem, of a chunk and of a CTA.

    Attributes:
      stored_rows: rows of `[B, Hkv]` in the chunk.
      added: add the result to an array of its shape.
      packed: sequences may begin at any key.
    """

    stored_rows: int
    added: bool = False
    packed: bool = False

    block = KEYS

    def for_any_length(self) -> Self:
        """The same with nominal lengths."""
        return super().for_any_length(stored_rows=2)

    @functools.cached_property
    def query_tile(self) -> Tile:
        """A token: its heads, and padding rows."""
        slab = slab_width(self.D, self.Dv)
        if self.group == HEADS:
            return Tile(HEADS, slab, HEADS)
        return gathered_tile(self.group, slab)

    @functools.cached_property
    def tile(self) -> Tile:
        """64 rows of whole tokens: what has a block list."""
        return Tile(self.query_tile.rows, self.query_tile.slab)


@described
def dq(spec: StoredDsQuery) -> Kernel:
    """dQ = added + scale dS K of the rows of a chunk. Nothing is written for other rows, which in
    place keep what `added` has.

    Inputs:
      key: `[B, S, Hkv, D]`.
      block_starts, block_counts: `starts` and `counts` of `tile_block_lists`, for this spec.
      indices: int32 `[B, T, Hkv, n]`, position and, if `packed`, key_start: int32 `[B, T]`: what
        the lists were made of.
      ds_chunk: as above.
      ds: of its rows.
      added: `[B, T, H, D]`, if `added`.

    Output:
      dq: `[B, T, H, D]`.
    """
    lists, out = (spec.B, spec.Hkv, spec.tiles), spec.rows(spec.D)
    inputs = {
        "key": spec.keys(spec.D),
        "block_starts": Array((*lists, spec.entries), "int32"),
        "block_counts": Array((spec.B * spec.Hkv * spec.tiles, COUNTS), "int32"),
        "indices": Array((spec.B, spec.T, spec.Hkv, spec.n), "int32"),
        "position": Array((spec.B, spec.T), "int32"),
        **({"key_start": Array((spec.B, spec.T), "int32")} if spec.packed else {}),
        "ds_chunk": DS_CHUNK,
        "ds": array(spec.stored_rows, spec.T, spec.n, spec.query_tile.rows, spec.dtype),
    }
    if spec.added:
        inputs["added"] = out
    return Kernel.named(
        "stored_ds_dq",
        spec,
        "kernels_pallas.mosaic.stored_ds:dq",
        inputs,
        {"dq": out},
        in_place=spec.added,
        sizes={"T": spec.T, "tiles": spec.tiles},
        grid=(spec.stored_rows, spec.tiles),
        source="kernels_pallas.specs.stored_ds:dq",
    )
