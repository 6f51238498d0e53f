"""Builds the index structures of the selected branch on the device, from the block indices.

| structure | read by | contents |
|---|---|---|
| block list of a tile | `selected` | the selected blocks, and the tokens that selected each block |
| query list of a block | `dkv` | the queries that selected the block |
| query list if dS is stored | `dkv` | the queries, and the block's slot in each selection |
| query list of a far block | `gathered` | the queries, and the block's slot in each selection |
| work items | `dkv`, `gathered` | segments of query lists |

Only gathered tiles have far blocks.
"""

import dataclasses
from typing import Any

from kernels_pallas.kernel import int32
from kernels_pallas.specs import block_query_lists as query_list_kernels
from kernels_pallas.specs import tile_block_lists as block_list_kernels
from kernels_pallas.specs import work_items as work_item_kernels
from kernels_pallas.specs.dkv import Dkv
from kernels_pallas.specs.tile import parts_of_block
from nsa_core.array_ops import ArrayOps, QueryLayout, derived


def cut(ops: ArrayOps, block_indices, block: int) -> tuple[Any, int]:
    """Convert the selection to blocks of the size over which kernels loop. Return the converted
    block indices, and the number of keys per converted block.
    """
    parts = parts_of_block(block, block_indices.shape[-1])
    if parts > 1:
        (block_indices,) = ops.derive(_parts_of_blocks, block_indices, parts=parts)
    return block_indices, block // parts


def _shape_of_parts(block_indices, *, parts):
    *tokens, entries = block_indices.shape
    return [int32(*tokens, entries * parts)]


@derived(_shape_of_parts)
def _parts_of_blocks(ops, block_indices, *, parts):
    named = (block_indices >= 0) & (
        block_indices < 2**31 // parts
    )  # the product would overflow for larger indices
    first = ops.xp.where(named, block_indices, -1)[..., None] * parts
    *tokens, entries = block_indices.shape
    return [(first + ops.arange(first, parts)).reshape(*tokens, entries * parts)]


def tile_block_lists(ops: ArrayOps, block_indices, layout: QueryLayout, spec):
    """Return the block lists of tiles, `(starts, members, counts)`, for `spec`, the
    `SelectedAttention` that reads them.
    """
    arrays = block_indices, layout.position, layout.key_start
    return ops.run(block_list_kernels.tile_block_lists(spec), *arrays)


def query_lists(ops: ArrayOps, fill, block_indices, layout: QueryLayout, spec, counts=None):
    """Return `(edges, *lists)` for `spec`, a `BlockQueryLists`. `edges` has the start of the
    entries of each key tile and chunk of tokens. `lists` are the concatenated lists, which the
    kernel `fill` of `specs.block_query_lists` writes. If `spec` has a `limit`, `counts` has the
    `BlockCounts` of the block lists of tiles.
    """
    starts = layout.key_start if layout.varlen is None else layout.varlen.tokens.place_start
    arrays = block_indices, layout.position, starts, *([] if counts is None else [counts])
    (entries,) = ops.run(query_list_kernels.count_entries(spec), *arrays)
    (edges,) = ops.derive(_running_sum, entries)
    return edges, *ops.run(fill(spec), *arrays, edges)


@derived(lambda counts: [int32(*counts.shape)])
def _running_sum(ops, counts):
    return [ops.xp.cumsum(counts, axis=0, dtype=ops.xp.int32)]


def list_keys(layout: QueryLayout, keys: int) -> tuple[int, bool]:
    """Return the fields `S` and `packed` of the `BlockQueryLists` for a layout with `keys` keys.
    If sequences have slots, tiles of slots are treated like the key tiles of a single sequence.
    """
    if layout.varlen is None:
        return keys, layout.packed
    return layout.varlen.capacity.places, False


def queries_of(layout: QueryLayout) -> dict[str, int]:
    """Return the fields `first_query` and `gap` of the `WorkItems` for query lists whose `S`
    and `packed` come from `list_keys`.
    """
    if layout.varlen is None:
        return {}
    capacity = layout.varlen.capacity
    return {"first_query": capacity.first_query, "gap": capacity.gap}


def merge_spec(spec: Dkv, layout: QueryLayout) -> Dkv:
    """Return the spec of the merge for the number of keys that `list_keys` returns.

    If sequences have slots, `dkv` merges tiles of slots, since a tile of slots belongs to one
    sequence. Without slots, the last keys of a tile of keys may belong to the next sequence.
    """
    if layout.varlen is None:
        return spec
    return dataclasses.replace(spec, S=layout.varlen.capacity.places)


def of_keys(layout: QueryLayout, found) -> list:
    """Convert arrays with an entry per slot to arrays with an entry per key. If sequences have
    no slots, return the arrays unchanged.
    """
    return [x if layout.varlen is None else layout.varlen.of_keys(x) for x in found]


def work_items(ops: ArrayOps, edges, layout: QueryLayout, spec):
    """Return the work items of query lists, given their `edges`.

    `spec` is a `WorkItems`. If `spec.halving` is true, also return the index of the first partial
    sum and the number of partial sums of each key tile.
    """
    if layout.varlen is None:
        of_tokens = layout.position
    else:
        of_tokens = layout.varlen.key_tiles.first
    return ops.run(work_item_kernels.work_items(spec), edges, of_tokens)


def words_of(ops: ArrayOps, layout: QueryLayout, count: int, width: int, *steps: int):
    """Return `count` arrays of `width` words, in the layout that kernels read. The array with index
    `i` begins with `i * step` for each of `steps`. The other words are 0.
    """
    static = {"count": count, "width": width, "steps": steps}
    return ops.derive(_chunk_words, layout.position, **static)


@derived(lambda like, *, count, width, steps: [int32(width)] * count)
def _chunk_words(ops, like, *, count, width, steps):
    index = ops.arange(like, count).reshape(-1, 1)
    words = ops.xp.concatenate([index * step for step in steps], 1)
    words = ops.extend(words, 1, width, 0)
    return [words[i] for i in range(count)]
