"""Work on a chunk of queries at a time, so that memory stays bounded in both directions."""

import jax
import jax.numpy as jnp
from jax import lax

# Bytes of the largest intermediate of one chunk (logits, or gathered keys and values).
BUDGET_BYTES = 128 * 2**20


def over_queries(body, arrays, row_bytes: int, *, budget_bytes: int = BUDGET_BYTES):
    """`body` mapped over chunks of the query axis (axis 1) of `arrays`, `[B, T, ...]` each.

    `row_bytes` is what one query index costs in the largest intermediate of `body`. The chunks
    are padded with zeros (integers with -1, the position that sees nothing). Under
    differentiation each chunk is computed again instead of being kept.
    """
    length = arrays[0].shape[1]
    most = max(1, budget_bytes // max(row_bytes, 1))
    count = max(1, -(-length // most))
    body = jax.checkpoint(body)
    if count == 1:
        return body(*arrays)
    size = -(-length // count)
    count = -(-length // size)

    def split(x):
        fill = -1 if jnp.issubdtype(x.dtype, jnp.integer) else 0
        pad = [(0, 0), (0, count * size - length)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, pad, constant_values=fill)
        return jnp.moveaxis(x.reshape(x.shape[0], count, size, *x.shape[2:]), 1, 0)

    def join(x):
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], count * size, *x.shape[3:])[:, :length]

    out = lax.map(lambda chunk: body(*chunk), tuple(split(x) for x in arrays))
    return jax.tree.map(join, out)
