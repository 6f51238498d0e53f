"""The methods that `generate` of transformers calls on a model, to choose the cache and to run
each step.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from nsa_core import validate
from nsa_torch.huggingface.cache import (
    CACHE,
    NSAModelCache,
    NSAPagedModelCache,
    cache_named,
    decodes_on_pages,
)
from nsa_torch.huggingface.continuous import (
    Manager,
    bytes_of_block,
    check_tokens,
    manager_of,
)
from nsa_torch.huggingface.rows import check_prompt
from nsa_torch.huggingface.step_graph import StepGraph, why_not

# If `generate` makes at least this number of new tokens, pages are faster than a growing cache in
# all rows of the records (bench/records/log/decode.md). With one new token there is no decode
# step that could be a CUDA graph.
MIN_NEW_TOKENS = 2


class NSAGenerationMixin(GenerationMixin):
    """Adds the methods `generate` and `generate_batch` to a model. These methods use the caches of
    this package.
    """

    config: Any

    @functools.wraps(GenerationMixin.generate)
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run `generate` of transformers. The cache may be passed as `cache` or as
        `past_key_values`, with every version of transformers.
        """
        base: Any = super()
        return base.generate(*args, **cache_named(CACHE, kwargs))

    def init_continuous_batching(
        self,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
    ) -> Any:
        """Return the manager of transformers for `generate_batch`. `continuous.manager_of`
        documents the errors. If weights were replaced or changed since the last use of a persistent
        manager, the persistent manager is destroyed first. The cached prefixes of the old manager
        belong to the old weights, and the CUDA graphs of the old manager may read old tensors.
        """
        model: Any = self
        weights = [(id(x), 0 if x.is_inference() else x._version) for x in model.parameters()]
        if getattr(self, "_served", weights) != weights:
            model.destroy_cached_continuous_batching_manager()
        self._served = weights
        base: Any = super()
        given = generation_config, continuous_batching_config, workload_hints
        if "nsa" in self.config.layer_attention:
            return manager_of(self, base.init_continuous_batching, *given)
        manager = base.init_continuous_batching(*given)
        manager.__class__ = Manager
        return manager

    @functools.wraps(GenerationMixin.generate_batch)
    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Run `generate_batch` of transformers. By default a persistent manager captures all CUDA
        graphs before the first request. The manager of a single call captures a graph only when a
        step needs the graph, after the first tokens.

        Args:
          persistent_manager: The same as in transformers. If the weights have changed, a new
            manager is made. Changes through `.data` and a change of the active adapter cannot be
            detected. After a change that cannot be detected, call
            `destroy_cached_continuous_batching_manager()`.

        Raises:
          ValueError: A prompt is not a list of at least one token of the vocabulary. All prompts
            are checked before the first step, since an error during a step would also end the
            other requests.
        """
        base: Any = super()
        given = inspect.signature(base.generate_batch).bind_partial(*args, **kwargs).arguments
        if "nsa" in self.config.layer_attention:
            for i, prompt in enumerate(given.get("inputs", ())):
                check_tokens(f"inputs[{i}]", prompt, self.config.vocab_size)
            if "warmup" not in given:
                kwargs["warmup"] = bool(given.get("persistent_manager"))
        return base.generate_batch(*args, **kwargs)

    def _prepare_position_ids_for_generation(self, inputs_tensor, model_kwargs) -> Tensor:
        """Compute the positions from the mask. Padding before a row's tokens has position -1.
        Padding after a row's tokens has the position of the last token. With these positions, the
        position of the next token is also correct in a row that has only padding.
        """
        mask = model_kwargs.get("attention_mask")
        if mask is None:
            base: Any = super()
            return base._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)
        check_prompt(mask)
        return mask.long().cumsum(-1) - 1

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ):
        """Choose the cache according to `cache_implementation`. A "dynamic" cache grows, and a
        "static" cache has the capacity that `max_length` requires. The default is a paged cache if
        `goes_on_pages` is true, otherwise "dynamic". In transformers, "paged" means
        `generate_batch`.
        """
        # transformers would reduce the number of layers in the configuration. It would not
        # restore this number after an error.
        given, rows = generation_config, batch_size * generation_config.num_return_sequences
        if (left := getattr(given, "assistant_early_exit", None)) is not None:
            raise NotImplementedError(
                f"assistant_early_exit must be None, got {left}; an NSA model cannot skip layers, "
                "so pass an assistant_model"
            )
        name, cache = given.cache_implementation, model_kwargs.get(CACHE)
        # positions give the length of the prompt; transformers drops a mask of ones since 5.19
        positions = model_kwargs.get("position_ids")
        prompt = 0 if positions is None else positions.shape[-1]
        if cache is not None and name is not None:
            raise ValueError(
                f"cache_implementation must be None if a cache is given, got {name!r}"
            )
        if isinstance(cache, NSAModelCache):
            copies = max(given.num_beams, given.num_return_sequences)
            _check_cache(cache, given, batch_size * copies, max_cache_length, prompt)
        if cache is not None or given.use_cache is False:
            return
        validate.one_of("cache_implementation", name, (None, "dynamic", "static"))
        sizes = rows, max_cache_length, max_cache_length + 1 - prompt
        if name is None and goes_on_pages(self, given, generation_mode, *sizes):
            cache = NSAPagedModelCache(self.config, rows, max_cache_length)
        else:
            cache = NSAModelCache(self.config, max_cache_length if name == "static" else None)
            if given.is_assistant:
                cache.activate_past_recording()
        model_kwargs[CACHE] = cache

    def _valid_auto_compile_criteria(self, model_kwargs, generation_config) -> bool:
        """Return whether steps run through `get_compiled_call`. On a paged cache, steps run through
        `get_compiled_call` if a step of the model can be a CUDA graph and `disable_compile` is not
        set.
        """
        if isinstance(model_kwargs.get(CACHE), NSAPagedModelCache):
            return not generation_config.disable_compile and why_not(self) is None
        base: Any = super()
        return base._valid_auto_compile_criteria(model_kwargs, generation_config)

    def get_compiled_call(self, compile_config) -> Callable[..., Any]:
        """Return the callable that runs the model during one call of `generate`. On a paged cache
        the callable runs each step as one CUDA graph. On other caches the callable is the compiled
        model of transformers. Each call of `generate` captures its own graph, since choices in
        Python code, such as the active adapter, may differ between calls.
        """
        model: Any = self
        base: Any = super()
        ready: list[StepGraph] = []

        def call(**inputs: Any) -> Any:
            cache = inputs.get(CACHE)
            if not isinstance(cache, NSAPagedModelCache):
                return base.get_compiled_call(compile_config)(**inputs)
            tokens, hidden = inputs.get("input_ids"), inputs.get("output_hidden_states")
            if hidden is None:
                hidden = model.config.output_hidden_states
            # Outputs that a `StepGraph` does not return. The model itself refuses
            # `output_attentions`.
            more = hidden or inputs.get("output_attentions")
            if tokens is None or tokens.shape[1] != 1 or more:
                return model(**inputs)
            if not ready:
                ready.append(StepGraph(self, cache))
            logits = ready[0](inputs["input_ids"], inputs.get("attention_mask"))
            found: dict[str, Any] = {"logits": logits, CACHE: cache}
            return CausalLMOutputWithPast(**found)

        return call


def goes_on_pages(
    model: Any, given: Any, mode: Any, rows: int, capacity: int, new_tokens: int
) -> bool:
    """Return whether `generate` by default uses a paged cache for `rows` rows of `capacity`
    tokens. The options must allow a paged cache (`wanted`), and each step must be able to run as
    one CUDA graph. Kernels must be able to read the pages, and the pages must use at most half of
    the free memory.

    Args:
      given: The `GenerationConfig`.
      mode: The `GenerationMode`.
      new_tokens: The maximum number of new tokens.
    """
    wanted = (
        mode in ("greedy_search", "sample")
        and new_tokens >= MIN_NEW_TOKENS
        and set(model.config.layer_attention) == {"nsa"}
        # If the caller gets the cache back, the cache may have to grow later.
        and not (given.return_dict_in_generate or given.is_assistant)
        and not (given.disable_compile or given.compile_config is not None)
        and getattr(model, "hf_quantizer", None) is None
    )
    if not wanted or why_not(model) is not None:
        return False
    config, device = model.config, model.device
    alike = {layer.self_attn.implementation: layer.self_attn for layer in model.model.layers}
    if not all(decodes_on_pages(x, model.dtype, device) for x in alike.values()):
        return False
    blocks = rows * -(-capacity // config.select_block)
    free, _ = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return 2 * blocks * bytes_of_block(config, model.dtype) <= free + kept


def _check_cache(
    cache: NSAModelCache, given: Any, rows: int, columns: int, prompt: int
) -> None:
    """Raise ValueError if the caller's cache does not fit the call of `generate`."""
    if given.compile_config is not None and isinstance(cache, NSAPagedModelCache):
        raise ValueError(
            "compile_config must be None if cache is an NSAPagedModelCache, since its steps are "
            "CUDA graphs and are not compiled"
        )
    if cache.batch_size not in (-1, rows):
        raise ValueError(
            f"cache must have batch_size={rows} (one row per sequence), got {cache.batch_size}"
        )
    if 0 <= (limit := cache.get_max_length()) < columns:
        raise ValueError(
            f"cache must have capacity for {columns} tokens (max_length - 1), got {limit}"
        )
    if 0 < prompt <= (seen := cache.get_seq_length()):
        raise ValueError(
            f"input_ids must contain the {seen} tokens in cache and at least one more, got "
            f"{prompt} tokens"
        )
