"""Computes the position of each query in its sequence, in the key array and in the compressed
array. The masks of `sdpa`, `fa2`, indexers and kernels are derived from these positions. Kernels
that read packed rows from slots derive their masks from `nsa_core.varlen`. The numbers are computed
on the device of the query, so that the host does not wait for the device.
"""

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_core.array_ops import masked
from nsa_core.config import NSAConfig
from nsa_core.steps import key_bounds
from nsa_torch import batch_tables


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The positions of the queries. For each query, key `k` of the key array is token `k -
    key_start` of the query's sequence. Padding counts as the start of a further sequence, so that
    the bounds of the visible keys never decrease along the queries.
    """

    position: (
        # int64 [B, T]: position in its own sequence; negative for padding, which attends to no
        # key
        Tensor
    )
    key_start: Tensor  # int64 [B, T]: index in the key array of the sequence's token 0
    compressed_start: Tensor  # int64 [B, T]: slot of the sequence's compressed token 0
    offset: int | None  # index of query 0 in the key array; None if only the device knows it
    cu_seqlens: Tensor | None  # int64 [num_seqs + 1], only for a packed batch

    @property
    def key_index(self) -> Tensor:
        """The index of the query's own token in the key array, `[B, T]`, or -1 for padding."""
        return torch.where(self.position < 0, -1, self.key_start + self.position)

    @property
    def padded(self) -> bool:
        """Whether some queries may be padding."""
        return self.cu_seqlens is not None or self.offset is None or self.offset < 0

    def sees_compressed(self, queries: slice, count: int, config: NSAConfig) -> Tensor:
        """Return whether each query attends to each compressed token, bool `[B, Q, count]`. A
        query at position `p` attends to token `i` if and only if `p >= i*d + l - 1`.
        """
        slot = torch.arange(count, device=self.position.device)
        place = self.position[:, queries], self.compressed_start[:, queries]
        return key_bounds.sees_compressed(slot, *place, config)


def without_padding(x: Tensor, real: Tensor) -> Tensor:
    """Return `x` [B, T, ..] with zeros in place of padding. `real` [B, T] is False for padding.
    Without these zeros, a NaN in padding would spread through products of attention and gradients
    of weights.
    """
    return masked(torch, real, x)[0]


def own_tokens(count: Tensor | None, *tensors: Tensor) -> Sequence[Tensor]:
    """Return the tensors [B, T, ..] with zeros after the first `count` [B] tokens per row. If
    `count` is None, return the tensors unchanged.
    """
    if count is None:
        return tensors
    real = torch.arange(tensors[0].shape[1], device=count.device) < count[:, None]
    return masked(torch, real, *tensors)


def geometry(
    batch: int,
    num_queries: int,
    *,
    config: NSAConfig,
    kv_len: int | Tensor,
    cu_seqlens: Tensor | None,
    device: torch.device | None,
) -> Geometry:
    """Return the `Geometry` of queries that are the last `num_queries` of `kv_len` tokens. In a
    packed row, the `kv_len` tokens are the first tokens of the row.
    """
    index = torch.arange(num_queries, device=device).expand(batch, num_queries)
    zero = torch.zeros_like(index)
    if cu_seqlens is None:
        if not isinstance(kv_len, Tensor):
            offset = kv_len - num_queries
            return Geometry(index + offset, zero, zero, offset, None)
        first = kv_len.to(device, torch.int64).reshape(-1, 1) - num_queries
        return Geometry(index + first, zero, zero, None, None)
    if isinstance(kv_len, Tensor):
        raise ValueError("kv_len must be an int if cu_seqlens are given, got a tensor")
    sizes = {"num_queries": num_queries, "kv_len": kv_len, "config": config}
    found = batch_tables.made(_packed_places, cu_seqlens.to(device), **sizes)
    position, key_start, compressed_start, bounds = found
    return Geometry(position, key_start, compressed_start, kv_len - num_queries, bounds)


def _packed_places(cu_seqlens, *, num_queries, kv_len, config):
    """Return the fields `position`, `key_start`, `compressed_start` and `cu_seqlens` of a
    `Geometry`.
    """
    bounds = cu_seqlens.to(torch.int64)
    token = torch.arange(num_queries, device=bounds.device) + (kv_len - num_queries)
    # The number of ends at or before a token is the index of its sequence, also if sequences
    # are empty.
    sequence = torch.searchsorted(bounds[1:], token, right=True)
    start = bounds[sequence]
    slot = compressed_bounds(bounds, config)[sequence]
    position = torch.where(sequence < bounds.numel() - 1, token - start, -1)
    return position[None], start[None], slot[None], bounds


def geometry_of(
    query: Tensor, config: NSAConfig, kv_len: int | Tensor, cu_seqlens: Tensor | None
) -> Geometry:
    """Return the `Geometry` of `query` `[B, T, H, D]`."""
    where = {"config": config, "kv_len": kv_len, "cu_seqlens": cu_seqlens}
    return geometry(*query.shape[:2], **where, device=query.device)


def packed_windows(
    cu_seqlens: Tensor, length: int, config: NSAConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the window of each compressed slot of a packed row of `length` tokens.

    Returns: Three arrays with one entry per slot. The first array has the tokens of the window,
    `[C, l]`. The second array is true for unused slots, `[C, 1, 1]`. The third array has the
    position of the window's first token in its sequence, `[1, C]`.
    """
    tokens, unused, at = batch_tables.made(_windows, cu_seqlens, length=length, config=config)
    return tokens, unused, at


def _windows(cu_seqlens, *, length, config):
    place = {"config": config, "cu_seqlens": cu_seqlens, "device": cu_seqlens.device}
    where = geometry(1, length, kv_len=length, **place)
    starts = window_starts(where, config)
    first = starts.clamp(min=0)
    tokens = first[:, None] + torch.arange(config.compress_block, device=starts.device)
    return tokens, (starts < 0)[:, None, None], where.position[:, first]


def window_starts(where: Geometry, config: NSAConfig) -> Tensor:
    """For each compressed slot, return the index of its window's first token in the key array,
    `[C]`. An unused slot of a packed row has the index -1.
    """
    position = where.position[0]
    length, reach = position.numel(), config.compress_block - 1
    count = config.num_compressed(length)
    index = torch.arange(length, device=position.device)
    # The last token of a window is in the same sequence as the first one if and only if its
    # position is l - 1 higher.
    last = F.pad(position, (0, reach), value=-1)[reach:]
    starts_one = (position >= 0) & (position % config.compress_stride == 0)
    complete = starts_one & (last == position + reach)
    slot = where.compressed_start[0] + position // config.compress_stride
    slot = torch.where(complete, slot, count)
    starts = torch.full((count + 1,), -1, dtype=torch.int64, device=position.device)
    return starts.scatter(0, slot, index)[:count]


def compressed_bounds(bounds: Tensor, config: NSAConfig) -> Tensor:
    """Return the number of compressed tokens before each sequence, then the total number. The
    numbers are the boundaries of the sequences in the array of compressed tokens. No compressed
    token belongs to two sequences, and there are no unused slots between sequences.
    """
    spare = bounds.diff() - config.compress_block
    count = (spare.div(config.compress_stride, rounding_mode="floor") + 1).clamp(min=0)
    return F.pad(count.cumsum(0), (1, 0))
