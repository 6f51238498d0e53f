"""The selection of the blocks that a query reads: scores from compressed probabilities, then top-n.

Source: arXiv 2502.11089 v2, Eqs. 8-12. Everything here is float32 and carries no gradient. Scores
too small for float32 are compared by their logarithms, which are made only if they decide.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float, Int

from nsa_core import selection
from nsa_core.config import NSAConfig
from nsa_jax import geometry
from nsa_jax.chunks import over_queries
from nsa_jax.jax_ops import JAX_OPS
from nsa_jax.numerics import grouped, logits_of, softmax

# From here on a float32 score is exact, though terms below the least normal number are lost.
LEAST_EXACT = 2.0**-90


def map_to_blocks(
    probs: Float[Array, "... C"], num_blocks: int, config: NSAConfig, log: bool = False
):
    """Eq. 9: `score[j] = sum_i w(i, j) * probs[i]`, `w` counting shared stride blocks.

    Compressed token `i` covers the stride blocks `i .. i + l/d - 1` and selection block `j`
    the stride blocks `j*r .. j*r + r - 1`, `r = l'/d`: sum by stride block, then by block.
    `log`: logarithms are given and returned.
    """
    ratio = config.select_block // config.compress_stride
    size, lead = num_blocks * ratio, [(0, 0)] * (probs.ndim - 1)
    nothing, add = (-jnp.inf, jnp.logaddexp) if log else (0, jnp.add)
    by_stride = jnp.full((*probs.shape[:-1], size), nothing, probs.dtype)
    for shift in range(config.compress_block // config.compress_stride):
        ends = shift, max(size - shift - probs.shape[-1], 0)
        shifted = jnp.pad(probs, [*lead, ends], constant_values=nothing)[..., :size]
        by_stride = add(by_stride, shifted)
    by_block = rearrange(by_stride, "... (n r) -> ... n r", r=ratio)
    return jax.nn.logsumexp(by_block, axis=-1) if log else by_block.sum(axis=-1)


def choose(
    scores: Float[Array, "... N"],
    own: Int[Array, "..."],
    config: NSAConfig,
    log_scores: Callable[[], Float[Array, "... N"]] | None = None,
) -> Int[Array, "... n"]:
    """`nsa_core.selection.choose`, in float32.

    `log_scores` returns the logarithms of the scores. On a CPU they order scores below
    `LEAST_EXACT`, if one of these would be chosen and not all candidates are.
    """
    n = config.num_selected

    def ranked_again(ranked, candidate):
        if log_scores is None:
            return ranked

        def by_logarithm():
            # Logarithms are below all scores. Those of 0 are above a block that is no candidate.
            log = jnp.maximum(log_scores().astype(jnp.float32), jnp.finfo(jnp.float32).min)
            return jnp.where((ranked < LEAST_EXACT) & candidate, log, ranked)

        exact = jnp.sum(ranked >= LEAST_EXACT, axis=-1, dtype=jnp.int32)
        decides = jnp.any((exact < n) & (own >= n))
        # A GPU's host would wait for the condition: there scores of 0 are equal.
        return lax.platform_dependent(
            cpu=lambda: lax.cond(decides, by_logarithm, lambda: ranked), default=lambda: ranked
        )

    return selection.choose(
        JAX_OPS, _top, scores.astype(jnp.float32), own, config, ranked_again
    )


def _top(x, count: int):
    return lax.top_k(x, count)[0]


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


def _scorer(query, compressed_key, config, kv_len, segment_ids, scale):
    """A function of a chunk of queries to its scores or, with `log`, to their logarithms; and the
    arrays to be chunked.
    """
    batch, num_queries, heads, _ = query.shape
    count = compressed_key.shape[1]
    if kv_len is None:
        kv_len = num_queries if segment_ids is None else segment_ids.shape[1]
    blocks = num_blocks(query, compressed_key, kv_len, segment_ids, config)
    where = geometry.query_layout(
        batch, num_queries, kv_len=kv_len, segment_ids=segment_ids, config=config
    )
    last_token = config.compress_block - 1

    def scores(query, position, start, compressed_key, log=False):
        logits = logits_of(grouped(query, compressed_key), compressed_key, scale)
        slot = jnp.arange(count, dtype=jnp.int32)
        local = slot - start[..., None]
        seen = (local >= 0) & (
            local * config.compress_stride + last_token <= position[..., None]
        )
        probs, lse = softmax(logits, seen[:, None, None])
        shares, nothing = probs.sum(axis=2), 0  # [B, Hkv, Q, C]
        if log:
            nothing = -jnp.inf
            shares = jnp.where(seen[:, None, None], logits - lse[..., None], nothing)
            one_head = shares.shape[2] == 1
            shares = shares[:, :, 0] if one_head else jax.nn.logsumexp(shares, axis=2)
        if segment_ids is not None and count:
            shift = jnp.minimum(start[..., None] + slot, count - 1)[:, None]
            shifted = jnp.take_along_axis(shares, shift, axis=-1)
            shares = jnp.where(start[:, None, :, None] + slot < count, shifted, nothing)
        return rearrange(map_to_blocks(shares, blocks, config, log), "b k q n -> b q k n")

    arrays = (query, where.position, where.compressed_start)
    return scores, arrays, batch * heads * max(count, 1) * 4


def block_scores(
    query, compressed_key, *, config, kv_len=None, segment_ids=None, scale=None
) -> Float[Array, "B T Hkv N"]:
    """Importance of every selection block (Eqs. 8-10), float32, summed over the group."""
    query, compressed_key = lax.stop_gradient((query, compressed_key))
    scores, arrays, row_bytes = _scorer(
        query, compressed_key, config, kv_len, segment_ids, scale
    )
    return over_queries(scores, arrays, (compressed_key,), row_bytes)


def select_blocks(
    query, compressed_key, *, config, kv_len=None, segment_ids=None, scale=None
) -> Int[Array, "B T Hkv n"]:
    """The selected blocks of each query and key/value head; scores never exist for all T."""
    query, compressed_key = lax.stop_gradient((query, compressed_key))
    scores, arrays, row_bytes = _scorer(
        query, compressed_key, config, kv_len, segment_ids, scale
    )

    def chosen(query, position, start, compressed_key):
        # Floor division keeps the position -1 of padding negative.
        own = jnp.broadcast_to(
            (position // config.select_block)[..., None],
            (*position.shape, compressed_key.shape[2]),
        )
        chunk = query, position, start, compressed_key
        return choose(scores(*chunk), own, config, lambda: scores(*chunk, log=True))

    return over_queries(chosen, arrays, (compressed_key,), row_bytes)
