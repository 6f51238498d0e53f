"""Gradients of the branches on Mosaic kernels, for either framework (`tiled.Framework`).

Of each branch: the query's by the walk of the forward pass, keys' and values' from the queries
that saw them, found on the device: by search where a query sees an interval, by sorting where
it chose blocks. No gradient passes through scores and selection. Every sum has a fixed order.
"""

import dataclasses
import functools
import math
from typing import Any

from kernels_pallas.mosaic import band, gates, key_gradient, limits, selected
from kernels_pallas.mosaic.key_gradient import REACH, KeyGradient
from kernels_pallas.mosaic.operands import LOG2E, NUMBERS, ROWS
from nsa_jax import unions
from nsa_jax.config import NSAConfig
from nsa_jax.tiled import Framework, name_of, shapes_of
from nsa_jax.types import Branches
from nsa_jax.unions import NOTHING

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
    batch, length, _, width = query.shape
    size = config.select_block
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
    tokens, units, tiles = base.unit.tokens, base.units, base.tiles
    aligned = not packed and (ROWS % size == 0 or size % ROWS == 0)
    clipped = not aligned or size < ROWS  # a block does not fill the tiles that it touches
    marked = tokens > 1 or clipped
    spans = max(size // ROWS, 1) if aligned else (size + ROWS - 2) // ROWS + 1

    # An entry for every tile of keys that a chosen block touches.
    xp, integers = steps.xp, steps.integers
    token = steps.numbers(last, length).reshape(1, -1, 1, 1, 1)
    head = steps.numbers(last, base.Hkv).reshape(1, 1, -1, 1, 1)
    row = steps.numbers(last, batch).reshape(-1, 1, 1, 1, 1) * base.Hkv + head
    index = indices[..., None]
    begins = integers(where.key_start[..., None, None, None] + index * size)
    ends = xp.minimum(begins + size, last[..., None, None, None])
    tile = begins // ROWS + steps.numbers(last, spans).reshape(1, 1, 1, 1, -1)
    there = (index >= 0) & (xp.maximum(begins, tile * ROWS) < ends)
    # The order of entries is that of one integer, unless it would not fit.
    rows_of = batch * base.Hkv
    parts = 1 if rows_of * tiles * units < NOTHING else rows_of
    order = (row % (rows_of // parts) * tiles + tile) * units + token // tokens
    mark = (tile * 0 + 1 << token % tokens) + (begins - tile * ROWS + REACH) * 2**16
    order = xp.where(there, integers(order), NOTHING)
    order, mark = (
        xp.moveaxis(xp.broadcast_to(x, order.shape), 2, 1).reshape(parts, -1)
        for x in (order, integers(mark))
    )
    entries = order.shape[1]
    if marked:
        order, mark = steps.sort_pairs(order, mark)
        if tokens > 1:
            order, mark = _together(steps, order, mark)
    else:
        order = steps.sort(order)

    # Items that run together should read the same queries, while these are in L2: they are a
    # window of the tokens, each half of what is before the next one, which gives the tiles of
    # a window lists of like lengths. Where they begin in each tile's entries:
    windows = 1
    if not packed and length == key.shape[1]:
        windows += max((units // SHORTEST_WINDOW).bit_length() - 1, 0)
    group, places = rows_of // parts * tiles, (rows_of, 1, tiles)
    part = steps.numbers(last, parts).reshape(-1, 1) * entries
    tile_key = xp.broadcast_to(steps.numbers(last, group) * units, (parts, group))

    def entry_at(unit):
        found = integers(steps.search(order, tile_key + unit, "left")) + part
        return found.reshape(places)

    cuts = [0, *(units >> i for i in range(windows - 1, 0, -1)), units]
    bounds = xp.concatenate([entry_at(cut) for cut in cuts], axis=1)
    begin, end = bounds[:, :-1], bounds[:, 1:]

    # Long lists are several items. They run in the order [head, window, tile, piece]; a tile's
    # sums are [head, tile, window, piece].
    longest = min(max(-(-parts * entries // (SHARES // 2)), SHORT), LONGEST)
    count = (end - begin + (longest - 1)) // longest
    total = xp.cumsum(count.reshape(-1), axis=0, dtype=xp.int32)
    first_item = total - count.reshape(-1)
    by_tile = xp.moveaxis(count, 1, 2).reshape(-1)
    slot = xp.cumsum(by_tile, axis=0, dtype=xp.int32) - by_tile
    slot = xp.moveaxis(slot.reshape(rows_of, tiles, windows), 2, 1)
    # A tile that a window's tokens can see has at most one item there that is not full.
    items = rows_of * (tiles * min(windows, 2) + windows) + parts * entries // longest
    number = steps.numbers(last, items)
    owner = integers(steps.search(total[None], number, "right"))[0]
    number, exists = number[0], owner < rows_of * windows * tiles
    owner = owner.clip(None, rows_of * windows * tiles - 1)
    piece = number - first_item[owner]
    lower = begin.reshape(-1)[owner] + piece * longest
    lower = xp.where(exists, lower, 0)
    upper = xp.where(exists, xp.minimum(lower + longest, end.reshape(-1)[owner]), 0)
    row, tile = owner // (windows * tiles), owner % tiles
    whole = upper
    if not clipped:  # the first entry whose tokens see the tile to its end
        tile_end = xp.broadcast_to((steps.numbers(last, tiles) + 1) * ROWS, (batch, tiles))
        whole = integers(steps.search(last, tile_end, "left") + (tokens - 1)) // tokens
        whole = xp.broadcast_to(whole[:, None], (batch, base.Hkv, tiles))
        whole = entry_at(whole.reshape(parts, group).clip(None, units)).reshape(-1)
        whole = xp.minimum(xp.maximum(whole[row * tiles + tile], lower), upper)
    columns = [
        xp.where(exists, row, -1),
        tile * ROWS,
        lower,
        whole,
        upper,
        upper,
        slot.reshape(-1)[owner] + piece,
    ]
    table = _table(steps, columns)
    block = size if marked else 0
    rows = _by_unit(steps, rows, numbers, spec, base)
    spec = dataclasses.replace(base, items=items, listed=parts * entries, block=block)
    more = [x.reshape(-1) for x in ([order % units, mark] if marked else [order % units])]
    places = [
        x.reshape(batch, base.Hkv, tiles) for x in (slot[:, 0], integers(count.sum(axis=1)))
    ]
    arrays = query, key, value, grad, rows, table
    return query_grad, *_merged(steps, spec, arrays, more, places)


def _together(steps, order, mark):
    """Sorted entries with those of one unit and block put together: their bits added."""
    xp, entries = steps.xp, order.shape[1]
    there = order < NOTHING
    changes = (order[:, 1:] != order[:, :-1]) | (mark[:, 1:] >> 16 != mark[:, :-1] >> 16)
    begin, end, _ = unions.runs(steps, changes, there)
    at = begin.clip(0, entries - 1)
    bits = steps.integers(xp.where(there, mark & (2**16 - 1), 0))
    mark = (steps.rows(mark, at) >> 16 << 16) + unions.run_sums(steps, bits, begin, end)
    return xp.where(begin < end, steps.rows(order, at), NOTHING), mark


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
