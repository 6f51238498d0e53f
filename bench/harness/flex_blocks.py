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

    The function allocates one bool per key/value head, query and block. No array of queries times
    keys is allocated.
    """
    from torch.nn.attention.flex_attention import BlockMask

    batch, kv_heads, queries, _ = indices.shape
    count, first = -(-keys // block), keys - queries
    chosen = torch.zeros(
        batch, kv_heads, queries, count + 1, dtype=torch.bool, device=indices.device
    )
    chosen.scatter_(-1, indices.masked_fill(indices < 0, count).long(), True)
    chosen = chosen[..., :count]
    tiles = -(-queries // TILE)
    rows = torch.nn.functional.pad(chosen, (0, 0, 0, tiles * TILE - queries))
    union = rows.unflatten(2, (tiles, TILE)).any(dim=3)  # one entry per block of the lists
    begin = torch.arange(-(-keys // TILE), device=indices.device) * TILE
    ends = (begin + TILE - 1).clamp(max=keys - 1)
    marks = union.int().cumsum(dim=-1)
    marks = torch.nn.functional.pad(marks, (1, 0))
    # one entry per tile of keys
    union = marks[..., ends // block + 1] > marks[..., begin // block]
    last = first + (torch.arange(tiles, device=indices.device) + 1) * TILE - 1
    union &= begin <= last[:, None]
    numbers = union.sum(dim=-1, dtype=torch.int32)
    order = torch.argsort(union.int(), dim=-1, descending=True, stable=True).to(torch.int32)
    numbers, order = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (numbers, order))
    group = heads // kv_heads

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
