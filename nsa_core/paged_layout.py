"""The positions of tokens in a paged cache, for both frameworks.

A page holds `l'` raw tokens and `l'/d` compressed ones. `page_table[b]` lists the pages of row `b`
in the order of its tokens:

    raw token p         page_table[b, p // l'], offset p % l'
    compressed token i  slot s = i + l/d - 1:  page_table[b, s // (l'/d)], offset s % (l'/d)

Slot `s` of a compressed token is `p // d` of its LAST raw token p, which is in the same page.
No page depends on the next one, so that rows can share their first pages.

A cache in fp8 stores float8_e4m3fn, except for the compressed keys, which determine the selection,
and a float32 scale for each token and head (`nsa_core.rounding`). Compressed tokens are computed
from tokens before rounding. Therefore the newest tokens of a row are also stored in a ring:

    raw token p         recent[slot of the row, p % (2 l)]

A ring may contain anything, including tokens of another row. A token of the ring is used if the
page's token may be its rounded value (`rounding.is_of`). Otherwise the page's token is used.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self

from nsa_core import validate
from nsa_core.array_ops import ArrayOps
from nsa_core.cache_contents import UNSAID, Contents, summary
from nsa_core.config import NSAConfig
from nsa_core.types import Branches


@dataclasses.dataclass(repr=False)
class PagedArrays:
    """The `P` pages of one layer. The caller allocates pages to rows.

    Attributes:
      config: its `select_block` is the page's size.
      selected_key, selected_value: `[P, l', Hkv, D]`, `[P, l', Hkv, Dv]`.
      compressed_key, compressed_value: `[P, l'/d, Hkv, D]`, `[P, l'/d, Hkv, Dv]`.
      sliding_key, sliding_value: The same as the selected ones. None means that the sliding branch
        reads those.
      raw_key, raw_value: The source of compressed tokens. None means the selected ones.
      contents: How the tokens were made.
      selected_key_scale, ..: Scales of a cache in fp8, float32 `[P, Hkv, l']` or `[P, Hkv, l'/d]`.
      recent_key, recent_value: Rings of a cache in fp8, `[R, 2 l, Hkv, D]`, `[R, 2 l, Hkv, Dv]`:
        the newest tokens of `R` rows, from which compressed tokens are computed, in the dtype of
        the compressed keys.
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
        """A cache of these arrays."""
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
        """Whether each branch has keys and values of its own."""
        return self.sliding_key is not None

    @property
    def sliding(self) -> tuple[Any, Any]:
        """Keys and values of the sliding branch."""
        if self.separate:
            return self.sliding_key, self.sliding_value
        return self.selected_key, self.selected_value

    @property
    def raw(self) -> tuple[Any, Any]:
        """Keys and values that compressed tokens are computed from."""
        if self.raw_key is not None:
            return self.raw_key, self.raw_value
        return self.selected_key, self.selected_value

    @property
    def is_fp8(self) -> bool:
        """Whether tokens are rounded to 8 bits."""
        return self.recent_key is not None

    @property
    def dtype(self) -> Any:
        """The dtype of the tokens and queries of a call."""
        return self.compressed_key.dtype

    def tensors(self) -> dict[str, Any]:
        """The existing arrays by name."""
        return {name: x for name in ARRAYS if (x := getattr(self, name)) is not None}

    def sources(self, kind: str) -> Branches:
        """The name of the array that each branch reads of `kind`, `key` or `value`."""
        sliding = "sliding" if self.separate else "selected"
        return Branches(f"compressed_{kind}", f"selected_{kind}", f"{sliding}_{kind}")


ARRAYS = tuple(field.name for field in dataclasses.fields(PagedArrays))[1:-1]
PAGES = tuple(name for name in ARRAYS if not name.startswith("recent"))


def slots_of(config: NSAConfig) -> int:
    """Compressed tokens of a page."""
    return config.select_block // config.compress_stride


def first_slot(config: NSAConfig) -> int:
    """The slot of compressed token 0."""
    return config.compress_block // config.compress_stride - 1


class Entries(NamedTuple):
    """The entries of a row in its pages. Entry `i` covers the tokens
    `i stride .. i stride + block - 1` and has index `first + i` in the row's pages, each of which
    has `per_page` entries.
    """

    per_page: int
    first: int
    block: int
    stride: int

    def count(self, pages: int) -> int:
        """The number of entries of a row with `pages` pages."""
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
    """The shape of each of `ARRAYS`, or None for an array that the cache lacks. `fp8_rows` is the
    number of rows of a cache in fp8.

    Raises:
      ValueError: a size that is not a positive int, no configuration, no bool.
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
    """The dtype of one of `ARRAYS`: that of compressed keys, of scales, or of other pages."""
    if name.endswith("_scale"):
        return scale
    return compressed if name == "compressed_key" or name.startswith("recent") else dtype


def page_elements(
    kv_heads: int, key_width: int, value_width: int, config: NSAConfig, separate: bool
) -> int:
    """Elements of a page, in all `ARRAYS` together."""
    found = shapes(1, kv_heads, key_width, value_width, config, separate)
    return sum(math.prod(shape) for shape in found.values() if shape is not None)


def allocate(
    zeros: Callable[[str, tuple[int, ...]], Any],
    num_pages: int,
    kv_heads: int,
    key_width: int,
    value_width: int,
    config: NSAConfig,
    separate: bool,
    fp8_rows: int = 0,
) -> dict[str, Any]:
    """Each of `ARRAYS`, made by `zeros` of its name and shape, or None. Raises as `shapes`."""
    found = shapes(num_pages, kv_heads, key_width, value_width, config, separate, fp8_rows)
    return {name: None if x is None else zeros(name, x) for name, x in found.items()}


class Tokens(NamedTuple):
    """The tokens of a call. `row` int `[N]` is their sequence, `position` int `[N]` their position
    in it. A negative position marks padding, which is in no sequence.
    """

    row: Any
    position: Any


def tokens_of(ops: ArrayOps, lengths, cu_seqlens_q, count: int) -> Tokens:
    """`count` tokens, each row's the last of the `lengths` `[B]` that it has.

    Args:
      cu_seqlens_q: int32 `[B + 1]`, the first token of each row. By default all rows have the same
        number of tokens.
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
    """Entries of pages: `page`, `offset`, both within bounds, and whether they are `there`."""

    page: Any
    offset: Any
    there: Any


def places(page_table, row, index, per_page: int, num_pages: int) -> Places:
    """The positions of the entries `index` of the sequences `row`; a page has `per_page` entries.

    Entries beyond the table, or in a page that does not exist, are invalid.
    """
    column = index // per_page
    inside = (index >= 0) & (column < page_table.shape[1])
    page = page_table[row, column.clip(0, page_table.shape[1] - 1)]
    there = inside & (page >= 0) & (page < num_pages)
    return Places(page.clip(0, num_pages - 1), index % per_page, there)


class Finished(NamedTuple):
    """Tokens that finish a compressed token: `token` `[K]` of the call, those that are `there`."""

    token: Any
    there: Any


def finished(ops: ArrayOps, tokens: Tokens, batch: int, config: NSAConfig) -> Finished:
    """The tokens at `i d + l - 1` in order. The result has the largest possible number of them."""
    block, stride = config.compress_block, config.compress_stride
    position, (count,) = tokens.position, tokens.position.shape
    last = (position >= block - 1) & ((position + 1 - block) % stride == 0)
    before = ops.xp.cumsum(ops.to_int32(last), 0)
    most = count // stride + min(batch, count)
    index = ops.arange(position, most) + 1
    token = ops.searchsorted(before[None], index, "left")[0]
    return Finished(token.clip(0, count - 1), token < count)


class PaddedQueries(NamedTuple):
    """Rows of queries side by side, each row's own at the end.

    `token` `[B, T]`: which token of the call, within bounds; `there`: whether it is the row's;
    `flat` `[N]`: the index of each token of the call in `[B * T]`.
    """

    token: Any
    there: Any
    flat: Any


def pad_queries(ops: ArrayOps, tokens: Tokens, lengths, cu_seqlens_q, T: int) -> PaddedQueries:
    """The tokens in rows of `T`."""
    batch, (count,) = lengths.shape[0], tokens.row.shape
    from_end = ops.arange(lengths, T) - T  # [1, T], negative
    if cu_seqlens_q is None:
        each = count // batch
        end = (ops.arange(lengths, batch)[0] + 1) * each
        begin = end - each
    else:
        begin, end = cu_seqlens_q[:-1], cu_seqlens_q[1:]
    token = end[:, None] + from_end
    there = token >= begin[:, None]
    index = ops.arange(lengths, count)[0]
    column = (T + index - end[tokens.row]).clip(0, T - 1)
    return PaddedQueries(token.clip(0, count - 1), there, tokens.row * T + column)
