"""Describes the kernel that builds the block lists of tiles.

The block list of a tile of query rows has the blocks that the tile's tokens selected.

The query-stationary kernels of the selected branch loop over the block list (`specs.selected`). For
each tile `[B, Hkv, tiles]`:

| array     | shape              | content                                                    |
|-----------|--------------------|------------------------------------------------------------|
| `starts`  | `[entries]`        | first key of each block, ascending                         |
| `members` | `[words, entries]` | bit `i % 32` of word `i // 32`: token i selected the block |
| `counts`  | `[6]`              | `specs.selected.BlockCounts`                               |

The members of a block are the tokens that selected the block. A block needs a mask by key if it
ends after the last key to which one of its members may attend. All later blocks of the list are
masked too. If b is the block of the tile's first token, block 0 and the blocks from b - 1 on are
near. All other blocks are far. After the last block of a list, `starts` and `members` are zero.
"""

from kernels_pallas.kernel import Array, Kernel, described, int32
from kernels_pallas.specs.selected import COUNTS, SelectedAttention
from kernels_pallas.specs.tile import warp_grid


def list_arrays(spec: SelectedAttention) -> dict[str, Array]:
    """Return `starts`, `members` and `counts`."""
    tiles = spec.B, spec.Hkv, spec.tiles
    return {
        "starts": int32(*tiles, spec.entries),
        "members": int32(*tiles, spec.words, spec.entries),
        "counts": int32(*tiles, COUNTS),
    }


@described
def tile_block_lists(spec: SelectedAttention) -> Kernel:
    """Inputs, int32:

    - `indices` `[B, T, Hkv, n]`: the blocks that each token selected, in any order, with -1 in
      empty slots. Blocks after the block of the token itself are ignored.
    - `position` `[B, T]`: the position of each token in its sequence. A token with a negative
      position selects nothing.
    - `key_start` `[B, T]`: the first key of the token's sequence, never decreasing.

    Outputs: `starts`, `members` and `counts`, as in the docstring of the module.
    """
    by_token = int32(spec.B, spec.T)
    return Kernel.named(
        spec,
        {
            "indices": int32(spec.B, spec.T, spec.Hkv, spec.n),
            "position": by_token,
            "key_start": by_token,
        },
        list_arrays(spec),
        body="kernels_pallas.mosaic.lists:tile_block_lists",
        sizes={"T": spec.T, "tiles": spec.tiles},
        grid=warp_grid(spec.B * spec.Hkv, spec.tiles),
    )
