"""The lists of `selected`, `key_gradient` and `gathered` in Pallas' interpreter, which can run
none of `mosaic/union.py`, `mosaic/inverse.py` and `mosaic/pieces.py`.

Sorted, the blocks that several tokens of a tile or unit want stand side by side; sums along
the row give each its place in the list and one bit a token.
"""

from kernels_pallas.mosaic.key_gradient import ITEM, REACH
from kernels_pallas.mosaic.operands import ROWS

NOTHING = 2**31 - 1  # in place of a wanted block: none
TOKENS = 64  # of a tile at most


def unions(steps, indices, position, key_start, spec):
    """What `union.lists` gives, from the same arrays.

    `steps`: `nsa_jax.tiled.Framework`; `spec`: the `selected.Selected` that will read them.
    """
    xp, wanted = steps.xp, _wanted(steps, indices, position, key_start, spec)
    *lead, entries = wanted.shape
    key = steps.sort(wanted.reshape(-1, entries))
    there = key < NOTHING
    block = key // (2 * TOKENS)
    begin, end, count = runs(steps, block[:, 1:] != block[:, :-1], there)
    at = begin.clip(0, entries - 1)
    starts = xp.where(begin < end, steps.rows(block, at), 0)
    token = key // 2 % TOKENS
    members = []
    for word in range(spec.words):
        bit = xp.where(there & (token // 32 == word), xp.ones_like(key) << (token % 32), 0)
        members.append(run_sums(steps, bit, begin, end))
    every = steps.numbers(key, entries) + 1
    # The first member has the earliest last key: it is cut if any is.
    cut = (steps.rows(key, at) % 2 == 1) & (every <= count)
    whole = xp.amin(xp.where(cut, every - 1, count), axis=1)
    counts = xp.concatenate([whole[:, None], count], axis=1)
    members = xp.concatenate([word[:, None] for word in members], axis=1)
    return (
        starts.reshape(*lead, entries),
        members.reshape(*lead, spec.words, entries),
        counts.reshape(*lead, 2),
    )


def _wanted(steps, indices, position, key_start, spec):
    """One int32 a wanted block, `(first key * TOKENS + token) * 2 + cut`, `NOTHING` in empty
    places: `[B, Hkv, tiles, entries]`. `cut`: the block ends after the token's last key. First
    keys up to 2**24.
    """
    xp, size, (batch, _, kv_heads, n) = steps.xp, spec.block, indices.shape
    tokens, tiles = spec.tile.tokens, spec.tiles
    position, start = (x[..., None, None] for x in (position, key_start))
    token = steps.numbers(position, indices.shape[1])[..., None, None] % tokens
    cut = steps.integers(indices >= (position + 1) // size)
    wanted = ((start + indices * size) * TOKENS + token) * 2 + cut
    wanted = xp.where((indices >= 0) & (indices <= position // size), wanted, NOTHING)
    wanted = steps.longer(wanted, 1, tiles * tokens, NOTHING)
    wanted = xp.moveaxis(wanted.reshape(batch, tiles, tokens, kv_heads, n), 3, 1)
    wanted = wanted.reshape(batch, kv_heads, tiles, tokens * n)
    return steps.longer(wanted, 3, spec.entries, NOTHING)


def inverse(steps, indices, position, key_start, spec, counts=None):
    """What the `inverse` kernels give, from the same arrays: the running sum of the counts, and
    the lists. Where blocks end within tiles, a unit and a block may have several entries here.
    With `counts`, of `unions`: of those tokens alone that leave their tiles, and the list of
    `inverse.slots`.

    `spec`: `kernels_pallas.mosaic.inverse.Inverse`, `rows * tiles * units` below 2**31.
    """
    xp, integers, size = steps.xp, steps.integers, spec.block
    tiles, units, tokens = spec.tiles, spec.units, spec.tokens
    begins, last = (x[..., None, None, None] for x in (key_start, key_start + position + 1))
    index = indices[..., None]
    begins = integers(begins + index * size)
    token, head, row, part = (
        steps.numbers(indices, n).reshape([-1 if i == axis else 1 for i in range(5)])
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
        slot = steps.numbers(indices, spec.n).reshape(1, 1, 1, -1, 1)
        mark = (token * spec.Hkv + head) * spec.n + slot
    order, mark = (
        integers(xp.broadcast_to(x, order.shape)).reshape(1, -1) for x in (order, mark)
    )
    order, mark = steps.sort_pairs(order, mark)
    if counts is None:
        order, mark = _together(steps, order, mark)
    tile, chunk = (steps.numbers(indices, n) for n in (spec.rows * tiles, spec.chunks))
    edges = (tile.reshape(-1, 1) * units + chunk * spec.chunk).reshape(1, -1)
    edges = integers(steps.search(order, edges, "left"))
    edges = xp.concatenate([edges[0], integers(xp.sum(order < NOTHING)).reshape(1)], axis=0)
    lists = [order % units, mark] if spec.marked else [order % units]
    lists = lists if counts is None else [mark]
    return edges, *(x.reshape(-1) for x in lists)


def items(steps, edges, position, spec):
    """What `pieces.items` gives, from the same arrays; `spec`: its `Pieces`."""
    xp, inverse = steps.xp, spec.inverse
    rows, tiles, chunks = inverse.rows, inverse.tiles, inverse.chunks
    part, row, tile = (
        steps.numbers(edges, n).reshape([-1 if i == axis else 1 for i in range(3)])
        for axis, n in enumerate((spec.parts, rows, tiles))
    )
    low = (part * spec.chunks).clip(None, chunks)
    high = (low + spec.chunks).clip(None, chunks)
    first = steps.rows(position[:, :1].reshape(1, -1), row.reshape(1, -1) // inverse.Hkv)
    token = (tile * ROWS + (ROWS - 1) - first.reshape(1, -1, 1)).clip(0, None)
    chunk = (token + (inverse.chunk - 1)) // inverse.chunk
    chunk = xp.minimum(xp.maximum(chunk, low), high)
    shape = spec.parts, rows, tiles

    def edge(chunk):
        at = xp.broadcast_to((row * tiles + tile) * chunks + chunk, shape)
        return edges[at]

    begin, whole, end = map(edge, (low, chunk, high))
    pieces = (end - begin + (spec.longest - 1)) // spec.longest
    total = xp.cumsum(pieces, axis=2, dtype=xp.int32).reshape(-1, tiles)
    slot = xp.broadcast_to(steps.numbers(edges, spec.items), (spec.parts * rows, spec.items))
    owner = steps.integers(steps.search(total, slot, "right"))
    exists, owner = owner < tiles, owner.clip(None, tiles - 1)
    begin, whole, end, count = (
        steps.rows(x.reshape(-1, tiles), owner) for x in (begin, whole, end, pieces)
    )
    piece = slot - (steps.rows(total, owner) - count)
    start = begin + piece * spec.longest
    stop = xp.minimum(start + spec.longest, end)
    masked = xp.minimum(xp.maximum(whole, start), stop)
    row = xp.broadcast_to(row.reshape(1, -1, 1), (spec.parts, rows, spec.items))
    columns = row.reshape(owner.shape), owner * ROWS, start, masked, stop
    columns = [xp.where(exists, steps.integers(x), -1)[..., None] for x in columns]
    table = xp.concatenate([*columns, *columns[:1] * (ITEM - len(columns))], axis=-1)
    return table.reshape(spec.parts, rows, spec.items, ITEM)


def _together(steps, order, mark):
    """Sorted entries with those of one unit and block put together: their bits added."""
    xp, entries = steps.xp, order.shape[1]
    there = order < NOTHING
    changes = (order[:, 1:] != order[:, :-1]) | (mark[:, 1:] >> 16 != mark[:, :-1] >> 16)
    begin, end, _ = runs(steps, changes, there)
    at = begin.clip(0, entries - 1)
    bits = steps.integers(xp.where(there, mark & (2**16 - 1), 0))
    mark = (steps.rows(mark, at) >> 16 << 16) + run_sums(steps, bits, begin, end)
    return xp.where(begin < end, steps.rows(order, at), NOTHING), mark


def runs(steps, changes, there):
    """Where the k-th run of like neighbours begins and ends in each row; how many there are.

    `changes` `[rows, entries - 1]`: whether an entry differs from the one before; `there`
    `[rows, entries]`: entries that count, in front. Runs past the last are empty, at the end.
    """
    xp, entries = steps.xp, there.shape[1]
    fresh = xp.concatenate([xp.ones_like(there[:, :1]), changes], axis=1) & there
    number = steps.numbers(there, entries)
    count, size = (
        xp.cumsum(steps.integers(x), axis=1, dtype=xp.int32)[:, -1:] for x in (fresh, there)
    )
    begin = xp.minimum(steps.sort(xp.where(fresh, number, entries)), size)
    return begin, xp.concatenate([begin[:, 1:], size], axis=1), count


def run_sums(steps, bits, begin, end):
    """The int32 sum of each run. Bits of distinct tokens: int32 wraps around rightly."""
    xp = steps.xp
    total = xp.cumsum(bits, axis=1, dtype=xp.int32)
    total = xp.concatenate([xp.zeros_like(total[:, :1]), total], axis=1)
    return steps.rows(total, end) - steps.rows(total, begin)
