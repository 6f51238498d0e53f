"""What e4m3 makes of numbers: tokens of a cache, and attention with products in 8 bits.

Of attention the model rounds what the kernels round, and nothing else. Sums are in float64 and the
softmax is not taken block by block, so that a kernel's error beside float64 may be some more.
"""

import ml_dtypes
import numpy as np
import torch

LARGEST, OFFSET = 448.0, 256.0


def as_stored(x: np.ndarray) -> np.ndarray:
    """What a cache in fp8 has of rows of tokens. Quotients and products are of float32: where they
    are cast to 16 bits, ties are frequent.
    """
    x = x.astype(np.float32)
    largest = np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(1e-30))
    codes = (x * (np.float32(448) / largest)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return codes * (largest * np.float32(1 / 448))


def e4m3(x):
    """Rounded to the nearest number, beyond the range to its end."""
    return x.clamp(-LARGEST, LARGEST).float().to(torch.float8_e4m3fn).to(x.dtype)


def power_of_two(x):
    """A scale `[B, Hkv, D]` with which the largest sizes `x` become 128 to 256."""
    return torch.exp2(torch.floor(torch.log2(x.clamp(min=2.0**-126))) - 7).clamp(min=2.0**-100)


def rounded(key, value, end):
    """Keys without their mean and values as kernels see them, and the scale of keys; float64.

    Args:
      end: of each row, the key after the last that some query sees.
    """
    there = torch.arange(key.shape[1], device=key.device) < end[:, None]
    key, value = (torch.where(there[..., None, None], x.double(), 0) for x in (key, value))
    mean = key.sum(1) / end[:, None, None]
    of_keys, of_values = (x.abs().amax(1) for x in (key, value))
    key_scale = power_of_two(of_keys + mean.abs())[:, None]
    value_scale = power_of_two(of_values)[:, None]
    key = e4m3((key - mean[:, None]) / key_scale)
    return key, e4m3(value / value_scale) * value_scale, key_scale


def attention(query, key, value, visible, end, scale=None, in_fp8=True):
    """`[B, T, H, Dv]` of the keys that are `visible`, `[B, Hkv, T, S]`; 0 where none is.

    `in_fp8`: False: exact.
    """
    batch, length, heads, width = query.shape
    kv_heads = key.shape[2]
    scale = width**-0.5 if scale is None else scale
    query = query.double().reshape(batch, length, kv_heads, -1, width)
    if in_fp8:
        key, value, key_scale = rounded(key, value, end)
        query = query * key_scale[:, :, :, None]
        divisor = (query.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=2.0**-100)
        query = e4m3(query / divisor)
    else:
        key, value, divisor = key.double(), value.double().nan_to_num(), 1.0
    logits = torch.einsum("btghd,bsgd->btghs", query, key) * divisor * scale
    seen = visible.permute(0, 2, 1, 3)[:, :, :, None]
    logits = logits.masked_fill(~seen, -torch.inf)
    largest = logits.amax(-1, keepdim=True).clamp(min=-1e300)
    p = torch.exp(logits - largest)
    total = p.sum(-1, keepdim=True)
    if in_fp8:
        p = e4m3(p * OFFSET) / OFFSET
    out = torch.einsum("btghs,bsgd->btghd", p, value) / total.clamp(min=1e-300)
    return out.reshape(batch, length, heads, -1)
