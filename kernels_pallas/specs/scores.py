"""Scores of the selection blocks (Eqs. 8 to 10) and the best n of them (Eq. 11), in one kernel.

With r = l'/d compressed tokens a block and cover = l/d, a compressed token `r * j + c` of block
`j` stands in phase `c`. It counts `min(cover, r - c)` times for its block (Eq. 9) and what is
left of `cover` times for the next one, into which it reaches. For r = 4 and cover = 2:

    compressed token     4j    4j+1  4j+2  4j+3 | 4j+4  4j+5 ...
    phase c              0     1     2     3    | 0     1
    times for block j    2     2     2     1    |
    times for block j+1                    1    | 2     2

    own[j]   = sum_c min(cover, r - c) * p[r * j + c]
    next[j]  = sum_c (cover - min(cover, r - c)) * p[r * j + c]
    score[j] = own[j] + next[j - 1], summed over the heads of a group (Eq. 10)

A product takes the same phase of 64 blocks, so the sum over phases is an addition of registers.
Groups of up to 16 heads take Q K^T, larger ones K Q^T.
"""

import dataclasses
import functools
from typing import Self

from kernels_pallas.kernel import NOMINAL_LENGTH, Array, Kernel, described
from kernels_pallas.specs.tile import LANES, ROWS, Tile, cdiv, slab_width

KEYS = 64  # blocks of a product, one phase of each
MAX_GROUP_QK = 16  # rows that one warp has of a product Q K^T: it takes their best by itself

# A score row of Q K^T lies in shared memory in stripes of 32 entries, one a lane. Two
# words of padding follow each stripe, so that lanes that read a column, one stripe each, meet
# in a bank two by two only. After the last one stands the carry into the next chunk.
STRIPE_WORDS = LANES + 2
MAX_STRIPES = LANES  # a lane reads a column again, which it owns, one stripe a lane

# Of K Q^T.
KQ_ROWS = 128  # query rows of a tile at most
KQ_TOKENS = 8  # tokens of a tile at most
KQ_SCORES = 4096  # scores in shared memory at most
KQ_STAGES = 2  # with more, an SM holds one CTA
KQ_WARPS = 4


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a CTA cuts a problem.

    Attributes:
      heads: query rows of a token: those of its heads, and padding.
      rows: query rows of a tile.
      score_rows: rows of scores of a tile, one a token; some may be of no token.
      chunk: blocks whose scores are held at a time.
      stages: of the ring buffer of keys.
    """

    heads: int
    rows: int
    score_rows: int
    chunk: int
    stages: int


@dataclasses.dataclass(frozen=True)
class Scores:
    """The static sizes of a problem.

    Attributes:
      blocks: length of the key array in blocks.
      candidates: the most blocks that the tokens of one tile can choose from.
      ratio, cover: l'/d, l/d.
      packed: sequences may begin within a tile.
      query_tiles: of a row, where a tile's tokens are of one sequence of several; 0: tiles are of
        neighbouring tokens, whatever their sequences.
      stages: of the ring buffer of keys, at most; fewer where there is no room, or no use.
      held: blocks whose scores a token holds at a time, at most.
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
    interpret: bool | object = False
    any_length: bool = False

    def for_any_length(self) -> Self:
        """The same with nominal lengths, for as many candidates as have its tiling."""
        lengths = {"B": 2, "T": NOMINAL_LENGTH, "blocks": NOMINAL_LENGTH}
        if self.query_tiles:
            lengths["query_tiles"] = NOMINAL_LENGTH
        candidates = self.most_candidates
        return dataclasses.replace(self, any_length=True, candidates=candidates, **lengths)

    @property
    def most_candidates(self) -> int:
        """`candidates`, rounded up to a power of two, so that few kernels serve all lengths."""
        most = max(KEYS, 1 << (self.candidates - 1).bit_length())
        # Beyond what a token holds at a time, all lengths take chunks of one size.
        return most if self.swap_ab else min(most, 4 * self.held)

    @property
    def group(self) -> int:
        """Query heads of a key/value head."""
        return self.H // self.Hkv

    @property
    def free(self) -> int:
        """Blocks to choose; with fewer candidates than forced ones, all are forced."""
        return self.n - self.num_initial - self.num_local

    @property
    def swap_ab(self) -> bool:
        """Whether the product is K Q^T: rows of a token are more than one warp has."""
        return self.group > MAX_GROUP_QK

    @functools.cached_property
    def tiling(self) -> Tiling:
        return tiling_kq(self) if self.swap_ab else tiling_qk(self)

    @property
    def tile(self) -> Tile:
        return Tile(self.tiling.heads, slab_width(self.D), self.tiling.rows)

    @property
    def tiles(self) -> int:
        return self.query_tiles or cdiv(self.T, self.tile.tokens)

    @property
    def chunks(self) -> int:
        """Of `most_candidates`."""
        return cdiv(self.most_candidates, self.tiling.chunk)


@described
def best_blocks(spec: Scores) -> Kernel:
    """The blocks that each token selects.

    Inputs:
      query `[B, T, H, D]`;
      key `[B, blocks, ratio, Hkv, D]`: compressed keys, every sequence from a block of its own;
      lse: float32 `[B, T, H]`, natural, -inf where a query sees nothing;
      key_begin, key_end: int32 `[B * tiles, rows]`, the keys `ratio * block + phase` that a row
        sees, never decreasing;
      own_block, base_block: int32 `[B * tiles, score_rows]`, a token's own block in its sequence
        (-1: padding) and the block where its sequence begins;
      span: int32 `[B * tiles]`, blocks from `base_block` of the tile's first token to the end of
        the last candidate;
      first_token, end_token: with `query_tiles`, int32 `[B * tiles]`, the tokens of a tile.

    Output: int32 `[B, T, Hkv, n]`, ascending, -1 in empty places.
    """
    tiles, ints = spec.B * spec.tiles, functools.partial(Array, dtype="int32")
    by_row, by_token = (tiles, spec.tiling.rows), (tiles, spec.tiling.score_rows)
    inputs = {
        "query": Array((spec.B, spec.T, spec.H, spec.D), spec.dtype),
        "key": Array((spec.B, spec.blocks, spec.ratio, spec.Hkv, spec.D), spec.dtype),
        "lse": Array((spec.B, spec.T, spec.H), "float32"),
        "key_begin": ints(by_row),
        "key_end": ints(by_row),
        "own_block": ints(by_token),
        "base_block": ints(by_token),
        "span": ints((tiles,)),
    }
    if spec.query_tiles:
        inputs |= {"first_token": ints((tiles,)), "end_token": ints((tiles,))}
    return Kernel.named(
        "best_blocks",
        spec,
        f"kernels_pallas.mosaic.scores:best_blocks_{'kq' if spec.swap_ab else 'qk'}",
        inputs,
        {"selection": ints((spec.B, spec.T, spec.Hkv, spec.n))},
        sizes={"T": spec.T, "tiles": spec.tiles},
        grid=(spec.B * spec.Hkv, spec.tiles),
        source="kernels_pallas.specs.scores:best_blocks",
    )


def winner_slots(free: int) -> int:
    """Words for the winners of a score row, a multiple of the lanes."""
    return -(-max(free, 1) // LANES) * LANES


def _entries_in(words: int) -> int:
    """Entries of a score row of so many words."""
    return min((words - 2) // STRIPE_WORDS, MAX_STRIPES) * LANES


def tiling_qk(spec: Scores) -> Tiling:
    """Of Q K^T: as few padding rows as leave room for the scores of all tokens, or
    four rows per token.
    """
    heads = 1 << (spec.group - 1).bit_length()
    if heads <= 2:
        tiling = _tiling_of_heads(spec, 2)
        if tiling.chunk == spec.most_candidates:
            return tiling
    return _tiling_of_heads(spec, max(heads, 4))


def _tiling_of_heads(spec: Scores, heads: int) -> Tiling:
    """With so many rows a token: as few chunks as fit in shared memory, then as many stages."""
    sm_bytes = 228 * 1024  # shared memory of an SM; the system takes 1 KB a CTA
    # 128 registers a thread are for four warpgroups. Where the compiler needs no limit to stay
    # there, they are two CTAs; where it would spill, three warpgroups have more.
    narrow = spec.D <= 128 and heads == 16 and spec.most_candidates <= MAX_STRIPES * LANES
    large = spec.D > 192 or spec.cover > 2
    ctas, warpgroups = (1, 3) if large else (2, 2) if narrow else (1, 4)
    tokens = warpgroups * ROWS // heads
    room = sm_bytes // ctas - 2 * 1024  # the system's, and barriers
    winners = winner_slots(spec.free)
    every = spec.most_candidates

    def chunk(stages):
        words = (room - stages * KEYS * spec.D * 2) // (4 * tokens) - winners
        most = _entries_in(words)
        if every <= min(most, spec.held):
            return every
        # The winners of the chunks before stand in the score row too.
        return max(min(most - winners, spec.held) // KEYS * KEYS, KEYS)

    def cost(stages):
        return cdiv(spec.most_candidates, chunk(stages)), -stages

    stages = min(range(2, max(spec.stages, 2) + 1), key=cost)
    return Tiling(heads, warpgroups * ROWS, tokens, chunk(stages), stages)


def tiling_kq(spec: Scores) -> Tiling:
    """Of K Q^T: heads a multiple of 8, which is a register's columns, that divides the
    64 rows of a load; score rows a multiple of the warps, which take one each.
    """
    heads = next(heads for heads in (8, 16, 32, ROWS) if spec.group <= heads)
    tokens = min(KQ_ROWS // heads, KQ_TOKENS)
    score_rows = -(-tokens // KQ_WARPS) * KQ_WARPS
    most = max(min(spec.held, KQ_SCORES // score_rows) // 128 * 128, 128)
    chunk = min(most, cdiv(spec.most_candidates, 128) * 128)
    return Tiling(heads, tokens * heads, score_rows, chunk, min(spec.stages, KQ_STAGES))
