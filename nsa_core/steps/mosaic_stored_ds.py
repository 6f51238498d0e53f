"""Computes the gradients of the selected branch with stored dS, for either framework.

The kernel `dkv` computes dS for every token and each block that the token selected, and writes
dS to memory. With stored dS, the kernel of dq computes one product per block instead of three,
and needs neither V nor dO nor exponentials.

From the entries of a block, `dkv` computes dS of some rows of `[B, Hkv]`, and partials of dk and
dv. The kernel `merge` adds the partials. From the block list of a tile and dS, `stored_ds_dq`
computes dq of the same rows, and adds dq in place.

dS of all rows of `[B, Hkv]` needs several times the memory of an output, so these rows are
processed in chunks.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from kernels_pallas.specs import dkv, stored_ds, work_items
from kernels_pallas.specs.attention import AttentionSizes
from kernels_pallas.specs.block_query_lists import BlockQueryLists, fill_gather_lists
from kernels_pallas.specs.dkv import Dkv
from kernels_pallas.specs.stored_ds import StoredDsQuery
from kernels_pallas.specs.tile import ROWS
from kernels_pallas.specs.work_items import GPU_ITEMS
from nsa_core.array_ops import ArrayOps, QueryLayout
from nsa_core.steps import mosaic_lists
from nsa_core.steps.params import LaterDq, Qkv

# maximum bytes of a dS chunk with several rows of [B, Hkv]; a chunk of one row may have more
CHUNK_BYTES = 2**31
MAX_CHUNK_BYTES = 10 * 2**30  # if a chunk would have more bytes than this, dS is not stored
MAX_ENTRIES = 512  # entries per work item; a chunk waits for its last work item
MAX_OUTPUTS = (
    4  # dS of a row of [B, Hkv] is stored if it has at most 4 times the size of an output
)


def serves(ops: ArrayOps, base: Dkv, selection_entries: int, block: int, packed: bool) -> bool:
    """Return whether dS is stored. For very long sequences dS is not stored, since dS would be
    too large or the number of entries would exceed int32.

    Args:
      base: The spec `Dkv` of the selected branch.
      selection_entries: Number of blocks that a token selects.
      block: The number of keys per block.
      packed: whether rows are packed. In packed rows, blocks may begin anywhere in a tile of
        keys.
    """
    rows = base.query_tile.rows
    whole_tokens = base.query_tile.tokens == 1 and rows % stored_ds.HEADS == 0
    if (
        not whole_tokens
        or block != ROWS
        or packed
        or selection_entries > stored_ds.MAX_SELECTION_ENTRIES
    ):
        return False
    ds, output = (
        selection_entries * ROWS * base.query_tile.rows,
        base.H * base.Dv,
    )  # elements per token
    entries = base.B * base.T * base.Hkv * selection_entries
    if ds > MAX_OUTPUTS * output or entries >= 2**31:
        return False
    of_query = _query_spec(base, selection_entries)
    return _max_rows(ops, of_query) * _row_bytes(of_query) <= MAX_CHUNK_BYTES


def gradients(
    ops: ArrayOps,
    base: Dkv,
    arrays: tuple,
    block_indices,
    do,
    stats,
    layout: QueryLayout,
    added,
    block_lists,
    by_places: bool = False,
) -> Qkv:
    """Return the gradients of query, key and value. dq is the sum with `added`, and may be
    written to the memory of `added`.

    Args:
      base: as in the function `serves`.
      arrays: query, key and value.
      stats: The result of `row_stats` for `base`.
      block_lists: The block lists of the tiles of the forward pass, or None.
      added: An array, or a `LaterDq`.
      by_places: as in `mosaic_backward.selected`.
    """
    query, key, _ = arrays
    selection_entries = block_indices.shape[-1]
    keys, _ = mosaic_lists.list_keys(layout, base.S)
    lists = BlockQueryLists(
        base.B,
        base.T,
        keys,
        base.Hkv,
        selection_entries,
        ROWS,
        1,
        False,
        interpret=base.interpret,
    )
    given = fill_gather_lists, block_indices, layout, lists
    edges, entries = mosaic_lists.query_lists(ops, *given)
    queries = mosaic_lists.queries_of(layout)
    work = work_items.dkv_work_items(lists, MAX_ENTRIES, GPU_ITEMS, **queries)
    table, *sums = mosaic_lists.work_items(ops, edges, layout, work)
    # The longest work items run first. Items that begin together then also end together, and
    # the items after them begin together at the same position of the sequence. Concurrent items
    # therefore share more reads in L2. Each item has its own partial sum, so the order of items
    # changes no result.
    (table,) = ops.run(work_items.ordered_work_items(work), table)
    whole = dataclasses.replace(
        base,
        work_items=lists.rows * work.items,
        list_entries=lists.entries,
        selection_entries=selection_entries,
    )
    of_query = _query_spec(base, selection_entries, layout.packed)
    if block_lists is None or base.query_tile.used < base.query_tile.rows:
        block_lists = mosaic_lists.tile_block_lists(ops, block_indices, layout, of_query)
    starts, _, counts = block_lists
    max_rows = _max_rows(ops, of_query)
    if added is None and max_rows < lists.rows:
        added = ops.zeros(query, tuple(query.shape))
    # dq of the other branches for the next chunk runs concurrently with dkv and dq of the
    # current chunk. dq of the other branches is bound by the tensor cores. dkv and dq of the
    # selected branch are bound by memory.
    later = added if isinstance(added, LaterDq) else None
    if later is not None:
        added = later.rows(ops, 0, min(max_rows, lists.rows))
    dq, merged, running = added, {}, None
    chunks = _chunks(ops, layout, lists.rows, max_rows, work.items)
    for i, (ds_chunk, first, end) in enumerate(chunks):
        rows, items = end - first, (slice(first * work.items, end * work.items),)
        if i:  # otherwise XLA would keep dS of all chunks at once
            ds_chunk = ops.after(ds_chunk, dq)
        counts_of = {"work_items": rows * work.items, "stored_rows": rows}
        part = dataclasses.replace(whole, **counts_of)
        before = running
        if later is not None and end < lists.rows:
            more = end, min(end + max_rows, lists.rows)
            dq, running = later.beside(ops, *more, dq)
        inputs = *arrays, do, stats, ops.part(table, items), entries, ds_chunk
        found = _dkv(ops, part, inputs)
        of_query = dataclasses.replace(of_query, stored_rows=rows, added=dq is not None)
        places = [layout.position, *([layout.key_start] if layout.packed else [])]
        arrays_of_dq = key, starts, counts, block_indices, *places, ds_chunk
        extra = [] if dq is None else [dq]
        if before is not None:
            ops.join(before)
        # No name may refer to dS, since dS of two chunks would then exist at once.
        (dq,) = ops.run(stored_ds.dq(of_query), *arrays_of_dq, found.pop("ds"), *extra)
        if rows == lists.rows:
            merged = _merged(ops, part, found, sums, layout)
        else:  # merge now, since partial sums of all chunks would otherwise exist at once
            merged = _merged_in_place(ops, part, found, (*sums, ds_chunk), layout, key, merged)
    gradients = [merged[name] for name in whole.widths]
    return Qkv(dq, *(gradients if by_places else mosaic_lists.of_keys(layout, gradients)))


def _dkv(ops, spec, arrays) -> dict[str, Any]:
    """Return the partial sums of dk and dv by name, and dS."""
    found: dict[str, Any] = {}
    for part in spec.passes:
        outputs = ops.run(dkv.partials(part), *arrays)
        found |= zip((*part.widths, "ds"), outputs, strict=False)
    return found


def _query_spec(base: Dkv, selection_entries: int, packed: bool = False) -> StoredDsQuery:
    """Return the spec of the kernel that computes dq of all rows at once."""
    sizes = {x.name: getattr(base, x.name) for x in dataclasses.fields(AttentionSizes)}
    return StoredDsQuery(
        **sizes, stored_rows=base.B * base.Hkv, n=selection_entries, packed=packed
    )


def _max_rows(ops: ArrayOps, spec: StoredDsQuery) -> int:
    """Return the maximum number of rows of `[B, Hkv]` per chunk. If dq is not added in place,
    all rows are in one chunk.
    """
    if not ops.writes_in_place(stored_ds.dq(dataclasses.replace(spec, added=True))):
        return spec.stored_rows
    most, row = CHUNK_BYTES, _row_bytes(spec)
    if ops.has_streams and spec.stored_rows * row > most:
        most //= (
            2  # half as many rows are as fast if dq of the other branches runs concurrently
        )
    return min(max(most // row, 1), spec.stored_rows)


def _row_bytes(spec: StoredDsQuery) -> int:
    """Return the number of bytes of dS for one row of `[B, Hkv]`."""
    return stored_ds.array(1, spec.T, spec.n, spec.query_tile.rows, spec.dtype).size * 2


def _chunks(
    ops, layout, rows: int, max_rows: int, items: int
) -> Iterator[tuple[Any, int, int]]:
    """Return the chunks of dS, of at most `max_rows` rows each. A chunk is given by its first
    row and its end. `items` is the number of work items per row. Each work item writes a
    partial.
    """
    count = -(-rows // max_rows)
    steps = max_rows, max_rows * items
    words = mosaic_lists.words_of(ops, layout, count, stored_ds.CHUNK_WORDS, *steps)
    for i in range(count):
        yield words[i], i * max_rows, min((i + 1) * max_rows, rows)


def _merged(ops, spec: Dkv, partials, sums, layout) -> dict[str, Any]:
    """Return dk and dv by name, merged from the partial sums of all rows. The memory of the
    partial sums is released afterwards.
    """
    spec = dataclasses.replace(spec, selection_entries=0, stored_rows=0)
    merged = {}
    for part in mosaic_lists.merge_spec(spec, layout).passes:
        arrays = [partials.pop(name) for name in part.widths]
        merged |= zip(part.widths, ops.run(dkv.merge(part), *arrays, *sums), strict=True)
    return merged


def _merged_in_place(ops, spec: Dkv, partials, arrays, layout, key, before) -> dict[str, Any]:
    """Return dk and dv like `_merged`, but merge only the partial sums of the rows in a chunk.

    All other rows of dk and dv have the values of `before`.

    Args:
      arrays: Further inputs of the kernel.
      before: The result of the previous chunk. `before` is empty for the first chunk.
    """
    merged = {}
    for part in mosaic_lists.merge_spec(spec, layout).gradients:
        (name,) = part.widths
        (rows,) = dkv.merge(part).outputs
        array = before.get(name)
        if array is None:
            array = ops.zeros(key, rows.shape)
        part = dataclasses.replace(part, selection_entries=0)
        found = ops.run(dkv.merge(part), partials.pop(name), *arrays, array)
        (merged[name],) = found
    return merged
