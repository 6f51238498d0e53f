"""The block list of a tile: which blocks the tokens of a tile of query rows selected.

Query-stationary selected attention walks over it (`selected_attention`). Of each list, by tile
`[B, Hkv, tiles]`:

    starts   [entries]         first key of each block, ascending
    members  [words, entries]  bit `token % 32` of word `token // 32`: the token selected it
    counts   [2]               blocks before the first one that ends after the last key of a
                               member, which need no mask; all blocks

Past the count of a list, `starts` and `members` are zero.
"""

import functools

from kernels_pallas.kernel import Array, Kernel
from kernels_pallas.specs.selected import SelectedAttention


def list_arrays(spec: SelectedAttention) -> tuple[Array, ...]:
    """`starts`, `members` and `counts`."""
    tiles = spec.B, spec.Hkv, spec.tiles
    shapes = (spec.entries,), (spec.words, spec.entries), (2,)
    return tuple(Array((*tiles, *shape), "int32") for shape in shapes)


@functools.cache
def tile_block_lists(spec: SelectedAttention) -> Kernel:
    """Inputs, int32:

    - `indices` `[B, T, Hkv, n]`: the blocks that each token selected, in any order; -1 in empty
      places; blocks past the token's own do not count.
    - `position` `[B, T]`: of each token in its sequence; a negative one selects nothing.
    - `key_start` `[B, T]`: the first key of the token's sequence, never decreasing.

    Outputs: `starts`, `members` and `counts`, as above.
    """
    by_token = Array((spec.B, spec.T), "int32")
    inputs = Array((spec.B, spec.T, spec.Hkv, spec.n), "int32"), by_token, by_token
    body = "kernels_pallas.mosaic.tile_block_lists:tile_block_lists"
    return Kernel("tile_block_lists", spec, body, inputs, list_arrays(spec))
