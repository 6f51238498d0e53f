"""Describes the model, its optimizer and the work of a step. The module imports no framework."""

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal

import yaml

from nsa_core.layer import LayerSpec

from ..harness import cost
from ..harness.records import Values

type Attention = Literal["nsa", "dense"]


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A decoder of tokens with an embedding, `layers` blocks, an RMSNorm and a linear head.

    A block computes `y = x + attention(norm(x))`, then `y + mlp(norm(y))`. The MLP is SwiGLU.

    Attributes:
      layer: Sizes of the attention layer. Dense attention has the same heads, rotary embedding and
        `key_taps`, but each token has only one set of keys and values.
      attention: "nsa" or "dense".
      layers: Number of blocks.
      hidden: Width of the MLP.
      vocabulary: Size of the vocabulary, by default the size of the vocabulary of bytes.
      norm_eps: Epsilon of the norms.
      dense_first: Number of first blocks with dense attention in a model with NSA. Torch only.
      dense_every: In a model with NSA, blocks whose index is a multiple of this number have dense
        attention. With `dense_every=0`, only the first `dense_first` blocks have dense attention.
        Torch only.
      selection_loss: Weight of `selection.loss`, which trains the selection. Only torch supports
        this loss, in one process and for rows of one sequence.

    Raises:
      ValueError: A value is out of range, or dense attention has a layer with `bias` or with
        `qk_norm_eps`.
    """

    layer: LayerSpec
    attention: Attention
    layers: int
    hidden: int
    vocabulary: int = 256
    norm_eps: float = 1e-6
    dense_first: int = 0
    dense_every: int = 0
    selection_loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.dense_first < (self.layers if self.attention == "nsa" else 1):
            raise ValueError(
                f"dense_first must be in 0..{self.layers - 1} if attention is nsa (layers = "
                f"{self.layers}), and must be 0 if attention is dense, got {self.dense_first}"
            )
        for name in ("dense_every", "selection_loss"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        if self.selection_loss and self.attention == "dense":
            raise ValueError("selection_loss must be 0.0 if attention is dense")
        if self.attention == "dense" and (
            self.layer.bias or self.layer.qk_norm_eps is not None
        ):
            raise ValueError(
                "bias must be False and qk_norm_eps must be None if attention is dense, got "
                f"{self.layer.bias} and {self.layer.qk_norm_eps}"
            )

    def as_dict(self) -> Values:
        """Return all values by name, for the metadata of a checkpoint. Values named in `UNSTATED`
        are omitted if the value is the default.
        """
        own = dataclasses.asdict(self)
        for name in UNSTATED:
            if own[name] == getattr(ModelSpec, name):
                del own[name]
        return self.layer.as_dict() | {k: v for k, v in own.items() if k != "layer"}

    def is_dense(self, block: int) -> bool:
        """Return whether the block with this index has dense attention."""
        every = self.dense_every and block % self.dense_every == 0
        return self.attention == "dense" or block < self.dense_first or bool(every)

    def dense_layers(self) -> int:
        return sum(map(self.is_dense, range(self.layers)))

    def products(self) -> int:
        """Return the number of multiply-adds with weights, per token. The products of attention are
        not counted."""
        at = self.layer
        inner = at.gate_width * (at.d_k + 3)
        inputs = {"head": 3 * at.dim, "selected": 0}.get(at.gate, inner)

        def block(views: int, gates: int) -> int:
            keys, values = at.n_kv_groups * at.d_k, at.n_kv_groups * at.d_v
            heads = at.n_heads * (at.d_k + at.d_v) + views * (keys + values)
            taps = views * keys * (at.key_taps or 0)
            return at.dim * heads + taps + gates + 3 * at.dim * self.hidden

        nsa = block(len(at.key_values), at.gate_heads * inputs)
        dense = self.dense_layers()
        blocks = dense * block(1, 0) + (self.layers - dense) * nsa
        return blocks + at.dim * self.vocabulary


TORCH_ONLY = ("dense_first", "dense_every", "selection_loss")
UNSTATED = ("norm_eps", *TORCH_ONLY)

_SIZES = yaml.safe_load(Path(__file__).with_name("models.yaml").read_text())
MODELS: Values = {name: x | {"layer": LayerSpec(**x["layer"])} for name, x in _SIZES.items()}


def model(
    name: str, attention: Attention, phi: Any = "avg", gate: Any = "sigmoid"
) -> ModelSpec:
    """Return the model called `name` in `MODELS`. `phi` and `gate` are the same as in
    `LayerSpec`."""
    sizes = MODELS[name]
    layer = dataclasses.replace(sizes["layer"], phi=phi, gate=gate)
    return ModelSpec(layer, attention, sizes["layers"], sizes["hidden"])


@dataclasses.dataclass(frozen=True)
class Training:
    """The settings of the training. AdamW updates all weights, with weight decay only on
    matrices.

    Attributes:
      steps: Number of optimizer steps.
      batch: Sequences per step.
      seq_len: Tokens per sequence.
      lr: Maximum learning rate.
      warmup: Number of steps in which the learning rate rises linearly to `lr`. A half cosine
        follows, down to a tenth of `lr` at `steps`.
      beta1: Decay of AdamW's first moment.
      beta2: Decay of AdamW's second moment.
      eps: Epsilon of AdamW.
      weight_decay: Weight decay of AdamW.
      clip: Norm to which a gradient with a larger norm is scaled down.
      seed: Seed of the initial weights and of the order of the data.

    Raises:
      ValueError: A value is out of range.
    """

    steps: int
    batch: int
    seq_len: int
    lr: float = 6e-4
    warmup: int = 20
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        rules = (
            ("steps batch seq_len", ">= 1", lambda x: x >= 1),
            ("lr clip eps", "> 0", lambda x: 0 < x < math.inf),
            ("lr", "<= 1e30", lambda x: x <= 1e30),  # AdamW multiplies it in float32
            ("beta1 beta2", "in [0, 1)", lambda x: 0 <= x < 1),
            ("weight_decay seed", ">= 0", lambda x: 0 <= x < math.inf),
        )
        for names, rule, holds in rules:
            for name in names.split():
                if not holds(getattr(self, name)):
                    raise ValueError(f"{name} must be {rule}, got {getattr(self, name)}")
        if not 0 <= self.warmup <= self.steps:
            raise ValueError(f"warmup must be in 0..steps={self.steps}, got {self.warmup}")

    def rate(self, step: int) -> float:
        """Return the learning rate of `step`, counted from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


MFU = "3 * (2 * products + attention) FLOPs, over the time and the peak rate of the device"


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its training, and the dtype of the computation: "float32" or "bfloat16"."""

    name: str
    model: ModelSpec
    training: Training
    dtype: str

    def settings(self) -> Values:
        """Return the settings that must not change between a checkpoint and later steps."""
        model = self.model.as_dict() | self.model.layer.start()
        return model | dataclasses.asdict(self.training) | {"dtype": self.dtype}

    def tokens(self) -> int:
        """Return the number of tokens per step."""
        return self.training.batch * self.training.seq_len

    def flops(self) -> int:
        """Return the useful FLOPs of a step.

        The forward pass counts two FLOPs per multiply-add of `ModelSpec.products`, and attention as
        in `bench.harness.cost`: visible pairs, without the selection. The backward pass counts
        twice as much as the forward pass. Values that are computed again, the embedding, the norms
        and the optimizer do not count.
        """
        at, length = self.model.layer, self.training.seq_len
        heads = at.n_heads, at.n_kv_groups, at.d_k, at.d_v
        shape = cost.Shape(self.training.batch, length, length, *heads, itemsize=2)
        model = self.model
        dense = model.dense_layers()
        counts = {"dense": dense, "all": model.layers - dense}
        attention = sum(
            n * cost.cost(x, shape, at.config).flops for x, n in counts.items() if n
        )
        return 3 * (2 * self.tokens() * self.model.products() + attention)

    def mfu(self, time_ms: float, device: str, devices: int = 1) -> float | None:
        """Return the share of the peak rate of all devices that a step of `time_ms` reaches, or
        None if the peak rate is not known.
        """
        limits = cost.limits(device)
        if limits is None:
            return None
        peak = limits.flops_32bit if self.dtype == "float32" else limits.flops_16bit
        return self.flops() / (time_ms / 1e3) / peak / devices


class DivergedError(ArithmeticError):
    """The error for a loss or a gradient that is not finite. The weights are unchanged by the
    failed step.
    """

    def __init__(self, step: int, loss: float, grad_norm: float, first: str = ""):
        """Make the error. `first` names the first value of each kind that is not finite."""
        found = f"; first: {first}" if first else ""
        super().__init__(f"step {step}: {loss=} and {grad_norm=} must be finite{found}")
