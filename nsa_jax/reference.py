"""The implementation `reference` in JAX, which is `nsa_core.reference` on JAX arrays.
Arguments and shapes are the same as in `nsa_jax.api`.
"""

import jax
import jax.numpy as jnp
from jax import lax

from nsa_core import reference
from nsa_core.config import NSAConfig
from nsa_core.reference import Rows, wide
from nsa_jax.jax_ops import JAX_OPS


def _rows(batch, num_keys, num_queries, kv_len, segment_ids) -> Rows:
    index = jnp.arange(num_keys, dtype=jnp.int32)
    lengths = jnp.broadcast_to(jnp.asarray(kv_len, jnp.int32), (batch,))[:, None]
    sequence = jnp.where(index < lengths, 0, -1)
    if segment_ids is not None:
        segment_ids = getattr(segment_ids, "segment_ids", segment_ids)  # of metadata
        new = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
        sequence = jnp.where(segment_ids < 0, -1, jnp.cumsum(new, axis=1, dtype=jnp.int32))
    border = jnp.pad(sequence[:, 1:] != sequence[:, :-1], ((0, 0), (1, 0)))
    position = index - lax.cummax(jnp.where(border, index, 0), axis=1)
    query = jnp.arange(num_queries, dtype=jnp.int32) + lengths - num_queries
    return Rows(JAX_OPS, sequence, position, query)


def _target(name: str, of_tokens: bool):
    """Return the function `name` of `nsa_core.reference` as a target of `dispatch`. The keys of
    this function are tokens if `of_tokens` is true, otherwise compressed tokens.
    """
    function = getattr(reference, name)

    def run(query, key, *rest, config, kv_len=None, segment_ids=None, scale=None, **how):
        (batch, length), keys = query.shape[:2], key.shape[1]
        if segment_ids is not None:
            keys = segment_ids.shape[1]
        elif not of_tokens:
            keys = keys * config.compress_stride + config.compress_block - 1
            kv_len = length if kv_len is None else kv_len
            keys = kv_len if isinstance(kv_len, int) else keys
        if name == "select_blocks":
            query, key = lax.stop_gradient((query, key))
        with jax.default_matmul_precision("highest"):
            lengths = keys if kv_len is None else kv_len
            rows = _rows(batch, keys, length, lengths, segment_ids)
            return function(rows, query, key, *rest, config=config, scale=scale, **how)

    run.__name__ = name
    return run


compressed_attention = _target("compressed_attention", False)
block_scores = _target("block_scores", False)
select_blocks = _target("select_blocks", False)
selected_attention = _target("selected_attention", True)
sliding_attention = _target("sliding_attention", True)


def compress(x, *, config: NSAConfig):
    """Compute the means of windows of `l` tokens, which begin every `d` tokens (Eq. 7)."""
    first = jnp.arange(config.num_compressed(x.shape[1]), dtype=jnp.int32)
    taps = first[:, None] * config.compress_stride + jnp.arange(
        config.compress_block, dtype=jnp.int32
    )
    return x[:, taps].mean(axis=2, dtype=wide(jnp, x.dtype)).astype(x.dtype)


def combine(outputs, gates):
    """Compute `sum_c gate[c] * out[c]` (Eq. 5) of two `Branches`, with gates `[B, T, H]`."""
    dtype = wide(jnp, outputs.compressed.dtype)
    weighted = [
        out.astype(dtype) * gate.astype(dtype)[..., None]
        for out, gate in zip(outputs, gates, strict=True)
    ]
    total = weighted[0] + weighted[1] + weighted[2]
    return total.astype(outputs.compressed.dtype)
