"""Computes the three branches in plain XLA (implementation `xla`), on any device and with
bounded memory.

Queries are processed in chunks. The selected branch gathers only the blocks of one chunk of
queries. The sliding branch slices the keys to which a chunk of queries can attend. Each branch
returns the output `[B, T, H, Dv]` and the natural log-sum-exp `[B, T, H]`.

The selection of blocks (arXiv 2502.11089 v2, Eqs. 8-12) is computed in float32 and has no
gradient. On a CPU, scores that are too small for float32 are compared by their logarithms. The
logarithms are computed only if scores that are too small affect the selection.
"""

import functools

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Int

from nsa_core import selection
from nsa_core.array_ops import masked
from nsa_core.steps import key_bounds
from nsa_jax import geometry
from nsa_jax.chunks import BUDGET_BYTES, over_queries
from nsa_jax.jax_ops import JAX_OPS as OPS
from nsa_jax.numerics import grouped, logits_of, softmax, weighted, wide

SHARED = "bqkgd,bskd->bkgqs"  # the subscripts of logits for keys that all queries share


def _rows(out, lse, query):
    """Merge the axes of groups and heads, so that the arrays have their public shapes."""
    out = rearrange(out, "b q k g d -> b q (k g) d").astype(query.dtype)
    return out, rearrange(lse, "b k g q -> b q (k g)")


def _attend(query, key, value, seen, scale):
    """Compute attention over keys that all queries of the chunk share. `seen` [B, Q, K] is the
    mask."""
    key, value = key.astype(query.dtype), value.astype(query.dtype)
    # Zero times NaN is NaN, so that values of a query without keys must not enter a sum.
    some = seen.any(axis=-1)[..., None, None]
    query = jnp.where(some, query, 0)
    logits = logits_of(SHARED, grouped(query, key), key, scale)
    probs, lse = softmax(logits, seen[:, None, None])
    out = weighted("bkgqs,bskd->bqkgd", probs, value)
    return _rows(jnp.where(some[..., None], out, 0), lse, query)


def compressed_attention(
    query,
    compressed_key,
    compressed_value,
    *,
    config,
    kv_len=None,
    segment_ids=None,
    scale=None,
):
    """Compute attention over compressed tokens. A query at position `p` attends to compressed
    token `i` if and only if `p >= i*d + l - 1`.
    """
    batch, length, heads, _ = query.shape
    count = compressed_key.shape[1]
    where = geometry.layout_of(query, length, config, kv_len, segment_ids)

    def chunk(query, position, start, key, value):
        slot = jnp.arange(count, dtype=jnp.int32)
        seen = key_bounds.sees_compressed(slot, position, start, config)
        return _attend(query, key, value, seen, scale)

    arrays = (query, where.position, where.compressed_start)
    shared = (compressed_key, compressed_value)
    if where.padded:  # slots after the last token may be NaN
        place = where.position, where.compressed_start
        _, end = key_bounds.visible_compressed(*place, config)
        there = jnp.arange(count, dtype=jnp.int32) < end.max(axis=1, keepdims=True)
        shared = masked(jnp, there, *shared)
    return over_queries(chunk, arrays, shared, batch * heads * max(count, 1) * 4)


def selected_attention(
    query,
    key,
    value,
    block_indices,
    *,
    config,
    kv_len=None,
    segment_ids=None,
    scale=None,
):
    """Compute attention of each query to the keys of its selected blocks, up to its own position.
    One softmax covers all these keys.
    """
    batch, _, _, width = query.shape
    num_keys, kv_heads = key.shape[1:3]
    size = config.select_block
    where = geometry.layout_of(query, num_keys, config, kv_len, segment_ids)
    if num_keys < size:  # a slice must not be longer than the array
        key, value = (
            jnp.pad(x, ((0, 0), (0, size - num_keys), (0, 0), (0, 0))) for x in (key, value)
        )
        num_keys = size

    def block_of(row, start):  # row [S, D], start []: [l', D]
        return lax.dynamic_slice(row, (start, jnp.int32(0)), (size, row.shape[1]))

    per_query = jax.vmap(jax.vmap(block_of, (None, 0)), (None, 0))  # [Q, n] starts
    per_head = jax.vmap(per_query, (1, 1), 1)  # [S, Hkv, D], [Q, Hkv, n]
    gather = jax.vmap(per_head)  # [B, Q, Hkv, n, l', D]

    def chunk(query, indices, position, start, key, value):
        # The index of the first token may overflow for a block after the keys.
        indices = jnp.where(indices < config.num_blocks(num_keys), indices, -1)
        first = start[..., None, None] + indices * size
        slice_at = jnp.clip(first, 0, num_keys - size)
        token = slice_at[..., None] + jnp.arange(size, dtype=jnp.int32)
        last = jnp.minimum(first + size - 1, (start + position)[..., None, None])
        seen = (token >= first[..., None]) & (token <= last[..., None])
        seen &= (indices >= 0)[..., None]  # [B, Q, Hkv, n, l']
        # Zero times NaN is NaN, so masked keys are replaced by zeros.
        keys, values = (
            jnp.where(seen[..., None], gather(x, slice_at), 0).astype(query.dtype)
            for x in (key, value)
        )
        keys, values = (rearrange(x, "b q k n l d -> b q k (n l) d") for x in (keys, values))
        logits = logits_of("bqkgd,bqksd->bkgqs", grouped(query, key), keys, scale)
        probs, lse = softmax(logits, rearrange(seen, "b q k n l -> b k 1 q (n l)"))
        return _rows(weighted("bkgqs,bqksd->bqkgd", probs, values), lse, query)

    keys_per_row = kv_heads * block_indices.shape[-1] * size
    row_bytes = batch * keys_per_row * (width + value.shape[-1]) * key.dtype.itemsize
    arrays = (query, block_indices, where.position, where.key_start)
    return over_queries(chunk, arrays, (key, value), row_bytes)


def sliding_attention(query, key, value, *, config, kv_len=None, segment_ids=None, scale=None):
    """Compute attention of each query to the last `window` keys up to its own key."""
    batch, length, heads, _ = query.shape
    num_keys, window = key.shape[1], config.window
    where = geometry.layout_of(query, num_keys, config, kv_len, segment_ids)
    key, value = (geometry.without_padding(x, kv_len, segment_ids) for x in (key, value))
    index = where.first_key[:, None] + jnp.arange(length, dtype=jnp.int32)

    def chunk(query, index, position, start, key, value):
        size = min(num_keys, query.shape[1] + max(window - 1, 0))
        band = jnp.clip(index[:, 0] - (window - 1), 0, num_keys - size)
        slice_band = jax.vmap(lambda x, at: lax.dynamic_slice_in_dim(x, at, size))
        token = (band[:, None] + jnp.arange(size, dtype=jnp.int32))[:, None]
        index, start = index[..., None], start[..., None]
        seen = (token <= index) & (token > index - window) & (token >= start)
        seen &= position[..., None] >= 0
        return _attend(query, slice_band(key, band), slice_band(value, band), seen, scale)

    # If a chunk is as long as the window, only half of the sliced keys are masked.
    row_bytes = batch * heads * min(num_keys, 2 * max(window, 64)) * 4
    budget = min(row_bytes * max(window, 64), BUDGET_BYTES)
    arrays = (query, index, where.position, where.key_start)
    return over_queries(chunk, arrays, (key, value), row_bytes, budget_bytes=budget)


def combine(outputs, gates):
    """Compute `sum_c gate[c] * out[c]` (Eq. 5) of two `Branches`, in float32, with gates
    `[B, T, H]`.
    """
    dtype = outputs.compressed.dtype
    total = jnp.zeros((), wide(dtype))
    for out, gate in zip(outputs, gates, strict=True):
        total = total + out.astype(wide(dtype)) * gate.astype(wide(dtype))[..., None]
    return total.astype(dtype)


def num_blocks(query, compressed_key, kv_len, segment_ids, config) -> int:
    """Return the maximum number of key blocks per sequence in the given arrays."""
    if segment_ids is not None:
        limit = getattr(segment_ids, "max_seqlen", None)
        kv_len = min(segment_ids.shape[1], limit or segment_ids.shape[1])
    kv_len = query.shape[1] if kv_len is None else kv_len
    if not isinstance(kv_len, int):
        count = compressed_key.shape[1]
        kv_len = count * config.compress_stride + config.compress_block - 1
    return config.num_blocks(kv_len)


def select_blocks(
    query, compressed_key, *, config, kv_len=None, segment_ids=None, scale=None
) -> Int[Array, "B T Hkv n"]:
    """Select the blocks of each query and key/value head. Scores exist only for one chunk of
    queries at a time.
    """
    query, compressed_key = lax.stop_gradient((query, compressed_key))
    (batch, length, heads, _), count = query.shape, compressed_key.shape[1]
    blocks = num_blocks(query, compressed_key, kv_len, segment_ids, config)
    where = geometry.layout_of(query, length, config, kv_len, segment_ids)

    def scores(query, position, start, compressed_key, log=False):
        logits = logits_of(SHARED, grouped(query, compressed_key), compressed_key, scale)
        slot = jnp.arange(count, dtype=jnp.int32)
        seen = key_bounds.sees_compressed(slot, position, start, config)[:, None, None]
        probs, lse = softmax(logits, seen)
        shares = probs.sum(axis=2)  # [B, Hkv, Q, C]
        if log:
            shares = jnp.where(seen, logits - lse[..., None], -jnp.inf)
            one_head = shares.shape[2] == 1
            shares = shares[:, :, 0] if one_head else jax.nn.logsumexp(shares, axis=2)
        own = None if segment_ids is None else start[:, None]
        found = selection.map_to_blocks(OPS, shares, blocks, config, log, own)
        return rearrange(found, "b k q n -> b q k n")

    def chosen(*chunk):
        # Floor division keeps the position -1 of padding negative.
        own = (chunk[1] // config.select_block)[..., None]
        log_scores = functools.partial(scores, *chunk, log=True)
        return selection.choose(OPS, scores(*chunk), own, config, log_scores)

    arrays = query, where.position, where.compressed_start
    row_bytes = batch * heads * max(count, 1) * 4
    return over_queries(chosen, arrays, (compressed_key,), row_bytes)
