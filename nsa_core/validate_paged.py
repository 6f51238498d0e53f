"""Checks of a paged cache's arguments for both frameworks: shapes, dtypes, and the numbers that the
caller's `read` reads on the host.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nsa_core import validate
from nsa_core.compress_params import CompressParams
from nsa_core.config import NSAConfig
from nsa_core.paged_layout import PagedArrays, dtype_of, shapes
from nsa_core.paged_runs import Run
from nsa_core.rounding import DTYPE as FP8
from nsa_core.types import Branches
from nsa_core.validate import FLOATS, array, dtype_name

INDICES = ("int32",)
PAGE_DTYPES = *FLOATS, FP8
QUERIES = "bfloat16", "float16", "float32"  # of a cache in fp8


def dtypes(dtype: str, compressed_dtype: str) -> None:
    """Check the dtypes of a cache's pages and of its compressed keys."""
    if dtype not in PAGE_DTYPES:
        raise ValueError(f"dtype must be one of {PAGE_DTYPES}, got {dtype}")
    if dtype == FP8 and compressed_dtype not in QUERIES:
        raise ValueError(
            f"compressed_dtype must be one of {QUERIES} in a cache of {FP8}, "
            f"got {compressed_dtype}"
        )
    if dtype != FP8 and compressed_dtype != dtype:
        raise ValueError(
            f"compressed_dtype must be the cache's where that is not {FP8}, {dtype}, "
            f"got {compressed_dtype}"
        )


def copied(source, target) -> None:
    """Check the numbers of source and target pages: integers `[K]` of equal length."""
    array("source", source, 1, ("int32", "int64"))
    array("target", target, tuple(source.shape), ("int32", "int64"))


def pages(cache: PagedArrays) -> None:
    """All arrays of one pool: the same number of pages, of kv heads, and one dtype."""
    array("selected_key", cache.selected_key, 4, PAGE_DTYPES)
    array("selected_value", cache.selected_value, 4, PAGE_DTYPES)
    number, _, kv_heads, key_width = cache.selected_key.shape
    sizes = number, kv_heads, key_width, cache.selected_value.shape[3]
    dtype, compressed = map(dtype_name, (cache.selected_key, cache.compressed_key))
    dtypes(dtype, compressed)
    rows = cache.recent_key.shape[0] if cache.is_fp8 else 1
    expected = shapes(*sizes, cache.config, cache.separate, rows * (dtype == FP8))
    for name, wanted in expected.items():
        x = getattr(cache, name)
        if (x is None) != (wanted is None):
            must, got = "None" if wanted is None else "given", type(x).__name__
            raise ValueError(f"{name} must be {must} where pages are {dtype}, got {got}")
        if wanted is None:
            continue
        array(name, x, wanted, PAGE_DTYPES)
        own = dtype_of(name, dtype, compressed, "float32")
        if dtype_name(x) != own:
            raise ValueError(f"{name} must have dtype {own}, got {dtype_name(x)}")


def tables(
    read: Callable[[Any], np.ndarray | None],
    name: str,
    count: int,
    paged: Sequence[Any],
    pool: int,
    size: int,
    *,
    writes: bool = False,
) -> None:
    """Checks the tables of a call with `count` tokens in the array `name`. If the host reads them,
    lengths must count the tokens of the call, and rows must have the pages that they need.

    Args:
      paged: `page_table` int32 `[B, M]`, `lengths` int32 `[B]`, `cu_seqlens_q` int32 `[B + 1]` or
        None.
      read: returns an array of NumPy, or None if the host does not read it.
      pool: number of pages, of `size` tokens each.
      writes: whether tokens are written. An entry below 0 is then no page, and two rows must not
        write to one page.
    """
    page_table, lengths, cu_seqlens_q = paged
    array("page_table", page_table, 2, INDICES)
    array("lengths", lengths, tuple(page_table.shape[:1]), INDICES)
    rows, pages_a_row = page_table.shape
    validate.sizes(rows=rows, pages_a_row=pages_a_row)
    found, needed, starts = read(page_table), read(lengths), None
    if cu_seqlens_q is not None:
        array("cu_seqlens_q", cu_seqlens_q, (rows + 1,), INDICES)
        if (starts := read(cu_seqlens_q)) is not None:
            validate.borders("cu_seqlens_q", starts.tolist(), count)
    elif count % rows:
        raise ValueError(
            f"{name} must have a multiple of {rows} tokens, the rows of lengths, where "
            f"cu_seqlens_q is None, got {count}"
        )
    if needed is None:
        return
    new = None
    if cu_seqlens_q is None or starts is not None:
        new = np.full(rows, count // rows) if starts is None else np.diff(starts)
        for (row,) in np.argwhere((needed > 0) & (needed < new)):
            raise ValueError(
                f"lengths[{row}] must be 0 or count the {new[row]} tokens of the row in this "
                f"call, got {needed[row]}"
            )
    if found is None:
        return
    outside = (found >= pool) | (found < 0) & (not writes)
    there = np.arange(pages_a_row) * size < needed[:, None]
    for row, column in np.argwhere(outside & there):
        raise ValueError(
            f"page_table[{row}, {column}] must be a page of the cache, 0..{pool - 1}, "
            f"got {found[row, column]}"
        )
    if not writes or new is None:
        return
    row_of: dict[int, int] = {}
    for row in np.flatnonzero((needed > 0) & (new > 0)):
        first, end = (needed[row] - new[row]) // size, -(-needed[row] // size)
        for page in found[row, first:end]:
            if page >= 0 and row_of.setdefault(int(page), int(row)) != row:
                raise ValueError(
                    f"page_table must give each row pages of its own for new tokens, got page "
                    f"{page} for rows {row_of[int(page)]} and {row}"
                )


def runs(
    found: Sequence[Run],
    page_table,
    tokens: int,
    page_size: int,
    starts: np.ndarray | None,
    lengths: np.ndarray | None,
) -> None:
    """Check that runs belong to a call with these rows and tokens, and with `cu_seqlens_q` and
    `lengths` if they were read.
    """
    if not isinstance(found, Sequence) or not all(isinstance(x, Run) for x in found):
        raise ValueError(f"runs must be a list of Run, as plan_runs makes it, got {found!r}")
    rows, pages = page_table.shape
    covered, row, token = np.zeros(rows, bool), 0, 0
    for i, run in enumerate(found):
        fits = row <= run.rows.start <= run.rows.stop <= rows
        fits &= token <= run.tokens.start <= run.tokens.stop <= tokens
        row, token = run.rows.stop, run.tokens.stop
        if fits and starts is not None:
            own = starts[run.rows.start : row + 1]
            new = np.diff(own)
            at = run.tokens.start, token, run.queries
            fits = at == (own[0], own[-1], new.max(initial=0))
            if lengths is not None:
                reach = lengths[run.rows]
                columns = min(-(-int(reach.max(initial=0)) // page_size), pages)
                fits &= run.few or columns <= run.columns
                fits &= not (run.whole and (reach > new).any())
                covered[run.rows] = True
        if not fits:
            raise ValueError(
                f"runs[{i}] must be planned from the cu_seqlens_q and lengths of this call, "
                f"got {run}"
            )
    if starts is not None and lengths is not None:
        for (missing,) in np.argwhere((lengths > 0) & (np.diff(starts) > 0) & ~covered):
            raise ValueError(
                f"runs must have each row with new tokens, got none of row {missing}"
            )


def longest(
    read: Callable[[Any], np.ndarray | None],
    max_seqlen_q: int | None,
    cu_seqlens_q,
    capacity: int,
) -> int | None:
    """`max_seqlen_q`, limited to the `capacity` of a row's pages. Checks that no row of
    `cu_seqlens_q` is longer, if the host reads it (`numbers`).
    """
    if max_seqlen_q is None:
        return None
    validate.sizes(max_seqlen_q=max_seqlen_q)
    starts = None if cu_seqlens_q is None else read(cu_seqlens_q)
    if starts is not None:
        found = int(np.diff(starts).max())
        if found > max_seqlen_q:
            raise ValueError(
                f"max_seqlen_q must be {found} at least, as the longest row of cu_seqlens_q has, "
                f"got {max_seqlen_q}"
            )
        row_length(found, capacity)
    return min(max_seqlen_q, capacity)


def new_tokens(
    read: Callable[[Any], np.ndarray | None],
    cache: PagedArrays,
    key: Branches,
    value: Branches,
    page_table,
    lengths,
    cu_seqlens_q,
    params: tuple[CompressParams, CompressParams] | None,
    slots,
    pool: int,
) -> tuple[CompressParams, CompressParams]:
    """Checks the arguments of `append`, keys `[N, Hkv, D]` and values `[N, Hkv, Dv]`. Returns
    `params` as a pair.
    """
    count, like = None, {"the cache": cache}
    for key_name, value_name, k, v in validate.named(key, value):
        array(key_name, k, (count, *cache.selected_key.shape[2:]), **like)
        count = k.shape[0]
        array(value_name, v, (count, *cache.selected_value.shape[2:]), **like)
    for kind, given in (("key", key), ("value", value)):
        if not cache.separate and any(x is not given.selected for x in given):
            raise ValueError(
                f"{kind} must be one array where the cache is not separate=True, got Branches"
            )
    assert count is not None
    validate.sizes(tokens=count)
    at = page_table, lengths, cu_seqlens_q
    tables(read, "key", count, at, pool, cache.config.select_block, writes=True)
    if slots is not None:  # int32 `[B]`: which row of `recent` each row has
        array("slots", slots, tuple(lengths.shape), INDICES)
    elif cache.is_fp8 and lengths.shape[0] > cache.recent_key.shape[0]:
        raise ValueError(
            f"a cache in fp8 made for max_rows={cache.recent_key.shape[0]} takes no more rows "
            f"without slots, got {lengths.shape[0]}"
        )
    params = (None, None) if params is None else params
    pair = key.compressed[None], value.compressed[None]
    validate.phi_pair(params, *pair, cache.config, "params")
    return params


def queries(cache: PagedArrays, query, gates, scale) -> None:
    """`query` `[N, H, D]`; gates `[N, H, 3]`, or `Branches` of `[N, H]`."""
    array("query", query, (None, None, cache.selected_key.shape[3]), **{"the cache": cache})
    count, heads, _ = query.shape
    validate.sizes(tokens=count, heads=heads)
    if heads % cache.kv_heads:
        raise ValueError(
            f"query heads must be a multiple of the cache's heads, "
            f"got {heads} and {cache.kv_heads}"
        )
    validate.scaling(scale)
    if isinstance(gates, Branches):
        for name, gate in gates._asdict().items():
            array(f"gates.{name}", gate, (count, heads))
    else:
        array("gates", gates, (count, heads, 3))


def paged(cache, config: NSAConfig | None = None) -> None:
    """Check that `cache` has pages, with the configuration `config` if it is given."""
    if not isinstance(cache, PagedArrays):
        raise ValueError(f"cache must be a PagedCache, got {type(cache).__name__}")
    if config is not None and config != cache.config:
        raise ValueError(f"config must be the cache's, {cache.config}, got {config}")


def row_length(T: int, capacity: int) -> None:
    if T > capacity:
        raise ValueError(
            f"a row must not have more queries than tokens, {capacity} in the pages of its "
            f"table, got {T}"
        )
