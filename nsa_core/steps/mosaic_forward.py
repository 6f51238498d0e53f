"""Defines the forward steps on Mosaic kernels, for either framework.

The data flow is interval (compressed) -> select_blocks -> selected. The step interval (sliding)
does not depend on the other steps.

`nsa_core.types` defines the letters of the shapes. A branch returns its output `[B, T, H, Dv]` and
its natural log-sum-exp `[B, T, H]` in float32. A branch that adds its output to the gated sum
returns None for the log-sum-exp. To add its output, a branch multiplies the output by `gate` `[B,
T, H]`. The product is added, possibly in place, to the sum of earlier branches, `added` `[B, T, H,
Dv]`.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from kernels_pallas.kernel import Kernel, int32
from kernels_pallas.mosaic.capability import interpret
from kernels_pallas.specs import combine, scores
from kernels_pallas.specs import interval as interval_spec
from kernels_pallas.specs import selected as selected_spec
from kernels_pallas.specs.tile import Tile, parts_of_block, slab_width
from nsa_core.array_ops import ArrayOps, derived
from nsa_core.config import NSAConfig
from nsa_core.steps import key_bounds, mosaic_fp8, mosaic_gather, mosaic_lists
from nsa_core.steps.fused import Pages
from nsa_core.steps.key_bounds import Bounds, VisibleCompressed, Window, align_sequences
from nsa_core.steps.params import Params, Qkv
from nsa_core.validate import dtype_name

type OutLse = Sequence[Any]

round_tokens = mosaic_fp8.round_tokens


def _rounded(ops, qkv: Qkv, params: Params, rounded):
    """Return keys and values rounded to `compute_dtype`, or None if there is no
    `compute_dtype`. If `rounded` is given, return `rounded`.
    """
    if params.config.compute_dtype is None or rounded is not None:
        return rounded
    return round_tokens(ops, qkv.key, qkv.value, params.layout)


def interval(
    ops: ArrayOps,
    qkv: Qkv,
    bounds: Bounds,
    params: Params,
    gate=None,
    added=None,
    rounded=None,
) -> OutLse:
    """Compute attention over the keys in `bounds`, for the compressed or the sliding branch.

    `rounded` is the result of `round_tokens` for key and value, or None.
    """
    query, key, value = qkv
    # tiles of later queries attend to more keys
    longest_first = isinstance(bounds, VisibleCompressed)
    if not longest_first and (rounded := _rounded(ops, qkv, params, rounded)) is not None:
        bounds = Window(params.config, rounded.key.shape[1])
    blocks: dict[str, Any] = interval_spec.forward_blocks(
        query.shape[2] // key.shape[2],
        query.shape[-1],
        value.shape[-1],
        None if longest_first else params.config.window,
        fp8=rounded is not None,
    )
    operands, layout = _operands(qkv, params.layout, rounded)
    spec = interval_spec.IntervalAttention(
        **sizes_of(qkv, params.scale, rounded),
        gated=gate is not None,
        added=added is not None,
        longest_first=longest_first,
        **blocks,
    )
    rows = key_bounds.bounds_by_row(ops, layout, bounds, spec.tile, spec.tiles)
    arrays = query, *operands, *rows, *_last_inputs(ops, gate, added, rounded)
    out, lse = ops.run(interval_spec.forward(spec), *arrays)
    return out, None if spec.added else lse


def _operands(qkv: Qkv, layout, rounded):
    """Return the keys and values that a kernel reads, and the layout of the queries. The
    indices in the returned layout refer to the returned keys.
    """
    if rounded is None:
        return (qkv.key, qkv.value), layout
    return rounded.operands, mosaic_fp8.of_slots(layout)


def _last_inputs(ops, gate, added, rounded):
    """Return the optional last inputs of a branch's kernel, in the order of
    `specs.attention.forward`.
    """
    arrays = [] if gate is None else [ops.to_float32(gate)]
    if added is not None:
        return [*arrays, added]
    return arrays if rounded is None else [*arrays, rounded.key_mean]


def selected(
    ops: ArrayOps,
    qkv: Qkv,
    block_indices,
    params: Params,
    gate=None,
    added=None,
    block_lists=None,
    pages: Pages | None = None,
    rounded=None,
) -> OutLse:
    """Compute attention over the blocks `block_indices` `[B, T, Hkv, n]`. No row of `query` may
    contain NaN.

    Args:
      block_lists: The result of `tile_block_lists`, if it exists.
      pages: The positions of each row's blocks, if keys and values are stored in pages `[1, S,
        Hkv, .]`.
      rounded: as in the step `interval`. `rounded` cannot be combined with `pages`.
    """
    rounded = _rounded(ops, qkv, params, rounded)
    spec = _forward_spec(qkv, block_indices, params, pages, rounded)
    if (
        not spec.gather_limit
    ):  # if partial outputs are merged later, the merge applies the gate and adds `added`
        fused = {"gated": gate is not None, "added": added is not None}
        spec = dataclasses.replace(spec, **fused)
    operands, layout = _operands(qkv, params.layout, rounded)
    if block_lists is None:
        of_keys = params._replace(layout=layout)
        block_lists = tile_block_lists(ops, qkv, block_indices, of_keys)
    last = key_bounds.causal_end_by_row(ops, layout, spec.tile, spec.tiles)
    arrays, kernel = (qkv.query, *operands), selected_spec.forward(spec)
    if not spec.gather_limit:
        extra = _last_inputs(ops, gate, added, rounded)
        out, lse = ops.run(kernel, *arrays, *(pages or ()), *block_lists, last, *extra)
        return out, None if spec.added else lse
    walked, lse = ops.run(kernel, *arrays, *block_lists, last)
    selection = block_indices, block_lists[-1], layout
    gate = None if gate is None else ops.to_float32(gate)
    return mosaic_gather.attention(ops, spec, arrays, selection, walked, lse, gate, added)


def _forward_spec(
    qkv: Qkv, block_indices, params: Params, pages: Pages | None = None, rounded=None
):
    spec = _selected_spec(qkv, block_indices, params, rounded)
    fields: dict[str, Any] = {"pages": 0 if pages is None else pages.page_table.shape[1]}
    if rounded is None:
        fields |= selected_spec.forward_stages(spec.D, spec.Dv, spec.block)
    else:
        fields |= selected_spec.FP8_STAGES
    if pages is None and rounded is None and params.may_gather:
        place = params.config, params.layout.packed
        fields["gather_limit"] = mosaic_gather.gather_limit(*qkv, block_indices, *place)
    return dataclasses.replace(spec, **fields)


def selected_and_sum(
    ops: ArrayOps, qkv: Qkv, block_indices, params: Params, block_lists, others, gates
) -> tuple[OutLse, Any] | None:
    """Run the step `selected`, and compute the `gated_sum` of the outputs of all branches. `others`
    has the outputs of the compressed and the sliding branch. Return None if the call may gather
    tiles, since the partial outputs of such tiles are merged later.
    """
    spec = _forward_spec(qkv, block_indices, params)
    if spec.gather_limit:
        return None
    spec = dataclasses.replace(spec, summed=True)
    last = key_bounds.causal_end_by_row(ops, params.layout, spec.tile, spec.tiles)
    gates = [ops.to_float32(gate) for gate in gates]
    inputs = *qkv, *block_lists, last, *gates, *others
    out, lse, total = ops.run(selected_spec.forward(spec), *inputs)
    return (out, lse), total


def work_item_tokens(heads: int, kv_heads: int, key_width: int, value_width: int) -> int:
    """Return the number of tokens of a work item of the kernel `interval`. The order of the sums
    over keys is a property of a work item, and depends on its first token."""
    tile = Tile(heads // kv_heads, slab_width(key_width, value_width))
    return tile.tokens * interval_spec.consumers(key_width, value_width)


@functools.lru_cache
def selected_on_pages(
    heads: int,
    kv_heads: int,
    key_width: int,
    value_width: int,
    dtype: str,
    config: NSAConfig,
    scale: float | None = None,
) -> Kernel | None:
    """Return the kernel that the step `selected` runs with `pages`, for a layer and any lengths.

    Return None if a page has several blocks, or if far blocks are gathered (`mosaic_gather`), since
    gathering needs contiguous keys.
    """
    if heads // kv_heads <= mosaic_gather.max_heads(config.select_block):
        return None
    if parts_of_block(config.select_block, config.num_selected) > 1:
        return None
    lengths: dict[str, Any] = dict.fromkeys(("B", "T", "S", "pages"), 1)
    widths = key_width, value_width, config.select_block
    stages: dict[str, Any] = selected_spec.forward_stages(*widths)
    spec = selected_spec.SelectedAttention(
        **lengths,
        H=heads,
        Hkv=kv_heads,
        D=key_width,
        Dv=value_width,
        dtype=dtype,
        scale=scale_of(scale, key_width),
        n=config.num_selected,
        block=config.select_block,
        gated=True,
        added=True,
        **stages,
    )
    return selected_spec.forward(spec).for_any_length()


def tile_block_lists(ops: ArrayOps, qkv: Qkv, block_indices, params: Params):
    """Build `(starts, members, counts)` from `block_indices`, for the step `selected` and its
    gradient.
    """
    spec = _selected_spec(qkv, block_indices, params)
    block_indices, _ = mosaic_lists.cut(ops, block_indices, params.config.select_block)
    return mosaic_lists.tile_block_lists(ops, block_indices, params.layout, spec)


def _selected_spec(qkv: Qkv, block_indices, params: Params, rounded=None):
    blocks = block_indices.shape[-1], params.config.select_block
    return selected_spec.of_blocks(sizes_of(qkv, params.scale, rounded), *blocks)


def select_blocks(ops: ArrayOps, query, key, lse, params: Params, num_blocks: int):
    """Return the selection int32 `[B, T, Hkv, n]` from compressed keys `[B, C, Hkv, D]` and the
    log-sum-exp `[B, T, H]` of the compressed branch. A sequence has at most `num_blocks`
    blocks.
    """
    layout, config, scale, _ = params
    batch, length, heads, width = query.shape
    kv_heads = key.shape[2]
    ratio = config.select_block // config.compress_stride
    first, last = VisibleCompressed(config).of(ops, layout)
    base = layout.compressed_start
    crossing = layout.packed and layout.varlen is None
    if crossing:
        key, base, first, last = align_sequences(ops, key, base, first, last, config)
        num_blocks += key.shape[1] // ratio
    blocks = max(-(-key.shape[1] // ratio), 1)
    if key.shape[1] == 0:
        key = ops.zeros(query, (batch, 1, kv_heads, width))  # no query attends to this block
    key = ops.extend(key, 1, blocks * ratio, 0.0)
    spec = scores.Scores(
        B=batch,
        T=length,
        H=heads,
        Hkv=kv_heads,
        D=width,
        blocks=blocks,
        candidates=num_blocks,
        ratio=ratio,
        cover=config.compress_block // config.compress_stride,
        n=config.num_selected,
        num_initial=config.num_initial,
        num_local=config.num_local,
        packed=crossing,
        dtype=dtype_name(query),
        scale=scale_of(scale, width),
        interpret=interpret.get(),
    )
    bounds, tiles = (first, last, base, layout.position), ()
    candidates: Any = _candidates
    if layout.varlen is not None:
        count = layout.varlen.capacity.query_tiles(spec.tile.tokens)
        spec = dataclasses.replace(spec, query_tiles=count)
        tiles = layout.varlen.query_tiles(spec.tile.tokens)
        bounds, candidates = (first, last, layout.position, *tiles), _candidates_of_tiles
    arrays = ops.derive(candidates, *bounds, spec=spec, block=config.select_block)
    return ops.run(scores.best_blocks(spec), query, key, lse, *arrays, *tiles)[0]


def _candidate_shapes(*arrays, spec, block):
    tile, rows = spec.tile, (spec.B, spec.tiles, spec.tiling.score_rows)
    bounds = int32(spec.B, spec.tiles, tile.rows)
    return bounds, bounds, int32(*rows), int32(*rows), int32(spec.B, spec.tiles)


@derived(_candidate_shapes)
def _candidates(ops, first, last, base, position, *, spec, block):
    """Return the arrays that the kernel `scores.best_blocks` reads.

    The arrays per row have the bounds of the compressed tokens. The arrays per token have the
    token's own block and the first block of the token's sequence. The arrays per tile have the
    number of blocks that the tile's tokens span.
    """
    tile, tiles = spec.tile, spec.tiles
    own, start = (
        ops.extend(ops.to_int32(x), 1, tiles * tile.tokens, fill).reshape(
            spec.B, tiles, tile.tokens
        )
        for x, fill in ((position // block, -1), (base, None))
    )
    span = ops.to_int32(ops.xp.amax(start + own + 1 - start[..., :1], axis=-1))
    own, start = (
        ops.extend(own, 2, spec.tiling.score_rows, -1),
        ops.extend(start, 2, spec.tiling.score_rows),
    )
    bounds = key_bounds.by_row(ops, first, last, tile=tile, tiles=tiles)
    return *bounds, own, start, span


@derived(_candidate_shapes)
def _candidates_of_tiles(ops, first, last, position, first_token, end_token, *, spec, block):
    """Return the same arrays as `_candidates`, for tiles whose tokens all belong to one
    sequence. `first` is the first slot of a query's sequence.
    """
    xp, tile, tiles, rows = ops.xp, spec.tile, spec.tiles, spec.tiling.score_rows
    token = first_token[..., None] + ops.arange(first, tile.tokens)
    exists = token < end_token[..., None]
    near = xp.minimum(token, end_token[..., None] - 1).clip(0, spec.T - 1)
    near = near.reshape(spec.B, tiles * tile.tokens)
    shape = spec.B, tiles, tile.tokens
    own = ops.take_rows(position // block, near).reshape(shape)
    own = ops.extend(ops.to_int32(xp.where(exists, own, -1)), 2, rows, -1)
    first, last = (ops.take_rows(x, near) for x in (first, last))
    base = ops.extend(ops.to_int32(first.reshape(shape) // spec.ratio), 2, rows)
    bounds = key_bounds.by_row(ops, first, last, tile=tile, tiles=tiles)
    return *bounds, own, base, ops.to_int32(xp.amax(own, axis=-1) + 1)


def sizes_of(qkv: Qkv, scale: float | None, rounded=None) -> dict[str, Any]:
    """Return the fields that the specs of all attention kernels have. `rounded` is the same as in
    the step `interval`.
    """
    query, key, value = qkv
    batch, length, heads, width = query.shape
    return {
        "B": batch,
        "T": length,
        "S": key.shape[1] if rounded is None else rounded.key.shape[1],
        "H": heads,
        "Hkv": key.shape[2],
        "D": width,
        "Dv": value.shape[-1],
        "dtype": dtype_name(query),
        "scale": scale_of(scale, width),
        "interpret": interpret.get(),
        **({} if rounded is None else {"fp8": True}),
    }


def scale_of(scale: float | None, width: int) -> float:
    """Return `scale`, or `D**-0.5` if `scale` is None."""
    scale = float(width**-0.5 if scale is None else scale)
    if not scale > 0:
        raise NotImplementedError(f"mosaic: scale must be positive, got {scale}")
    return scale


def gated_sum(ops: ArrayOps, outputs, gates):
    """Compute `sum_c gate[c] * out[c]` for outputs `[B, T, H, Dv]`."""
    gates = [ops.to_float32(gate) for gate in gates]
    (total,) = ops.run(combine.gated_sum(combine_spec(outputs)), *gates, *outputs)
    return total.reshape(outputs[0].shape)


def combine_spec(outputs) -> combine.Combine:
    """Return the spec of kernels that read the outputs of one branch or of all branches. All
    outputs have the same shape.
    """
    *shape, width = outputs[0].shape
    dtype = dtype_name(outputs[0])
    sizes = math.prod(shape), width, len(outputs), dtype
    return combine.Combine(*sizes, interpret=interpret.get())
