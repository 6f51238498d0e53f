"""`NSAForCausalLM` for vLLM, built from the modules of `nsa_torch.huggingface`. The operator
`nsa_attend` computes the attention of the model's layers.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from nsa_torch.huggingface.configuration import NSAModelConfig
from nsa_torch.huggingface.model import NSAModel
from nsa_torch.module import NSAAttention
from nsa_torch.paged import PagedCache
from nsa_torch.vllm.backend import CONVOLVE, OP, NSABackend, cache_spec
from nsa_torch.vllm.step import gathered_elements, pages_in

HEAD = "lm_head.weight"
GUESSES = "ngram", "ngram_gpu", "suffix"  # methods of speculative decoding that add no layers


class Pages(nn.Module, AttentionLayerBase):
    """Represents a layer with NSA to vLLM. The object has the cache of the layer and names its
    backend.

    Attributes:
      pages, newest_keys: the results of `pages_in`; None until vLLM has bound its memory.
      gathered: The maximum number of elements that a step copies from pages to other memory.
    """

    def __init__(self, attention: NSAAttention, vllm_config: VllmConfig, prefix: str):
        super().__init__()
        self.name = prefix
        self.pages: PagedCache | None = None
        self.newest_keys: Tensor | None = None
        self.gathered = gathered_elements(
            attention.spec, vllm_config.model_config.max_model_len
        )
        # not registered as a submodule, since its weights belong to the model
        self.attention = (attention,)
        vllm_config.compilation_config.static_forward_context[prefix] = self

    def get_attn_backend(self) -> type[NSABackend]:
        return NSABackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        return cache_spec(self.attention[0].spec, vllm_config.model_config.dtype)

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Use the memory `[B, Hkv, N, C]` as the cache of the layer. The memory is not stored in an
        attribute `kv_cache`, since vLLM would set blocks of such an attribute to zero.
        """
        self.pages, self.newest_keys = pages_in(kv_cache, self.attention[0].spec)


@support_torch_compile
class Decoder(nn.Module):
    """The decoder layers, which torch.compile traces."""

    def __init__(
        self, *, vllm_config: VllmConfig, prefix: str = "", model: NSAModel, pages: Any
    ):
        super().__init__()
        self.model, self.names = (model,), [x.name for x in pages]

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        (model,) = self.model
        x = model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        layers: Any = model.layers
        for layer, name in zip(layers, self.names, strict=True):
            x = x + attend(layer.self_attn, name, layer.input_layernorm(x), positions)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return model.norm(x)


def attend(attention: NSAAttention, name: str, x: Tensor, positions: Tensor) -> Tensor:
    """Run the layer `attention` on `x` [N, dim], with the keys and values in vLLM's blocks."""

    def convolve(key: Tensor) -> Tensor:
        made = torch.empty_like(key[0])
        getattr(torch.ops.vllm, CONVOLVE)(key[0], made, name)
        return made[None]

    query, key, value, gates = attention.project(x[None], positions[None], convolve)
    count = 3 if attention.spec.separate else 1
    key, value = (torch.cat(each[:count]) for each in (key, value))  # [count, N, Hkv, .]
    out = query.new_empty(*query.shape[1:3], attention.spec.d_v)
    getattr(torch.ops.vllm, OP)(query[0], key, value, gates[0], out, name)
    return attention.out(out.flatten(1))


class NSAForCausalLM(nn.Module):
    """The model with the interface of vLLM. Weights have the same names as in
    `nsa_torch.huggingface`.

    Raises:
      NotImplementedError: A setting is not supported: several devices, layers with dense
        attention, a cache of another dtype, blocks that are moved to other memory, quantized
        weights, draft tokens from another model, or any draft tokens with `key_taps`.
      ValueError: Blocks do not have `select_block` tokens.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config: NSAModelConfig = vllm_config.model_config.hf_config
        check(vllm_config, config)
        NSABackend.select_block = config.select_block
        self.config = config
        self.model = NSAModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.logits_processor = LogitsProcessor(config.vocab_size)
        layers: Any = self.model.layers
        self.pages = [
            Pages(layer.self_attn, vllm_config, f"model.layers.{i}.self_attn")
            for i, layer in enumerate(layers)
        ]
        self.decoder = Decoder(vllm_config=vllm_config, model=self.model, pages=self.pages)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        return self.decoder(input_ids, positions, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.lm_head(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy all weights into the model.

        Raises:
          ValueError: A weight is missing, unknown or has another shape, or the output head
            should be tied but differs from the embedding.
        """
        own, loaded, head = dict(self.named_parameters()), set(), None
        for name, weight in weights:
            if name == HEAD and self.config.tie_word_embeddings:
                head = weight
                continue
            if name not in own:
                raise ValueError(f"weight {name} must belong to the model, got an unknown name")
            if own[name].shape != weight.shape:
                wanted = tuple(own[name].shape)
                raise ValueError(
                    f"weight {name} must have shape {wanted}, got {tuple(weight.shape)}"
                )
            with torch.no_grad():
                own[name].copy_(weight)
            loaded.add(name)
        if missing := sorted(own.keys() - loaded):
            raise ValueError(f"weights are missing: {missing[0]} and {len(missing) - 1} more")
        if not self.config.tie_word_embeddings:
            return loaded
        if head is not None and not torch.equal(
            head.to(self.lm_head.weight), self.lm_head.weight
        ):
            raise ValueError(
                f"{HEAD} must be equal to the embedding if tie_word_embeddings is set"
            )
        return loaded | {HEAD}


def check(vllm_config: VllmConfig, config: NSAModelConfig) -> None:
    """Refuse settings that the plugin does not support, before anything is loaded."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    split = "key/value heads of NSA cannot be split over devices"
    stages = "the plugin runs all layers on one device"
    guesses = getattr(vllm_config.speculative_config, "method", None)
    for name, found, known, reason in (
        ("tensor_parallel_size", parallel.tensor_parallel_size, (1,), split),
        ("pipeline_parallel_size", parallel.pipeline_parallel_size, (1,), stages),
        (
            "kv_transfer_config and kv_offloading_size",
            vllm_config.kv_transfer_config,
            (None,),
            "vLLM would move the bytes of a block, and these bytes are not contiguous",
        ),
        (
            "quantization",
            vllm_config.quant_config,
            (None,),
            "vLLM cannot quantize the layers, since they are modules of nsa_torch",
        ),
        (
            "speculative_config",
            guesses,
            (None, *GUESSES),
            "the layers of two models would share blocks and names",
        ),
        (
            "attention",
            min(config.layer_attention),
            ("nsa",),
            "nsa_torch.vllm supports only models with NSA in every layer",
        ),
        (
            "speculative_config",
            config.key_taps and guesses,
            (None,),
            "draft tokens cannot be removed from the cache of a layer with key_taps",
        ),
        ("kv_cache_dtype", cache.cache_dtype, ("auto",), "the pages have no scales for fp8"),
    ):
        if found not in known:
            known = " or ".join(map(repr, known))
            raise NotImplementedError(f"{name} must be {known}, got {found!r}; {reason}")
    if cache.user_specified_block_size and cache.block_size != config.select_block:
        raise ValueError(
            f"block_size must be select_block={config.select_block}, got {cache.block_size}; "
            f"pass --block-size {config.select_block}"
        )
