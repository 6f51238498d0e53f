"""The Triton kernel of an indexer's blocks, described: no Triton is imported."""

from typing import Any, NamedTuple

from kernels_pallas.kernel import Array
from kernels_pallas.triton.kernel import TritonKernel
from kernels_pallas.triton.tiling import LEAST, SPARE, WIDE, Tiling, power, smem_of

POOLS = (16, 32, 64, 128, 256)
SELECTED = 64  # blocks of a query
WIDTH = 256
DTYPES = ("float16", "bfloat16", "float32")


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


def why_not(sizes: IndexSizes) -> str | None:
    """Why the kernel cannot run a problem, or None."""
    if sizes.dtype not in DTYPES:
        return f"computes in {', '.join(DTYPES)}, got {sizes.dtype}"
    if sizes.pool not in POOLS:
        return f"takes blocks of {POOLS} keys, got pool={sizes.pool}"
    if sizes.num_selected > SELECTED:
        return f"takes up to {SELECTED} blocks of a query, got {sizes.num_selected}"
    if sizes.width > WIDTH:
        return f"takes widths up to {WIDTH}, got {sizes.width}"
    if sizes.heads > 64:
        return f"takes up to 64 heads, got {sizes.heads}"
    return None


def index_blocks(sizes: IndexSizes, capability: tuple[int, int]) -> TritonKernel:
    """Arrays: query, key, position; result: the blocks, int32 `[B, T, heads, n]`."""
    heads = 1 << (sizes.heads - 1).bit_length()
    best = max(power(sizes.num_selected), LEAST)
    tiles = _tiles(sizes, capability, best)
    tokens = max(tiles.rows // heads, 1)
    constants: dict[str, Any] = {
        "HEADS": sizes.heads,
        "HEAD_ROWS": heads,
        "TOKENS": tokens,
        "WIDTH": sizes.width,
        "COLUMNS": power(sizes.width),
        "N": sizes.num_selected,
        "POOL": sizes.pool,
        "KEYS": tiles.keys,
        "ENTRY": sizes.entry,
        "BEST": best,
        "NUM_INITIAL": sizes.num_initial,
        "NUM_LOCAL": sizes.num_local,
        "PRECISION": "ieee" if sizes.dtype == "float32" else "tf32",
    }
    shape = sizes.B, sizes.T, sizes.heads, sizes.num_selected
    return TritonKernel(
        "kernels_pallas.triton.index:index_blocks",
        sizes.B * -(-sizes.T // tokens),
        (sizes.T, sizes.S),
        (Array(shape, "int32"),),
        constants,
        tiles.warps,
        tiles.stages,
    )


def _tiles(sizes: IndexSizes, capability: tuple[int, int], best: int) -> Tiling:
    """The largest that fit in shared memory, of two programs if they can, and whose candidates
    stay in registers.
    """
    itemsize = 4 if sizes.dtype == "float32" else 2
    rows, keys = (32, min(sizes.pool, 32)) if itemsize == 4 else (64, min(sizes.pool, 128))
    rows = 128 if rows == 64 and capability[0] in WIDE else rows
    rows, width = max(min(rows, 2048 // best), LEAST), power(sizes.width)
    limit = smem_of(capability)
    while True:
        for stages, programs in ((3, 2), (2, 2), (2, 1)):
            held = itemsize * width * (rows + stages * keys) + SPARE
            if programs * held <= limit:
                return Tiling(rows, keys, 8 if rows > 64 else 4, stages)
        if rows == LEAST and keys == LEAST:
            return Tiling(rows, keys, 4, 1)
        rows, keys = max(rows // 2, LEAST), max(keys // 2, LEAST)
