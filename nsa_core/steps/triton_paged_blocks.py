"""Selects blocks with an indexer, and computes attention to listed blocks. The keys and values
of each row are in pages. The module runs Triton kernels and supports both frameworks.
"""

import math
from typing import Any, NamedTuple

from kernels_pallas.kernel import Array, float32, int32
from kernels_pallas.specs.tile import SMS
from kernels_pallas.triton.kernel import LOG2E, TritonKernel, cdiv
from kernels_pallas.triton.tiling import LEAST, WIDE, Tiling, choose, itemsize, power, precision
from nsa_core import paged_layout
from nsa_core.array_ops import ArrayOps
from nsa_core.index import MAX_POOL, Index
from nsa_core.validate import dtype_name

PARTIAL_BYTES = 2**28  # maximum bytes of the float32 outputs of the parts of lists
SPLIT = 256  # keys per part of a list; half this number for wide heads
CHUNK = 1024  # keys that a program scores; half this number if there are few programs
KEYS = 128  # keys per step
PART = 4096  # blocks of a list that are processed at a time to write the selected ones
BLOCKS = 2**15  # maximum number of blocks per row; one program holds all their scores
# If there are only a few lists, each list is processed in parts of LIST_PART blocks. The scores
# of a list are compared digit by digit, and DIGITS has the number of bits of each digit.
LIST_PART, DIGITS = 2048, (8, 8, 8, 8)
LEAST_PARTS = (
    4  # minimum number of parts per list for which the additional launches are worthwhile
)
# maximum number of parts of all lists together; with more parts, one program per list fills a GPU
MOST_PARTS = 8 * SMS
GROUP, WIDTH, INDEX_HEADS = 64, 256, 64
APART = "needs pages that are contiguous in memory"


class Paged(NamedTuple):
    """The positions of the tokens of a call. The fields are arguments of
    `paged_block_attention`.
    """

    page_table: Any
    lengths: Any
    cu_seqlens_q: Any

    def places(self, ops: ArrayOps, tokens: int, most: int) -> tuple[int, tuple[Any, Any, Any]]:
        """Return the number of queries per row, `lengths`, and the row and the position of each
        token. If the number of queries differs between rows, the returned number is 0.

        If all rows have the same number of queries, kernels read only `lengths`, and no kernel
        computes rows and positions. If the number of queries differs between rows, the kernels read
        the row and the position of each token. `most` is the number of tokens for which a row's
        table has pages.
        """
        if self.cu_seqlens_q is None:
            return tokens // self.page_table.shape[0], (self.lengths,) * 3
        lengths = self.lengths.clip(None, most)
        found = paged_layout.tokens_of(ops, lengths, self.cu_seqlens_q, tokens)
        return 0, (self.lengths, ops.to_int32(found.row), ops.to_int32(found.position))


def _stride(pages) -> int | None:
    """Return the stride between the pages of an array `[P, page, ..]`, counted in entries.
    Return None if a page is not contiguous.
    """
    page, entry = pages.shape[1], math.prod(pages.shape[2:])
    if not hasattr(pages, "stride"):
        return page
    if not pages[0].is_contiguous() or pages.stride(0) % entry:
        return None
    return pages.stride(0) // entry


def _memory(pages):
    """Return the memory from the first page to the last one, including gaps between pages."""
    if not hasattr(pages, "stride") or pages.is_contiguous():
        return pages
    count = (pages.shape[0] - 1) * pages.stride(0) + math.prod(pages.shape[1:])
    return pages.as_strided((count,), (1,))


class _Sizes(NamedTuple):
    """The sizes of attention to listed blocks, for rows in pages or in one array.

    Attributes:
      scopes: Number of lists per token, of `n` blocks each.
      tail: Whether the query's own block is added to the list if the block is incomplete.
      whole: Whether a program processes a whole list instead of a part. `whole` is True if there
        are enough queries to fill the GPU.
    """

    H: int
    D: int
    Hkv: int
    Dv: int
    scopes: int
    n: int
    dtype: str
    block: int
    tail: bool
    whole: bool
    capability: tuple[int, int]

    @property
    def pairs(self) -> int:
        """The number of pairs of a list and a key/value head."""
        return max(self.scopes, self.Hkv)

    @property
    def group(self) -> int:
        return self.H // self.pairs

    @property
    def listed(self) -> int:
        """The number of keys in the blocks of a list."""
        return (self.n + self.tail) * self.block

    @property
    def split(self) -> int:
        """The number of keys per part of a list."""
        return SPLIT if self.D + self.Dv <= 256 else SPLIT // 2

    def tiling(self) -> Tiling | None:
        widths, size = (self.D, self.Dv), itemsize(self.dtype)
        keys, rows = min(power(self.listed), 64, self.split), power(self.group)
        found = choose("forward", rows, keys, *widths, size, self.capability)
        small = self.whole or self.D + self.Dv > 256  # gathers of many programs overlap
        if found is None or not small or rows > LEAST or size == 4:
            return found
        return Tiling(rows, min(keys, 32), 1, 2)


def _sizes(capability, query, value, lists, block: int, include: str, whole=False) -> _Sizes:
    (heads, width), (kv_heads, value_width) = query.shape[-2:], value.shape[-2:]
    scopes, n = lists.shape[-2:]
    tail, dtype = include == "tail", dtype_name(query)
    sizes = heads, width, kv_heads, value_width, scopes, n
    return _Sizes(*sizes, dtype, block, tail, whole, capability)


def why_not(
    capability, query, key, value, lists, block: int, include: str, whole: bool = False
) -> str | None:
    """Return the reason why the kernels of the functions `attention` and `attention_of_rows`
    cannot run a problem, or None.
    """
    sizes = _sizes(capability, query, value, lists, block, include, whole)
    tokens = math.prod(query.shape[:-2])
    if not whole and None in (_stride(key), _stride(value)):
        return APART
    if sizes.group > GROUP or max(sizes.D, sizes.Dv) > WIDTH or sizes.tiling() is None:
        return (
            f"needs at most {GROUP} query heads per list and widths of at most {WIDTH}, got "
            f"{sizes.group}, D={sizes.D} and Dv={sizes.Dv}"
        )
    if sizes.listed * tokens * sizes.pairs >= 2**31:
        return f"needs fewer than 2**31 listed keys, got N={tokens} tokens"
    return None


def attention(
    ops: ArrayOps,
    query,
    key,
    value,
    lists,
    paged: Paged,
    block: int,
    include: str,
    scale: float | None,
    whole: bool = False,
):
    """Return `(out, lse)` of `paged_block_attention`, which are `[N, H, Dv]` and float32 `[N,
    H]`."""
    sizes = _sizes(ops.capability(query), query, value, lists, block, include, whole)
    tokens, pages, tiling = query.shape[0], paged.page_table.shape[1], sizes.tiling()
    assert tiling is not None
    pool, page = key.shape[:2]
    most, split = pages * page, sizes.split
    queries, places = paged.places(ops, tokens, most)
    parts = cdiv(sizes.listed, split)
    if whole:
        parts, split = 1, cdiv(sizes.listed, tiling.keys) * tiling.keys
    scale = float(sizes.D**-0.5 if scale is None else scale)
    of_parts = tokens * sizes.H, parts
    group = {"GROUP": sizes.group, "PARTS": parts, "VALUE_WIDTH": sizes.Dv}
    partials = TritonKernel.of(
        "paged_blocks:partials",
        tokens * sizes.pairs * parts,
        (
            *(max(queries, 1), pages, pool, _stride(key), _stride(value)),
            *(most, scale * LOG2E),
        ),
        [*[float32(*of_parts)] * 2, float32(*of_parts, sizes.Dv)],
        (8 if sizes.dtype == "float32" else tiling.warps, tiling.stages),
        **group,
        ROWS=tiling.rows,
        HEADS=sizes.Hkv,
        PAIRS=sizes.pairs,
        SCOPES=sizes.scopes,
        WIDTH=sizes.D,
        N=sizes.n,
        BLOCK=block,
        PAGE=page,
        TAIL=sizes.tail,
        SPLIT=split,
        KEYS=tiling.keys,
        RAGGED=queries == 0,
        BY_PAIR=whole,
        PRECISION=precision(sizes.dtype),
    )
    arrays = query, _memory(key), _memory(value), paged.page_table, *places, lists
    merge = TritonKernel.of(
        "paged_blocks:merge",
        tokens * sizes.pairs,
        (),
        [
            Array((tokens, sizes.H, sizes.Dv), sizes.dtype),
            float32(tokens, sizes.H),
        ],
        **group,
        ROWS=power(sizes.group),
        GATED=False,
        ADDED=False,
    )
    return ops.run(merge, *ops.run(partials, *arrays))


def attention_of_rows(ops: ArrayOps, query, key, value, lists, lengths, *how):
    """Return `(out, lse)` of attention to listed blocks, `[B, T, H, Dv]` and float32 `[B, T, H]`,
    for whole rows. Queries are processed in chunks.

    Args:
      query, key, value: `[B, T, H, D]`, `[B, S, Hkv, D]`, `[B, S, Hkv, Dv]`. Keys and values are
        treated as pages of one token.
      lists: int32 `[B, T, G, n]`.
      lengths: int32 `[B]`, numbers of valid keys.
      how: The arguments `block`, `include` and `scale` of the function `attention`.
    """
    (batch, length, heads), keys = query.shape[:3], key.shape[1]
    flat = lambda x: ops.contiguous(x).reshape(-1, *x.shape[2:])
    key, value = flat(key)[:, None], flat(value)[:, None]
    table = ops.arange(lengths, batch * keys).reshape(batch, keys)
    most = max(PARTIAL_BYTES // (4 * batch * heads * value.shape[3]), 1)
    found = []
    for first in range(0, length, most):
        count = min(most, length - first)
        part = slice(first, first + count)
        ending = Paged(table, ops.to_int32(lengths - (length - first - count)), None)
        rows, named = flat(query[:, part]), flat(lists[:, part])
        of_part = attention(ops, rows, key, value, named, ending, *how, whole=True)
        found.append([x.reshape(batch, count, *x.shape[1:]) for x in of_part])
    if len(found) == 1:
        return found[0]
    return [ops.xp.concatenate(x, 1) for x in zip(*found, strict=True)]


def index_why_not(query, pages, page_table, index: Index) -> str | None:
    """Return the reason why the kernels of the function `blocks` cannot run a problem, or None."""
    if _stride(pages) is None:
        return APART
    heads, width = query.shape[1:]
    count = index.num_blocks(page_table.shape[1] * pages.shape[1])
    return scores_why_not(heads, width, index, count)


def scores_why_not(heads: int, width: int, index: Index, count: int) -> str | None:
    """Return the reason why kernels cannot compute scores of `count` blocks and select among these
    blocks, or None.
    """
    if index.pool > MAX_POOL or index.pool & (index.pool - 1):
        return f"needs a pool that is a power of two up to {MAX_POOL}, got pool={index.pool}"
    if heads > INDEX_HEADS or width > WIDTH:
        return (
            f"needs at most {INDEX_HEADS} heads and widths of at most {WIDTH}, got {heads} and "
            f"{width}"
        )
    if count > BLOCKS:
        return f"needs at most {BLOCKS} blocks per row if scores are written, got {count}"
    return None


def blocks(ops: ArrayOps, query, pages, paged: Paged, index: Index):
    """Return the selected blocks, as int32 `[N, Hi or 1, n]`.

    The arguments are the same as in `paged_index_blocks`.
    """
    (tokens, heads, width), dtype = query.shape, dtype_name(query)
    (pool, per_page), table = pages.shape[:2], paged.page_table
    all_keys = table.shape[1] * per_page
    count, lists = index.num_blocks(all_keys), index.lists(heads)
    most = all_keys * index.entry
    queries, places = paged.places(ops, tokens, most)
    narrow = dtype != "float32"
    keys = max(index.pool, KEYS if narrow and width <= KEYS else KEYS // 4)
    wide = narrow and ops.capability(query)[0] in WIDE
    chunk = CHUNK if tokens * cdiv(all_keys, CHUNK) > 4 * SMS else max(CHUNK // 2, keys)
    kernel = TritonKernel.of(
        "paged_blocks:scores",
        tokens * cdiv(all_keys, chunk),
        (tokens, max(queries, 1), table.shape[1], pool, _stride(pages), most, count),
        [float32(tokens, lists, count)],
        (4, 1),  # more programs hide more latency than more stages
        HEADS=heads,
        # The number of rows is at least the number of rows in `index.index_blocks`. The scores
        # therefore have the same bits as the scores of that kernel.
        ROWS=max(power(heads), 64 if wide else LEAST),
        WIDTH=width,
        POOL=index.pool,
        ENTRY=index.entry,
        PER_PAGE=per_page,
        KEYS=keys,
        CHUNK=chunk,
        RELU=index.activation == "relu",
        SUM=index.reduce == "sum",
        RAGGED=queries == 0,
        PRECISION=precision(dtype),
    )
    (scores,) = ops.run(kernel, query, _memory(pages), table, *places)
    return best(ops, index, scores, places, count, queries, most)


def best(ops: ArrayOps, index: Index, scores, places, most_blocks: int, queries=0, most=0):
    """Return the blocks with the highest scores, as int32 `[tokens, lists, n]`.

    Args:
      scores: float32 `[.., lists, blocks]` of the tokens. `places` is the result of
        `Paged.places`.
      most_blocks: The maximum number of blocks in any call. `most` is the maximum number of
        tokens per row.
    """
    *tokens, lists, count = scores.shape
    items, n = math.prod(tokens) * lists, index.num_selected
    held = power(most_blocks)
    parts = held // LIST_PART  # parts per list; each part has a program
    few = parts * items <= MOST_PARTS and n <= held
    parts = parts if parts >= LEAST_PARTS and few else 1

    def described(name: str, outputs, warps: int = 4, **sizes: int) -> TritonKernel:
        return TritonKernel.of(
            f"paged_blocks:{name}",
            items * parts,
            (max(queries, 1), most, count),
            [int32(*x) for x in outputs],
            (warps, 1),
            LISTS=lists,
            N=n,
            POOL=index.pool,
            ENTRY=index.entry,
            NUM_INITIAL=index.num_initial,
            NUM_LOCAL=index.num_local,
            RAGGED=queries == 0,
            **sizes,
        )

    outputs, slots = [(items // lists, lists, n)], power(n)
    if parts == 1:
        sizes = {"SLOTS": slots, "BLOCKS": held, "PART": min(held, PART)}
        warps = min(max(held // 2048, 4), 16)  # sums over a program are faster with few warps
        return ops.run(described("best", outputs, warps, **sizes), scores, *places)[0]
    sizes = {"PARTS": parts, "PART": LIST_PART}
    counts = known = before = places[0]  # an array that the first launch does not read
    for step, bits in enumerate(DIGITS):
        kernel = described(
            "digits",
            [(items, parts, 2**bits), (items, 2), (items, parts)],
            SHIFT=sum(DIGITS[step + 1 :]),
            BITS=bits,
            BITS_BEFORE=DIGITS[step - 1] if step else 0,
            **sizes,
        )
        counts, known, before = ops.run(kernel, scores, counts, known, *places)
    kernel = described("chosen", outputs, SLOTS=slots, BITS=DIGITS[-1], **sizes)
    return ops.run(kernel, scores, counts, known, before, *places)[0]
