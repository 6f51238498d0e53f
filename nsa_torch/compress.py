"""Compression: the function `phi` makes one compressed token from each window of `l` tokens. A
window begins every `d` tokens (Eq. 7).
"""

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from nsa_core.compress_params import CompressParams, MLPParams, PoolParams, RopeMLPParams
from nsa_core.config import NSAConfig
from nsa_core.rotation import rotated
from nsa_torch import operators
from nsa_torch.chunks import wide
from nsa_torch.geometry import packed_windows
from nsa_torch.plain import as_given

__all__ = ["MLPParams", "PoolParams", "RopeMLPParams", "compress"]


def compress(
    x: Tensor,
    params: CompressParams = None,
    *,
    config: NSAConfig,
    cu_seqlens: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """Apply `phi` to the windows of `x` [B, S, Hkv, D]. The result is `[B, C, Hkv, D]`. The
    first token of `x` has position `first`. In a packed row, `first` is 0, and the compressed
    tokens of all sequences are in the order of their first tokens, without gaps. The remaining
    slots at the end of the result are zeros.
    """
    if torch.compiler.is_compiling():
        rest = operators.MAY_BE_NAN, *operators.pack_layout(config, first, cu_seqlens, None)
        return operators.call("compress/torch", x, *(params or ()), *rest)[0]
    batch, length, kv_heads, width = x.shape
    block, stride = config.compress_block, config.compress_stride
    count = config.num_compressed(length)
    if count == 0 or x.numel() == 0:  # the gradients are zeros, not None
        windows = x[:, torch.zeros(count, block, dtype=torch.int64, device=x.device)]
        return apply_phi(windows, params, torch.zeros(1, count, device=x.device))
    if cu_seqlens is None:
        # A window consists of l/d stride blocks. Slices select them, so that the gradient needs
        # no scatter.
        shifts = block // stride
        number = count + shifts - 1
        # No einops here, since each use costs the host 10 us in every call.
        blocks = x[:, : number * stride].reshape(batch, number, stride, kv_heads, width)
        if params is None:  # all windows that contain a stride block share the sum of the block
            sums = blocks.sum(dim=2, dtype=wide(x.dtype)).reshape(batch, number, -1)
            means = F.avg_pool2d(sums, (shifts, 1), 1, divisor_override=block)
            return means.to(x.dtype).reshape(batch, count, kv_heads, width)
        windows = [blocks[:, shift : shift + count] for shift in range(shifts)]
        at = first + torch.arange(count, device=x.device)[None] * stride
        return apply_phi(torch.cat(windows, dim=2), params, at)
    taps, unused, at = packed_windows(cu_seqlens, length, config)
    return used_windows(x, taps, unused, params, at)


def gradient_of_means(
    grad: Tensor, length: int, *, config: NSAConfig, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Compute the gradient of `length` tokens from the gradient of the means of their windows."""
    batch, count, kv_heads, width = grad.shape
    block, stride = config.compress_block, config.compress_stride
    dtype, shape = grad.dtype, (batch, length, kv_heads, width)
    if grad.numel() == 0:
        return grad.new_zeros(shape)
    if cu_seqlens is None:
        # The number of windows that contain a stride block.
        shifts = block // stride
        windows = F.pad(
            grad.reshape(batch, count, -1).to(wide(dtype)), (0, 0, *[shifts - 1] * 2)
        )
        sums = F.avg_pool2d(windows, (shifts, 1), 1, divisor_override=block).to(dtype)
        tokens = sums[:, :, None].expand(-1, -1, stride, -1).reshape(batch, -1, kv_heads, width)
        return F.pad(tokens, (0, 0, 0, 0, 0, length - tokens.shape[1]))
    taps, unused, _ = packed_windows(cu_seqlens, length, config)
    each = (grad.masked_fill(unused, 0).to(wide(dtype)) / block).to(dtype)[0, :, None]
    # This equals the gradient of indexing, but the order of the sums is fixed.
    found = grad.new_zeros(shape[1:])
    return found.index_put_((taps,), each.expand(*taps.shape, -1, -1), accumulate=True)[None]


def used_windows(x, taps: Tensor, unused: Tensor, params: CompressParams, first) -> Tensor:
    """Apply `phi` to windows of `x`. The tokens of window `c` have the indices `taps[c]`, where
    `taps` is `[C, l]`. `unused` `[C, 1, 1]` is true for windows whose result is 0. Values of
    padding affect neither the result nor the gradients of the parameters.
    """
    windows = x[:, taps]
    if params is not None:
        windows = windows.masked_fill(unused[..., None], 0)
    return apply_phi(windows, params, first).masked_fill(unused, 0)


def apply_phi(windows: Tensor, params: CompressParams, first: Tensor) -> Tensor:
    """Apply `phi` to each window `[B, C, l, Hkv, D]`, accumulating in float32. The result is
    `[B, C, Hkv, D]`.

    Args:
      first: the position of each window's first token in its sequence, `[B or 1, C]`.
    """
    dtype, total = windows.dtype, wide(windows.dtype)
    if params is None:
        return windows.mean(dim=2, dtype=total).to(dtype)
    if isinstance(params, PoolParams):
        return (windows * params.weight.to(total)[:, None]).sum(dim=2).to(dtype)
    position, w1, b1, w2, b2 = params[:5]
    embedded = (windows + position.to(total)[:, None]).to(dtype)
    flat = rearrange(embedded, "b c l k d -> b c k (l d)")
    with as_given(flat):
        hidden = (flat @ w1.to(dtype)).to(total) + b1.to(total)
        hidden = F.gelu(hidden, approximate="tanh").to(dtype)
        out = (hidden @ w2.to(dtype)).to(total) + b2.to(total)
    if isinstance(params, RopeMLPParams):
        middle = first.to(torch.float32) + (windows.shape[2] - 1) / 2
        angle = middle[..., None, None] * params.rates
        out = rotated(torch, out, angle.cos(), angle.sin())
    return out.to(dtype)


# torch.compile and torch.export trace this operator. Traced slices of an unknown length would be
# valid for some lengths only. The tensors of the operator are the tokens and the parameters.
KINDS = PoolParams, MLPParams, RopeMLPParams
PARAMS: dict[int, Any] = {len(each._fields): each for each in KINDS}


def _compress(*arguments):
    x, *params = arguments[: -operators.REST_COUNT]
    layout = operators.unpack_layout(*arguments[1 - operators.REST_COUNT :])
    given = PARAMS[len(params)](*params) if params else None
    options = {"config": layout["config"], "cu_seqlens": layout["cu_seqlens"]}
    return [compress(x, given, **options, first=layout["kv_len"]).contiguous()]


def _gradients(grad, *arguments):
    count = len(arguments) - operators.REST_COUNT
    leaves = [t.detach().requires_grad_() for t in arguments[:count]]
    with torch.enable_grad():
        (out,) = _compress(*leaves, *arguments[count:])
    return torch.autograd.grad(out, leaves, grad, allow_unused=True, materialize_grads=True)


def _shapes(x, *rest):
    count = operators.config_of(*rest[-2]).num_compressed(x.shape[1])
    return [x.new_empty(x.shape[0], count, *x.shape[2:])]


operators.define("compress/torch", _compress, _shapes, _gradients, floats=1 + max(PARAMS))
