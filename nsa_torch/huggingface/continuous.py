"""Continuous batching of transformers (`generate_batch`) for models with NSA, on paged caches.

`generate_batch` runs the manager of transformers, which allocates blocks from an
`NSACacheAllocator`. A step calls `NSAModel.forward(cache=.., cu_seq_lens_q=.., ..)`, which makes a
`ContinuousBatch`. Each layer projects the new tokens, appends their keys and values to the pages
and calls `paged_attention`.

Each step is planned once for all layers. In a step of one token per row, the manager of
transformers passes a block table. In a step of one token per row, all shapes depend only on the
shape of the block table, and the host reads no tensor. On a GPU the manager captures steps of one
token per row as CUDA graphs, one for each power of two of rows. In steps with more tokens, the
manager passes the blocks of all rows one after the other. The host reads the boundaries of the rows
once and removes padding. `plan_runs` decides which rows run together.
"""

import contextlib
import copy
import functools
import importlib
import itertools
import numbers
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from transformers import ContinuousBatchingConfig

from nsa_core import paged_layout
from nsa_core.paged_runs import Run, plan_runs
from nsa_torch.geometry import own_tokens
from nsa_torch.huggingface.cache import attend_pages
from nsa_torch.huggingface.configuration import NSAModelConfig
from nsa_torch.module import NSAAttention
from nsa_torch.paged import PagedCache, block_elements, carve_blocks
from nsa_torch.torch_ops import TORCH_OPS as OPS

# The `attn_implementation` of a model while a manager serves it. Since the name contains
# "flash", transformers makes no mask.
NAME = "flash_nsa"
KIND = "full_attention"  # the kind that the manager's tables have for every layer
# The class of transformers that stores the tokens of `generate_batch`. It does not exist before
# transformers 5.19.
_batches: Any = importlib.import_module("transformers.generation.continuous_batching.cache")
FullAttentionCacheAllocator: Any = getattr(_batches, "FullAttentionCacheAllocator", object)
_api: Any = importlib.import_module(
    "transformers.generation.continuous_batching.continuous_api"
)
ContinuousBatchingManager: Any = _api.ContinuousBatchingManager


def check_manager() -> None:
    """Raise an error if this version of transformers has an unsupported manager of pages.

    Raises:
      NotImplementedError: transformers' manager has no allocators, or its allocators differ from
        the allocators of the supported versions (5.19 to 5.24).
    """
    if not hasattr(FullAttentionCacheAllocator, "layer_type"):
        raise NotImplementedError(
            "generate_batch of an NSA model supports transformers 5.19 to 5.24, got "
            f"{transformers.__version__}, whose manager allocates pages differently"
        )


def elements_of_layers(config: NSAModelConfig) -> list[int]:
    """For each layer, return the number of elements that a block of `select_block` tokens
    needs."""
    spec = config.layer_spec
    nsa = block_elements(spec)
    dense = config.select_block * spec.n_kv_groups * (spec.d_k + spec.d_v)
    return [nsa if kind == "nsa" else dense for kind in config.layer_attention]


def bytes_of_block(config: NSAModelConfig, dtype: torch.dtype) -> int:
    """Return the number of bytes that a block of `select_block` tokens needs, summed over all
    layers."""
    return sum(elements_of_layers(config)) * dtype.itemsize


class NSACacheAllocator(FullAttentionCacheAllocator):
    """Allocates blocks for all layers of a model with NSA. The manager of transformers makes this
    object. The manager assigns blocks of `select_block` tokens to requests, shares prefixes, and
    calls `copy_blocks` when a request forks. Each block has memory for all layers of the model. A
    layer with NSA stores the compressed tokens, and the keys and values of three branches. If the
    branches share keys and values, the layer stores keys and values once. A dense layer stores its
    keys and values. The manager owns the memory, so that the accounting of the manager is correct.
    This class divides the memory into arrays over all blocks, as kernels require. The block of a
    token follows from the block table:

        block of token p of a request   block_table[request][p // select_block]

    A step reads only indices of blocks. The allocators of transformers return one index per token
    of the context, but `NSACacheAllocator` returns one index per block.

    Raises:
      ValueError: Pages do not have `select_block` tokens.
      NotImplementedError: The heads are split over several devices.
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
                "generate_batch of an NSA model runs on one device, which must have all "
                f"{spec.n_kv_groups} key/value heads, got {num_key_value_heads}"
            )
        self.config, self.cache_dtype = config, cache_dtype
        self._before_cache_tensor_init(
            index=index,
            layer_indices=layer_indices,
            tokens_per_page=page_size,
            # The manager supports only layers of one size. It therefore receives the mean size of
            # the layers, rounded up.
            bytes_per_page=-(-bytes_of_block(config, cache_dtype) // len(layer_indices)),
            allow_block_sharing=allow_block_sharing,
        )
        # With this value, the manager's block tables contain indices of blocks.
        self.block_physical_stride = page_size
        self.pages: dict[int, PagedCache | tuple[Tensor, Tensor]] = {}
        self.newest_keys: dict[int, Tensor] = {}  # as in `KeyConvolution.in_pages`

    def register_cache_tensor(self, bytes_per_sector, non_trash_bytes, cache_tensor, pool):
        """Divide `cache_tensor`, the manager's memory in bytes, into the pages of the layers."""
        self.bytes_per_sector = bytes_per_sector
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        blocks = cache_tensor.numel() // self.bytes_per_block
        memory, spec = cache_tensor.view(self.cache_dtype), self.config.layer_spec
        begin, elements = 0, elements_of_layers(self.config)
        for layer in self.layer_indices:
            end = begin + blocks * elements[layer]
            each, begin = memory[begin:end], end
            if self.config.layer_attention[layer] == "nsa":
                made, self.newest_keys[layer] = carve_blocks(each, blocks, spec)
            else:
                tokens = blocks * self.tokens_per_page * spec.n_kv_groups
                shape = blocks, self.tokens_per_page, spec.n_kv_groups, -1
                cut = each.split_with_sizes([tokens * spec.d_k, tokens * spec.d_v])
                made = tuple(x.view(shape) for x in cut)
            self.pages[layer] = made

    def copy_blocks(self, source_block_ids: list[int], dest_block_ids: list[int]) -> None:
        """Copy whole blocks, for example if a request forks in the middle of a block."""
        device = self.cache_tensor.device
        source, target = (
            torch.tensor(x, dtype=torch.int64, device=device)
            for x in (source_block_ids, dest_block_ids)
        )
        plain = [x for x in self.newest_keys.values() if x.numel()]
        for pages in self.pages.values():
            if isinstance(pages, PagedCache):
                pages.copy_pages(source, target)
            else:
                plain += pages
        for x in plain:
            x[target] = x[source]

    def get_read_indices(
        self, request_id: str, past_length: int, query_length: int
    ) -> list[int]:
        """Return the indices of the request's blocks. The allocators of transformers return the
        indices of the request's tokens.
        """
        count = -(-(past_length + query_length) // self.tokens_per_page)
        return self.block_table[request_id][:count]

    def get_write_indices(
        self, request_id: str, past_length: int, query_length: int
    ) -> list[int]:
        """Return the indices of the blocks of a request that begins. For other requests, return
        an empty list. If all requests of a step begin, the step has no indices to read.
        """
        return [] if past_length else self.get_read_indices(request_id, 0, query_length)


class AllocatorByConfiguration(FullAttentionCacheAllocator):
    """Replaces the allocator class of transformers. This class makes an `NSACacheAllocator` for a
    model with NSA, and the original allocator for other models.
    """

    def __new__(cls, *arguments: Any, config: Any, **options: Any):
        ours = isinstance(config, NSAModelConfig) and "nsa" in config.layer_attention
        kind: Any = NSACacheAllocator if ours else FullAttentionCacheAllocator
        return kind(*arguments, config=config, **options)


def continuous_batching_config(
    config: NSAModelConfig, **options: Any
) -> ContinuousBatchingConfig:
    """Make transformers' `ContinuousBatchingConfig`, with pages of `select_block` tokens.

    Args:
      config: The configuration of the model.
      options: Other fields of `ContinuousBatchingConfig`. `use_cuda_graph` applies to steps of one
        token per row, and defaults to True on a GPU. Requests longer than `max_blocks_per_request`
        do not use CUDA graphs. `max_blocks_per_request` defaults to a bound that is derived from
        the prompts of `generate_batch`. If no prompts are known, the bound is derived from
        `max_position_embeddings`.

    Raises:
      ValueError: `page_size` is not `select_block`, CUDA graphs are requested for steps with
        prompts, or pages would be moved to the host.
      NotImplementedError: The installed transformers has a manager that was not tested.
    """
    check_manager()
    options.setdefault("page_size", config.select_block)
    made = ContinuousBatchingConfig(**options)
    _check(made, config)
    return made


def _check(given: Any, config: NSAModelConfig) -> None:
    for name in ("num_blocks", "max_batch_tokens", "max_requests_per_batch"):
        if (size := getattr(given, name)) is not None and size < 1:
            raise ValueError(f"{name} must be at least 1, or None, got {size}")
    if given.page_size != config.select_block:
        raise ValueError(
            f"page_size must be select_block={config.select_block}, got {given.page_size}; pass "
            "continuous_batching_config(model.config)"
        )
    if given.cpu_offload_space:
        raise ValueError(
            f"cpu_offload_space must be 0, got {given.cpu_offload_space}; transformers cannot move "
            "pages of NSA to the host"
        )
    graphs = given.use_cuda_graph
    if isinstance(graphs, tuple) and graphs[0]:
        raise ValueError(
            f"use_cuda_graph must be None, a bool or (False, bool), got {graphs}; steps with "
            "prompts cannot be CUDA graphs"
        )


def check_tokens(name: str, prompt: Any, vocab_size: int) -> None:
    """Raise ValueError unless `prompt` is a list of at least one token of the vocabulary."""
    if not isinstance(prompt, list | tuple) or not len(prompt):
        raise ValueError(f"{name} must be a list of at least one token, got {prompt!r}")
    if set(map(type, prompt)) == {int} and min(prompt) >= 0 and max(prompt) < vocab_size:
        return
    for token in prompt:
        if not isinstance(token, numbers.Integral) or not 0 <= int(token) < vocab_size:
            raise ValueError(
                f"{name} must contain integers in 0..{vocab_size - 1} (vocab_size={vocab_size}), "
                f"got {token!r}"
            )


class Manager(ContinuousBatchingManager):
    """The manager of transformers, which checks requests of models with NSA, and waits for work of
    other streams of the GPU. The streams of transformers' manager do not wait for other streams.
    Queued work, such as writing the inputs of a step, zeros into these inputs or the model's
    weights, could otherwise run after the manager has written or read them. Since transformers
    names the class of its manager itself, the class of a new manager is changed to `Manager`.
    """

    def _create_batch_processor(self) -> Any:
        """Create the inputs of steps, or reset existing inputs. The manager's thread calls this
        method before the first step."""
        processor = super()._create_batch_processor()
        self._synchronize()
        return processor

    def _generation_step(self) -> None:
        processor = self.batch_processor
        if self.model.device.type == "cuda" and not processor.use_async_batching:
            # The inputs were written on the current stream of this thread.
            current = torch.cuda.current_stream(self.model.device)
            processor.inputs_and_outputs.compute_stream.wait_stream(current)
        super()._generation_step()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        with super().pause():
            try:
                yield
            finally:
                self._synchronize()

    def _synchronize(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)

    def add_request(self, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """Check a request of a server as `generate_batch` checks its requests, and add it."""
        config = self.model.config
        if "nsa" in config.layer_attention:
            check_tokens("input_ids", input_ids, config.vocab_size)
        return super().add_request(input_ids, *args, **kwargs)


def manager_of(
    model: Any,
    make: Callable[..., Any],
    generation_config: Any,
    given: ContinuousBatchingConfig | None,
    hints: Any,
) -> Any:
    """Make the manager of transformers for a model with NSA. `hints` are workload hints of
    `generate_batch`.

    Args:
      make: transformers' `init_continuous_batching`.

    Raises:
      NotImplementedError: The installed transformers has a manager that was not tested.
      ValueError: `continuous_batching_config` is invalid, or beams are requested.
      MemoryError: The available memory is less than `num_blocks` blocks need.
    """
    check_manager()
    _batches.ATTN_TYPE_TO_ALLOCATOR[KIND] = AllocatorByConfiguration
    config = model.config
    if given is None:
        given = getattr(generation_config, "continuous_batching_config", None)
        given = given or continuous_batching_config(config)
    _check(given, config)
    if (getattr(generation_config or model.generation_config, "num_beams", None) or 1) != 1:
        raise ValueError(
            "num_beams must be 1, since generate_batch has no beam search; use generate"
        )
    asked = copy.copy(given)
    # transformers makes block tables only for FlashAttention, so block tables are chosen below
    asked.max_blocks_per_request = 0
    kept = getattr(model, "_cached_continuous_batching_manager", None)
    attention, config._attn_implementation = config._attn_implementation, NAME
    try:
        manager = make(generation_config, asked, hints)
        manager.__class__ = Manager
        if manager is not kept:
            _set_up(manager, model, given, hints)
    except BaseException:
        config._attn_implementation = attention
        raise
    manager._original_attn_impl = attention  # the manager restores this attribute when it stops
    return manager


def _set_up(manager: Any, model: Any, given: ContinuousBatchingConfig, hints: Any) -> None:
    """Set the options of a new manager and allocate its memory. The memory is allocated in the
    caller's thread, so that the caller receives the error if there is too little memory.
    """
    config, made = model.config, manager.continuous_batching_config
    made.max_blocks_per_request = given.max_blocks_per_request
    if made.max_blocks_per_request is None:
        longest = config.max_position_embeddings
        if hints is not None and hints.max_prompt_length:
            longest = hints.max_prompt_length + hints.max_generated_length
        made.max_blocks_per_request = -(-longest // config.select_block)
    made.use_cuda_graph = (False, made.cuda_graph_booleans[1])
    if given.use_async_batching is None:
        made.use_async_batching = made.use_cuda_graph[1]
    if given.num_blocks is not None:  # the manager assumes one key and one value per token
        ours = bytes_of_block(config, model.dtype)
        theirs = 2 * config.num_hidden_layers * config.select_block * model.dtype.itemsize
        theirs *= config.num_key_value_heads * config.head_dim
        made.num_blocks = -(-given.num_blocks * ours // theirs)
    if manager.num_return_sequences > 1:
        # A request that is to fork may have a row without tokens. In a padded step the manager
        # passes at most one row per token, and would cut off rows with tokens.
        made.q_padding_interval_size = max(
            made.q_padding_interval_size, made.max_requests_per_batch
        )
    manager.batch_processor = manager._create_batch_processor()


class ContinuousBatch:
    """One step of continuous batching of a model with NSA. Some rows of the step prefill and
    others decode. A request that is to fork keeps its last token for the step after the fork. Until
    then its row may have no token, so that whole steps may have no token.

    Args:
      config: The configuration of the model.
      x: `[1, N, hidden_size]`, the new tokens of all rows, then padding.
      position: `[1, N]`.
      cache .. block_table: The arguments that transformers passes to attention functions.
        `read_index` and `write_index` are results of `NSACacheAllocator`.

    Attributes:
      x: The tokens without padding, since padding needs no logits.
      page_table, lengths, starts, runs: as in `paged_attention`, for all layers.
    """

    def __init__(
        self,
        config: NSAModelConfig,
        x: Tensor,
        position: Tensor,
        *,
        cache: Any,
        cu_seq_lens_q: Tensor,
        cu_seq_lens_k: dict[str, Tensor],
        read_index: list[Tensor],
        write_index: list[Tensor],
        block_table: Tensor | None = None,
        **rest: Any,
    ):
        self.allocator = cache.cache_allocators[KIND]
        self.page = config.select_block
        (starts_k,) = cu_seq_lens_k.values()
        self.starts: Tensor | None = None
        self.runs: list[Run] | None = None
        # Groups of rows that a dense layer computes together. An entry has the tokens of the
        # group, its columns of the page table, and the length if the group is a single row.
        self.parts: list[tuple[slice, slice, int | None, int | None]]
        self.parts = [(slice(None), slice(None), None, None)]
        if block_table is not None:  # one token per row; rows without a token have length 0
            self.x, self.position = x, position
            self.page_table, self.lengths = block_table[0], starts_k.diff()
            return
        starts, before = torch.stack([cu_seq_lens_q, starts_k]).tolist()
        pairs = enumerate(itertools.pairwise(starts), start=1)
        rows = max((i for i, (a, b) in pairs if a < b), default=0)
        starts = starts[: rows + 1]
        lengths = [b - a for a, b in itertools.pairwise(before[: rows + 1])]
        self.x, self.position = x[:, : starts[-1]], position[:, : starts[-1]]
        if not rows:
            return
        self.starts, self.lengths = cu_seq_lens_q[: rows + 1], starts_k[: rows + 1].diff()
        self.runs, self.parts = plan_runs(starts, lengths, self.page), []
        for run in self.runs:
            if run.few and run.even:
                self.parts.append((run.rows, run.tokens, run.columns, None))
                continue
            for row in range(run.rows.start, run.rows.stop):
                tokens = slice(*starts[row : row + 2])
                self.parts.append((slice(row, row + 1), tokens, run.columns, lengths[row]))
        # If all requests begin in this step, there are no indices to read.
        blocks = read_index[0] if read_index[0].numel() else write_index[0]
        # This table int32 `[B, M]` has the blocks of each row. It is made from the blocks of all
        # rows, one row after the other. The table is as wide as a block table, so that a decode
        # step uses the same kernels.
        counts = torch.tensor([-(-length // self.page) for length in lengths])[:, None]
        column = torch.arange(max(int(counts.max()), cache.max_blocks_per_request))
        index = counts.cumsum(dim=0) - counts + torch.where(column < counts, column, 0)
        self.page_table = blocks[index.to(blocks.device, non_blocking=True)].to(torch.int32)

    def attend(self, attention: Any, index: int, x: Tensor) -> Tensor:
        """Compute the attention of layer `index` for the new tokens `x` [1, N, dim]."""
        pages = self.allocator.pages[index]
        if not isinstance(attention, NSAAttention):
            attend = functools.partial(self.attend_to_all, pages)
            return attention(x, self.position, None, attend=attend)
        at: dict[str, Any] = {"page_table": self.page_table, "lengths": self.lengths}
        at |= {"cu_seqlens_q": self.starts}
        newest = self.allocator.newest_keys[index]

        def convolve(key: Tensor) -> Tensor:
            return attention.key_conv.in_pages(key[0], newest, self.page, **at)[None]

        how = self.position, pages, None, convolve
        y, _ = attention(x, attend=lambda *own: attend_pages(*own, *how, **at, runs=self.runs))
        return y

    def attend_to_all(
        self,
        pages: tuple[Tensor, Tensor],
        _: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *rest: Any,
        scaling: float,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Compute causal attention of a dense layer on gathered pages. `query`, `key` and `value`
        `[1, heads, N, .]` belong to the tokens of this step.
        """
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        tokens = paged_layout.tokens_of(OPS, self.lengths, self.starts, self.x.shape[1])
        at = paged_layout.places(self.page_table, *tokens, self.page, pages[0].shape[0])
        for kept, x in zip(pages, (key, value), strict=True):
            OPS.put(kept, at, x)
        out = query.new_zeros(*query.shape[:2], value.shape[2])
        for rows, tokens, columns, length in self.parts:
            table, lengths = self.page_table[rows, :columns].clamp(min=0), self.lengths[rows]
            # Pages may have arbitrary contents after a row's tokens, and zero times NaN is NaN.
            found = own_tokens(lengths, *(x[table].flatten(1, 2) for x in pages))
            keys, values = (x[:, :length].transpose(1, 2) for x in found)
            queries = query[tokens].unflatten(0, (table.shape[0], -1)).transpose(1, 2)
            width = queries.shape[2]
            if length is not None:
                mask: Any = causal_lower_right(width, length)
            else:
                after, column = (
                    torch.arange(n, device=table.device) for n in (width, keys.shape[2])
                )
                # a row of length 0 may have any position
                position = (lengths[:, None] - width + after).clamp(min=0)
                mask = (column <= position[..., None])[:, None]
            found = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, scale=scaling, enable_gqa=True
            )
            out[tokens] = found.transpose(1, 2).flatten(0, 1)
        return out[None], None


class DenseBatch:
    """One step of continuous batching of a model with only dense layers, on the pages of
    transformers."""

    def __init__(self, x: Tensor, position: Tensor, mask: Any, *, cache: Any, **paged: Any):
        self.x, self.position, self.mask = x, position, mask
        self.cache, self.paged = cache, paged

    def attend(self, attention: Any, index: int, x: Tensor) -> Tensor:
        append = lambda key, value, paged: self.cache.update(key, value, index, paged)
        return attention(x, self.position, self.mask, append, **self.paged)
