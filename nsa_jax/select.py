"""The selection of the blocks that a query reads: scores from compressed probabilities, then top-n.

Source: arXiv 2502.11089 v2, Eqs. 8-12. Everything here is float32 and carries no gradient. Scores
too small for float32 are compared by their logarithms, which are made only if they decide.
"""

import functools

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Int

from nsa_core import selection
from nsa_jax import geometry
from nsa_jax.chunks import over_queries
from nsa_jax.jax_ops import JAX_OPS as OPS
from nsa_jax.numerics import grouped, logits_of, softmax


def num_blocks(query, compressed_key, kv_len, segment_ids, config) -> int:
    """The most selection blocks that a sequence of these arrays can have."""
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
    """The selected blocks of each query and key/value head; scores never exist for all T."""
    query, compressed_key = lax.stop_gradient((query, compressed_key))
    (batch, length, heads, _), count = query.shape, compressed_key.shape[1]
    blocks = num_blocks(query, compressed_key, kv_len, segment_ids, config)
    where = geometry.layout_of(query, length, config, kv_len, segment_ids)

    def scores(query, position, start, compressed_key, log=False):
        logits = logits_of(grouped(query, compressed_key), compressed_key, scale)
        slot = jnp.arange(count, dtype=jnp.int32)
        local = slot - start[..., None]
        last_token = local * config.compress_stride + config.compress_block - 1
        seen = ((local >= 0) & (last_token <= position[..., None]))[:, None, None]
        probs, lse = softmax(logits, seen)
        shares, nothing = probs.sum(axis=2), 0  # [B, Hkv, Q, C]
        if log:
            nothing = -jnp.inf
            shares = jnp.where(seen, logits - lse[..., None], nothing)
            one_head = shares.shape[2] == 1
            shares = shares[:, :, 0] if one_head else jax.nn.logsumexp(shares, axis=2)
        if segment_ids is not None and count:
            shift = jnp.minimum(start[..., None] + slot, count - 1)[:, None]
            shifted = jnp.take_along_axis(shares, shift, axis=-1)
            shares = jnp.where(start[:, None, :, None] + slot < count, shifted, nothing)
        found = selection.map_to_blocks(OPS, shares, blocks, config, log)
        return rearrange(found, "b k q n -> b q k n")

    def chosen(*chunk):
        # Floor division keeps the position -1 of padding negative.
        own = (chunk[1] // config.select_block)[..., None]
        log_scores = functools.partial(scores, *chunk, log=True)
        return selection.choose(OPS, scores(*chunk), own, config, log_scores)

    arrays = query, where.position, where.compressed_start
    row_bytes = batch * heads * max(count, 1) * 4
    return over_queries(chosen, arrays, (compressed_key,), row_bytes)
