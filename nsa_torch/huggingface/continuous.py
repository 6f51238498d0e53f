"""Continuous batching of transformers (`generate_batch`) over paged caches.

transformers' `PagedAttentionCache` shares out pages and keeps one key and one value a token and
layer: those of the selected branch, in place. What NSA keeps besides lies in pages of the same
numbers, made here: the compressed tokens and, where branches have their own (`kv="separate"`), the
other branches' keys and values.

    generate_batch -> NSAModel.forward(cache=.., read_index=.., ..) -> ContinuousBatch
        each layer: project -> paged.append -> paged_attention -> out

A prefix that requests share is shared here too: no page depends on the one after it.
"""

import functools
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, ContinuousBatchingConfig

from nsa_torch.huggingface.compatibility import paged_attention_cache
from nsa_torch.huggingface.configuration import NSAModelConfig
from nsa_torch.huggingface.paged_layer import attend_pages
from nsa_torch.module import NSAAttention
from nsa_torch.paged import PagedCache

NAME = "paged|nsa"  # for set_attn_implementation: no mask of all tokens times all is made

# Of each `PagedAttentionCache`, which stays theirs: `paged_attention_cache` says of which version.
_pages: weakref.WeakKeyDictionary[Any, dict[int, PagedCache]] = weakref.WeakKeyDictionary()


def continuous_batching_config(
    config: NSAModelConfig, **options: Any
) -> ContinuousBatchingConfig:
    """transformers' `ContinuousBatchingConfig` for a model with NSA.

    Its pages have `select_block` tokens. transformers counts the selected branch's keys and values
    alone, so that it is given the share of the memory which these are of all.

    Args:
      options: other fields of it; `block_size` must be `config.select_block` where it is given,
        `max_memory_percent` counts all pages.
    """
    paged_attention_cache()
    size = config.select_block
    if options.setdefault("block_size", size) != size:
        raise ValueError(f"block_size must be select_block={size}, got {options['block_size']}")
    if options.get("cpu_offload_space"):
        raise ValueError(
            "cpu_offload_space must be 0: transformers would move the selected branch's pages only"
        )
    if "nsa" in config.layer_attention:
        compressed = 1 / config.compress_stride
        everything = options.get("max_memory_percent") or 0.9
        raw = 3 if config.layer_spec.separate else 1
        options["max_memory_percent"] = everything / (raw + compressed)
    return ContinuousBatchingConfig(**options)


class ContinuousBatch:
    """One step: some rows prefill, some decode.

    Args:
      config: of the model.
      position: `[1, N]`, of the new tokens; mask: for layers with dense attention, or None.
      cu_seq_lens_q: int32 `[B + 1]`, where each row's new tokens begin.
      cache .. block_table: what transformers hands to attention functions.
    """

    def __init__(
        self,
        config: NSAModelConfig,
        position: Tensor,
        mask: Tensor | None,
        *,
        cache: Any,
        cu_seq_lens_q: Tensor,
        cu_seq_lens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        read_index: list[Tensor],
        write_index: list[Tensor],
        block_table: Tensor | None = None,
        **rest: Any,
    ):
        size = config.select_block
        if "nsa" in config.layer_attention and cache.block_size != size:
            raise ValueError(
                f"block_size must be select_block={size}, got {cache.block_size}: pass "
                "continuous_batching_config(model.config)"
            )
        self.position, self.mask, self.cache = position, mask, cache
        self.starts, self.max_seqlen_q = cu_seq_lens_q, max_seqlen_q
        self.lengths = cu_seq_lens_k[1:] - cu_seq_lens_k[:-1]
        self.starts_k, self.max_seqlen_k = cu_seq_lens_k, max_seqlen_k
        self.read_index, self.write_index = read_index, write_index
        self.block_table = block_table
        self.dense = rest | {
            "cache": cache,
            "cu_seq_lens_q": cu_seq_lens_q,
            "cu_seq_lens_k": cu_seq_lens_k,
            "max_seqlen_q": max_seqlen_q,
            "max_seqlen_k": max_seqlen_k,
            "read_index": read_index,
            "write_index": write_index,
            "block_table": block_table,
        }

    @functools.cached_property
    def page_table(self) -> Tensor:
        """int32 `[B, M]`, from where transformers reads each token, or writes it."""
        if self.block_table is not None:
            return self.block_table[0]
        size = self.cache.block_size
        index, starts = self.read_index[0], self.starts_k
        if index.numel() == 0:  # all rows begin with this step: what is written is all there is
            index, starts = self.write_index[0], self.starts
        columns = torch.arange(-(-self.max_seqlen_k // size), device=index.device) * size
        first = (starts[:-1, None] + columns).clamp(max=index.shape[0] - 1)
        return (index[first] // size).to(torch.int32)

    def attend(self, attention: Any, index: int, x: Tensor) -> Tensor:
        """The attention of layer `index` to its new tokens `x` [1, N, dim]."""
        if not isinstance(attention, NSAAttention):
            return attention(x, self.position, self.mask, **self.dense)
        # Rows of one token each are a decode step.
        starts = self.starts
        if self.max_seqlen_q == 1 and x.shape[1] == self.lengths.shape[0]:
            starts = None
        at = self.page_table, self.lengths, starts, self.max_seqlen_q
        pages = self.pages(attention, index)
        y, _ = attention(x, attend=lambda *own: attend_pages(*own, self.position, pages, *at))
        return y

    def pages(self, attention: NSAAttention, index: int) -> PagedCache:
        """Those of layer `index`, made at its first step."""
        found = _pages.get(self.cache)
        if found is None:
            found = _pages[self.cache] = {}
            _copy_all(self.cache, found)
        if index not in found:
            spec = attention.spec
            if spec.d_v != spec.d_k:
                raise NotImplementedError(
                    "continuous batching keeps values as wide as keys: v_head_dim must be "
                    f"head_dim={spec.d_k}, got {spec.d_v}"
                )
            _, number = self.cache.layer_index_to_group_indices[index]
            shape = -1, self.cache.block_size, spec.n_kv_groups, spec.d_k
            key, value = (
                x[number].view(shape) for x in (self.cache.key_cache, self.cache.value_cache)
            )
            found[index] = PagedCache.view(
                key, value, config=spec.config, separate=spec.separate
            )
        return found[index]


def _copy_all(cache: Any, found: dict[int, PagedCache]) -> None:
    """Where transformers copies pages, as for requests that fork, ours are copied with them."""
    copy = cache.copy_cache

    def copy_cache(list_source_blocks: list[int], list_forked_blocks: list[int]) -> None:
        copy(list_source_blocks, list_forked_blocks)
        blocks = list_source_blocks, list_forked_blocks
        source, target = (torch.tensor(x, device=cache.device) for x in blocks)
        for pages in found.values():
            pages.copy_pages(source, target)

    cache.copy_cache = copy_cache


def dense_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    cache: Any = None,
    **paged: Any,
) -> tuple[Tensor, None]:
    """`paged|nsa` of a layer with dense attention: causal, row after row, without a mask.

    The number of rows and their lengths are read on the host.
    """
    if cache is None:
        raise ValueError(f"{NAME} attends from pages: use 'sdpa' outside generate_batch")
    index = {name: paged[name] for name in ("read_index", "write_index")}
    key, value = cache.update(key, value, module.layer_idx, **index)  # [tokens, Hkv, D]
    starts = zip(*(paged[f"cu_seq_lens_{x}"].tolist() for x in "qk"), strict=True)
    out = query.new_zeros(query.shape[2], query.shape[1], value.shape[2])
    begin = next(starts)
    for end in starts:
        tokens, keys = (slice(a, b) for a, b in zip(begin, end, strict=True))
        begin = end
        if tokens.start == tokens.stop:
            continue
        heads = (x[keys].transpose(0, 1)[None] for x in (key, value))
        mask = causal_lower_right(tokens.stop - tokens.start, keys.stop - keys.start)
        found = F.scaled_dot_product_attention(
            query[:, :, tokens], *heads, attn_mask=mask, scale=scaling, enable_gqa=True
        )
        out[tokens] = found[0].transpose(0, 1)
    return out[None], None


AttentionInterface.register(NAME, dense_attention)
