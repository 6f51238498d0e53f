"""Gradients of the branches on Mosaic kernels, for either framework (`tiled.Framework`).

Of each branch: the query's by the walk of the forward pass, keys' and values' from the queries
that saw them, found on the device: by search where a query sees an interval, by counting where
it chose blocks. No gradient passes through scores and selection. Every sum has a fixed order.
"""

import dataclasses
import functools
import math
from typing import Any

from kernels_pallas.mosaic import (
    capability,
    interval_attention,
    selected_attention,
)
from kernels_pallas.mosaic.block_query_lists import BlockQueryLists
from kernels_pallas.mosaic.operands import LOG2E, ROW_STATS, ROW_STATS_MIN_ROWS, ROWS
from kernels_pallas.specs import bwd_preprocess, combine, dkv
from kernels_pallas.specs.bwd_preprocess import RowStats
from kernels_pallas.specs.dkv import Dkv
from nsa_jax import items, mosaic_gather
from nsa_jax.config import NSAConfig
from nsa_jax.mosaic_forward import Framework, name_of, shapes_of
from nsa_jax.types import Branches

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
    weights = [steps.cast(weight, steps.xp.float32) for weight in weights]
    (total,) = steps.run(combine.gated_sum(_row_spec(outputs)), *weights, *outputs)
    return total.reshape(outputs[0].shape)


def output_dots(steps: Framework, grad, *outputs):
    """float32 `[B, T, H]` for each output `[B, T, H, Dv]`: its product with `grad`."""
    found = steps.run(combine.deltas(_row_spec(outputs)), grad, *outputs)
    return [x.reshape(grad.shape[:-1]) for x in found]


def _row_spec(outputs):
    *shape, width = outputs[0].shape
    dtype = name_of(outputs[0].dtype)
    return combine.Combine(
        math.prod(shape), width, len(outputs), dtype, capability.interpret.get()
    )


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
    spec = interval_attention.IntervalAttention(
        **shapes_of(query, key, value, scale),
        gated=gated,
        added=added is not None,
        longest_first=long,
        gradient=True,
        **interval_attention.gradient_blocks(key.shape[-1], value.shape[-1]),
    )
    base = Dkv(**shapes_of(query, key, value, scale), work_items=0, gated=gated)
    rows = _numbers(steps, saved, steps.bounds(where, bounds)[1], base)
    arrays = steps.bounds_by_row(where, bounds, spec.tile, spec.tiles)
    extra = [] if added is None else [added]
    (query_grad,) = steps.run(
        interval_attention.attention(spec), query, key, value, *arrays, grad, rows, *extra
    )

    pieces, tiles = 1, base.B * base.Hkv * base.key_tiles
    if long:
        pieces = max(min(-(-items.SHARES // tiles), base.query_tiles // SHORTEST), 1)
    base = dataclasses.replace(base, work_items=pieces * tiles)
    table, *places = steps.once(
        where,
        ("items", bounds, base),
        lambda: items.interval(steps, steps.bounds(where, bounds), base, pieces),
    )
    first, _ = steps.bounds_by_row(where, bounds, base.query_tile, base.query_tiles)
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
    base = Dkv(**shapes, work_items=0, gated=gated, list_entries=1)
    sizes = base.B, base.T, base.S, base.Hkv, indices.shape[-1], size
    alone = base.query_tile.group <= ROW_STATS_MIN_ROWS and base.query_tile.slab == ROWS
    if alone and not BlockQueryLists(*sizes, 1, packed).marked:
        base = dataclasses.replace(base, single_token=True)
    spec = selected_attention.SelectedAttention(
        **shapes,
        n=indices.shape[-1],
        block=size,
        gated=gated,
        added=added is not None,
        gradient=True,
        numbers_unit=(base.query_tile.tokens, base.stats_rows),
        limit=mosaic_gather.limit(query, key, value, indices, config, packed),
        **selected_attention.gradient_stages(width, value.shape[-1], size),
    )
    last = steps.end(where)
    if lists is None:
        lists = steps.lists(indices, where, spec)
    rows = _numbers(steps, saved, last, base)
    extra = [] if added is None else [added]
    by_row = steps.last_by_row(where, spec.tile, spec.tiles)
    arrays = query, key, value
    (query_grad,) = steps.run(
        selected_attention.attention(spec), *arrays, *lists, by_row, grad, rows, *extra
    )
    if spec.limit:
        selection = indices, lists[-1], where
        query_grad = mosaic_gather.query_gradient(
            steps, spec, arrays, selection, grad, rows, query_grad
        )

    inverse = BlockQueryLists(*sizes, base.query_tile.tokens, packed)
    edges, *queries = steps.inverse_lists(indices, where, inverse)
    table, *places = steps.listed_items(edges, where, items.listed(inverse))
    spec = dataclasses.replace(
        base,
        work_items=table.shape[0],
        list_entries=inverse.entries,
        block=size if inverse.marked else 0,
    )
    arrays = query, key, value, grad, rows, table
    return query_grad, *_merged(steps, spec, arrays, queries, places)


def _merged(steps, spec, arrays, more, places):
    """Gradients of key and value; by one pass over the queries, or two where registers of one
    would not hold both.
    """
    wanted = [{}]
    if spec.D + spec.Dv > (320 if spec.gathered else 256):
        wanted = [{"want_dv": False}, {"want_dk": False}]
    found = []
    for options in wanted:
        part = dataclasses.replace(spec, **options)
        sums = steps.run(dkv.partials(part), *arrays, *more)
        found += steps.run(dkv.merge(part), *sums, *places)
    return found


def _numbers(steps, saved, last, base):
    """What `bwd_preprocess.row_stats` gives for the query tiles of `base`, a `Dkv`; `last`: the
    end of the keys that each query sees.
    """
    extra = [
        steps.cast(x, steps.xp.float32) for x in (saved.gate, saved.lse_grad) if x is not None
    ]
    arrays = saved.lse, saved.dots, steps.integers(last), *extra
    spec = RowStats(
        *(base.B, base.T, base.H, base.Hkv, base.query_tile.tokens, base.stats_rows),
        gated=saved.gate is not None,
        lse_grad=saved.lse_grad is not None,
    )
    if base.interpret:
        return _interpreted_numbers(steps, spec, *arrays)
    return steps.run(bwd_preprocess.row_stats(spec), *arrays)[0]


def _interpreted_numbers(steps, spec, lse, dots, last, *extra):
    """`bwd_preprocess.row_stats`, from the same arrays."""
    xp, extra = steps.xp, list(extra)
    gate = extra.pop(0) if spec.gated else xp.ones_like(dots)
    offset = gate * dots
    if spec.lse_grad:
        offset = offset - extra.pop(0)
    last = xp.broadcast_to(steps.cast(last, xp.float32)[..., None], offset.shape)
    columns = [x[..., None] for x in (lse * LOG2E, last, gate, offset)]
    found = xp.concatenate(columns, axis=-1)
    nothing = xp.where(steps.numbers(last, ROW_STATS) == 0, float("inf"), 0.0)
    # Of padding they may be NaN, and a probability of zero times NaN is NaN.
    sees_nothing = (lse == -float("inf"))[..., None]
    found = xp.where(sees_nothing, steps.cast(nothing, xp.float32), found)
    found = found.reshape(spec.B, spec.T, spec.Hkv, spec.group, ROW_STATS)
    found = xp.moveaxis(steps.longer(found, 1, spec.tiles * spec.tokens, 0.0), 2, 1)
    found = found.reshape(spec.B, spec.Hkv, spec.tiles, spec.tokens * spec.group, ROW_STATS)
    return steps.longer(found, 3, spec.rows, 0.0)
