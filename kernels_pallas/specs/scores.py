"""Describes the kernel that computes the scores of the selection blocks (Eqs. 8 to 10) and selects
the n best blocks (Eq. 11).

With r = l'/d compressed tokens per block and cover = l/d, a compressed token `r * j + c` of
block `j` has phase `c`. The compressed token counts `min(cover, r - c)` times for its block (Eq.
9), and `cover - min(cover, r - c)` times for the next block, which the token overlaps. For r = 4
and cover = 2:

| compressed token | phase c | times for block j | times for block j + 1 |
|------------------|---------|-------------------|-----------------------|
| 4j               | 0       | 2                 | 0                     |
| 4j + 1           | 1       | 2                 | 0                     |
| 4j + 2           | 2       | 2                 | 0                     |
| 4j + 3           | 3       | 1                 | 1                     |

    own[j]   = sum_c min(cover, r - c) * p[r * j + c]
    next[j]  = sum_c (cover - min(cover, r - c)) * p[r * j + c]
    score[j] = own[j] + next[j - 1], summed over the heads of a group (Eq. 10)

A product computes one phase of 64 blocks, so the sum over phases is a sum of registers. Groups of
up to 16 heads use the product Q K^T, and larger groups use K Q^T.
"""

import dataclasses
from functools import cached_property
from typing import Any

from kernels_pallas.kernel import NOMINAL_LENGTH, Array, Kernel, Spec, described, float32, int32
from kernels_pallas.specs.tile import LANES, ROWS, Tile, cdiv, slab_width

KEYS = 64  # number of blocks per product, with one phase of each
MAX_GROUP_QK = (
    # Number of rows per warp of a product Q K^T. A warp selects the blocks of its rows without
    # other warps.
    16
)

# A score row of Q K^T is stored in shared memory in stripes of 32 entries, one per lane. Two
# words of padding follow each stripe. When the lanes read one column, one stripe each, bank
# conflicts are therefore only two-way. The carry into the next chunk follows the last stripe.
STRIPE_WORDS = LANES + 2
MAX_STRIPES = LANES  # since the lanes read one column at once, one stripe per lane

# Sizes of the kernel with K Q^T.
KQ_ROWS = 128  # maximum number of query rows per tile
KQ_TOKENS = 8  # maximum number of tokens per tile
KQ_SCORES = 4096  # maximum number of scores in shared memory
KQ_STAGES = 2  # with more stages, only one CTA fits on an SM
KQ_WARPS = 4


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The tiling of the work of a CTA.

    Attributes:
      heads: Number of query rows per token, including padding.
      rows: Number of query rows per tile.
      score_rows: Number of score rows per tile, one per token. Some score rows may be padding.
      chunk: Number of blocks whose scores are stored at a time.
      stages: Number of pipeline stages in the ring buffer of keys.
    """

    heads: int
    rows: int
    score_rows: int
    chunk: int
    stages: int


@dataclasses.dataclass(frozen=True)
class Scores(Spec):
    """The static sizes of a problem.

    Attributes:
      B: Number of batch rows.
      T: Number of query tokens.
      H: Number of query heads.
      Hkv: Number of key/value heads.
      D: Width of the keys.
      blocks: Length of the key array in blocks.
      candidates: Maximum number of blocks from which the tokens of one tile select.
      ratio: The quotient l'/d.
      cover: The quotient l/d.
      n: Number of selected blocks per token, forced ones included.
      num_initial: Number of forced blocks at the begin of the sequence.
      num_local: Number of forced blocks up to the token's own block.
      packed: Whether sequences may begin within a tile.
      query_tiles: Number of query tiles per row, if all tokens of a tile belong to one
        sequence. `query_tiles=0` means tiles of adjacent tokens, regardless of their sequences.
      stages: Maximum number of pipeline stages of the ring buffer of keys.
      held: Maximum number of blocks whose scores are stored per token at a time.
    """

    B: int
    T: int
    H: int
    Hkv: int
    D: int
    blocks: int
    candidates: int
    ratio: int
    cover: int
    n: int
    num_initial: int
    num_local: int
    packed: bool
    dtype: str
    scale: float
    query_tiles: int = 0
    stages: int = 4
    held: int = 1024

    @property
    def nominal(self) -> dict[str, Any]:
        """Placeholder values of the lengths, for kernels that serve all lengths.

        The placeholder number of candidates is the largest number with the same tiling.
        """
        lengths = {"B": 2, "T": NOMINAL_LENGTH, "blocks": NOMINAL_LENGTH}
        query_tiles = NOMINAL_LENGTH if self.query_tiles else 0
        return lengths | {"query_tiles": query_tiles, "candidates": self.most_candidates}

    @cached_property
    def most_candidates(self) -> int:
        """The number `candidates`, rounded up to a power of two so that few kernels serve all
        lengths.
        """
        most = max(KEYS, 1 << (self.candidates - 1).bit_length())
        # All lengths that need several chunks have the same chunk size.
        return most if self.swap_ab else min(most, 4 * self.held)

    @cached_property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.H // self.Hkv

    @cached_property
    def free(self) -> int:
        """The number of blocks to select by score. If there are fewer candidates than forced
        blocks, all candidates are forced.
        """
        return self.n - self.num_initial - self.num_local

    @cached_property
    def swap_ab(self) -> bool:
        """Whether the product is K Q^T instead of Q K^T. K Q^T is used if a token has more rows
        than one warp.
        """
        return self.group > MAX_GROUP_QK

    @cached_property
    def tiling(self) -> Tiling:
        return tiling_kq(self) if self.swap_ab else tiling_qk(self)

    @cached_property
    def tile(self) -> Tile:
        return Tile(self.tiling.heads, slab_width(self.D), self.tiling.rows)

    @cached_property
    def tiles(self) -> int:
        return self.query_tiles or cdiv(self.T, self.tile.tokens)

    @cached_property
    def chunks(self) -> int:
        """The number of chunks that `most_candidates` blocks need."""
        return cdiv(self.most_candidates, self.tiling.chunk)


@described
def best_blocks(spec: Scores) -> Kernel:
    """Describe the kernel that selects the blocks of each token.

    Inputs, in order:
      query: `[B, T, H, D]`.
      key: `[B, blocks, ratio, Hkv, D]`, the compressed keys. Each sequence begins with a new block.
      lse: float32 `[B, T, H]`, natural, -inf if a query has no keys.
      key_begin: int32 `[B * tiles, rows]`, the index `ratio * block + phase` of the first key of
        each row.
      key_end: int32 `[B * tiles, rows]`, the end of the keys of each row.
      own_block: int32 `[B * tiles, score_rows]`, each token's own block, counted from the begin of
        its sequence. -1 is padding.
      base_block: int32 `[B * tiles, score_rows]`, the first block of each token's sequence.
      span: int32 `[B * tiles]`, the number of blocks from `base_block` of the tile's first token to
        the end of the last candidate.
      first_token: With `query_tiles`, int32 `[B * tiles]`, the first token of each tile.
      end_token: With `query_tiles`, int32 `[B * tiles]`, the end of the tokens of each tile.

    `key_begin` and `key_end` never decrease.

    Output: int32 `[B, T, Hkv, n]`, ascending, -1 in empty slots.
    """
    tiles, of_tile = spec.B * spec.tiles, int32(spec.B * spec.tiles)
    by_row, by_token = int32(tiles, spec.tiling.rows), int32(tiles, spec.tiling.score_rows)
    return Kernel.named(
        spec,
        {
            "query": Array((spec.B, spec.T, spec.H, spec.D), spec.dtype),
            "key": Array((spec.B, spec.blocks, spec.ratio, spec.Hkv, spec.D), spec.dtype),
            "lse": float32(spec.B, spec.T, spec.H),
            "key_begin": by_row,
            "key_end": by_row,
            "own_block": by_token,
            "base_block": by_token,
            "span": of_tile,
            "first_token": spec.query_tiles > 0 and of_tile,
            "end_token": spec.query_tiles > 0 and of_tile,
        },
        {"selection": int32(spec.B, spec.T, spec.Hkv, spec.n)},
        body=f"kernels_pallas.mosaic.scores:best_blocks_{'kq' if spec.swap_ab else 'qk'}",
        sizes={"T": spec.T, "tiles": spec.tiles},
        grid=(spec.B * spec.Hkv, spec.tiles),
    )


def winner_slots(free: int) -> int:
    """Return the number of words for the winners of a score row, a multiple of the number of
    lanes.
    """
    return cdiv(max(free, 1), LANES) * LANES


def _entries_in(words: int) -> int:
    """Return the number of entries of a score row with the given number of words."""
    return min((words - 2) // STRIPE_WORDS, MAX_STRIPES) * LANES


def tiling_qk(spec: Scores) -> Tiling:
    """Return the tiling of Q K^T.

    A token of a group of one or two heads has two rows if the scores of all candidates then fit in
    shared memory. All other tokens have as many rows as heads, rounded up to a power of two, and at
    least four.
    """
    heads = 1 << (spec.group - 1).bit_length()
    if heads <= 2:
        tiling = _tiling_of_heads(spec, 2)
        if tiling.chunk == spec.most_candidates:
            return tiling
    return _tiling_of_heads(spec, max(heads, 4))


def _tiling_of_heads(spec: Scores, heads: int) -> Tiling:
    """Return the tiling with `heads` rows per token.

    Among all tilings that fit in shared memory, the returned tiling has the fewest chunks. Among
    the tilings with the fewest chunks, the returned tiling has the most stages.
    """
    sm_bytes = 228 * 1024  # shared memory per SM, of which the system uses 1 KB per CTA
    # Four warpgroups on an SM have 128 registers per thread. The warpgroups are in two CTAs if
    # the compiler stays within 128 registers without a limit (`narrow`), and otherwise in one
    # CTA. If the compiler would spill registers (`large`), the CTA has three warpgroups, with
    # more registers per thread.
    narrow = spec.D <= 128 and heads == 16 and spec.most_candidates <= MAX_STRIPES * LANES
    large = spec.D > 192 or spec.cover > 2
    ctas, warpgroups = (1, 3) if large else (2, 2) if narrow else (1, 4)
    tokens = warpgroups * ROWS // heads
    # Of a CTA's share of shared memory, the system uses 1 KB, and barriers use less than
    # another KB.
    room = sm_bytes // ctas - 2 * 1024
    winners = winner_slots(spec.free)
    every = spec.most_candidates

    def chunk(stages):
        words = (room - stages * KEYS * spec.D * 2) // (4 * tokens) - winners
        most = _entries_in(words)
        if every <= min(most, spec.held):
            return every
        # The score row also has the winners of previous chunks.
        return max(min(most - winners, spec.held) // KEYS * KEYS, KEYS)

    def cost(stages):
        return cdiv(spec.most_candidates, chunk(stages)), -stages

    stages = min(range(2, max(spec.stages, 2) + 1), key=cost)
    return Tiling(heads, warpgroups * ROWS, tokens, chunk(stages), stages)


def tiling_kq(spec: Scores) -> Tiling:
    """Return the tiling of K Q^T. The number of heads is rounded up to a multiple of 8 that divides
    64. A register has 8 columns, and a load has 64 rows. The number of score rows is a multiple of
    the number of warps, since each warp handles one score row at a time.
    """
    heads = next(heads for heads in (8, 16, 32, ROWS) if spec.group <= heads)
    tokens = min(KQ_ROWS // heads, KQ_TOKENS)
    score_rows = cdiv(tokens, KQ_WARPS) * KQ_WARPS
    most = max(min(spec.held, KQ_SCORES // score_rows) // 128 * 128, 128)
    chunk = min(most, cdiv(spec.most_candidates, 128) * 128)
    return Tiling(heads, tokens * heads, score_rows, chunk, min(spec.stages, KQ_STAGES))
