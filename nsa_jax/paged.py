"""Decode and serving in JAX: a paged cache, and appending to it.

The counterpart in torch is `nsa_torch.paged`, which explains the terms. `append` returns the cache
and writes nothing in place. Donate the cache (`jax.jit(.., donate_argnums=..)`), so that XLA writes
into its memory. All sizes are static: one compilation serves growing lengths.
"""

from typing import Any, Self

import jax
import jax.numpy as jnp

from nsa_core import paged_append, paged_layout, rounding, validate, validate_paged
from nsa_core.cache_contents import UNSAID, Contents, Facts, facts_of
from nsa_core.compress_params import CompressParams
from nsa_core.config import NSAConfig
from nsa_core.paged_layout import ARRAYS, PAGES, PagedArrays
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
      num_pages: number of pages, with `config.select_block` tokens each.
      config: the sizes of the layer; they also determine the compressed tokens.
      dtype, compressed_dtype, max_rows: as in `nsa_torch.PagedCache`; fp8 is `jnp.float8_e4m3fn`.
      separate: whether each branch has its own keys and values (`Branches`), which triples the
        raw tokens.

    Raises:
      ValueError: a size that is not a positive int, or an unsupported dtype.
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
        return cls.of(static[0], *arrays, contents=static[1])

    def reset(self) -> Self:
        """The cache without facts about its tokens."""
        return self.holding(UNSAID)

    def holding(self, contents: Contents) -> Self:
        """The cache with these facts about its tokens."""
        return self.of(self.config, **self.tensors(), contents=contents)

    def replace(self, **arrays: jax.Array) -> Self:
        """The cache with other arrays in place of those named.

        Raises:
          ValueError: shapes or dtypes that do not fit.
        """
        fields = self.tensors() | arrays
        cache = self.of(self.config, **fields, contents=self.contents)
        validate_paged.pages(cache)
        return cache

    def copy_pages(self, source, target) -> Self:
        """The cache with copied whole pages, for example if a row forks within a page: int32 or
        int64 `[K]` each.

        Rows share earlier pages through their tables. A shorter length crops a row.
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

    A token without a page (after the end of the row's table, or with an entry below 0) is not
    written, and rows of length 0 write nothing. An entry beyond the pool is an error on a CPU
    unless it is traced; otherwise the token is not written. Two rows must not write to the same
    page.

    Args:
      key, value: `[N, Hkv, D]`, `[N, Hkv, Dv]`, the rows' new tokens one after the other, or
        `Branches` of them where the cache is `separate`.
      page_table: int32 `[B, M]`; entries that a row does not need may have any value.
      lengths: int32 `[B]`, including the new tokens; 0 means a row of padding.
      cu_seqlens_q: int32 `[B + 1]`, where each row's tokens begin; None means `N / B` each.
      params: compressors of keys and values (`nsa_core.compress_params`); None means averages.
      made_with: as in `cached_attention`.
      slots: as in `nsa_torch.append`, of a cache in fp8.

    Raises:
      ValueError: shapes or dtypes that do not fit the cache, or it was filled with parameters of
        another kind. If tracing hides that a row had tokens before, wrong outputs are NaN.
    """
    validate_paged.paged(cache)
    key, value = Branches.each(key), Branches.each(value)
    at = page_table, lengths, cu_seqlens_q
    params = validate_paged.new_tokens(
        checks.read, cache, key, value, *at, params, slots, cache.num_pages
    )
    facts = facts_of(params, made_with)

    def before():
        if cu_seqlens_q is None:
            return lengths - key.compressed.shape[0] // lengths.shape[0]
        return lengths - (cu_seqlens_q[1:] - cu_seqlens_q[:-1])

    contents, mixed = known_contents(cache.contents, facts, before)
    wrong = None if mixed is False else mixed
    return compiled(_append)(cache.holding(contents), key, value, *at, params, slots, wrong)


def _append(cache, *given) -> PagedCache:
    return cache.replace(**paged_append.append(OPS, apply_phi, cache, *given))
