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
from nsa_jax import gathered, items
from nsa_jax.config import NSAConfig
from nsa_jax.tiled import Framework, name_of, shapes_of
from nsa_jax.types import Branches

SINGLE = (1, 2, 4, 8)  # heads of a group: their rows fill a step of the keys' gradient
SHORTEST = 64  # tiles of queries of an item


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
        functools.partial(steps.selected, *third, **rest, lists=lists, packed=packed),
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
        pieces = max(min(-(-items.SHARES // tiles), base.units // SHORTEST), 1)
    base = dataclasses.replace(base, items=pieces * tiles)
    table, *places = steps.once(
        where,
        ("items", bounds, base),
        lambda: items.interval(steps, steps.bounds(where, bounds), base, pieces),
    )
    rows = _by_unit(steps, rows, numbers, spec, base)
    first, _ = steps.bounds_by_row(where, bounds, base.unit, base.units)
    arrays = query, key, value, grad, rows, table
    return query_grad, *_merged(steps, base, arrays, [first], places)


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
        limit=gathered.limit(query, key, value, indices, config, packed),
        **selected.gradient_stages(width, value.shape[-1], size),
    )
    last = steps.end(where)
    if lists is None:
        lists = steps.lists(indices, where, spec)
    numbers = _numbers(steps, saved, where, ("end",), last)
    rows = _rows(steps, numbers, key.shape[2], spec.tile, spec.tiles)
    extra = [] if added is None else [added]
    by_row = steps.last_by_row(where, spec.tile, spec.tiles)
    arrays = query, key, value
    (query_grad,) = steps.run(
        selected.attention(spec), *arrays, *lists, by_row, grad, rows, *extra
    )
    if spec.limit:
        selection = indices, lists[-1], where
        found = grad, numbers, query_grad
        query_grad = gathered.query_gradient(steps, spec, arrays, selection, *found)

    base = KeyGradient(**shapes, items=0, gated=gated, listed=1)
    sizes = base.B, base.T, base.S, base.Hkv, indices.shape[-1], size
    alone = spec.tile.group in SINGLE and spec.tile.slab == ROWS
    if alone and not Inverse(*sizes, 1, packed).marked:
        base = dataclasses.replace(base, single=True)
    inverse = Inverse(*sizes, base.unit.tokens, packed)
    edges, *queries = steps.inverse_lists(indices, where, inverse)
    table, *places = items.listed(steps, edges, where, inverse)
    rows = _by_unit(steps, rows, numbers, spec, base)
    spec = dataclasses.replace(
        base,
        items=table.shape[0],
        listed=inverse.entries,
        block=size if inverse.marked else 0,
    )
    arrays = query, key, value, grad, rows, table
    return query_grad, *_merged(steps, spec, arrays, queries, places)


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
        rows = rows.reshape(base.B, base.Hkv, base.units, unit.rows, -1)
    else:
        rows = _rows(steps, numbers, base.Hkv, unit, base.units)
    return steps.longer(rows, 3, base.rows_of_unit, 0.0)
