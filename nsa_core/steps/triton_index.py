"""The blocks of an indexer, and its loss over these, on Triton kernels, for either framework."""

from typing import Any, NamedTuple

from kernels_pallas.triton import index_descriptions, paged_blocks_descriptions
from kernels_pallas.triton.index_descriptions import IndexSizes, LossSizes
from nsa_core.array_ops import ArrayOps
from nsa_core.steps import triton_backward, triton_paged_blocks
from nsa_core.steps.triton_backward import ListSizes
from nsa_core.validate import dtype_name

SCORES_BYTES = 2**28  # of the scores of blocks that are written at a time


class Kept(NamedTuple):
    """For a gradient of the loss: t of each listed key `[B, T, Hi, n * block]`, the log-sum-exp of
    the indexer and sum t `[B, T, Hi]`, and the query lists of the blocks.
    """

    targets: Any
    index_lse: Any
    mass: Any
    order: Any
    starts: Any
    ends: Any
    tile_of: Any


def sizes_of(query, key, index_query, lists, block: int, scales) -> LossSizes:
    """`lists`: `[B, T, ., n]`; `scales`: of the attention, of the indexer."""
    (batch, length, heads, width), (keys, kv_heads) = query.shape, key.shape[1:3]
    index_heads, index_width = index_query.shape[2:]
    sizes = batch, length, keys, heads, kv_heads, width, index_heads, index_width
    dtypes, scale, index_scale = (
        (dtype_name(query), dtype_name(index_query)),
        *map(float, scales),
    )
    return LossSizes(*sizes, lists.shape[-1], block, *dtypes, scale, index_scale)


def lists_for(ops: ArrayOps, lists, sizes: LossSizes):
    """`lists` `[B, T, Hi, n]`, one an index head; -1 for what is no block of the keys."""
    xp = ops.xp
    found = xp.where((lists >= 0) & (lists < sizes.tiles), lists, -1)
    shape = sizes.B, sizes.T, sizes.index_heads, sizes.n
    return ops.contiguous(xp.broadcast_to(found, shape))


def loss(ops: ArrayOps, sizes: LossSizes, arrays, lists, position):
    """The loss `[B, T, Hi]`, and a `Kept`; `arrays`: query, key, lse, index_query, index_key."""
    about = ListSizes(sizes.tiles, sizes.entries, sizes.items, sizes.block, False)
    of = ops.derive(
        triton_backward.block_query_lists, lists, position, position * 0, sizes=about
    )
    attention, indexer, capability = arrays[:3], arrays[3:], ops.capability(arrays[0])
    kernel = index_descriptions.kl_targets(sizes, capability)
    masses, targets = ops.run(kernel, *attention, position, *of)
    kernel = index_descriptions.kl_entries(sizes, capability)
    maxima, sums, crosses = ops.run(kernel, *indexer, targets, position, *of)
    kernel = index_descriptions.kl_loss(sizes)
    found, *rest = ops.run(kernel, maxima, sums, masses, crosses, lists, position)
    return found, Kept(targets, *rest, *of)


def gradients(
    ops: ArrayOps, sizes: LossSizes, index_query, index_key, lists, position, kept: Kept, grad
):
    """Of index_query and index_key, from that of the loss, `[B, T, Hi]`."""
    grad = ops.to_float32(grad)
    targets, index_lse, mass, *of = kept
    kernel = index_descriptions.kl_gradients(sizes, ops.capability(index_query))
    arrays = index_query, index_key, targets, index_lse, mass, grad, position
    of_queries, of_keys = ops.run(kernel, *arrays, *of)
    kernel = index_descriptions.kl_query_sums(sizes)
    (dq,) = ops.run(kernel, of_queries, grad, lists, position)
    (dk,) = ops.run(index_descriptions.index_key_merge(sizes), of_keys, kept.ends)
    return dq, dk


def blocks(ops: ArrayOps, sizes: IndexSizes, query, key, position, offset: int | None):
    """The lists of an indexer, int32 `[B, T, Hi or 1, n]`.

    Args:
      position: int32 `[B, T]`, negative: padding.
      offset: of the first query in its row, where it is known.
    """
    capability = ops.capability(query)
    if sizes.on_chip:
        kernel = index_descriptions.index_blocks(sizes, capability)
        return ops.run(kernel, query, key, position)[0]
    most = max(SCORES_BYTES // (4 * sizes.B * sizes.lists * sizes.blocks), 1)
    chosen = sizes.num_selected, sizes.num_initial, sizes.num_local
    found = []
    for first in range(0, sizes.T, most):
        count = min(most, sizes.T - first)
        blocks = sizes.blocks
        if offset is not None:  # the own block of the last query
            tokens = sizes.pool * sizes.entry
            blocks = min(blocks, (offset + first + count - 1) // tokens + 1)
        kernel = index_descriptions.index_scores(sizes, capability, first, count, blocks)
        (scores,) = ops.run(kernel, query, key, position)
        at = ops.contiguous(position[:, first : first + count])
        about = sizes.B * count, sizes.lists, blocks, sizes.blocks, sizes.pool, sizes.entry
        best = paged_blocks_descriptions.Best(*about, *chosen)
        lists = triton_paged_blocks.best(ops, best, scores, at, at, at)
        found.append(lists.reshape(sizes.B, count, sizes.lists, sizes.num_selected))
    return found[0] if len(found) == 1 else ops.xp.concatenate(found, 1)
