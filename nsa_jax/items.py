"""Items of the kernels that keep a tile of keys: which tile, and which queries pass by it."""

from kernels_pallas.mosaic.dkv import ITEM
from kernels_pallas.mosaic.work_items import WorkItems

SHARES = 2112  # items that fill a GPU several times over
LONGEST = 2048  # entries of a list that one item takes at most: each piece has its own sums
SHORT = 256  # entries that an item may always have
SHORTEST_WINDOW = 4096  # units: some 30 MB of queries and their gradients at 16 rows each


def longest_item(entries: int) -> int:
    """How many entries of a list one item takes, of so many in all lists."""
    return min(max(-(-entries // (SHARES // 2)), SHORT), LONGEST)


def interval(steps, bounds, base, pieces):
    """`items` of `dkv.partials`, and `first` and `count` of `dkv.merge`."""
    first, last = bounds
    tokens, tiles, heads = base.query_tile.tokens, base.key_tiles, base.B * base.Hkv
    span = -(-base.query_tiles // pieces)
    xp, integers = steps.xp, steps.integers
    start = xp.broadcast_to(steps.numbers(first, tiles) * base.tile_keys, (base.B, tiles))

    def token_after(bound, key, side):
        return integers(steps.search(bound, key, side))

    begin = token_after(last, start, "right") // tokens
    end = (token_after(first, start + (base.tile_keys - 1), "right") + (tokens - 1)) // tokens
    end = xp.maximum(begin, end)
    whole_from = (token_after(last, start + base.tile_keys, "left") + (tokens - 1)) // tokens
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
        tile * base.tile_keys,
        lower,
        whole_from,
        whole_to,
        xp.maximum(lower, upper),
        (row * tiles + tile) * pieces + piece,
    ]
    items = table(steps, [xp.broadcast_to(x, shape).reshape(-1) for x in columns])
    least = begin // span
    first_item = (row * tiles + tile) * pieces + least
    count = xp.where(begin < end, (end + (span - 1)) // span - least, 0)
    return items, *(xp.broadcast_to(x[0], shape[1:]) for x in (first_item, count))


def listed(inverse) -> WorkItems:
    """Of the lists that `inverse` describes, for `key_gradient`.

    Items that run together should read the same queries, while these are in L2: they are a
    window of the tokens, each half of what is before the next one, which gives the tiles of a
    window lists of like lengths. Long lists are several items.
    """
    return WorkItems(inverse, SHORTEST_WINDOW, longest_item(inverse.entries), windows=True)


def table(steps, columns):
    """int32 `[..., 8]` from the columns of `items` of `dkv.partials`."""
    columns = [steps.integers(x)[..., None] for x in columns]
    missing = ITEM - len(columns)
    return steps.xp.concatenate([*columns, *columns[:1] * missing], axis=-1)
