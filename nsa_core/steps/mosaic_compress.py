"""Computes compression by means, and its gradient, on Mosaic kernels for either framework."""

import dataclasses
from typing import Any

from kernels_pallas.mosaic.capability import interpret
from kernels_pallas.specs.compress import Means, compress_means, merge_key_gradients
from nsa_core.array_ops import ArrayOps, QueryLayout, derived, like
from nsa_core.steps.params import Params
from nsa_core.validate import dtype_name


def means(ops: ArrayOps, key, value, params: Params) -> tuple[Any, Any]:
    """Return the means of the windows of tokens `[B, S, Hkv, .]`, as `[B, C, Hkv, D]` and `[B,
    C, Hkv, Dv]`. Zeros follow the means, up to a whole selection block. No query attends to the
    zeros after the means, but the score kernel reads these zeros. In packed rows the means are
    in the slots of their sequences (`nsa_core.varlen`).
    """
    if not params.config.num_compressed(key.shape[1]):
        key, value = (ops.zeros(x, (x.shape[0], 0, *x.shape[2:])) for x in (key, value))
        return key, value
    spec = _spec(key, value, params)
    key, value = ops.run(compress_means(spec), key, value, *_key_tiles(params.layout))
    return key, value


def gradients(
    ops: ArrayOps, compressed, others, length: int, params: Params
) -> tuple[Any, Any]:
    """Return dk and dv, `[B, length, Hkv, .]`, of the tokens from which `means` computed the means.

    Args:
      compressed: The gradients of the means.
      others: `(dk, dv)` of each other branch that read the same tokens. In packed rows, the
        gradients of the first of the `others` may be in slots, `[B, places, Hkv, .]`.
    """
    layout = params.layout
    keys, values = ([pair[i] for pair in others] for i in range(2))
    placed = sum(x.shape[1] != length for x in keys)
    if not params.config.num_compressed(length):
        for arrays in (keys, values):
            arrays[:placed] = map(layout.varlen.of_keys, arrays[:placed]) if placed else []
        return _sum(ops, compressed[0], keys, length), _sum(ops, compressed[1], values, length)
    key, value = compressed
    spec = _spec(key, value, params, length, len(others))
    spec = dataclasses.replace(spec, placed=placed)
    arrays = *compressed, *keys, *values, *_key_tiles(layout)
    key, value = ops.run(merge_key_gradients(spec), *arrays)
    return key, value


def _key_tiles(layout: QueryLayout):
    return () if layout.varlen is None else layout.varlen.key_tiles


def _sum(ops, compressed, arrays, length):
    """Return the gradient of tokens if there are no windows: the sum of the gradients from the
    other branches.
    """
    if arrays:
        return ops.derive(_total, *arrays)[0]
    return ops.extend(compressed, 1, length, 0.0)


@derived(lambda first, *others: [like(first)])
def _total(ops, first, *others):
    return [sum(others, first)]


def _spec(key, value, params: Params, length: int | None = None, others: int = 0) -> Means:
    layout, config, *_ = params
    batch, found, kv_heads, width = key.shape
    packed = {}
    if layout.varlen is not None:
        capacity = layout.varlen.capacity
        packed = {"places": capacity.places, "unit": capacity.unit}
    return Means(
        B=batch,
        S=found if length is None else length,
        Hkv=kv_heads,
        D=width,
        Dv=value.shape[-1],
        block=config.compress_block,
        stride=config.compress_stride,
        dtype=dtype_name(key),
        multiple=config.select_block // config.compress_stride,
        others=others,
        **packed,
        interpret=interpret.get(),
    )
