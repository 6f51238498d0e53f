"""Scores of the selection blocks and the best of them: no score ever leaves the chip.

There are two ways, which differ in what a row of the product is. `scores_qk.py` has query
rows x keys; a token's scores then belong to one warp. It is for groups of up to 16 heads, and
uses instructions that Pallas' interpreter lacks. `scores_kq.py` has keys x query rows, for
larger groups and for the interpreter. `Scores` says which of them runs and how it cuts a
problem, so that a caller sees one kernel.

Compressed token `r*j + c` of block `j` stands in phase `c` (`r = l'/d`): one step of both takes
the same phase of 64 blocks, so the sum over the phases of a block (Eq. 9) is an addition of
registers. What a token shares with the next block is kept apart, one place further.

Floors at B=1 H=64 Hkv=4 D=128 T=65536 on an H100: 2.2 TFLOP = 2.2 ms; 8.8 G exponentials at 16
a clock and multiprocessor, 2.4 ms; query once 1.1 GB = 0.33 ms.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import operands
from kernels_pallas.mosaic.operands import LOG2E
from kernels_pallas.mosaic.row_io import TileRows

HEADS = 16  # of a group in `scores_rows`, at most: the rows that one warp has of a product
NO_BLOCK = 1 << 30  # in place of a block, sorts behind all of them


@dataclasses.dataclass(frozen=True)
class Cut:
    """How one of the ways cuts a problem."""

    heads: int  # rows of a token: those of its heads and some that are ignored
    rows: int  # query rows of a tile
    lines: int  # tokens of a tile, and up to a number that suits the warps some that are none
    chunk: int  # blocks whose scores are held at a time
    stages: int  # slots of keys


@dataclasses.dataclass(frozen=True)
class Scores:
    """The static part of a problem.

    `blocks` is the length of the key array in blocks, `candidates` the most blocks that the
    tokens of one tile can choose from; `ratio` = l'/d, `cover` = l/d.
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
    packed: bool  # sequences may begin within a tile
    dtype: str
    scale: float
    stages: int = 4  # slots of keys at most; fewer where there is no room, or no use
    held: int = 1024  # blocks whose scores a token holds at a time, at most
    interpret: bool | object = False

    @property
    def group(self) -> int:
        return self.H // self.Hkv

    @property
    def by_rows(self) -> bool:
        """Whether `scores_rows` runs."""
        return self.group <= HEADS and not self.interpret

    @functools.cached_property
    def cut(self) -> Cut:
        return _way(self).cut(self)

    @property
    def tile(self) -> operands.Tile:
        return operands.Tile(self.cut.heads, operands.slab_width(self.D), self.cut.rows)

    @property
    def tiles(self) -> int:
        return -(-self.T // self.tile.tokens)

    @property
    def lines(self) -> int:
        return self.cut.lines

    @property
    def chunks(self) -> int:
        return -(-self.candidates // self.cut.chunk)

    @property
    def free(self) -> int:
        """Blocks to choose; with fewer candidates than forced ones, all are forced."""
        return self.n - self.num_initial - self.num_local


def _way(spec: Scores):
    from kernels_pallas.mosaic import scores_kq, scores_qk  # which need `Scores`

    return scores_qk if spec.by_rows else scores_kq


@functools.cache
def best_blocks(spec: Scores) -> Kernel:
    """Inputs: query `[B, T, H, D]`; key `[B, blocks, ratio, Hkv, D]`, compressed keys, every
    sequence from a block of its own; `lse` float32 `[B, T, H]`, natural, -inf where a query
    sees nothing; int32 `first`, `last` `[B, tiles, rows]`, the keys `ratio * block + phase`
    that a row sees, never decreasing; int32 `own` and `base` `[B, tiles, lines]`, a token's own
    block in its sequence (-1: padding) and the block where its sequence begins; int32 `span`
    `[B, tiles]`, blocks from `base` of the tile's first token to the end of the last candidate.
    Output: int32 `[B, Hkv, tiles, n, lines]`, ascending, -1 in empty places.
    """
    return _way(spec).best_blocks(spec)


def norms(spec: Scores, tokens: int, lse, b, first, g):
    """By row the log-sum-exp in bits, +inf where a row sees nothing or stands for no head, of
    `tokens` tokens from `first` on.
    """
    of_tile = TileRows(tokens, spec.group, spec.cut.heads, bool(spec.interpret))
    found = of_tile.values(lse, b, first, g * spec.group, jnp.inf)
    return jnp.where(found == -jnp.inf, jnp.inf, found * LOG2E)


def shapes(spec: Scores):
    """Of the inputs and the output of `best_blocks`."""
    shape = jax.ShapeDtypeStruct
    dtype, place, rows = jnp.dtype(spec.dtype), (spec.B, spec.tiles), spec.tile.rows
    inputs = (
        shape((spec.B, spec.T, spec.H, spec.D), dtype),
        shape((spec.B, spec.blocks, spec.ratio, spec.Hkv, spec.D), dtype),
        shape((spec.B, spec.T, spec.H), jnp.float32),
        shape((*place, rows), jnp.int32),
        shape((*place, rows), jnp.int32),
        shape((*place, spec.lines), jnp.int32),
        shape((*place, spec.lines), jnp.int32),
        shape(place, jnp.int32),
    )
    return inputs, shape((spec.B, spec.Hkv, spec.tiles, spec.n, spec.lines), jnp.int32)
