"""Selected attention of tokens whose neighbours chose other blocks, for either framework.

Where the union of the blocks of a tile's tokens is too long for
`kernels_pallas.mosaic.selected`, the next tile leaves its tokens to
`kernels_pallas.mosaic.gathered`: neighbours are alike, and no output depends on later tokens.
The device decides, so the host never waits, and either kernel passes over what is the other's.
"""

import math
from typing import Any, NamedTuple

from kernels_pallas.mosaic import gathered_attention, operands
from kernels_pallas.mosaic.gathered_attention import GatheredAttention
from kernels_pallas.mosaic.operands import ROWS
from kernels_pallas.specs.block_query_lists import BlockQueryLists
from kernels_pallas.specs.work_items import WorkItems, entries_of_item

# Blocks of a union, for each that a token selects, beyond which gathering takes less time.
LONG_UNION = 4
MOST_HEADS = 8  # of a group: with more, partial outputs are as much to move as blocks
MOST_BYTES = 2**30  # of partial outputs at a time; or an output's, or of one run of chunks
MOST_SLOTS = 31  # of a token: each has a bit


def limit(query, key, value, indices, config, packed: bool) -> int:
    """How many blocks the union of a tile may have (`selected_attention.Selected.limit`); 0: any number,
    where none is too long, or the other kernels cannot run.
    """
    group, n = query.shape[2] // key.shape[2], indices.shape[-1]
    widths = query.shape[-1], value.shape[-1]
    found = int(LONG_UNION * n)
    if packed or config.select_block != ROWS or group > MOST_HEADS or n > MOST_SLOTS:
        return 0
    if math.prod(indices.shape) >= 2**31:  # the place of an entry is an int32
        return 0
    tile = operands.Tile(group, operands.slab_width(*widths))
    longest = min(tile.tokens * n, -(-key.shape[1] // ROWS))
    if tile.slab != ROWS or query.shape[1] < tile.tokens or longest <= found:
        return 0
    return found


def attention(steps, spec, arrays, selection, out, lse, gate):
    """`out` and `lse` (`[B, T, H]`) of `spec`, a `selected_attention.Selected`, with the tokens that it
    left.

    `arrays`: query, key and value; `selection`: indices, `counts` of the tiles' lists, and
    where the queries stand; `gate`: float32 `[B, T, H]`, or None.
    """
    indices, counts, where = selection
    lists, parts = _parts(steps, spec, *selection)
    extra = [lse] if gate is None else [lse, gate]
    for part in parts:
        partial = gathered_attention.partial_outputs(part.kernel)
        partial = steps.run(partial, *arrays, *lists, steps.end(where), part.place)
        rest = counts, indices, where.position, *extra, part.place, out[part.tokens]
        mine = steps.run(gathered_attention.merged(part.kernel), *partial, *rest)
        out = steps.put(out, part.tokens, mine[0])
        if not spec.added:
            lse = steps.put(lse, part.tokens, mine[1])
    return out, lse


def query_gradient(steps, spec, arrays, selection, grad, numbers, total):
    """`total`, the gradient of `spec`'s query, with the tokens that it left.

    `grad`: of the output; `numbers`: as `kernels_pallas.mosaic.selected` takes them; the rest
    as in `attention`.
    """
    indices, counts, where = selection
    lists, parts = _parts(steps, spec, *selection)
    for part in parts:
        rest = steps.end(where), part.place, grad, numbers
        partial = steps.run(
            gathered_attention.partial_outputs(part.kernel), *arrays, *lists, *rest
        )
        rest = counts, indices, where.position, part.place, total[part.tokens]
        (mine,) = steps.run(gathered_attention.merged(part.kernel), *partial, *rest)
        total = steps.put(total, part.tokens, mine)
    return total


class _Part(NamedTuple):
    """Some tokens, whose partial outputs there are at a time."""

    kernel: GatheredAttention
    place: Any
    tokens: tuple[slice, ...]  # of arrays `[B, T, ...]`


def _parts(steps, spec, indices, counts, where):
    """Items and entries of `gathered_attention.partial_outputs`, and the parts."""
    tokens = spec.tile.tokens
    sizes = spec.B, spec.T, spec.S, spec.Hkv, spec.n, ROWS, 1, False
    query_lists = BlockQueryLists(
        *sizes, tile=tokens, limit=spec.limit, interpret=spec.interpret
    )
    step = math.lcm(query_lists.chunk, tokens)
    output = spec.B * spec.H * spec.width * 2  # bytes a token
    size = max(MOST_BYTES, output * spec.T) // (output * spec.n * step)
    size = min(max(size, 1), -(-spec.T // step)) * step
    longest = entries_of_item(size * spec.B * spec.Hkv * spec.n)
    items = WorkItems(query_lists, size, longest)
    lists = steps.gather_lists(indices, counts, where, items)

    def places():
        part = steps.numbers(indices, items.segments).reshape(-1, 1)
        columns = part, part * size, part * (size // tokens)
        return [
            steps.longer(steps.xp.concatenate(columns, axis=1), 1, gathered_attention.PLACE, 0)
        ]

    (places_,) = steps.once(where, ("parts", items.segments, size, tokens), places)
    fields = ("B", "T", "S", "H", "Hkv", "D", "Dv", "n", "dtype", "scale", "gated", "gradient")
    fields += ("limit", "numbers_unit", "interpret")
    parts = []
    for i, first in enumerate(range(0, spec.T, size)):
        last = min(first + size, spec.T)
        kernel = GatheredAttention(
            **{name: getattr(spec, name) for name in fields},
            tokens=last - first,
            parts=items.segments,
            items=query_lists.rows * items.items,
        )
        parts.append(_Part(kernel, places_[i : i + 1], (slice(None), slice(first, last))))
    return lists, parts
