"""The launches of `paged_blocks.py`, described: no Triton is imported."""

from typing import Any, NamedTuple

from kernels_pallas.kernel import Array
from kernels_pallas.specs.tile import SMS
from kernels_pallas.triton.descriptions import LOG2E, cdiv
from kernels_pallas.triton.kernel import TritonKernel
from kernels_pallas.triton.tiling import LEAST, WIDE, Tiling, choose, power, precision

SPLIT = 256  # keys of a part of a list; of wide heads half as many
CHUNK = 1024  # keys that a program scores; half as many where programs are few
KEYS = 128  # of a step of it
PART = 4096  # blocks of a row that are written at a time
BLOCKS = 2**15  # of a row, whose scores one program holds
# Where lists are few, their blocks go in parts of so many, and the bits of a score in so many.
LIST_PART, DIGITS = 2048, (8, 8, 8, 8)
LEAST_PARTS = 4  # of a list: the launches are not worth fewer
MOST_PARTS = 8 * SMS  # of all lists: with more, a program for each fills a GPU
GROUP, WIDTH, INDEX_HEADS = 64, 256, 64
DTYPES = ("float16", "bfloat16", "float32")


class Rows(NamedTuple):
    """The tokens of a call.

    Attributes:
      tokens: of all rows; queries: of each, 0 where they differ.
      pages: of a row's table; pool: pages that there are.
      page: tokens of a page.
    """

    tokens: int
    queries: int
    pages: int
    pool: int
    page: int

    @property
    def most(self) -> int:
        """Tokens that a row's table has room for."""
        return self.pages * self.page


APART = "reads pages whose tokens lie in memory one after the other"


class PagedScores(NamedTuple):
    """What is compiled into `paged_blocks.scores`."""

    HEADS: int
    ROWS: int
    WIDTH: int
    POOL: int
    ENTRY: int
    PER_PAGE: int
    KEYS: int
    CHUNK: int
    RELU: bool
    SUM: bool
    RAGGED: bool
    PRECISION: str


class PagedIndex(NamedTuple):
    """Of the blocks of an indexer; fields as of `nsa_core.index.Index`, `entry` tokens a key.

    Attributes:
      stride: keys from a page to the next; None: those of a page lie apart.
    """

    rows: Rows
    stride: int | None
    heads: int
    width: int
    dtype: str
    pool: int
    entry: int
    num_selected: int
    num_initial: int
    num_local: int
    relu: bool
    sums: bool
    capability: tuple[int, int]

    @property
    def keys(self) -> int:
        """That a row's table has room for."""
        return self.rows.most // self.entry

    @property
    def blocks(self) -> int:
        return cdiv(self.keys, self.pool)

    @property
    def lists(self) -> int:
        return 1 if self.sums else self.heads

    def why_not(self) -> str | None:
        """Why the kernels cannot run a problem, or None."""
        if self.stride is None:
            return APART
        if self.dtype not in DTYPES:
            return f"computes in {', '.join(DTYPES)}, got {self.dtype}"
        if self.pool > 2 * KEYS or self.pool & (self.pool - 1):
            return f"takes blocks of a power of two up to {2 * KEYS} keys, got {self.pool}"
        if self.heads > INDEX_HEADS or self.width > WIDTH:
            return (
                f"takes up to {INDEX_HEADS} heads and widths up to {WIDTH}, "
                f"got {self.heads} and {self.width}"
            )
        if self.blocks > BLOCKS:
            return f"takes tables of up to {BLOCKS} blocks, got {self.blocks}"
        return None

    def scores(self) -> TritonKernel:
        """Arrays: query, pages, page_table, lengths, rows, positions; result: maxima by block."""
        narrow, sizes = self.dtype != "float32", self.rows
        keys = max(self.pool, KEYS if narrow and self.width <= KEYS else KEYS // 4)
        wide = narrow and self.capability[0] in WIDE
        # As many as `index.index_blocks` has at least, so that scores have the same bits.
        rows = max(power(self.heads), 64 if wide else LEAST)
        chunk = (
            CHUNK if sizes.tokens * cdiv(self.keys, CHUNK) > 4 * SMS else max(CHUNK // 2, keys)
        )
        return TritonKernel(
            "paged_blocks:scores",
            sizes.tokens * cdiv(self.keys, chunk),
            (
                sizes.tokens,
                max(sizes.queries, 1),
                sizes.pages,
                sizes.pool,
                self.stride or 0,
                sizes.most,
                self.blocks,
            ),
            (Array((sizes.tokens, self.lists, self.blocks), "float32"),),
            PagedScores(
                HEADS=self.heads,
                ROWS=rows,
                WIDTH=self.width,
                POOL=self.pool,
                ENTRY=self.entry,
                PER_PAGE=sizes.page // self.entry,
                KEYS=keys,
                CHUNK=chunk,
                RELU=self.relu,
                SUM=self.sums,
                RAGGED=sizes.queries == 0,
                PRECISION=precision(self.dtype),
            ),
            4,
            1,  # more programs hide more than more stages
        )

    def best(self) -> "Best":
        """From the result of `scores`."""
        chosen = self.num_selected, self.num_initial, self.num_local
        blocks = self.blocks, self.blocks
        about = self.rows.tokens, self.lists, *blocks, self.pool, self.entry, *chosen
        return Best(*about, self.rows.queries, self.rows.most)


class BestConstants(NamedTuple):
    """What is compiled into `best`, `digits` and `chosen`."""

    LISTS: int
    N: int
    POOL: int
    ENTRY: int
    NUM_INITIAL: int
    NUM_LOCAL: int
    RAGGED: bool
    PART: int
    PARTS: int = 1
    SLOTS: int = 0
    BLOCKS: int = 0
    SHIFT: int = 0
    BITS: int = 0
    BITS_BEFORE: int = 0


class Best(NamedTuple):
    """The best blocks, int32 `[tokens, lists, num_selected]`, from arrays: scores float32 `[tokens,
    lists, blocks]`, lengths, rows, positions, of which the first is read where rows have the same
    number of `queries`, the others elsewhere.

    Attributes:
      most_blocks: that there may be in any call of a problem; most: tokens of a row.
    """

    tokens: int
    lists: int
    blocks: int
    most_blocks: int
    pool: int
    entry: int
    num_selected: int
    num_initial: int
    num_local: int
    queries: int = 0
    most: int = 0

    @property
    def steps(self) -> int:
        """Of `digits`."""
        return len(DIGITS)

    @property
    def held(self) -> int:
        return power(self.most_blocks)

    @property
    def parts(self) -> int:
        """Of a list, which has so many programs."""
        parts = self.held // LIST_PART
        few = parts * self.tokens * self.lists <= MOST_PARTS and self.num_selected <= self.held
        return parts if parts >= LEAST_PARTS and few else 1

    def whole(self) -> TritonKernel:
        """Where a list has one program. Arrays as above; result: the blocks."""
        return self._kernel(
            "best",
            (Array((self.tokens, self.lists, self.num_selected), "int32"),),
            min(max(self.held // 2048, 4), 16),  # of few warps sums are soon made
            SLOTS=power(self.num_selected),
            BLOCKS=self.held,
            PART=min(self.held, PART),
        )

    def digits(self, step: int) -> TritonKernel:
        """Arrays: scores, then counts and known bits of the step before, lengths, rows, positions;
        results: these of this step, and how many blocks of a part have more in the known bits.
        """
        items, bits = self.tokens * self.lists, DIGITS[step]
        outputs = (items, self.parts, 2**bits), (items, 2), (items, self.parts)
        return self._kernel(
            "digits",
            tuple(Array(x, "int32") for x in outputs),
            PARTS=self.parts,
            PART=LIST_PART,
            SHIFT=sum(DIGITS[step + 1 :]),
            BITS=bits,
            BITS_BEFORE=DIGITS[step - 1] if step else 0,
        )

    def chosen(self) -> TritonKernel:
        """Arrays: scores, the results of the last step of `digits`, lengths, rows, positions;
        result: the blocks.
        """
        return self._kernel(
            "chosen",
            (Array((self.tokens, self.lists, self.num_selected), "int32"),),
            SLOTS=power(self.num_selected),
            PARTS=self.parts,
            PART=LIST_PART,
            BITS=DIGITS[-1],
        )

    def _kernel(self, name: str, outputs, warps: int = 4, **sizes: int) -> TritonKernel:
        constants = BestConstants(
            LISTS=self.lists,
            N=self.num_selected,
            POOL=self.pool,
            ENTRY=self.entry,
            NUM_INITIAL=self.num_initial,
            NUM_LOCAL=self.num_local,
            RAGGED=self.queries == 0,
            **sizes,
        )
        programs = self.tokens * self.lists * constants.PARTS
        scalars = max(self.queries, 1), self.most, self.blocks
        return TritonKernel(
            f"paged_blocks:{name}", programs, scalars, outputs, constants, warps
        )


class PagedAttention(NamedTuple):
    """What is compiled into `partials` and `merge`."""

    GROUP: int
    ROWS: int
    PARTS: int
    VALUE_WIDTH: int
    WIDTH: int = 0
    HEADS: int = 0
    PAIRS: int = 0
    SCOPES: int = 0
    N: int = 0
    BLOCK: int = 0
    PAGE: int = 0
    TAIL: bool = False
    SPLIT: int = 0
    KEYS: int = 0
    RAGGED: bool = False
    BY_PAIR: bool = False
    PRECISION: str = ""
    GATED: bool = False
    ADDED: bool = False


class PagedBlocks(NamedTuple):
    """Of attention to listed blocks; `scopes`: lists of a token; `tail`: its own block too, where
    that is not complete; `strides`: tokens from a page to the next, of keys and of values, None
    where those of a page lie apart.
    """

    rows: Rows
    strides: tuple[int | None, int | None]
    H: int
    Hkv: int
    D: int
    Dv: int
    dtype: str
    scopes: int
    n: int
    block: int
    tail: bool
    scale: float
    capability: tuple[int, int]
    whole: bool = False  # a program has a whole list; many queries fill the GPU

    @property
    def pairs(self) -> int:
        """Lists, each with a key/value head that it serves."""
        return max(self.scopes, self.Hkv)

    @property
    def group(self) -> int:
        return self.H // self.pairs

    @property
    def listed(self) -> int:
        """Keys of a list."""
        return (self.n + self.tail) * self.block

    @property
    def parts(self) -> int:
        return 1 if self.whole else cdiv(self.listed, self.split)

    @property
    def split(self) -> int:
        """Keys of a part."""
        return SPLIT if self.D + self.Dv <= 256 else SPLIT // 2

    def _tiling(self) -> Tiling | None:
        widths, itemsize = (self.D, self.Dv), 4 if self.dtype == "float32" else 2
        keys, rows = min(power(self.listed), 64, self.split), power(self.group)
        found = choose("forward", rows, keys, *widths, itemsize, self.capability)
        small = self.whole or self.D + self.Dv > 256  # gathers of many programs hide each other
        if found is None or not small or rows > LEAST or itemsize == 4:
            return found
        return Tiling(rows, min(keys, 32), 1, 2)

    def why_not(self) -> str | None:
        """Why the kernels cannot run a problem, or None."""
        if None in self.strides:
            return APART
        if self.dtype not in DTYPES:
            return f"computes in {', '.join(DTYPES)}, got {self.dtype}"
        if self.group > GROUP or max(self.D, self.Dv) > WIDTH or self._tiling() is None:
            return (
                f"takes up to {GROUP} query heads of a list and widths up to {WIDTH}, "
                f"got {self.group}, D={self.D} and Dv={self.Dv}"
            )
        if self.listed * self.rows.tokens * self.pairs >= 2**31:
            return f"takes fewer listed keys than 2**31, got N={self.rows.tokens}"
        return None

    def partials(self) -> TritonKernel:
        """Arrays: query, key pages, value pages, page_table, lengths, rows, positions, lists;
        results: maxima, sums, outputs.
        """
        sizes, tiling = self.rows, self._tiling()
        assert tiling is not None
        heads = sizes.tokens * self.H
        split = cdiv(self.listed, tiling.keys) * tiling.keys if self.whole else self.split
        return TritonKernel(
            "paged_blocks:partials",
            sizes.tokens * self.pairs * self.parts,
            (
                *(max(sizes.queries, 1), sizes.pages, sizes.pool),
                *(x or 0 for x in self.strides),
                *(sizes.most, self.scale * LOG2E),
            ),
            (
                Array((heads, self.parts), "float32"),
                Array((heads, self.parts), "float32"),
                Array((heads, self.parts, self.Dv), "float32"),
            ),
            self._constants(
                tiling.rows,
                HEADS=self.Hkv,
                PAIRS=self.pairs,
                SCOPES=self.scopes,
                WIDTH=self.D,
                N=self.n,
                BLOCK=self.block,
                PAGE=sizes.page,
                TAIL=self.tail,
                SPLIT=split,
                KEYS=tiling.keys,
                RAGGED=sizes.queries == 0,
                BY_PAIR=self.whole,
                PRECISION=precision(self.dtype),
            ),
            8 if self.dtype == "float32" else tiling.warps,
            tiling.stages,
        )

    def merge(self) -> TritonKernel:
        """Arrays: the results of `partials`; results: out, lse."""
        tokens = self.rows.tokens
        return TritonKernel(
            "paged_blocks:merge",
            tokens * self.pairs,
            (),
            (Array((tokens, self.H, self.Dv), self.dtype), Array((tokens, self.H), "float32")),
            self._constants(power(self.group)),
        )

    def _constants(self, rows: int, **sizes: Any) -> PagedAttention:
        return PagedAttention(self.group, rows, self.parts, self.Dv, **sizes)
