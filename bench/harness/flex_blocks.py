"""Runs torch's FlexAttention on lists of selected blocks. The block mask has the union of the
blocks of each tile of queries. Within the blocks of the mask, a function masks single pairs of
query and key.
"""

import functools
from typing import Any

import torch
from torch import Tensor

TILE = 128  # size of the tiles of queries and keys that FlexAttention computes or skips


def mask_of(indices: Tensor, keys: int, block: int, heads: int) -> Any:
    """Return the `BlockMask` of indices `[B, Hkv, Sq, n]`, which have -1 in empty slots. The
    queries are the last `Sq` of the `keys` tokens, and a block has `block` tokens.

    The function allocates one bool per key/value head, query and block, and one per tile of queries
    and key. No array of queries times keys is allocated.
    """
    from torch.nn.attention.flex_attention import BlockMask

    batch, kv_heads, queries, _ = indices.shape
    count, first, group = -(-keys // block), keys - queries, heads // kv_heads
    shape, device = (batch, kv_heads, queries, count + 1), indices.device
    chosen = torch.zeros(shape, dtype=torch.bool, device=device)
    chosen.scatter_(-1, indices.masked_fill(indices < 0, count).long(), True)
    chosen = chosen[..., :count]
    pad = torch.nn.functional.pad
    rows = pad(chosen, (0, 0, 0, -queries % TILE)).unflatten(2, (-1, TILE)).any(dim=3)
    # one entry per key for each tile of queries, then one entry per tile of keys
    tokens = rows.repeat_interleave(block, dim=-1)[..., :keys]
    union = pad(tokens, (0, -keys % TILE)).unflatten(-1, (-1, TILE)).any(dim=-1)
    begin = torch.arange(union.shape[-1], device=device) * TILE
    last = first + torch.arange(1, union.shape[2] + 1, device=device) * TILE - 1
    union = (union & (begin <= last[:, None])).repeat_interleave(group, dim=1)
    numbers = union.sum(dim=-1, dtype=torch.int32)
    order = torch.argsort(union.int(), dim=-1, descending=True, stable=True).to(torch.int32)

    def seen(b, h, q, k):
        return chosen[b, h // group, q, k // block] & (k <= q + first)

    return BlockMask.from_kv_blocks(
        numbers, order, BLOCK_SIZE=TILE, mask_mod=seen, seq_lengths=(queries, keys)
    )


@functools.cache
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
    """Return the output `[B, Sq, H, Dv]` of `[B, H, Sq, D]`, `[B, Hkv, Sk, D]`,
    `[B, Hkv, Sk, Dv]`.
    """
    return _compiled()(query, key, value, block_mask=mask, enable_gqa=True).transpose(1, 2)
