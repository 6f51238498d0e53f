"""The selected branch on a Triton kernel (implementation `triton`): any NVIDIA GPU from Ampere.

One operator (`operators.py`). Any strides, float32 too. Gradients are those of `sdpa`, which
computes the branch again a chunk at a time.
"""

import math

import torch

from nsa_torch import operators, sdpa
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
    place = operators.arguments(config, kv_len, cu_seqlens, scale)
    operator = torch.ops.nsa.triton_selected_attention
    out, lse = operator(query, key, value, block_indices, *place)
    return out, lse.detach()


def _backward(grad, _, query, key, value, indices, kv_len, lengths, cu_seqlens, config, scale):
    query, key, value = (x.detach().requires_grad_() for x in (query, key, value))
    with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
        out, _ = sdpa.selected_attention(
            query,
            key,
            value,
            indices,
            config=operators.config_of(*config),
            kv_len=kv_len if lengths is None else lengths,
            cu_seqlens=cu_seqlens,
            scale=scale,
            with_lse=False,
        )
    return [x.contiguous() for x in torch.autograd.grad(out, (query, key, value), grad)]


def _forward(query, key, value, indices, kv_len, lengths, cu_seqlens, config, scale):
    # Not above: the module of a kernel needs triton.
    from kernels_pallas.triton import selected

    config = operators.config_of(*config)
    batch, length, heads, width = query.shape
    kv_heads, value_width = value.shape[2:]
    group = heads // kv_heads
    out, lse = operators.branch_shapes(query, key, value)
    where = geometry_of(query, config, kv_len if lengths is None else lengths, cu_seqlens)
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


NAME = "triton_selected_attention"
operators.define_branch(NAME, operators.CHOSEN, _forward, "Tensor lse", _backward)
