"""Decoding in JAX. A call returns a new cache that includes the call's tokens, and does not
change the given cache. If the caller donates the given cache, the call reuses its memory, and the
given cache is invalid afterwards. `cached_attention` serves prompts, chunks and single tokens.

Each row is one page (`nsa_core.paged_layout`) with memory for all tokens of the row. The
capacity is fixed. A write beyond the capacity raises `ValueError` if the length is known. In traced
code, where the length is unknown, a write beyond the capacity makes the output NaN.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from nsa_core import paged_append, validate
from nsa_core.cache_contents import MEANS, UNSAID, Contents, Facts, facts_of, summary
from nsa_core.compress_params import CompressParams
from nsa_core.config import NSAConfig
from nsa_core.paged_layout import PAGES, PagedArrays, first_slot
from nsa_core.types import Branches
from nsa_jax import api
from nsa_jax.compression import apply_phi
from nsa_jax.eager import any_rank, compiled
from nsa_jax.jax_ops import JAX_OPS as OPS

# A cache has static fields in addition to its arrays. `jit` treats these fields as static, and no
# transform changes them.
jax.tree_util.register_static(NSAConfig)
jax.tree_util.register_static(Contents)


class NSACache(NamedTuple):
    """The keys and values of earlier tokens. A call returns a new cache that includes the call's
    tokens. The given cache is unchanged, or invalid if it is donated. `M` is the capacity in
    tokens. The fields of the sliding branch and of raw tokens are None if the selected branch has
    the same tokens.
    """

    selected_key: Float[Array, "B M Hkv D"]
    selected_value: Float[Array, "B M Hkv Dv"]
    sliding_key: Float[Array, "B M Hkv D"] | None
    sliding_value: Float[Array, "B M Hkv Dv"] | None
    # tokens from which compressed tokens are computed
    raw_key: Float[Array, "B M Hkv D"] | None
    raw_value: Float[Array, "B M Hkv Dv"] | None
    compressed_key: Float[Array, "B M/d Hkv D"]  # token `i` at `i + l/d - 1`
    compressed_value: Float[Array, "B M/d Hkv Dv"]
    length: Int[Array, " B"]  # tokens of each sequence so far
    config: NSAConfig  # the sizes from which compressed tokens are computed
    contents: Contents = UNSAID  # a record of how the tokens were computed
    # Only for layers with `key_taps`: projected keys of the newest tokens.
    newest_keys: Float[Array, "B taps-1 columns"] | None = None

    def __repr__(self) -> str:
        separate = self.sliding_key is not None
        return summary(self, "selected_key", "selected_value", self.length, separate=separate)

    @property
    def capacity(self) -> int:
        return self.selected_key.shape[1]

    def reset(self) -> Self:
        """Return an empty cache, without a record of how tokens were computed. The arrays of the
        cache are zeros: kernels multiply whole tiles, so memory after the last token must not be
        NaN.
        """
        return jax.tree.map(jnp.zeros_like, self)._replace(contents=UNSAID)


def init_cache(
    batch: int,
    capacity: int,
    kv_heads: int,
    key_width: int,
    value_width: int,
    *,
    config: NSAConfig,
    dtype=jnp.float32,
    separate: bool = False,
) -> NSACache:
    """Make an empty cache for `capacity` tokens. Each call on a cache returns a new `NSACache`
    with more tokens.

    Args:
      batch, capacity: number of rows, and maximum number of tokens per row.
      kv_heads, key_width, value_width: Hkv, D and Dv.
      config: the block sizes, which are the same for all calls on the cache.
      dtype: dtype of keys and values.
      separate: whether each branch has its own keys and values (`Branches`), which triples the
        memory for raw tokens.

    Returns:
      An `NSACache` whose arrays are filled with zeros.

    Raises:
      ValueError: A size is not a positive integer, `config` is not an `NSAConfig`, or
        `attention` does not support the dtype.
      NotImplementedError: `config` has a `compute_dtype`.
    """
    validate.configuration(config)
    validate.in_dtype_of_query(config, "a cache")
    validate.flag("separate", separate)
    validate.sizes(
        batch=batch,
        capacity=capacity,
        kv_heads=kv_heads,
        key_width=key_width,
        value_width=value_width,
    )
    validate.one_of("dtype", jnp.dtype(dtype).name, validate.FLOATS)

    def zeros(length, width):
        return jnp.zeros((batch, length, kv_heads, width), dtype)

    arrays: dict[str, Any] = {}
    for kind, width in (("key", key_width), ("value", value_width)):
        for name in ("selected", "sliding", "raw"):
            there = separate or name == "selected"
            arrays[f"{name}_{kind}"] = zeros(capacity, width) if there else None
        arrays[f"compressed_{kind}"] = zeros(-(-capacity // config.compress_stride), width)
    return NSACache(**arrays, length=jnp.zeros((batch,), jnp.int32), config=config)


@any_rank
def cached_attention(
    query,
    key,
    value,
    gates,
    cache: NSACache,
    *,
    config: NSAConfig | None = None,
    compress_params: tuple[CompressParams, CompressParams] = (None, None),
    made_with: Facts = (),
    scale: float | None = None,
    implementation: api.Names = None,
):
    """Append `T >= 1` tokens to a cache and compute their attention. Return `(out, new cache)`.

    The output of a token equals the output that `attention` over all tokens so far computes for
    this token. Tokens may be appended all at once, in chunks of any size, or one at a time. The
    given cache is unchanged. XLA copies the cache unless you donate it (`jax.jit(..,
    donate_argnames="cache")`). A donated cache is invalid afterwards.

    Args:
      query, key, value, gates: the new tokens, as in `attention`, with `S = T`.
      cache: a cache from `init_cache`. If `key` is a `Branches`, the cache must have been made
        with `separate=True`.
      config: `config=None` means the config of the cache. If you pass another config, it must
        have the same `compress_block` and `compress_stride`.
      compress_params: parameters of the compressors of keys and values
        (`nsa_core.compress_params`).
      made_with: names and values of other properties of the tokens, such as `("rope_base",
        1e4)`. If the cache has tokens with other values, or with another kind of
        `compress_params`, the call raises an error.
      scale, implementation: as in `attention`.

    Returns:
      `(out, cache)`, where `out` is `[B, T, H, Dv]` in the dtype of `query`, and `cache` is a new
      cache that includes the tokens.

    Raises:
      ValueError: Shapes do not fit, or the cache has another config, was filled with parameters
        of another kind, or has too little capacity.
      NotImplementedError: The named implementation cannot run this call, or `config` has a
        `compute_dtype`.
    """
    key, value = map(Branches.each, (key, value))
    gates = validate.gates(gates, query)
    config = validate.cached(query, key, value, cache, config, compress_params, scale)
    facts = facts_of(compress_params, made_with)
    contents, mixed = known_contents(cache.contents, facts, lambda: cache.length)
    longest = query.shape[1]
    if not isinstance(cache.length, jax.core.Tracer):
        longest += int(np.max(np.asarray(cache.length)))  # this check also runs inside of jit
    if longest > cache.capacity:
        raise ValueError(f"cache must have capacity for {longest} tokens, got {cache.capacity}")
    before = cache._replace(contents=contents)
    cache = compiled(update)(before, key, value, compress_params)
    sliding = cache.sliding_key, cache.sliding_value
    if cache.sliding_key is None:
        sliding = cache.selected_key, cache.selected_value
    first = first_slot(config)
    out = api.attend(
        query,
        Branches(None, cache.selected_key, sliding[0]),
        Branches(None, cache.selected_value, sliding[1]),
        gates,
        (cache.compressed_key[:, first:], cache.compressed_value[:, first:]),
        config=config,
        kv_len=cache.length,
        scale=scale,
        implementation=implementation,
    )
    wrong = (cache.length > cache.capacity) | mixed
    return compiled(_unless)(wrong, out), cache


def _unless(wrong, out):
    """Return `out` with NaN in the rows for which `wrong` is true. `_unless` is one compiled
    program, so that `jax_debug_nans` checks only its result.
    """
    return jnp.where(wrong[:, None, None, None], jnp.asarray(jnp.nan, out.dtype), out)


def known_contents(contents: Contents, facts: Facts, tokens_before: Callable[[], jax.Array]):
    """Return the `Contents` of a cache after a write with `facts`. Also return a mask `[B]` of
    the rows that become invalid, or False if no row does.

    If compressed tokens are means and there are no other facts, empty contents stay empty. With
    empty contents, the pytree structure of the cache is unchanged, so the carry of a `scan` may
    begin with an empty cache.

    Raises:
      ValueError: One of the `facts` contradicts the contents of the cache.
    """
    if contents or facts == MEANS.said:
        return contents and contents.with_facts(facts), False
    found = contents.with_facts(facts)
    if set(MEANS.said) <= set(facts):
        return found, False
    before = tokens_before()
    if isinstance(before, jax.core.Tracer):
        return found, before > 0
    if np.any(np.asarray(before) > 0):
        MEANS.with_facts(facts)
    return found, False


def update(cache: NSACache, key: Branches, value: Branches, compress_params) -> NSACache:
    """Return the cache with the new tokens. `key` and `value` have `[B, T, Hkv, .]` per
    branch."""
    lengths = cache.length + key.selected.shape[1]
    given = ((name, getattr(cache, name, None)) for name in PAGES)

    def row(arrays, key, value, length):
        page = PagedArrays(cache.config, **{name: x[None] for name, x in arrays.items()})
        at = jnp.zeros((1, 1), jnp.int32), length[None]
        found = paged_append.append(
            OPS, apply_phi, page, key, value, *at, params=compress_params
        )
        return {name: x[0] for name, x in found.items()}

    # The rows are written one by one, so that they may be on several devices.
    arrays = {name: x for name, x in given if x is not None}
    found = jax.vmap(row)(arrays, key, value, lengths)
    return cache._replace(**found, length=lengths)
