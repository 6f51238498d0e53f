"""The launches of `paged_blocks.py`, described: no Triton is imported."""

from typing import Any, NamedTuple

from kernels_pallas.kernel import Array
from kernels_pallas.triton.descriptions import LOG2E, cdiv
from kernels_pallas.triton.kernel import TritonKernel
from kernels_pallas.triton.tiling import LEAST, WIDE, Tiling, choose, power

HERE = "kernels_pallas.triton.paged_blocks"
SPLIT = 256  # keys of a part of a list
CHUNK = 1024  # keys that a program scores
KEYS = 128  # of a step of it
PART = 4096  # blocks of a row that are written at a time
BLOCKS = 2**15  # of a row, whose scores one program holds
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
        columns = power(self.width)
        # As many as `index.index_blocks` has at least, so that scores have the same bits.
        rows = max(power(self.heads), 64 if wide else LEAST)
        return TritonKernel(
            f"{HERE}:scores",
            sizes.tokens * cdiv(self.keys, CHUNK),
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
            {
                "HEADS": self.heads,
                "ROWS": rows,
                "WIDTH": self.width,
                "COLUMNS": columns,
                "POOL": self.pool,
                "ENTRY": self.entry,
                "PER_PAGE": sizes.page // self.entry,
                "KEYS": keys,
                "CHUNK": CHUNK,
                "RELU": self.relu,
                "SUM": self.sums,
                "RAGGED": sizes.queries == 0,
                "PRECISION": "ieee" if self.dtype == "float32" else "tf32",
            },
            4,
            1,  # more programs hide more than more stages
        )

    def best(self) -> TritonKernel:
        """Of `best_blocks`, from the result of `scores`."""
        queries, chosen = (
            self.rows.queries,
            (self.num_selected, self.num_initial, self.num_local),
        )
        blocks = self.blocks, self.blocks
        about = self.rows.tokens, self.lists, *blocks, self.pool, self.entry, *chosen
        return best_blocks(*about, queries, self.rows.most)


def best_blocks(
    tokens: int,
    lists: int,
    blocks: int,
    most_blocks: int,
    pool: int,
    entry: int,
    num_selected: int,
    num_initial: int,
    num_local: int,
    queries: int = 0,
    most: int = 0,
) -> TritonKernel:
    """Arrays: scores float32 `[tokens, lists, blocks]`, lengths, rows, positions, of which the
    first is read where rows have the same number of `queries`, the others elsewhere; result: the
    blocks, int32 `[tokens, lists, num_selected]`.

    Args:
      most_blocks: that there may be in any call of a problem; most: tokens of a row.
    """
    held = power(most_blocks)
    return TritonKernel(
        f"{HERE}:best",
        tokens * lists,
        (max(queries, 1), most, blocks),
        (Array((tokens, lists, num_selected), "int32"),),
        {
            "LISTS": lists,
            "N": num_selected,
            "SLOTS": power(num_selected),
            "BLOCKS": held,
            "PART": min(held, PART),
            "POOL": pool,
            "ENTRY": entry,
            "NUM_INITIAL": num_initial,
            "NUM_LOCAL": num_local,
            "RAGGED": queries == 0,
        },
        min(max(held // 2048, 4), 16),  # of few warps sums are soon made
    )


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
        return 1 if self.whole else cdiv(self.listed, SPLIT)

    def _tiling(self) -> Tiling | None:
        widths, itemsize = (self.D, self.Dv), 4 if self.dtype == "float32" else 2
        keys, rows = min(power(self.listed), 64, SPLIT), power(self.group)
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
        return TritonKernel(
            f"{HERE}:partials",
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
            self._sizes()
            | {
                "HEADS": self.Hkv,
                "PAIRS": self.pairs,
                "SCOPES": self.scopes,
                "ROWS": tiling.rows,
                "WIDTH": self.D,
                "COLUMNS": power(self.D),
                "N": self.n,
                "BLOCK": self.block,
                "TAIL": self.tail,
                "PAGE": sizes.page,
                "SPLIT": cdiv(self.listed, tiling.keys) * tiling.keys if self.whole else SPLIT,
                "KEYS": tiling.keys,
                "RAGGED": sizes.queries == 0,
                "BY_PAIR": self.whole,
                "PRECISION": "ieee" if self.dtype == "float32" else "tf32",
            },
            8 if self.dtype == "float32" else tiling.warps,
            tiling.stages,
        )

    def merge(self) -> TritonKernel:
        """Arrays: the results of `partials`; results: out, lse."""
        tokens = self.rows.tokens
        return TritonKernel(
            f"{HERE}:merge",
            tokens * self.pairs,
            (),
            (
                Array((tokens, self.H, self.Dv), self.dtype),
                Array((tokens, self.H), "float32"),
            ),
            self._sizes() | {"ROWS": power(self.group)},
        )

    def _sizes(self) -> dict[str, Any]:
        return {
            "GROUP": self.group,
            "PARTS": self.parts,
            "VALUE_WIDTH": self.Dv,
            "VALUE_COLUMNS": power(self.Dv),
        }
