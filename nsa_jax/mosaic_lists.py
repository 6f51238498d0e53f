"""Index structures of the selected branch, made on the device from the block indices.

| structure | read by | says |
|---|---|---|
| block list of a tile | `selected_attention` | which blocks its tokens chose, and who each |
| query list of a block | `dkv` | which queries chose the block |
| the same of tokens that leave their tile | `gathered_attention` | which queries, which slot |
| work items | `dkv`, `gathered_attention` | segments of query lists |

Pallas' interpreter has no warp shuffles and votes, which the kernels of these lists need: there
`sorted_lists` makes the same.
"""

from kernels_pallas.mosaic import block_query_lists as query_list_kernels
from kernels_pallas.mosaic import tile_block_lists as block_list_kernels
from kernels_pallas.mosaic import work_items as item_kernels
from kernels_pallas.mosaic.capability import interpret
from nsa_jax import sorted_lists
from nsa_jax.array_ops import ArrayOps, QueryLayout


def tile_block_lists(ops: ArrayOps, block_indices, layout: QueryLayout, spec):
    """`(starts, members, counts)` for `spec`, the `SelectedAttention` that reads them."""
    arrays = block_indices, layout.position, layout.key_start
    if spec.interpret:
        return sorted_lists.unions(ops, *arrays, spec)
    return ops.run(block_list_kernels.lists(spec), *arrays)


def block_query_lists(ops: ArrayOps, block_indices, layout: QueryLayout, spec):
    """`(edges, *lists)` for `spec`, a `BlockQueryLists`: where the list of each key tile
    begins, and the lists one after another.
    """
    arrays = block_indices, layout.position, layout.key_start
    if interpret.get():
        return sorted_lists.inverse(ops, *arrays, spec)
    edges = _edges(ops, arrays, spec)
    return edges, *ops.run(query_list_kernels.filled(spec), *arrays, edges)


def gathered_lists(ops: ArrayOps, block_indices, counts, layout: QueryLayout, spec):
    """`(items, entries)` that `gathered_attention.partial_outputs` reads.

    `spec`: a `WorkItems`; `counts`: of the tiles' block lists, which say who leaves its tile.
    """
    arrays = block_indices, layout.position, layout.key_start
    if interpret.get():
        edges, entries = sorted_lists.inverse(ops, *arrays, spec.inverse, counts)
    else:
        arrays = *arrays, counts
        edges = _edges(ops, arrays, spec.inverse)
        (entries,) = ops.run(query_list_kernels.slots(spec.inverse), *arrays, edges)
    return work_items(ops, edges, layout, spec)[0], entries


def work_items(ops: ArrayOps, edges, layout: QueryLayout, spec):
    """The items of the lists with these `edges`, and of each key tile its first partial sum and
    their count where `spec`, a `WorkItems`, has them.
    """
    if interpret.get():
        return sorted_lists.items(ops, edges, layout.position, spec)
    return ops.run(item_kernels.items(spec), edges, layout.position)


def _edges(ops, arrays, spec):
    (counts,) = ops.run(query_list_kernels.counted(spec), *arrays)
    return ops.xp.cumsum(counts, axis=0, dtype=ops.xp.int32)
