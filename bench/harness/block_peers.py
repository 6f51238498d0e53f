"""Kernels of vLLM and flash-msa for attention to selected blocks of 128 keys, for
`bench.block_selection`. The kernels of FlashInfer are in `flashinfer_peer`. A library is measured
if it can be imported. The kernels of the measured libraries need a GPU.
"""

import importlib
from types import ModuleType

import torch
from torch import Tensor

from .records import Values

MODULES = {  # by the bench's name
    "vllm": "vllm.models.minimax_m3.common.ops.sparse_attn",
    "flash_msa": "flash_msa",
    "flashinfer": "flashinfer",
    "flashinfer_fp8": "flashinfer.msa_ops",
}
PAGE = 128


def module_of(name: str) -> ModuleType:
    return importlib.import_module(MODULES[name])


def why_not(name: str, device: str) -> str | None:
    """Return the reason why another library cannot run, or None."""
    if device == "cpu":
        return f"{name} has kernels only for GPUs"
    try:
        module_of(name)
    except Exception as error:  # an import that compiles may raise anything
        return f"{MODULES[name]} cannot be imported: {type(error).__name__}: {error}"
    return None


def pages_of(key: Tensor, value: Tensor, indices: Tensor) -> Values:
    """Return `stored`, with the checks of vLLM's kernel.

    Raises:
      ValueError: The kernel does not support these sizes or lists.
    """
    length, queries = key.shape[2], indices.shape[2]
    full = (indices >= 0).long().cummin(-1).values.sum(-1)
    last = torch.arange(length - queries, length, device=key.device)
    if length % PAGE or not (full == (last // PAGE + 1).clamp(max=indices.shape[-1])).all():
        raise ValueError(
            f"vllm supports only lengths that are a multiple of {PAGE} tokens, and only queries "
            f"that select min(n, visible blocks) blocks of {PAGE} tokens"
        )
    return stored(key, value, indices)


def stored(key: Tensor, value: Tensor, indices: Tensor) -> Values:
    """Return the arguments of vLLM's kernel, with one page per block.

    Args:
      key: `[B, Hkv, S, D]`.
      value: `[B, Hkv, S, D]`.
      indices: int64 `[B, Hkv, Sq, n]`, -1 in empty slots.
    """
    batch, kv_heads, length, width = key.shape
    queries = indices.shape[2]
    both = torch.cat([key, value], -1).detach().unflatten(2, (-1, PAGE)).transpose(1, 2)
    numbers = lambda x: torch.full((batch,), x, dtype=torch.int32, device=key.device)
    pages = torch.arange(batch * length // PAGE, dtype=torch.int32, device=key.device)
    return {
        "kv_cache": both.flatten(0, 1).contiguous(),
        "topk_idx": indices.transpose(0, 1).flatten(1, 2).int().contiguous(),
        "block_table": pages.view(batch, -1),
        "cu_seqlens_q": torch.arange(batch + 1, dtype=torch.int32, device=key.device) * queries,
        "seq_lens": numbers(length),
        "prefix_lens": numbers(length - queries),
        "max_query_len": queries,
        "num_kv_heads": kv_heads,
        "sm_scale": width**-0.5,
    }


def on_vllm(query: Tensor, read: Values) -> Tensor:
    """Run vLLM's kernel on a query `[B, H, Sq, D]` and the result of `pages_of`. Return
    `[B, Sq, H, Dv]`.
    """
    batch, _, queries, _ = query.shape
    rows = query.transpose(1, 2).flatten(0, 1).contiguous()
    out = torch.empty_like(rows)
    module_of("vllm").minimax_m3_sparse_attn(rows, output=out, **read)
    return out.unflatten(0, (batch, queries))


def on_flash_msa(
    query: Tensor, key: Tensor, value: Tensor, index: list[Tensor], chosen: int
) -> Tensor:
    """Run flash-msa and return `[B, Sq, H, Dv]`. Since flash-msa selects blocks itself, the time
    includes the selection, and the result cannot be compared with results for other blocks.

    Args:
      query: `[B, H, Sq, D]`.
      key: `[B, Hkv, S, D]`.
      value: `[B, Hkv, S, D]`.
      index: The index queries `[B, Hkv, S, D]` and the index key `[B, 1, S, D]`.
      chosen: Number of blocks per query.
    """
    scale = query.shape[-1] ** -0.5
    out, _ = module_of("flash_msa").flash_msa_func(
        *index, query, key, value, chosen * PAGE, scale
    )
    return out.unflatten(-1, (query.shape[1], -1))
