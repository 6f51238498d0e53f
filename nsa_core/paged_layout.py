"""Computes the positions of tokens in a paged cache, for both frameworks.

A page holds `l'` raw tokens and `l'/d` compressed tokens. `page_table[b]` lists the pages of row
`b` in the order of its tokens:

| token                                       | page                         | offset in the page |
|---------------------------------------------|------------------------------|--------------------|
| raw token p                                 | `page_table[b, p // l']`     | `p % l'`           |
| compressed token i, in slot s = i + l/d - 1 | `page_table[b, s // (l'/d)]` | `s % (l'/d)`       |

The slot `s` of a compressed token is `p // d`, where `p` is the LAST raw token of its window. The
last raw token of a window is in the same page as the compressed token. No page depends on the next
page, so rows can share their first pages.

A cache in fp8 stores tokens as float8_e4m3fn with a float32 scale per token and head
(`nsa_core.rounding`). Compressed keys are not rounded, so that rounding does not change the
selection of blocks. Compressed tokens are computed from unrounded tokens. For compressed tokens,
the newest tokens of a row are also stored unrounded, in a buffer that is called the ring of the
row. Raw token p is stored at `recent[slot of the row, p % (2 l)]`.

A ring may contain arbitrary values, including tokens of another row. If the token in the page may
be the rounded value of the token in the ring (`rounding.is_of`), the token in the ring is used. If
the token in the page cannot be the rounded value of the token in the ring, the token in the page is
used.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from nsa_core import validate
from nsa_core.array_ops import ArrayOps
from nsa_core.cache_contents import UNSAID, Contents, summary
from nsa_core.compress_params import CompressParams
from nsa_core.config import NSAConfig
from nsa_core.paged_runs import Run
from nsa_core.rounding import DTYPE as FP8
from nsa_core.types import Branches
from nsa_core.validate import FLOATS, array, dtype_name


@dataclasses.dataclass(repr=False)
class PagedArrays:
    """The `P` pages of one layer's cache. The caller allocates pages to rows.

    Attributes:
      config: The sizes of the layer. `select_block` is the number of tokens per page.
      selected_key: `[P, l', Hkv, D]`.
      selected_value: `[P, l', Hkv, Dv]`.
      compressed_key: `[P, l'/d, Hkv, D]`.
      compressed_value: `[P, l'/d, Hkv, Dv]`.
      sliding_key: The same shape as `selected_key`. If `sliding_key` is None, the sliding branch
        reads the arrays of the selected branch.
      sliding_value: The same shape as `selected_value`, or None.
      raw_key: The keys from which compressed keys are computed. If `raw_key` is None, compressed
        tokens are computed from the tokens of the selected branch.
      raw_value: The values from which compressed values are computed, or None.
      contents: Facts about how the tokens were computed (`cache_contents.Contents`).
      selected_key_scale, ..: Scales of a cache in fp8, float32 `[P, Hkv, l']` or `[P, Hkv, l'/d]`.
      recent_key: Ring of keys of a cache in fp8, `[R, 2 l, Hkv, D]`. The rings have the newest
        tokens of `R` rows, in the dtype of compressed keys. Compressed tokens are computed from the
        rings.
      recent_value: Ring of values of a cache in fp8, `[R, 2 l, Hkv, Dv]`.
    """

    config: NSAConfig
    selected_key: Any
    selected_value: Any
    compressed_key: Any
    compressed_value: Any
    sliding_key: Any = None
    sliding_value: Any = None
    raw_key: Any = None
    raw_value: Any = None
    selected_key_scale: Any = None
    selected_value_scale: Any = None
    compressed_value_scale: Any = None
    sliding_key_scale: Any = None
    sliding_value_scale: Any = None
    raw_key_scale: Any = None
    raw_value_scale: Any = None
    recent_key: Any = None
    recent_value: Any = None
    contents: Contents = dataclasses.field(default=UNSAID, kw_only=True)

    @classmethod
    def of(cls, config: NSAConfig, *arrays: Any, **fields: Any) -> Self:
        """Make a cache from the given `arrays`."""
        cache = cls.__new__(cls)
        PagedArrays.__init__(cache, config, *arrays, **fields)
        return cache

    def __repr__(self) -> str:
        return summary(self, "selected_key", "selected_value", separate=self.separate)

    @property
    def num_pages(self) -> int:
        return self.selected_key.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.selected_key.shape[2]

    @property
    def separate(self) -> bool:
        """Whether each branch has separate keys and values."""
        return self.sliding_key is not None

    @property
    def sliding(self) -> tuple[Any, Any]:
        """The keys and values of the sliding branch."""
        if self.separate:
            return self.sliding_key, self.sliding_value
        return self.selected_key, self.selected_value

    @property
    def raw(self) -> tuple[Any, Any]:
        """The keys and values from which compressed tokens are computed."""
        if self.raw_key is not None:
            return self.raw_key, self.raw_value
        return self.selected_key, self.selected_value

    @property
    def is_fp8(self) -> bool:
        """Whether tokens are rounded to 8 bits."""
        return self.recent_key is not None

    @property
    def dtype(self) -> Any:
        """The dtype that the tokens and queries of a call must have."""
        return self.compressed_key.dtype

    def tensors(self) -> dict[str, Any]:
        """Return the existing arrays by name."""
        return {name: x for name in ARRAYS if (x := getattr(self, name)) is not None}

    def sources(self, kind: str) -> Branches:
        """Return, for each branch, the name of the array that it reads. `kind` is `key` or
        `value`.
        """
        sliding = "sliding" if self.separate else "selected"
        return Branches(f"compressed_{kind}", f"selected_{kind}", f"{sliding}_{kind}")


ARRAYS = tuple(field.name for field in dataclasses.fields(PagedArrays))[1:-1]
PAGES = tuple(name for name in ARRAYS if not name.startswith("recent"))


def slots_of(config: NSAConfig) -> int:
    """Return the number of compressed tokens per page."""
    return config.select_block // config.compress_stride


def first_slot(config: NSAConfig) -> int:
    """Return the slot of compressed token 0."""
    return config.compress_block // config.compress_stride - 1


class Entries(NamedTuple):
    """The entries of a row in its pages. Entry `i` covers the tokens `i * stride .. i * stride +
    block - 1`. The index of entry `i` in the row's pages is `first + i`, and a page has
    `per_page` entries.
    """

    per_page: int
    first: int
    block: int
    stride: int

    def count(self, pages: int) -> int:
        """Return the number of entries of a row with `pages` pages."""
        return pages * self.per_page - self.first


def raw_entries(config: NSAConfig) -> Entries:
    return Entries(config.select_block, 0, 1, 1)


def compressed_entries(config: NSAConfig) -> Entries:
    sizes = config.compress_block, config.compress_stride
    return Entries(slots_of(config), first_slot(config), *sizes)


def shapes(
    num_pages: int,
    kv_heads: int,
    key_width: int,
    value_width: int,
    config: NSAConfig,
    separate: bool,
    fp8_rows: int = 0,
) -> dict[str, tuple[int, ...] | None]:
    """Return the shape of each array in `ARRAYS`, or None for an array that the cache does not
    have. `fp8_rows` is the number of rows of an fp8 cache.

    Raises:
      ValueError: A size is not a positive int, or an argument has a wrong type.
      NotImplementedError: `config` has a `compute_dtype`.
    """
    validate.configuration(config)
    validate.in_dtype_of_query(config, "a cache")
    validate.flag("separate", separate)
    validate.sizes(
        num_pages=num_pages, kv_heads=kv_heads, key_width=key_width, value_width=value_width
    )
    sizes = {"key": key_width, "value": value_width}
    found: dict[str, tuple[int, ...] | None] = {}
    for name in ARRAYS:
        branch, kind, *scale = name.split("_")
        count = slots_of(config) if branch == "compressed" else config.select_block
        missing = branch in ("sliding", "raw") and not separate
        shape = num_pages, count, kv_heads, sizes[kind]
        if scale:
            missing, shape = missing or not fp8_rows, (num_pages, kv_heads, count)
        elif branch == "recent":
            shape = fp8_rows, 2 * config.compress_block, kv_heads, sizes[kind]
            missing = not fp8_rows
        found[name] = None if missing else shape
    return found


def dtype_of(name: str, dtype: Any, compressed: Any, scale: Any) -> Any:
    """Return the dtype of the array `name` of `ARRAYS`. The dtype is `scale` for scales,
    `compressed` for compressed keys and rings, and `dtype` for the other arrays.
    """
    if name.endswith("_scale"):
        return scale
    return compressed if name == "compressed_key" or name.startswith("recent") else dtype


def page_elements(*sizes: Any) -> int:
    """Return the number of elements that one page has in all `ARRAYS` together. `sizes` are the
    arguments of `shapes` after `num_pages`.
    """
    return sum(math.prod(x) for x in shapes(1, *sizes).values() if x is not None)


def new_arrays(
    xp: Any,
    name_of: Callable[[Any], str],
    zeros: Callable[[str, tuple[int, ...], Any], Any],
    dtype: Any,
    compressed_dtype: Any,
    max_rows: int,
    *sizes: Any,
) -> dict[str, Any]:
    """Return the `ARRAYS` of a new cache. If the cache does not have an array, its entry is None.

    Args:
      name_of: Function that returns the name of a dtype.
      zeros: Function that makes an array from its name, shape and dtype.
      dtype, compressed_dtype, max_rows: as in `nsa_torch.PagedCache`.
      sizes: as in the function `shapes`.
    """
    is_fp8 = name_of(dtype) == FP8
    compressed_dtype = compressed_dtype or (xp.bfloat16 if is_fp8 else dtype)
    check_dtypes(*map(name_of, (dtype, compressed_dtype)))
    validate.sizes(max_rows=max_rows)
    dtypes = dtype, compressed_dtype, xp.float32
    found = shapes(*sizes, fp8_rows=max_rows * is_fp8)
    return {
        name: None if x is None else zeros(name, x, dtype_of(name, *dtypes))
        for name, x in found.items()
    }


class Tokens(NamedTuple):
    """The tokens of a call. `row`, int `[N]`, is the row of each token, and `position`, int
    `[N]`, is its position in that row. A negative position marks padding, which belongs to no
    sequence.
    """

    row: Any
    position: Any


def tokens_of(ops: ArrayOps, lengths, cu_seqlens_q, count: int) -> Tokens:
    """Return the `count` tokens of a call. The tokens of a call are the last tokens of each row.
    `lengths` `[B]` has the length of each row.

    Args:
      cu_seqlens_q: int32 `[B + 1]`, the index of each row's first token. `cu_seqlens_q=None`
        means that all rows have the same number of tokens.
    """
    batch = lengths.shape[0]
    index = ops.arange(lengths, count)[0]
    if cu_seqlens_q is None:
        row = index // (count // batch)
        end, real = (row + 1) * (count // batch), row >= 0
    else:
        row = ops.searchsorted(cu_seqlens_q[None, 1:], index[None], "right")[0]
        real = row < batch
        row = row.clip(0, batch - 1)
        end = cu_seqlens_q[row + 1]
    length = lengths[row]
    return Tokens(row, ops.xp.where(real & (length > 0), length - (end - index), -1))


class Places(NamedTuple):
    """The locations of entries in pages. `page` and `offset` are clamped to valid values, and
    `there` is False for invalid entries.
    """

    page: Any
    offset: Any
    there: Any


def places(page_table, row, index, per_page: int, num_pages: int) -> Places:
    """Return the `Places` of the entries `index` of the rows `row`. A page has `per_page`
    entries.

    Entries beyond the page table, or in a page that does not exist, are invalid.
    """
    column = index // per_page
    inside = (index >= 0) & (column < page_table.shape[1])
    page = page_table[row, column.clip(0, page_table.shape[1] - 1)]
    there = inside & (page >= 0) & (page < num_pages)
    return Places(page.clip(0, num_pages - 1), index % per_page, there)


class Finished(NamedTuple):
    """The tokens that complete a compressed token.

    `token` `[K]` is the index in the call of each token that completes a compressed token, and
    `there` is False for unused entries.
    """

    token: Any
    there: Any


def finished(ops: ArrayOps, tokens: Tokens, batch: int, config: NSAConfig) -> Finished:
    """Return the tokens of the call whose positions are `i d + l - 1`, in order.

    The result has room for the maximum number of tokens that complete compressed tokens in a call.
    """
    block, stride = config.compress_block, config.compress_stride
    position, (count,) = tokens.position, tokens.position.shape
    last = (position >= block - 1) & ((position + 1 - block) % stride == 0)
    before = ops.xp.cumsum(ops.to_int32(last), 0)
    most = count // stride + min(batch, count)
    index = ops.arange(position, most) + 1
    token = ops.searchsorted(before[None], index, "left")[0]
    return Finished(token.clip(0, count - 1), token < count)


class PaddedQueries(NamedTuple):
    """Rows of queries that are padded. `token` `[B, T]` is the index of each query's token in the
    call, clamped to valid indices. `there` is False for padding. `flat` `[N]` is the index of each
    token in `[B * T]`.
    """

    token: Any
    there: Any
    flat: Any


def pad_queries(ops: ArrayOps, tokens: Tokens, lengths, cu_seqlens_q, T: int) -> PaddedQueries:
    """Arrange the tokens of a call in rows of `T` queries, with padding before the queries."""
    begin, end = _tokens_of_rows(ops, tokens, lengths, cu_seqlens_q)
    return _in_rows(ops, tokens, end - T, begin, T)


def align_queries(
    ops: ArrayOps, tokens: Tokens, lengths, cu_seqlens_q, T: int, multiple: int
) -> tuple[PaddedQueries, Any]:
    """Arrange the tokens of a call in rows of `T` queries, with padding before and after the
    queries. The position of a row's first query is the last multiple of `multiple` that is not
    after the row's first token. Also return the position after the last query of each row, `[B]`.
    """
    begin, end = _tokens_of_rows(ops, tokens, lengths, cu_seqlens_q)
    position = lengths - (end - begin)  # of the first token of each row
    before = position % multiple
    first = begin - before
    padded = _in_rows(ops, tokens, first, begin, T)
    exists = ops.arange(lengths, T) < (end - first)[:, None]
    return padded._replace(there=padded.there & exists), position - before + T


def _in_rows(ops: ArrayOps, tokens: Tokens, first, begin, T: int) -> PaddedQueries:
    """Arrange the tokens of a call in rows of `T` queries. `first` and `begin` `[B]` have the index
    of each row's first query and of its first token. Queries before the first token are padding.
    """
    (count,) = tokens.row.shape
    token = first[:, None] + ops.arange(first, T)
    column = (ops.arange(first, count)[0] - first[tokens.row]).clip(0, T - 1)
    there, flat = token >= begin[:, None], tokens.row * T + column
    return PaddedQueries(token.clip(0, count - 1), there, flat)


def _tokens_of_rows(ops: ArrayOps, tokens: Tokens, lengths, cu_seqlens_q):
    """Return the index of the first token of each row, and the index after its last token."""
    if cu_seqlens_q is not None:
        return cu_seqlens_q[:-1], cu_seqlens_q[1:]
    batch = lengths.shape[0]
    each = tokens.row.shape[0] // batch
    end = (ops.arange(lengths, batch)[0] + 1) * each
    return end - each, end


INDICES = ("int32",)
PAGE_DTYPES = *FLOATS, FP8
QUERY_DTYPES = "bfloat16", "float16", "float32"  # for a cache in fp8


def check_dtypes(dtype: str, compressed_dtype: str) -> None:
    """Check the dtypes of a cache's pages and of its compressed keys."""
    if dtype not in PAGE_DTYPES:
        raise ValueError(f"dtype must be one of {PAGE_DTYPES}, got {dtype}")
    if dtype == FP8 and compressed_dtype not in QUERY_DTYPES:
        raise ValueError(
            f"compressed_dtype must be one of {QUERY_DTYPES} in a cache of {FP8}, "
            f"got {compressed_dtype}"
        )
    if dtype != FP8 and compressed_dtype != dtype:
        raise ValueError(
            f"compressed_dtype must be dtype={dtype} unless dtype is {FP8}, got {compressed_dtype}"
        )


def check_copied(source, target) -> None:
    """Check `source` and `target`, which must be integer arrays `[K]` of equal length."""
    array("source", source, 1, ("int32", "int64"))
    array("target", target, tuple(source.shape), ("int32", "int64"))


def check_pages(cache: PagedArrays) -> None:
    """Check which arrays exist, their shapes (`shapes`) and their dtypes (`dtype_of`)."""
    array("selected_key", cache.selected_key, 4, PAGE_DTYPES)
    array("selected_value", cache.selected_value, 4, PAGE_DTYPES)
    number, _, kv_heads, key_width = cache.selected_key.shape
    sizes = number, kv_heads, key_width, cache.selected_value.shape[3]
    dtype, compressed = map(dtype_name, (cache.selected_key, cache.compressed_key))
    check_dtypes(dtype, compressed)
    rows = cache.recent_key.shape[0] if cache.is_fp8 else 1
    expected = shapes(*sizes, cache.config, cache.separate, rows * (dtype == FP8))
    for name, wanted in expected.items():
        x = getattr(cache, name)
        if (x is None) != (wanted is None):
            must, got = "None" if wanted is None else "given", type(x).__name__
            raise ValueError(f"{name} must be {must} if pages are {dtype}, got {got}")
        if wanted is None:
            continue
        array(name, x, wanted, PAGE_DTYPES)
        own = dtype_of(name, dtype, compressed, "float32")
        if dtype_name(x) != own:
            raise ValueError(f"{name} must have dtype {own}, got {dtype_name(x)}")


def check_tables(
    read: Callable[[Any], np.ndarray | None],
    name: str,
    count: int,
    paged: Sequence[Any],
    pool: int,
    size: int,
    *,
    writes: bool = False,
) -> None:
    """Check page table, lengths and boundaries of a call with `count` tokens in the array `name`.

    If the host reads the values, each of `lengths` must be 0 or include the tokens of the call. The
    rows must also have the pages that their tokens need.

    Args:
      paged: `page_table` int32 `[B, M]`, `lengths` int32 `[B]`, `cu_seqlens_q` int32 `[B + 1]` or
        None.
      read: Function that returns an array as a NumPy array, or None if the host does not read the
        array.
      pool: Number of pages in the pool, each with `size` tokens.
      writes: Whether the call writes tokens. If the call writes tokens, two rows must not write to
        the same page. In the page table of a call that writes, a negative entry means that there is
        no page.
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
            f"{name} must have the same number of tokens for each of the {rows} rows, got {count}; "
            "pass cu_seqlens_q if the numbers differ"
        )
    if needed is None:
        return
    new = None
    if cu_seqlens_q is None or starts is not None:
        new = np.full(rows, count // rows) if starts is None else np.diff(starts)
        for (row,) in np.argwhere((needed > 0) & (needed < new)):
            raise ValueError(
                f"lengths[{row}] must be 0 or at least {new[row]}, the tokens of the row in this "
                f"call, got {needed[row]}"
            )
    if found is None:
        return
    outside = (found >= pool) | (found < 0) & (not writes)
    there = np.arange(pages_a_row) * size < needed[:, None]
    for row, column in np.argwhere(outside & there):
        raise ValueError(
            f"page_table[{row}, {column}] must be the index of a page in 0..{pool - 1}, got "
            f"{found[row, column]}"
        )
    if not writes or new is None:
        return
    row_of: dict[int, int] = {}
    for row in np.flatnonzero((needed > 0) & (new > 0)):
        first, end = (needed[row] - new[row]) // size, -(-needed[row] // size)
        for page in found[row, first:end]:
            if page >= 0 and row_of.setdefault(int(page), int(row)) != row:
                raise ValueError(
                    f"page_table must list different pages for the new tokens of different "
                    f"rows, got page {page} for rows {row_of[int(page)]} and {row}"
                )


def check_runs(
    found: Sequence[Run],
    page_table,
    tokens: int,
    page_size: int,
    starts: np.ndarray | None,
    lengths: np.ndarray | None,
) -> None:
    """Check that the runs fit the number of rows and tokens of a call. If the host has read
    `cu_seqlens_q` and `lengths`, the runs must also fit their values.
    """
    if not isinstance(found, Sequence) or not all(isinstance(x, Run) for x in found):
        raise ValueError(f"runs must be a list of Run from plan_runs, got {found!r}")
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
                f"runs must include every row that has new tokens, got no run with row {missing}"
            )


def longest_row(
    read: Callable[[Any], np.ndarray | None],
    max_seqlen_q: int | None,
    cu_seqlens_q,
    capacity: int,
) -> int | None:
    """Return `max_seqlen_q`, limited to the `capacity` of a row's pages. If the host reads
    `cu_seqlens_q`, check that no row is longer than `max_seqlen_q` or `capacity`.
    """
    if max_seqlen_q is None:
        return None
    validate.sizes(max_seqlen_q=max_seqlen_q)
    starts = None if cu_seqlens_q is None else read(cu_seqlens_q)
    if starts is not None:
        found = int(np.diff(starts).max())
        if found > max_seqlen_q:
            raise ValueError(
                f"max_seqlen_q must be at least {found}, the longest row of cu_seqlens_q, "
                f"got {max_seqlen_q}"
            )
        check_row_length(found, capacity)
    return min(max_seqlen_q, capacity)


def check_tokens(
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
    """Check the arguments of the function `append`, with keys `[N, Hkv, D]` and values `[N, Hkv,
    Dv]`. Return `params` as a pair.
    """
    count, like = None, {"the cache": cache}
    for key_name, value_name, k, v in validate.named(key, value):
        array(key_name, k, (count, *cache.selected_key.shape[2:]), **like)
        count = k.shape[0]
        array(value_name, v, (count, *cache.selected_value.shape[2:]), **like)
    for kind, given in (("key", key), ("value", value)):
        if not cache.separate and any(x is not given.selected for x in given):
            raise ValueError(
                f"{kind} must be one array unless the cache was made with separate=True, got "
                "Branches"
            )
    assert count is not None
    validate.sizes(tokens=count)
    at = page_table, lengths, cu_seqlens_q
    check_tables(read, "key", count, at, pool, cache.config.select_block, writes=True)
    if slots is not None:  # int32 `[B]`: the ring of each row, as an index into `recent_key`
        array("slots", slots, tuple(lengths.shape), INDICES)
    elif cache.is_fp8 and lengths.shape[0] > cache.recent_key.shape[0]:
        raise ValueError(
            f"slots must be given for more than max_rows={cache.recent_key.shape[0]} rows of an "
            f"fp8 cache, got {lengths.shape[0]} rows"
        )
    params = (None, None) if params is None else params
    pair = key.compressed[None], value.compressed[None]
    validate.phi_pair(params, *pair, cache.config, "params")
    return params


def check_queries(cache: PagedArrays, query, gates, scale) -> None:
    """Check the query `[N, H, D]`, and the gates, which are `[N, H, 3]` or `Branches` of `[N,
    H]`."""
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


def check_cache(cache, config: NSAConfig | None = None) -> None:
    """Check that `cache` is a paged cache, and that it has the configuration `config` if `config`
    is given.
    """
    if not isinstance(cache, PagedArrays):
        raise ValueError(f"cache must be a PagedCache, got {type(cache).__name__}")
    if config is not None and config != cache.config:
        raise ValueError(
            f"config must be equal to the config of the cache, {cache.config}, got {config}"
        )


def check_row_length(T: int, capacity: int) -> None:
    if T > capacity:
        raise ValueError(
            f"query must have at most {capacity} tokens per row, the capacity of its pages, got {T}"
        )
