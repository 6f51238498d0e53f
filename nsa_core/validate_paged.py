"""Checks of a paged cache's arguments for both frameworks: shapes, dtypes, and the numbers that the
caller's `read` reads on the host.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nsa_core import validate
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
    if dtype != FP8 and compressed_dtype != dtype:
        raise ValueError(
            f"compressed_dtype must be the cache's where that is not {FP8}, {dtype}, "
            f"got {compressed_dtype}"
        )
    if dtype == FP8 and compressed_dtype not in QUERIES:
        raise ValueError(
            f"compressed_dtype must be one of {QUERIES} in a cache of {FP8}, "
            f"got {compressed_dtype}"
        )


def copied(source, target) -> None:
    """Check the numbers of source and target pages: integers `[K]` of equal length."""
    array("source", source, 1, ("int32", "int64"))
    array("target", target, tuple(source.shape), ("int32", "int64"))


def pages(cache: PagedArrays) -> None:
    """All arrays of one pool: the same number of pages, of kv heads, and one dtype."""
    array("selected_key", cache.selected_key, 4, PAGE_DTYPES)
    number, _, kv_heads, key_width = cache.selected_key.shape
    array("selected_value", cache.selected_value, 4, PAGE_DTYPES)
    value_width = cache.selected_value.shape[3]
    dtype = dtype_name(cache.selected_key)
    if (dtype == FP8) != cache.is_fp8:
        raise ValueError(f"pages of {FP8}, and no others, must have scales, got {dtype}")
    rows = cache.recent_key.shape[0] if cache.is_fp8 else 0
    sizes = number, kv_heads, key_width, value_width, cache.config, cache.separate, rows
    expected_shapes = shapes(*sizes)
    compressed = dtype_name(cache.compressed_key)
    dtypes(dtype, compressed)
    for one, two in (("sliding_key", "sliding_value"), ("raw_key", "raw_value")):
        if (getattr(cache, one) is None) != (getattr(cache, two) is None):
            raise ValueError(f"{one} and {two} must both be given or both be None")
    if (cache.sliding_key is None) != (cache.raw_key is None):
        raise ValueError("sliding_key and raw_key must both be given or both be None")
    for name, wanted in expected_shapes.items():
        x = getattr(cache, name)
        if x is None and wanted is not None:
            raise ValueError(f"{name} must be given in a cache of {dtype}, got None")
        if x is not None and wanted is None:
            raise ValueError(f"{name} must be None where pages are {dtype}, got an array")
        if x is None or wanted is None:
            continue
        array(name, x, wanted, PAGE_DTYPES)
        expected = dtype_of(name, dtype, compressed, "float32")
        if dtype_name(x) != expected:
            like = "the dtype of selected_key, " if expected == dtype else ""
            raise ValueError(f"{name} must have {like}{expected}, got {dtype_name(x)}")


def table(page_table, lengths) -> None:
    """`page_table` int32 `[B, M]`, `lengths` int32 `[B]`."""
    array("page_table", page_table, 2, INDICES)
    array("lengths", lengths, tuple(page_table.shape[:1]), INDICES)
    validate.sizes(rows=page_table.shape[0], pages_a_row=page_table.shape[1])


def numbers(
    read: Callable[[Any], np.ndarray | None],
    page_table,
    lengths,
    cu_seqlens_q,
    count: int,
    pool: int,
    size: int,
    *,
    writes: bool = False,
) -> None:
    """Check the numbers of a call's tables if the host reads them: bounds of the rows, lengths that
    include their tokens of the call, and entries of the required pages.

    Args:
      read: an array in NumPy; None means the host does not read it.
      count: tokens of the call.
      pool: pages, of `size` tokens each.
      writes: an entry below 0 is none to write to, and two rows must not write to one page.
    """
    found, needed, starts = read(page_table), read(lengths), None
    if cu_seqlens_q is not None:
        if (starts := read(cu_seqlens_q)) is not None:
            validate.borders("cu_seqlens_q", starts.tolist(), count)
    new = None
    if needed is not None and (cu_seqlens_q is None or starts is not None):
        even = np.full(needed.shape, count // needed.shape[0])
        new = even if starts is None else np.diff(starts)
        for (row,) in np.argwhere((needed > 0) & (needed < new)):
            raise ValueError(
                f"lengths[{row}] must be 0 or count the {new[row]} tokens of the row in this "
                f"call, got {needed[row]}"
            )
    if found is None or needed is None:
        return
    outside = (found >= pool) | (found < 0) & (not writes)
    there = np.arange(found.shape[1]) * size < needed[:, None]
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
        at = f"runs[{i}]"
        for name, part, before, end in (
            ("rows", run.rows, row, rows),
            ("tokens", run.tokens, token, tokens),
        ):
            if not before <= part.start <= part.stop <= end:
                raise ValueError(
                    f"{at}.{name} must lie within {before} and {end}, behind those of the runs "
                    f"before and within the call's, got {part.start} to {part.stop}: runs are "
                    "planned from this call's cu_seqlens_q"
                )
        row, token = run.rows.stop, run.tokens.stop
        if starts is None:
            continue
        own = starts[run.rows.start : run.rows.stop + 1]
        said = int(own[0]), int(own[-1]), int(np.diff(own).max(initial=0))
        if said != (run.tokens.start, run.tokens.stop, run.queries):
            raise ValueError(
                f"{at} must have tokens {said[0]} to {said[1]} and at most {said[2]} of a row, as "
                f"cu_seqlens_q has, got {run.tokens.start} to {run.tokens.stop} and {run.queries}"
            )
        if lengths is None:
            continue
        reach = lengths[run.rows]
        before = bool((reach > np.diff(own)).any())
        columns = 0 if run.few else min(-(-int(reach.max(initial=0)) // page_size), pages)
        if run.columns < columns or (run.whole and before):
            raise ValueError(
                f"{at} must have columns={columns} at least and whole={not before}, as lengths "
                f"have, got columns={run.columns} and whole={run.whole}"
            )
        covered[run.rows] = True
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


def slots(cache: PagedArrays, found, lengths) -> None:
    """Check the row of `recent` of each row, int32 `[B]`. By default row `b` has the `b`-th."""
    if found is not None:
        array("slots", found, tuple(lengths.shape), INDICES)
    elif cache.is_fp8 and lengths.shape[0] > cache.recent_key.shape[0]:
        raise ValueError(
            f"a cache in fp8 made for max_rows={cache.recent_key.shape[0]} takes no more rows "
            f"without slots, got {lengths.shape[0]}"
        )


def rows(name: str, count: int, lengths, cu_seqlens_q) -> None:
    """`count` tokens in the rows of `lengths`."""
    batch = lengths.shape[0]
    if cu_seqlens_q is None:
        if count % batch:
            raise ValueError(
                f"{name} must have a multiple of {batch} tokens, the rows of lengths, where "
                f"cu_seqlens_q is None, got {count}"
            )
        return
    array("cu_seqlens_q", cu_seqlens_q, (batch + 1,), INDICES)


def new_tokens(
    cache: PagedArrays, key: Branches, value: Branches, lengths, cu_seqlens_q
) -> int:
    """The number of tokens to append: keys `[N, Hkv, D]`, values `[N, Hkv, Dv]`."""
    count = None
    for kind, given in (("key", key), ("value", value)):
        width = getattr(cache, f"selected_{kind}").shape[3]
        one = given.compressed is given.selected is given.sliding
        for branch, x in given._asdict().items():
            name = kind if one else f"{kind}.{branch}"
            array(name, x, (count, cache.kv_heads, width))
            count = x.shape[0]
            if x.dtype != cache.dtype:
                raise ValueError(
                    f"{name} must have the dtype of the cache, "
                    f"{dtype_name(cache)}, got {dtype_name(x)}"
                )
        apart = any(x is not given.selected for x in given)
        if apart and not cache.separate:
            raise ValueError(
                f"{kind} must be one array where the cache is not separate=True, got Branches"
            )
    assert count is not None
    validate.sizes(tokens=count)
    rows("key", count, lengths, cu_seqlens_q)
    return count


def queries(cache: PagedArrays, query, gates, lengths, cu_seqlens_q, scale) -> None:
    """`query` `[N, H, D]`; gates `[N, H, 3]`, or `Branches` of `[N, H]`."""
    array("query", query, (None, None, cache.selected_key.shape[3]))
    validate.sizes(tokens=query.shape[0], heads=query.shape[1])
    if query.dtype != cache.dtype:
        raise ValueError(
            f"query must have the dtype of the cache, {dtype_name(cache)}, "
            f"got {dtype_name(query)}"
        )
    if query.shape[1] % cache.kv_heads:
        raise ValueError(
            f"query heads must be a multiple of the cache's heads, "
            f"got {query.shape[1]} and {cache.kv_heads}"
        )
    validate.scaling(scale)
    rows("query", query.shape[0], lengths, cu_seqlens_q)
    expected = tuple(query.shape[:2])
    if isinstance(gates, Branches):
        for name, gate in gates._asdict().items():
            array(f"gates.{name}", gate, expected)
        return
    array("gates", gates, (*expected, 3))


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
