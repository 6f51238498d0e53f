"""Checks of `indexer_kl`, and the keys that its plain form attends to, for both frameworks."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from nsa_core import block_lists, validate
from nsa_core.array_ops import ArrayOps


class Teacher(NamedTuple):
    """The attention heads from which an index head learns, over all keys or listed blocks.

    A pair is a key/value head read by an index head, `pairs = max(Hi, Hkv)`: pair `p` has the
    `heads` query heads `p * heads ..`, of key/value head `p * Hkv // pairs`.
    """

    index_heads: int
    kv_heads: int
    pairs: int
    heads: int
    block: int
    scale: float
    index_scale: float


class Loss(NamedTuple):
    """Arguments of a framework's `over_queries`, which computes the loss in chunks of queries.

    Attributes:
      parts: Function with the same arguments as `chunk` that returns t and log p `[B, Q, Hi, K]`,
        the mask of the keys, and their rows. The rows are None for all keys.
    """

    parts: Callable[..., Any]
    chunk: Callable[..., Any]
    chunked: Sequence[Any]
    shared: Sequence[Any]
    row_bytes: int


def loss_of(
    ops: ArrayOps,
    teacher: Teacher,
    query,
    key,
    lse,
    block_indices,
    where,
    index_query,
    index_key,
) -> Loss:
    """The loss `[B, Q, Hi]`. `where` is the `QueryLayout` of `indexer_kl`, which has the others."""
    xp, pairs, listed = ops.xp, teacher.pairs, block_indices is not None
    (batch, _, heads, width), keys = query.shape, key.shape[1]

    def parts(index_query, query, lse, position, start, *rest):
        *lists, index_key, key = rest
        named = lists[0] if listed else None
        seen, row = seen_keys(ops, named, position, start, teacher.block, keys)
        scores = ops.product("bqhd,bkd->bqhk", index_query, index_key) * teacher.index_scale
        query = query.reshape(*query.shape[:2], pairs, teacher.heads, width)
        pair = ops.arange(position, pairs)[0]
        head = pair * teacher.kv_heads // pairs
        if row is None:
            logits = ops.product("bqphd,bkpd->bqphk", query, key[:, :, head])
        else:
            row = xp.where(seen, row, 0)
            # Of a query each row is named once, so that its gradient is no sum.
            scores = ops.take_along(scores, row)
            each = ops.arange(row, batch).reshape(-1, 1, 1, 1)
            at = each, row[:, :, pair * row.shape[2] // pairs], head[:, None]
            near = key[at]  # [B, Q, pairs, K, D]
            logits = ops.product("bqphd,bqpkd->bqphk", query, near)
        lse = ops.cast(lse, logits.dtype)
        lse = xp.where(lse == -math.inf, math.inf, lse).reshape(*logits.shape[:4], 1)
        probs, each = xp.exp(logits * teacher.scale - lse).sum(3), pairs // teacher.index_heads
        probs = probs.reshape(*probs.shape[:2], teacher.index_heads, each, -1).sum(3)
        t = ops.stop_gradient(xp.where(seen, probs / (each * teacher.heads), 0))
        logp = ops.nn.log_softmax(xp.where(seen, scores, -xp.inf), -1)
        return t, xp.where(seen, logp, 0), seen, row

    def chunk(*arrays):
        t, logp, _, _ = parts(*arrays)
        entropy = xp.where(t > 0, t * xp.log(xp.where(t > 0, t, 1)), 0)
        return (entropy - t * logp).sum(-1)

    chunked, costs = [index_query, query, lse, where.position, where.key_start], keys * heads
    if listed:
        chunked.append(block_indices)
        costs = block_indices.shape[-1] * teacher.block * pairs * (width + teacher.heads)
        costs += keys * teacher.index_heads
    return Loss(parts, chunk, chunked, (index_key, key), batch * costs * 4)


def seen_keys(ops: ArrayOps, lists, position, start, block: int, keys: int):
    """Whether a query sees a key, `[B, Q, Hi or 1, K]`, and the rows of the keys. Rows of masked
    keys may be outside the array. None means all keys.

    Args:
      lists: `[B, Q, Hi or 1, n]`, or None; position, start: `[B, Q]`.
    """
    position, start = position[..., None, None], start[..., None, None]
    if lists is None:
        local = ops.arange(position, keys)[0] - start
        return (local >= 0) & (local <= position), None
    # A number beyond the keys would be one of them in 32 bits.
    lists = ops.xp.where(lists < -(-keys // block), lists, -1)[..., None]
    token = lists * block + ops.arange(lists, block)[0]
    seen, rows = (lists >= 0) & (token <= position[..., None]), token + start[..., None]
    return tuple(x.reshape(*x.shape[:3], -1) for x in (seen, rows))


def check(
    query, key, lse, index_query, index_key, block_indices, block_size, scale, index_scale
) -> Teacher:
    """Check the shapes and dtypes of `indexer_kl`'s arguments.

    Raises:
      ValueError: an argument that nothing takes.
    """
    validate.queries(query)
    batch, length, heads, width = query.shape
    validate.array("key", key, (batch, None, None, width))
    validate.heads(query, key)
    keys, kv_heads = key.shape[1:3]
    if length > keys:
        raise ValueError(f"query must not be longer than key, got T={length} and S={keys}")
    validate.array("lse", lse, (batch, length, heads), ("float32", "float64"))
    validate.array("index_query", index_query, (batch, length, None, None))
    index_heads, index_width = index_query.shape[2:]
    axes = batch, keys, index_width
    validate.array("index_key", index_key, axes, index_query=index_query)
    fits = index_heads > 0 and heads % index_heads == 0
    if not fits or (kv_heads % index_heads and index_heads % kv_heads):
        raise ValueError(
            f"index_query must have Hi heads, where Hi divides H={heads} and is a divisor or a "
            f"multiple of Hkv={kv_heads}, got Hi={index_heads}"
        )
    if block_indices is not None:
        validate.sizes(block_size=block_size)
        name, tokens = "block_indices", (batch, length)
        block_lists.lists(name, block_indices, tokens, heads, kv_heads)
        if block_indices.shape[2] not in (1, index_heads):
            raise ValueError(
                f"block_indices must have a list for all heads or for each of the {index_heads} "
                f"index heads, got {block_indices.shape[2]}"
            )
    elif block_size is not None:
        raise ValueError(
            f"block_size must be None where block_indices are None, got {block_size}"
        )
    validate.scaling(scale)
    validate.scaling(index_scale, "index_scale")
    pairs = math.lcm(index_heads, kv_heads)
    return Teacher(
        *(index_heads, kv_heads, pairs, heads // pairs),
        block=block_lists.within(block_size or 1, key.shape[1]),
        scale=width**-0.5 if scale is None else scale,
        index_scale=index_query.shape[3] ** -0.5 if index_scale is None else index_scale,
    )
