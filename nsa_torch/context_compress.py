"""Compressed tokens of a sequence that several ranks share (`context.py`).

A window of `l` tokens belongs to the chunk with its first token. Its rank also needs the tokens
after the chunk, the halo: `l - d` of them if chunks are whole strides, otherwise `l - 1`. The first
tokens of every chunk are gathered for that, then the compressed tokens. Backward the two are
reduce-scatters in float32, and learned windows are made again.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_core import context_layout as layouts
from nsa_core.compress_params import CompressParams
from nsa_core.config import NSAConfig
from nsa_torch import batch_tables
from nsa_torch.chunks import wide
from nsa_torch.compress import compress, used_windows
from nsa_torch.context_ranks import Shards
from nsa_torch.first_order import first_order
from nsa_torch.geometry import geometry, window_starts
from nsa_torch.torch_ops import TORCH_OPS


def compressed_tokens(shards: Shards, x, params, config, cu_seqlens) -> Tensor:
    """`phi` over the windows of the whole sequence `[B, C, Hkv, D]`, of `x` `[B, T, Hkv, D]`."""
    windows: Any = WholeWindows(shards, config)
    if cu_seqlens is not None or shards.chunk % config.compress_stride:
        if cu_seqlens is None:
            cu_seqlens = batch_tables.of_one(shards.length, 0, x.device)
        windows = PackedWindows(shards, config, cu_seqlens)
    # The halo of a chunk is cut from the heads of the chunks behind it: one, or more where chunks
    # are shorter than the halo.
    width = min(windows.halo, shards.chunk)
    heads = [tokens[:, :width] for tokens in x.split(shards.chunk, dim=1)]
    heads = _Gather.apply(shards, "the halo", torch.cat(heads, dim=1).transpose(0, 1))
    if params is None:
        made = _made(windows, None, x, heads)
    else:
        made = _Learned.apply(windows, type(params), x, heads, *params)
    found = _Gather.apply(shards, "compressed tokens", made)
    return windows.joined(found).transpose(0, 1).contiguous()


class _Gather(torch.autograd.Function):
    """What all ranks have of their chunks `[chunks * n, ..]`, in the order of the sequence."""

    @staticmethod
    def forward(ctx: Any, shards: Shards, what: str, x):
        ctx.shards, ctx.what, ctx.count = shards, what, x.shape[0] // len(shards.own)
        return shards.in_order(shards.ranks.gather(x, what)(), ctx.count) if ctx.count else x

    @staticmethod
    @first_order
    def backward(ctx: Any, grad):
        if ctx.count:
            parts = ctx.shards.by_rank(grad.to(wide(grad.dtype)), ctx.count)
            total = ctx.shards.ranks.scatter_sum(parts, f"gradients of {ctx.what}")()
            grad = total.to(grad.dtype)
        return None, None, grad


class _Learned(torch.autograd.Function):
    """`_made`, and for its gradient once more."""

    @staticmethod
    def forward(ctx: Any, windows, kind, *tensors):
        ctx.windows, ctx.kind = windows, kind
        ctx.save_for_backward(*tensors)
        return _made(windows, kind, *tensors)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad):
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
            made = _made(ctx.windows, ctx.kind, *leaves)
            return None, None, *torch.autograd.grad(made, leaves, grad, materialize_grads=True)


def _made(windows, kind, x, heads, *params) -> Tensor:
    """The windows of this rank's chunks, `[chunks * most, B, Hkv, D]`.

    Args:
      heads: the first tokens of all chunks, `[chunks * width, B, Hkv, D]`.
    """
    shards, made = windows.shards, []
    width = heads.shape[0] // len(shards.order)
    heads = F.pad(heads.transpose(0, 1), (0, 0, 0, 0, 0, windows.halo))
    for place, tokens in enumerate(x.split(shards.chunk, dim=1)):
        at = (shards.own[place] + 1) * width
        tokens = torch.cat([tokens, heads[:, at : at + windows.halo]], dim=1)
        made.append(windows.make(place, tokens, kind and kind(*params)))
    return torch.cat(made, dim=1).transpose(0, 1)


class WholeWindows(NamedTuple):
    """The windows of one sequence, one each `d` tokens, in chunks of whole strides."""

    shards: Shards
    config: NSAConfig

    @property
    def halo(self) -> int:
        return self.config.compress_block - self.config.compress_stride

    def make(self, place: int, tokens, params: CompressParams) -> Tensor:
        """Those of a chunk and its halo; behind the last of the sequence they have zeros."""
        first = self.shards.own[place] * self.shards.chunk
        return compress(tokens, params, config=self.config, first=first)

    def joined(self, found) -> Tensor:
        """`[C, ..]` from those of all chunks."""
        return found[: self.config.num_compressed(self.shards.length)]


class PackedWindows:
    """The windows of packed sequences, whose starts are known only to the device, or of one
    sequence whose chunks are no whole strides.

    Two windows start at least `d` tokens from each other, so that a chunk has no more of them than
    a chunk of a single sequence.
    """

    def __init__(self, shards: Shards, config: NSAConfig, cu_seqlens: Tensor):
        self.shards, self.halo = shards, config.compress_block - 1
        found = batch_tables.made(_packed_windows, cu_seqlens, shards=shards, config=config)
        self.taps, self.unused, self.first, self.at, self.covering = found

    def make(self, place: int, tokens, params: CompressParams) -> Tensor:
        taps, unused = self.taps[place], self.unused[place]
        if params is None:
            return _Means.apply(tokens, taps, unused, self.covering[place])
        return used_windows(tokens, taps, unused, params, self.first[place, None])

    def joined(self, found) -> Tensor:
        spare = found.new_zeros(1, *found.shape[1:])
        return torch.cat([found, spare]).index_select(0, self.at)


class _Means(torch.autograd.Function):
    """`used_windows` by means. A token has the gradients of the windows over it, without the
    scattered sum that an index has for its gradient.
    """

    @staticmethod
    def forward(ctx: Any, tokens, taps, unused, covering):
        ctx.save_for_backward(covering)
        ctx.block = taps.shape[-1]
        return used_windows(tokens, taps, unused, None, None)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad):
        (covering,) = ctx.saved_tensors
        means = F.pad(grad.to(wide(grad.dtype)) / ctx.block, (0, 0, 0, 0, 0, 1))
        return means[:, covering].sum(dim=1).to(grad.dtype), None, None, None


def _packed_windows(cu_seqlens, *, shards: Shards, config: NSAConfig):
    """For the `most` slots of each chunk of this rank: the tokens `[chunks, most, l]` in the chunk
    and its halo, whether the slot is empty `[chunks, most, 1, 1]`, and the position of the first
    token `[chunks, most]`. For each window of the sequence: its slot among those of all chunks
    `[C]`, or their number if it has none. For each token of a chunk and its halo: the slots of its
    windows `[chunks, l/d, tokens]`, filled with `most`.
    """
    length, chunk, device = shards.length, shards.chunk, cu_seqlens.device
    most = -(-chunk // config.compress_stride)
    where = geometry(
        1, length, config=config, kv_len=length, cu_seqlens=cu_seqlens, device=device
    )
    begin = window_starts(where, config)[None]
    own, at = layouts.windows_of_chunks(TORCH_OPS, begin, shards, most)
    local = torch.cat(own)
    block = config.compress_block
    taps = local.clamp(max=chunk - 1)[..., None] + torch.arange(block, device=device)
    tokens = (x + number * chunk for x, number in zip(own, shards.own, strict=True))
    position = where.position[0, torch.cat([*tokens]).clamp(max=length - 1)]
    token = torch.arange(chunk + block - 1, device=device).expand(len(shards.own), -1)
    last = torch.searchsorted(local, token.contiguous(), right=True) - 1
    covering = []
    for back in range(block // config.compress_stride):
        slot = (last - back).clamp(min=0)
        start = local.gather(1, slot)
        inside = (last >= back) & (token < start + block) & (start < chunk)
        covering.append(torch.where(inside, slot, most))
    unused = (local >= chunk)[..., None, None]
    return taps, unused, position, at[0], torch.stack(covering, dim=1)
