"""Computes one chunk of queries at a time, which bounds the memory of the forward and the
backward pass.
"""

import functools

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax

from nsa_jax.eager import custom_vjp
from nsa_jax.numerics import wide

# Maximum size in bytes of an intermediate array of one chunk, such as logits or gathered keys.
BUDGET_BYTES = 128 * 2**20


def over_queries(body, arrays, shared, row_bytes: int, *, budget_bytes: int | None = None):
    """Map `body(*chunk, *shared)` over chunks of the query axis of `arrays`.

    `arrays` and the leaves of the result are `[B, T, ...]`. `shared` has the arrays that every
    query may read, such as keys and values. `row_bytes` is the number of bytes per query in the
    largest intermediate result of `body`. The last chunk is padded with zeros. Integers are
    padded with -1, a position that attends to no key.

    In the backward pass each chunk is computed again instead of being stored. Every query adds to
    the gradients of `shared`. To accumulate these gradients in float32, `body` receives the shared
    arrays in float32 in the backward pass. `body` must cast the parts that it reads to the dtype of
    the queries. `body` must not close over traced arrays.
    """
    budget = BUDGET_BYTES if budget_bytes is None else budget_bytes
    most = max(1, budget // max(row_bytes, 1))
    count = max(1, -(-arrays[0].shape[1] // most))
    return _mapped(body, count, tuple(arrays), tuple(shared))


@functools.partial(custom_vjp, static=2)
def _mapped(body, count, arrays, shared):
    if count == 1:
        return body(*arrays, *shared)
    length = arrays[0].shape[1]
    out = lax.map(lambda chunk: body(*chunk, *shared), _split(arrays, count))
    return jax.tree.map(lambda x: _join(x, length), out)


def _forward(body, count, arrays, shared):
    return _mapped(body, count, arrays, shared), (arrays, shared)


def _backward(body, count, saved, grads):
    arrays, shared = saved
    length = arrays[0].shape[1]
    totals = tuple(lax.full_like(x, 0, wide(x.dtype)) for x in shared)
    widened = tuple(x.astype(wide(x.dtype)) for x in shared)

    def step(totals, chunk):
        parts, part_grads = chunk
        found = jax.vjp(body, *parts, *widened)[1](part_grads)
        totals = tuple(a + b for a, b in zip(totals, found[len(parts) :], strict=True))
        of_parts = found[: len(parts)]
        return totals, tuple(None if x.dtype == jax.dtypes.float0 else x for x in of_parts)

    if count == 1:
        totals, array_grads = step(totals, (arrays, grads))
    else:
        chunks = _split((arrays, grads), count)
        totals, array_grads = lax.scan(step, totals, chunks)
        array_grads = jax.tree.map(lambda x: _join(x, length), array_grads)
    pairs = zip(totals, shared, strict=True)
    return array_grads, tuple(total.astype(x.dtype) for total, x in pairs)


_mapped.defvjp(_forward, _backward)


def _split(tree, count):
    """Split each leaf `[B, T, ...]` into chunks `[count, B, size, ...]`, and pad the last chunk."""

    def split(x):
        size = -(-x.shape[1] // count)
        fill = -1 if jnp.issubdtype(x.dtype, jnp.integer) else 0
        pad = [(0, 0), (0, count * size - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, pad, constant_values=fill)
        return rearrange(x, "b (c q) ... -> c b q ...", c=count)

    return jax.tree.map(split, tree)


def _join(x, length):
    return rearrange(x, "c b q ... -> b (c q) ...")[:, :length]
