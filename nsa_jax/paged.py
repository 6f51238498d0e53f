"""Decode and serving in JAX: a paged cache, and appending to it.

The twin of `nsa_torch.paged`, where the words are explained. Nothing is written in place:
`append` returns the cache; donate it (`jax.jit(.., donate_argnums=..)`), so that XLA writes into
its memory. All sizes are static: one compilation serves growing lengths.
"""

from typing import Any, Self

import jax
import jax.numpy as jnp

from nsa_core import paged_layout, rounding, validate, validate_paged
from nsa_core.cache_contents import UNSAID, Contents, Facts, facts_of
from nsa_core.compress_params import CompressParams
from nsa_core.config import NSAConfig
from nsa_core.paged_layout import ARRAYS, PAGES, PagedArrays, Places, slots_of
from nsa_core.types import Branches
from nsa_jax import checks
from nsa_jax.cache import known_contents
from nsa_jax.compression import apply_phi
from nsa_jax.eager import any_rank, compiled
from nsa_jax.jax_ops import JAX_OPS as OPS
from nsa_jax.numerics import put

MAX_ROWS = 64


@jax.tree_util.register_pytree_node_class
class PagedCache(PagedArrays):
    """Pages for the tokens of one layer (`PagedArrays` lists its arrays), zeros at first.

    Args:
      num_pages: of `config.select_block` tokens each.
      config: of the layer; also says how compressed tokens are made.
      dtype, compressed_dtype, max_rows: as of `nsa_torch.PagedCache`; `jnp.float8_e4m3fn`: in fp8.
      separate: whether each branch has keys and values of its own (`Branches`): three times the
        raw tokens.

    Raises:
      ValueError: a size that is not a positive int, a dtype that there is no cache of.
    """

    def __init__(
        self,
        num_pages: int,
        kv_heads: int,
        key_width: int,
        value_width: int,
        *,
        config: NSAConfig = NSAConfig(),
        dtype: Any = jnp.bfloat16,
        separate: bool = False,
        compressed_dtype: Any = None,
        max_rows: int = MAX_ROWS,
    ):
        is_fp8 = jnp.dtype(dtype).name == rounding.DTYPE
        compressed_dtype = compressed_dtype or (jnp.bfloat16 if is_fp8 else dtype)
        validate_paged.dtypes(*(jnp.dtype(x).name for x in (dtype, compressed_dtype)))
        validate.sizes(max_rows=max_rows)

        def zeros(name, shape):
            one = paged_layout.dtype_of(name, dtype, compressed_dtype, jnp.float32)
            return jnp.zeros(shape, one)

        sizes = num_pages, kv_heads, key_width, value_width, config, separate
        super().__init__(config, **paged_layout.allocate(zeros, *sizes, max_rows * is_fp8))

    def tree_flatten(self):
        return [getattr(self, name) for name in ARRAYS], (self.config, self.contents)

    @classmethod
    def tree_unflatten(cls, static, arrays) -> Self:
        cache, (config, contents) = cls.__new__(cls), static
        PagedArrays.__init__(cache, config, *arrays, contents=contents)
        return cache

    def reset(self) -> Self:
        """The cache that knows nothing of what its tokens were made with."""
        return self.holding(UNSAID)

    def holding(self, contents: Contents) -> Self:
        """The cache that says this of what its tokens were made with."""
        return self.tree_unflatten((self.config, contents), self.tree_flatten()[0])

    def replace(self, **arrays: jax.Array) -> Self:
        """The cache with other arrays in place of those named.

        Raises:
          ValueError: shapes or dtypes that do not fit.
        """
        cache = self.__class__.__new__(self.__class__)
        fields = {name: getattr(self, name) for name in ARRAYS} | arrays
        PagedArrays.__init__(cache, self.config, **fields, contents=self.contents)
        validate_paged.pages(cache)
        return cache

    def copy_pages(self, source, target) -> Self:
        """The cache with whole pages copied, as where a row forks within one: int32 or int64
        `[K]` each.

        Rows share the pages before it by their tables alone. A shorter length crops a row.
        """
        return self._copied(PAGES, source, target)

    def copy_recent(self, source, target) -> Self:
        """The cache with the newest tokens of whole rows copied, as `nsa_torch.PagedCache` does."""
        return self._copied(("recent_key", "recent_value"), source, target)

    def _copied(self, names, source, target) -> Self:
        validate_paged.copied(source, target)
        given = ((name, getattr(self, name)) for name in names)
        kept = {name: jnp.asarray(x) for name, x in given if x is not None}
        for x in kept.values():
            for name, index in (("source", source), ("target", target)):
                checks.within(name, index, 0, x.shape[0] - 1)
        return self.replace(
            **{k: put(x, jnp.asarray(target), x[jnp.asarray(source)]) for k, x in kept.items()}
        )

    def read(self, name: str, at):
        """What pages hold `at` `(page, offset)`, or `(page,)`: of one array, in its dtype."""
        pages, scale = getattr(self, name), getattr(self, f"{name}_scale", None)
        if scale is None:
            return pages[at]
        return rounding.restored(OPS, pages[at], scale.swapaxes(1, 2)[at], self.dtype)

    def written(self, name: str, at: Places, new) -> dict[str, jax.Array]:
        """What changes where tokens are put in one of its arrays of pages."""
        pages, scale = getattr(self, name), getattr(self, f"{name}_scale", None)
        if scale is None:
            return {name: _write(pages, at, new)}
        codes, new_scale = rounding.rounded(OPS, new)
        scale = _write(scale.swapaxes(1, 2), at, new_scale).swapaxes(1, 2)
        return {name: _write(pages, at, codes), f"{name}_scale": scale}


@any_rank
def append(
    cache: PagedCache,
    key,
    value,
    page_table,
    lengths,
    *,
    cu_seqlens_q=None,
    params: tuple[CompressParams, CompressParams] | None = None,
    made_with: Facts = (),
    slots=None,
) -> PagedCache:
    """The cache with new tokens in their pages, and the compressed tokens which they finish.

    A token without a page (behind the row's table, or by an entry below 0) is not written; rows of
    length 0 write nothing. Nor is it by an entry beyond the pool, an error where it is not traced
    and on a CPU. Two rows must not write to the same page.

    Args:
      key, value: `[N, Hkv, D]`, `[N, Hkv, Dv]`, the rows' new tokens one after the other, or
        `Branches` of them where the cache is `separate`.
      page_table: int32 `[B, M]`; what a row does not need may be anything.
      lengths: int32 `[B]`, with the new tokens; 0: a row of padding.
      cu_seqlens_q: int32 `[B + 1]`, where each row's tokens begin; None: `N / B` each.
      params: of the compression, for keys and values (`nsa_core.compress_params`); None: means.
      made_with: as in `cached_attention`.
      slots: as of `nsa_torch.append`, of a cache in fp8.

    Raises:
      ValueError: shapes or dtypes that do not fit the cache, or it was filled with parameters of
        another kind. Where tracing hides that a row had tokens before, what is wrong is NaN.
    """
    validate_paged.paged(cache)
    key, value = Branches.each(key), Branches.each(value)
    validate_paged.table(page_table, lengths)
    count = validate_paged.new_tokens(cache, key, value, lengths, cu_seqlens_q)
    validate_paged.slots(cache, slots, lengths)
    params = (None, None) if params is None else params
    validate.phi_pair(
        params, key.compressed[None], value.compressed[None], cache.config, "params"
    )
    size = cache.config.select_block
    checks.page_numbers(page_table, lengths, cache.num_pages, size, read=False)
    checks.rows_of_tokens(lengths, cu_seqlens_q, count)
    checks.written_once(page_table, lengths, cu_seqlens_q, count, size)
    facts = facts_of(params, made_with)

    def before():
        if cu_seqlens_q is None:
            return lengths - count // lengths.shape[0]
        return lengths - (cu_seqlens_q[1:] - cu_seqlens_q[:-1])

    contents, mixed = known_contents(cache.contents, facts, before)
    return compiled(_append)(
        cache.holding(contents),
        key,
        value,
        page_table,
        lengths,
        cu_seqlens_q,
        params,
        count,
        mixed,
        slots,
    )


def _append(cache, key, value, page_table, lengths, cu_seqlens_q, params, count, mixed, slots):
    config, pool = cache.config, cache.num_pages
    tokens = paged_layout.tokens_of(OPS, lengths, cu_seqlens_q, count)
    at = paged_layout.places(page_table, *tokens, config.select_block, pool)
    branches = {"selected": (key.selected, value.selected)}
    if cache.separate:
        branches["sliding"] = key.sliding, value.sliding
        branches["raw"] = key.compressed, value.compressed
    changed = {}
    for branch, pair in branches.items():
        for kind, new in zip(("key", "value"), pair, strict=True):
            changed |= cache.written(f"{branch}_{kind}", at, new)
    cache = cache.replace(**changed)

    last = paged_layout.finished(OPS, tokens, lengths.shape[0], config)
    row, position = (x[last.token] for x in tokens)
    back = OPS.arange(row, config.compress_block)
    window = position[:, None] - (config.compress_block - 1) + back  # [K, l]
    taken = paged_layout.places(page_table, row[:, None], window, config.select_block, pool)
    slot = position // config.compress_stride
    into = paged_layout.places(page_table, row, slot, slots_of(config), pool)
    into = into._replace(there=into.there & last.there)
    changed = {}
    for kind, raw, one in zip(("key", "value"), cache.raw, params, strict=True):
        of_call = (key if kind == "key" else value).compressed
        if cache.is_fp8:
            at_call = last.token, row, cu_seqlens_q, slots
            windows = _windows(cache, kind, of_call, *at_call, window, taken, lengths)
        else:
            windows = raw[taken.page, taken.offset]  # [K, l, Hkv, .]
        new = apply_phi(windows[None], one, window[None, :, 0])[0]
        if mixed is not False:
            new = jnp.where(mixed[row][:, None, None], jnp.asarray(jnp.nan, new.dtype), new)
        changed |= cache.written(f"compressed_{kind}", into, new)
        if cache.is_fp8:
            changed |= _kept(cache, kind, of_call, tokens, at, lengths, slots)
    return cache.replace(**changed)


def _windows(cache, kind, new, last, row, cu_seqlens_q, slots, window, taken, lengths):
    """Tokens at the positions `window` `[K, l]` of rows `[K]`, which end with the tokens `last` of
    the call: of the call, else of the ring where they round to what the pages have, else of these.
    """
    count, length = window.shape[1], getattr(cache, f"recent_{kind}").shape[1]
    token = last[:, None] + jnp.arange(count, dtype=jnp.int32) - (count - 1)
    if cu_seqlens_q is None:
        begin = row * (new.shape[0] // lengths.shape[0])
    else:
        begin = cu_seqlens_q[row]
    slot = (row if slots is None else slots[row]).clip(0, cache.recent_key.shape[0] - 1)
    kept = getattr(cache, f"recent_{kind}")[slot[:, None], window % length]
    name = f"{'raw' if cache.separate else 'selected'}_{kind}"
    stored = cache.read(name, (taken.page, taken.offset))
    scale = getattr(cache, f"{name}_scale").swapaxes(1, 2)[taken.page, taken.offset]
    known = rounding.is_of(OPS, kept, stored, scale)[..., None]
    found = jnp.where(known, kept, stored)
    of_call = (token >= begin[:, None])[..., None, None]
    return jnp.where(of_call, new[token.clip(0)], found)


def _kept(cache, kind, new, tokens, at, lengths, slots) -> dict[str, jax.Array]:
    """The ring with the tokens of the call."""
    ring = getattr(cache, f"recent_{kind}")
    rows, length = ring.shape[:2]
    slot = tokens.row if slots is None else slots[tokens.row]
    newest = tokens.position >= lengths[tokens.row] - length
    there = at.there & newest & (slot >= 0) & (slot < rows)
    into = Places(slot, tokens.position.clip(0) % length, there)
    return {f"recent_{kind}": _write(ring, into, new)}


def _write(pages, at: Places, new):
    page = jnp.where(at.there, at.page, pages.shape[0])
    return put(pages, (page, at.offset), new)
