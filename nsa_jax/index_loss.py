"""The loss of an indexer: the divergence of its scores from the attention that it serves."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from nsa_core import block_lists, index_loss, validate
from nsa_core.array_ops import zero_padding
from nsa_core.index_loss import Teacher
from nsa_core.steps import triton_index
from nsa_jax import checks, geometry
from nsa_jax.batching import foldable
from nsa_jax.chunks import over_queries
from nsa_jax.eager import any_rank, compiled
from nsa_jax.indexer import runs_on
from nsa_jax.jax_ops import JAX_OPS
from nsa_jax.numerics import precision_of, wide


@any_rank
def indexer_kl(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S Hkv D"],
    lse: Float[Array, "B T H"],
    index_query: Float[Array, "B T Hi Di"],
    index_key: Float[Array, "B S Di"],
    block_indices: Int[Array, "B T G n"] | None = None,
    *,
    block_size: int | None = None,
    scale: float | None = None,
    index_scale: float | None = None,
    kv_len: int | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    implementation: Literal["triton", "xla"] | None = None,
) -> Float[Array, "B T Hi"]:
    """KL(attention || indexer) of each query and index head, over the keys `j` that it attends to:

        t_j = mean over the heads of exp(scale q . k_j - lse)          (no gradient)
        p   = softmax of index_scale index_query . index_key_j
        L   = sum_j t_j (log t_j - log p_j)

    With `block_indices` these are the keys of the named blocks (the sparse stage), otherwise all
    keys up to the query (dense warm-up). Only `index_query` and `index_key` receive gradients.
    Values and the output's gradient are not needed, so it also works if the attention is frozen.
    Chunks of queries are processed, forward and backward, without an array of queries times keys.

    Source: DeepSeek-V3.2's indexer loss, with MiniMax-M3's mean over the heads of a group.

    Args:
      query, key: inputs of the attention, `[B, T, H, D]`, `[B, S, Hkv, D]`; the queries are the
        last `T` tokens.
      lse: `[B, T, H]`, its natural log-sum-exp over the same keys, as `block_attention` and
        `sliding_attention` return it. A row with -inf has no keys, and its loss is 0.
      index_query, index_key: `[B, T, Hi, Di]`, `[B, S, Di]`. Index head `h` learns from the query
        heads `h * H / Hi ..`.
      block_indices: int32 `[B, T, Hi or 1, n]`, as in `block_attention`; None means all keys.
      block_size: tokens per block, if `block_indices` are given.
      scale: factor of the attention's logits; None means `D**-0.5`.
      index_scale: factor of the indexer's logits; None means `Di**-0.5`.
      kv_len: number of keys; None means `S`.
      segment_ids: int `[B, S]` of packed rows.
      implementation: `triton`, `xla` (a chunk of queries at a time), or None for the first that
        can run. `triton` needs a GPU since Ampere, named blocks, no packed rows, and at least one
        index head per key/value head. It stores a 16-bit number per query, index head and listed
        key.

    Returns:
      float32 `[B, T, Hi]`, not negative if `lse` belongs to the same keys; 0 for padding. Compute
      the mean over tokens that count.

    Raises:
      ValueError: shapes or dtypes that do not fit.
      NotImplementedError: the named implementation cannot run this.
    """
    given = query, key, lse, index_query, index_key, block_indices
    teacher = index_loss.check(*given, block_size, scale, index_scale)
    validate.segments(segment_ids, *key.shape[:2])
    validate.length(kv_len, query, segment_ids, key.shape[1])
    checks.within("kv_len", kv_len, 0, key.shape[1])
    if block_indices is not None:
        checks.distinct(block_indices)
    name = runs_on(
        *(implementation, query, segment_ids is not None and "takes no packed rows"),
        triton_index.loss_why_not(query, key, index_query, block_indices, teacher.block),
    )
    run = compiled(_on_triton if name == "triton" else _loss)
    return run(*given, teacher=teacher, kv_len=kv_len, segment_ids=segment_ids)


def _placed(query, key, index_query, index_key, block: int, kv_len, segment_ids):
    """The positions of queries, and the indexer's arrays with zeros for padding, since gradients
    are products of both.
    """
    at = {"kv_len": key.shape[1] if kv_len is None else kv_len, "segment_ids": segment_ids}
    config = block_lists.config_of(block, 1)
    where = geometry.query_layout(*query.shape[:2], **at, config=config)
    (index_query,) = zero_padding(jnp, where, index_query)
    return where, index_query, geometry.without_padding(index_key, **at)


def _on_triton(
    query, key, lse, index_query, index_key, block_indices, *, teacher: Teacher, **at
):
    block, indexer = teacher.block, (index_query, index_key)
    where, *indexer = _placed(query, key, *indexer, block, **at)
    lists = triton_index.lists_for(JAX_OPS, block_indices, index_query, key.shape[1], block)
    position = jnp.asarray(where.position, jnp.int32)
    frozen = lax.stop_gradient((query, key, jnp.asarray(lse, jnp.float32)))
    return _kernel_loss(teacher, lists, position, *frozen, *indexer)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kernel_loss(teacher, lists, position, *arrays):
    return _kernel_loss_forward(teacher, lists, position, *arrays)[0]


def _kernel_loss_forward(teacher, lists, position, *arrays):
    from nsa_jax.triton_ops import TRITON_OPS

    def run(lists, position, *arrays):
        return triton_index.loss(TRITON_OPS, arrays, lists, position, teacher)

    loss, kept = foldable(run)(lists, position, *arrays)
    return loss, (*arrays[3:], lists, position, kept)


def _kernel_loss_backward(teacher, residuals, grad):
    from nsa_jax.triton_ops import TRITON_OPS

    def run(*arrays):
        return triton_index.gradients(TRITON_OPS, teacher, *arrays)

    return *[None] * 5, *foldable(run)(*residuals, grad)


_kernel_loss.defvjp(_kernel_loss_forward, _kernel_loss_backward)


def _loss(query, key, lse, index_query, index_key, block_indices, *, teacher: Teacher, **at):
    (batch, _, _, width), keys, block = query.shape, key.shape[1], teacher.block
    indexer = index_query, index_key
    where, index_query, index_key = _placed(query, key, *indexer, block, **at)
    repeats, listed = teacher.pairs // teacher.kv_heads, block_indices is not None
    exact = {
        "precision": precision_of(jnp.float32),
        "preferred_element_type": wide(query.dtype),
    }

    def chunk(index_query, query, lse, position, start, *rest):
        *lists, index_key, key = rest
        query, key, lse = lax.stop_gradient((query, key, lse))
        scores = jnp.einsum("bqhd,bkd->bqhk", index_query, index_key, **exact)
        scores *= teacher.index_scale
        query = query.reshape(*query.shape[:2], teacher.pairs, teacher.heads, width)
        named = lists[0] if listed else None
        seen, row = index_loss.seen_keys(JAX_OPS, named, position, start, block, keys)
        if listed:
            row = jnp.clip(row, 0, keys - 1)
            # Of a query each row is named once, so that its gradient is no sum.
            each = jnp.broadcast_to(row, (*scores.shape[:3], row.shape[3]))
            unseen = jnp.broadcast_to(~seen, each.shape)
            scores = jnp.take_along_axis(scores, jnp.where(unseen, 0, each), axis=-1)
            row = jnp.repeat(row, teacher.pairs // row.shape[2], axis=2)
            which = jnp.arange(batch, dtype=jnp.int32)[:, None, None, None]
            head = jnp.arange(teacher.pairs, dtype=jnp.int32)[:, None] // repeats
            near = key[which, row, head]
            logits = jnp.einsum("bqphd,bqpkd->bqphk", query, near, **exact)
        else:
            near = jnp.repeat(key, repeats, axis=2)
            logits = jnp.einsum("bqphd,bkpd->bqphk", query, near, **exact)
        lse = lse.astype(logits.dtype)
        t = lax.stop_gradient(teacher.targets(jnp, logits, lse, seen))
        scores = jnp.where(seen, scores, -jnp.inf)
        top = lax.stop_gradient(scores.max(axis=-1, keepdims=True, initial=-jnp.inf))
        top = jnp.where(top == -jnp.inf, 0, top)
        total = jnp.where(seen, jnp.exp(scores - top), 0).sum(axis=-1, keepdims=True)
        logp = jnp.where(seen, scores - top, 0) - jnp.log(jnp.where(total > 0, total, 1))
        entropy = jnp.where(t > 0, t * jnp.log(jnp.where(t > 0, t, 1)), 0)
        return (entropy - t * jnp.where(seen, logp, 0)).sum(axis=-1)

    arrays: list[Any] = [index_query, query, lse, where.position, where.key_start]
    shared = index_key, lax.stop_gradient(key)
    count, more = query.shape[2], 0
    if block_indices is not None:
        arrays.append(block_indices)
        count, more = teacher.pairs * (width + teacher.heads), keys * teacher.index_heads
        keys_of = block_indices.shape[-1] * block
    else:
        keys_of = keys
    return over_queries(chunk, arrays, shared, batch * (keys_of * count + more) * 4)
