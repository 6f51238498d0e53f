"""Defines the forward steps on Triton kernels, for either framework.

The data flow is interval (compressed) -> select_blocks -> selected. The step interval (sliding)
does not depend on the other steps.

The functions, their arguments and their results are the same as in `mosaic_forward`, since
`fused.py` calls either module. `ops` is an `ArrayOps` that launches Triton kernels.
`ops.capability` returns the compute capability of the GPU.
"""

import math
from collections.abc import Sequence
from typing import Any

from kernels_pallas.kernel import Array, float32, int32
from kernels_pallas.triton import tiling as tilings
from kernels_pallas.triton.descriptions import Problem
from kernels_pallas.triton.kernel import TritonKernel, cdiv
from kernels_pallas.triton.tiling import LEAST, power
from nsa_core.array_ops import ArrayOps, QueryLayout
from nsa_core.steps.key_bounds import Bounds, VisibleCompressed, align_sequences, zeros_like
from nsa_core.steps.params import Params, Qkv
from nsa_core.validate import dtype_name

type OutLse = Sequence[Any]


def interval(
    ops: ArrayOps, qkv: Qkv, bounds: Bounds, params: Params, gate=None, added=None
) -> OutLse:
    """Compute attention over the keys in `bounds`, for the compressed or the sliding branch."""
    p = problem_of(ops, qkv, params.scale)
    tiling, (first, last) = p.tiling("forward"), interval_of(ops, params.layout, bounds)
    launch = "interval:forward", tiling, cdiv(p.T * p.group, tiling.rows)
    return _attended(ops, p, launch, (*qkv, first, last), first, gate, added)


def _attended(ops, p: Problem, launch, arrays, unused, gate, added, **constants) -> OutLse:
    """Run a kernel of attention and return `(out, lse)`. If the output is added to a gated sum,
    the log-sum-exp is None. Arrays that are None are not read by the kernel.
    """
    rows = p.B, p.T, p.H
    kernel = p.kernel(
        launch,
        [p.log2_scale],
        [Array((*rows, p.Dv), p.dtype), float32(*rows)],
        GATED=gate is not None,
        ADDED=added is not None,
        **constants,
    )
    gate = unused if gate is None else ops.to_float32(gate)
    out, lse = ops.run(kernel, *arrays, gate, unused if added is None else added)
    return out, lse if added is None else None


def selected(
    ops: ArrayOps,
    qkv: Qkv,
    block_indices,
    params: Params,
    gate=None,
    added=None,
    block_lists=None,
) -> OutLse:
    """Compute attention over the blocks `block_indices` `[B, T, Hkv, n]`.

    `block_lists` is the result of `tile_block_lists`, or None.
    """
    if block_lists is None:
        block_lists = tile_block_lists(ops, qkv, block_indices, params)
    p = problem_of(ops, qkv, params.scale)
    launch, constants = of_tiles(p, "forward", block_indices, params)
    position, key_start = places(ops, params.layout)
    arrays = *qkv, block_indices, position, key_start, *block_lists
    return _attended(ops, p, launch, arrays, position, gate, added, **constants)


def _tiles(p: Problem, block_indices, params: Params) -> dict[str, int]:
    """Return the sizes of tiles.

    If the heads of one token fill 16 rows or more, a tile has one token. If a token has fewer
    heads, a tile has the largest number of adjacent tokens that fits in 16 rows.
    """
    tokens, n = max(LEAST // p.group, 1), block_indices.shape[-1]
    slots = power(n, 1)
    sizes = {"N": n, "SLOTS": slots, "BLOCK": params.config.select_block, "TOKENS": tokens}
    return sizes | {"ENTRIES": power(tokens, 1) * slots}


def of_tiles(p: Problem, name: str, block_indices, params: Params):
    """Return the function, the tiling, the number of programs and the constants of a kernel that
    reads the block lists of tiles.
    """
    sizes = _tiles(p, block_indices, params)
    tokens, block = sizes["TOKENS"], sizes["BLOCK"]
    tiling = p.tiling(name, min(power(p.group), 64), min(power(block), 64))
    sizes["CHUNKS"] = cdiv(p.group, tiling.rows) if tokens == 1 else 1
    sizes["PARTS"] = cdiv(block, tiling.keys)
    launch = f"selected:{name}", tiling, cdiv(p.T, tokens) * sizes["CHUNKS"]
    return launch, sizes


def tile_block_lists(ops: ArrayOps, qkv: Qkv, block_indices, params: Params):
    """Build `(lists, counts)` from `block_indices`, for the step `selected` and its gradient."""
    p = problem_of(ops, qkv, params.scale)
    position, key_start = places(ops, params.layout)
    sizes = _tiles(p, block_indices, params)
    if sizes["TOKENS"] == 1:  # the kernels read the token's blocks directly
        return position, position
    programs, entries = p.pairs * cdiv(p.T, sizes["TOKENS"]), sizes["ENTRIES"]
    kernel = TritonKernel.of(
        "selected:tile_block_lists",
        programs,
        [p.T],
        [int32(programs, entries), int32(programs)],
        HEADS=p.Hkv,
        CHUNK=min(entries, 32),
        **sizes,
    )
    return ops.run(kernel, block_indices, position, key_start)


def select_blocks(ops: ArrayOps, query, key, lse, params: Params, num_blocks: int):
    """Return the selection int32 `[B, T, Hkv, n]` from compressed keys `[B, C, Hkv, D]` and the
    log-sum-exp `[B, T, H]` of the compressed branch. No array has `num_blocks` entries per
    query.
    """
    del num_blocks
    layout, config, scale, _ = params
    batch, kv_heads = query.shape[0], key.shape[2]
    first, last = interval_of(ops, layout, VisibleCompressed(config))
    base = layout.compressed_start
    if layout.packed:
        key, base, first, last = align_sequences(ops, key, base, first, last, config)
    else:
        (base,) = ops.derive(zeros_like, first)
    if key.shape[1] == 0:  # all scores are zero, and no key is read
        key = ops.zeros(query, (batch, 1, kv_heads, query.shape[-1]))
    p = problem_of(ops, Qkv(query, key, key), scale)
    position, _ = places(ops, layout)
    bounds = map(ops.to_int32, (first, last, position, base))
    (chosen,) = ops.run(_best_blocks(p, config), query, key, lse, *bounds)
    return chosen


def _best_blocks(p: Problem, config) -> TritonKernel:
    itemsize = tilings.itemsize(p.dtype)
    tiling = tilings.scores_tiling(p.group, p.D, itemsize, p.capability)
    if tiling is None:
        raise NotImplementedError(
            f"triton: no tiles for the scores fit on a GPU of capability {p.capability}"
        )
    n, ratio = config.num_selected, config.select_block // config.compress_stride
    group, best, ratio_rows = power(p.group, 1), power(n, 2), power(ratio, 1)
    tokens = max(tiling.rows // group, 1)
    blocks = max(tiling.keys // ratio_rows, 1)
    return p.kernel(
        ("scores:best_blocks", tiling, cdiv(p.T, tokens)),
        [p.log2_scale],
        [int32(p.B, p.T, p.Hkv, n)],
        N=n,
        SELECT_BLOCK=config.select_block,
        TOKENS=tokens,
        GROUP_COLUMNS=group,
        BLOCKS=blocks,
        RATIO=ratio,
        RATIO_ROWS=ratio_rows,
        COVER=config.compress_block // config.compress_stride,
        NUM_INITIAL=config.num_initial,
        NUM_LOCAL=config.num_local,
        BEST=best,
        DOUBLINGS=max((best // blocks).bit_length() - 1, 0),
    )


def places(ops: ArrayOps, layout: QueryLayout):
    """Return `position` and `key_start`, both int32 `[B, T]`."""
    return ops.to_int32(layout.position), ops.to_int32(layout.key_start)


def interval_of(ops: ArrayOps, layout: QueryLayout, bounds: Bounds):
    """Return the `first` and the `last` key of each query, both int32 `[B, T]`."""
    return [ops.to_int32(x) for x in bounds.of(ops, layout)]


def problem_of(ops: ArrayOps, qkv: Qkv, scale: float | None) -> Problem:
    """Return the sizes of a branch."""
    query, key, value = qkv
    batch, length, heads, width = query.shape
    return Problem(
        B=batch,
        T=length,
        S=key.shape[1],
        H=heads,
        Hkv=key.shape[2],
        D=width,
        Dv=value.shape[3],
        dtype=dtype_name(query),
        scale=float(width**-0.5 if scale is None else scale),
        capability=ops.capability(query),
    )


def rowwise(function: str, like, outputs) -> TritonKernel:
    """Return the launch of a function in `combine.py` on the rows of arrays like `like` `[..,
    width]`.
    """
    *rows, width = like.shape
    count, tile = math.prod(rows), max(4096 // power(width), 1)
    sizes = {"WIDTH": width, "ROWS": tile}
    return TritonKernel.of(f"combine:{function}", cdiv(count, tile), [count], outputs, **sizes)


def gated_sum(ops: ArrayOps, outputs, gates):
    """Compute `sum_c gate[c] * out[c]` for outputs `[B, T, H, Dv]`."""
    gates = [ops.to_float32(gate) for gate in gates]
    kernel = rowwise("gated_sum", outputs[0], [array_of(outputs[0])])
    (total,) = ops.run(kernel, *outputs, *gates)
    return total


def array_of(x) -> Array:
    """Return the shape and dtype of an array, for descriptions."""
    return Array(tuple(x.shape), dtype_name(x))
