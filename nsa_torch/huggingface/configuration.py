"""`NSAModelConfig`, the configuration of a model for transformers."""

import dataclasses
import difflib
import re
from pathlib import Path
from typing import Any, ClassVar, Self

from transformers import PreTrainedConfig

from nsa_core import rotation, validate
from nsa_core.config import NSAConfig
from nsa_core.layer import FIELD_OF, KIND, SILENT, LayerSpec
from nsa_core.rotation import SCALINGS

ATTENTION = ("nsa", "dense")
ROPE_TYPES = ("default", "linear", *SCALINGS)
# Options of other models that this model does not have, and the only value that this model
# accepts for each. The value None means that the option must be unset.
FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_activation": "silu",
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "layer_types": None,
    "partial_rotary_factor": 1.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "num_experts": None,
    "num_local_experts": None,
    "output_attentions": False,
}
INSTEAD = {"sliding_window": "window", "layer_types": "attention"}
NO_SCALING = ("rope_theta", "partial_rotary_factor")  # of rope_parameters
# The names of a layer's hyper-parameters in a model's configuration.
WIDTHS = {
    "dim": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_kv_groups": "num_key_value_heads",
    "d_k": "head_dim",
    "d_v": "v_head_dim",
}
SPEC = WIDTHS | FIELD_OF | {"bias": "attention_bias"} | {name: name for name in KIND}
SPEC |= {x: x for x in ("phi_hidden", "gate_hidden", "gate_temp", "gate_bias", "key_taps")}
# Keys that are refused, since they are names of the layer or of vLLM for the same option.
OTHER_NAMES = SPEC | {"num_kv_heads": "num_key_value_heads"}
REMOTE = "modeling_nsa"  # the name of the module next to config.json
REMOTE_CODE = """\
# For transformers' `trust_remote_code=True`; the model's code is in the installed package.
try:
    from nsa_torch.huggingface import {names}
except ModuleNotFoundError as error:
    if error.name != "nsa_torch":
        raise
    text = "nsa_torch must be installed: pip install 'native-sparse-attention[hf]'"
    raise ImportError(text) from error
"""


class SavedConfig(PreTrainedConfig):
    """A configuration for which `save_pretrained` also writes a Python module. Programs that do
    not import `nsa_torch.huggingface` find the classes through that module.

    Attributes:
      classes: A mapping from names of transformers' Auto classes to classes of this package.
    """

    classes: ClassVar[dict[str, str]]

    def to_json_file(self, json_file_path: Any, *args: Any, **kwargs: Any) -> None:
        """Run `to_json_file` of transformers, and write the module. `save_pretrained` lists the
        existing files, calls this method, and then uploads new files. Therefore `save_pretrained`
        also uploads the module that this method writes.
        """
        self.auto_map = {auto: f"{REMOTE}.{name}" for auto, name in self.classes.items()}
        super().to_json_file(json_file_path, *args, **kwargs)
        text = REMOTE_CODE.format(names=", ".join(self.classes.values()))
        Path(json_file_path).with_name(f"{REMOTE}.py").write_text(text)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Do nothing. If this method registered the class, transformers would write the source of
        this file next to config.json.
        """


class NSAModelConfig(SavedConfig):
    """The configuration of a decoder with Native Sparse Attention.

    Attributes:
      vocab_size: size of the vocabulary.
      hidden_size, intermediate_size: width of the model and of the SwiGLU.
      num_hidden_layers: number of layers.
      num_attention_heads, num_key_value_heads: Numbers of query heads and of key/value heads.
        None for `num_key_value_heads` means the number of query heads.
      head_dim, v_head_dim: width of query and key heads (even), and of value heads.
        `head_dim=None` means `hidden_size // num_attention_heads`, and `v_head_dim=None` means the
        width of key heads.
      max_position_embeddings: The maximum number of tokens for which the model is intended. No
        computation depends on `max_position_embeddings`.
      initializer_range: initial standard deviation of all matrices except the matrices of gates,
        `phi` and `key_taps`. `initializer_range=None` means 0.02 for the embedding and
        `1 / sqrt(3 * inputs)` for other matrices. The initial standard deviation of matrices that
        write to the residual stream is smaller by the factor `sqrt(2 * layers)`.
      rms_norm_eps: epsilon of the norms.
      rope_parameters: A dictionary with `rope_theta` and `rope_type`. The type is "default",
        "linear", "llama3" or "yarn". For "linear", positions are divided by `factor`. For "llama3"
        and "yarn", `nsa_core.rotation` lists the further entries. Adjacent columns of a head are
        rotated as pairs.
      attention_bias: whether the projections of attention, including its output, have biases.
      qk_norm: Whether query and key heads are normalized before the rotation, with
        `rms_norm_eps`.
      attention: "nsa" or "dense", or a list with one of these per layer.
      compress_block ... window: The sizes of NSA, as in `NSAConfig`.
      phi, phi_hidden, kv, gate, gate_hidden, gate_temp, gate_bias, key_taps: as in
        `nsa_core.layer.LayerSpec`, for layers with NSA. By default, a model has gates per query
        head, and branches share keys and values. A config.json without `kv` means separate keys
        and values.
      tie_word_embeddings: Whether the output head uses the weight of the embedding.
      use_cache: whether a call outside training makes a cache by default.

    Raises:
      ValueError: A value is invalid, a key looks like a misspelling of one of these attributes,
        or an option in `FIXED` has a value that this model does not support.
    """

    model_type = "nsa"
    hidden_act, mlp_bias = "silu", False  # read by LlamaMLP
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012
    classes = {  # noqa: RUF012
        "AutoConfig": "NSAModelConfig",
        "AutoModel": "NSAModel",
        "AutoModelForCausalLM": "NSAForCausalLM",
    }

    vocab_size: int = 32000
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: Any = 2  # an int; None until __post_init__
    head_dim: Any = None
    v_head_dim: Any = None
    max_position_embeddings: int = 65536
    initializer_range: float | None = None
    rms_norm_eps: float = 1e-6
    rope_parameters: Any = None
    attention_bias: bool = False
    qk_norm: bool = False
    attention: str | list[str] = "nsa"
    compress_block: int = NSAConfig.compress_block
    compress_stride: int = NSAConfig.compress_stride
    select_block: int = NSAConfig.select_block
    num_selected: int = NSAConfig.num_selected
    num_initial: int = NSAConfig.num_initial
    num_local: int = NSAConfig.num_local
    window: int = NSAConfig.window
    phi: str = "avg"
    phi_hidden: int | None = None
    kv: str = "shared"
    gate: str = "head"
    gate_hidden: int | None = None
    gate_temp: float = 1.0
    gate_bias: list[float] | None = None
    key_taps: int | None = None
    tie_word_embeddings: bool = False
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        names = [field.name for field in dataclasses.fields(self)]
        for key in kwargs:
            if key in OTHER_NAMES:
                near = [OTHER_NAMES[key]]
            else:
                near = difflib.get_close_matches(key, names, n=1, cutoff=0.85)
            if near and not key.startswith("_"):
                raise ValueError(
                    f"{key!r} must be a key of the configuration; did you mean {near[0]!r}?"
                )
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None and self.num_attention_heads:
            self.head_dim, rest = divmod(self.hidden_size, self.num_attention_heads)
            if rest:
                raise ValueError(
                    "hidden_size must be a multiple of "
                    f"num_attention_heads={self.num_attention_heads} if head_dim is None, got "
                    f"{self.hidden_size}"
                )
        if self.v_head_dim is None:
            self.v_head_dim = self.head_dim
        super().__post_init__(**kwargs)
        self.check()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Self:
        """Make a configuration from its JSON dictionary. Raise a ValueError if the dictionary
        belongs to another type of model.
        """
        found = config_dict.get("model_type", cls.model_type)
        if found != cls.model_type:
            raise ValueError(f"model_type must be {cls.model_type!r}, got {found!r}")
        return super().from_dict(SILENT | config_dict, **kwargs)

    def check(self) -> None:
        """Raise `ValueError` if a value of this configuration is invalid. The error message names
        the attribute and the value.
        """
        sizes = "vocab_size", "intermediate_size", "num_hidden_layers"
        validate.sizes(**{name: getattr(self, name) for name in sizes})
        validate.positive("rms_norm_eps", self.rms_norm_eps)
        _ = self.layer_attention, self.layer_spec
        rope = self.rope_parameters
        for name, fixed in FIXED.items():
            for found in (getattr(self, name, None), rope.get(name)):
                if found is not None and found != fixed:
                    instead = f"; set {INSTEAD[name]!r} instead" if name in INSTEAD else ""
                    raise ValueError(
                        f"{name} must be {fixed!r} in an nsa model, got {found!r}{instead}"
                    )
        validate.one_of("rope_parameters['rope_type']", rope["rope_type"], ROPE_TYPES)

    @property
    def layer_attention(self) -> tuple[str, ...]:
        """The kind of attention of each layer, "nsa" or "dense"."""
        count, found = self.num_hidden_layers, self.attention
        kinds = (found,) * count if isinstance(found, str) else tuple(found)
        if len(kinds) != count:
            raise ValueError(
                f"attention must be one string or num_hidden_layers={count} of them, "
                f"got {len(kinds)}"
            )
        for kind in kinds:
            validate.one_of("attention", kind, ATTENTION)
        return kinds

    @property
    def layer_spec(self) -> LayerSpec:
        """The arguments of `nsa_torch.NSAAttention` for a layer of this model."""
        rope, scaling = self.rope_parameters, None
        if rope["rope_type"] in SCALINGS:
            scaling = {k: x for k, x in rope.items() if k not in NO_SCALING}
        try:
            return LayerSpec(
                **{name: getattr(self, ours) for name, ours in SPEC.items()},
                rope_base=rope["rope_theta"],
                rope_scale=rope["factor"] if rope["rope_type"] == "linear" else 1.0,
                rope_scaling=rotation.scaling(scaling),
                qk_norm_eps=self.rms_norm_eps if self.qk_norm else None,
            )
        except ValueError as error:  # errors use the names of the model's configuration
            names = rf"\b({'|'.join(WIDTHS)})\b"
            raise ValueError(re.sub(names, lambda x: WIDTHS[x[0]], str(error))) from None
