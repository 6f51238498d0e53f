"""FlashInfer's attention to given key blocks, for `bench.block_selection`, and of new tokens to a
whole cache, for `bench.decode`. The functions prepare a call and return the function that is
timed. The kernels need a GPU.

On Hopper FlashInfer attends to given blocks in two ways:

- `flashinfer`: the paged decode kernel reads keys and values in the dtype of the query. Every pair
  of a query and a key/value head is a request. The pages of a request are its blocks.
- `flashinfer_fp8`: the kernels for MiniMax-M3 read only keys and values in fp8. Keys and values
  are rounded before the call.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from . import block_peers

NAME = "flashinfer"
CACHE_PAGE, WORKSPACE_BYTES = 64, 128 << 20
SLOTS = 16  # length of the lists of the kernel in fp8

type Attend = Callable[[Tensor], Tensor]


def dense_names(runner: Any, queries: int) -> tuple[str, ...]:
    """Return the name of this library if the library can attend to a cache, or no names."""
    able = (runner.framework, runner.platform, queries) == ("torch", "cuda", 1)
    return (NAME,) if able and importlib.util.find_spec(NAME) else ()


def paged(
    key: Tensor, value: Tensor, ends: Tensor, pages: Tensor, last: Tensor, heads: int
) -> Attend:
    """Return attention of one query per request, a function of the query `[requests, heads, D]`.

    Args:
      key: `[pages, tokens of a page, Hkv, D]`.
      value: `[pages, tokens of a page, Hkv, D]`.
      ends: int32 `[requests + 1]`, where the pages of each request start and end in `pages`.
      pages: int32, the pages of all requests.
      last: int32 `[requests]`, the number of tokens in the last page of each request.
      heads: Number of query heads.

    Raises:
      NotImplementedError: The key and the value have different widths.
    """
    if key.shape != value.shape:
        raise NotImplementedError(
            f"flashinfer needs D = Dv, got D={key.shape[-1]}, Dv={value.shape[-1]}"
        )
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=key.device)
    made = importlib.import_module(NAME).BatchDecodeWithPagedKVCacheWrapper
    wrapper = made(workspace, "NHD", use_tensor_cores=True)
    _, size, kv_heads, width = key.shape
    dtypes = {"q_data_type": key.dtype, "kv_data_type": key.dtype}
    wrapper.plan(ends, pages, last, heads, kv_heads, width, size, **dtypes)
    return lambda query: wrapper.run(query, (key, value))


def cached(query: Tensor, key: Tensor, value: Tensor) -> Attend:
    """Return attention of one token per sequence, a function of the query `[B, 1, H, D]`, to a key
    `[B, S, Hkv, D]` and a value of the same shape.
    """
    batch, length = key.shape[:2]
    fill = 0, 0, 0, 0, 0, -length % CACHE_PAGE
    key, value = (
        functional.pad(x, fill).unflatten(1, (-1, CACHE_PAGE)).flatten(0, 1).contiguous()
        for x in (key, value)
    )
    pages = torch.arange(len(key), dtype=torch.int32, device=key.device)
    ends = torch.arange(batch + 1, dtype=torch.int32, device=key.device) * (len(key) // batch)
    last = torch.full_like(ends[1:], (length - 1) % CACHE_PAGE + 1)
    attend = paged(key, value, ends, pages, last, query.shape[2])
    return lambda query: attend(query.squeeze(1)).unsqueeze(1)


def in_order(indices: Tensor, length: int) -> Tensor:
    """Return the indices `[B, Hkv, Sq, n]` in ascending order, so that the own block of each query
    is the last.

    Raises:
      ValueError: The sizes or lists are not supported.
    """
    found, queries = indices.sort(-1).values, indices.shape[2]
    own = torch.arange(length - queries, length, device=indices.device) // block_peers.PAGE
    if length % block_peers.PAGE or not (found[..., -1] == own).all():
        raise ValueError(
            f"flashinfer supports only lengths that are a multiple of {block_peers.PAGE} tokens, "
            f"and only queries that select their own block of {block_peers.PAGE} tokens"
        )
    return found


def listed(key: Tensor, value: Tensor, indices: Tensor, heads: int) -> Attend:
    """Return attention to given blocks, a function of the query `[B, H, Sq, D]` that returns
    `[B, Sq, H, D]`.

    Args:
      key: `[B, Hkv, S, D]`.
      value: `[B, Hkv, S, D]`.
      indices: int64 `[B, Hkv, Sq, n]`, -1 in empty slots.
      heads: Number of query heads.
    """
    (batch, kv_heads, length, _), page = key.shape, block_peers.PAGE
    lists = in_order(indices, length).transpose(1, 2)
    filled = lists >= 0
    rows = torch.arange(batch * kv_heads, device=key.device).view(batch, 1, kv_heads, 1)
    ends = functional.pad(filled.sum(-1).flatten().cumsum(0), (1, 0)).int()
    places = torch.arange(length - indices.shape[2], length, device=key.device)
    last = (places % page + 1).int()[:, None].expand(lists.shape[:3]).flatten()
    pages = (lists + rows * (length // page))[filled].int()
    key, value = (x.detach().reshape(-1, page, 1, x.shape[-1]) for x in (key, value))
    attend = paged(key, value, ends, pages, last, heads // kv_heads)

    def call(query: Tensor) -> Tensor:
        split = query.transpose(1, 2).unflatten(2, (kv_heads, -1))
        return attend(split.flatten(0, 2).contiguous()).view(*split.shape[:2], heads, -1)

    return call


def in_fp8(key: Tensor, value: Tensor, indices: Tensor, heads: int) -> Attend:
    """Return the function that `listed` returns, for keys and values rounded to fp8."""
    lists = in_order(indices, key.shape[2])
    lists = functional.pad(lists, (max(SLOTS - lists.shape[-1], 0), 0), value=-1)
    # The empty slots are the last, as the kernel expects.
    lists = lists.where(lists >= 0, key.shape[2]).sort(-1).values
    lists = lists.where(lists < key.shape[2], -1)
    read = block_peers.stored(key, value, lists)
    pair = read["kv_cache"].to(torch.float8_e4m3fn).split(key.shape[-1], -1)
    how = {"page_table": read["block_table"], "seqused_k": read["seq_lens"], "causal": True}
    given = *pair, read["topk_idx"], read["cu_seqlens_q"]
    run = block_peers.module_of("flashinfer_fp8").msa_sparse_attention

    def call(query: Tensor) -> Tensor:
        rows = query.transpose(1, 2).flatten(0, 1).contiguous()
        out = run(rows, *given, **how, out=torch.empty_like(rows))
        return out.unflatten(0, (len(query), -1))

    return call


LISTED = {"flashinfer": listed, "flashinfer_fp8": in_fp8}
