"""The Triton kernels of an indexer, its blocks and its loss, described: no Triton is imported."""

from typing import Any, NamedTuple

from kernels_pallas.kernel import Array
from kernels_pallas.triton.descriptions import LOG2E, MERGED_ROWS, SEGMENT, cdiv
from kernels_pallas.triton.kernel import TritonKernel
from kernels_pallas.triton.paged_blocks_descriptions import BLOCKS, DTYPES
from kernels_pallas.triton.tiling import (
    LEAST,
    SPARE,
    WIDE,
    Tiling,
    power,
    precision,
    smem_of,
)

POOLS = (16, 32, 64, 128, 256)
SELECTED = 64  # blocks of a query, which stay in registers
CHUNK = 2048  # keys that a program scores, where it writes scores
WIDTH = 256
FLOAT32_KEYS = 4096  # numbers of a block in float32, whose products hold them in registers


class IndexSizes(NamedTuple):
    """Of `index_blocks`; `S`: rows of the keys, each of `entry` tokens, `pool` a block."""

    B: int
    T: int
    S: int
    heads: int
    width: int
    dtype: str
    pool: int
    entry: int
    num_selected: int
    num_initial: int
    num_local: int
    relu: bool = False
    sums: bool = False

    @property
    def blocks(self) -> int:
        """Of all keys; with that of the last tokens, which may have no key yet, but be forced."""
        forced = self.num_initial + self.num_local > 0
        return cdiv(self.S, self.pool) + (self.entry > 1 and forced)

    @property
    def lists(self) -> int:
        return 1 if self.sums else self.heads

    @property
    def on_chip(self) -> bool:
        """Whether `index.index_blocks` takes it, from which no score gets out."""
        plain = not (self.relu or self.sums)
        return plain and self.pool in POOLS and self.num_selected <= SELECTED


def why_not(sizes: IndexSizes) -> str | None:
    """Why the kernels cannot run a problem, or None."""
    if sizes.dtype not in DTYPES:
        return f"computes in {', '.join(DTYPES)}, got {sizes.dtype}"
    if sizes.pool > POOLS[-1] or sizes.pool & (sizes.pool - 1):
        return f"takes blocks of a power of two up to {POOLS[-1]} keys, got pool={sizes.pool}"
    if sizes.width > WIDTH:
        return f"takes widths up to {WIDTH}, got {sizes.width}"
    if sizes.heads > 64:
        return f"takes up to 64 heads, got {sizes.heads}"
    if not sizes.on_chip and sizes.blocks > BLOCKS:
        return (
            f"takes up to {BLOCKS} blocks of a row where their scores are written, "
            f"got {sizes.blocks}"
        )
    return None


class Index(NamedTuple):
    """What is compiled into the kernels of `index.py`."""

    HEADS: int
    HEAD_ROWS: int
    TOKENS: int
    ROWS: int
    WIDTH: int
    POOL: int
    KEYS: int
    ENTRY: int
    PRECISION: str
    CHUNK: int = 0
    RELU: bool = False
    SUM: bool = False
    N: int = 0
    BEST: int = 0
    NUM_INITIAL: int = 0
    NUM_LOCAL: int = 0


def _index(sizes: IndexSizes, rows: int, keys: int, **more: Any) -> Index:
    """`rows` of queries a tile, at most: all heads of some tokens."""
    heads = power(sizes.heads, 1)
    tokens = max(rows // heads, 1)
    return Index(
        HEADS=sizes.heads,
        HEAD_ROWS=heads,
        TOKENS=tokens,
        ROWS=tokens * heads,
        WIDTH=sizes.width,
        POOL=sizes.pool,
        KEYS=keys,
        ENTRY=sizes.entry,
        PRECISION=precision(sizes.dtype),
        **more,
    )


def index_scores(
    sizes: IndexSizes, capability: tuple[int, int], first: int, count: int, blocks: int
) -> TritonKernel:
    """Of the tokens `first .. first + count - 1`, whose keys are in the first `blocks` blocks.
    Arrays: query, key, position; result: maxima by block.
    """
    tiles = _tiles(sizes, capability, LEAST)
    keys = max(tiles.keys, sizes.pool)
    chunk = max(CHUNK, keys)
    constants = _index(sizes, tiles.rows, keys, CHUNK=chunk, RELU=sizes.relu, SUM=sizes.sums)
    return TritonKernel(
        "index:index_scores",
        sizes.B * cdiv(count, constants.TOKENS) * cdiv(blocks * sizes.pool, chunk),
        (sizes.T, sizes.S, first, count, blocks),
        (Array((sizes.B, count, sizes.lists, blocks), "float32"),),
        constants,
        *tiles.launch,
    )


def index_blocks(sizes: IndexSizes, capability: tuple[int, int]) -> TritonKernel:
    """Arrays: query, key, position; result: the blocks, int32 `[B, T, heads, n]`."""
    best = max(power(sizes.num_selected), LEAST)
    tiles = _tiles(sizes, capability, best)
    constants = _index(
        sizes,
        tiles.rows,
        tiles.keys,
        N=sizes.num_selected,
        BEST=best,
        NUM_INITIAL=sizes.num_initial,
        NUM_LOCAL=sizes.num_local,
    )
    shape = sizes.B, sizes.T, sizes.heads, sizes.num_selected
    return TritonKernel(
        "index:index_blocks",
        sizes.B * cdiv(sizes.T, constants.TOKENS),
        (sizes.T, sizes.S),
        (Array(shape, "int32"),),
        constants,
        *tiles.launch,
    )


def _tiles(sizes: IndexSizes, capability: tuple[int, int], best: int) -> Tiling:
    """The largest that fit in shared memory, of two programs if they can, and whose candidates
    stay in registers.
    """
    itemsize = 4 if sizes.dtype == "float32" else 2
    pool = sizes.pool if sizes.on_chip else 128
    rows, keys = (32, min(pool, 32)) if itemsize == 4 else (64, min(pool, 128))
    rows = 128 if rows == 64 and capability[0] in WIDE else rows
    rows, width = max(min(rows, 2048 // best), LEAST), power(sizes.width)
    limit = smem_of(capability)
    while True:
        for stages, programs in ((3, 2), (2, 2), (2, 1)):
            held = itemsize * width * (rows + stages * keys) + SPARE
            if programs * held <= limit:
                return Tiling(rows, keys, 4, stages)
        if rows == LEAST and keys == LEAST:
            return Tiling(rows, keys, 4, 1)
        rows, keys = max(rows // 2, LEAST), max(keys // 2, LEAST)


class LossSizes(NamedTuple):
    """Of the kernels of `indexer_kl` over listed blocks."""

    B: int
    T: int
    S: int
    H: int
    Hkv: int
    D: int
    index_heads: int
    index_width: int
    n: int
    block: int
    dtype: str  # of queries and keys
    index_dtype: str
    scale: float
    index_scale: float

    @property
    def group(self) -> int:
        """Query heads of an index head."""
        return self.H // self.index_heads

    @property
    def queries(self) -> int:
        """Of all rows and index heads."""
        return self.B * self.T * self.index_heads

    @property
    def tiles(self) -> int:
        return cdiv(self.S, self.block)

    @property
    def entries(self) -> int:
        """Of the lists of a batch row and index head."""
        return self.T * self.n

    @property
    def items(self) -> int:
        """Of these, at most; every block has one."""
        return self.tiles + self.entries // SEGMENT

    @property
    def programs(self) -> int:
        return self.B * self.index_heads * self.items

    @property
    def lengths(self) -> tuple[int, ...]:
        """What the kernels over query lists are told."""
        return self.T, self.S, self.tiles, self.items, self.entries

    @property
    def is_float32(self) -> bool:
        return self.index_dtype == "float32"


def loss_why_not(sizes: LossSizes) -> str | None:
    """Why the kernels of the loss cannot run a problem, or None."""
    if sizes.dtype not in DTYPES or sizes.index_dtype != sizes.dtype:
        return (
            f"computes in {', '.join(DTYPES)}, the same of both, "
            f"got {sizes.dtype} and {sizes.index_dtype}"
        )
    if sizes.block not in (16, 32, 64, 128):
        return f"takes blocks of 16, 32, 64 and 128 keys, got {sizes.block}"
    if sizes.index_heads % sizes.Hkv:
        return (
            "takes index heads of one key/value head each, "
            f"got {sizes.index_heads} and Hkv={sizes.Hkv}"
        )
    width = max(sizes.D, sizes.index_width)
    if sizes.group > 64 or width > 128:
        return (
            "takes up to 64 query heads of an index head and widths up to 128, "
            f"got {sizes.group}, D={sizes.D} and Di={sizes.index_width}"
        )
    if sizes.is_float32 and sizes.block * power(width) > FLOAT32_KEYS:
        return (
            f"takes blocks of up to {FLOAT32_KEYS} numbers in float32, "
            f"got {sizes.block} keys of {power(width)}"
        )
    if sizes.entries >= 2**31:
        return f"takes T n < 2**31, got {sizes.entries}"
    return None


class Loss(NamedTuple):
    """What is compiled into the kernels of `index_kl.py`."""

    INDEX_HEADS: int
    N: int
    BLOCK: int
    WIDTH: int = 0
    SEGMENT: int = 0
    PRECISION: str = ""
    ROWS: int = 0
    HEADS: int = 0
    GROUP: int = 0
    GROUP_ROWS: int = 0
    TOKENS: int = 0
    QUERIES: int = 0
    PART: int = 0


def _kl_tiles(
    sizes: LossSizes, capability: tuple[int, int], rows: tuple[int, int], wide: tuple[int, int]
) -> tuple[int, int, int]:
    """Rows of a step, warps, and stages.

    Args:
      rows: on GPUs that read operands from shared memory, and on others.
      wide: warps and stages on the former.
    """
    if sizes.is_float32:
        return 32, 8, 1
    return (rows[0], *wide) if capability[0] in WIDE else (rows[1], 8, 1)


def kl_targets(sizes: LossSizes, capability: tuple[int, int]) -> TritonKernel:
    """Arrays: query, key, lse, position, order, starts, ends, tile_of; results: masses, targets."""
    group = power(sizes.group, 1)
    rows, warps, stages = _kl_tiles(sizes, capability, (128, 64), (4, 2))
    of_entries = sizes.B, sizes.T, sizes.index_heads, sizes.n
    # t is at most 1, and of small ones the difference counts.
    dtype = "float32" if sizes.is_float32 else "float16"
    return TritonKernel(
        "index_kl:kl_targets",
        sizes.programs,
        (*sizes.lengths, sizes.scale * LOG2E),
        (Array(of_entries, "float32"), Array((*of_entries[:3], sizes.n * sizes.block), dtype)),
        _over_lists(
            sizes,
            sizes.D,
            HEADS=sizes.Hkv,
            GROUP=sizes.group,
            GROUP_ROWS=group,
            TOKENS=max(rows // group, 1),
        ),
        warps,
        stages,
    )


def kl_entries(sizes: LossSizes, capability: tuple[int, int]) -> TritonKernel:
    """Arrays: index_query, index_key, targets, position, order, starts, ends, tile_of;
    results: maxima, sums, crosses.
    """
    of_entries = Array((sizes.B, sizes.T, sizes.index_heads, sizes.n), "float32")
    rows, warps, stages = _kl_tiles(sizes, capability, (64, 16), (4, 3))
    return TritonKernel(
        "index_kl:kl_entries",
        sizes.programs,
        (*sizes.lengths, sizes.index_scale),
        (of_entries, of_entries, of_entries),
        _over_lists(sizes, sizes.index_width, ROWS=rows),
        warps,
        stages,
    )


def _over_lists(sizes: LossSizes, width: int, **more: int) -> Loss:
    """Of a kernel over query lists whose rows have this width."""
    return Loss(
        INDEX_HEADS=sizes.index_heads,
        N=sizes.n,
        BLOCK=sizes.block,
        WIDTH=width,
        SEGMENT=SEGMENT,
        PRECISION=precision(sizes.index_dtype),
        **more,
    )


def kl_loss(sizes: LossSizes) -> TritonKernel:
    """Arrays: maxima, sums, masses, crosses, indices, position; results: loss, index_lse, mass."""
    rows = Array((sizes.B, sizes.T, sizes.index_heads), "float32")
    return TritonKernel(
        "index_kl:kl_loss",
        cdiv(sizes.queries, 128),
        (sizes.queries,),
        (rows, rows, rows),
        Loss(sizes.index_heads, sizes.n, sizes.block, QUERIES=128),
    )


def kl_gradients(sizes: LossSizes, capability: tuple[int, int]) -> TritonKernel:
    """Arrays: index_query, index_key, targets, index_lse, mass, grad, position, order, starts,
    ends, tile_of; results: partials of queries and of keys.
    """
    queries = sizes.B, sizes.T, sizes.index_heads, sizes.n, sizes.index_width
    keys = sizes.programs, sizes.block, sizes.index_width
    rows, warps, stages = _kl_tiles(sizes, capability, (64, 16), (8, 2))
    # Differences of probabilities are too small for float16.
    dtype = "float32" if sizes.is_float32 else "bfloat16"
    return TritonKernel(
        "index_kl:kl_gradients",
        sizes.programs,
        (*sizes.lengths, sizes.index_scale),
        (Array(queries, dtype), Array(keys, "float32")),
        _over_lists(sizes, sizes.index_width, ROWS=rows),
        warps,
        stages,
    )


def kl_query_sums(sizes: LossSizes) -> TritonKernel:
    """Arrays: partials of queries, grad, indices, position; result: the gradient of the queries."""
    shape = sizes.B, sizes.T, sizes.index_heads, sizes.index_width
    return TritonKernel(
        "index_kl:kl_query_sums",
        cdiv(sizes.queries, 32),
        (sizes.queries,),
        (Array(shape, sizes.index_dtype),),
        Loss(sizes.index_heads, sizes.n, sizes.block, sizes.index_width, QUERIES=32),
    )


def index_key_merge(sizes: LossSizes) -> TritonKernel:
    """Arrays: partials of keys, the item after each block's; result: the gradient of the keys."""
    return TritonKernel(
        "index_kl:index_key_merge",
        sizes.B * sizes.tiles * (sizes.block // MERGED_ROWS),
        (sizes.S, sizes.tiles, sizes.items),
        (Array((sizes.B, sizes.S, sizes.index_width), sizes.index_dtype),),
        Loss(sizes.index_heads, 0, sizes.block, sizes.index_width, PART=MERGED_ROWS),
    )
