"""The gated sum of the branches' outputs, and its gradients, of any order."""

from typing import Any

import torch
from torch import Tensor

from nsa_core.types import Branches
from nsa_torch.chunks import chunks, wide
from nsa_torch.plain import plain


def combine(outputs: Branches[Tensor], gates: Branches[Tensor]) -> Tensor:
    """`sum_c gate[c] * out[c]` (Eq. 5), accumulated in float32; gates `[B, T, H]`."""
    if not plain((*outputs, *gates)):
        return _weighted_sum(outputs, gates).to(outputs[0].dtype)
    return _Combine.apply(*outputs, *gates)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors):
        outputs, gates = tensors[:3], tensors[3:]
        ctx.save_for_backward(*tensors)
        total = torch.empty_like(outputs[0])
        for part in _combine_parts(total):
            cut = ([x[:, part] for x in each] for each in (outputs, gates))
            total[:, part] = _weighted_sum(*cut)
        return total

    @staticmethod
    def backward(ctx: Any, grad):
        saved = ctx.saved_tensors  # once: a checkpoint gives them no second time
        outputs, gates = saved[:3], saved[3:]
        grad_outputs = [torch.empty_like(x) for x in outputs]
        grad_gates = [torch.empty_like(x) for x in gates]
        for part in _combine_parts(grad):
            for out, gate, grad_out, grad_gate in zip(
                outputs, gates, grad_outputs, grad_gates, strict=True
            ):
                grad_out[:, part] = _gated(grad[:, part], gate[:, part])
                product = out[:, part].to(wide(out.dtype)) * grad[:, part]
                grad_gate[:, part] = product.sum(dim=-1)
        return *grad_outputs, *grad_gates


def _weighted_sum(outputs, gates):
    compressed, selected, sliding = map(_gated, outputs, gates)
    return compressed + selected + sliding


def _gated(x, gate):
    return x.to(wide(x.dtype)) * gate.to(wide(x.dtype))[..., None]


def _combine_parts(x):
    return chunks(x.shape[1], x[:, :1].numel() * wide(x.dtype).itemsize)
