"""Items of the kernels that keep a tile of keys: which tile, and which queries pass by it."""

from kernels_pallas.mosaic.key_gradient import ITEM
from kernels_pallas.mosaic.operands import ROWS

SHARES = 2112  # items that fill a GPU several times over
LONGEST = 2048  # entries of a list that one item takes at most: each piece has its own sums
SHORT = 256  # entries that an item may always have
SHORTEST_WINDOW = 4096  # units: some 30 MB of queries and their gradients at 16 rows each


def longest_item(entries: int) -> int:
    """How many entries of a list one item takes, of so many in all lists."""
    return min(max(-(-entries // (SHARES // 2)), SHORT), LONGEST)


def interval(steps, bounds, base, pieces):
    """`items` of `key_gradient.partial_sums`, and `first` and `count` of `merged`."""
    first, last = bounds
    tokens, tiles, heads = base.unit.tokens, base.tiles, base.B * base.Hkv
    span = -(-base.units // pieces)
    xp, integers = steps.xp, steps.integers
    start = xp.broadcast_to(steps.numbers(first, tiles) * base.keys, (base.B, tiles))

    def token_after(bound, key, side):
        return integers(steps.search(bound, key, side))

    begin = token_after(last, start, "right") // tokens
    end = (token_after(first, start + (base.keys - 1), "right") + (tokens - 1)) // tokens
    end = xp.maximum(begin, end)
    whole_from = (token_after(last, start + base.keys, "left") + (tokens - 1)) // tokens
    whole_to = token_after(first, start, "right") // tokens

    # Items in the order [piece, head, tile], so that those which run together read the same
    # queries; their sums in the order [head, tile, piece].
    shape = (pieces, base.B, base.Hkv, tiles)
    piece = steps.numbers(first, pieces).reshape(-1, 1, 1, 1)
    row = steps.numbers(first, heads).reshape(1, base.B, base.Hkv, 1)
    tile = steps.numbers(first, tiles).reshape(1, 1, 1, -1)
    begin, end, whole_from, whole_to = (
        x.reshape(1, base.B, 1, tiles) for x in (begin, end, whole_from, whole_to)
    )
    lower, upper = xp.maximum(begin, piece * span), xp.minimum(end, (piece + 1) * span)
    columns = [
        xp.where(lower < upper, row, -1),
        tile * base.keys,
        lower,
        whole_from,
        whole_to,
        xp.maximum(lower, upper),
        (row * tiles + tile) * pieces + piece,
    ]
    items = _table(steps, [xp.broadcast_to(x, shape).reshape(-1) for x in columns])
    least = begin // span
    first_item = (row * tiles + tile) * pieces + least
    count = xp.where(begin < end, (end + (span - 1)) // span - least, 0)
    return items, *(xp.broadcast_to(x[0], shape[1:]) for x in (first_item, count))


def listed(steps, edges, where, inverse):
    """`items` of `key_gradient.partial_sums`, and `first` and `count` of `merged`.

    Items that run together should read the same queries, while these are in L2: they are a
    window of the tokens, each half of what is before the next one, which gives the tiles of a
    window lists of like lengths. Long lists are several items. They run in the order [head,
    window, tile, piece]; a tile's sums are [head, tile, window, piece].
    """
    xp, integers = steps.xp, steps.integers
    windows, tiles, rows = 1, inverse.tiles, inverse.rows
    if not inverse.packed and inverse.T == inverse.S:
        windows += max((inverse.units // SHORTEST_WINDOW).bit_length() - 1, 0)
    longest = longest_item(inverse.entries)

    def bounds():
        """Of `edges`, where each tile's windows begin, its end, and what sees it wholly."""
        last = steps.end(where)
        cuts = [inverse.units >> i for i in range(windows - 1, 0, -1)]
        cuts = [0, *(cut // inverse.chunk for cut in cuts), inverse.chunks]
        if inverse.clipped:
            whole = xp.zeros_like(last[:, :1]) + inverse.chunks
        else:  # from the first chunk whose tokens see the tile to its end
            tile_end = (steps.numbers(last, tiles) + 1) * ROWS
            whole = steps.search(last, xp.broadcast_to(tile_end, (inverse.B, tiles)), "left")
            tokens = inverse.chunk * inverse.tokens
            whole = integers(whole + (tokens - 1)) // tokens
        shape = inverse.B, inverse.Hkv, tiles
        columns = [steps.numbers(last, 1) + cut for cut in cuts] + [whole[:, None]]
        found = [xp.broadcast_to(integers(x), shape)[..., None] for x in columns]
        first = steps.numbers(last, rows * tiles) * inverse.chunks
        found = xp.concatenate(found, axis=-1) + first.reshape(*shape, 1)
        return [found.reshape(1, -1)]

    (at,) = steps.once(where, ("inverse", inverse, windows), bounds)
    found = steps.rows(edges[None], at).reshape(rows, tiles, windows + 2)
    begin, end, whole = found[..., :windows], found[..., 1:-1], found[..., -1:]
    count = (end - begin + (longest - 1)) // longest
    by_tile = xp.cumsum(count.reshape(-1), axis=0, dtype=xp.int32).reshape(count.shape)
    slot = by_tile - count
    places = slot[..., 0], by_tile[..., -1]
    first, past = (x.reshape(inverse.B, inverse.Hkv, tiles) for x in places)
    total = xp.moveaxis(count, 2, 1).reshape(1, -1)
    total = xp.cumsum(total, axis=1, dtype=xp.int32)
    # A tile that a window's tokens can see has at most one item there that is not full, and
    # no item is empty.
    items = rows * (tiles * min(windows, 2) + windows) + inverse.entries // longest
    items = min(items, inverse.entries)
    number = steps.numbers(edges, items)
    owner = integers(steps.search(total, number, "right"))[0]
    number, exists = number[0], owner < total.shape[1]
    owner = owner.clip(None, total.shape[1] - 1)
    columns = begin, end, xp.broadcast_to(whole, count.shape), slot, count
    table = xp.concatenate([x[..., None] for x in columns], axis=-1)
    table = xp.moveaxis(table, 2, 1).reshape(-1, len(columns))[owner]
    begin, end, whole, slot, count = (table[:, i] for i in range(len(columns)))
    piece = number - (total[0, owner] - count)
    begin = begin + piece * longest
    end = xp.minimum(begin + longest, end)
    begin, end = (xp.where(exists, x, 0) for x in (begin, end))
    whole = xp.minimum(xp.maximum(whole, begin), end)
    columns = [
        xp.where(exists, owner // (windows * tiles), -1),
        owner % tiles * ROWS,
        begin,
        whole,
        end,
        end,
        slot + piece,
    ]
    return _table(steps, columns), first, past - first


def _table(steps, columns):
    """`items` of `key_gradient.partial_sums`."""
    columns = [steps.integers(x)[:, None] for x in columns]
    missing = ITEM - len(columns)
    return steps.xp.concatenate([*columns, *columns[:1] * missing], axis=1)
