"""Where `generate_batch` keeps what NSA keeps: a cache allocator for transformers' manager.

The manager shares out blocks of `select_block` tokens of all layers, shares prefixes and copies
forks. Here a block has room for all of a model's layers: of a layer with NSA the three branches'
keys and values and the compressed tokens, of a dense layer its keys and values. The memory is the
manager's, so that it is counted. It is carved into arrays over all blocks, as kernels read them.

    block of token p of a request   block_table[request][p // select_block]

A step reads block numbers alone. The manager's lists of token numbers, as long as the context, are
lists of blocks here.
"""

from typing import Any

import torch
from torch import Tensor

from nsa_core import paged_layout
from nsa_torch.huggingface.compatibility import (
    FullAttentionCacheAllocator,
    cache_allocators,
)
from nsa_torch.huggingface.configuration import NSAModelConfig
from nsa_torch.paged import PagedCache

KIND = "full_attention"  # of all layers, in the manager's tables


class NSACacheAllocator(FullAttentionCacheAllocator):
    """Of all layers of a model; arguments are the manager's.

    Raises:
      ValueError: pages of another size than `select_block`.
      NotImplementedError: heads are split over devices.
    """

    def __init__(
        self,
        index: int,
        config: NSAModelConfig,
        num_key_value_heads: int,
        cache_dtype: torch.dtype,
        page_size: int,
        layer_indices: list[int],
        allow_block_sharing: bool,
    ):
        spec = config.layer_spec
        if page_size != config.select_block:
            raise ValueError(
                f"page_size must be select_block={config.select_block}, got {page_size}"
            )
        if num_key_value_heads != spec.n_kv_groups:
            raise NotImplementedError(
                "generate_batch on NSA runs on one device: each must have all "
                f"{spec.n_kv_groups} key/value heads, got {num_key_value_heads}"
            )
        self.config, self.cache_dtype = config, cache_dtype
        self.elements = elements_of_layers(config)
        self._before_cache_tensor_init(
            index=index,
            layer_indices=layer_indices,
            tokens_per_page=page_size,
            # The manager knows layers of one size: a mean, rounded up.
            bytes_per_page=-(-bytes_of_block(config, cache_dtype) // len(layer_indices)),
            allow_block_sharing=allow_block_sharing,
        )
        self.block_physical_stride = (
            page_size  # so that its block tables have numbers of blocks
        )
        self.pages: dict[int, PagedCache | tuple[Tensor, Tensor]] = {}

    def register_cache_tensor(self, bytes_per_sector, non_trash_bytes, cache_tensor, pool):
        """Carves `cache_tensor`, the manager's memory in bytes."""
        self.bytes_per_sector = bytes_per_sector
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        blocks = cache_tensor.numel() // self.bytes_per_block
        memory, spec = cache_tensor.view(self.cache_dtype), self.config.layer_spec
        for layer, each in zip(
            self.layer_indices,
            memory.split_with_sizes(self._sizes(blocks, memory)),
            strict=False,
        ):
            if self.config.layer_attention[layer] == "nsa":
                self.pages[layer] = PagedCache.carve(
                    each,
                    spec.n_kv_groups,
                    spec.d_k,
                    spec.d_v,
                    config=spec.config,
                    separate=spec.separate,
                )
            else:
                shape = blocks, self.tokens_per_page, spec.n_kv_groups
                cut = each.split_with_sizes(
                    [each.numel() // (spec.d_k + spec.d_v) * n for n in (spec.d_k, spec.d_v)]
                )
                key, value = (x.view(*shape, -1) for x in cut)
                self.pages[layer] = key, value

    def _sizes(self, blocks: int, memory: Tensor) -> list[int]:
        """Elements of each layer, and those left over."""
        sizes = [blocks * each for each in self.elements]
        return [*sizes, memory.numel() - sum(sizes)]

    def copy_blocks(self, source_block_ids: list[int], dest_block_ids: list[int]) -> None:
        """Copies whole blocks, as where a request forks within one."""
        device = self.cache_tensor.device
        source, target = (
            torch.tensor(x, dtype=torch.int64, device=device)
            for x in (source_block_ids, dest_block_ids)
        )
        for pages in self.pages.values():
            if isinstance(pages, PagedCache):
                pages.copy_pages(source, target)
            else:
                for x in pages:
                    x[target] = x[source]

    def get_read_indices(
        self, request_id: str, past_length: int, query_length: int
    ) -> list[int]:
        """The blocks of the request, in place of its tokens."""
        count = -(-(past_length + query_length) // self.tokens_per_page)
        return self.block_table[request_id][:count]

    def get_write_indices(
        self, request_id: str, past_length: int, query_length: int
    ) -> list[int]:
        """The same where the request begins: in a step of such requests alone none are read."""
        return [] if past_length else self.get_read_indices(request_id, 0, query_length)


def elements_of_layers(config: NSAModelConfig) -> list[int]:
    """Elements of a block of `select_block` tokens, a number a layer."""
    spec = config.layer_spec
    heads, widths = spec.n_kv_groups, (spec.d_k, spec.d_v)
    nsa = paged_layout.page_elements(heads, *widths, spec.config, spec.separate)
    dense = config.select_block * heads * sum(widths)
    return [nsa if kind == "nsa" else dense for kind in config.layer_attention]


def bytes_of_block(config: NSAModelConfig, dtype: torch.dtype) -> int:
    """Of a block of `select_block` tokens of all layers."""
    return sum(elements_of_layers(config)) * dtype.itemsize


class AllocatorByConfiguration(FullAttentionCacheAllocator):
    """In the place of transformers' class: ours for our configuration, else what it was."""

    def __new__(cls, *arguments: Any, config: Any, **options: Any):
        ours = isinstance(config, NSAModelConfig) and "nsa" in config.layer_attention
        kind: Any = NSACacheAllocator if ours else FullAttentionCacheAllocator
        return kind(*arguments, config=config, **options)


def install() -> None:
    """The manager makes ours for models with NSA from now on.

    Raises:
      NotImplementedError: as `compatibility.cache_allocators`.
    """
    cache_allocators()[KIND] = AllocatorByConfiguration
