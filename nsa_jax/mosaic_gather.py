"""Selected attention of tokens whose neighbours chose other blocks, for either framework.

Where the block list of a tile is too long for `kernels_pallas.mosaic.selected_attention`, the
next tile leaves its tokens to `kernels_pallas.mosaic.gathered_attention`: neighbours are alike,
and no output depends on later tokens. The device decides, so the host never waits, and either
kernel passes over what is the other's.

The gathering kernel is key-stationary: its partial outputs, one for each selected block of a
token, are merged by another kernel. Tokens go in chunks, so that partials stay small.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from kernels_pallas.mosaic import gathered_attention, operands
from kernels_pallas.mosaic.gathered_attention import GatheredAttention
from kernels_pallas.mosaic.operands import ROWS
from kernels_pallas.specs.block_query_lists import BlockQueryLists
from kernels_pallas.specs.work_items import WorkItems, entries_of_item
from nsa_jax import key_bounds, mosaic_lists
from nsa_jax.array_ops import ArrayOps

# Blocks of a tile's list, for each that a token selects, beyond which gathering is faster.
LONG_UNION = 4
MOST_HEADS = 8  # of a group: with more, partial outputs are as much to move as blocks
MOST_BYTES = 2**30  # of partial outputs at a time; or an output's, or of one run of chunks
MOST_SLOTS = 31  # of a token: each has a bit
# The fields that the gathering kernel has in common with the one that leaves tokens to it.
SHARED_FIELDS = (
    *("B", "T", "S", "H", "Hkv", "D", "Dv", "n", "dtype", "scale", "gated", "gradient"),
    *("limit", "numbers_unit", "interpret"),
)


def limit(query, key, value, block_indices, config, packed: bool) -> int:
    """How many blocks the list of a tile may have (`SelectedAttention.limit`).

    0: any number, because none is too long, or because the gathering kernel cannot run.
    """
    group, n = query.shape[2] // key.shape[2], block_indices.shape[-1]
    most = int(LONG_UNION * n)
    if packed or config.select_block != ROWS or group > MOST_HEADS or n > MOST_SLOTS:
        return 0
    if math.prod(block_indices.shape) >= 2**31:  # the index of an entry is an int32
        return 0
    tile = operands.Tile(group, operands.slab_width(query.shape[-1], value.shape[-1]))
    longest = min(tile.tokens * n, -(-key.shape[1] // ROWS))
    if tile.slab != ROWS or query.shape[1] < tile.tokens or longest <= most:
        return 0
    return most


def attention(ops: ArrayOps, spec, arrays, selection, out, lse, gate):
    """`out` `[B, T, H, Dv]` and `lse` `[B, T, H]` with the tokens that `spec` left.

    Args:
      spec: the `SelectedAttention` that made `out` and `lse`.
      arrays: query, key and value.
      selection: block indices, `counts` of the tiles' block lists, and the layout.
      gate: float32 `[B, T, H]`, or None.
    """
    block_indices, counts, layout = selection
    lists, chunks = _chunks(ops, spec, *selection)
    extra = [lse] if gate is None else [lse, gate]
    for kernel, start, tokens in chunks:
        partial = ops.run(
            gathered_attention.partial_outputs(kernel),
            *(*arrays, *lists, key_bounds.causal_end(ops, layout), start),
        )
        merged = ops.run(
            gathered_attention.merged(kernel),
            *(*partial, counts, block_indices, layout.position, *extra, start, out[tokens]),
        )
        out = ops.write(out, tokens, merged[0])
        if not spec.added:
            lse = ops.write(lse, tokens, merged[1])
    return out, lse


def query_gradient(ops: ArrayOps, spec, arrays, selection, do, row_stats, dq):
    """`dq` `[B, T, H, D]` with the tokens that `spec` left.

    Args:
      do: the output's gradient `[B, T, H, Dv]`.
      row_stats: as `spec`'s kernel takes them.
      spec, arrays, selection: as in `attention`.
    """
    block_indices, counts, layout = selection
    lists, chunks = _chunks(ops, spec, *selection)
    for kernel, start, tokens in chunks:
        last = key_bounds.causal_end(ops, layout)
        partial = ops.run(
            gathered_attention.partial_outputs(kernel),
            *(*arrays, *lists, last, start, do, row_stats),
        )
        (merged,) = ops.run(
            gathered_attention.merged(kernel),
            *(*partial, counts, block_indices, layout.position, start, dq[tokens]),
        )
        dq = ops.write(dq, tokens, merged)
    return dq


class _Chunk(NamedTuple):
    """Tokens whose partial outputs exist at the same time."""

    kernel: GatheredAttention
    start: Any  # int32 [1, PLACE]: number of the chunk, its first token, its first tile
    tokens: tuple[slice, ...]  # of arrays `[B, T, ...]`


def _chunks(ops, spec, block_indices, counts, layout) -> tuple[Any, Iterator[_Chunk]]:
    """Items and entries of `gathered_attention.partial_outputs`, and the chunks."""
    tile = spec.tile.tokens
    sizes = spec.B, spec.T, spec.S, spec.Hkv, spec.n, ROWS, 1, False
    lists = BlockQueryLists(*sizes, tile=tile, limit=spec.limit, interpret=spec.interpret)
    step = math.lcm(lists.chunk, tile)
    output_bytes = spec.B * spec.H * spec.width * 2  # of a token
    size = max(MOST_BYTES, output_bytes * spec.T) // (output_bytes * spec.n * step)
    size = min(max(size, 1), -(-spec.T // step)) * step
    work = WorkItems(lists, size, entries_of_item(size * spec.B * spec.Hkv * spec.n))
    arrays = mosaic_lists.gathered_lists(ops, block_indices, counts, layout, work)

    def starts():
        number = ops.arange(block_indices, work.segments).reshape(-1, 1)
        columns = number, number * size, number * (size // tile)
        columns = ops.xp.concatenate(columns, axis=1)
        return [ops.extend(columns, 1, gathered_attention.PLACE, 0)]

    (start,) = ops.cached(layout, ("chunks", work.segments, size, tile), starts)
    fields = {name: getattr(spec, name) for name in SHARED_FIELDS}
    fields |= {"parts": work.segments, "items": lists.rows * work.items}

    def chunks():
        for i, first in enumerate(range(0, spec.T, size)):
            last = min(first + size, spec.T)
            kernel = GatheredAttention(**fields, tokens=last - first)
            yield _Chunk(kernel, start[i : i + 1], (slice(None), slice(first, last)))

    return arrays, chunks()
