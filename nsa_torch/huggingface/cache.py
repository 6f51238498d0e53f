"""The caches of `generate`. `NSAModelCache` grows, and `NSAPagedModelCache` has static shapes.

transformers counts the columns of the batch, including padding (`get_seq_length`). The caches of
this module store the tokens of a row from slot 0 on, without padding, and each row has its own
length. `NSAModel.forward` calls the method `begin`, which computes the positions of the new tokens
once for all layers (`Call`). Each layer with NSA then calls the method `attend`, and each dense
layer calls the method `append`. The method `end` stores the new lengths.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from kernels_pallas.triton.decode_descriptions import QUERIES
from nsa_core import validate
from nsa_core.cache_contents import Contents
from nsa_core.config import SIZES
from nsa_core.paged_dispatch import GATHERED
from nsa_core.paged_runs import Run
from nsa_core.types import Branches
from nsa_torch import cache as nsa_cache
from nsa_torch.functional import Name, Names
from nsa_torch.geometry import own_tokens
from nsa_torch.huggingface.configuration import NSAModelConfig
from nsa_torch.module import NSAAttention
from nsa_torch.operators import requires_grad
from nsa_torch.paged import FP8, PagedCache
from nsa_torch.paged_attend import explain, paged_attention
from nsa_torch.plain import product_dtype

# names of the cache argument, before and since transformers 5.24
NAMES = "past_key_values", "cache"
CACHE = NAMES["cache" in CausalLMOutputWithPast.__dataclass_fields__]
ROOM = 64  # the capacity of a growing cache is a multiple of this number
# The entries of a model's configuration on which its cache depends.
CACHED = (
    "layer_attention", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "v_head_dim", "rope_parameters", "qk_norm", "rms_norm_eps", "attention_bias", "kv", "phi",
    "phi_hidden", "key_taps", *SIZES,
)  # fmt: skip


def cache_named(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return `arguments` with the caller's cache under the name `cache`. The caller may have passed
    the cache under either name in `NAMES`.

    Raises:
      ValueError: The caller passed caches under both names.
    """
    found = {key: arguments.pop(key) for key in NAMES if key in arguments}
    given = [cache for cache in found.values() if cache is not None]
    if len(given) > 1:
        raise ValueError("only one of cache and past_key_values may be given, got both")
    return arguments | {name: given[0] if given else None} if found else arguments


def takes_past_key_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function`. The argument `cache` of the wrapped function may also be passed as
    `past_key_values`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **cache_named("cache", kwargs))

    return call


class Call(NamedTuple):
    """The data of one call of a model on `B` rows of `T` columns. All layers read the same data.
    Each layer receives this object as an argument, so that a device map moves the object with the
    layer's tokens.
    """

    columns: int  # number of columns before the call, including padding
    # int64 [B], number of real tokens among the new columns; None means that all are real
    count: Tensor | None
    position: Tensor  # int64 [B, T], position of each column's token in its row
    after: Tensor  # int32 [B], tokens of each row after the call
    room: int  # maximum number of tokens per row in the cache of a layer
    reach: int  # number of tokens per row that the call reads
    at: dict[str, Any] = {}  # noqa: RUF012, of pages: arguments of `paged_attention`
    # int64 [B * T], first the real tokens of the rows, then the padding
    order: Tensor | None = None


class NSALayer:
    """The cache of a layer with NSA. The first call creates the tensors of the cache, and later
    calls let the tensors grow.
    """

    state: Any = None  # an `NSACache`

    def attend(self, attention: NSAAttention, x: Tensor, call: Call) -> Tensor:
        """Compute `attention` of the columns `x` [B, T, dim]. Each column attends to itself and
        to all earlier columns.
        """
        if self.state is None:
            # the weights may be quantized, so their dtype is not used
            dtype = product_dtype(x.device, x.dtype)
            self.state = attention.init_cache(x.shape[0], call.room, dtype, x.device)
        elif self.state.capacity < call.room:
            self.state = nsa_cache.grow(self.state, call.room)
        y, self.state = NSAAttention.forward(attention, x, self.state, new_lengths=call.count)
        return y

    def map(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace each tensor `x` by `function(x)`."""
        self.state = self.state.map(function)

    def reset(self) -> None:
        """Clear the tokens. Each tensor keeps its memory, unless an autograd graph holds the
        tensor."""
        self.state.reset()

    def crop(self, count: int, lengths: Tensor) -> None:
        """Remove the last `count` tokens of every row. `lengths` is the number of tokens per row
        that remain."""
        nsa_cache.crop(self.state, count)


class DenseLayer:
    """The keys and values of a layer with dense attention, `[B, room, Hkv, .]`. Unused slots are
    zeros, since the keys and values of masked slots must be finite.
    """

    page = 1  # tokens per entry of the second axis
    kept: Sequence[Tensor] = ()

    def append(self, key: Tensor, value: Tensor, call: Call) -> list[Tensor]:
        """Write new keys and values `[B, Hkv, T, .]`. Return all keys and values that the call
        reads.
        """
        new = own_tokens(call.count, key.transpose(1, 2), value.transpose(1, 2))
        kept = self.kept or [x[:, :0] for x in new]
        if kept[0].shape[1] < call.room:
            self.kept = [nsa_cache.extend(x, call.columns, call.room) for x in kept]
        if any(x.requires_grad for x in self.kept) or requires_grad(*new):
            self.map(Tensor.clone)  # an autograd graph holds the tensors, or will hold them
        row = torch.arange(key.shape[0], device=key.device)[:, None]
        for kept, x in zip(self.kept, new, strict=True):
            kept[row, call.position] = x
        return [x[:, : call.reach].transpose(1, 2) for x in self.kept]

    def tensors(self) -> Sequence[Tensor]:
        return self.kept

    def map(self, function: Callable[[Tensor], Tensor]) -> None:
        self.kept = [*map(function, self.kept)]

    def reset(self) -> None:
        self.map(nsa_cache.zeroed)

    def crop(self, count: int, lengths: Tensor) -> None:
        self.map(lambda x: nsa_cache.zero_behind(x, lengths.to(x.device), count))


class PagedLayer:
    """The pages of a layer with NSA, in fp8 or in the model's dtype. The first call allocates the
    pages.
    """

    pages: Any = None  # a `PagedCache`
    newest_keys: Any = None  # [B, key_taps - 1, columns], as in `NSACache`

    def __init__(self, page: int, fp8: bool):
        self.page, self.fp8 = page, fp8

    def attend(self, attention: NSAAttention, x: Tensor, call: Call) -> Tensor:
        """Compute `attention` of the columns `x` [B, T, dim]. Each column attends to itself and
        to all earlier columns.
        """
        spec = attention.spec
        if self.pages is None:
            self.batch, dtype = x.shape[0], product_dtype(x.device, x.dtype)
            self.pages = PagedCache(
                self.batch * math.ceil(call.room / self.page),
                *(spec.n_kv_groups, spec.d_k, spec.d_v),
                config=spec.config,
                dtype=FP8 if self.fp8 else dtype,
                device=x.device,
                separate=spec.separate,
                compressed_dtype=dtype,
                max_rows=self.batch,
            )
            self.newest_keys = attention.empty_newest_keys(call.after, dtype)
        rows = self.newest_keys, call.position, call.count
        convolve, newest = attention.convolve_after(*rows)
        at = call.position, self.pages, call.order, convolve
        y = attend_pages(attention, x, *at, **call.at)
        if newest:
            self.newest_keys.copy_(*newest)
        return y

    def tensors(self) -> list[Tensor]:
        """Return views `[B, .., ...]` of the cached tensors. Tensors in fp8 are viewed as
        integers, since not every version of torch can index fp8 tensors.
        """
        found = self.pages.tensors().values()
        bits = (x.view(torch.uint8) if x.dtype is FP8 else x for x in found)
        views = [x.unflatten(0, (self.batch, -1)) for x in bits]
        return views if self.newest_keys is None else [*views, self.newest_keys[:, None]]

    def map(self, function: Callable[[Tensor], Tensor]) -> None:
        made = [*map(function, self.tensors())]
        self.batch = made[0].shape[0]
        if self.newest_keys is not None:
            self.newest_keys = made.pop()[:, 0]
        for (name, old), x in zip(self.pages.tensors().items(), made, strict=True):
            setattr(self.pages, name, x.flatten(0, 1).view(old.dtype))

    def reset(self) -> None:
        self.pages.reset()

    def crop(self, count: int, lengths: Tensor) -> None:
        """Do nothing, since no call reads slots of the cache beyond the length of a row."""


class NSAModelCache(Cache):
    """The keys and values of a batch's earlier tokens. Each call of `NSAForCausalLM` appends its
    tokens to this cache, with or without gradients.

    Args:
      config: configuration of the model.
      capacity: Maximum number of columns. The first call allocates the memory for `capacity`
        columns, and more columns raise a `ValueError`. `capacity=None` means that the cache has the
        size of the prompt at first, and doubles when it is full.

    Attributes:
      lengths: int32 `[B]`, the number of real tokens of each row; None before the first call.
    """

    is_croppable = True  # transformers reads this attribute since 5.24
    is_compileable = False
    nsa_layer: Callable[[], Any] = NSALayer

    def __init__(self, config: NSAModelConfig, capacity: int | None = None):
        validate.sizes(capacity=1 if capacity is None else capacity)
        self.config, self.capacity = config, capacity
        if config.key_taps is not None:
            self.is_croppable = False
        super().__init__([])
        self.clear()

    def clear(self) -> None:
        """Reset the cache to its state before the first call. After `clear`, the first call of each
        layer creates its tensors again.
        """
        self.layers: list[Any] = [
            DenseLayer() if kind == "dense" else self.nsa_layer()
            for kind in self.config.layer_attention
        ]
        self.lengths: Tensor | None = None
        self.columns = 0  # number of columns so far, including padding
        self.room = self.capacity or 0
        self.ragged = False  # whether rows may have different lengths
        self.page_table: Tensor | None = None  # int32 [B, M], indices of pages

    @property
    def batch_size(self) -> int:
        return -1 if self.lengths is None else self.lengths.shape[0]

    @property
    def is_initialized(self) -> bool:
        return self.lengths is not None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns in the cache, including padding."""
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.capacity or -1

    def check_model(self, config: NSAModelConfig) -> None:
        """Raise ValueError unless the layers of the cache are like the layers of the model."""
        ours, theirs = (
            [(x, getattr(each, x)) for x in CACHED] for each in (config, self.config)
        )
        Contents(theirs).with_facts(ours, "for a model ")

    def reserve(self, num_new: int) -> int:
        """Return the number of columns after `num_new` columns are added. Raise a ValueError if the
        number of columns exceeds the capacity.
        """
        needed = self.columns + num_new
        if self.capacity is not None and needed > self.capacity:
            raise ValueError(
                f"cache must have capacity for {needed} tokens, got {self.capacity}"
            )
        return needed

    def begin(self, x: Tensor, count: Tensor | None) -> Call:
        """Prepare the cache before the first layer of a call gets `x` [B, T, dim]. The first
        `count[b]` columns of row `b` are real tokens.

        Raises:
          ValueError: The tokens exceed the capacity, or an earlier call failed after some layers
            had stored its tokens.
        """
        needed, lengths = self.reserve(x.shape[1]), self.lengths
        if lengths is None:  # a first call that failed leaves no tensors behind
            self.clear()
            lengths = torch.zeros(x.shape[0], dtype=torch.int32, device=x.device)
        states = [layer.state for layer in self.layers if isinstance(layer, NSALayer)]
        seen = [0 if state is None else state.longest for state in states]
        if {*seen} - {self.columns}:
            raise ValueError(
                f"cache must have the same tokens in all layers, got {seen} columns instead of "
                f"{self.columns}; an earlier call ended with an error, so call reset() and start "
                "again"
            )
        if needed > self.room:  # the next multiple of ROOM, at least twice the present capacity
            self.room = math.ceil(max(needed, 2 * self.room) / ROOM) * ROOM
        position = lengths[:, None] + torch.arange(x.shape[1], device=x.device)
        new = x.shape[1] if count is None else count.to(torch.int32)
        return Call(self.columns, count, position, lengths + new, self.room, needed)

    def end(self, call: Call) -> None:
        """Add the tokens of `call` to the lengths, after the last layer has run."""
        self.lengths = call.after if self.lengths is None else self.lengths.copy_(call.after)
        self.columns += call.position.shape[1]
        self.ragged = self.ragged or call.count is not None

    def reset(self) -> None:
        """Remove all tokens."""
        if self.lengths is None:
            return
        for layer in self.layers:
            layer.reset()
        nsa_cache.zeroed(self.lengths)
        self.columns, self.ragged = 0, False

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Remove the last `-tokens_to_remove` columns from all layers. No row may have padding in
        the removed columns. If the method raises an error, no layer has changed.
        """
        count = -int(tokens_to_remove)  # transformers may pass a tensor
        if not 0 <= count <= self.columns:
            raise ValueError(
                f"tokens_to_remove must be in {-self.columns}..0 (minus the number of columns to "
                f"remove), got {-count}"
            )
        if count and not self.is_croppable:
            raise ValueError(nsa_cache.CONVOLVED)
        if self.lengths is None:
            return
        lengths = self.lengths - count
        for layer in self.layers:
            layer.crop(count, lengths)
        self.lengths.copy_(lengths)
        self.columns -= count

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the batch rows with these `indices`."""
        if self.lengths is None:
            return
        select = lambda x: x[indices.to(x.device)]
        for layer in self.layers:
            layer.map(select)
        self.lengths = select(self.lengths)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.batch_size > 0:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Copy row `beam_idx[i]` to row `i`."""
        self.batch_select_indices(beam_idx)


class NSAPagedModelCache(NSAModelCache):
    """The keys and values of a batch's earlier tokens in pages, for `NSAForCausalLM`. Pass this
    object to `generate` as `cache`.

    Row `b` has the pages `range(b * M, (b + 1) * M)` of every layer, where `M` is the number of
    pages per row. The page table and `lengths` are on the device, and each call reads and writes
    each of these two tensors once on the device. A step does not wait for the device, and allocates
    no memory that outlives the step. `StepGraph` captures a step of the model once and replays the
    captured step while rows grow.

    Args:
      config: configuration of the model.
      batch_size: number of rows, counting each beam and each returned sequence.
      capacity: Maximum number of columns, including padding. More columns raise a `ValueError`.
      dtype: with `torch.float8_e4m3fn`, layers with NSA store their tokens in fp8, as in a
        `PagedCache`. `dtype=None` means the dtype of the model.

    Reordering of beams copies the pages in use. `crop` and `reset` only change lengths. Layers
    with dense attention store keys and values contiguously, without pages.

    Raises:
      ValueError: A size is not a positive int, or the dtype is not supported.
    """

    def __init__(
        self,
        config: NSAModelConfig,
        batch_size: int,
        capacity: int,
        dtype: torch.dtype | None = None,
    ):
        validate.sizes(batch_size=batch_size, capacity=capacity)
        validate.one_of("dtype", dtype, (None, FP8))
        self.batch, self.page = batch_size, config.select_block
        self.nsa_layer = functools.partial(PagedLayer, self.page, dtype is FP8)
        super().__init__(config, capacity)

    @property
    def batch_size(self) -> int:
        return self.batch

    def begin(self, x: Tensor, count: Tensor | None) -> Call:
        """Prepare the cache before a call. If the call has at most `QUERIES` columns, no shape
        depends on the number of cached tokens.
        """
        batch, T = x.shape[:2]
        if batch != self.batch:
            raise ValueError(
                f"cache must have a row for each of the {batch} rows of the input, got "
                f"batch_size={self.batch}"
            )
        call = super().begin(x, count)
        pages = math.ceil(self.room / self.page)
        if self.page_table is None:
            index = torch.arange(batch * pages, dtype=torch.int32, device=x.device)
            self.page_table = index.view(batch, pages)
        table = self.page_table
        if T > QUERIES:
            table = table[:, : math.ceil(call.reach / self.page)].contiguous()
        else:
            call = call._replace(reach=self.room)
        at = {"page_table": table, "lengths": call.after, "max_seqlen_q": T}
        if count is None:
            if T > QUERIES:  # all rows have the same number of tokens
                starts = torch.arange(batch + 1, dtype=torch.int32, device=x.device) * T
                whole = call.columns == 0
                runs = [Run(slice(0, batch), slice(0, batch * T), T, table.shape[1], whole)]
                at |= {"cu_seqlens_q": starts, "runs": runs}
        elif T == 1:  # a row without a new token has length 0
            at["lengths"] = torch.where(count > 0, call.after, 0)
        else:
            starts = torch.zeros(batch + 1, dtype=torch.int32, device=x.device)
            starts[1:] = count.cumsum(dim=0)
            at["cu_seqlens_q"] = starts
            padding = (torch.arange(T, device=x.device) >= count[:, None]).flatten()
            call = call._replace(order=padding.to(torch.uint8).argsort(stable=True))
        return call._replace(at=at)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.batch, self.page_table = indices.shape[0], None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Copy row `beam_idx[i]` to row `i`. Only the pages that the row uses are copied, and the
        tensors keep their memory.
        """
        if self.lengths is None:
            return
        used = [self.lengths]
        for layer in self.layers:
            entries = math.ceil(self.columns / layer.page)
            used += (x[:, :entries] for x in layer.tensors())
        for x in used:
            x.copy_(x.index_select(0, beam_idx.to(x.device)))


def attend_pages(
    attention: NSAAttention,
    x: Tensor,
    position: Tensor,
    pages: PagedCache,
    order: Tensor | None = None,
    convolve: Callable[[Tensor], Tensor] | None = None,
    **at: Any,
) -> Tensor:
    """Append new tokens `x` [B, T, dim] at `position` [B, T] to `pages`, and compute `attention`
    for the new tokens.

    Args:
      order: int64 [B * T], the order in which the tokens are passed to `paged_attention`
        (`Call.order`: real tokens first, then padding). `order=None` means the order of `x`.
      convolve: as in `NSAAttention.project`.
      at: The rows of the tokens, as arguments of `paged_attention`.
    """

    def by_token(x: Tensor) -> Tensor:
        return x.flatten(0, 1) if order is None else x.flatten(0, 1)[order]

    query, key, value, gates = attention.project(x, position, convolve)
    key, value = (
        Branches(*map(by_token, x)) if attention.spec.separate else by_token(x[0])
        for x in (key, value)
    )
    out = paged_attention(
        by_token(query),
        by_token(gates),
        pages,
        key=key,
        value=value,
        params=attention.compress_params(),
        made_with=attention.spec.cached,
        config=attention.spec.config,
        implementation=one_name(attention.implementation),
        **at,
    )
    if order is not None:
        out = torch.empty_like(out).index_copy_(0, order, out)
    return attention.out(out.reshape(*x.shape[:2], -1))


def decodes_on_pages(attention: NSAAttention, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether steps of one token per row run on kernels that read pages."""
    spec = attention.spec
    heads, widths = spec.n_kv_groups, (spec.d_k, spec.d_v)
    options: Any = {"dtype": dtype, "device": device}
    cache = PagedCache(1, heads, *widths, config=spec.config, separate=spec.separate, **options)
    query, gates = (torch.empty(1, spec.n_heads, n, **options) for n in (spec.d_k, 3))
    table, lengths = (torch.zeros(x, dtype=torch.int32, device=device) for x in ((1, 1), 1))
    try:
        at = query, gates, cache, table, lengths
        found = explain(*at, implementation=one_name(attention.implementation))
    except NotImplementedError:
        return False
    return found.implementation != GATHERED


def one_name(implementation: Names) -> Name | None:
    """Return the implementation that all branches share. Different names raise an error, since
    attention from pages runs all branches at once.
    """
    names = set(Branches.each(implementation))
    if len(names) > 1:
        raise NotImplementedError(
            "implementation must be one name for all branches if attention reads pages, got "
            f"{implementation}"
        )
    return names.pop()
