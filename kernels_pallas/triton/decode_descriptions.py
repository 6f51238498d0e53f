"""The launches on pages, described: two of a decode step, `append`, `gather`.

No Triton is imported.
"""

import dataclasses
from typing import Any, NamedTuple

from kernels_pallas.kernel import Array
from kernels_pallas.triton.descriptions import Problem, cdiv
from kernels_pallas.triton.kernel import TritonKernel
from kernels_pallas.triton.tiling import Tiling, power, precision

SPLIT = 256  # keys of a split: the order of sums follows from it
PARTS = 4  # programs that share the selected blocks of a query
QUERIES = 8  # of a row, at most
CANDIDATES = 4096  # compressed tokens that are scored at a time, at most
GATHERED = 8192  # elements that a program copies from pages
ROWS = 32  # of a tile of queries: more spill


class DecodeConstants(NamedTuple):
    """What is compiled into the kernels of `decode.py`."""

    HEADS: int
    GROUP: int
    QUERIES: int
    WIDTH: int
    VALUE_WIDTH: int
    COMPRESS_BLOCK: int
    COMPRESS_STRIDE: int
    PAGE: int
    WINDOW: int
    SPLIT: int
    PRECISION: str
    FP8: bool
    KEYS: int
    ROWS: int = 0
    ROW_TILES: int = 0
    N: int = 0
    NUM_INITIAL: int = 0
    NUM_LOCAL: int = 0
    BEST: int = 0
    BLOCKS: int = 0
    RATIO_COLUMNS: int = 0
    HEADS_A_STEP: int = 0
    PARTS: int = 0
    GROUP_ROWS: int = 0


@dataclasses.dataclass(frozen=True)
class Decode:
    """Sizes of a decode step.

    Attributes:
      problem: `B` rows of `T` queries; `S`: the tokens that a row's table has room for.
      config: an `NSAConfig`.
      is_fp8: whether all pages but those of compressed keys are in 8 bits, with scales.
    """

    problem: Problem
    config: Any
    is_fp8: bool = False

    @property
    def pages(self) -> int:
        """Of a row's table."""
        return self.problem.S // self.config.select_block

    @property
    def candidates(self) -> int:
        """Compressed tokens of the longest row, 1 at least."""
        return max(self.config.num_compressed(self.problem.S), 1)

    @property
    def splits(self) -> int:
        return cdiv(self.candidates, SPLIT)

    @property
    def windows(self) -> int:
        window = self.config.window
        return cdiv(min(window + self.problem.T - 1, self.problem.S), SPLIT) if window else 0

    @property
    def rows(self) -> int:
        """Query heads of a row that read one key/value head."""
        return self.problem.T * self.problem.group

    @property
    def group_rows(self) -> int:
        return power(self.problem.group)

    @property
    def parts(self) -> int:
        return min(PARTS, self.config.num_selected)

    def _constants(self, keys: int, **sizes: int) -> DecodeConstants:
        p, config = self.problem, self.config
        return DecodeConstants(
            HEADS=p.Hkv,
            GROUP=p.group,
            QUERIES=p.T,
            WIDTH=p.D,
            VALUE_WIDTH=p.Dv,
            COMPRESS_BLOCK=config.compress_block,
            COMPRESS_STRIDE=config.compress_stride,
            PAGE=config.select_block,
            WINDOW=config.window,
            SPLIT=SPLIT,
            PRECISION=precision(p.dtype),
            FP8=self.is_fp8,
            KEYS=keys,
            **sizes,
        )

    def _warps(self, tiling: Tiling) -> int:
        """Products in float32 keep their operands in registers, as those that were 8 bits do."""
        return 8 if self.problem.itemsize == 4 or self.is_fp8 else tiling.warps

    def _scalars(self, pool: int) -> tuple[int | float, ...]:
        sizes = self.pages, pool, self.splits, self.windows, self.candidates
        return *sizes, self.problem.log2_scale

    def partials(self, pool: int) -> TritonKernel:
        """Arrays: query, compressed key and value, sliding key and value, the scales of the last
        three (where there are none: any), page_table, lengths; results: logits, maxima, sums,
        outputs, counters. `pool`: pages that there are.
        """
        p, count = self.problem, self.splits + self.windows
        tiling = p.tiling("forward", min(power(self.rows), ROWS), 64)
        tiles = cdiv(self.rows, tiling.rows)
        head = p.pairs, self.rows
        return TritonKernel(
            "decode:partials",
            p.pairs * tiles * count,
            self._scalars(pool),
            (
                Array((*head, self.candidates), "float32"),
                Array((*head, count), "float32"),
                Array((*head, count), "float32"),
                Array((*head, count, p.Dv), "float32"),
                Array((p.pairs, p.T), "int32"),
            ),
            self._constants(tiling.keys, ROWS=tiling.rows, ROW_TILES=tiles),
            self._warps(tiling),
            tiling.stages,
        )

    def finish(self, pool: int) -> TritonKernel:
        """Arrays: query, selected key and value, their scales, page_table, lengths, gates, then
        the results of `partials`; results: out, indices, and what its programs hand to each other.
        """
        p, config = self.problem, self.config
        ratio = config.select_block // config.compress_stride
        ratio_columns = power(ratio, 1)
        most = CANDIDATES // ratio_columns
        blocks = power(min(self.pages, most), 2)
        page = power(config.select_block)
        tiling = p.tiling("forward", self.group_rows, min(page, 64))
        programs = p.pairs * p.T * self.parts
        rows = programs, self.group_rows
        constants = self._constants(
            tiling.keys,
            N=config.num_selected,
            NUM_INITIAL=config.num_initial,
            NUM_LOCAL=config.num_local,
            BEST=power(config.num_selected, 2),
            BLOCKS=blocks,
            RATIO_COLUMNS=ratio_columns,
            HEADS_A_STEP=min(4, power(p.group, 1)),
            PARTS=self.parts,
            GROUP_ROWS=self.group_rows,
        )
        tokens = p.B * p.T
        return TritonKernel(
            "decode:finish",
            programs,
            self._scalars(pool),
            (
                Array((tokens, p.H, p.Dv), p.dtype),
                Array((tokens, p.Hkv, config.num_selected), "int32"),
                Array(rows, "float32"),
                Array(rows, "float32"),
                Array((*rows, p.Dv), "float32"),
                Array((*rows, p.Dv), "float32"),
            ),
            constants,
            8 if blocks * ratio_columns >= 2048 else self._warps(tiling),
            tiling.stages,
        )


class Gather(NamedTuple):
    """What is compiled into `paged_gather.gather`; widths are of all heads."""

    HEADS: int
    KEY_WIDTH: int
    VALUE_WIDTH: int
    KEY_FP8: bool
    VALUE_FP8: bool
    PER_PAGE: int
    FIRST: int
    BLOCK: int
    STRIDE: int
    ENTRIES: int
    LAST: bool


def gather(
    rows: int,
    pages: int,
    pool: int,
    heads: int,
    widths: tuple[int, int],
    dtype: str,
    entries: Any,
    reach: int,
    margin: int | None = None,
    fp8: tuple[bool, bool] = (False, False),
    last: bool = False,
) -> TritonKernel:
    """Arrays: pages of keys and of values, the scales of both (where there are none: any),
    page_table, lengths; results: `[rows, S, heads, width]` of both, of as many entries as a row's
    pages have, so that scores, which read whole blocks of them, need no copy.

    Args:
      dtype: of the results, and of pages but those in `fp8`.
      pages: of a row's table; pool: pages that there are.
      entries: `nsa_core.paged_layout.Entries` of a page.
      reach: the last tokens of a row, whose entries are copied; others are zeros.
      margin: tokens before these whose entries are zeros, others are not written; None: all are.
      last: of each row the last page alone, of raw tokens.
    """
    count = entries.per_page * (1 if last else pages)
    key, value = (heads * width for width in widths)
    together = max(GATHERED // power(max(key, value)), 1)
    margin = pages * entries.per_page * entries.stride if margin is None else margin
    return TritonKernel(
        "paged_gather:gather",
        rows * cdiv(count, together),
        (pages, pool, count, reach, margin),
        tuple(Array((rows, count, heads, width), dtype) for width in widths),
        Gather(
            HEADS=heads,
            KEY_WIDTH=key,
            VALUE_WIDTH=value,
            KEY_FP8=fp8[0],
            VALUE_FP8=fp8[1],
            PER_PAGE=entries.per_page,
            FIRST=entries.first,
            BLOCK=entries.block,
            STRIDE=entries.stride,
            ENTRIES=together,
            LAST=last,
        ),
    )


class Append(NamedTuple):
    """What is compiled into `paged_append.append`."""

    HEADS: int
    WIDTH: int
    VALUE_WIDTH: int
    PAGE: int
    COMPRESS_BLOCK: int
    COMPRESS_STRIDE: int
    BLOCK_ROWS: int
    RING: int
    RAGGED: bool
    SEPARATE: bool
    MEANS: bool
    FP8: bool
    SLOTS: bool
    WRITES: bool = True
    KEEPS: bool = True


def append(
    tokens: int,
    rows: int,
    pages: int,
    pool: int,
    kv_heads: int,
    widths: tuple[int, int],
    config: Any,
    *,
    ragged: bool,
    separate: bool,
    means: bool,
    fp8_rows: int = 0,
    slots: bool = False,
) -> list[TritonKernel]:
    """One launch, or two. Arrays: new keys and values by branch, the pages, page_table, lengths,
    starts, the scales, the rings, slots (where there are none: any); no result.

    Where a row of a cache in fp8 may have so many tokens that they take the places in its ring of
    those that its means need, the ring is written by a launch of its own.

    Args:
      tokens: new ones of all rows; pages: of a row's table; pool: pages that there are.
      ragged: whether rows have different numbers of tokens; means: whether compressed tokens are
        means, which are made here.
      fp8_rows: rings of a cache in fp8; slots: whether the rows say which one they have.
    """
    constants = Append(
        HEADS=kv_heads,
        WIDTH=widths[0],
        VALUE_WIDTH=widths[1],
        PAGE=config.select_block,
        COMPRESS_BLOCK=config.compress_block,
        COMPRESS_STRIDE=config.compress_stride,
        BLOCK_ROWS=power(config.compress_block, 1),
        RING=2 * config.compress_block,
        RAGGED=ragged,
        SEPARATE=separate,
        MEANS=means,
        FP8=fp8_rows > 0,
        SLOTS=slots,
    )
    longest = tokens if ragged else tokens // rows
    apart = fp8_rows > 0 and longest > config.compress_block + 1
    launches = [constants]
    if apart:
        launches = [constants._replace(KEEPS=False), constants._replace(WRITES=False)]
    return [
        TritonKernel(
            "paged_append:append",
            tokens * kv_heads,
            (tokens, rows, pages, pool, fp8_rows),
            (),
            each,
            4 if fp8_rows else 1,
        )
        for each in launches
    ]
