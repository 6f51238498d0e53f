"""The numerics of all branches in XLA. The module computes logits of grouped heads, and a softmax
that supports queries without keys.
"""

import functools

import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float

from nsa_jax.eager import custom_vjp


def precision_of(dtype):
    """Return the argument `precision` for products of arrays of `dtype`. Float32 operands are not
    rounded to TF32, and products of 16-bit operands accumulate in float32.
    """
    low = jnp.dtype(dtype).itemsize < 4
    return lax.Precision.DEFAULT if low else lax.Precision.HIGHEST


def wide(dtype):
    """Return the dtype in which logits, softmax and sums are computed."""
    dtype = jnp.dtype(dtype)
    return jnp.dtype(jnp.float32) if dtype.itemsize < 4 else dtype


def product(subscripts: str, x, y):
    """Compute `jnp.einsum` of two arrays of the same dtype. The result has the dtype that `wide`
    returns, and the precision that `precision_of` returns.
    """
    exact = precision_of(y.dtype)
    return jnp.einsum(subscripts, x, y, precision=exact, preferred_element_type=wide(y.dtype))


@functools.partial(custom_vjp, static=1)
def weighted(subscripts: str, probs, values):
    """Round probabilities to the dtype of the value tensor, and return their product with the value
    tensor.

    The gradient of the probabilities is not rounded, since a loss scale may make this gradient
    larger than float16 can represent. The gradient of the result is rounded to the dtype of the
    value tensor, since both operands of a product have one dtype.
    """
    return product(subscripts, probs.astype(values.dtype), values)


def _weighted_forward(subscripts, probs, values):
    probs = probs.astype(values.dtype)
    return product(subscripts, probs, values), (probs, values)


def _weighted_backward(subscripts, saved, grad):
    probs, values = saved
    of_probs, of_values, of_grad = subscripts.replace("->", ",").split(",")
    grad = grad.astype(values.dtype)
    grad_probs = product(f"{of_grad},{of_values}->{of_probs}", grad, values)
    grad_values = product(f"{of_grad},{of_probs}->{of_values}", grad, probs)
    return grad_probs, grad_values.astype(values.dtype)


weighted.defvjp(_weighted_forward, _weighted_backward)


def put(x, index, values):
    """Return `x` with `values` at `index`, which is an array or a tuple of arrays. Writes beyond
    the end are dropped. XLA for GPUs (as of JAX 0.11) would clamp a constant index to the last
    position. An optimization barrier hides a constant index from XLA.
    """
    return x.at[lax.optimization_barrier(index)].set(values, mode="drop")


def grouped(query: Float[Array, "B T H D"], key: Float[Array, "B S Hkv D"]):
    """Group the query heads by the key/value head that they read, `[B, T, Hkv, G, D]`."""
    return rearrange(query, "b t (k g) d -> b t k g d", k=key.shape[2])


def logits_of(subscripts: str, query, key, scale):
    """Compute `scale * q . k`, where `subscripts` are the subscripts of `product`."""
    logits = product(subscripts, query, key)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return logits * jnp.asarray(scale, logits.dtype)


def softmax(logits: Float[Array, "*A K"], seen: Bool[Array, "*#A K"]):
    """Compute probabilities and the log-sum-exp `[*A]` over the last axis. `seen` is the mask. If
    a query has no key, its probabilities are 0 and its log-sum-exp is -inf. The logit of a masked
    key, and the gradient of its probability, are ignored even if they are NaN.
    """
    logits = jnp.where(seen, logits, -jnp.inf)
    top = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf))
    top = jnp.where(top == -jnp.inf, 0, top)
    weights = jnp.exp(logits - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    some = total > 0
    total = jnp.where(some, total, 1)
    lse = jnp.where(some, top + jnp.log(total), -jnp.inf)
    return jnp.where(seen, weights / total, 0), lse[..., 0]
