"""Describes the kernels that build the query lists of blocks.

The query list of a tile of keys has the queries that selected keys of the tile.

The key-stationary kernels `dkv` (dk, dv) and `gathered` loop over query lists. The tokens are
divided into chunks. The lists are stored by row of `[B, Hkv]`, then by tile of 64 keys, and then by
chunk of tokens:

| array   | shape                             | content                                     |
|---------|-----------------------------------|---------------------------------------------|
| `edges` | `[1 + rows * key_tiles * chunks]` | begins of the entries of (row, tile, chunk) |
| `lists` | `[entries]`                       | entries, in one array or two arrays         |

`edges` is a running sum from 0. `fill_lists` writes one or two arrays, and `fill_gather_lists`
writes one array. The order of a list is the same in every run. In a list, the entries of a chunk
follow the entries of the previous chunk. Within a chunk the entries are in the order of the
queries, unless blocks end within tiles.
"""

import dataclasses
from functools import cached_property

from kernels_pallas.kernel import Array, Kernel, Spec, described, int32
from kernels_pallas.specs.selected import COUNTS
from kernels_pallas.specs.tile import LANES, ROWS, cdiv, warp_grid

# The upper bits of an entry have (first key of its block - first key of the tile) plus a bias.
# The difference is -127 to 63, since a block has at most 128 keys (`capability.BLOCK`). The
# bias makes the sum non-negative.
BLOCK_OFFSET_BIAS = 128
BLOCK_OFFSET_SHIFT = 16  # number of lower bits, with one bit per token of a query tile
CHUNKS = 512  # maximum number of chunks of the T tokens in a row of [B, Hkv]
# approximate maximum number of blocks per window; `BlockQueryLists.bits` is the exact number
BITS = 1024


@dataclasses.dataclass(frozen=True)
class BlockQueryLists(Spec):
    """The static sizes of a problem.

    Attributes:
      B: Number of batch rows.
      T: Number of tokens per row.
      S: Number of keys or slots per row.
      Hkv: Number of key/value heads.
      n: Number of selected blocks per token.
      block: Number of keys per selection block.
      tokens: Number of adjacent tokens per query tile. The kernel that reads the lists copies a
        query tile at once. An entry is a query tile and a block that some tokens of the query
        tile selected. The entry is in the lists of all tiles of keys that the block overlaps.
      packed: Whether sequences may begin at any key. `packed` is False for tiles of slots in
        packed rows (`nsa_core.varlen`), since tiles of slots are treated like tiles of keys of
        one sequence.
      tile, limit: With `limit`, only tokens of gathered tiles have entries, and the entries are
        only for far blocks (`specs/selected.py`). `tile` is the number of tokens per tile, and
        `limit` is the `gather_limit` (`selected.tile_is_gathered`).
    """

    B: int
    T: int
    S: int
    Hkv: int
    n: int
    block: int
    tokens: int
    packed: bool
    tile: int = 0
    limit: int = 0

    # How blocks of keys and tiles of keys overlap.

    @cached_property
    def aligned(self) -> bool:
        """Whether tiles and blocks are aligned: each tile is part of one block, or each block
        is part of one tile.
        """
        return not self.packed and (ROWS % self.block == 0 or self.block % ROWS == 0)

    @cached_property
    def clipped(self) -> bool:
        """Whether a block may end within a tile of keys."""
        return not self.aligned or self.block < ROWS

    @cached_property
    def has_token_bits(self) -> bool:
        """Whether the token bits of an entry must state its tokens and its block."""
        return self.tokens > 1 or self.clipped

    @cached_property
    def key_tiles_of_block(self) -> int:
        """The maximum number of key tiles that a block touches."""
        if self.aligned:
            return max(self.block // ROWS, 1)
        return (self.block + ROWS - 2) // ROWS + 1

    @cached_property
    def blocks_of_key_tile(self) -> int:
        """The maximum number of blocks of a sequence that touch a tile of keys."""
        if self.aligned:
            return max(ROWS // self.block, 1)
        return (ROWS + self.block - 2) // self.block + 1

    # Sizes that grow with the number of keys.

    @cached_property
    def key_tiles(self) -> int:
        """Number of tiles of 64 keys."""
        return cdiv(self.S, ROWS)

    @cached_property
    def window(self) -> int:
        """Number of tiles of keys that a warp processes together."""
        return max(min(BITS, BITS * self.block // ROWS) // LANES, 1) * LANES

    @cached_property
    def bits(self) -> int:
        """The maximum number of blocks that touch a window."""
        return (cdiv(self.window * ROWS, self.block) // LANES + 1) * LANES

    # Sizes that grow with the number of tokens.

    @cached_property
    def rows(self) -> int:
        return self.B * self.Hkv

    @cached_property
    def entries(self) -> int:
        """The maximum number of entries of all lists."""
        return self.rows * self.T * self.n * self.key_tiles_of_block

    @cached_property
    def query_tiles(self) -> int:
        return cdiv(self.T, self.tokens)

    @cached_property
    def query_tiles_of_word(self) -> int:
        """The number of query tiles whose tokens have their bits in the same word."""
        return LANES // self.tokens

    @cached_property
    def words_of_chunk(self) -> int:
        return cdiv(self.T, self.query_tiles_of_word * self.tokens * CHUNKS)

    @cached_property
    def chunk(self) -> int:
        """Number of query tiles per chunk."""
        return self.query_tiles_of_word * self.words_of_chunk

    @cached_property
    def chunks(self) -> int:
        return cdiv(self.T, self.chunk * self.tokens)

    # Arguments of the kernels.

    @cached_property
    def edges(self) -> Array:
        return int32(1 + self.rows * self.key_tiles * self.chunks)

    @cached_property
    def list(self) -> Array:
        return int32(self.entries)

    @cached_property
    def tiles(self) -> int:
        """Number of tiles that may be gathered, if `limit` is set."""
        return cdiv(self.T, self.tile) if self.limit else 0

    @property
    def selection(self) -> dict[str, Array]:
        """The arrays `indices`, `position` and `key_start` of `tile_block_lists`. With `limit`,
        `counts` of `tile_block_lists` follows.
        """
        by_token = self.B, self.T
        found = {
            "indices": int32(*by_token, self.Hkv, self.n),
            "position": int32(*by_token),
            "key_start": int32(*by_token),
        }
        counts = int32(self.B, self.Hkv, self.tiles, COUNTS)
        return found | ({"counts": counts} if self.limit else {})


@described
def count_entries(spec: BlockQueryLists) -> Kernel:
    """Describe the kernel that counts the entries. Inputs: `selection`. Output: an array of the
    shape of `edges`. The array has a zero, followed by the number of entries of each row, tile
    of keys and chunk of tokens. The running sum of the output is `edges`.
    """
    return _kernel("count_entries", spec, {}, {"edges": spec.edges})


@described
def fill_lists(spec: BlockQueryLists) -> Kernel:
    """Describe the kernel that writes the entries. Inputs: `selection`, `edges`. Outputs, int32
    `[entries]`, undefined past the last entry:

    - the query tile of each entry;
    - if `has_token_bits` is true, `(BLOCK_OFFSET_BIAS + first key of the block - first key of the
      tile) << BLOCK_OFFSET_SHIFT` plus one bit per token of the query tile that selected the block.
    """
    names = ("query_list", "token_bits")[: 1 + spec.has_token_bits]
    return _kernel("fill_lists", spec, {"edges": spec.edges}, dict.fromkeys(names, spec.list))


@described
def fill_gather_lists(spec: BlockQueryLists) -> Kernel:
    """Describe a kernel with the inputs of `fill_lists`, for a spec of single tokens whose blocks
    are tiles of keys.

    Output, int32 `[entries]`, undefined past the last entry: the position of each entry in the
    selection, `(token * Hkv + head) * n + slot`.
    """
    return _kernel("fill_gather_lists", spec, {"edges": spec.edges}, {"entries": spec.list})


def _kernel(name, spec, inputs, outputs):
    return Kernel.named(
        spec,
        spec.selection | inputs,
        outputs,
        body=f"kernels_pallas.mosaic.lists:{name}",
        sizes={
            "T": spec.T,
            "key_tiles": spec.key_tiles,
            "chunk": spec.chunk,
            "chunks": spec.chunks,
            "words_of_chunk": spec.words_of_chunk,
            "tiles": spec.tiles,
        },
        grid=warp_grid(spec.rows, spec.chunks),
    )
