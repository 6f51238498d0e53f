"""What an NSA attention layer is, in the seed system's words, for both frameworks' modules."""

import dataclasses
import json
from typing import Any

from nsa_jax.config import NSAConfig

PHI = ("avg", "mlp", "mlp_pe")
GATES = ("sigmoid", "softmax")

# What a layer's weights alone do not tell. A checkpoint states it under this key of torch's
# state_dict: `KIND_BYTES` bytes of JSON, the same number for every layer, as uint8.
KIND = ("gate", "phi")
KIND_KEY = "_extra_state"
KIND_BYTES = 64
FORCED = ("num_initial", "num_local")


class Unnamed(str):
    """A default that the caller did not name: equal to the word, told apart by its type."""


DEFAULT_PHI = Unnamed("avg")
DEFAULT_GATE = Unnamed("sigmoid")


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """Hyper-parameters of `nsa_jax.nn.NSAAttention` and `nsa_torch.NSAAttention`.

    Two layers with equal specs have the same parameters and compute the same function.

    Attributes:
      dim: width of the model.
      n_heads, n_kv_groups: query heads, key/value heads.
      d_k, d_v: width of a query/key head (even), of a value head.
      l, d, l_sel, n_sel, w: `compress_block`, `compress_stride`, `select_block`,
        `num_selected`, `window` of `NSAConfig`; `num_initial` and `num_local` are its own.
      phi: "avg": the mean. "mlp": the seed system's word for a learnable depthwise
        convolution that starts as the mean. "mlp_pe": the paper's MLP with an intra-block
        position embedding.
      phi_hidden: hidden width of "mlp_pe"; None: twice the width that it compresses.
      gate: "sigmoid" (paper): independent; "softmax" (seed): the three add up to one.
      gate_hidden: hidden width of the gate; None: `d_k // 2`.
      gate_temp: the gate's logits are divided by it.
      rope_base, rope_scale: rotary embedding of queries and keys per head, interleaved
        pairs, angle `position / rope_scale * rope_base**(-2i/d_k)`.

    Raises:
      ValueError: a rule is broken; the message names the argument and the value.
    """

    dim: int
    n_heads: int
    n_kv_groups: int
    d_k: int
    d_v: int
    l: int = 32
    d: int = 16
    l_sel: int = 64
    n_sel: int = 16
    w: int = 512
    phi: str = DEFAULT_PHI
    phi_hidden: int | None = None
    gate: str = DEFAULT_GATE
    gate_hidden: int | None = None
    gate_temp: float = 1.0
    rope_base: float = 10000.0
    rope_scale: float = 1.0
    num_initial: int = NSAConfig.num_initial
    num_local: int = NSAConfig.num_local

    def __post_init__(self) -> None:
        for name in ("dim", "n_heads", "n_kv_groups", "d_k", "d_v"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.n_heads % self.n_kv_groups:
            raise ValueError(
                f"n_heads must be a multiple of n_kv_groups={self.n_kv_groups}, "
                f"got {self.n_heads}"
            )
        if self.d_k % 2:
            raise ValueError(f"d_k must be even for the rotary embedding, got {self.d_k}")
        if self.phi not in PHI:
            raise ValueError(f"phi must be one of {PHI}, got {self.phi!r}")
        if self.gate not in GATES:
            raise ValueError(f"gate must be one of {GATES}, got {self.gate!r}")
        for name in ("gate_temp", "rope_base", "rope_scale"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")
        for name in ("gate_hidden", "phi_hidden"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be >= 1 or None, got {value}")
        _ = self.config

    @property
    def config(self) -> NSAConfig:
        return NSAConfig(
            compress_block=self.l,
            compress_stride=self.d,
            select_block=self.l_sel,
            num_selected=self.n_sel,
            num_initial=self.num_initial,
            num_local=self.num_local,
            window=self.w,
        )

    @property
    def gate_width(self) -> int:
        """Hidden width of the gate."""
        return self.gate_hidden or max(1, self.d_k // 2)

    def phi_width(self, width: int) -> int:
        """Hidden width of the MLP that compresses heads of `width`."""
        return self.phi_hidden or 2 * width

    def as_dict(self) -> dict[str, Any]:
        """The values that differ from None, for a checkpoint's metadata.

        The numbers of forced blocks stand in it where they are not the paper's: a checkpoint
        that does not state them has those.
        """
        values = dataclasses.asdict(self)
        values |= {name: str(values[name]) for name in KIND}
        for name in FORCED:
            if values[name] == getattr(NSAConfig, name):
                values[name] = None
        return {name: value for name, value in values.items() if value is not None}

    def kind(self) -> bytes:
        """Gate and phi as a checkpoint states them."""
        values = self.as_dict()
        text = json.dumps({name: values[name] for name in KIND})
        return text.ljust(KIND_BYTES).encode()

    def check_kind(self, key: str, stated: bytes | None) -> None:
        """That the weights of a checkpoint are of a layer with this gate and this phi.

        Args:
          key: where the checkpoint states it; named in the message.
          stated: as `kind` of the layer that was saved; None: the checkpoint does not say
            (the seed system's do not), and its weights are taken if the caller named both.

        Raises:
          ValueError: gate or phi differ, or nobody says what they are.
        """
        if stated is None:
            missing = [name for name in KIND if isinstance(getattr(self, name), Unnamed)]
            if missing:
                raise ValueError(
                    f"{' and '.join(missing)} must be named when the layer is made, to load "
                    f"weights that do not say theirs, got no key {key!r} in the checkpoint "
                    f"(the seed system's layers have gate='softmax')"
                )
            return
        found = json.loads(stated)
        for name in KIND:
            ours, theirs = getattr(self, name), found.get(name, "no such name")
            if ours != theirs:
                raise ValueError(
                    f"{name} must be {str(ours)!r} as in the module, got {theirs!r} in the "
                    f"checkpoint ({key})"
                )
