"""The query lists of blocks: which queries selected the keys of each tile of keys.

Key-stationary kernels loop over them: `dkv` (dk, dv) and `gathered`. The tokens are
cut into chunks, and lists stand one after the other:

    for each row of [B, Hkv], for each tile of 64 keys, for each chunk of tokens: its entries

    edges  [1 + rows * key_tiles * chunks]  where the entries of (row, tile, chunk) begin: the
                                            running sum of the counts, which begins with 0
    lists  [entries]                        one array or two (`fill_lists`, `fill_gather_lists`)

A list is the same in every run: chunk after chunk, and within one in the order of the queries
unless blocks end within tiles.
"""

import dataclasses
from typing import Self

from kernels_pallas.kernel import NOMINAL_LENGTH, Array, Kernel, described
from kernels_pallas.specs.selected import COUNTS
from kernels_pallas.specs.tile import LANES, ROWS, cdiv, warp_grid

# Above its token bits an entry has first key of its block - first key of the tile, -127 to 63, as
# a block has at most 128 keys (`capability.BLOCK`): with the bias it is not negative.
BLOCK_OFFSET_BIAS = 128
BLOCK_OFFSET_SHIFT = 16  # token bits below it: one a token of the query tile
CHUNKS = 512  # into which the T tokens of a row of [B, Hkv] are cut at most
BITS = 1024  # blocks of a window at most, about; `BlockQueryLists.bits` is the exact number


@dataclasses.dataclass(frozen=True)
class BlockQueryLists:
    """The static sizes of a problem.

    Attributes:
      block: keys of a selected block.
      tokens: neighbours in a query tile, which is what the reader of the lists copies at a
        time. An entry is a query tile and a block that some of its tokens selected; it stands
        in the list of every tile of keys that the block touches.
      packed: sequences may begin at any key; tiles of places of packed rows (`nsa_core.varlen`)
        are like those of keys of one sequence.
      tile, limit: with `limit` only tokens of gathered tiles have entries, of blocks that are far
        from their tile (`specs/selected.py`): `tile` is the tokens of a tile, `limit` the
        `gather_limit` (`selected.tile_is_gathered`).
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
    interpret: bool | object = False
    any_length: bool = False

    def for_any_length(self) -> Self:
        """The same with nominal lengths."""
        lengths = {"B": 2, "T": NOMINAL_LENGTH, "S": NOMINAL_LENGTH}
        return dataclasses.replace(self, any_length=True, **lengths)

    # Blocks and tiles of keys.

    @property
    def aligned(self) -> bool:
        """Tiles and blocks nest: each tile lies in one block, or each block in one tile."""
        return not self.packed and (ROWS % self.block == 0 or self.block % ROWS == 0)

    @property
    def clipped(self) -> bool:
        """A block may end within a tile of keys."""
        return not self.aligned or self.block < ROWS

    @property
    def has_token_bits(self) -> bool:
        """An entry must say which tokens and which keys it is about."""
        return self.tokens > 1 or self.clipped

    @property
    def key_tiles_of_block(self) -> int:
        """Tiles of keys that a block touches at most."""
        if self.aligned:
            return max(self.block // ROWS, 1)
        return (self.block + ROWS - 2) // ROWS + 1

    @property
    def blocks_of_key_tile(self) -> int:
        """Blocks of a sequence that touch a tile of keys at most."""
        if self.aligned:
            return max(ROWS // self.block, 1)
        return (ROWS + self.block - 2) // self.block + 1

    # Sizes that grow with the number of keys.

    @property
    def key_tiles(self) -> int:
        """Tiles of 64 keys."""
        return cdiv(self.S, ROWS)

    @property
    def window(self) -> int:
        """Tiles of keys that a warp looks at at a time."""
        return max(min(BITS, BITS * self.block // ROWS) // LANES, 1) * LANES

    @property
    def bits(self) -> int:
        """Blocks that touch a window at most."""
        return (-(-self.window * ROWS // self.block) // LANES + 1) * LANES

    # Sizes that grow with the number of tokens.

    @property
    def rows(self) -> int:
        return self.B * self.Hkv

    @property
    def entries(self) -> int:
        """Of all lists at most."""
        return self.rows * self.T * self.n * self.key_tiles_of_block

    @property
    def query_tiles(self) -> int:
        return -(-self.T // self.tokens)

    @property
    def query_tiles_of_word(self) -> int:
        """Query tiles whose tokens have their bits in one word."""
        return LANES // self.tokens

    @property
    def words_of_chunk(self) -> int:
        tokens = self.query_tiles_of_word * self.tokens
        return -(-self.T // (tokens * CHUNKS))

    @property
    def chunk(self) -> int:
        """Query tiles of a chunk."""
        return self.query_tiles_of_word * self.words_of_chunk

    @property
    def chunks(self) -> int:
        return -(-self.T // (self.chunk * self.tokens))

    # Arguments of the kernels.

    @property
    def edges(self) -> Array:
        return Array((1 + self.rows * self.key_tiles * self.chunks,), "int32")

    @property
    def list(self) -> Array:
        return Array((self.entries,), "int32")

    @property
    def tiles(self) -> int:
        """Tiles that may be gathered, with `limit`."""
        return cdiv(self.T, self.tile) if self.limit else 0

    @property
    def selection(self) -> dict[str, Array]:
        """`indices`, `position` and `key_start` of `tile_block_lists`; with `limit` its
        `counts`.
        """
        by_token = (self.B, self.T)
        shapes = {
            "indices": (*by_token, self.Hkv, self.n),
            "position": by_token,
            "key_start": by_token,
        }
        if self.limit:
            shapes["counts"] = self.B, self.Hkv, self.tiles, COUNTS
        return {name: Array(shape, "int32") for name, shape in shapes.items()}


@described
def count_entries(spec: BlockQueryLists) -> Kernel:
    """Inputs: `selection`. Output: `edges` before the running sum, zero and the number of
    entries of each row, tile of keys and chunk of tokens.
    """
    return _kernel("count_entries", spec, spec.selection, {"edges": spec.edges})


@described
def fill_lists(spec: BlockQueryLists) -> Kernel:
    """Inputs: `selection`, `edges`. Outputs, int32 `[entries]`, undefined past the last entry:

    - the query tile of each entry;
    - if `has_token_bits`, `(BLOCK_OFFSET_BIAS + first key of the block - first key of the tile)
      << BLOCK_OFFSET_SHIFT` plus one bit a token of the query tile that selected the block.
    """
    outputs = {"query_list": spec.list} | (
        {"token_bits": spec.list} if spec.has_token_bits else {}
    )
    return _kernel("fill_lists", spec, spec.selection | {"edges": spec.edges}, outputs)


@described
def fill_gather_lists(spec: BlockQueryLists) -> Kernel:
    """As `fill_lists`, of a spec of single tokens whose blocks are tiles of keys. Output, int32
    `[entries]`: where in the selection each entry stands, `(token * Hkv + head) * n + slot`.
    """
    inputs = spec.selection | {"edges": spec.edges}
    return _kernel("fill_gather_lists", spec, inputs, {"entries": spec.list})


def _kernel(name, spec, inputs, outputs):
    return Kernel.named(
        name,
        spec,
        f"kernels_pallas.mosaic.lists:{name}",
        inputs,
        outputs,
        sizes={
            "T": spec.T,
            "key_tiles": spec.key_tiles,
            "chunk": spec.chunk,
            "chunks": spec.chunks,
            "words_of_chunk": spec.words_of_chunk,
            "tiles": spec.tiles,
        },
        grid=warp_grid(spec.rows, spec.chunks),
        source=f"kernels_pallas.specs.block_query_lists:{name}",
    )
