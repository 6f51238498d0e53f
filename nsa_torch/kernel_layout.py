"""`nsa_core.array_ops.QueryLayout` in derived steps of torch, int32, for operators on kernels."""

import contextlib
import functools
from typing import Any

import torch

from nsa_core.array_ops import ArrayOps, Places, derived, int32, like
from nsa_core.steps import key_bounds
from nsa_core.steps.params import Params
from nsa_core.types import Branches
from nsa_core.varlen import Capacity, Varlen
from nsa_torch import operators
from nsa_torch.geometry import geometry


class KernelLayout:
    """The positions of the queries of one call; each array is `[B, T]` int32.

    Args:
      query: `[B, T, H, D]`.
      kv_len, lengths, cu_seqlens, max_seqlen, padded, gap, config, scale: those of
        `operators.LAYOUT_ARGS`.
      assume_finite: whether rows of padding, and keys and values that no query sees, are finite.
      placed: Whether sequences of a packed row have slots (`nsa_core.varlen`), in which their
        compressed tokens are stored.
    """

    def __init__(
        self,
        ops: ArrayOps,
        query,
        kv_len,
        lengths,
        cu_seqlens,
        max_seqlen,
        padded,
        gap,
        config,
        scale,
        *,
        assume_finite=False,
        placed=False,
    ):
        self.ops, self.config, self.scale = ops, operators.config_of(*config), scale
        self.kv_len, self.lengths = kv_len, lengths
        self.may_be_padded, self.gap = padded, gap
        self.cu_seqlens = None if cu_seqlens is None else ops.per_batch(cu_seqlens)
        self.shape, self.assume_finite = tuple(query.shape[:2]), assume_finite
        self.device = getattr(query, "device", None)  # a plan's arrays have none
        self.fixed = lengths is None and cu_seqlens is None  # depends only on sizes
        self.packed = cu_seqlens is not None
        self.placed = placed
        self.max_seqlen = max_seqlen

    @property
    def padded(self) -> bool:
        if self.assume_finite or not self.may_be_padded:
            return False
        return not (self.fixed and self.kv_len >= self.shape[1])

    @property
    def longest(self) -> int:
        """Keys of a sequence at most."""
        return self.kv_len if self.max_seqlen is None else min(self.kv_len, self.max_seqlen)

    @functools.cached_property
    def varlen(self) -> Varlen | None:
        """The tables of a row that is `placed`."""
        (batch, length), borders = self.shape, self.cu_seqlens
        if borders is None or not self.placed:
            return None
        count = borders.shape[0]
        numbers = self.kv_len, count - 1, self.longest
        capacity = Capacity(batch, length, *numbers, self.config.of_sizes, self.gap)
        return Varlen(self.ops, capacity, borders.reshape(1, count))

    @property
    def params(self) -> Params:
        """The parameters of every step of a call."""
        return Params(self, self.config, self.scale)

    @functools.cached_property
    def _arrays(self) -> Places:
        if self.varlen is not None:
            return Places(*(getattr(self.varlen.tokens, name) for name in Places._fields))
        given = [x for x in (self.lengths, self.cu_seqlens) if x is not None]
        sizes = {"shape": self.shape, "kv_len": self.kv_len, "packed": self.packed}
        with torch.device(self.device) if self.device else contextlib.nullcontext():
            return Places(*self.ops.derive(_places, *given, **sizes, config=self.config))

    position = property(lambda self: self._arrays[0])
    key_start = property(lambda self: self._arrays[1])
    compressed_start = property(lambda self: self._arrays[2])

    # A probability of zero times a value that is NaN is NaN, so values behind the last key
    # that a query may see are zeroed; of keys only the logits are masked, forward.

    def zero_unreachable(self, x: Branches) -> Branches:
        """Keys or values of the branches, with zeros for tokens that no query may see."""
        if self.assume_finite:
            return x
        selected = self.zero_unreachable_tokens(x.selected)
        shared = x.sliding is x.selected
        sliding = selected if shared else self.zero_unreachable_tokens(x.sliding)
        return Branches(self.zero_unreachable_compressed(x.compressed), selected, sliding)

    def zero_unreachable_tokens(self, x):
        """`x` `[B, S, Hkv, .]` with zeros after the existing tokens."""
        if self.packed:
            return self.ops.derive(_cut, x, self.cu_seqlens)[0] if self.may_be_padded else x
        if self.lengths is not None:
            return self.ops.derive(_cut, x, self.lengths)[0]
        return x if self.kv_len >= x.shape[1] else self.ops.derive(_cut, x, end=self.kv_len)[0]

    def zero_unreachable_compressed(self, x):
        """`x` `[B, C, Hkv, .]` with zeros after the existing compressed tokens."""
        if self.fixed or (self.varlen is not None and not self.may_be_padded):
            return x
        bounds = key_bounds.VisibleCompressed(self.config).of(self.ops, self)
        return self.ops.derive(_cut, x, bounds[1])[0]

    def num_blocks(self, compressed_key) -> int:
        """The most selection blocks that a sequence can have."""
        longest = self.longest
        if self.lengths is not None:
            stride, block = self.config.compress_stride, self.config.compress_block
            longest = compressed_key.shape[1] * stride + block - 1
        return self.config.num_blocks(longest)


@derived(lambda *given, shape, **static: [int32(*shape)] * 3)
def _places(ops, *given, shape, kv_len, packed, config):
    """`given`: `lengths` or `cu_seqlens`, or nothing for `kv_len` keys."""
    number = given[0] if given else None
    layout = geometry(
        *shape,
        config=config,
        kv_len=kv_len if packed or number is None else number,
        cu_seqlens=number if packed else None,
        device=None if number is None else number.device,
    )
    start = layout.compressed_start if packed else layout.key_start
    return [ops.to_int32(x) for x in (layout.position, layout.key_start, start)]


@derived(lambda x, *ends, end=0: [like(x)])
def _cut(ops, x, *ends, end: Any = 0):
    """`x` `[B, S, ...]` with zeros from `end` on, or from the last number of `ends`, of all rows or
    of each.
    """
    there = torch.arange(x.shape[1], device=x.device)
    if ends:
        end = ends[0].reshape(x.shape[0] if ends[0].numel() > 1 else 1, -1)[:, -1:]
    return [torch.where((there < end)[..., None, None], x, 0)]
