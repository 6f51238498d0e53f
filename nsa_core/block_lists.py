"""Converts the caller's lists of key blocks to the form that the selected branch reads.
Arrays may come from either framework. `xp` is `jax.numpy` or `torch`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from nsa_core import paged_layout, validate
from nsa_core.array_ops import ArrayOps
from nsa_core.config import NSAConfig

INCLUDES = ("selected", "tail")
# the config in checks of shapes, whose results do not depend on block sizes
ANY = NSAConfig()
# Splitting a large block does not change the result. Kernels accept lists of up to MAX_ENTRIES
# blocks.
WHOLE_BLOCKS, MAX_ENTRIES = (128, 64), 64


def config_of(block_size: int, entries: int) -> NSAConfig:
    """Return a config for attention to listed blocks, with the given sizes of the selected
    branch. The sizes of the other branches have no effect.
    """
    return NSAConfig(block_size, block_size, block_size, entries, 0, 0, 0)


def split(block_size: int, entries: int) -> tuple[int, NSAConfig]:
    """Return the number of parts into which kernels split each block, for lists of `entries`
    blocks. Also return a config for attention to the listed parts.
    """
    fit = [x for x in WHOLE_BLOCKS if block_size % x == 0]
    found = [block_size // x for x in fit if entries * block_size // x <= MAX_ENTRIES]
    parts = found[0] if found else 1
    return parts, config_of(block_size // parts, entries * parts)


def within(block_size: int, keys: int) -> int:
    """Return `block_size`, or the first multiple of 128 above `keys` if that number is smaller.
    With the smaller size, block 0 still contains all keys.
    """
    return min(block_size, -(-(keys + 1) // WHOLE_BLOCKS[0]) * WHOLE_BLOCKS[0])


def check(query, key, value, block_indices, block_size, include, scale) -> None:
    """Check the shapes and dtypes of `block_attention`'s arguments.

    Raises:
      ValueError: An argument is invalid for every implementation.
    """
    validate.sizes(block_size=block_size)
    validate.one_of("include", include, INCLUDES)
    validate.attention(query, key, value, ANY, None, scale)
    lists("block_indices", block_indices, query.shape[:2], query.shape[2], key.shape[2])


def lists(name: str, x, tokens, heads: int, kv_heads: int) -> None:
    """Check that the lists `x` are int32 `[*tokens, G, n]`, and that `G` fits the numbers of
    heads."""
    validate.array(name, x, len(tokens) + 2, ("int32",))
    scopes, entries = x.shape[-2:]
    if tuple(x.shape[:-2]) != tuple(tokens) or entries < 1:
        expected = ", ".join(map(str, tokens))
        raise ValueError(
            f"{name} must have shape [{expected}, G, n >= 1], got {tuple(x.shape)}"
        )
    fits = scopes > 0 and heads % scopes == 0
    if not fits or (kv_heads % scopes and scopes % kv_heads):
        raise ValueError(
            f"the number G of lists in {name} must divide H={heads} and be a divisor or a "
            f"multiple of Hkv={kv_heads}, got G={scopes}"
        )


def with_tail(xp: Any, indices, position, block_size: int):
    """Add the query's own block to `indices` `[B, T, G, n]`, unless the query is the last token
    of that block.

    position: `[B, T]`, the position of the query in its sequence; negative for padding.
    """
    own = position // block_size
    tail = xp.where((position + 1) % block_size == 0, -1, own)
    shape = (*indices.shape[:3], 1)
    tail = xp.broadcast_to(tail[:, :, None, None], shape)
    return xp.concatenate([indices, xp.asarray(tail, dtype=indices.dtype)], -1)


def paged_lists(ops: ArrayOps, lists, paged, page: int, block_size: int, include: str):
    """Return `(lists, tokens)`.

    The returned lists `[N, G, n]` include the query's own block if the argument `include` requires
    this block. `tokens` are the `paged_layout.Tokens` of the queries. `paged` has page_table,
    lengths and cu_seqlens_q.
    """
    page_table, lengths, starts = paged
    lengths = ops.xp.clip(lengths, None, page_table.shape[1] * page)
    tokens = paged_layout.tokens_of(ops, lengths, starts, lists.shape[0])
    if include == "tail":
        lists = with_tail(ops.xp, lists[None], tokens.position[None], block_size)[0]
    return lists, tokens


def for_kernels(ops: ArrayOps, indices, parts: int, keys: int, block_size: int, kv_heads: int):
    """Return the indices of the parts into which blocks are split, `[.., max(G, Hkv), n *
    parts]`. A part that begins after the last of the `keys` keys has index -1.
    """
    *tokens, scopes, entries = indices.shape
    xp, found = ops.xp, indices
    if parts > 1:
        # For larger indices the multiplication would overflow.
        named = xp.where((found >= 0) & (found <= keys // block_size), found, -1)
        found = named[..., None] * parts + ops.arange(found, parts)[0]
    blocks = -(-keys // (block_size // parts))
    found = xp.where((found >= 0) & (found < blocks), found, -1)
    repeats = max(kv_heads // scopes, 1)
    shape = (*tokens, scopes, repeats, entries * parts)
    found = xp.broadcast_to(found.reshape(*tokens, scopes, 1, entries * parts), shape)
    return found.reshape(*tokens, scopes * repeats, entries * parts)


def refuse_repeated(indices: np.ndarray) -> None:
    """Raise ValueError if one of the lists `[B, T, G, n]` contains a block twice."""
    ordered = np.sort(indices, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    for *place, entry in np.argwhere(twice)[:1]:
        raise ValueError(
            f"block_indices[{', '.join(map(str, place))}] must not contain a block twice, got "
            f"block {ordered[*place, entry]} twice"
        )


def check_paged(
    ops: ArrayOps,
    read: Callable[[Any], Any],
    query,
    key_pages,
    value_pages,
    block_indices,
    paged,
    block_size: int,
    include: str,
    scale: float | None,
) -> int:
    """Check the shapes and dtypes of the arguments of `paged_block_attention`, and the values that
    the function `read` returns. Return the block size to use.

    Raises:
      ValueError: An argument is invalid for every implementation.
    """
    validate.sizes(block_size=block_size)
    validate.one_of("include", include, INCLUDES)
    validate.array("query", query, 3)
    count, heads, width = query.shape
    validate.sizes(tokens=count, heads=heads)
    validate.array("key_pages", key_pages, (None, None, None, width), query=query)
    pool, page, kv_heads, _ = key_pages.shape
    validate.array("value_pages", value_pages, (pool, page, kv_heads, None), query=query)
    validate.sizes(num_pages=pool, page=page)
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"query heads must be a multiple of the pages' heads, got {heads} and {kv_heads}"
        )
    lists("block_indices", block_indices, (count,), heads, kv_heads)
    validate.scaling(scale)
    paged_layout.check_tables(read, "query", count, paged, pool, page)
    block_size = within(block_size, paged[0].shape[1] * page)
    if not any(read(x) is None for x in (block_indices, paged[1])):
        found, _ = paged_lists(ops, block_indices, paged, page, block_size, include)
        # The host does not read a result of traced arrays.
        if (found := read(found)) is not None:
            refuse_repeated(found)
    return block_size


def paged_keys(ops: ArrayOps, lists, tokens, page_table, pages, block_size: int):
    """Return the keys of the lists as two arrays `[N, lists, n * block_size]`. The first array
    has the index of each key in the concatenated pages, clamped to valid indices. The second
    array is True if the query attends to the key.

    Args:
      lists: The result of `for_kernels`, `[N, lists, n]`.
      tokens: `paged_layout.Tokens` of the `N` queries.
      pages: `[P, page, Hkv, .]`.
    """
    inside = ops.arange(lists, block_size)[0]
    index = lists[..., None] * block_size + inside
    seen = (lists >= 0)[..., None] & (index <= tokens.position[:, None, None, None])
    row = tokens.row[:, None, None, None]
    found = paged_layout.places(page_table, row, index.clip(0, None), *pages.shape[1::-1])
    shape = (*lists.shape[:2], lists.shape[2] * block_size)
    rows = found.page * pages.shape[1] + found.offset
    return rows.reshape(shape), (seen & found.there).reshape(shape)


def attention_to_pages(
    ops: ArrayOps,
    over_queries: Callable[..., Any],
    attend: Callable[..., tuple[Any, Any]],
    query,
    key_pages,
    value_pages,
    block_indices,
    paged,
    block_size: int,
    include: str,
    scale: float | None,
):
    """Compute `(out, lse)` over the listed keys, one chunk of queries at a time.

    Args:
      over_queries: The function `over_queries` of the framework's module `chunks`.
      attend: A function that returns the output and the log-sum-exp. The arguments of `attend`
        are queries `[N, L, G, D]`, keys and values `[N, L, S, .]`, a mask `[N, L, 1, S]` and the
        scale.
    """
    columns, (_, page, kv_heads, _) = paged[0].shape[1], key_pages.shape
    lists, tokens = paged_lists(ops, block_indices, paged, page, block_size, include)
    lists = for_kernels(ops, lists, 1, columns * page, block_size, kv_heads)
    heads, number = query.shape[1], lists.shape[1]

    def chunk(query, lists, row, position, page_table, *pages):
        of, head = paged_layout.Tokens(row[0], position[0]), ops.arange(row, number)[0]
        rows, seen = paged_keys(ops, lists[0], of, page_table, pages[0], block_size)
        head = (head * kv_heads // number)[:, None]
        keys, values = (
            ops.xp.where(seen[..., None], x.reshape(-1, *x.shape[2:])[rows, head], 0)
            for x in pages
        )
        grouped = query[0].reshape(-1, number, heads // number, query.shape[-1])
        out, lse = attend(grouped, keys, values, seen[:, :, None], scale)
        return out.reshape(1, -1, heads, out.shape[-1]), lse.reshape(1, -1, heads)

    costs = number * lists.shape[2] * block_size * (query.shape[-1] + value_pages.shape[-1])
    per_token = [x[None] for x in (query, lists, tokens.row, tokens.position)]
    shared = paged[0], key_pages, value_pages
    out, lse = over_queries(chunk, per_token, shared, costs * 4)
    return out[0], lse[0]
