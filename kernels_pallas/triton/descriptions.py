"""The Triton kernels of each step, described (`kernel.TritonKernel`): no Triton is imported.

A `Problem` has the sizes of one branch; the arrays that a kernel takes are listed by its
function (`interval.py`, `selected.py`, `dkv.py`, `scores.py`, `combine.py`).
"""

import dataclasses
import math
from typing import Any, NamedTuple

from kernels_pallas.kernel import Array
from kernels_pallas.triton.kernel import TritonKernel
from kernels_pallas.triton.tiling import (
    LEAST,
    Tiling,
    choose,
    most,
    power,
    precision,
    scores_tiling,
)

LOG2E = math.log2(math.e)
MERGED_ROWS = 16  # of a program that adds partials
SEGMENT = 2048  # entries of a query list that one program walks
PROGRAMS = 1024  # that dkv of few tiles of keys is cut into, at least


def cdiv(a: int, b: int) -> int:
    """`a / b`, rounded up."""
    return -(-a // b)


def _within(largest: tuple[int, int], rows: int | None, keys: int | None) -> tuple[int, int]:
    """Rows and keys of a tile at most; a bound of the rows holds alone."""
    return largest[0] if rows is None else rows, min(largest[1], keys or largest[1])


class Attention(NamedTuple):
    """What is compiled into the kernels of attention; what one does not read is 0."""

    HEADS: int
    GROUP: int
    WIDTH: int
    VALUE_WIDTH: int
    ROWS: int
    KEYS: int
    PRECISION: str
    GATED: bool
    ADDED: bool = False
    LSE_GRAD: bool = False
    DIRECT: bool = False
    N: int = 0
    SLOTS: int = 0
    BLOCK: int = 0
    TOKENS: int = 0
    ENTRIES: int = 0
    CHUNKS: int = 0
    PARTS: int = 0
    COPIES: int = 0
    SEGMENT: int = 0


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes of one branch (shapes: `nsa_core.types`), and where it runs.

    Attributes:
      capability: of the GPU, which bounds the tiles.
    """

    B: int
    T: int
    S: int
    H: int
    Hkv: int
    D: int
    Dv: int
    dtype: str
    scale: float
    capability: tuple[int, int]
    gated: bool = False
    added: bool = False
    lse_grad: bool = False

    @property
    def group(self) -> int:
        return self.H // self.Hkv

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def pairs(self) -> int:
        """Batch rows times key/value heads."""
        return self.B * self.Hkv

    @property
    def log2_scale(self) -> float:
        return self.scale * LOG2E

    def limits(
        self, kernel: str, rows: int | None = None, keys: int | None = None
    ) -> tuple[int, int]:
        """Rows and keys of the largest tiles of a kernel; `rows` and `keys` at most."""
        return _within(most(kernel, self.capability, self.D, self.Dv), rows, keys)

    def tiling(self, kernel: str, rows: int | None = None, keys: int | None = None) -> Tiling:
        """That of a kernel (`tiling.needed`), of at most so many rows and keys a tile."""
        limits = self.limits(kernel, rows, keys)
        where = self.D, self.Dv, self.itemsize, self.capability
        found = choose(kernel, *limits, *where)
        if found is None:
            raise NotImplementedError(
                f"triton: no tiles of {self.dtype}, D={self.D}, Dv={self.Dv} fit in the shared "
                f"memory of compute capability {self.capability}"
            )
        return found

    def constants(self, tiling: Tiling, **sizes: Any) -> Attention:
        """With those of one kernel."""
        return Attention(
            HEADS=self.Hkv,
            GROUP=self.group,
            WIDTH=self.D,
            VALUE_WIDTH=self.Dv,
            ROWS=tiling.rows,
            KEYS=tiling.keys,
            PRECISION=precision(self.dtype),
            GATED=self.gated,
            **sizes,
        )

    @property
    def out_lse(self) -> tuple[Array, Array]:
        rows = self.B, self.T, self.H
        return Array((*rows, self.Dv), self.dtype), Array(rows, "float32")

    @property
    def dq(self) -> tuple[Array]:
        return (Array((self.B, self.T, self.H, self.D), self.dtype),)

    @property
    def dk_dv(self) -> tuple[Array, Array]:
        keys = self.B, self.S, self.Hkv
        return Array((*keys, self.D), self.dtype), Array((*keys, self.Dv), self.dtype)

    def partials(self, items: int, keys: int) -> tuple[Array, Array]:
        """Of dk and dv of `items` segments of tiles of `keys` keys."""
        dk, dv = (Array((items, keys, x), "float32") for x in (self.D, self.Dv))
        return dk, dv


def interval_forward(p: Problem) -> TritonKernel:
    """Arrays: query, key, value, first, last, gate, added; results: out, lse."""
    return _interval(p, "forward", (p.log2_scale,), p.out_lse)


def interval_dq(p: Problem) -> TritonKernel:
    """Arrays: query, key, value, first, last, do, lse, delta, gate, dlse, added; result: dq."""
    return _interval(p, "dq", (p.log2_scale, p.scale), p.dq, LSE_GRAD=p.lse_grad)


def _interval(p: Problem, name: str, scales, outputs, **sizes: bool) -> TritonKernel:
    tiling = p.tiling(name)
    return TritonKernel(
        f"interval:{name}",
        p.pairs * cdiv(p.T * p.group, tiling.rows),
        (p.T, p.S, *scales),
        outputs,
        p.constants(tiling, ADDED=p.added, **sizes),
        *tiling.launch,
    )


@dataclasses.dataclass(frozen=True)
class IntervalDkv:
    """dk and dv of a branch of intervals.

    Attributes:
      popular: whether nearly all queries see the first keys, so that few tiles of keys have all
        the work: each is cut into segments of queries until there are `PROGRAMS` programs.
    """

    problem: Problem
    popular: bool

    @property
    def segments(self) -> int:
        """Of the queries of a tile of keys."""
        return min(cdiv(PROGRAMS, self.tiles * self.problem.pairs), 16) if self.popular else 1

    @property
    def tiling(self) -> Tiling:
        return self.problem.tiling("dkv")

    @property
    def tiles(self) -> int:
        return cdiv(self.problem.S, self.tiling.keys)

    def partials(self) -> TritonKernel:
        """Arrays: query, key, value, first, last, do, lse, delta, gate, dlse, edges; results:
        partials of dk, dv if `popular`, else these.
        """
        p, tiling = self.problem, self.tiling
        items = p.pairs * self.tiles * self.segments
        return TritonKernel(
            "dkv:of_intervals",
            items,
            (p.T, p.S, self.segments, p.log2_scale, p.scale),
            p.partials(items, tiling.keys) if self.popular else p.dk_dv,
            p.constants(tiling, LSE_GRAD=p.lse_grad, DIRECT=not self.popular),
            *tiling.launch,
        )

    def merge(self) -> TritonKernel:
        """Arrays: the partials, and the item after each tile's."""
        tiling, items = self.tiling, self.tiles * self.segments
        return _merge(self.problem, self.tiles, items, tiling.keys, tiling.keys)


class Merge(NamedTuple):
    """What is compiled into `dkv.merge`; PART: keys of a program."""

    HEADS: int
    WIDTH: int
    VALUE_WIDTH: int
    BLOCK: int
    KEYS: int
    PART: int


def _merge(p: Problem, tiles: int, items: int, block: int, keys: int) -> TritonKernel:
    return TritonKernel(
        "dkv:merge",
        p.pairs * tiles * (keys // MERGED_ROWS),
        (p.S, tiles, items),
        p.dk_dv,
        Merge(p.Hkv, p.D, p.Dv, block, keys, MERGED_ROWS),
    )


class BlockLists(NamedTuple):
    """What is compiled into `selected.tile_block_lists`."""

    HEADS: int
    N: int
    BLOCK: int
    TOKENS: int
    SLOTS: int
    ENTRIES: int
    CHUNK: int


@dataclasses.dataclass(frozen=True)
class Selected:
    """The selected branch: `n` blocks of `block` keys a token.

    A tile has the heads of one token where they fill 16 rows or more, else of as many
    neighbouring tokens as 16 rows hold.
    """

    problem: Problem
    n: int
    block: int

    @property
    def limits(self) -> tuple[int, int]:
        """Rows and keys of a tile, at most."""
        return min(power(self.problem.group), 64), min(power(self.block), 64)

    @property
    def tokens(self) -> int:
        return max(LEAST // self.problem.group, 1)

    @property
    def tiles(self) -> int:
        """Of one key/value head and batch row."""
        return cdiv(self.problem.T, self.tokens)

    @property
    def slots(self) -> int:
        return power(self.n, 1)

    @property
    def entries(self) -> int:
        """Of a tile's block list, at most."""
        return power(self.tokens, 1) * self.slots

    def block_lists(self) -> TritonKernel | None:
        """Arrays: indices, position, key_start; results: the lists of the tiles, their lengths.

        None where each token is a tile of its own.
        """
        if self.tokens == 1:
            return None
        p = self.problem
        programs = p.pairs * self.tiles
        return TritonKernel(
            "selected:tile_block_lists",
            programs,
            (p.T,),
            (Array((programs, self.entries), "int32"), Array((programs,), "int32")),
            BlockLists(
                HEADS=p.Hkv,
                N=self.n,
                BLOCK=self.block,
                TOKENS=self.tokens,
                SLOTS=self.slots,
                ENTRIES=self.entries,
                CHUNK=min(self.entries, 32),
            ),
        )

    def forward(self) -> TritonKernel:
        """Arrays: query, key, value, indices, position, key_start, lists, counts, gate, added;
        results: out, lse.
        """
        p = self.problem
        return self._kernel("forward", (p.log2_scale,), p.out_lse)

    def dq(self) -> TritonKernel:
        """Arrays: query .. counts as of `forward`, do .. added as of `interval_dq`; result: dq."""
        p = self.problem
        return self._kernel("dq", (p.log2_scale, p.scale), p.dq, LSE_GRAD=p.lse_grad)

    def _kernel(self, name: str, scales, outputs, **sizes: bool) -> TritonKernel:
        p = self.problem
        tiling = p.tiling(name, *self.limits)
        chunks = cdiv(p.group, tiling.rows) if self.tokens == 1 else 1
        constants = p.constants(
            tiling,
            N=self.n,
            SLOTS=self.slots,
            BLOCK=self.block,
            TOKENS=self.tokens,
            ENTRIES=self.entries,
            CHUNKS=chunks,
            PARTS=cdiv(self.block, tiling.keys),
            ADDED=p.added,
            **sizes,
        )
        programs = p.pairs * self.tiles * chunks
        scalars = p.T, p.S, *scales
        function = f"selected:{name}"
        return TritonKernel(function, programs, scalars, outputs, constants, *tiling.launch)


@dataclasses.dataclass(frozen=True)
class SelectedDkv:
    """dk and dv of the selected branch, from the query list of each tile of `block` keys.

    Attributes:
      packed: whether sequences may begin at any key: a block then lies in two tiles.
    """

    problem: Problem
    n: int
    block: int
    packed: bool

    @property
    def copies(self) -> int:
        return 2 if self.packed else 1

    @property
    def tiles(self) -> int:
        """Of one key/value head and batch row."""
        return cdiv(self.problem.S, self.block)

    @property
    def entries(self) -> int:
        """Of the query lists of one key/value head and batch row, at most."""
        return self.problem.T * self.n * self.copies

    @property
    def items(self) -> int:
        """Of one key/value head and batch row, at most; every tile has one."""
        return self.tiles + self.entries // SEGMENT

    @property
    def tiling(self) -> Tiling:
        return self.problem.tiling("dkv", keys=power(self.block))

    @property
    def parts(self) -> int:
        return max(power(self.block) // self.tiling.keys, 1)

    def partials(self) -> TritonKernel:
        """Arrays: query, key, value, indices, position, key_start, do, lse, delta, gate, dlse,
        order, starts, ends, tile_of; results: partials of dk, dv.
        """
        p, tiling = self.problem, self.tiling
        return TritonKernel(
            "dkv:of_blocks",
            p.pairs * self.items * self.parts,
            (p.T, p.S, self.tiles, self.items, self.entries, p.log2_scale, p.scale),
            p.partials(p.pairs * self.items, self.parts * tiling.keys),
            p.constants(
                tiling,
                N=self.n,
                COPIES=self.copies,
                BLOCK=self.block,
                SEGMENT=SEGMENT,
                PARTS=self.parts,
                LSE_GRAD=p.lse_grad,
            ),
            *tiling.launch,
        )

    def merge(self) -> TritonKernel:
        """Arrays: the partials, and the item after each tile's."""
        keys = self.parts * self.tiling.keys
        return _merge(self.problem, self.tiles, self.items, self.block, keys)


class Scores(NamedTuple):
    """What is compiled into `scores.best_blocks`."""

    HEADS: int
    GROUP: int
    WIDTH: int
    N: int
    SELECT_BLOCK: int
    TOKENS: int
    GROUP_COLUMNS: int
    BLOCKS: int
    RATIO: int
    RATIO_ROWS: int
    COVER: int
    NUM_INITIAL: int
    NUM_LOCAL: int
    BEST: int
    DOUBLINGS: int
    PRECISION: str


def best_blocks(p: Problem, config: Any) -> TritonKernel:
    """Arrays: query, key, lse, first, last, position, base; result: the selection.

    Args:
      config: an `NSAConfig`.
    """
    ratio = config.select_block // config.compress_stride
    ratio_rows = power(ratio, 1)
    best = power(config.num_selected, 2)
    group = power(p.group, 1)
    tiling = scores_tiling(p.group, p.D, p.itemsize, p.capability)
    if tiling is None:
        raise NotImplementedError(f"triton: no tiles of the scores fit on {p.capability}")
    columns = max(tiling.rows, group)
    blocks = max(tiling.keys // ratio_rows, 1)
    return TritonKernel(
        "scores:best_blocks",
        p.pairs * cdiv(p.T, columns // group),
        (p.T, p.S, p.log2_scale),
        (Array((p.B, p.T, p.Hkv, config.num_selected), "int32"),),
        Scores(
            HEADS=p.Hkv,
            GROUP=p.group,
            WIDTH=p.D,
            N=config.num_selected,
            SELECT_BLOCK=config.select_block,
            TOKENS=columns // group,
            GROUP_COLUMNS=group,
            BLOCKS=blocks,
            RATIO=ratio,
            RATIO_ROWS=ratio_rows,
            COVER=config.compress_block // config.compress_stride,
            NUM_INITIAL=config.num_initial,
            NUM_LOCAL=config.num_local,
            BEST=best,
            DOUBLINGS=max((best // blocks).bit_length() - 1, 0),
            PRECISION=precision(p.dtype),
        ),
        *tiling.launch,
    )


class Rowwise(NamedTuple):
    """What is compiled into the kernels of `combine.py`."""

    WIDTH: int
    ROWS: int


def _rowwise(function: str, rows: int, width: int, outputs) -> TritonKernel:
    tile = max(4096 // power(width), 1)
    constants = Rowwise(width, tile)
    return TritonKernel(
        f"combine:{function}", cdiv(rows, tile), (rows,), tuple(outputs), constants
    )


def gated_sum(out: Array) -> TritonKernel:
    """Arrays: the three outputs, each like `out`, then their gates; result: the sum."""
    *rows, width = out.shape
    return _rowwise("gated_sum", math.prod(rows), width, [out])


def deltas(out: Array, count: int) -> TritonKernel:
    """Arrays: do, then the outputs, `count` of them, 1 or 3; results: rowsum(dO * O) of each."""
    *rows, width = out.shape
    results = [Array(tuple(rows), "float32")] * count
    return _rowwise("delta" if count == 1 else "deltas", math.prod(rows), width, results)


@dataclasses.dataclass(frozen=True)
class Heads:
    """What a row of a layer's fused projection holds: query heads of D columns, then the key heads
    of D of 1 to 3 branches, then the value heads of Dv of as many, then `gates` numbers of each
    query head, and what fills the row up to 16 bytes.

    `means`: 1 where the mean of each key/value head's query heads is made beside them, or 0.
    `raw_keys`: so many branches, the first, have keys that are not rotated.
    """

    H: int
    Hkv: int
    D: int
    Dv: int
    branches: int
    means: int = 0
    gates: int = 0
    raw_keys: int = 0

    @property
    def row(self) -> int:
        """Columns of the projection."""
        heads = self.H * self.D + self.branches * self.Hkv * (self.D + self.Dv)
        return heads + self.gate_columns

    @property
    def gate_columns(self) -> int:
        """Columns of the gates, with what fills the row."""
        return cdiv(self.H * self.gates, 8) * 8

    def split_shapes(self, *tokens: int) -> list[tuple[int, ...]]:
        """Shapes of query, three keys, three values, mean, gates; what is absent is empty."""
        absent = [(0,)] * (3 - self.branches)
        keys, values = (
            [(*tokens, self.Hkv, width)] * self.branches + absent for width in (self.D, self.Dv)
        )
        mean = (*tokens, self.Hkv, self.D) if self.means else (0,)
        gates = (*tokens, self.H, self.gates) if self.gates else (0,)
        return [(*tokens, self.H, self.D), *keys, *values, mean, gates]


class SplitHeads(NamedTuple):
    """What is compiled into the kernels of `split_heads.py`; ROW: columns of the projection."""

    HEADS: int
    GROUP: int
    WIDTH: int
    VALUE_WIDTH: int
    GATES: int
    BRANCHES: int
    MEANS: int
    RAW_KEYS: int
    ROW: int
    ROWS: int


def split_heads(
    heads: Heads, tokens: int, dtype: str, norm_eps: float | None = None
) -> TritonKernel:
    """Arrays: the projection `[tokens, heads.row]`, where `norm_eps` is given the norms' weights of
    query and keys `[D]`, cos and sin, float32 `[tokens, D / 2]`.

    Results: those of `heads.split_shapes`.
    """
    outputs = tuple(Array(shape, dtype) for shape in heads.split_shapes(tokens))
    name = "split_heads" if norm_eps is None else "split_normed_heads"
    return _heads(name, heads, tokens, outputs, heads.means, norm_eps)


def join_heads(
    heads: Heads, tokens: int, dtype: str, norm_eps: float | None = None
) -> TritonKernel:
    """Arrays: gradients of the results of `split_heads`, where `norm_eps` is given the projection
    and the norms' weights, cos and -sin.

    Results: the projection's gradient; those of the norms' weights as float32 partials
    `[.., heads of query and keys, D]`.
    """
    outputs = (Array((tokens, heads.row), dtype),)
    if norm_eps is None:
        return _heads("join_heads", heads, tokens, outputs, 0, None)
    normed = heads.H + heads.branches * heads.Hkv
    partials = Array((cdiv(tokens, _rows(heads)), normed, heads.D), "float32")
    return _heads("join_normed_heads", heads, tokens, (*outputs, partials), 0, norm_eps)


def _rows(heads: Heads) -> int:
    """Tokens of a program."""
    return max(4096 // max(power(heads.D), power(heads.Dv)), 1)


def _heads(
    function: str, heads: Heads, tokens: int, outputs, means: int, norm_eps: float | None
) -> TritonKernel:
    rows = _rows(heads)
    of_row = heads.H + (2 * heads.branches + means) * heads.Hkv + min(heads.gates, 1)
    return TritonKernel(
        f"split_heads:{function}",
        cdiv(tokens, rows) * of_row,
        (tokens,) if norm_eps is None else (tokens, norm_eps),
        outputs,
        SplitHeads(
            HEADS=heads.Hkv,
            GROUP=heads.H // heads.Hkv,
            WIDTH=heads.D,
            VALUE_WIDTH=heads.Dv,
            GATES=heads.H * heads.gates,
            BRANCHES=heads.branches,
            MEANS=heads.means,
            RAW_KEYS=heads.raw_keys,
            ROW=heads.row,
            ROWS=rows,
        ),
    )
