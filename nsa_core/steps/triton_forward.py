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
from nsa_core.config import NSAConfig
from nsa_core.steps.key_bounds import Bounds, VisibleCompressed, Window
from nsa_core.steps.mosaic_forward import nothing_seen
from nsa_core.steps.packed_keys import align_sequences, zeros_like
from nsa_core.validate import dtype_name

type OutLse = Sequence[Any]


def compressed(
    ops: ArrayOps,
    query,
    key,
    value,
    layout: QueryLayout,
    config: NSAConfig,
    scale: float | None,
    gate=None,
) -> OutLse:
    """Attention over compressed tokens: key `[B, C, Hkv, D]`, value `[B, C, Hkv, Dv]`."""
    if key.shape[1] == 0:
        return ops.derive(nothing_seen, query, width=value.shape[-1])
    return _interval(ops, query, key, value, VisibleCompressed(config), layout, scale, gate)


def sliding(
    ops: ArrayOps,
    query,
    key,
    value,
    layout: QueryLayout,
    config: NSAConfig,
    scale: float | None,
    gate=None,
    added=None,
) -> OutLse:
    """Attention over the last `window` keys."""
    bounds = Window(config, key.shape[1])
    return _interval(ops, query, key, value, bounds, layout, scale, gate, added)


def _interval(
    ops, query, key, value, bounds: Bounds, layout, scale, gate, added=None
) -> OutLse:
    problem = problem_of(ops, query, key, value, scale, gate, added)
    first, last = interval_of(ops, layout, bounds)
    unused = first
    out, lse = ops.run(
        descriptions.interval_forward(problem),
        *(query, key, value, first, last),
        unused if gate is None else ops.to_float32(gate),
        unused if added is None else added,
    )
    return out, None if problem.added else lse


def selected(
    ops: ArrayOps,
    query,
    key,
    value,
    block_indices,
    layout: QueryLayout,
    config: NSAConfig,
    scale: float | None,
    gate=None,
    added=None,
    block_lists=None,
) -> OutLse:
    """Attention over the blocks `block_indices` `[B, T, Hkv, n]`.

    `block_lists`: `tile_block_lists` where they are there already.
    """
    arrays = query, key, value, block_indices
    if block_lists is None:
        block_lists = tile_block_lists(ops, *arrays, layout, config, scale)
    problem = problem_of(ops, query, key, value, scale, gate, added)
    kernel = Selected(problem, block_indices.shape[-1], config.select_block)
    position, key_start = places(ops, layout)
    unused = position
    out, lse = ops.run(
        kernel.forward(),
        *(*arrays, position, key_start, *block_lists),
        unused if gate is None else ops.to_float32(gate),
        unused if added is None else added,
    )
    return out, None if problem.added else lse


def selected_and_sum(
    ops: ArrayOps,
    query,
    key,
    value,
    block_indices,
    layout: QueryLayout,
    config: NSAConfig,
    scale: float | None,
    block_lists,
    compressed,
    sliding,
    gates,
) -> tuple[OutLse, Any]:
    """`selected`, and the `gated_sum` of its output with those of the `compressed` and the
    `sliding` branch.
    """
    arrays, place = (query, key, value, block_indices), (layout, config, scale)
    found = selected(ops, *arrays, *place, block_lists=block_lists)
    return found, gated_sum(ops, (compressed, found[0], sliding), gates)


def tile_block_lists(
    ops: ArrayOps,
    query,
    key,
    value,
    block_indices,
    layout: QueryLayout,
    config: NSAConfig,
    scale: float | None,
):
    """`(lists, counts)`: what `selected` and its gradient read of `block_indices`."""
    problem = problem_of(ops, query, key, value, scale)
    kernel = Selected(problem, block_indices.shape[-1], config.select_block)
    position, key_start = places(ops, layout)
    lists = kernel.block_lists()
    if lists is None:  # of one token: its own blocks, which the kernels read
        return position, position
    return ops.run(lists, block_indices, position, key_start)


def select_blocks(
    ops: ArrayOps,
    query,
    key,
    lse,
    layout: QueryLayout,
    config: NSAConfig,
    scale: float | None,
    num_blocks: int,
):
    """The selection int32 `[B, T, Hkv, n]` from compressed keys `[B, C, Hkv, D]` and the
    log-sum-exp `[B, T, H]` of the compressed branch; no array is as long as `num_blocks`.
    """
    del num_blocks
    batch, kv_heads = query.shape[0], key.shape[2]
    first, last = interval_of(ops, layout, VisibleCompressed(config))
    base = layout.compressed_start
    if layout.packed:
        key, base, first, last = align_sequences(ops, key, base, first, last, config)
    else:
        (base,) = ops.derive(zeros_like, first)
    if key.shape[1] == 0:  # scores are zero, and no key is read
        key = ops.zeros(query, (batch, 1, kv_heads, query.shape[-1]))
    problem = problem_of(ops, query, key, key, scale)
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
    ops: ArrayOps,
    query,
    key,
    value,
    scale: float | None,
    gate=None,
    added=None,
    lse_grad: bool = False,
) -> Problem:
    """The sizes of a branch."""
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
        lse_grad=lse_grad,
    )


def gated_sum(ops: ArrayOps, outputs, gates):
    """`sum_c gate[c] * out[c]`, `[B, T, H, Dv]`, of outputs in that shape."""
    gates = [ops.to_float32(gate) for gate in gates]
    (total,) = ops.run(descriptions.gated_sum(array_of(outputs[0])), *outputs, *gates)
    return total


def array_of(x) -> Array:
    """Shape and dtype, for descriptions."""
    return Array(tuple(x.shape), dtype_name(x))
