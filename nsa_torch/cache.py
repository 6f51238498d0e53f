"""Decoding in torch with a cache of fixed capacity. A call appends its tokens to the given
cache, and returns that cache.

Calls write to the tensors of the cache in place. If an autograd graph holds a tensor, the call
writes to a copy, and the copy replaces the tensor in the cache. A write beyond the capacity of
the cache raises `ValueError`. The counterpart in JAX is `nsa_jax.cache`.

The cache consists of pages, and the pages of a row are adjacent. A decode step without gradients
runs on a kernel that reads pages (`paged_attend.py`), if such a kernel supports the step. Every
call without such a kernel treats the pages of a row as one tensor.
"""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from nsa_core import paged_append, validate
from nsa_core.cache_contents import Contents, Facts, facts_of, summary
from nsa_core.compress_params import CompressParams
from nsa_core.config import NSAConfig
from nsa_core.dispatch import one_name
from nsa_core.paged_append import KINDS
from nsa_core.paged_layout import PAGES, first_slot
from nsa_core.types import Branches
from nsa_torch import checks, functional, paged_attend
from nsa_torch.compress import apply_phi
from nsa_torch.dispatch import INVARIANT, choose, problem_key
from nsa_torch.geometry import own_tokens
from nsa_torch.operators import refuse_transforms, requires_grad
from nsa_torch.paged import NewTokens, PagedCache, write_tokens
from nsa_torch.shared import is_capturing
from nsa_torch.torch_ops import TORCH_OPS as OPS
from nsa_torch.torch_ops import readable

CONVOLVED = (
    "tokens cannot be removed from a cache of a layer with key_taps, since it stores projected "
    "keys of the newest tokens only"
)
_WANTS_GRADIENT = operator.attrgetter("requires_grad")


@dataclasses.dataclass(repr=False, eq=False)
class NSACache:
    """The keys and values of earlier tokens. Each call appends its tokens to the cache, with or
    without gradients.

    Each array of a `PagedCache` is also an attribute of `NSACache`, with an additional axis for
    batch rows. For example `selected_key` is `[B, M, Hkv, D]`, where `M` is the capacity in tokens,
    rounded up to whole pages. The attribute of an array that the layer does not need is None.
    """

    pages: PagedCache  # row `b` has the `n` pages `b n .. b n + n - 1`
    length: Tensor  # int32 [B], tokens of each sequence so far
    capacity: int  # in tokens
    longest: int = 0  # upper bound of the lengths, known on the host
    page_table: Any = None  # int32 [B, n], indices into `pages`
    # Only for layers with `key_taps`: projected keys of the newest tokens, [B, key_taps - 1,
    # columns].
    newest_keys: Tensor | None = None

    def __post_init__(self) -> None:
        compiling = torch.compiler.is_compiling()
        # The id of the backward pass in which the cache was made (-1 means none), and whether
        # it was made while a CUDA graph was captured.
        self.made_in_backward = -1 if compiling else torch._C._current_graph_task_id()
        self.captured = not compiling and is_capturing(self.length.device)
        if self.page_table is None:
            options: Any = {"dtype": torch.int32, "device": self.length.device}
            count = torch.arange(self.pages.num_pages, **options)
            self.page_table = count.unflatten(0, (self.length.shape[0], -1))

    def __getattr__(self, name: str) -> Any:
        if name not in PAGES:
            raise AttributeError(f"NSACache has no attribute {name!r}")
        x = getattr(self.pages, name)
        return None if x is None else x.unflatten(0, self.page_table.shape).flatten(1, 2)

    @property
    def config(self) -> NSAConfig:
        """The `NSAConfig` whose sizes determine the compressed tokens of this cache."""
        return self.pages.config

    @property
    def contents(self) -> Contents:
        """Records how the stored tokens were computed (`Contents`)."""
        return self.pages.contents

    def __repr__(self) -> str:
        separate = self.pages.separate
        return summary(self, "selected_key", "selected_value", self.length, separate=separate)

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return a cache with `function` applied to each tensor. Axis 0 of each tensor that
        `function` receives is the axis of batch rows.
        """
        pages = self.pages.map(
            lambda x: function(x.unflatten(0, self.page_table.shape)).flatten(0, 1)
        )
        return self._with(pages, function)

    def clone(self) -> Self:
        """Return a copy that shares no memory with this cache."""
        # `map` would return views of the copies. Autograd forbids writing to a view that a compiled
        # graph returned.
        return self._with(self.pages.map(Tensor.clone), Tensor.clone)

    def _with(self, pages: PagedCache, function: Callable[[Tensor], Tensor]) -> Self:
        """Return a cache with `pages`, and with `function` applied to all other tensors."""
        newest = None if self.newest_keys is None else function(self.newest_keys)
        rows = {"length": function(self.length), "newest_keys": newest}
        return dataclasses.replace(self, pages=pages, page_table=None, **rows)

    def reset(self) -> None:
        """Remove all tokens, and the record of how the tokens were computed. Each tensor keeps its
        memory, unless an autograd graph holds the tensor.
        """
        self.pages = self.pages.map(zeroed)
        self.pages.reset()
        self.length, self.longest = torch.zeros_like(self.length), 0


def init_cache(
    batch: int,
    capacity: int,
    kv_heads: int,
    key_width: int,
    value_width: int,
    *,
    config: NSAConfig,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    separate: bool = False,
) -> NSACache:
    """Make an empty `NSACache` for `capacity` tokens. Each call with this cache appends its tokens
    to the cache.

    Args:
      batch, capacity: number of rows, and maximum number of tokens per row.
      kv_heads, key_width, value_width: Hkv, D and Dv.
      config: the sizes of the layer. A call without a config uses this config.
      dtype: dtype of keys and values.
      device: device of the tensors; None means torch's default.
      separate: whether each branch has its own keys and values (`Branches`), which triples the
        memory for raw tokens.

    Returns:
      An `NSACache` whose tensors are filled with zeros.

    Raises:
      ValueError: A size is not a positive integer, `config` is not an `NSAConfig`, or
        `attention` does not support the dtype.
      NotImplementedError: `config` has a `compute_dtype`.
    """
    validate.configuration(config)
    validate.sizes(batch=batch, capacity=capacity)
    validate.one_of("dtype", str(dtype).removeprefix("torch."), validate.FLOATS)
    sizes = batch * config.num_blocks(capacity), kv_heads, key_width, value_width
    options: Any = {"config": config, "dtype": dtype, "device": device, "separate": separate}
    pages = PagedCache(*sizes, **options)
    length = torch.zeros(batch, dtype=torch.int32, device=pages.selected_key.device)
    return NSACache(pages, length, capacity)


def cached_attention(
    query: Tensor,
    key: Tensor | Branches[Tensor],
    value: Tensor | Branches[Tensor],
    gates: Tensor | Branches[Tensor],
    cache: NSACache,
    *,
    config: NSAConfig | None = None,
    compress_params: tuple[CompressParams, CompressParams] = (None, None),
    made_with: Facts = (),
    scale: float | None = None,
    new_lengths: Tensor | None = None,
    implementation: functional.Names = None,
) -> tuple[Tensor, NSACache]:
    """Append `T >= 1` tokens to the given cache and attend from them. Return `(out, cache)`.

    The output of a token equals the output that `attention` over all tokens so far computes for
    this token. Tokens may be appended all at once, in chunks of any size, or one at a time. The
    call returns the given cache, with or without gradients. To keep the state before the call, call
    `cache.clone()` first. If gradients are recorded, each call copies the tensors of the cache, and
    the autograd graph retains the tensors of every call. Run steps without gradients under
    `torch.no_grad()`. A function that `torch.utils.checkpoint` runs again must append to its own
    clone.

    Args:
      query, key, value, gates: the new tokens, as in `attention`, with `S = T`.
      cache: a cache from `init_cache`. If `key` is a `Branches`, the cache must have been made
        with `separate=True`.
      config: None means the config of the cache. If you pass another config, it must have the
        same `compress_block` and `compress_stride`.
      compress_params: parameters of the compressors of keys and values
        (`nsa_core.compress_params`).
      made_with: names and values of other properties of the tokens, such as `("rope_base",
        1e4)`. If the cache has tokens with other values, or with another kind of
        `compress_params`, the call raises an error.
      scale, implementation: as in `attention`.
      new_lengths: int32 or int64 `[B]`, from 0 to `T`; how many of the `T` new tokens belong to
        each sequence. The remaining new tokens of a row are padding at the end, and the output of
        padding is undefined. Padding needs capacity in the cache, and later tokens overwrite the
        padding. The host reads `new_lengths` only on a CPU or under `nsa_core.debug`.
        `new_lengths=None` means `T`.

    Returns:
      `(out, cache)`, where `out` is `[B, T, H, Dv]` in the dtype of `query`, and `cache` is the
      given cache.

    Raises:
      ValueError: Shapes do not fit, or the cache has another config, parameters of another kind,
        or too little capacity. `ValueError` is also raised if a backward pass runs the call
        again.
      NotImplementedError: The named implementation cannot run this call. The error is also raised
        while a CUDA graph is captured, if the cache was made before the capture.
    """
    step = None
    may_be_known = (  # whether an earlier call may already have checked the same step
        isinstance(cache, NSACache)
        and new_lengths is None
        and compress_params == (None, None)
        and (config is None or config == cache.config)
        and isinstance(query, Tensor)
        and query.ndim == 4
        and cache.longest + query.shape[1] <= cache.capacity
        and not any(map(_WANTS_GRADIENT, cache.pages.tensors().values()))
    )
    if may_be_known:
        _check_runs_once(cache)
        lengths = cache.length + query.shape[1]
        at = query, gates, cache.pages, cache.page_table, lengths
        step = paged_attend.Step(*at, key, value, scale, made_with, None, implementation)
        if (known := step.known()) is not None:
            cache.length, cache.longest = lengths, cache.longest + query.shape[1]
            return known, cache
    given: dict[str, Any] = {"query": query, "key": key, "value": value, "gates": gates}
    given |= checks.present(new_lengths=new_lengths)
    checks.tensors(**given)
    key, value = Branches.each(key), Branches.each(value)
    split = checks.gates(gates, query)
    config = validate.cached(query, key, value, cache, config, compress_params, scale)
    contents = cache.contents.with_facts(facts_of(compress_params, made_with))
    checks.tensors(query, cache=cache.length)
    checks.parameters(compress_params, query, "query")
    _check_runs_once(cache)
    num_new = query.shape[1]
    if cache.longest + num_new > cache.capacity:
        raise ValueError(
            f"cache must have capacity for {cache.longest + num_new} tokens, got {cache.capacity}"
        )
    if new_lengths is not None:
        validate.array("new_lengths", new_lengths, 1, ("int32", "int64"))
        validate.shape("new_lengths", new_lengths, tuple(query.shape[:1]))
        checks.within("new_lengths", new_lengths, 0, num_new)
        each = {id(x): x for x in (query, *key, *value, *split)}
        own = dict(zip(each, own_tokens(new_lengths, *each.values()), strict=True))
        query = own[id(query)]
        key, value, split = (Branches(*(own[id(x)] for x in y)) for y in (key, value, split))
        gates = split
    learned = *split, *key, *value, *(x for params in compress_params for x in params or ())
    recorded = requires_grad(query, *learned)
    copied = recorded or any(map(_WANTS_GRADIENT, cache.pages.tensors().values()))
    whole = cache.clone() if copied else cache
    pages, lengths = whole.pages, cache.length + num_new
    by_token = lambda each: Branches(*[x.resolve_neg().flatten(0, 1) for x in each])
    new = NewTokens(by_token(key), by_token(value), compress_params, contents)
    # Everything is decided before a token is written, so that a refused call leaves the cache
    # unchanged.
    by_torch = recorded or torch.compiler.is_compiling()
    decided, implementation = None, one_name(implementation)
    if not by_torch and config == cache.config:
        rows = query, gates, pages, whole.page_table, lengths, scale
        decided = paged_attend.decide_step(*rows, implementation)
    if implementation == INVARIANT:
        paged_attend.check_invariant(pages, compress_params)
        if decided is None:
            raise NotImplementedError(
                f"{INVARIANT}: attention to a cache needs the config of the cache, and supports "
                "neither gradients nor torch.compile"
            )
    if decided is not None:
        refuse_transforms(query, *learned)
        out = paged_attend.finish(decided.inputs, decided, new, None, step)
        out = out.view(*query.shape[:3], -1)
    else:
        width, memory = value.selected.shape[3], pages.tensors() | {"query": query}
        problem = query, whole.selected_key, width, config, False, memory
        chosen = choose(problem_key(*problem, learned, cached=True), implementation)
        if {*chosen[:4]} != {"reference"}:
            refuse_transforms(query, *learned)
        at = whole.page_table, lengths, None
        if by_torch:
            paged_append.append(OPS, apply_phi, pages, *new[:2], *at, compress_params)
        else:
            write_tokens(pages, new, *at, None)
        # Kernels are built for one number of keys, which is the capacity.
        tokens = None if "mosaic" in chosen else cache.longest + num_new
        first = first_slot(config)
        slots = None if tokens is None else first + config.num_compressed(tokens)

        def read(name: str, kind: str) -> Tensor:
            x = getattr(whole, f"{name}_{kind}")
            if name == "compressed":
                x = x[:, first:slots]
                return x if tokens else readable(x)  # several rows need a copy
            return x[:, :tokens]

        sliding = "sliding" if pages.separate else "selected"
        keys, values = (
            Branches(None, read("selected", kind), read(sliding, kind)) for kind in KINDS
        )
        compressed = read("compressed", "key"), read("compressed", "value")
        rest = {"config": config, "kv_len": lengths, "cu_seqlens": None, "scale": scale}
        tensors = query, keys, values, split, compressed, None
        out = functional.attend(*tensors, chosen, rest, True)
    # Not `lengths`, since an autograd graph may hold it.
    counted = num_new if new_lengths is None else new_lengths.to(torch.int32)
    pages.contents = contents
    cache.pages, cache.length = pages, cache.length + counted
    cache.longest += num_new
    return out, cache


def _check_runs_once(cache: NSACache) -> None:
    """Raise an error if a backward pass or replays of a CUDA graph would append tokens again."""
    if torch.compiler.is_compiling():
        return
    if torch.is_grad_enabled() and cache.made_in_backward != torch._C._current_graph_task_id():
        raise ValueError(
            "cache already has these tokens from the forward pass; append to cache.clone() "
            "inside the checkpointed function"
        )
    if is_capturing(cache.length.device) and not cache.captured:
        raise NotImplementedError(
            "cache from init_cache must not be used in a CUDA graph, since every replay"
            " would write to the same slot; capture paged_attention, or append to a "
            "clone() made within the graph"
        )


def grow(cache: NSACache, capacity: int) -> NSACache:
    """Return a cache with the same tokens and room for `capacity` tokens."""
    used, wanted = cache.page_table.shape[1], cache.config.num_blocks(capacity)
    rows = lambda x: x.unflatten(0, cache.page_table.shape)
    pages = cache.pages.map(lambda x: extend(rows(x), used, wanted).flatten(0, 1))
    return dataclasses.replace(cache, pages=pages, capacity=capacity, page_table=None)


def extend(x: Tensor, used: int, length: int) -> Tensor:
    """Return the first `used` entries of `x` [B, M, ...], followed by zeros up to `length`
    entries.
    """
    wide = x.new_zeros(x.shape[0], length, *x.shape[2:])
    wide[:, :used] = x[:, :used]
    return wide


def crop(cache: NSACache, count: int) -> None:
    """Remove the last `count` tokens of every sequence. A sequence with fewer than `count` tokens
    becomes empty.

    Raises:
      ValueError: `count` is negative or above `cache.longest`, or the layer convolves keys
        (`key_taps`).
    """
    if count and cache.newest_keys is not None:
        raise ValueError(CONVOLVED)
    if not 0 <= count <= cache.longest:
        raise ValueError(
            f"count must be between 0 and {cache.longest}, the longest length, got {count}"
        )
    cache.length = (cache.length - count).clamp(min=0)
    cache.longest -= count
    for name, x in cache.pages.tensors().items():
        # A compressed token is stored at the index of its last raw token, divided by the stride.
        stride = cache.config.compress_stride if name.startswith("compressed") else 1
        rows = zero_behind(getattr(cache, name), cache.length // stride, -(-count // stride))
        setattr(cache.pages, name, rows.view(x.shape))


def zeroed(x: Tensor) -> Tensor:
    """Return `x` filled with zeros. The zeros are written in place unless an autograd graph holds
    `x`. The zeros are needed because attention multiplies whole tiles: a NaN after the last token
    would reach the output.
    """
    if x.requires_grad:
        return torch.zeros_like(x)
    with torch.inference_mode(x.is_inference()), torch.no_grad():
        return x.zero_()


def zero_behind(x: Tensor, used: Tensor, count: int) -> Tensor:
    """For every row `b` of `x` [B, M, ...], set `x[b, used[b] : used[b] + count]` to zero, in the
    same way as the function `zeroed`. Indices beyond the last entry are clamped to the last entry.
    """
    place = used[:, None] + torch.arange(count, device=used.device)
    row = torch.arange(used.shape[0], device=used.device)[:, None]
    x = x.clone() if x.requires_grad else x
    x[row, place.clamp(max=x.shape[1] - 1)] = 0
    return x
