"""`NSAModelCache`: what `generate` keeps, one `nsa_torch` cache a layer.

transformers counts columns of the batch, padding included (`get_seq_length`). A row's own
tokens stand in its cache from slot 0 on, without the padding, and its length is its own.
Tensors have room for `capacity` tokens; what is written where follows from lengths on the device.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from nsa_core.cache_contents import Contents, summary
from nsa_core.config import SIZES
from nsa_torch import cache as nsa_cache
from nsa_torch.geometry import own_tokens
from nsa_torch.huggingface.compatibility import Cache, CacheLayerMixin
from nsa_torch.huggingface.configuration import NSAModelConfig
from nsa_torch.module import NSAAttention
from nsa_torch.plain import product_dtype

ROOM = 64  # capacities of a growing cache are multiples of it
# Of a model's configuration, what its cache follows.
CACHED = (
    "layer_attention",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "v_head_dim",
    "rope_parameters",
    "qk_norm",
    "rms_norm_eps",
    "attention_bias",
    "kv",
    "phi",
    "phi_hidden",
    *SIZES,
)


@dataclasses.dataclass(repr=False)
class DenseCache:
    """Keys and values of a dense layer, as `nsa_torch.NSACache` has them."""

    key: Tensor  # [B, M, Hkv, D]
    value: Tensor  # [B, M, Hkv, Dv]
    length: Tensor  # int32 [B], tokens seen by each row
    longest: int = 0  # no row is longer; known on the host

    def __repr__(self) -> str:
        return summary(self, "key", "value", self.length)

    @property
    def capacity(self) -> int:
        return self.key.shape[1]

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The cache with `function` of each tensor in its place."""
        tensors = {name: function(getattr(self, name)) for name in ("key", "value", "length")}
        return dataclasses.replace(self, **tensors)

    def reset(self) -> None:
        """As of `nsa_torch.NSACache`."""
        self.key, self.value = map(nsa_cache.zeroed, (self.key, self.value))
        self.length, self.longest = torch.zeros_like(self.length), 0

    def take_back(self, count: int) -> None:
        """Forgets the last `count` tokens of every row."""
        self.length, self.longest = self.length - count, self.longest - count
        self.key, self.value = (
            nsa_cache.zero_behind(x, self.length, count) for x in (self.key, self.value)
        )


class ModelLayer(CacheLayerMixin):
    """A layer's cache, to which the attention layers of an nsa model append."""

    is_croppable = True  # read from transformers 5.24 on
    is_sliding = False
    supports_early_init = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError("a layer of this cache is made by the model's first call")

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        raise NotImplementedError(
            "tokens are appended by the attention layers of an nsa model, got a call of update"
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


class RowLayer(ModelLayer):
    """A layer's cache, whose rows have lengths of their own.

    Args:
      limit: its capacity; None: it grows.

    The state is an `NSACache` or a `DenseCache`, made by the first call.
    """

    def __init__(self, limit: int | None):
        super().__init__()
        self.limit = limit
        self.state: Any = None

    @abc.abstractmethod
    def grow(self, capacity: int) -> None:
        """Moves the tokens to a cache with room for `capacity` of them."""

    def reserve(self, num_new: int, make: Callable[[int], Any]) -> Any:
        """The state, with room for `num_new` columns more; `make` gives one of a capacity."""
        needed = self.get_seq_length() + num_new
        if self.limit is not None and needed > self.limit:
            raise ValueError(f"cache capacity is {self.limit} tokens, got {needed}")
        if self.state is None:
            self.state = make(self.limit or _rounded(needed))
            self.is_initialized = True
        elif needed > self.state.capacity:
            self.grow(_rounded(max(needed, 2 * self.state.capacity)))
        return self.state

    def get_seq_length(self) -> int:
        """Columns seen, padding included."""
        return 0 if self.state is None else self.state.longest

    def get_max_length(self) -> int:
        return -1 if self.limit is None else self.limit

    def reset(self) -> None:
        """Forgets the tokens; the tensors stay where they are, but for those in a graph of
        autograd's.
        """
        if self.state is not None:
            self.state.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row `i` becomes what row `beam_idx[i]` is; the tensors stay where they are, but for those
        in a graph of autograd's.
        """

        def moved(x):
            found = x.index_select(0, beam_idx.to(x.device))
            return found if x.requires_grad else x.copy_(found)

        if self.state is not None:
            self.state = self.state.map(moved)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = self.state.map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.map(lambda x: x[indices.to(x.device)])

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last `-tokens_to_remove` columns, in which no row has padding."""
        count = taken_back(tokens_to_remove, self.get_seq_length())
        if self.state is not None:
            self.take_back(count)

    @abc.abstractmethod
    def take_back(self, count: int) -> None:
        """Forgets the last `count` tokens of every row."""


class NSALayer(RowLayer):
    """That of a layer with NSA."""

    def __init__(self, limit: int | None):
        super().__init__(limit)
        self.recording = False

    def attend(self, attention: NSAAttention, x: Tensor, count: Tensor | None) -> Tensor:
        """`attention` of the columns `x` [B, T, dim] to all before; `count`: `Rows.count`."""

        def make(capacity):
            dtype = product_dtype(x.device, x.dtype)  # the weights may be quantized
            state = attention.init_cache(x.shape[0], capacity, dtype, x.device)
            if self.recording:
                state.record()
            return state

        state = self.reserve(x.shape[1], make)
        y, self.state = NSAAttention.forward(attention, x, state, new_lengths=count)
        return y

    def grow(self, capacity: int) -> None:
        self.state = nsa_cache.grow(self.state, capacity)

    def activate_past_recording(self) -> None:
        """From now on keeps what `crop` needs to take tokens back."""
        self.recording = True
        if self.state is not None:
            self.state.record()

    def take_back(self, count: int) -> None:
        nsa_cache.crop(self.state, count)


class DenseLayer(RowLayer):
    """That of a layer with dense attention."""

    def append(self, key: Tensor, value: Tensor, count: Tensor | None) -> tuple[Tensor, Tensor]:
        """Writes `[B, T, Hkv, .]`; returns the keys and values of all columns."""

        def make(capacity):
            def zeros(x):
                return x.new_zeros(x.shape[0], capacity, *x.shape[2:])

            length = torch.zeros(key.shape[0], dtype=torch.int32, device=key.device)
            return DenseCache(zeros(key), zeros(value), length)

        state = self.reserve(key.shape[1], make)
        if nsa_cache.in_graph((state.key, state.value), (key, value)):
            self.state = state = state.map(Tensor.clone)
        key, value = own_tokens(count, key, value)
        row = torch.arange(key.shape[0], device=key.device)[:, None]
        place = state.length[:, None] + torch.arange(key.shape[1], device=key.device)
        state.key[row, place], state.value[row, place] = key, value
        counted = key.shape[1] if count is None else count.to(state.length.dtype)
        state.length = state.length + counted
        state.longest += key.shape[1]
        return state.key[:, : state.longest], state.value[:, : state.longest]

    def grow(self, capacity: int) -> None:
        used = self.state.longest
        key, value = (
            nsa_cache.extend(x, used, capacity) for x in (self.state.key, self.state.value)
        )
        self.state = dataclasses.replace(self.state, key=key, value=value)

    def take_back(self, count: int) -> None:
        self.state.take_back(count)


class NSAModelCache(Cache):
    """The past of a batch: each call of `NSAForCausalLM` appends to it, with or without gradients.

    Args:
      config: of the model.
      capacity: columns there is room for, allocated at the first call; one more is a
        `ValueError`. None: the cache starts with the prompt's and doubles where it is full.
    """

    layers: list[Any]

    def __init__(self, config: NSAModelConfig, capacity: int | None = None):
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity must be >= 1 or None, got {capacity}")
        kinds = config.layer_attention
        super().__init__(layers=[self.make_layer(kind, config, capacity) for kind in kinds])
        self.config = config
        self.ragged = False  # whether rows may have different lengths
        self.begun: int | None = None  # columns before a call that has not ended

    def make_layer(self, kind: str, config: NSAModelConfig, capacity: int | None) -> Any:
        """The cache of a layer of this kind, "nsa" or "dense"."""
        return DenseLayer(capacity) if kind == "dense" else NSALayer(capacity)

    @property
    def lengths(self) -> Tensor | None:
        """int32 `[B]`: real tokens of each row; None before the first call."""
        state = self.layers[0].state
        return None if state is None else state.length

    @property
    def batch_size(self) -> int:
        lengths = self.lengths
        return -1 if lengths is None else lengths.shape[0]

    @property
    def is_initialized(self) -> bool:
        return self.lengths is not None

    def check_model(self, config: NSAModelConfig) -> None:
        """Raises ValueError unless the cache was made for layers as the model's."""
        ours, theirs = (
            [(x, getattr(each, x)) for x in CACHED] for each in (config, self.config)
        )
        Contents(theirs).with_facts(ours, "for a model ")

    def begin(self, x: Tensor, count: Tensor | None) -> None:
        """Before a call's first layer gets `x` [B, T, dim]; `count`: `Rows.count`.

        Raises:
          ValueError: the last call did not end, and some layers have its tokens.
        """
        columns = [layer.get_seq_length() for layer in self.layers]
        before = columns[0] if self.begun is None else self.begun
        if {*columns} != {before}:
            raise ValueError(
                "cache must have the same tokens in all layers, of calls that ended, got "
                f"{columns} columns: a call ended with an error; reset() it and begin anew"
            )
        self.begun = before

    def end(self, count: Tensor | None) -> None:
        """After a call's last layer."""
        self.ragged, self.begun = self.ragged or count is not None, None

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last `-tokens_to_remove` columns, in which no row has padding; of all
        layers or, where that is an error, of none.
        """
        # Layers with NSA know how far back they can go.
        for layer in sorted(self.layers, key=lambda layer: isinstance(layer, DenseLayer)):
            layer.crop(tokens_to_remove)

    def reset(self) -> None:
        super().reset()
        self.ragged, self.begun = False, None


def taken_back(tokens_to_remove: int | Tensor, columns: int) -> int:
    """How many of the `columns` go: a number on the host, where transformers may give a tensor.

    Raises:
      ValueError: `tokens_to_remove` is not minus the number of some of them.
    """
    if not -columns <= (removed := int(tokens_to_remove)) <= 0:
        raise ValueError(
            f"tokens_to_remove must be in {-columns}..0, minus the number of "
            f"tokens to take back, got {removed}"
        )
    return -removed


def _rounded(tokens: int) -> int:
    return -(-tokens // ROOM) * ROOM
