"""Selects the blocks of an indexer and computes its loss on Triton kernels, for both
frameworks.
"""

import functools
import math
from typing import Any, NamedTuple

from kernels_pallas.kernel import Array, float32, int32
from kernels_pallas.triton.kernel import LOG2E, TritonKernel, cdiv
from kernels_pallas.triton.tiling import (
    LEAST,
    SPARE,
    WIDE,
    Tiling,
    itemsize,
    power,
    precision,
    smem_of,
)
from nsa_core.array_ops import ArrayOps
from nsa_core.index import Index, Teacher
from nsa_core.steps import triton_backward, triton_paged_blocks
from nsa_core.steps.triton_backward import MERGED_ROWS, ListSizes, list_sizes
from nsa_core.steps.triton_forward import array_of
from nsa_core.validate import dtype_name

SCORES_BYTES = 2**28  # maximum bytes of block scores that exist at a time
SELECTED = 64  # maximum number of selected blocks per query, all in registers
CHUNK = 2048  # number of keys that a program scores if scores are written to memory
# maximum number of elements of a float32 block, which products keep in registers
FLOAT32_KEYS = 4096


def _on_chip(index: Index) -> bool:
    """Return whether the kernel `index.index_blocks` supports the call.

    `index.index_blocks` writes no scores to memory.
    """
    plain = index.activation is None and index.reduce is None
    return plain and LEAST <= index.pool and index.num_selected <= SELECTED


def _count(index: Index, keys: int) -> int:
    """Return the number of blocks, including the block of the last tokens. The block of the last
    tokens may have no index key yet, but this block may be forced into the lists.
    """
    forced = index.num_initial + index.num_local > 0
    return index.num_blocks(keys) + (index.entry > 1 and forced)


def why_not(query, key, index: Index) -> str | None:
    """Return the reason why the kernels of the function `blocks` cannot run a problem, or
    None."""
    heads, width = query.shape[2:]
    count = 0 if _on_chip(index) else _count(index, key.shape[1])
    return triton_paged_blocks.scores_why_not(heads, width, index, count)


def blocks(ops: ArrayOps, query, key, position, index: Index, offset: int | None):
    """Return the lists of an indexer, as int32 `[B, T, Hi or 1, n]`.

    Args:
      position: int32 `[B, T]`, negative for padding.
      offset: The position of the first query in its row, or None if the position is not known.
    """
    (batch, length, heads, width), keys = query.shape, key.shape[1]
    on_chip, n, dtype = _on_chip(index), index.num_selected, dtype_name(query)
    best = max(power(n), LEAST) if on_chip else LEAST
    pool, head_rows = index.pool if on_chip else 128, power(heads, 1)
    tiles = _tiles(ops.capability(query), dtype, width, pool, best)
    tokens = max(tiles.rows // head_rows, 1)  # a tile has all heads of some tokens
    described = functools.partial(
        TritonKernel.of,
        launch=tiles.launch,
        HEADS=heads,
        HEAD_ROWS=head_rows,
        TOKENS=tokens,
        WIDTH=width,
        ROWS=tokens * head_rows,
        POOL=index.pool,
        ENTRY=index.entry,
        PRECISION=precision(dtype),
    )
    if on_chip:
        kernel = described(
            "index:index_blocks",
            batch * cdiv(length, tokens),
            (length, keys),
            [int32(batch, length, heads, n)],
            KEYS=tiles.keys,
            N=n,
            BEST=best,
            NUM_INITIAL=index.num_initial,
            NUM_LOCAL=index.num_local,
        )
        return ops.run(kernel, query, key, position)[0]
    lists, all_blocks = index.lists(heads), _count(index, keys)
    step = max(tiles.keys, index.pool)
    chunk = max(CHUNK, step)
    most = max(SCORES_BYTES // (4 * batch * lists * all_blocks), 1)
    found = []
    for first in range(0, length, most):
        count, some = min(most, length - first), all_blocks
        if offset is not None:  # the last query's own block
            some = min(some, (offset + first + count - 1) // (index.pool * index.entry) + 1)
        kernel = described(
            "index:index_scores",
            batch * cdiv(count, tokens) * cdiv(some * index.pool, chunk),
            (length, keys, first, count, some),
            [float32(batch, count, lists, some)],
            KEYS=step,
            CHUNK=chunk,
            RELU=index.activation == "relu",
            SUM=index.reduce == "sum",
        )
        (scores,) = ops.run(kernel, query, key, position)
        at = ops.contiguous(position[:, first : first + count])
        of_some = triton_paged_blocks.best(ops, index, scores, [at] * 3, all_blocks)
        found.append(of_some.reshape(batch, count, lists, n))
    return found[0] if len(found) == 1 else ops.xp.concatenate(found, 1)


def _tiles(capability, dtype: str, width: int, pool: int, best: int) -> Tiling:
    """Return the largest tiles that fit in shared memory and whose candidate blocks fit in
    registers. If possible, two programs per SM must fit.
    """
    size, width = itemsize(dtype), power(width)
    rows = 32 if size == 4 else 128 if capability[0] in WIDE else 64
    keys = min(pool, 32 if size == 4 else 128)
    rows = max(min(rows, 2048 // best), LEAST)
    while True:
        for stages, programs in ((3, 2), (2, 2), (2, 1)):
            held = size * width * (rows + stages * keys) + SPARE
            if programs * held <= smem_of(capability):
                return Tiling(rows, keys, 4, stages)
        if rows == LEAST and keys == LEAST:
            return Tiling(rows, keys, 4, 1)
        rows, keys = max(rows // 2, LEAST), max(keys // 2, LEAST)


def loss_why_not(query, key, index_query, lists, block: int) -> str | None:
    """Return the reason why the kernels of the loss cannot run a problem, or None."""
    if lists is None:
        return "needs block_indices, got all keys"
    heads, width, dtype = *query.shape[2:], dtype_name(query)
    index_heads, index_width = index_query.shape[2:]
    index_dtype, kv_heads = dtype_name(index_query), key.shape[2]
    if index_dtype != dtype:
        return f"needs the same dtype in attention and indexer, got {dtype} and {index_dtype}"
    if block not in (16, 32, 64, 128):
        return f"needs blocks of 16, 32, 64 or 128 keys, got {block}"
    if index_heads % kv_heads:
        return f"needs a multiple of Hkv={kv_heads} index heads, got {index_heads}"
    most, group = max(width, index_width), heads // index_heads
    if group > 64 or most > 128:
        return (
            f"needs at most 64 query heads per index head and widths of at most 128, got {group}, "
            f"D={width} and Di={index_width}"
        )
    if index_dtype == "float32" and block * power(most) > FLOAT32_KEYS:
        return (
            f"needs float32 blocks of at most {FLOAT32_KEYS} elements, got {block} keys of "
            f"{power(most)}"
        )
    entries = query.shape[1] * lists.shape[-1]
    return f"needs T * n < 2**31, got {entries}" if entries >= 2**31 else None


class Kept(NamedTuple):
    """The data that the gradient of the loss needs. `targets` has t of each listed key, `[B, T,
    Hi, n * block]`. t is the target probability in `indexer_kl`. The log-sum-exp of the indexer
    and the sum of t are `[B, T, Hi]`. The remaining fields are the query lists of the blocks.
    """

    targets: Any
    index_lse: Any
    mass: Any
    order: Any
    starts: Any
    ends: Any
    tile_of: Any


def lists_for(ops: ArrayOps, lists, index_query, keys: int, block: int):
    """Return `lists` as `[B, T, Hi, n]`, one list per index head, with -1 for entries that are no
    block."""
    xp = ops.xp
    found = xp.where((lists >= 0) & (lists < cdiv(keys, block)), lists, -1)
    shape = *index_query.shape[:3], lists.shape[3]
    return ops.contiguous(xp.broadcast_to(found, shape))


def _kl_tiles(
    narrow: bool, capability: tuple[int, int], rows: tuple[int, int], wide: tuple[int, int]
) -> tuple[int, int, int]:
    """Return the numbers of rows per step, of warps and of stages.

    Args:
      narrow: Whether the elements of the operands have 16 bits.
      rows: Two numbers of rows. The first number is for GPUs whose matrix instructions read
        operands from shared memory, and the second number is for other GPUs.
      wide: Numbers of warps and of stages on GPUs whose matrix instructions read operands from
        shared memory.
    """
    if not narrow:
        return 32, 8, 1
    return (rows[0], *wide) if capability[0] in WIDE else (rows[1], 8, 1)


def _over_lists(
    name: str, about: ListSizes, lists, keys: int, scale: float, outputs, tiles, **more
):
    """Describe a kernel that loops over the query lists of blocks."""
    batch, length, heads, n = lists.shape
    return TritonKernel.of(
        f"index_kl:{name}",
        batch * heads * about.items,
        (length, keys, about.tiles, about.items, about.entries, float(scale)),
        outputs,
        tiles[1:],
        INDEX_HEADS=heads,
        N=n,
        BLOCK=about.block,
        SEGMENT=triton_backward.SEGMENT,
        **more,
    )


def _over_queries(name: str, lists, block: int, queries: int, outputs, **more) -> TritonKernel:
    """Describe a kernel in which each program processes `queries` queries of one index head."""
    *rows, n = lists.shape
    count, heads = math.prod(rows), lists.shape[2]
    sizes = {"INDEX_HEADS": heads, "N": n, "BLOCK": block, "QUERIES": queries} | more
    return TritonKernel.of(f"index_kl:{name}", cdiv(count, queries), [count], outputs, **sizes)


def loss(ops: ArrayOps, arrays, lists, position, teacher: Teacher):
    """Return the loss `[B, T, Hi]`, and a `Kept` with data for its gradient.

    Args:
      arrays: query, key, lse, index_query and index_key. `lists` is the result of `lists_for`.
    """
    query, key, lse, index_query, index_key = arrays
    (heads, width), (keys, kv_heads) = query.shape[2:], key.shape[1:3]
    length, index_heads, n = lists.shape[1:]
    block, log2_scale = teacher.block, teacher.scale * LOG2E
    about = list_sizes(length, n, keys, block, False)
    of = ops.derive(
        triton_backward.block_query_lists, lists, position, position * 0, sizes=about
    )
    dtype, capability = dtype_name(index_query), ops.capability(query)
    narrow, group = dtype != "float32", heads // index_heads
    of_entries, of_queries = (float32(*lists.shape[:x]) for x in (4, 3))
    tiles = _kl_tiles(narrow, capability, (128, 64), (4, 2))
    # float16 is sufficient for t, since t is at most 1 and only the absolute error of a small t
    # matters.
    targets = Array((*lists.shape[:3], n * block), "float16" if narrow else "float32")
    kernel = _over_lists(
        *("kl_targets", about, lists, keys, log2_scale, [of_entries, targets], tiles),
        WIDTH=width,
        PRECISION=precision(dtype),
        HEADS=kv_heads,
        GROUP=group,
        GROUP_ROWS=power(group, 1),
        TOKENS=max(tiles[0] // power(group, 1), 1),
    )
    masses, targets = ops.run(kernel, query, key, lse, position, *of)
    tiles = _kl_tiles(narrow, capability, (64, 16), (4, 3))
    kernel = _over_lists(
        *("kl_entries", about, lists, keys, teacher.index_scale, [of_entries] * 3, tiles),
        WIDTH=index_query.shape[3],
        PRECISION=precision(dtype),
        ROWS=tiles[0],
    )
    maxima, sums, crosses = ops.run(kernel, index_query, index_key, targets, position, *of)
    kernel = _over_queries("kl_loss", lists, block, 128, [of_queries] * 3)
    found, *rest = ops.run(kernel, maxima, sums, masses, crosses, lists, position)
    return found, Kept(targets, *rest, *of)


def gradients(
    ops: ArrayOps, teacher: Teacher, index_query, index_key, lists, position, kept: Kept, grad
):
    """Return the gradients of index_query and index_key, given the gradient of the loss, `[B,
    T, Hi]`.
    """
    block, scale = teacher.block, teacher.index_scale
    batch, length, heads, n = lists.shape
    keys, width = index_key.shape[1:]
    about = list_sizes(length, n, keys, block, False)
    dtype = dtype_name(index_query)
    narrow = dtype != "float32"
    tiles = _kl_tiles(narrow, ops.capability(index_query), (64, 16), (8, 2))
    grad = ops.to_float32(grad)
    targets, index_lse, mass, *of = kept
    outputs = [
        # dtype of differences between probabilities, which are too small for float16
        Array((*lists.shape, width), "bfloat16" if narrow else "float32"),
        float32(batch * heads * about.items, block, width),
    ]
    kernel = _over_lists(
        *("kl_gradients", about, lists, keys, scale, outputs, tiles),
        WIDTH=width,
        PRECISION=precision(dtype),
        ROWS=tiles[0],
    )
    arrays = index_query, index_key, targets, index_lse, mass, grad, position
    of_queries, of_keys = ops.run(kernel, *arrays, *of)
    outputs = [array_of(index_query)]
    kernel = _over_queries("kl_query_sums", lists, block, 32, outputs, WIDTH=width)
    (dq,) = ops.run(kernel, of_queries, grad, lists, position)
    kernel = TritonKernel.of(
        "index_kl:index_key_merge",
        batch * about.tiles * (block // MERGED_ROWS),
        (keys, about.tiles, about.items),
        [array_of(index_key)],
        INDEX_HEADS=heads,
        BLOCK=block,
        WIDTH=width,
        PART=MERGED_ROWS,
    )
    (dk,) = ops.run(kernel, of_keys, kept.ends)
    return dq, dk
