"""Checks of a paged cache's arguments by shape and dtype alone, for both frameworks."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from nsa_core import validate
from nsa_core.config import NSAConfig
from nsa_core.paged_layout import PagedArrays, dtype_of, shapes
from nsa_core.paged_runs import Run
from nsa_core.rounding import DTYPE as FP8
from nsa_core.types import Branches
from nsa_core.validate import FLOATS, array, dtype_name, shape

INDICES = ("int32",)
PAGE_DTYPES = *FLOATS, FP8
QUERIES = "bfloat16", "float16", "float32"  # of a cache in fp8


def dtypes(dtype: str, compressed_dtype: str) -> None:
    """Of the pages of a cache, and of its compressed keys."""
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
    """Numbers of what is copied, and of where to: integers `[K]`, as many of both."""
    for name, x in (("source", source), ("target", target)):
        array(name, x, 1, ("int32", "int64"))
    shape("target", target, tuple(source.shape))


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
        array(name, x, len(wanted), PAGE_DTYPES)
        shape(name, x, wanted)
        expected = dtype_of(name, dtype, compressed, "float32")
        if dtype_name(x) != expected:
            like = "the dtype of selected_key, " if expected == dtype else ""
            raise ValueError(f"{name} must have {like}{expected}, got {dtype_name(x)}")


def table(page_table, lengths) -> None:
    """`page_table` int32 `[B, M]`, `lengths` int32 `[B]`."""
    array("page_table", page_table, 2, INDICES)
    array("lengths", lengths, 1, INDICES)
    shape("lengths", lengths, tuple(page_table.shape[:1]))
    validate.sizes(rows=page_table.shape[0], pages_a_row=page_table.shape[1])


def page_numbers(
    page_table: np.ndarray, lengths: np.ndarray, count: int, size: int, read: bool
) -> None:
    """The entries of the pages that `lengths` tokens need, of `count` pages of `size` tokens;
    `read`: below 0 is no page then too.
    """
    columns = np.arange(page_table.shape[1]) * size
    outside = (page_table >= count) | (read & (page_table < 0))
    for row, column in np.argwhere(outside & (columns < lengths[:, None])):
        raise ValueError(
            f"page_table[{row}, {column}] must be a page of the cache, 0..{count - 1}, "
            f"got {page_table[row, column]}"
        )


def counted(lengths: np.ndarray, starts: np.ndarray | None, count: int) -> None:
    """That `lengths` count the rows' tokens of the call: `count`, which begin at `starts`, or are
    as many in each row.
    """
    new = _new_of_rows(lengths, starts, count)
    for (row,) in np.argwhere((lengths > 0) & (lengths < new)):
        raise ValueError(
            f"lengths[{row}] must be 0 or count the {new[row]} tokens of the row in this call, "
            f"got {lengths[row]}"
        )


def written_once(
    page_table: np.ndarray,
    lengths: np.ndarray,
    starts: np.ndarray | None,
    count: int,
    size: int,
) -> None:
    """That no two rows write their new tokens, of `counted`, to the same page of `size` tokens."""
    row_of: dict[int, int] = {}
    new = _new_of_rows(lengths, starts, count)
    for row in np.flatnonzero((lengths > 0) & (new > 0)):
        first, end = (lengths[row] - new[row]) // size, -(-lengths[row] // size)
        for page in page_table[row, first:end]:
            if page >= 0 and row_of.setdefault(int(page), int(row)) != row:
                raise ValueError(
                    f"page_table must give each row pages of its own for new tokens, got page "
                    f"{page} for rows {row_of[int(page)]} and {row}"
                )


def _new_of_rows(lengths: np.ndarray, starts: np.ndarray | None, count: int) -> np.ndarray:
    """How many of the call's `count` tokens each row has."""
    if starts is None:
        return np.full(lengths.shape, count // lengths.shape[0])
    return np.diff(starts)


def runs(
    found: Sequence[Run],
    page_table,
    tokens: int,
    page_size: int,
    starts: np.ndarray | None,
    lengths: np.ndarray | None,
) -> None:
    """That runs are of a call with these rows and so many tokens, and with `cu_seqlens_q` and
    `lengths` where they are read.
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


def longest(max_seqlen_q: int, starts: np.ndarray, capacity: int) -> None:
    """That no row of `cu_seqlens_q` is longer, nor has more tokens than its pages."""
    found = int(np.diff(starts).max())
    if found > max_seqlen_q:
        raise ValueError(
            f"max_seqlen_q must be {found} at least, as the longest row of cu_seqlens_q has, "
            f"got {max_seqlen_q}"
        )
    row_length(found, capacity)


def slots(cache: PagedArrays, found, lengths) -> None:
    """Which row of `recent` each row has, int32 `[B]`; None: row `b` the `b`-th."""
    if found is not None:
        array("slots", found, 1, INDICES)
        shape("slots", found, tuple(lengths.shape))
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
    array("cu_seqlens_q", cu_seqlens_q, 1, INDICES)
    shape("cu_seqlens_q", cu_seqlens_q, (batch + 1,))


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
            array(name, x, 3)
            count = x.shape[0] if count is None else count
            shape(name, x, (count, cache.kv_heads, width))
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
    array("query", query, 3)
    validate.sizes(tokens=query.shape[0], heads=query.shape[1])
    shape("query", query, (*query.shape[:2], cache.selected_key.shape[3]))
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
            array(f"gates.{name}", gate, 2)
            shape(f"gates.{name}", gate, expected)
        return
    array("gates", gates, 3)
    shape("gates", gates, (*expected, 3))


def paged(cache, config: NSAConfig | None = None) -> None:
    """That there are pages, whose configuration `config` is where it is given."""
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


class OnHost(NamedTuple):
    """Checks of numbers, where the host reads them.

    Attributes:
      read: the numbers of an argument; None: the host does not read them.
    """

    read: Callable[[Any], np.ndarray | None]

    def _all(self, *given: Any) -> Any:
        """The numbers of all that is not None; None: the host does not read some."""
        found = [None if x is None else self.read(x) for x in given]
        lacks = any(x is not None and y is None for x, y in zip(given, found, strict=True))
        return None if lacks else found

    def page_numbers(self, page_table, lengths, count: int, size: int, *, read: bool) -> None:
        """Those of a table; arguments as of the function of this name."""
        if found := self._all(page_table, lengths):
            table, tokens = found
            page_numbers(table, tokens, count, size, read)

    def rows_of_tokens(self, lengths, cu_seqlens_q, count: int) -> None:
        """Where the rows of `count` tokens begin, and that `lengths` count them."""
        if cu_seqlens_q is not None and (found := self._all(cu_seqlens_q)):
            validate.borders("cu_seqlens_q", found[0].tolist(), count)
        if found := self._all(lengths, cu_seqlens_q):
            tokens, starts = found
            counted(tokens, starts, count)

    def written_once(self, page_table, lengths, cu_seqlens_q, count: int, size: int) -> None:
        """That rows write to pages of their own."""
        if found := self._all(page_table, lengths, cu_seqlens_q):
            table, tokens, starts = found
            written_once(table, tokens, starts, count, size)

    def longest(self, max_seqlen_q: int | None, cu_seqlens_q, capacity: int) -> int | None:
        """`max_seqlen_q`, at most the `capacity` of a row's pages; no row has more queries."""
        if max_seqlen_q is None:
            return None
        validate.sizes(max_seqlen_q=max_seqlen_q)
        if cu_seqlens_q is not None and (found := self._all(cu_seqlens_q)):
            longest(max_seqlen_q, found[0], capacity)
        return min(max_seqlen_q, capacity)
