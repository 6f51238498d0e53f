"""`NSAModel` and `NSAForCausalLM`, which are decoders with the interface of transformers."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.initialization import copy_
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    eager_attention_forward,
)
from transformers.utils import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from nsa_core.layer import EXTRA_STATE, KIND, SILENT
from nsa_torch import geometry, heads
from nsa_torch.functional import Names
from nsa_torch.geometry import without_padding
from nsa_torch.heads import Gate, HeadGate
from nsa_torch.huggingface.cache import CACHE, NSAModelCache, takes_past_key_values
from nsa_torch.huggingface.configuration import NSAModelConfig
from nsa_torch.huggingface.continuous import ContinuousBatch, DenseBatch
from nsa_torch.huggingface.generation import NSAGenerationMixin
from nsa_torch.huggingface.rows import LOSS, READ, Rows, check_keywords, rows
from nsa_torch.key_convolution import KeyConvolution
from nsa_torch.module import MLP, NSAAttention, Pool


class SelfAttention(NSAAttention):
    """The attention of a decoder layer with NSA. The decoder calls this module with every kind of
    cache, so that the hooks of the module run.
    """

    zeroes_padding = False  # the model has already set the padding to zero

    def forward(
        self,
        x: Tensor,
        kv: Any = None,
        *,
        attend: Callable[[NSAAttention, Tensor], Tensor] | None = None,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        """Run the layer as `NSAAttention` does. If a cache passes a function `attend`, that
        function computes the result instead.
        """
        if attend is None:
            return super().forward(x, kv, **options)
        return attend(self, x), None


class DenseAttention(nn.Module):
    """Computes causal attention to all keys through transformers' attention interface."""

    is_causal = True

    def __init__(self, config: NSAModelConfig, index: int):
        super().__init__()
        self.config, self.spec, self.layer_idx = config, config.layer_spec, index
        spec = self.spec
        self.num_key_value_groups = spec.n_heads // spec.n_kv_groups
        linear = functools.partial(nn.Linear, bias=spec.bias)
        self.W_Q = linear(spec.dim, spec.n_heads * spec.d_k)
        self.W_K = linear(spec.dim, spec.n_kv_groups * spec.d_k)
        self.W_V = linear(spec.dim, spec.n_kv_groups * spec.d_v)
        self.out = linear(spec.n_heads * spec.d_v, spec.dim)
        if spec.qk_norm_eps is not None:
            self.q_norm, self.k_norm = (
                nn.RMSNorm(spec.d_k, eps=spec.qk_norm_eps) for _ in range(2)
            )

    def forward(
        self,
        x: Tensor,
        position: Tensor,
        mask: Tensor | None,
        append: Any = None,
        attend: Any = None,
        **paged: Any,
    ) -> Tensor:
        """Compute attention of `x` [B, T, dim] at `position` [B, T].

        Args:
          append: A function that appends keys and values `[B, Hkv, T, .]` to a cache and returns
            the keys and values of all tokens. The function also receives the keyword arguments
            `paged`. `append=None` means that there is no cache.
          attend: The attention function to use instead of the one in the configuration.
          paged: The keyword arguments that transformers passes to attention functions.
        """
        spec = self.spec
        query, (key,), (value,), *_ = heads.project(
            x, self.W_Q, [self.W_K], [self.W_V], position, spec, norms=heads.norms_of(self)
        )
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        if append is not None:
            key, value = append(key, value, paged)
        name = self.config._attn_implementation or "sdpa"
        attend = attend or ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
        out, _ = attend(
            self, query, key, value, mask, scaling=spec.d_k**-0.5, dropout=0.0, **paged
        )
        return self.out(out.flatten(2))


class NSADecoderLayer(GradientCheckpointingLayer):
    """A decoder layer, which computes `y = x + attention(norm(x))` and returns `y +
    mlp(norm(y))`."""

    def __init__(self, config: NSAModelConfig, index: int):
        super().__init__()
        self.index = index
        if config.layer_attention[index] == "nsa":
            spec = config.layer_spec
            self.self_attn = SelfAttention(**spec.as_dict(), **spec.start())
        else:
            self.self_attn = DenseAttention(config, index)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(
            config.hidden_size, eps=config.rms_norm_eps
        )

    def forward(self, x: Tensor, batch: Rows | ContinuousBatch | DenseBatch) -> Tensor:
        """Run the layer on `x` [B, T, dim]."""
        x = x + batch.attend(self.self_attn, self.index, self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class NSAPreTrainedModel(PreTrainedModel):
    """The base class of `NSAModel` and `NSAForCausalLM`. This class initializes weights, and
    loads and saves checkpoints."""

    config: NSAModelConfig
    config_class = NSAModelConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["NSADecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["cache", "past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _can_record_outputs = {"hidden_states": NSADecoderLayer}  # noqa: RUF012

    def __init__(self, config: NSAModelConfig):
        if not isinstance(config, NSAModelConfig):
            raise ValueError(f"config must be an NSAModelConfig, got {type(config).__name__}")
        config.check()
        super().__init__(config)
        self.register_state_dict_post_hook(_without_kinds)

    def set_nsa_implementation(self, name: Names) -> None:
        """Set the `implementation` of `nsa_torch.attention` for every layer with NSA."""
        for module in self.modules():
            if isinstance(module, NSAAttention):
                module.implementation = name

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path,
        *args: Any,
        strict: bool = True,
        output_loading_info: bool = False,
        ignore_mismatched_sizes: bool = False,
        **kwargs: Any,
    ):
        """Run `from_pretrained` of transformers for a complete checkpoint in safetensors. Other
        formats are refused, since they are pickles, and loading a pickle can run arbitrary code.

        Args:
          strict: If False, missing weights are initialized and unknown weights are ignored, and
            transformers prints a warning.

        Raises:
          OSError: The checkpoint has no weights in safetensors.
          ValueError: gate, phi or kv differ from the values in the checkpoint, or `use_safetensors`
            is False. `ValueError` is also raised if a weight has another shape, unless
            `ignore_mismatched_sizes` is true. With `strict`, a missing or unknown weight also
            raises `ValueError`. The error message names the first weight that does not fit.
        """
        path, stated = pretrained_model_name_or_path, {}
        if kwargs.pop("use_safetensors", None) is False:
            raise ValueError(
                "use_safetensors must be True or not given, got False; weights in pickles are not "
                "supported"
            )
        if path is not None:
            stated, _ = NSAModelConfig.get_config_dict(path, **kwargs)
            # raises an error if the configuration belongs to another model
            NSAModelConfig.from_dict(stated)
        always = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        load: Any = super().from_pretrained
        model, info = load(path, *args, use_safetensors=True, **always, **kwargs)
        for name in KIND if stated else ():
            ours = getattr(model.config, name)
            theirs = stated.get(name, SILENT.get(name, "no such name"))
            if ours != theirs:
                raise ValueError(
                    f"{name} must be {theirs!r} as in the checkpoint {path}, got {ours!r}"
                )
        other = () if ignore_mismatched_sizes else info["mismatched_keys"]
        wrong = [f"{x} of shape {(*got,)} instead of {(*want,)}" for x, got, want in other]
        for what in ("missing", "unexpected") if strict else ():
            wrong += [f"{what} {key}" for key in sorted(info[f"{what}_keys"])]
        if wrong:
            rest = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise ValueError(
                f"{path} must have the weights of {cls.__name__}, got {wrong[0]}{rest}; "
                "strict=False initializes missing weights and ignores unknown ones"
            )
        return (model, info) if output_loading_info else model

    def _initialize_weights(self, module: nn.Module, *_: Any) -> None:
        """Initialize the weights of `module`, and also of modules that have no weights of their
        own. transformers would skip these modules, since their code is not part of transformers.
        """
        super()._initialize_weights(module)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize the weights of `module`, but not the weights of its children. transformers
        calls this function for the children first.
        """
        given, residual = self.config.initializer_range, 2 * self.config.num_hidden_layers
        draw = lambda x, default: nn.init.normal_(x, std=default if given is None else given)
        if isinstance(module, HeadGate):
            module.draw_weight()
            copy_(module.bias, module.start_bias())  # do not overwrite a loaded weight
        elif isinstance(module, Gate | MLP | Pool | KeyConvolution):
            module.reset_parameters()
        elif isinstance(module, nn.Linear):
            draw(module.weight, (3 * module.in_features) ** -0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            draw(module.weight, 0.02)
        elif isinstance(module, NSAAttention | DenseAttention | LlamaMLP) and given is None:
            last = module.down_proj if isinstance(module, LlamaMLP) else module.out
            draw(last.weight, (3 * residual * last.in_features) ** -0.5)
        else:
            super()._init_weights(module)


class NSAModel(NSAPreTrainedModel):
    """The decoder without an output head. The output of the model is `last_hidden_state` [B, T,
    hidden_size].
    """

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # noqa: RUF012

    def __init__(self, config: NSAModelConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(NSADecoderLayer(config, index) for index in layers)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @takes_past_key_values
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        max_length_q: int | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Compute the hidden states of `input_ids` [B, T], or of `inputs_embeds`
        [B, T, hidden_size].

        Args:
          attention_mask: As in `rows.rows`. A row may be padded on the left or on the right.
          position_ids: Positions that agree with the mask. Without a mask, a single row whose
            positions restart is a packed row.
          cache: An `NSAModelCache`, to which the tokens are appended. You may also pass the cache
            as `past_key_values`, the name of this argument before transformers 5.24.
          use_cache: Whether to make a cache if none is given, except for a packed row.
            `use_cache=None` means the value of the configuration, or False during training.
          cu_seq_lens_q: int `[sequences + 1]`, the boundaries of a packed row, as from
            transformers' `DataCollatorWithFlattening`. Tables are derived from the boundaries once
            for all layers. You may also pass the boundaries as `cu_seqlens` or `cu_seq_lens_k`.
            `seq_idx` [1, T], the sequence of each token, may replace the boundaries.
          max_length_q: The number of tokens of the longest sequence of a packed row. If
            `max_length_q` is given, the last sequence must end with the row.

        Raises:
          TypeError: A keyword is unknown.
          NotImplementedError: A keyword has a value that no NSA model supports, such as
            `output_attentions=True`.
          ValueError: The mask, positions or boundaries are invalid (`rows.rows`), a cache is
            used during training with gradient checkpointing, or the last call on the cache
            failed.
        """
        x = inputs_embeds
        if input_ids is not None and x is None:
            x = self.embed_tokens(input_ids)
        elif x is None or input_ids is not None:
            raise ValueError("input_ids or inputs_embeds must be given, got both or neither")
        call = {"cu_seq_lens_q": cu_seq_lens_q, **kwargs}
        if "read_index" in call:
            return self._continuous(x, attention_mask, position_ids, cache=cache, **call)
        if not x.shape[0] * x.shape[1]:
            raise ValueError(
                f"input_ids must have at least one row and one column, got {tuple(x.shape[:2])}"
            )
        check_keywords(call)
        if cache is not None and not isinstance(cache, NSAModelCache):
            raise ValueError(f"cache must be an NSAModelCache, got {type(cache).__name__}")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if self.gradient_checkpointing and self.training:
            if cache is not None:
                raise ValueError(
                    "cache must be None during training with gradient checkpointing, got a cache; "
                    "call model.eval() to use the cache"
                )
            use_cache = False
        given = attention_mask, position_ids, call | {"max_length_q": max_length_q}, cache
        batch = rows(x.shape[0], x.shape[1], *given, self.config.layer_spec.config)
        if cache is None and use_cache and batch.cu_seqlens is None:
            cache = NSAModelCache(self.config)
        if cache is not None:
            cache.check_model(self.config)
            batch = batch._replace(cache=cache, call=cache.begin(x, batch.count))
        if (real := batch.real(x.shape[1])) is not None:
            if batch.empty is not None and not torch.is_grad_enabled():
                # a row that had only padding so far continues after that padding
                real = real | batch.empty[:, None]
            x = without_padding(x, real)
        batch = self._with_mask(x, batch)
        for layer in self.layers:
            x = layer(x, batch)
        if cache is not None and batch.call is not None:
            cache.end(batch.call)
        past: dict[str, Any] = {CACHE: cache}
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), **past)

    def _continuous(self, x, mask, position, **paged):
        """Run a step of continuous batching of transformers on `x` [1, N, hidden_size]."""
        if "nsa" in self.config.layer_attention:
            batch = ContinuousBatch(self.config, x, position, **paged)
        else:
            batch = DenseBatch(x, position, mask, **paged)
        x = batch.x
        if not x.shape[1]:
            # In a step without tokens, the manager reads column 0 and ignores the value.
            x = x.new_zeros(1, 1, x.shape[2])
        else:
            for layer in self.layers:
                x = layer(x, batch)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x))

    def _with_mask(self, x: Tensor, batch: Rows) -> Rows:
        """Add the positions and the mask to `batch` if the model has dense layers, since only dense
        layers read positions and masks.
        """
        if "dense" not in self.config.layer_attention:
            return batch
        length, call = x.shape[1], batch.call
        slot = torch.arange(length, device=x.device).expand(x.shape[0], length)
        position, reach = slot, length
        # attention functions of transformers need no mask if `causal` is true
        causal = batch.cu_seqlens is None
        if not causal:
            sizes = {"config": self.config.layer_spec.config, "kv_len": length}
            position = geometry.geometry(
                1, length, cu_seqlens=batch.cu_seqlens, device=x.device, **sizes
            ).position
        elif call is not None:
            position = slot = call.position
            reach, aligned = call.reach, call.columns == 0 or length == 1
            causal = aligned and not batch.cache.ragged and reach == call.columns + length
        mask, eager = None, self.config._attn_implementation == "eager"
        if eager or not causal:
            key = torch.arange(reach, device=x.device)
            first = slot - position.clamp(min=0)  # first key of the query's sequence
            mask = ((first[..., None] <= key) & (key <= slot[..., None]))[:, None]
            if eager:
                mask = x.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(x.dtype).min)
        return batch._replace(position=position, mask=mask)


class NSAForCausalLM(NSAGenerationMixin, NSAPreTrainedModel):
    """The decoder with an output head. The model computes logits `[B, T, vocab_size]`, and a loss
    if labels are given.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: NSAModelConfig):
        super().__init__(config)
        self.model = NSAModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @takes_past_key_values
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute logits, and the loss if labels are given. `NSAModel.forward` and the loss
        function document the arguments that are not listed below.

        Args:
          labels: `[B, T]`, the tokens to predict. The logits of a column predict the label of
            the next column. Labels of -100 are ignored. If `logits_to_keep` is given, pass the
            labels of the kept columns.
          use_cache: whether to make a cache; `use_cache=None` means False if labels are given,
            otherwise as in `NSAModel.forward`.
          logits_to_keep: The number of last columns for which logits are computed, or the indices
            of such columns. With 0, logits are computed for all columns.
        """
        of_loss = {*LOSS}
        if labels is not None and kwargs.keys() - READ - of_loss:
            of_loss |= inspect.signature(self.loss_function).parameters.keys() - READ
        if use_cache is None and labels is not None:
            use_cache = False
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **{name: x for name, x in kwargs.items() if name not in of_loss},
        )
        kept = logits_to_keep
        kept = slice(-kept, None) if isinstance(kept, int) else kept
        logits = self.lm_head(outputs.last_hidden_state[:, kept, :])
        loss = None
        if labels is not None:
            if labels.shape[:2] != logits.shape[:2]:
                raise ValueError(
                    f"labels must have shape {tuple(logits.shape[:2])}, as the logits with "
                    f"{logits_to_keep=}, got {tuple(labels.shape)}"
                )
            size = self.config.vocab_size
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE: outputs.get(CACHE)},
        )


def _without_kinds(module, state_dict, prefix, local_metadata) -> None:
    """Remove from a state_dict the entries that record gate and phi, since config.json has the same
    information. FSDP can shard only entries that are tensors of numbers.
    """
    for key in [key for key in state_dict if key.endswith(f".{EXTRA_STATE}")]:
        del state_dict[key]
