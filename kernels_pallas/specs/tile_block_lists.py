"""The block list of a tile: which blocks the tokens of a tile of query rows selected.

Query-stationary selected attention loops over it (`selected_attention`). Of each list, by tile
`[B, Hkv, tiles]`:

    starts   [entries]         first key of each block, ascending
    members  [words, entries]  bit `token % 32` of word `token // 32`: the token selected it
    counts   [6]               `specs.selected.BlockCounts`. Blocks before the first one that ends
                               after the last key of a member need no mask. Far is a block other
                               than block 0 that ends before the block before that of the tile's
                               first token begins.

Past the count of a list, `starts` and `members` are zero.
"""

from kernels_pallas.kernel import Array, Kernel, described
from kernels_pallas.specs.selected import COUNTS, SelectedAttention
from kernels_pallas.specs.tile import warp_grid


def list_arrays(spec: SelectedAttention) -> dict[str, Array]:
    """`starts`, `members` and `counts`."""
    tiles = spec.B, spec.Hkv, spec.tiles
    shapes = (spec.entries,), (spec.words, spec.entries), (COUNTS,)
    starts, members, counts = (Array((*tiles, *shape), "int32") for shape in shapes)
    return {"starts": starts, "members": members, "counts": counts}


@described
def tile_block_lists(spec: SelectedAttention) -> Kernel:
    """Inputs, int32:

    - `indices` `[B, T, Hkv, n]`: the blocks that each token selected, in any order; -1 in empty
      places; blocks past the token's own do not count.
    - `position` `[B, T]`: of each token in its sequence; a negative one selects nothing.
    - `key_start` `[B, T]`: the first key of the token's sequence, never decreasing.

    Outputs: `starts`, `members` and `counts`, as above.
    """
    by_token = Array((spec.B, spec.T), "int32")
    return Kernel.named(
        "tile_block_lists",
        spec,
        "kernels_pallas.mosaic.lists:tile_block_lists",
        {
            "indices": Array((spec.B, spec.T, spec.Hkv, spec.n), "int32"),
            "position": by_token,
            "key_start": by_token,
        },
        list_arrays(spec),
        sizes={"T": spec.T, "tiles": spec.tiles},
        grid=warp_grid(spec.B * spec.Hkv, spec.tiles),
        source="kernels_pallas.specs.tile_block_lists:tile_block_lists",
    )
