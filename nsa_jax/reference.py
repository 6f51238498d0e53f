"""The implementation `reference` in JAX, which is `nsa_core.reference` on JAX arrays.
Arguments and shapes are the same as in `nsa_jax.api`.
"""

import jax
import jax.numpy as jnp
from jax import lax

from nsa_core import reference
from nsa_core.reference import Rows
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


def _target(function):
    """Return a `function` of `nsa_core.reference` as a target of `dispatch`."""
    of_tokens = function in reference.OF_TOKENS

    def run(query, key, *rest, config, kv_len=None, segment_ids=None, scale=None, **how):
        (batch, length), keys = query.shape[:2], key.shape[1]
        if segment_ids is not None:
            keys = segment_ids.shape[1]
        elif not of_tokens:
            keys = keys * config.compress_stride + config.compress_block - 1
            kv_len = length if kv_len is None else kv_len
            keys = kv_len if isinstance(kv_len, int) else keys
        if function is reference.select_blocks:
            query, key = lax.stop_gradient((query, key))
        with jax.default_matmul_precision("highest"):
            lengths = keys if kv_len is None else kv_len
            rows = _rows(batch, keys, length, lengths, segment_ids)
            return function(rows, query, key, *rest, config=config, scale=scale, **how)

    run.__name__ = function.__name__
    return run


compressed_attention, block_scores, select_blocks, selected_attention, sliding_attention = map(
    _target, reference.FUNCTIONS
)
