"""Decoding: a call returns a new cache with its tokens; the one that it is given is unchanged.

A cache that is donated is gone, and its memory is the new one's. One function does prefill, chunks
and tokens.

The cache keeps the keys and values of the selected and the sliding branch whole, of the
compressed branch the compressed tokens and the last `l - 1` raw ones, from which the next
compressed token is made. Nothing grows: a write past the capacity raises `ValueError` where
the length is known, and turns the output to NaN where it is traced.
"""

from collections.abc import Callable
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from nsa_core import validate
from nsa_core.cache_contents import MEANS, UNSAID, Contents, Facts, facts_of, summary
from nsa_core.compress_params import CompressParams
from nsa_core.config import NSAConfig
from nsa_core.types import Branches
from nsa_jax import api
from nsa_jax.compression import apply_phi
from nsa_jax.eager import any_rank, compiled
from nsa_jax.numerics import put

# A cache holds what is no array beside its arrays: `jit` knows it, no transform touches it.
jax.tree_util.register_static(NSAConfig)
jax.tree_util.register_static(Contents)


class NSACache(NamedTuple):
    """Keys and values. A call returns a new cache with its tokens; the one that it is given is
    unchanged, or gone where it is donated.

    `M`: capacity in tokens. Sliding fields are None where it reads the selected ones.
    """

    selected_key: Float[Array, "B M Hkv D"]
    selected_value: Float[Array, "B M Hkv Dv"]
    sliding_key: Float[Array, "B M Hkv D"] | None
    sliding_value: Float[Array, "B M Hkv Dv"] | None
    compressed_key: Float[Array, "B C Hkv D"]
    compressed_value: Float[Array, "B C Hkv Dv"]
    recent_key: Float[Array, "B l-1 Hkv D"]
    recent_value: Float[Array, "B l-1 Hkv Dv"]
    length: Int[Array, " B"]  # tokens seen by each sequence
    config: NSAConfig  # what compressed tokens are made with
    contents: Contents = UNSAID  # what its tokens were made with

    def __repr__(self) -> str:
        separate = self.sliding_key is not None
        return summary(self, "selected_key", "selected_value", self.length, separate=separate)

    @property
    def capacity(self) -> int:
        return self.selected_key.shape[1]

    def reset(self) -> Self:
        """The cache without tokens, which knows nothing of what they were made with: zeros, since
        kernels multiply a tile whole, and behind the last token nothing may be NaN.
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
    """An empty cache for `capacity` tokens; a call returns another with tokens (`NSACache`).

    Args:
      batch, capacity: rows, and tokens of a row at most.
      kv_heads, key_width, value_width: Hkv, D and Dv.
      config: of all calls on the cache.
      dtype: of its keys and values.
      separate: whether the sliding branch has keys and values of its own (`Branches`).

    Returns:
      An `NSACache` of arrays that are 0.

    Raises:
      ValueError: a size that is no positive integer, no configuration, or no floating dtype of
        `attention`.
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

    count, recent = config.num_compressed(capacity), config.compress_block - 1
    return NSACache(
        zeros(capacity, key_width),
        zeros(capacity, value_width),
        zeros(capacity, key_width) if separate else None,
        zeros(capacity, value_width) if separate else None,
        zeros(count, key_width),
        zeros(count, value_width),
        zeros(recent, key_width),
        zeros(recent, value_width),
        jnp.zeros((batch,), jnp.int32),
        config,
    )


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
    """Attends from `T >= 1` tokens behind those of a cache: `(out, cache with them)`.

    The same numbers as `attention` over all tokens so far, in one piece, in chunks of any
    size or token by token. The cache that is given is unchanged. Donate it
    (`jax.jit(.., donate_argnames="cache")`), or XLA copies it whole; it is then gone.

    Args:
      query, key, value, gates: of the new tokens, as in `attention`, with `S = T`.
      cache: from `init_cache`; `Branches` of keys need `separate=True` there.
      config: None: the cache's. Another must have its `compress_block` and `compress_stride`.
      compress_params: of the keys and of the values (`nsa_core.compress_params`).
      made_with: names and values of what else changes the tokens, such as `("rope_base", 1e4)`:
        a cache refuses the tokens of who says otherwise, as it does other kinds of parameters.
      scale, implementation: as of `attention`.

    Returns:
      `(out, cache)`: `[B, T, H, Dv]` in the dtype of `query`, and the cache with the tokens.

    Raises:
      ValueError: bad shapes, a cache of another config or filled with parameters of another
        kind, or more tokens than the capacity.
      NotImplementedError: the named implementation cannot run this.
    """
    key, value = Branches.each(key), Branches.each(value)
    gates = validate.gates(gates, query)
    config = validate.cache_config(cache, config)
    validate.cached(query, key, value, cache, config, compress_params, scale)
    facts = facts_of(compress_params, made_with)
    contents, mixed = known_contents(cache.contents, facts, lambda: cache.length)
    longest = query.shape[1]
    if not isinstance(cache.length, jax.core.Tracer):
        longest += int(np.max(np.asarray(cache.length)))  # inside of jit too
    if longest > cache.capacity:
        raise ValueError(f"cache capacity is {cache.capacity} tokens, got {longest}")
    before = cache._replace(contents=contents)
    cache = compiled(update)(before, key, value, config, compress_params)
    shared = cache.sliding_key is None
    keys = Branches(
        None, cache.selected_key, cache.selected_key if shared else cache.sliding_key
    )
    values = Branches(
        None, cache.selected_value, cache.selected_value if shared else cache.sliding_value
    )
    out = api.attend(
        query,
        keys,
        values,
        gates,
        (cache.compressed_key, cache.compressed_value),
        config=config,
        block_indices=None,
        kv_len=cache.length,
        segment_ids=None,
        scale=scale,
        implementation=implementation,
    )
    wrong = (cache.length > cache.capacity) | mixed
    return compiled(_unless)(wrong, out), cache


def _unless(wrong, out):
    """`out` with NaN in the rows that are `wrong`; within a program, so that `jax_debug_nans` asks
    for the result alone.
    """
    return jnp.where(wrong[:, None, None, None], jnp.asarray(jnp.nan, out.dtype), out)


def known_contents(contents: Contents, facts: Facts, tokens_before: Callable[[], jax.Array]):
    """What a cache holds once a writer has said `facts`, and which rows `[B]` that makes wrong.

    Who compresses by means and says no more leaves it open, so that the first step changes no
    structure: the carry of a `scan` may begin empty. Until another writer comes these are means.
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


def update(cache, key, value, config, compress_params) -> NSACache:
    """The cache with the new tokens in it, `[B, T, Hkv, .]` in each branch."""
    start, num_new = cache.length, key.selected.shape[1]
    shared = cache.sliding_key is None

    def append(buffer, new):
        place = jnp.minimum(start, buffer.shape[1] - num_new)
        write = jax.vmap(lambda b, n, at: lax.dynamic_update_slice_in_dim(b, n, at, 0))
        return write(buffer, new, place)

    compressed_key, recent_key = _emit(
        cache.compressed_key,
        cache.recent_key,
        key.compressed,
        start,
        config,
        compress_params[0],
    )
    compressed_value, recent_value = _emit(
        cache.compressed_value,
        cache.recent_value,
        value.compressed,
        start,
        config,
        compress_params[1],
    )
    return NSACache(
        append(cache.selected_key, key.selected),
        append(cache.selected_value, value.selected),
        None if shared else append(cache.sliding_key, key.sliding),
        None if shared else append(cache.sliding_value, value.sliding),
        compressed_key,
        compressed_value,
        recent_key,
        recent_value,
        start + num_new,
        cache.config,
        cache.contents,
    )


def _emit(buffer, recent, new, start, config, params):
    """Writes the compressed tokens whose last raw token is among `new`."""
    block, stride = config.compress_block, config.compress_stride
    num_new, count = new.shape[1], buffer.shape[1]
    raw = jnp.concatenate([recent, new], axis=1)
    if count:
        # Token i ends at i*d + l - 1; the first to end at or after `start`, and its followers.
        first = jnp.maximum(-(-(start - block + 1) // stride), 0)
        most = -(-num_new // stride)
        index = first[:, None] + jnp.arange(most, dtype=jnp.int32)
        begin = index * stride - start[:, None] + block - 1
        cut = jax.vmap(
            jax.vmap(lambda x, at: lax.dynamic_slice_in_dim(x, at, block), (None, 0))
        )
        tokens = apply_phi(cut(raw, begin), params, index * stride)
        complete = index * stride + block <= start[:, None] + num_new
        slot = jnp.where(complete, index, count)
        buffer = jax.vmap(put)(buffer, slot, tokens)
    return buffer, raw[:, num_new:]
