"""The selected branch on a Triton kernel (implementation `triton`): any NVIDIA GPU from Ampere.

Any strides, float32 too. Gradients are those of `sdpa`, which computes the branch again a chunk
at a time.
"""

import math

import torch
from torch.autograd.function import once_differentiable

from nsa_torch import sdpa
from nsa_torch.geometry import geometry_of
from nsa_torch.packing import run


def selected_attention(
    query,
    key,
    value,
    block_indices,
    *,
    config,
    kv_len,
    cu_seqlens=None,
    scale=None,
    with_lse=True,
):
    """`functional.selected_attention`."""
    where = {"config": config, "kv_len": kv_len, "cu_seqlens": cu_seqlens, "scale": scale}
    return _Selected.apply(query, key, value, block_indices, where)


class _Selected(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, indices, where):
        ctx.save_for_backward(query, key, value, indices)
        ctx.where = where
        out, lse = _forward(query, key, value, indices, **where)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        query, key, value, indices = (x.detach() for x in ctx.saved_tensors)
        floats = [x.requires_grad_() for x in (query, key, value)]
        with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
            given = {**ctx.where, "with_lse": False}
            out, _ = sdpa.selected_attention(query, key, value, indices, **given)
        return *torch.autograd.grad(out, floats, grad), None, None


def _forward(query, key, value, indices, *, config, kv_len, cu_seqlens, scale):
    # Not above: the module of a kernel needs triton.
    from kernels_pallas.triton import selected

    batch, length, heads, width = query.shape
    kv_heads, value_width = value.shape[2:]
    group = heads // kv_heads
    out = query.new_empty(batch, length, heads, value_width)
    lse = query.new_empty(batch, length, heads, dtype=torch.float32)
    where = geometry_of(query, config, kv_len, cu_seqlens)
    places = (x.to(torch.int32).contiguous() for x in (where.position, where.key_start))
    scale = width**-0.5 if scale is None else scale
    sizes = {
        "HEADS": kv_heads,
        "GROUP": group,
        "N": indices.shape[-1],
        "BLOCK": config.select_block,
        "WIDTH": width,
        "VALUE_WIDTH": value_width,
    }
    sizes |= selected.options(group, width, value_width, config.select_block, query.itemsize)
    tensors = query, key, value, indices.contiguous(), *places, out, lse
    strides = *query.stride(), *key.stride(), *value.stride()
    log2_scale = scale * math.log2(math.e)
    grid = batch * length, kv_heads
    run(selected.selected_attention, grid, *tensors, log2_scale, length, *strides, **sizes)
    return out, lse
