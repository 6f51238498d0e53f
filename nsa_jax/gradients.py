"""Gradients of the branches on Mosaic kernels, for either framework (`tiled.Framework`).

Of each branch: the query's by the walk of the forward pass, keys' and values' from the queries
that saw them, found on the device: by search where a query sees an interval, by counting where
it chose blocks. No gradient passes through scores and selection. Every sum has a fixed order.
"""

import dataclasses
import functools
import math
from typing import Any

from kernels_pallas.mosaic import band, gates, key_gradient, limits, selected
from kernels_pallas.mosaic.inverse import Inverse
from kernels_pallas.mosaic.key_gradient import KeyGradient
from kernels_pallas.mosaic.operands import LOG2E, NUMBERS, ROWS
from nsa_jax.config import NSAConfig
from nsa_jax.tiled import Framework, name_of, shapes_of
from nsa_jax.types import Branches

SHARES = 2112  # items that fill a GPU several times over
SHORTEST = 64  # tiles of queries of an item
LONGEST = 2048  # entries of a list that one item takes at most: each piece has its own sums
SHORT = 256  # entries that an item may always have
SHORTEST_WINDOW = 4096  # units: some 30 MB of queries and their gradients


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a branch's gradient needs besides its inputs; all `[B, T, H]`, float32.

    `lse`: natural, -inf where a query sees nothing; `dots`: the output's gradient times the
    branch's own output, which is also the gate's gradient; `gate`: or None; `lse_grad`: the
    gradient of `lse`, or None.
    """

    lse: Any
    dots: Any
    gate: Any = None
    lse_grad: Any = None


def gated_sum(steps: Framework, outputs, weights):
    """`[B, T, H, Dv]`: the sum of the outputs, each times its gate `[B, T, H]`."""
    spec = _row_spec(outputs)
    columns = []
    for weight in weights:
        weight = steps.cast(weight, steps.xp.float32).reshape(1, -1)
        columns.append(steps.longer(weight, 1, spec.tiles * ROWS, 0.0))
    weight = steps.xp.concatenate(columns, axis=0)
    (total,) = steps.run(gates.gated_sum(spec), weight, *outputs)
    return total.reshape(outputs[0].shape)


def output_dots(steps: Framework, grad, *outputs):
    """float32 `[B, T, H]` for each output `[B, T, H, Dv]`: its product with `grad`."""
    spec = _row_spec(outputs)
    (found,) = steps.run(gates.dots(spec), grad, *outputs)
    found = found.reshape(len(outputs), -1)[:, : spec.rows]
    return [found[i].reshape(grad.shape[:-1]) for i in range(len(outputs))]


def _row_spec(outputs):
    *shape, width = outputs[0].shape
    dtype = name_of(outputs[0].dtype)
    return gates.Rows(math.prod(shape), width, len(outputs), dtype, limits.interpret.get())


def whole(
    steps: Framework,
    query,
    key,
    value,
    gates,
    compressed_tokens: tuple[Any, Any],
    indices,
    grad,
    found,
    where,
    config,
    scale,
    packed: bool,
    lists=None,
):
    """Gradients of the gated sum of the branches: query, `(key, value)` of each branch as
    `Branches`, gates (float32).

    `found`: `Branches` of `(out, lse)`, or None: each branch is computed again, when its turn
    comes; `lists`: `Framework.selected_lists`, or None. `key`, `value`: the compressed field is
    not read; `compressed_tokens` stands for it.
    """
    rest: dict[str, Any] = {"where": where, "config": config, "scale": scale}
    first = query, *compressed_tokens
    second = query, key.sliding, value.sliding
    third = query, key.selected, value.selected, indices
    if lists is None:
        lists = steps.selected_lists(*third, **rest)
    forward: Branches[Any] = Branches(
        functools.partial(steps.compressed, *first, **rest),
        functools.partial(steps.selected, *third, **rest, lists=lists),
        functools.partial(steps.sliding, *second, **rest),
    )
    known = None
    if found is not None:
        dots = output_dots(steps, grad, *(out for out, _ in found))
        known = Branches(*zip((lse for _, lse in found), dots, strict=True))

    def saved(branch):
        if known is not None:
            lse, dots = getattr(known, branch)
        else:
            out, lse = getattr(forward, branch)()
            (dots,) = output_dots(steps, grad, out)
        return Saved(lse, dots, getattr(gates, branch))

    far = saved("compressed")
    total, *far_pair = compressed(steps, *first, grad, far, **rest)
    near = saved("sliding")
    total, *near_pair = sliding(steps, *second, grad, near, **rest, added=total)
    best = saved("selected")
    total, *best_pair = chosen(
        steps, *third, grad, best, **rest, packed=packed, added=total, lists=lists
    )
    pairs = Branches(far_pair, best_pair, near_pair)
    return total, pairs, Branches(far.dots, best.dots, near.dots)


def compressed(
    steps: Framework, query, key, value, grad, saved, where, config, scale, added=None
):
    """Gradients `(query, key, value)`; `grad` `[B, T, H, Dv]` is the whole output's, `added`
    `[B, T, H, D]` what is added to the query's.
    """
    if key.shape[1] == 0:
        zero = steps.xp.zeros_like
        return zero(query) if added is None else added, zero(key), zero(value)
    bounds = ("visible", config)
    return _interval(steps, query, key, value, grad, saved, bounds, where, scale, added, True)


def sliding(
    steps: Framework,
    query,
    key,
    value,
    grad,
    saved,
    where,
    config: NSAConfig,
    scale,
    added=None,
):
    """As `compressed`."""
    bounds = ("window", config, key.shape[1])
    return _interval(steps, query, key, value, grad, saved, bounds, where, scale, added, False)


def _interval(steps, query, key, value, grad, saved, bounds, where, scale, added, long):
    gated = saved.gate is not None
    spec = band.Band(
        **shapes_of(query, key, value, scale),
        gated=gated,
        added=added is not None,
        longest_first=long,
        gradient=True,
        **band.gradient_blocks(key.shape[-1], value.shape[-1]),
    )
    numbers = _numbers(steps, saved, where, bounds, steps.bounds(where, bounds)[1])
    arrays = steps.bounds_by_row(where, bounds, spec.tile, spec.tiles)
    rows = _rows(steps, numbers, key.shape[2], spec.tile, spec.tiles)
    extra = [] if added is None else [added]
    (query_grad,) = steps.run(
        band.attention(spec), query, key, value, *arrays, grad, rows, *extra
    )

    base = KeyGradient(**shapes_of(query, key, value, scale), items=0, gated=gated)
    pieces, tiles = 1, base.B * base.Hkv * base.tiles
    if long:
        pieces = max(min(-(-SHARES // tiles), base.units // SHORTEST), 1)
    base = dataclasses.replace(base, items=pieces * tiles)
    items, *places = steps.once(
        where,
        ("items", bounds, base),
        lambda: _interval_items(steps, steps.bounds(where, bounds), base, pieces),
    )
    rows = _by_unit(steps, rows, numbers, spec, base)
    first, _ = steps.bounds_by_row(where, bounds, base.unit, base.units)
    arrays = query, key, value, grad, rows, items
    return query_grad, *_merged(steps, base, arrays, [first], places)


def _interval_items(steps, bounds, base, pieces):
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


def chosen(
    steps: Framework,
    query,
    key,
    value,
    indices,
    grad,
    saved,
    where,
    config: NSAConfig,
    scale,
    packed: bool,
    added=None,
    lists=None,
):
    """As `compressed`, for the selected branch; `packed`: sequences may begin at any key;
    `lists`: `Framework.selected_lists`, or None.
    """
    width, size = query.shape[-1], config.select_block
    gated = saved.gate is not None
    shapes = shapes_of(query, key, value, scale)
    spec = selected.Selected(
        **shapes,
        n=indices.shape[-1],
        block=size,
        gated=gated,
        added=added is not None,
        gradient=True,
        **selected.gradient_stages(width, value.shape[-1], size),
    )
    last = steps.end(where)
    if lists is None:
        lists = steps.lists(indices, where, spec)
    numbers = _numbers(steps, saved, where, ("end",), last)
    rows = _rows(steps, numbers, key.shape[2], spec.tile, spec.tiles)
    extra = [] if added is None else [added]
    by_row = steps.last_by_row(where, spec.tile, spec.tiles)
    (query_grad,) = steps.run(
        selected.attention(spec), query, key, value, *lists, by_row, grad, rows, *extra
    )

    base = KeyGradient(**shapes, items=0, gated=gated, listed=1)
    inverse = Inverse(
        base.B, base.T, base.S, base.Hkv, indices.shape[-1], size, base.unit.tokens, packed
    )
    edges, *queries = steps.inverse_lists(indices, where, inverse)
    table, *places = _listed_items(steps, edges, where, inverse)
    rows = _by_unit(steps, rows, numbers, spec, base)
    spec = dataclasses.replace(
        base,
        items=table.shape[0],
        listed=inverse.entries,
        block=size if inverse.marked else 0,
    )
    arrays = query, key, value, grad, rows, table
    return query_grad, *_merged(steps, spec, arrays, queries, places)


def _listed_items(steps, edges, where, inverse):
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
    longest = min(max(-(-inverse.entries // (SHARES // 2)), SHORT), LONGEST)

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


def _merged(steps, spec, arrays, more, places):
    """Gradients of key and value; by one pass over the queries, or two where registers of one
    would not hold both.
    """
    wanted = [{}]
    if spec.D + spec.Dv > (320 if spec.listed else 256):
        wanted = [{"want_value": False}, {"want_key": False}]
    found = []
    for options in wanted:
        part = dataclasses.replace(spec, **options)
        sums = steps.run(key_gradient.partial_sums(part), *arrays, *more)
        found += steps.run(key_gradient.merged(part), *sums, *places)
    return found


def _numbers(steps, saved, where, name, last):
    """The numbers of each query head, float32 `[B, T, H, 4]`: `key_gradient.partial_sums`.

    `last`: the end of the keys that each query sees, which `where` and `name` decide.
    """
    xp = steps.xp
    gate = (
        xp.ones_like(saved.dots) if saved.gate is None else steps.cast(saved.gate, xp.float32)
    )
    offset = gate * saved.dots
    if saved.lse_grad is not None:
        offset = offset - steps.cast(saved.lse_grad, xp.float32)

    def wide():
        number = steps.numbers(last, NUMBERS)
        nothing = steps.cast(xp.where(number == 0, float("inf"), 0.0), xp.float32)
        return steps.cast(last, xp.float32)[..., None], nothing

    last_key, nothing = steps.once(where, (*name, "wide"), wide)
    last_key = xp.broadcast_to(last_key, offset.shape)
    columns = saved.lse * LOG2E, last_key, gate, offset
    found = xp.concatenate([x[..., None] for x in columns], axis=-1)
    # Of padding they may be NaN, and a probability of zero times NaN is NaN.
    return xp.where((saved.lse == -float("inf"))[..., None], nothing, found)


def _rows(steps, numbers, kv_heads, tile, tiles):
    """`[B, T, H, 4]` as `[B, Hkv, tiles, rows, 4]`. What stands for no query is zero: as its
    query and its gradient are zero there too, it adds nothing.
    """
    batch, length, heads, count = numbers.shape
    x = numbers.reshape(batch, length, kv_heads, heads // kv_heads, count)
    x = steps.longer(x, 1, tiles * tile.tokens, 0.0)
    x = steps.xp.moveaxis(x, 2, 1).reshape(batch, kv_heads, tiles, tile.used, count)
    return steps.longer(x, 3, tile.rows, 0.0)


def _by_unit(steps, rows, numbers, spec, base):
    """`_rows` for the units of `base`: those for the tiles of `spec` if they are alike."""
    tile, unit = spec.tile, base.unit
    alike = tile == unit or (tile.used == tile.rows and unit.used == unit.rows)
    if alike and spec.tiles * tile.tokens == base.units * unit.tokens:
        return rows.reshape(base.B, base.Hkv, base.units, unit.rows, -1)
    return _rows(steps, numbers, base.Hkv, unit, base.units)


def _table(steps, columns):
    """`items` of `key_gradient.partial_sums`."""
    columns = [steps.integers(x)[:, None] for x in columns]
    missing = key_gradient.ITEM - len(columns)
    return steps.xp.concatenate([*columns, *columns[:1] * missing], axis=1)
