"""The forward steps on Triton kernels, for either framework, in the order of the data.

    compressed -> select_blocks -> selected
                  sliding

Functions, arguments and results are those of `mosaic_forward`: the steps that run all of them
(`fused.py`) know no kernels. `ops` is an `ArrayOps` whose `run` launches a `TritonKernel`, and
which has the `capability` of the GPU.
"""

from collections.abc import Sequence
from typing import Any

from kernels_pallas.kernel import Array
from kernels_pallas.triton import descriptions
from kernels_pallas.triton.descriptions import Problem, Selected
from nsa_core.array_ops import ArrayOps, QueryLayout
from nsa_core.steps.key_bounds import Bounds, VisibleCompressed, Window
from nsa_core.steps.mosaic_forward import nothing_seen
from nsa_core.steps.packed_keys import align_sequences, zeros_like
from nsa_core.steps.params import Params, Qkv
from nsa_core.validate import dtype_name

type OutLse = Sequence[Any]


def compressed(ops: ArrayOps, qkv: Qkv, params: Params, gate=None) -> OutLse:
    """Attention over compressed tokens."""
    if qkv.key.shape[1] == 0:
        return ops.derive(nothing_seen, qkv.query, width=qkv.value.shape[-1])
    return _interval(ops, qkv, VisibleCompressed(params.config), params, gate)


def sliding(ops: ArrayOps, qkv: Qkv, params: Params, gate=None, added=None) -> OutLse:
    """Attention over the last `window` keys."""
    bounds = Window(params.config, qkv.key.shape[1])
    return _interval(ops, qkv, bounds, params, gate, added)


def _interval(ops, qkv: Qkv, bounds: Bounds, params: Params, gate, added=None) -> OutLse:
    problem = problem_of(ops, qkv, params.scale, gate, added)
    first, last = interval_of(ops, params.layout, bounds)
    unused = first
    out, lse = ops.run(
        descriptions.interval_forward(problem),
        *(*qkv, first, last),
        unused if gate is None else ops.to_float32(gate),
        unused if added is None else added,
    )
    return out, None if problem.added else lse


def selected(
    ops: ArrayOps,
    qkv: Qkv,
    block_indices,
    params: Params,
    gate=None,
    added=None,
    block_lists=None,
) -> OutLse:
    """Attention over the blocks `block_indices` `[B, T, Hkv, n]`.

    `block_lists`: `tile_block_lists` where they are there already.
    """
    if block_lists is None:
        block_lists = tile_block_lists(ops, qkv, block_indices, params)
    problem = problem_of(ops, qkv, params.scale, gate, added)
    kernel = Selected(problem, block_indices.shape[-1], params.config.select_block)
    position, key_start = places(ops, params.layout)
    unused = position
    out, lse = ops.run(
        kernel.forward(),
        *(*qkv, block_indices, position, key_start, *block_lists),
        unused if gate is None else ops.to_float32(gate),
        unused if added is None else added,
    )
    return out, None if problem.added else lse


def selected_and_sum(
    ops: ArrayOps, qkv: Qkv, block_indices, params: Params, block_lists, others, gates
) -> tuple[OutLse, Any]:
    """`selected`, and the `gated_sum` of its output with the `others`: those of the compressed and
    the sliding branch.
    """
    found = selected(ops, qkv, block_indices, params, block_lists=block_lists)
    return found, gated_sum(ops, (others[0], found[0], others[1]), gates)


def tile_block_lists(ops: ArrayOps, qkv: Qkv, block_indices, params: Params):
    """`(lists, counts)`: what `selected` and its gradient read of `block_indices`."""
    problem = problem_of(ops, qkv, params.scale)
    kernel = Selected(problem, block_indices.shape[-1], params.config.select_block)
    position, key_start = places(ops, params.layout)
    lists = kernel.block_lists()
    if lists is None:  # of one token: its own blocks, which the kernels read
        return position, position
    return ops.run(lists, block_indices, position, key_start)


def select_blocks(ops: ArrayOps, query, key, lse, params: Params, num_blocks: int):
    """The selection int32 `[B, T, Hkv, n]` from compressed keys `[B, C, Hkv, D]` and the
    log-sum-exp `[B, T, H]` of the compressed branch; no array is as long as `num_blocks`.
    """
    del num_blocks
    layout, config, scale = params
    batch, kv_heads = query.shape[0], key.shape[2]
    first, last = interval_of(ops, layout, VisibleCompressed(config))
    base = layout.compressed_start
    if layout.packed:
        key, base, first, last = align_sequences(ops, key, base, first, last, config)
    else:
        (base,) = ops.derive(zeros_like, first)
    if key.shape[1] == 0:  # scores are zero, and no key is read
        key = ops.zeros(query, (batch, 1, kv_heads, query.shape[-1]))
    problem = problem_of(ops, Qkv(query, key, key), scale)
    position, _ = places(ops, layout)
    bounds = map(ops.to_int32, (first, last, position, base))
    (chosen,) = ops.run(descriptions.best_blocks(problem, config), query, key, lse, *bounds)
    return chosen


def places(ops: ArrayOps, layout: QueryLayout):
    """`position, key_start`, int32 `[B, T]` both."""
    return ops.to_int32(layout.position), ops.to_int32(layout.key_start)


def interval_of(ops: ArrayOps, layout: QueryLayout, bounds: Bounds):
    """`first, last` of each query, int32 `[B, T]` both."""
    return [ops.to_int32(x) for x in bounds.of(ops, layout)]


def problem_of(
    ops: ArrayOps, qkv: Qkv, scale: float | None, gate=None, added=None, dlse=None
) -> Problem:
    """The sizes of a branch."""
    query, key, value = qkv
    batch, length, heads, width = query.shape
    return Problem(
        B=batch,
        T=length,
        S=key.shape[1],
        H=heads,
        Hkv=key.shape[2],
        D=width,
        Dv=value.shape[-1],
        dtype=dtype_name(query),
        scale=float(width**-0.5 if scale is None else scale),
        capability=ops.capability(query),
        gated=gate is not None,
        added=added is not None,
        lse_grad=dlse is not None,
    )


def gated_sum(ops: ArrayOps, outputs, gates):
    """`sum_c gate[c] * out[c]`, `[B, T, H, Dv]`, of outputs in that shape."""
    gates = [ops.to_float32(gate) for gate in gates]
    (total,) = ops.run(descriptions.gated_sum(array_of(outputs[0])), *outputs, *gates)
    return total


def array_of(x) -> Array:
    """Shape and dtype, for descriptions."""
    return Array(tuple(x.shape), dtype_name(x))
