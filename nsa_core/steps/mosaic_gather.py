"""Computes attention to selected blocks for tiles whose tokens selected mostly different blocks.

The module supports both frameworks.

A tile of queries usually loops over all blocks of the tile's block list. For a gathered tile, the
loop has only the near blocks (`kernels_pallas.specs.selected`): block 0 and the blocks from b - 1
on, where b is the block of the tile's first token. The gathering kernel
(`kernels_pallas.specs.gathered`) processes the other blocks of a gathered tile, which are called
far blocks. A tile is gathered if the block list of the previous tile is long, since adjacent tiles
select similar blocks. The tile's own list cannot decide, since no output may depend on later
tokens. The device decides whether a tile is gathered, and the host never waits for the decision.

The gathering kernel is key-stationary. For each token, the gathering kernel writes one partial
output per far block. Another kernel merges the partial outputs of a token with the output of
the loop. Tokens are split into segments to limit the number of partial outputs.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from kernels_pallas.kernel import int32
from kernels_pallas.specs import gathered
from kernels_pallas.specs.block_query_lists import BlockQueryLists, fill_gather_lists
from kernels_pallas.specs.gathered import GatheredAttention
from kernels_pallas.specs.tile import ROWS, Tile, cdiv, parts_of_block, slab_width
from kernels_pallas.specs.work_items import WorkItems, entries_of_item
from nsa_core.array_ops import ArrayOps, Places, derived
from nsa_core.steps import mosaic_lists

# Gathering is faster if the block list of a tile is longer than the number of selected blocks
# per token times this factor.
LONG_LIST = 4
# Maximum number of heads per group for blocks of 64 keys. With more heads, partial outputs cost
# as much traffic as gathering saves.
MAX_HEADS = 8
# Bytes of partial outputs that exist at a time. The actual number is larger if half an output,
# or one run of list chunks, needs more.
MAX_BYTES = 2**30
MAX_SELECTION_ENTRIES = 31  # entries per token, each with a bit of an int32
# The fields that the gathering kernel shares with the kernel that skips far blocks.
SHARED_FIELDS = (
    *("B", "T", "S", "H", "Hkv", "D", "Dv", "dtype", "scale", "parts"),
    *("gather_limit", "stats_tile", "interpret"),
)


def max_heads(block: int) -> int:
    """Return the maximum number of heads per group for which blocks of `block` keys may be
    gathered.
    """
    return MAX_HEADS * block // ROWS


def gather_limit(query, key, value, block_indices, config, packed: bool) -> int:
    """Return the length of a block list above which the next tile is gathered
    (`SelectedAttention.gather_limit`).

    The result 0 means that no tile is gathered, since no list is long enough or the gathering
    kernel cannot run.
    """
    group, n = query.shape[2] // key.shape[2], block_indices.shape[-1]
    block, most = config.select_block, int(LONG_LIST * n)
    # A block of 128 keys has one partial output like a block of 64 keys. In the loop, a block
    # of 128 keys has twice the bytes.
    parts = parts_of_block(block, n)
    if packed or block != parts * ROWS or group > max_heads(block) or n > MAX_SELECTION_ENTRIES:
        return 0
    if math.prod(block_indices.shape) >= 2**31:  # the index of an entry is an int32
        return 0
    tile = Tile(group, slab_width(query.shape[-1], value.shape[-1]))
    longest = min(tile.tokens * n * parts, -(-key.shape[1] // ROWS))
    if tile.slab != ROWS or query.shape[1] < tile.tokens or longest <= most:
        return 0
    return most


def attention(ops: ArrayOps, spec, arrays, selection, walked, lse, gate, added):
    """Return `added + gate * O` `[B, T, H, Dv]`, where O is the output over near and far blocks.
    Also return the log-sum-exp of O `[B, T, H]`, or None if `added` is given.

    Args:
      spec: The `SelectedAttention` whose kernel computed the output and `lse` without far
        blocks.
      arrays: query, key and value.
      selection: block indices, `counts` of the tiles' block lists, and the layout.
      gate: float32 `[B, T, H]`, or None for 1.
      added: `[B, T, H, Dv]`, or None for 0.
    """
    block_indices, counts, layout = selection = _in_parts(ops, spec, *selection)
    lists, segments = _segments(ops, spec, spec.Dv, *selection)
    gates = [] if gate is None else [gate]
    out = walked if added is None else added
    merges = {"gated": gate is not None, "added": added is not None}
    alone = not any(merges.values())
    for kernel, segment, tokens in segments:
        partials = ops.run(gathered.partials(kernel), *arrays, *lists, segment)
        # The rows of a segment come from the current `out`. The initial array of `out` no
        # longer exists after the first segment.
        rows = [ops.part(x, tokens) for x in ([out] if added is None else [walked, out])]
        merging = dataclasses.replace(kernel, **merges)
        merge = _staying(ops, gathered.merge, merging) if alone else gathered.merge(merging)
        items = lists[:1] if merge.spec.stays else ()
        given = *items, counts, block_indices, layout.position, *gates, segment, *rows
        merged = ops.run(merge, *partials, *given, ops.part(lse, tokens))
        out = ops.write(out, tokens, merged[0])
        if added is None:
            lse = ops.write(lse, tokens, merged[1])
        # otherwise the partial outputs of two segments would exist at once
        del partials, merged
    return out, lse if added is None else None


def query_gradient(ops: ArrayOps, spec, arrays, selection, do, row_stats, dq):
    """Return `dq` `[B, T, H, D]` with the contribution of far blocks added. The kernel of
    `spec` returns `dq` without the contribution of far blocks.

    Args:
      do: the output's gradient `[B, T, H, Dv]`.
      row_stats: The row statistics of `spec`'s kernel.
      spec, arrays, selection: as in the function `attention`.
    """
    block_indices, counts, layout = selection = _in_parts(ops, spec, *selection)
    lists, segments = _segments(ops, spec, spec.D, *selection)
    for kernel, segment, tokens in segments:
        inputs = *arrays, *lists, segment, do, row_stats
        partials = ops.run(gathered.partial_dq(kernel), *inputs)
        merge = _staying(ops, gathered.merge_dq, kernel)
        items = lists[:1] if merge.spec.stays else ()
        rows = *items, counts, block_indices, layout.position, segment, ops.part(dq, tokens)
        (merged,) = ops.run(merge, *partials, *rows)
        dq = ops.write(dq, tokens, merged)
        del partials, merged
    return dq


def _staying(ops, merge, spec):
    """Return the kernel `merge` for an output that already has contents. The returned kernel does
    not change rows without gathered blocks.
    """
    stays = ops.parts_stay and ops.writes_in_place(merge(spec))
    return merge(dataclasses.replace(spec, stays=stays))


def _in_parts(ops, spec, block_indices, counts, layout):
    if spec.parts == 1:
        return block_indices, counts, layout
    (position,) = ops.derive(_positions_in_parts, layout.position, parts=spec.parts)
    # The loop splits a block into parts, and the gathering kernel processes whole blocks.
    # Positions are counted in units of `parts` keys. A key tile of 64 such units is then a
    # whole block.
    return block_indices, counts, Places(position, layout.key_start)


@derived(lambda position, *, parts: [int32(*position.shape)])
def _positions_in_parts(ops, position, *, parts):
    return [ops.to_int32(position // parts)]


class _Segment(NamedTuple):
    """A segment of tokens.

    The partial outputs of all tokens of a segment exist at the same time.
    """

    kernel: GatheredAttention
    segment: Any  # int32 [SEGMENT_WORDS]: index, first token and first tile of the segment
    tokens: tuple[slice, ...]  # indices into arrays `[B, T, ...]`


def _segments(
    ops, spec, width: int, block_indices, counts, layout
) -> tuple[Any, Iterator[_Segment]]:
    """Return the work items and entries of `gathered.partials`, and the segments. `width` is the
    width of a partial output.
    """
    tile, n = spec.tile.tokens, spec.n // spec.parts
    sizes = spec.B, spec.T, cdiv(spec.S, spec.parts), spec.Hkv, n, ROWS, 1, False
    lists = BlockQueryLists(
        *sizes, tile=tile, limit=spec.gather_limit, interpret=spec.interpret
    )
    step = math.lcm(lists.chunk, tile)
    output_bytes = spec.B * spec.H * width * 2  # per token
    size = max(MAX_BYTES, output_bytes * spec.T // 2) // (output_bytes * n * step)
    size = min(max(size, 1), -(-spec.T // step)) * step
    work = WorkItems(lists, size, entries_of_item(size * spec.B * spec.Hkv * n))
    given = fill_gather_lists, block_indices, layout, lists, counts
    edges, entries = mosaic_lists.query_lists(ops, *given)
    arrays = mosaic_lists.work_items(ops, edges, layout, work)[0], entries
    steps = gathered.SEGMENT_WORDS, 1, size, size // tile
    words = mosaic_lists.words_of(ops, layout, work.segments, *steps)
    fields = {name: getattr(spec, name) for name in SHARED_FIELDS}
    fields |= {"segments": work.segments, "items": lists.rows * work.items}

    def segments():
        for i, first in enumerate(range(0, spec.T, size)):
            last = min(first + size, spec.T)
            kernel = GatheredAttention(**fields, n=n, segment_tokens=last - first)
            yield _Segment(kernel, words[i], (slice(None), slice(first, last)))

    return arrays, segments()
