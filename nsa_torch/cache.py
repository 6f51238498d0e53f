"""Decoding in torch: a preallocated cache, and one function for prefill, chunk and token.

The twin of `nsa_jax.cache`. The cache is written in place; where a gradient has to flow
through the new tokens, into a copy of it. Nothing grows: a write past the capacity is a
`ValueError`.
"""

import dataclasses

import torch
from torch import Tensor

from nsa_jax import validate
from nsa_jax.compress_params import CompressParams
from nsa_jax.config import NSAConfig
from nsa_jax.types import Branches
from nsa_torch import checks, functional
from nsa_torch.compress import apply_phi
from nsa_torch.dispatch import choose, description


@dataclasses.dataclass
class NSACache:
    """`M`: capacity in tokens. Sliding fields are None where it reads the selected ones."""

    selected_key: Tensor  # [B, M, Hkv, D]
    selected_value: Tensor  # [B, M, Hkv, Dv]
    sliding_key: Tensor | None  # [B, M, Hkv, D]
    sliding_value: Tensor | None  # [B, M, Hkv, Dv]
    compressed_key: Tensor  # [B, C + 1, Hkv, D], the last slot takes what is not complete yet
    compressed_value: Tensor  # [B, C + 1, Hkv, Dv]
    recent_key: Tensor  # [B, l - 1, Hkv, D], raw tokens of the compressed branch
    recent_value: Tensor  # [B, l - 1, Hkv, Dv]
    length: Tensor  # int32 [B], tokens seen by each sequence
    longest: int = 0  # no sequence is longer; known on the host

    @property
    def capacity(self) -> int:
        return self.selected_key.shape[1]

    def clone(self) -> "NSACache":
        """A copy that shares no memory with this one."""
        return dataclasses.replace(
            self,
            **{
                field.name: value.clone()
                for field in dataclasses.fields(self)
                if isinstance(value := getattr(self, field.name), Tensor)
            },
        )


def init_cache(
    batch: int,
    capacity: int,
    kv_heads: int,
    key_width: int,
    value_width: int,
    *,
    config: NSAConfig,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    separate: bool = False,
) -> NSACache:
    """An empty cache for `capacity` tokens.

    Args:
      separate: whether the sliding branch has keys and values of its own (`Branches`).
    """
    validate.sizes(
        batch=batch,
        capacity=capacity,
        kv_heads=kv_heads,
        key_width=key_width,
        value_width=value_width,
    )

    def zeros(length, width):
        return torch.zeros(batch, length, kv_heads, width, dtype=dtype, device=device)

    slots, recent = config.num_compressed(capacity) + 1, config.compress_block - 1
    return NSACache(
        zeros(capacity, key_width),
        zeros(capacity, value_width),
        zeros(capacity, key_width) if separate else None,
        zeros(capacity, value_width) if separate else None,
        zeros(slots, key_width),
        zeros(slots, value_width),
        zeros(recent, key_width),
        zeros(recent, value_width),
        torch.zeros(batch, dtype=torch.int32, device=device),
    )


def cached_attention(
    query: Tensor,
    key: Tensor | Branches[Tensor],
    value: Tensor | Branches[Tensor],
    gates: Tensor | Branches[Tensor],
    cache: NSACache,
    *,
    config: NSAConfig = NSAConfig(),
    compress_params: tuple[CompressParams, CompressParams] = (None, None),
    scale: float | None = None,
    implementation: str | Branches[str | None] | None = None,
) -> tuple[Tensor, NSACache]:
    """Appends `T >= 1` tokens to the cache and attends from them: `(out, cache)`.

    Arguments and errors as in `nsa_jax.cached_attention`. Go on with the cache that comes
    back: it is the one given, unless a gradient made a copy necessary.
    """
    key, value = Branches.each(key), Branches.each(value)
    gates = validate.gates(gates, query)
    validate.cached(query, key, value, cache, config, compress_params, scale)
    checks.devices(query, {"query": query, "cache": cache.selected_key})
    num_new = query.shape[1]
    if cache.longest + num_new > cache.capacity:
        raise ValueError(
            f"cache capacity is {cache.capacity} tokens, got {cache.longest + num_new}"
        )
    cache = update(cache, key, value, config, compress_params)
    width = cache.selected_value.shape[-1]
    memory = {
        field.name: x
        for field in dataclasses.fields(cache)
        if isinstance(x := getattr(cache, field.name), Tensor)
    }
    memory["query"] = query
    problem = query, cache.selected_key, width, config, False, memory
    chosen = choose(description(*problem, gates, cached=True), implementation)
    tokens, slots = cache.longest, config.num_compressed(cache.longest)
    if "mosaic" in chosen:
        # Kernels are made for one number of keys: all that there is room for.
        tokens, slots = cache.capacity, None
    selected = cache.selected_key[:, :tokens], cache.selected_value[:, :tokens]
    sliding = selected
    if cache.sliding_key is not None and cache.sliding_value is not None:
        sliding = cache.sliding_key[:, :tokens], cache.sliding_value[:, :tokens]
    compressed = cache.compressed_key[:, :slots], cache.compressed_value[:, :slots]
    keys, values = (Branches(None, *pair) for pair in zip(selected, sliding, strict=True))
    lengths = {"config": config, "kv_len": cache.length, "cu_seqlens": None, "scale": scale}
    tensors = query, keys, values, gates, compressed, None
    return functional.attend(*tensors, chosen, lengths, clean=True), cache


def update(cache, key, value, config, compress_params) -> NSACache:
    """The cache with the new tokens in it, `[B, T, Hkv, .]` in each branch."""
    new = (*key, *value)
    if torch.is_grad_enabled() and any(x.requires_grad for x in new):
        cache = cache.clone()
    batch, num_new = key.selected.shape[:2]
    row = torch.arange(batch, device=cache.length.device)[:, None]
    place = cache.length[:, None] + torch.arange(num_new, device=row.device)
    cache.selected_key[row, place] = key.selected
    cache.selected_value[row, place] = value.selected
    if cache.sliding_key is not None and cache.sliding_value is not None:
        cache.sliding_key[row, place] = key.sliding
        cache.sliding_value[row, place] = value.sliding
    for buffer, recent, tokens, params in (
        (cache.compressed_key, cache.recent_key, key.compressed, compress_params[0]),
        (cache.compressed_value, cache.recent_value, value.compressed, compress_params[1]),
    ):
        _emit(buffer, recent, tokens, cache.length, config, params)
    cache.length = cache.length + num_new
    cache.longest += num_new
    return cache


def _emit(buffer, recent, new, start, config, params):
    """Writes the compressed tokens whose last raw token is among `new`."""
    block, stride = config.compress_block, config.compress_stride
    num_new, spare = new.shape[1], buffer.shape[1] - 1
    raw = torch.cat([recent, new], dim=1)
    # Token i ends at i*d + l - 1; the first to end at or after `start`, and its followers.
    first = (-((block - 1 - start) // stride)).clamp(min=0)
    index = first[:, None] + torch.arange(-(-num_new // stride), device=new.device)
    begin = index * stride - start[:, None] + block - 1
    taps = begin[..., None] + torch.arange(block, device=new.device)
    row = torch.arange(new.shape[0], device=new.device)[:, None]
    windows = raw[row[..., None], taps.clamp(max=raw.shape[1] - 1)]
    complete = index * stride + block <= start[:, None] + num_new
    slot = torch.where(complete, index, spare)
    buffer[row, slot] = apply_phi(windows, params)
    recent.copy_(raw[:, num_new:])
