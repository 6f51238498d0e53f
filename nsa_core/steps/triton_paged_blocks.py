"""Blocks of an indexer and attention to blocks, of rows in pages, on Triton kernels, for either
framework.
"""

import math
from typing import Any, NamedTuple

from kernels_pallas.triton.paged_blocks_descriptions import Best, PagedBlocks, PagedIndex, Rows
from nsa_core import paged_layout
from nsa_core.array_ops import ArrayOps
from nsa_core.index import Index
from nsa_core.validate import dtype_name

PARTIAL_BYTES = 2**28  # of a part's outputs in float32


class Paged(NamedTuple):
    """Where the tokens of a call are: arguments as of `paged_block_attention`."""

    page_table: Any
    lengths: Any
    cu_seqlens_q: Any

    def rows(self, tokens: int, pool: int, page: int) -> Rows:
        batch, pages = self.page_table.shape
        queries = tokens // batch if self.cu_seqlens_q is None else 0
        return Rows(tokens, queries, pages, pool, page)

    def places(self, ops: ArrayOps, rows: Rows) -> tuple[Any, Any]:
        """Row and position of each token, where rows have different numbers; else what nobody
        reads: kernels count then, and nothing is launched before them.
        """
        if rows.queries:
            return self.lengths, self.lengths
        lengths = self.lengths.clip(None, rows.most)
        found = paged_layout.tokens_of(ops, lengths, self.cu_seqlens_q, rows.tokens)
        return ops.to_int32(found.row), ops.to_int32(found.position)


def sizes_of(
    query, key, value, lists, paged: Paged, block: int, include: str, scale, capability
):
    """Of the kernels of `paged_block_attention`."""
    tokens, heads, width = query.shape
    pool, page, kv_heads, value_width = value.shape
    scale = float(width**-0.5 if scale is None else scale)
    scopes, entries = lists.shape[1:]
    sizes = heads, kv_heads, width, value_width, dtype_name(query), scopes, entries
    rows, tail = paged.rows(tokens, pool, page), include == "tail"
    strides = page_stride(key), page_stride(value)
    return PagedBlocks(rows, strides, *sizes, block, tail, scale, capability)


def index_sizes_of(query, pages, index: Index, paged: Paged, capability) -> PagedIndex:
    """Of the kernels of `paged_index_blocks`."""
    tokens, heads, width = query.shape
    pool, keys, _ = pages.shape
    rows = paged.rows(tokens, pool, keys * index.entry)
    chosen = index.num_selected, index.num_initial, index.num_local
    sizes = heads, width, dtype_name(query), index.pool, index.entry, *chosen
    how = index.activation == "relu", index.reduce == "sum"
    return PagedIndex(rows, page_stride(pages), *sizes, *how, capability)


def page_stride(pages) -> int | None:
    """Entries from a page of `[P, page, ..]` to the next; None: those of a page lie apart."""
    page, entry = pages.shape[1], math.prod(pages.shape[2:])
    if not hasattr(pages, "stride"):
        return page
    if not pages[0].is_contiguous() or pages.stride(0) % entry:
        return None
    return pages.stride(0) // entry


def attention(ops: ArrayOps, sizes: PagedBlocks, query, key, value, lists, paged: Paged):
    """`(out, lse)`, `[N, H, Dv]` and float32 `[N, H]`."""
    at = paged.page_table, paged.lengths, *paged.places(ops, sizes.rows)
    parts = ops.run(sizes.partials(), query, key, value, *at, lists)
    return ops.run(sizes.merge(), *parts)


def row_sizes_of(query, key, value, lists, block: int, include: str, scale, capability):
    """Of the kernels of `attention_of_rows`, whose keys are pages of one token."""
    (batch, length, heads, width), (keys, kv_heads) = query.shape, key.shape[1:3]
    scale = float(width**-0.5 if scale is None else scale)
    scopes, entries = lists.shape[2:]
    sizes = heads, kv_heads, width, value.shape[3], dtype_name(query), scopes, entries
    rows = Rows(batch * length, length, keys, batch * keys, 1)
    rest = block, include == "tail", scale, capability
    return PagedBlocks(rows, (1, 1), *sizes, *rest, whole=True)


def attention_of_rows(ops: ArrayOps, sizes: PagedBlocks, query, key, value, lists, lengths):
    """`(out, lse)`, `[B, T, H, Dv]` and float32 `[B, T, H]`: of whole rows, some queries at a time.

    Args:
      query, key, value: `[B, T, H, D]`, `[B, S, Hkv, D]`, `[B, S, Hkv, Dv]`.
      lists: int32 `[B, T, G, n]`; lengths: int32 `[B]`, valid keys.
    """
    batch, length, keys = *query.shape[:2], key.shape[1]
    flat = lambda x: ops.contiguous(x).reshape(-1, *x.shape[2:])
    key_pages, value_pages = flat(key)[:, None], flat(value)[:, None]
    table = ops.arange(lengths, batch * keys).reshape(batch, keys)
    most = max(PARTIAL_BYTES // (4 * batch * sizes.H * sizes.Dv), 1)
    found = []
    for first in range(0, length, most):
        count = min(most, length - first)
        part = slice(first, first + count)
        ending = Paged(table, ops.to_int32(lengths - (length - first - count)), None)
        here = sizes._replace(rows=sizes.rows._replace(tokens=batch * count, queries=count))
        rows, named = flat(query[:, part]), flat(lists[:, part])
        of_part = attention(ops, here, rows, key_pages, value_pages, named, ending)
        found.append([x.reshape(batch, count, *x.shape[1:]) for x in of_part])
    if len(found) == 1:
        return found[0]
    return [ops.xp.concatenate(x, 1) for x in zip(*found, strict=True)]


def blocks(ops: ArrayOps, sizes: PagedIndex, query, pages, paged: Paged):
    """int32 `[N, Hi or 1, n]`."""
    lengths, *places = paged.lengths, *paged.places(ops, sizes.rows)
    (scores,) = ops.run(sizes.scores(), query, pages, paged.page_table, lengths, *places)
    return best(ops, sizes.best(), scores, lengths, *places)


def best(ops: ArrayOps, sizes: Best, scores, *places):
    """int32 `[tokens, lists, n]`; arrays as of `Best`."""
    if sizes.parts == 1:
        return ops.run(sizes.whole(), scores, *places)[0]
    counts = known = before = places[0]  # which the first launch does not read
    for step in range(sizes.steps):
        kernel = sizes.digits(step)
        counts, known, before = ops.run(kernel, scores, counts, known, *places)
    return ops.run(sizes.chosen(), scores, counts, known, before, *places)[0]
