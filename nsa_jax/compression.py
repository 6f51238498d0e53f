"""Compression: the function `phi` makes one compressed token from each window of `l` tokens. A
window begins every `d` tokens (Eq. 7).
"""

import functools

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Int

from nsa_core.compress_params import CompressParams, MLPParams, PoolParams, RopeMLPParams
from nsa_core.config import NSAConfig
from nsa_core.rotation import rotated
from nsa_jax import geometry
from nsa_jax.eager import custom_vjp
from nsa_jax.jax_ops import JAX_OPS
from nsa_jax.numerics import precision_of, put, wide


def apply_phi(
    windows: Float[Array, "B C l Hkv D"], params: CompressParams, first: Int[Array, "#B C"]
):
    """Apply `phi` to each window, accumulating in float32. The result is `[B, C, Hkv, D]` in
    the dtype of `windows`.

    Args:
      first: The position of each window's first token in its sequence, `[B, C]`, or `[1, C]` for
        all rows.
    """
    dtype = wide(windows.dtype)
    if params is None:
        out = jnp.mean(windows, axis=2, dtype=dtype)
    elif isinstance(params, PoolParams):
        out = jnp.sum(windows.astype(dtype) * params.weight.astype(dtype)[:, None], axis=2)
    elif isinstance(params, RopeMLPParams):
        middle = first.astype(jnp.float32) + (windows.shape[2] - 1) / 2
        out = _mlp(windows, MLPParams(*params[:-1]))
        angle = middle[..., None, None] * params.rates.astype(jnp.float32)
        out = rotated(jnp, out, *(f(angle).astype(out.dtype) for f in (jnp.cos, jnp.sin)))
    else:
        out = _mlp(windows, params)
    return out.astype(windows.dtype)


def _mlp(windows, params):
    dtype = windows.dtype
    position, w1, b1, w2, b2 = (x.astype(wide(dtype)) for x in params)

    def product(spec, x, weight):
        return jnp.einsum(
            spec,
            x.astype(dtype),
            weight.astype(dtype),
            precision=precision_of(dtype),
            preferred_element_type=wide(dtype),
        )

    embedded = windows.astype(wide(dtype)) + position[:, None]
    w1 = rearrange(w1, "(l d) f -> l d f", l=len(position))
    hidden = product("bclkd,ldf->bckf", embedded, w1) + b1
    return product("bckf,fd->bckd", jax.nn.gelu(hidden, approximate=True), w2) + b2


def compress(x, params: CompressParams = None, *, config: NSAConfig, segment_ids=None, first=0):
    """Apply `phi` to the windows of `x` [B, S, Hkv, D]. The first token of `x` has position
    `first`, which is 0 in a packed row. The result is `[B, C, Hkv, D]`.

    In a packed batch the windows of all sequences are in the order of their first token, without
    gaps. The remaining slots at the end of the result are zero.
    """
    batch, length, kv_heads, width = x.shape
    block, stride = config.compress_block, config.compress_stride
    count = config.num_compressed(length)
    if count == 0:
        return jnp.zeros((batch, 0, kv_heads, width), x.dtype)
    if segment_ids is None:
        # A window consists of l/d stride blocks. Static slices select them, so that the
        # gradient needs no scatter.
        shifts = block // stride
        blocks = x[:, : (count + shifts - 1) * stride]
        blocks = rearrange(blocks, "b (c s) k d -> b c s k d", s=stride)
        windows = [blocks[:, shift : shift + count] for shift in range(shifts)]
        at = first + jnp.arange(count, dtype=jnp.int32)[None] * stride
        return apply_phi(jnp.concatenate(windows, axis=2), params, at)
    rows = geometry.packed_rows(segment_ids, config)
    starts, at = (
        rows.window_starts,
        JAX_OPS.take_rows(rows.position, jnp.maximum(rows.window_starts, 0)),
    )
    out = apply_phi(windows_at(block, stride, x, starts), params, at)
    return jnp.where(starts[:, :, None, None] >= 0, out, jnp.zeros((), out.dtype))


@functools.partial(custom_vjp, static=2)
def windows_at(
    block: int, stride: int, x: Float[Array, "B S Hkv D"], starts: Int[Array, "B C"]
) -> Float[Array, "B C l Hkv D"]:
    """Return the windows of `block` tokens that begin at `starts`. Unused slots contain zeros, so
    that a NaN in padding does not reach the gradients of parameters. A product of NaN and zero
    would be NaN.

    The gradient of a token is the sum, in a fixed order, over the windows that contain the token.
    If JAX differentiated a gather, the gradient would be a scatter, which adds in any order on a
    GPU.

    Args:
      starts: Ascending, with distances of at least `stride`. Unused slots at the end are -1.
    """
    taps = jnp.maximum(starts, 0)[..., None] + jnp.arange(block, dtype=jnp.int32)
    return jnp.where(starts[..., None, None, None] >= 0, JAX_OPS.take_rows(x, taps), 0)


def _windows_fwd(block, stride, x, starts):
    return windows_at(block, stride, x, starts), (starts, x[:, :, :0, :0])


def _windows_bwd(block, stride, kept, gradients):
    starts, like = kept
    batch, length = like.shape[:2]
    ends = jnp.where(starts < 0, length, starts)
    begins = jnp.zeros((batch, length), jnp.int32)
    begins = jax.vmap(put, (0, 0, None))(begins, ends, 1)
    # the last window that begins at or before each token
    newest = jnp.cumsum(begins, axis=1) - 1
    token = jnp.arange(length, dtype=jnp.int32)
    total = jnp.zeros((batch, length, *gradients.shape[3:]), wide(gradients.dtype))
    for older in reversed(range(block // stride)):
        slot = newest - older
        tap = token - JAX_OPS.take_rows(ends, jnp.maximum(slot, 0))
        inside = (slot >= 0) & (tap < block)
        at = jnp.where(inside, slot, 0), jnp.where(inside, tap, 0)
        found = jax.vmap(lambda row, *index: row[index])(gradients, *at)
        total += jnp.where(inside[..., None, None], found.astype(total.dtype), 0)
    return total.astype(gradients.dtype), None


windows_at.defvjp(_windows_fwd, _windows_bwd)
