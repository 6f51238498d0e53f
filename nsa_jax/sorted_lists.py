"""The lists of `selected`, `key_gradient` and `gathered` in Pallas' interpreter, which can run
none of `mosaic/tile_block_lists.py`, `mosaic/block_query_lists.py` and `mosaic/work_items.py`.

Sorted, the blocks that several tokens of a tile or unit want stand side by side; sums along
the row give each its place in the list and one bit a token.
"""

from itertools import pairwise

from kernels_pallas.mosaic.dkv import ITEM, REACH
from kernels_pallas.mosaic.operands import ROWS
from nsa_jax.items import table

NOTHING = 2**31 - 1  # in place of a wanted block: none
TOKENS = 64  # of a tile at most


def unions(ops, indices, position, key_start, spec):
    """What `tile_block_lists.lists` gives, from the same arrays.

    `ops`: an `ArrayOps`; `spec`: the `SelectedAttention` that will read them.
    """
    xp, wanted = ops.xp, _wanted(ops, indices, position, key_start, spec)
    *lead, entries = wanted.shape
    key = ops.sort(wanted.reshape(-1, entries))
    there = key < NOTHING
    block = key // (2 * TOKENS)
    begin, end, count = runs(ops, block[:, 1:] != block[:, :-1], there)
    at = begin.clip(0, entries - 1)
    starts = xp.where(begin < end, ops.take_rows(block, at), 0)
    token = key // 2 % TOKENS
    members = []
    for word in range(spec.words):
        bit = xp.where(there & (token // 32 == word), xp.ones_like(key) << (token % 32), 0)
        members.append(run_sums(ops, bit, begin, end))
    every = ops.arange(key, entries) + 1
    # The first member has the earliest last key: it is cut if any is.
    cut = (ops.take_rows(key, at) % 2 == 1) & (every <= count)
    whole = xp.amin(xp.where(cut, every - 1, count), axis=1)
    counts = xp.concatenate([whole[:, None], count], axis=1)
    members = xp.concatenate([word[:, None] for word in members], axis=1)
    return (
        starts.reshape(*lead, entries),
        members.reshape(*lead, spec.words, entries),
        counts.reshape(*lead, 2),
    )


def _wanted(ops, indices, position, key_start, spec):
    """One int32 a wanted block, `(first key * TOKENS + token) * 2 + cut`, `NOTHING` in empty
    places: `[B, Hkv, tiles, entries]`. `cut`: the block ends after the token's last key. First
    keys up to 2**24.
    """
    xp, size, (batch, _, kv_heads, n) = ops.xp, spec.block, indices.shape
    tokens, tiles = spec.tile.tokens, spec.tiles
    position, start = (x[..., None, None] for x in (position, key_start))
    token = ops.arange(position, indices.shape[1])[..., None, None] % tokens
    cut = ops.to_int32(indices >= (position + 1) // size)
    wanted = ((start + indices * size) * TOKENS + token) * 2 + cut
    wanted = xp.where((indices >= 0) & (indices <= position // size), wanted, NOTHING)
    wanted = ops.extend(wanted, 1, tiles * tokens, NOTHING)
    wanted = xp.moveaxis(wanted.reshape(batch, tiles, tokens, kv_heads, n), 3, 1)
    wanted = wanted.reshape(batch, kv_heads, tiles, tokens * n)
    return ops.extend(wanted, 3, spec.entries, NOTHING)


def inverse(ops, indices, position, key_start, spec, counts=None):
    """What the `inverse` kernels give, from the same arrays: the running sum of the counts, and
    the lists. Where blocks end within tiles, a unit and a block may have several entries here.
    With `counts`, of `unions`: of those tokens alone that leave their tiles, and the list of
    `block_query_lists.slots`.

    `spec`: `kernels_pallas.mosaic.inverse.Inverse`, `rows * tiles * units` below 2**31.
    """
    xp, integers, size = ops.xp, ops.to_int32, spec.block
    tiles, units, tokens = spec.tiles, spec.units, spec.tokens
    begins, last = (x[..., None, None, None] for x in (key_start, key_start + position + 1))
    index = indices[..., None]
    begins = integers(begins + index * size)
    token, head, row, part = (
        ops.arange(indices, n).reshape([-1 if i == axis else 1 for i in range(5)])
        for n, axis in ((spec.T, 1), (spec.Hkv, 2), (spec.B, 0), (spec.tiles_of_block, 4))
    )
    tile = begins // ROWS + part
    there = (index >= 0) & (xp.maximum(begins, tile * ROWS) < xp.minimum(begins + size, last))
    if counts is not None:
        long = counts[..., :-1, 1:] > spec.limit
        leaves = xp.concatenate([xp.zeros_like(counts[..., :1, 1:]) > 0, long], axis=2)
        leaves = xp.broadcast_to(leaves, (*leaves.shape[:3], spec.tile))
        leaves = xp.moveaxis(leaves.reshape(spec.B, spec.Hkv, -1), 1, 2)[:, : spec.T]
        there = there & leaves[..., None, None]
    order = ((row * spec.Hkv + head) * tiles + tile) * units + token // tokens
    mark = (tile * 0 + 1 << token % tokens) + (begins - tile * ROWS + REACH) * 2**16
    order = xp.where(there, order, NOTHING)
    if counts is not None:
        slot = ops.arange(indices, spec.n).reshape(1, 1, 1, -1, 1)
        mark = (token * spec.Hkv + head) * spec.n + slot
    order, mark = (
        integers(xp.broadcast_to(x, order.shape)).reshape(1, -1) for x in (order, mark)
    )
    order, mark = ops.sort_pairs(order, mark)
    if counts is None:
        order, mark = _together(ops, order, mark)
    tile, chunk = (ops.arange(indices, n) for n in (spec.rows * tiles, spec.chunks))
    edges = (tile.reshape(-1, 1) * units + chunk * spec.chunk).reshape(1, -1)
    edges = integers(ops.searchsorted(order, edges, "left"))
    edges = xp.concatenate([edges[0], integers(xp.sum(order < NOTHING)).reshape(1)], axis=0)
    lists = [order % units, mark] if spec.marked else [order % units]
    lists = lists if counts is None else [mark]
    return edges, *(x.reshape(-1) for x in lists)


def items(ops, edges, position, spec):
    """What `pieces.items` gives, from the same arrays; `spec`: its `Pieces`."""
    xp, inverse = ops.xp, spec.inverse
    row, tile = (ops.arange(edges, n) for n in (inverse.rows, inverse.tiles))
    row = row.reshape(-1, 1)

    def edge(chunk):
        return edges[(row * inverse.tiles + tile) * inverse.chunks + chunk]

    ends = [edge(cut) for cut in spec.cuts]
    whole = ends[-1]
    if not inverse.clipped:
        # The first token that sees the tile to its end, and its chunk.
        first = ops.take_rows(position[:, :1].reshape(1, -1), row.reshape(1, -1) // inverse.Hkv)
        token = (tile * ROWS + (ROWS - 1) - first.reshape(-1, 1)).clip(0, None)
        tokens = inverse.chunk * inverse.tokens
        whole = edge(((token + (tokens - 1)) // tokens).clip(None, inverse.chunks))
    pairs = list(pairwise(ends))
    counts = [(end - begin + (spec.longest - 1)) // spec.longest for begin, end in pairs]
    total = sum(counts[1:], counts[0])
    place = first_sum = xp.cumsum(total, axis=1, dtype=xp.int32) - total + row * spec.items
    tables = []
    for (begin, end), count, room in zip(pairs, counts, spec.rooms, strict=True):
        lists = begin, whole, end, count, place
        tables.append(_items_of_section(ops, row, *lists, room, spec.longest))
        place = place + count
    found = xp.concatenate(tables, axis=1 if spec.windows else 0).reshape(-1, ITEM)
    if not spec.windows:
        return (found,)
    shape = inverse.B, inverse.Hkv, inverse.tiles
    return found, first_sum.reshape(shape), total.reshape(shape)


def _items_of_section(ops, row, begin, whole, end, count, place, room, longest):
    """`[rows, room, 8]`; of the lists `[rows, tiles]`: where they begin, are seen to the end of
    the tile, and end, how many items they are, and where the first one's sums stand.
    """
    xp, (rows, tiles) = ops.xp, begin.shape
    total = xp.cumsum(count, axis=1, dtype=xp.int32)
    slot = xp.broadcast_to(ops.arange(begin, room), (rows, room))
    owner = ops.to_int32(ops.searchsorted(total, slot, "right"))
    exists, owner = owner < tiles, owner.clip(None, tiles - 1)
    found = begin, whole, end, place, total - count
    begin, whole, end, place, before = (ops.take_rows(x, owner) for x in found)
    piece = slot - before
    start = begin + piece * longest
    stop = xp.minimum(start + longest, end)
    masked = xp.minimum(xp.maximum(whole, start), stop)
    row = xp.broadcast_to(row, (rows, room))
    columns = row, owner * ROWS, start, masked, stop, stop, place + piece
    return table(ops, [xp.where(exists, x, -int(i == 0)) for i, x in enumerate(columns)])


def _together(ops, order, mark):
    """Sorted entries with those of one unit and block put together: their bits added."""
    xp, entries = ops.xp, order.shape[1]
    there = order < NOTHING
    changes = (order[:, 1:] != order[:, :-1]) | (mark[:, 1:] >> 16 != mark[:, :-1] >> 16)
    begin, end, _ = runs(ops, changes, there)
    at = begin.clip(0, entries - 1)
    bits = ops.to_int32(xp.where(there, mark & (2**16 - 1), 0))
    mark = (ops.take_rows(mark, at) >> 16 << 16) + run_sums(ops, bits, begin, end)
    return xp.where(begin < end, ops.take_rows(order, at), NOTHING), mark


def runs(ops, changes, there):
    """Where the k-th run of like neighbours begins and ends in each row; how many there are.

    `changes` `[rows, entries - 1]`: whether an entry differs from the one before; `there`
    `[rows, entries]`: entries that count, in front. Runs past the last are empty, at the end.
    """
    xp, entries = ops.xp, there.shape[1]
    fresh = xp.concatenate([xp.ones_like(there[:, :1]), changes], axis=1) & there
    number = ops.arange(there, entries)
    count, size = (
        xp.cumsum(ops.to_int32(x), axis=1, dtype=xp.int32)[:, -1:] for x in (fresh, there)
    )
    begin = xp.minimum(ops.sort(xp.where(fresh, number, entries)), size)
    return begin, xp.concatenate([begin[:, 1:], size], axis=1), count


def run_sums(ops, bits, begin, end):
    """The int32 sum of each run. Bits of distinct tokens: int32 wraps around rightly."""
    xp = ops.xp
    total = xp.cumsum(bits, axis=1, dtype=xp.int32)
    total = xp.concatenate([xp.zeros_like(total[:, :1]), total], axis=1)
    return ops.take_rows(total, end) - ops.take_rows(total, begin)
