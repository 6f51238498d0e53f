"""Names of transformers that it does not document, and what differs between its versions.

Nothing else here imports such a name. `OVERRIDDEN` lists what transformers calls or reads of our
classes: a hook that it renames is never called, and no error says so.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import transformers

TRIED = "5.17 to 5.24"
TRIED_BATCHES = "5.19 to 5.24"  # by `generate_batch`

try:
    from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
    from transformers.generation import GenerationMixin
    from transformers.initialization import copy_
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import causal_mask_function, create_causal_mask
    from transformers.modeling_layers import GradientCheckpointingLayer
    from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, eager_attention_forward
    from transformers.utils import can_return_tuple
    from transformers.utils.output_capturing import capture_outputs
except ImportError as error:
    raise ImportError(
        f"nsa_torch.huggingface runs with transformers {TRIED}, got {transformers.__version__}, "
        f"where a name has moved: {error}"
    ) from error

# What keeps the tokens of `generate_batch`. No names of all versions: `cache_allocators` asks.
_batches: Any = importlib.import_module("transformers.generation.continuous_batching.cache")
FullAttentionCacheAllocator: Any = getattr(_batches, "FullAttentionCacheAllocator", object)

__all__ = [
    "ALL_ATTENTION_FUNCTIONS",
    "CACHE",
    "BaseModelOutputWithPast",
    "Cache",
    "CacheLayerMixin",
    "CausalLMOutputWithPast",
    "DynamicLayer",
    "FullAttentionCacheAllocator",
    "GenerationMixin",
    "GradientCheckpointingLayer",
    "LlamaRMSNorm",
    "PreTrainedModel",
    "cache_allocators",
    "cache_argument",
    "cache_named",
    "can_return_tuple",
    "capture_outputs",
    "causal_mask_function",
    "copy_",
    "create_causal_mask",
    "eager_attention_forward",
    "is_of_capture_outputs",
    "sdpa_attention_forward",
    "takes_past_key_values",
]

OLD, NEW = "past_key_values", "cache"
# What transformers calls a cache among arguments and in outputs: NEW from 5.24 on.
CACHE = NEW if NEW in CausalLMOutputWithPast.__dataclass_fields__ else OLD

# Of a cache allocator: what ours calls and what it stands for.
ALLOCATOR = (
    "_after_cache_tensor_init",
    "_before_cache_tensor_init",
    "copy_blocks",
    "get_read_indices",
    "get_write_indices",
    "layer_type",
    "register_cache_tensor",
)

OVERRIDDEN: dict[type, tuple[str, ...]] = {
    GenerationMixin: (
        "_prepare_cache_for_generation",
        "_prepare_position_ids_for_generation",
        "_valid_auto_compile_criteria",
        "destroy_cached_continuous_batching_manager",
        "generate",
        "generate_batch",
        "init_continuous_batching",
    ),
    PreTrainedModel: (
        "_can_record_outputs",
        "_init_weights",
        "_initialize_weights",
        "_keys_to_ignore_on_load_unexpected",
        "_no_split_modules",
        "_skip_keys_device_placement",
        "_supports_sdpa",
        "_tied_weights_keys",
        "base_model_prefix",
        "config_class",
        "get_compiled_call",
        "supports_gradient_checkpointing",
    ),
    DynamicLayer: (
        "batch_repeat_interleave",
        "batch_select_indices",
        "crop",
        "is_sliding",
    ),
    CacheLayerMixin: (
        "get_mask_sizes",
        "get_max_length",
        "get_seq_length",
        "lazy_initialization",
        "reorder_cache",
        "reset",
        "update",
    ),
    Cache: (
        "batch_repeat_interleave",
        "batch_select_indices",
        "batch_size",
        "crop",
        "is_initialized",
        "reorder_cache",
        "reset",
    ),
}


def cache_allocators() -> dict[str, Any]:
    """Of `generate_batch`'s manager: the class that keeps the tokens of each kind of layer.

    Raises:
      NotImplementedError: transformers has none, or one with other methods.
    """
    if not all(hasattr(FullAttentionCacheAllocator, name) for name in ALLOCATOR):
        raise NotImplementedError(
            f"generate_batch on NSA runs with transformers {TRIED_BATCHES}, got "
            f"{transformers.__version__}, whose manager shares out its pages in another way"
        )
    return _batches.ATTN_TYPE_TO_ALLOCATOR


def is_of_capture_outputs(hook: Callable[..., Any]) -> bool:
    """Whether a forward hook is one that `capture_outputs` leaves in a model; it does nothing in a
    call that asks for no hidden states.
    """
    return getattr(hook, "__module__", None) == capture_outputs.__module__


def cache_argument(cache: Any) -> dict[str, Any]:
    """The keyword by which transformers' functions and outputs take a cache."""
    return {CACHE: cache}


def cache_named(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """`arguments`, in which a cache given by either name has this one.

    Raises:
      ValueError: caches are given by both names.
    """
    found = [arguments.pop(key) for key in (OLD, NEW) if key in arguments]
    given = [cache for cache in found if cache is not None]
    if len(given) > 1:
        raise ValueError(f"{NEW} and {OLD} are one argument, got both")
    return arguments | {name: given[0] if given else None} if found else arguments


def takes_past_key_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose argument `cache` may also be given as `past_key_values`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **cache_named(NEW, kwargs))

    return call
