"""Compressed tokens of a sequence that several ranks share (`context.py`).

A window of `l` tokens belongs to the chunk with its first token. Its rank also needs the tokens
after the chunk, the halo: `l - d` of them if chunks are whole strides, otherwise `l - 1`. The first
tokens of every chunk are gathered for that, then the compressed tokens. Backward the two are
reduce-scatters in float32, and the windows are made again. All is one node of the graph, because
every rank must run each step, whether or not its own tokens depend on it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_core import context_layout as layouts
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
    if cu_seqlens is None and shards.chunk % config.compress_stride == 0:
        windows = WholeWindows(shards, config)
    else:
        if cu_seqlens is None:
            cu_seqlens = batch_tables.of_one(shards.length, 0, x.device)
        windows = PackedWindows(shards, config, cu_seqlens)
    kind = None if params is None else type(params)
    return _Compress.apply(windows, kind, x, *(params or ()))


class _Compress(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, windows, kind, x, *params):
        shards = windows.shards
        following = _halo(shards, x, windows.halo)
        made = windows.make(x, following, kind and kind(*params))
        found = shards.ranks.gather(made, "compressed tokens")()
        ctx.save_for_backward(x, following, *params)
        ctx.windows, ctx.kind = windows, kind
        return windows.joined(shards.in_order(found, windows.most))

    @staticmethod
    @first_order
    def backward(ctx: Any, grad):
        (x, following, *params), windows = ctx.saved_tensors, ctx.windows
        shards, most = windows.shards, windows.most
        parts = shards.by_rank(windows.split(grad.to(wide(grad.dtype))), most)
        share = shards.ranks.scatter_sum(parts, "compressed gradients")()
        if ctx.kind is None and isinstance(windows, PackedWindows):
            grads = windows.gradients_of_tokens(share, x.dtype)
        else:
            grads = _again(windows, ctx.kind, [x, following, *params], share)
        grad_x = grads[0] + _halo_gradient(shards, grads[1], windows.halo).to(x.dtype)
        return None, None, grad_x, *grads[2:]


def _again(windows, kind, tensors, grad) -> Sequence[Tensor]:
    """Gradients of tokens, halo and parameters by making the windows once more."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
        made = windows.make(*leaves[:2], kind and kind(*leaves[2:]))
        if not made.requires_grad:  # no window starts among this rank's tokens
            return [torch.zeros_like(t) for t in leaves]
        options = {"allow_unused": True, "materialize_grads": True}
        return torch.autograd.grad(made, leaves, grad.to(made.dtype), **options)


# The halo of a chunk is cut from the heads of the chunks behind it: one, or more where chunks
# are shorter than the halo.


def _halo(shards: Shards, x, halo: int) -> Tensor:
    """The `halo` tokens after each chunk of this rank, zeros after the last one:
    `[B, chunks, halo, Hkv, D]`.
    """
    width = min(halo, shards.chunk)
    own = x.unflatten(1, (-1, shards.chunk))
    if halo == 0:
        return own[:, :, :0]
    heads = own[:, :, :width].flatten(1, 2).transpose(0, 1)
    found = shards.in_order(shards.ranks.gather(heads, "the halo")(), width)
    found = F.pad(found.transpose(0, 1), (0, 0, 0, 0, 0, halo))
    starts = [(number + 1) * width for number in shards.own]
    return torch.stack([found[:, at : at + halo] for at in starts], dim=1)


def _halo_gradient(shards: Shards, grad, halo: int) -> Tensor:
    """The gradient of `x` from ranks with the previous chunks, float32 `[B, T, Hkv, D]`."""
    width = min(halo, shards.chunk)
    batch, _, _, *rest = grad.shape
    dtype = wide(grad.dtype)
    if halo == 0:
        return grad.new_zeros(batch, len(shards.own) * shards.chunk, *rest, dtype=dtype)
    count = shards.length // shards.chunk
    total = grad.new_zeros(batch, count * width + halo, *rest, dtype=dtype)
    for place, number in enumerate(shards.own):
        at = (number + 1) * width
        total[:, at : at + halo] += grad[:, place]
    heads = total[:, : count * width].transpose(0, 1)
    own = shards.ranks.scatter_sum(shards.by_rank(heads, width), "the halo's gradient")()
    own = own.transpose(0, 1).unflatten(1, (-1, width))
    return F.pad(own, (0, 0, 0, 0, 0, shards.chunk - width)).flatten(1, 2)


class WholeWindows(NamedTuple):
    """The windows of one sequence, one each `d` tokens, in chunks of whole strides."""

    shards: Shards
    config: NSAConfig

    @property
    def most(self) -> int:
        """The number of windows of a chunk. Those after the sequence are zeros and are dropped."""
        return self.shards.chunk // self.config.compress_stride

    @property
    def halo(self) -> int:
        return self.config.compress_block - self.config.compress_stride

    def make(self, x, following, params) -> Tensor:
        """The windows of this rank's chunks, `[chunks * most, B, Hkv, D]`."""
        made = []
        for place, tokens in enumerate(x.split(self.shards.chunk, dim=1)):
            tokens = torch.cat([tokens, following[:, place]], dim=1)
            first = self.shards.own[place] * self.shards.chunk
            made.append(compress(tokens, params, config=self.config, first=first))
        return torch.cat(made, dim=1).transpose(0, 1)

    def joined(self, found) -> Tensor:
        """`[B, C, Hkv, D]` from those of all chunks."""
        count = self.config.num_compressed(self.shards.length)
        return found[:count].transpose(0, 1).contiguous()

    def split(self, grad) -> Tensor:
        """The gradient of `joined`."""
        spare = len(self.shards.order) * self.most - grad.shape[1]
        return F.pad(grad.transpose(0, 1), (0, 0) * (grad.ndim - 1) + (0, spare))


class PackedWindows:
    """The windows of packed sequences, whose starts are known only to the device, or of one
    sequence whose chunks are no whole strides.

    Two windows start at least `d` tokens from each other, so that a chunk has no more of them than
    a chunk of a single sequence.
    """

    def __init__(self, shards: Shards, config: NSAConfig, cu_seqlens: Tensor):
        self.shards, self.halo = shards, config.compress_block - 1
        self.most = -(-shards.chunk // config.compress_stride)
        found = batch_tables.made(_packed_windows, cu_seqlens, shards=shards, config=config)
        self.taps, self.unused, self.first, self.at, self.covering = found

    def make(self, x, following, params) -> Tensor:
        made = []
        for place, tokens in enumerate(x.split(self.shards.chunk, dim=1)):
            tokens = torch.cat([tokens, following[:, place]], dim=1)
            places = self.taps[place], self.unused[place]
            made.append(used_windows(tokens, *places, params, self.first[place, None]))
        return torch.cat(made, dim=1).transpose(0, 1)

    def gradients_of_tokens(self, grad, dtype) -> list[Tensor]:
        """Gradients of the chunks `[B, T, Hkv, D]` and of their halos from those of means: the sum
        over the windows of a token, without the scatter-add that the gradient of an index needs.
        """
        found = []
        for covering, means in zip(self.covering, grad.split(self.most), strict=True):
            means = F.pad(means / self.taps.shape[-1], (0, 0) * (grad.ndim - 1) + (0, 1))
            found.append(means[covering].sum(dim=0).to(dtype).transpose(0, 1))
        tokens, halos = zip(
            *(x.tensor_split([self.shards.chunk], 1) for x in found), strict=True
        )
        return [torch.cat(tokens, dim=1), torch.stack(halos, dim=1)]

    def joined(self, found) -> Tensor:
        spare = found.new_zeros(1, *found.shape[1:])
        return torch.cat([found, spare])[self.at].transpose(0, 1).contiguous()

    def split(self, grad) -> Tensor:
        """Move values of unused slots to the spare slot, which is dropped."""
        count = len(self.shards.order) * self.most
        total = grad.new_zeros(count + 1, *grad.shape[:1], *grad.shape[2:])
        return total.index_copy_(0, self.at, grad.transpose(0, 1))[:-1]


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
