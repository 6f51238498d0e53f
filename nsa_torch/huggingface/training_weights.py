"""Converts weights between `NSAForCausalLM` and the models that `nsa_bench.train` trains.

The file has the format of `nsa_interop.weights`. The names and hyper-parameters in the file are the
names and hyper-parameters of `nsa_bench.lm.torch_lm.LM` and of its counterpart in JAX. The classes
of this module hold the parameters of a transformers model under these names.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from torch import nn

from nsa_core.layer import FIELDS, KIND, LayerSpec
from nsa_interop import weights
from nsa_torch.huggingface.configuration import SPEC, NSAModelConfig
from nsa_torch.huggingface.model import NSADecoderLayer, NSAForCausalLM

NORM_EPS = 1e-6  # epsilon of models of nsa_bench.train that do not record one
MODEL = ("attention", "layers", "hidden", "vocabulary")


def to_safetensors(path: str | Path, model: NSAForCausalLM) -> None:
    """Write the weights to `path`. If an error occurs, an existing file is unchanged. Tied
    embeddings are written twice, once for the embedding and once for the head.

    Raises:
      ValueError: `nsa_bench.train` does not support the model. `nsa_bench.train` supports neither
        a mix of NSA and dense layers nor dense layers with biases or norms of heads.
    """
    weights.save(path, _TrainingModel(model))


def from_safetensors(path: str | Path, model: NSAForCausalLM | None = None) -> NSAForCausalLM:
    """Load the model that a training run saved as `path`.

    Args:
      model: The model whose weights are replaced. `model=None` means that a model is made from the
        hyper-parameters in the file. A model that this function makes is in evaluation mode, as
        after `from_pretrained`.

    Raises:
      ValueError: The file has no hyper-parameters, or the embeddings of `model` are tied.
        `ValueError` is also raised if the file and the model differ in hyper-parameters, gate, phi,
        vocabulary, names, shapes or dtypes. If the error is raised, `model` is unchanged.
    """
    if model is None:
        model = NSAForCausalLM(_configuration(path)).eval()
    elif model.config.tie_word_embeddings:
        raise ValueError(
            "tie_word_embeddings must be False to load a model with an output head"
        )
    weights.load(path, _TrainingModel(model))
    return model


def _configuration(path: str | Path) -> NSAModelConfig:
    """Return the configuration of the model whose weights are in the file."""
    with weights.opened(path) as file:
        found = json.loads((file.metadata() or {}).get(weights.METADATA_KEY, "{}"))
    if missing := [name for name in MODEL if name not in found]:
        raise ValueError(
            f"{path} must record all hyper-parameters if no model is given, but {missing[0]} is "
            "missing"
        )
    spec = LayerSpec(**{name: x for name, x in found.items() if name in FIELDS})
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rope_base}
    if spec.rope_scale != 1.0:
        rope |= {"rope_type": "linear", "factor": spec.rope_scale}
    if spec.rope_scaling is not None:
        rope |= dataclasses.asdict(spec.rope_scaling)
    eps = found.get("norm_eps", NORM_EPS)
    if spec.qk_norm_eps not in (None, eps):
        raise ValueError(f"{path}: qk_norm_eps must be {eps}, got {spec.qk_norm_eps}")
    made = {ours: getattr(spec, name) for name, ours in SPEC.items()}
    made |= {name: str(made[name]) for name in KIND}
    return NSAModelConfig(
        vocab_size=found["vocabulary"],
        intermediate_size=found["hidden"],
        num_hidden_layers=found["layers"],
        attention=found["attention"],
        rope_parameters=rope,
        qk_norm=spec.qk_norm_eps is not None,
        rms_norm_eps=eps,
        **made,
    )


class _Renamed(nn.Module):
    """Holds parameters and submodules of other modules under new names."""

    def __init__(self, **parts: nn.Module | nn.Parameter):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class _TrainingModel(_Renamed):
    """Holds the parameters of `model` under the names of `nsa_bench.lm.torch_lm.LM`."""

    def __init__(self, model: NSAForCausalLM):
        config = model.config
        kinds = set(config.layer_attention)
        if len(kinds) > 1:
            raise ValueError(f"attention must be the same in all layers, got {sorted(kinds)}")
        if kinds == {"dense"} and (config.attention_bias or config.qk_norm):
            raise ValueError(
                "attention_bias and qk_norm must be False if all layers are dense, got "
                f"{config.attention_bias} and {config.qk_norm}"
            )
        decoder, head = model.model, model.lm_head
        if config.tie_word_embeddings:  # a copy, since a file must not contain a tensor twice
            head = _Renamed(weight=nn.Parameter(head.weight.detach().clone()))
        super().__init__(
            embedding=decoder.embed_tokens.weight,
            blocks=nn.ModuleList(map(_block, decoder.layers)),
            norm=_Renamed(scale=decoder.norm.weight),
            head=head,
        )
        self.config, self.kind = config, kinds.pop()

    def hyper_parameters(self) -> dict[str, Any]:
        config, eps = self.config, self.config.rms_norm_eps
        sizes = config.num_hidden_layers, config.intermediate_size, config.vocab_size
        stated = dict(zip(MODEL, (self.kind, *sizes), strict=True))
        stated |= {} if eps == NORM_EPS else {"norm_eps": eps}
        return config.layer_spec.as_dict() | stated


def _block(layer: NSADecoderLayer) -> nn.Module:
    mlp = layer.mlp
    return _Renamed(
        norm_attention=_Renamed(scale=layer.input_layernorm.weight),
        attention=layer.self_attn,
        norm_mlp=_Renamed(scale=layer.post_attention_layernorm.weight),
        mlp=_Renamed(gate=mlp.gate_proj, up=mlp.up_proj, down=mlp.down_proj),
    )
