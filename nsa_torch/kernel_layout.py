"""`nsa_core.array_ops.QueryLayout` of torch tensors, int32, for operators on kernels.

Where sizes alone decide it, it is made once for all calls alike (`nsa_torch.shared`).
"""

import functools

import torch
from torch import Tensor

from nsa_core.steps import key_bounds
from nsa_core.types import Branches
from nsa_torch import operators, replay
from nsa_torch.geometry import geometry
from nsa_torch.shared import SHARED


class KernelLayout:
    """Where the queries of one call stand; `[B, T]` int32 each.

    Args:
      query: `[B, T, H, D]`.
      kv_len, lengths, cu_seqlens, config, scale: as `operators.PLACE` has them.
      clean: whether rows of padding, and keys and values that no query sees, are finite.
    """

    def __init__(self, query, kv_len, lengths, cu_seqlens, config, scale, *, clean=False):
        self.config, self.scale, self.clean = operators.config_of(*config), scale, clean
        self.kv_len, self.lengths, self.cu_seqlens = kv_len, lengths, cu_seqlens
        self.shape, self.device = tuple(query.shape[:2]), query.device
        self.fixed = lengths is None and cu_seqlens is None  # by sizes alone
        self.packed = cu_seqlens is not None

    @property
    def padded(self) -> bool:
        return not self.clean and not (self.fixed and self.kv_len >= self.shape[1])

    @property
    def rest(self):
        """The last arguments of every step: layout, config, scale."""
        return self, self.config, self.scale

    def cached(self, name, make) -> list[Tensor]:
        """What `make()` gives, shared by calls of the same sizes."""
        if not self.fixed or self.device.type == "meta":  # without memory: `warm_up`
            return list(make())
        key = self.shape, self.kv_len, self.config, self.device, name
        get = lambda: SHARED.get(key, self.device, make)
        recording = replay.recording()
        return recording.constants(get) if recording else get()

    @functools.cached_property
    def _arrays(self):
        return self.cached(("layout",), self._make)

    def _make(self):
        layout = geometry(
            *self.shape,
            config=self.config,
            kv_len=self.kv_len if self.lengths is None else self.lengths,
            cu_seqlens=self.cu_seqlens,
            device=self.device,
        )
        start = layout.compressed_start if self.packed else layout.key_start
        return [x.to(torch.int32) for x in (layout.position, layout.key_start, start)]

    position = property(lambda self: self._arrays[0])
    key_start = property(lambda self: self._arrays[1])
    compressed_start = property(lambda self: self._arrays[2])

    # A probability of zero times a value that is NaN is NaN, so values behind the last key
    # that a query may see are zeroed; of keys only the logits are masked, forward.

    def seen(self, x: Branches[Tensor]) -> Branches[Tensor]:
        """Keys or values of the branches with zeros where no query may look."""
        if self.clean:
            return x
        selected = self.seen_tokens(x.selected)
        shared = x.sliding is x.selected
        sliding = selected if shared else self.seen_tokens(x.sliding)
        return Branches(self.seen_compressed(x.compressed), selected, sliding)

    def seen_tokens(self, x: Tensor) -> Tensor:
        """`x` `[B, S, Hkv, .]` with zeros behind the tokens that there are."""
        if self.cu_seqlens is not None:
            return _cut(x, self.cu_seqlens[-1:])
        return _cut(x, self.kv_len if self.lengths is None else self.lengths)

    def seen_compressed(self, x: Tensor) -> Tensor:
        """`x` `[B, C, Hkv, .]` with zeros behind the compressed tokens that there are."""
        if self.fixed:
            return x
        _, last = key_bounds.visible_compressed(self, self.config)
        return _cut(x, last[:, -1])

    def num_blocks(self, compressed_key: Tensor) -> int:
        """The most selection blocks that a sequence can have."""
        longest = self.kv_len
        if self.lengths is not None:
            stride, block = self.config.compress_stride, self.config.compress_block
            longest = compressed_key.shape[1] * stride + block - 1
        return self.config.num_blocks(longest)


def _cut(x, end):
    """`x` `[B, S, ...]` with zeros from `end` on: an int, or a tensor `[]`, `[1]`, `[B]`."""
    length = x.shape[1]
    if isinstance(end, int) and end >= length:
        return x
    there = torch.arange(length, device=x.device)
    there = there < (end if isinstance(end, int) else end.reshape(-1, 1))
    return torch.where(there[..., None, None], x, 0)
