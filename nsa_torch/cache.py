"""Decoding in torch: a call appends its tokens to the cache that it is given, and returns that one.

So it does whether gradients are recorded or not: the cache's tensors are written in place, and
copies replace those that a graph of autograd's has. The twin is `nsa_jax.cache`. Nothing
grows: a write past the capacity is a `ValueError`.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor

from nsa_core import validate
from nsa_core.cache_contents import UNSAID, Contents, Facts, facts_of, summary
from nsa_core.compress_params import CompressParams
from nsa_core.config import NSAConfig
from nsa_core.types import Branches
from nsa_torch import checks, functional
from nsa_torch.compress import apply_phi
from nsa_torch.dispatch import choose, description
from nsa_torch.geometry import own_tokens
from nsa_torch.operators import refuse_transforms, requires_grad
from nsa_torch.shared import is_capturing


@dataclasses.dataclass(repr=False)
class NSACache:
    """Keys and values, to which each call appends, whether gradients are recorded or not.

    `M`: capacity in tokens. Sliding fields are None where it reads the selected ones.
    """

    selected_key: Tensor  # [B, M, Hkv, D]
    selected_value: Tensor  # [B, M, Hkv, Dv]
    sliding_key: Tensor | None  # [B, M, Hkv, D]
    sliding_value: Tensor | None  # [B, M, Hkv, Dv]
    compressed_key: Tensor  # [B, C + 1, Hkv, D], the last slot takes what is not complete yet
    compressed_value: Tensor  # [B, C + 1, Hkv, Dv]
    recent_key: Tensor  # [B, l - 1, Hkv, D], raw tokens of the compressed branch
    recent_value: Tensor  # [B, l - 1, Hkv, Dv]
    length: Tensor  # int32 [B], tokens seen by each sequence
    config: NSAConfig  # what compressed tokens are made with
    longest: int = 0  # no sequence is longer; known on the host
    contents: Contents = UNSAID  # what its tokens were made with
    # [B, R, Hkv, .]: where `crop` has to go back, `recent` and what came since `record`.
    history_key: Tensor | None = None
    history_value: Tensor | None = None

    def __post_init__(self) -> None:
        compiling = torch.compiler.is_compiling()
        # Of the backward pass that makes the cache, -1: of none; whether a CUDA graph makes it.
        self.made_in_backward = -1 if compiling else torch._C._current_graph_task_id()
        self.captured = not compiling and is_capturing(self.selected_key.device)

    @property
    def capacity(self) -> int:
        return self.selected_key.shape[1]

    def __repr__(self) -> str:
        separate = self.sliding_key is not None
        return summary(self, "selected_key", "selected_value", self.length, separate=separate)

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The cache with `function` of each tensor in its place."""
        tensors = {
            field.name: function(value)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return dataclasses.replace(self, **tensors)

    def clone(self) -> Self:
        """A copy that shares no memory with this one."""
        return self.map(Tensor.clone)

    def reset(self) -> None:
        """Forgets the tokens and what they were made with; the tensors stay where they are, but
        for those in a graph of autograd's.
        """
        for name in (field.name for field in dataclasses.fields(self)):
            x = getattr(self, name)
            if x is not None and name.endswith(("_key", "_value")):
                setattr(self, name, zeroed(x))
        self.length = torch.zeros_like(self.length)
        self.longest, self.contents = 0, UNSAID
        if self.history_key is not None:
            self.record()

    def record(self) -> None:
        """From now on keeps what `crop` needs."""
        self.history_key = self.recent_key.clone()
        self.history_value = self.recent_value.clone()


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
    """An empty cache for `capacity` tokens, to which each call appends (`NSACache`).

    Args:
      batch, capacity: rows, and tokens of a row at most.
      kv_heads, key_width, value_width: Hkv, D and Dv.
      config: of all calls on the cache.
      dtype: of its keys and values.
      device: of the tensors; None: torch's default.
      separate: whether the sliding branch has keys and values of its own (`Branches`).

    Returns:
      An `NSACache` of tensors that are 0.

    Raises:
      ValueError: a size that is no positive integer, no configuration, or no floating dtype of
        `attention`.
    """
    validate.configuration(config)
    validate.in_dtype_of_query(config, "a cache")
    validate.flag("separate", separate)
    validate.sizes(
        batch=batch,
        capacity=capacity,
        kv_heads=kv_heads,
        key_width=key_width,
        value_width=value_width,
    )
    validate.one_of("dtype", str(dtype).removeprefix("torch."), validate.FLOATS)

    def zeros(length, width):
        return torch.zeros(batch, length, kv_heads, width, dtype=dtype, device=device)

    slots, recent = config.num_compressed(capacity) + 1, config.compress_block - 1
    return NSACache(
        zeros(capacity, key_width),
        zeros(capacity, value_width),
        zeros(capacity, key_width) if separate else None,
        zeros(capacity, value_width) if separate else None,
        zeros(slots, key_width),
        zeros(slots, value_width),
        zeros(recent, key_width),
        zeros(recent, value_width),
        torch.zeros(batch, dtype=torch.int32, device=device),
        config,
    )


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
    """Appends `T >= 1` tokens to the cache that is given and attends from them: `(out, cache)`.

    The same numbers as `attention` over all tokens so far, in one piece, in chunks of any
    size or token by token. The call returns the cache that it was given, with or without
    gradients; `cache.clone()` before it keeps the earlier state. Where gradients are recorded
    each call copies the tensors, and the graph keeps them: steps without a gradient belong under
    `torch.no_grad()`. A function that `torch.utils.checkpoint` runs again must append to a clone
    that it makes.

    Args:
      query, key, value, gates: of the new tokens, as of `attention`, with `S = T`.
      cache: from `init_cache`; `Branches` of keys need `separate=True` there.
      config: None: the cache's. Another must have its `compress_block` and `compress_stride`.
      compress_params: of the keys and of the values (`nsa_core.compress_params`).
      made_with: names and values of what else changes the tokens, such as `("rope_base", 1e4)`:
        a cache refuses the tokens of who says otherwise, as it does other kinds of parameters.
      scale, implementation: as of `attention`.
      new_lengths: int32 or int64 `[B]`, `0..T`, which the host reads on a CPU alone: the first
        `new_lengths` of the `T` tokens are the sequence's own. The rest is padding, whose output
        means nothing; it needs room in the cache, and the tokens after it take its place. None:
        `T`.

    Returns:
      `(out, cache)`: `[B, T, H, Dv]` in the dtype of `query`, and the cache that was given.

    Raises:
      ValueError: bad shapes, a cache of another config or filled with parameters of another
        kind, more tokens than the capacity, or a call that a backward pass runs again.
      NotImplementedError: the named implementation cannot run this, or a CUDA graph is captured.
    """
    given: dict[str, Any] = {"query": query, "key": key, "value": value, "gates": gates}
    given |= checks.present(new_lengths=new_lengths)
    checks.tensors(**given)
    key, value = Branches.each(key), Branches.each(value)
    gates = checks.gates(gates, query)
    config = validate.cache_config(cache, config)
    validate.cached(query, key, value, cache, config, compress_params, scale)
    contents = cache.contents.with_facts(facts_of(compress_params, made_with))
    checks.devices(query, {**given, "cache": cache.selected_key})
    checks.parameters(compress_params, query, "query")
    if not torch.compiler.is_compiling():
        _check_runs_once(cache)
    num_new = query.shape[1]
    if cache.longest + num_new > cache.capacity:
        raise ValueError(
            f"cache capacity is {cache.capacity} tokens, got {cache.longest + num_new}"
        )
    if new_lengths is not None:
        validate.array("new_lengths", new_lengths, 1, ("int32", "int64"))
        validate.shape("new_lengths", new_lengths, tuple(query.shape[:1]))
        checks.within("new_lengths", new_lengths, 0, num_new)
        each = {id(x): x for x in (query, *key, *value, *gates)}
        own = dict(zip(each, own_tokens(new_lengths, *each.values()), strict=True))
        query = own[id(query)]
        key, value, gates = (
            Branches(*(own[id(x)] for x in given)) for given in (key, value, gates)
        )
    # Before anything is written: a cache that was refused is as it was.
    width = cache.selected_value.shape[-1]
    memory = {
        field.name: x
        for field in dataclasses.fields(cache)
        if isinstance(x := getattr(cache, field.name), Tensor)
    }
    problem = query, cache.selected_key, width, config, False, memory | {"query": query}
    new = *key, *value, *(x for params in compress_params for x in params or ())
    chosen = choose(description(*problem, (*gates, *new), cached=True), implementation)
    if {*chosen[:4]} != {"reference"}:
        refuse_transforms(query, *gates, *new)
    kv_len = cache.length + num_new
    same = cache
    if in_graph(memory.values(), (query, *gates, *new)):
        cache = cache.clone()
    recent = write(cache, key, value, config, compress_params, new_lengths)
    tokens = cache.longest + num_new
    slots: int | None = config.num_compressed(tokens)
    if "mosaic" in chosen:
        # Kernels are made for one number of keys: all that there is room for.
        tokens, slots = cache.capacity, None
    selected = cache.selected_key[:, :tokens], cache.selected_value[:, :tokens]
    sliding = selected
    if cache.sliding_key is not None and cache.sliding_value is not None:
        sliding = cache.sliding_key[:, :tokens], cache.sliding_value[:, :tokens]
    compressed = cache.compressed_key[:, :slots], cache.compressed_value[:, :slots]
    keys, values = (Branches(None, *pair) for pair in zip(selected, sliding, strict=True))
    lengths = {"config": config, "kv_len": kv_len, "cu_seqlens": None, "scale": scale}
    tensors = query, keys, values, gates, compressed, None
    out = functional.attend(*tensors, chosen, lengths, assume_finite=True)
    count(cache, recent, key.compressed, value.compressed, new_lengths)
    cache.contents = contents
    vars(same).update(vars(cache))
    return out, same


def _check_runs_once(cache: NSACache) -> None:
    """Raises where a backward pass or the replays of a CUDA graph would append tokens again."""
    if torch.is_grad_enabled() and cache.made_in_backward != torch._C._current_graph_task_id():
        raise ValueError(
            "the cache already has these tokens from the forward pass: append to cache.clone() "
            "inside the checkpointed function"
        )
    if is_capturing(cache.selected_key.device) and not cache.captured:
        raise NotImplementedError(
            "a CUDA graph must not append to a cache of init_cache, whose lengths the host counts, "
            "so that replays would write to one place: capture steps of paged_attention, or append "
            "to a clone() made within the graph"
        )


def in_graph(kept: Iterable[Tensor], new: Iterable[Tensor]) -> bool:
    """Whether a graph of autograd's has tensors `kept` in a cache, or will by a call with `new`."""
    return any(x.requires_grad for x in kept) or requires_grad(*new)


def write(cache, key, value, config, compress_params, new_lengths=None) -> list[Tensor]:
    """Writes the new tokens, `[B, T, Hkv, .]` in each branch, and the compressed tokens whose last
    raw token is among them, behind what the cache has: they are its own when they are counted.

    Returns:
      Keys and values, of the compressed branch, of the tokens that are recent then.
    """
    batch, num_new = key.selected.shape[:2]
    row = torch.arange(batch, device=cache.length.device)[:, None]
    place = cache.length[:, None] + torch.arange(num_new, device=row.device)
    cache.selected_key[row, place] = key.selected
    cache.selected_value[row, place] = value.selected
    if cache.sliding_key is not None and cache.sliding_value is not None:
        cache.sliding_key[row, place] = key.sliding
        cache.sliding_value[row, place] = value.sliding
    found = []
    for buffer, recent, tokens, params in (
        (cache.compressed_key, cache.recent_key, key.compressed, compress_params[0]),
        (cache.compressed_value, cache.recent_value, value.compressed, compress_params[1]),
    ):
        raw = torch.cat([recent, tokens], dim=1)
        _emit(buffer, raw, num_new, cache.length, config, params)
        kept = recent.shape[1]
        last = _last(raw, kept, new_lengths, kept)
        found.append(last.clone() if num_new > kept else last)  # a view holds all of `raw`
    return found


def count(cache, recent, key, value, new_lengths=None) -> None:
    """Makes tokens that were written the cache's own.

    Args:
      recent: what `write` returned.
      key, value: of the compressed branch.
    """
    for kept, now in zip((cache.recent_key, cache.recent_value), recent, strict=True):
        kept.copy_(now)
    if cache.history_key is not None and cache.history_value is not None:
        cache.history_key = _recorded(cache.history_key, key, new_lengths)
        cache.history_value = _recorded(cache.history_value, value, new_lengths)
    counted = key.shape[1] if new_lengths is None else new_lengths.to(cache.length.dtype)
    cache.length = cache.length + counted
    cache.longest += key.shape[1]


def grow(cache: NSACache, capacity: int) -> NSACache:
    """A cache of the same tokens with room for `capacity` of them."""
    sizes = {"selected": (cache.capacity, capacity), "sliding": (cache.capacity, capacity)}
    slots = cache.compressed_key.shape[1] - 1, cache.config.num_compressed(capacity) + 1
    wide: dict[str, Any] = {
        name: extend(x, *size)
        for branch, size in (sizes | {"compressed": slots}).items()
        for name in (f"{branch}_key", f"{branch}_value")
        if (x := getattr(cache, name)) is not None
    }
    return dataclasses.replace(cache, **wide)


def extend(x: Tensor, used: int, length: int) -> Tensor:
    """The first `used` of `x` [B, M, ...], and zeros up to `length` of them."""
    wide = x.new_zeros(x.shape[0], length, *x.shape[2:])
    wide[:, :used] = x[:, :used]
    return wide


def crop(cache: NSACache, count: int) -> None:
    """Takes the last `count` tokens of every sequence back; forgets how to go back further.

    Raises:
      ValueError: some of them came before `NSACache.record` or the `crop` before this one.
    """
    block = cache.recent_key.shape[1]
    known = 0 if cache.history_key is None else cache.history_key.shape[1] - block
    if not 0 <= count <= known:
        raise ValueError(
            f"count must be in 0..{known}, the tokens since record() or the last crop(), "
            f"got {count}"
        )
    if cache.history_key is None or cache.history_value is None:
        return
    end = cache.history_key.shape[1] - count
    cache.recent_key.copy_(cache.history_key[:, end - block : end])
    cache.recent_value.copy_(cache.history_value[:, end - block : end])
    cache.record()
    cache.length = cache.length - count
    cache.longest -= count
    for name in ("selected_key", "selected_value", "sliding_key", "sliding_value"):
        if (x := getattr(cache, name)) is not None:
            setattr(cache, name, zero_behind(x, cache.length, count))
    # Tokens that ended among them, and the slot of what is not complete.
    ended = -(-count // cache.config.compress_stride)
    slots = _compressed(cache.length, cache.config)
    last = torch.full_like(slots, cache.compressed_key.shape[1] - 1)
    for name in ("compressed_key", "compressed_value"):
        x = zero_behind(getattr(cache, name), slots, ended)
        setattr(cache, name, zero_behind(x, last, 1))


def zeroed(x: Tensor) -> Tensor:
    """Zeros in `x`: attention multiplies tiles whole, and behind the last token zero times NaN is
    NaN. In place, but where a graph of autograd's has `x`.
    """
    if x.requires_grad:
        return torch.zeros_like(x)
    with torch.inference_mode(x.is_inference()), torch.no_grad():
        return x.zero_()


def zero_behind(x: Tensor, used: Tensor, count: int) -> Tensor:
    """As `zeroed`, of `count` entries of `x` [B, M, ...] behind the first `used` [B] ones; in place
    of what would be beyond the last one, that.
    """
    place = used[:, None] + torch.arange(count, device=used.device)
    row = torch.arange(used.shape[0], device=used.device)[:, None]
    x = x.clone() if x.requires_grad else x
    x[row, place.clamp(max=x.shape[1] - 1)] = 0
    return x


def _last(raw, kept, new_lengths, count):
    """The last `count` of the tokens `raw`: `kept` of them and, of a row's new, `new_lengths`.

    None: all. What would lie before the first is the first.
    """
    if new_lengths is None:
        return raw[:, raw.shape[1] - count :]
    end = kept + new_lengths[:, None]
    index = end - count + torch.arange(count, device=raw.device)
    row = torch.arange(raw.shape[0], device=raw.device)[:, None]
    return raw[row, index.clamp(min=0)]


def _recorded(history, new, new_lengths):
    raw = torch.cat([history, new], dim=1)
    return _last(raw, history.shape[1], new_lengths, raw.shape[1])


def _compressed(length: Tensor, config: NSAConfig) -> Tensor:
    """Compressed tokens of rows of `length` tokens: token `i` ends at `i*d + l - 1`."""
    return (-((config.compress_block - 1 - length) // config.compress_stride)).clamp(min=0)


def _emit(buffer, raw, num_new, start, config, params):
    """Writes the compressed tokens whose last raw token is among the last `num_new` of `raw`.

    Those that padding ends stand in slots that no query sees before they are written again.
    """
    block, stride = config.compress_block, config.compress_stride
    spare = buffer.shape[1] - 1
    index = _compressed(start, config)[:, None] + torch.arange(
        -(-num_new // stride), device=raw.device
    )
    begin = index * stride - start[:, None] + block - 1
    taps = begin[..., None] + torch.arange(block, device=raw.device)
    row = torch.arange(raw.shape[0], device=raw.device)[:, None]
    windows = raw[row[..., None], taps.clamp(max=raw.shape[1] - 1)]
    complete = index * stride + block <= start[:, None] + num_new
    slot = torch.where(complete, index, spare)
    buffer[row, slot] = apply_phi(windows, params, index * stride)
