"""What `generate` asks of a model: its cache, and how a step runs."""

import functools
from collections.abc import Callable
from typing import Any

from nsa_torch.huggingface.cache import NSAModelCache
from nsa_torch.huggingface.compatibility import (
    CACHE,
    CausalLMOutputWithPast,
    GenerationMixin,
    cache_argument,
    cache_named,
    paged_attention_cache,
)
from nsa_torch.huggingface.paged_cache import NSAPagedModelCache
from nsa_torch.huggingface.step_graph import StepGraph, why_not


class NSAGenerationMixin(GenerationMixin):
    """`generate` with the caches of a model with NSA."""

    config: Any

    @functools.wraps(GenerationMixin.generate)
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate`, whose `cache` is also `past_key_values`, in every version."""
        base: Any = super()
        return base.generate(*args, **cache_named(CACHE, kwargs))

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' manager of `generate_batch`; `NotImplementedError` as of
        `compatibility.paged_attention_cache`, before it starts.
        """
        paged_attention_cache()
        base: Any = super()
        return base.init_continuous_batching(*args, **kwargs)

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ):
        """`cache_implementation`: None or "dynamic" grows; "static" has room for `max_length`.

        A paged cache is one that the caller gives: "paged" means `generate_batch` there.
        """
        name, given = generation_config.cache_implementation, model_kwargs.get(CACHE)
        if given is not None and name is not None:
            raise ValueError(
                f"cache_implementation must be None where a cache is given, got {name!r}"
            )
        if isinstance(given, NSAPagedModelCache):
            copies = max(generation_config.num_beams, generation_config.num_return_sequences)
            _check_room(given, generation_config, batch_size * copies, max_cache_length)
        if given is not None or generation_config.use_cache is False:
            return
        if name not in (None, "dynamic", "static"):
            raise ValueError(
                f"cache_implementation must be None, 'dynamic' or 'static', got {name!r}"
            )
        cache = NSAModelCache(self.config, max_cache_length if name == "static" else None)
        if generation_config.is_assistant:
            cache.activate_past_recording()
        model_kwargs[CACHE] = cache

    def _valid_auto_compile_criteria(self, model_kwargs, generation_config) -> bool:
        """Whether steps run by `get_compiled_call`: on a paged cache, where a GPU has the model
        and `disable_compile` is not set.
        """
        if isinstance(model_kwargs.get(CACHE), NSAPagedModelCache):
            return not generation_config.disable_compile and why_not(self) is None
        base: Any = super()
        return base._valid_auto_compile_criteria(model_kwargs, generation_config)

    def get_compiled_call(self, compile_config) -> Callable[..., Any]:
        """What runs the model: on a paged cache, steps as one CUDA graph, which the cache keeps;
        else transformers' `torch.compile`.
        """
        model: Any = self
        base: Any = super()
        ready: list[StepGraph] = []

        def call(**inputs: Any) -> Any:
            cache = inputs.get(CACHE)
            if not isinstance(cache, NSAPagedModelCache):
                return base.get_compiled_call(compile_config)(**inputs)
            if not _is_step(inputs, model.config):
                return model(**inputs)
            if not ready:
                if cache.graph is None or not cache.graph.serves(self):
                    cache.graph = StepGraph(self, cache)
                ready.append(cache.graph)
            logits: Any = ready[0](inputs["input_ids"], inputs.get("attention_mask"))
            return CausalLMOutputWithPast(logits=logits, **cache_argument(cache))

        return call


def _is_step(inputs: dict[str, Any], config: Any) -> bool:
    """Whether a `StepGraph` gives all that is asked for."""
    tokens, hidden = inputs.get("input_ids"), inputs.get("output_hidden_states")
    if tokens is None or tokens.shape[1] != 1 or inputs.get("inputs_embeds") is not None:
        return False
    attentions = inputs.get("output_attentions")  # refused by the model
    return not attentions and not (config.output_hidden_states if hidden is None else hidden)


def _check_room(cache: NSAPagedModelCache, generation_config, rows: int, columns: int) -> None:
    """Raises ValueError where `generate` would outgrow the cache."""
    if generation_config.compile_config is not None:
        raise ValueError(
            "compile_config must be None where cache is an NSAPagedModelCache, whose "
            "steps are a CUDA graph and not compiled"
        )
    if cache.batch_size != rows:
        raise ValueError(
            f"cache must have batch_size={rows}, a row for each sequence, "
            f"got {cache.batch_size}"
        )
    if columns > cache.rows.capacity:
        raise ValueError(
            f"cache must have capacity for {columns} tokens, all of max_length but the "
            f"last, got {cache.rows.capacity}"
        )
