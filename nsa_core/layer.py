"""The specification of an NSA attention layer, for the modules of both frameworks."""

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

from nsa_core import rotation, validate
from nsa_core.cache_contents import Facts
from nsa_core.config import SEED_NAMES, NSAConfig

type Phi = Literal["avg", "mlp", "mlp_pe", "mlp_rope"]
type Gate = Literal["sigmoid", "softmax", "head", "selected"]
type Kv = Literal["separate", "shared"]
PHI, GATES, KV = (get_args(x.__value__) for x in (Phi, Gate, Kv))

# The weights of a layer do not determine these properties. Names of entries in the layer's
# state record them, such as `kind.gate_sigmoid`. Averages, casts and file formats change
# values, but never names.
KIND = ("gate", "phi", "kv")
# The values for checkpoints without a record. Such checkpoints are older than the option.
SILENT = {"kv": "separate"}
KIND_MODULE = "kind"
EXTRA_STATE = "_extra_state"  # torch's name for state of a module that is not a tensor
# These values are not recorded if they are the defaults. Checkpoints older than these names have
# the defaults.
UNSTATED = ("num_initial", "num_local", "bias", "kv")
# The tokens in a cache depend on these values, and on sizes.
CACHED = (
    *("phi", "kv", "rope_base", "rope_scale", "rope_scaling", "qk_norm_eps", "bias", "dim"),
    "key_taps",
)
# Only the initial weights depend on these values. A checkpoint therefore does not record them.
START = ("gate_bias",)


FIELD_OF = SEED_NAMES | {"num_initial": "num_initial", "num_local": "num_local"}


class Unnamed(str):
    """A default value of an argument.

    The type `Unnamed` shows that the caller did not pass the argument. An `Unnamed` is equal to the
    string, but has another type.
    """


DEFAULT_PHI: Any = Unnamed("avg")
DEFAULT_GATE: Any = Unnamed("sigmoid")


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """Hyper-parameters of `nsa_jax.nn.NSAAttention` and `nsa_torch.NSAAttention`.

    Two layers with equal specs have the same parameters and compute the same function.

    Attributes:
      dim: width of the layer's input and output.
      n_heads: number of query heads.
      n_kv_groups: number of key/value heads.
      d_k: width of query and key heads, an even number.
      d_v: width of value heads.
      l: `compress_block` of `NSAConfig`.
      d: `compress_stride` of `NSAConfig`.
      l_sel: `select_block` of `NSAConfig`.
      n_sel: `num_selected` of `NSAConfig`.
      w: `window` of `NSAConfig`.
      num_initial: the field `num_initial` of `NSAConfig`.
      num_local: the field `num_local` of `NSAConfig`.
      phi: the compressor. With "avg", phi is the mean. With "mlp", phi is a learnable depthwise
        convolution that starts as the mean. With "mlp_pe", phi is the paper's MLP with an
        intra-block position embedding. The inputs of the MLP of "mlp_pe" are rotated keys, so the
        compressed key depends on the position of its window. With "mlp_pe", the product of a query
        and a compressed key depends on more than the distance of the query and the window. With
        "mlp_rope", phi is the same MLP for unrotated keys. The compressed key of "mlp_rope" is
        rotated by the middle of its window. With "mlp_rope", the product of a query and a
        compressed key depends only on the distance of the query and the window.
      phi_hidden: hidden width of the MLP; None means twice the width of the heads that the MLP
        compresses.
      kv: the projections of keys and values. With "separate", each branch has its own keys and
        values. With "shared", all branches read the same keys and values, as in dense attention, so
        that a cache is about a third of the size.
      gate: the source of the three gates per token. With "head", the gates of each query head are
        sigmoids of a linear map of the layer's input. With "sigmoid" and "softmax", an MLP computes
        gates from the mean rotated query of each key/value head, as in older programs
        (docs/seed.md). With "softmax", the three gates add up to one. With "selected", the gates
        are the constants 0, 1, 0 without weights, and only the selected branch contributes to the
        output.
      gate_hidden: hidden width of the MLP of "sigmoid" and "softmax"; None means `d_k // 2`.
      gate_bias: initial biases of the gates of "head", for the compressed, the selected and the
        sliding branch; None means (-2, 2, 2). `gate_bias` does not affect which checkpoints a layer
        loads.
      gate_temp: temperature by which the logits of the gates are divided.
      rope_base: base of the rotary embedding of query and key heads. The columns `2i` and `2i + 1`
        are rotated by `position / rope_scale * rope_base**(-2i/d_k)`.
      rope_scale: divisor of the positions in the rotary embedding.
      rope_scaling: `nsa_core.rotation.Llama3` or `Yarn`, or a dictionary with its values and its
        `rope_type`. With `rope_scaling`, `rope_scale` must be 1.
      qk_norm_eps: epsilon of an RMSNorm of each query head and each key head before the rotation.
        All queries share one weight per column, and the keys of all branches share another weight
        per column. `qk_norm_eps=None` means no norm.
      bias: whether the projections of queries, keys, values and output have biases.
      key_taps: number of taps of a causal depthwise convolution of the keys of a sequence, at
        least 2. A projected key `k[t]` becomes `k[t] + silu(sum_j w[j] * k[t - j])`, `0 <= j <
        key_taps`, before norm and rotation (arXiv 2511.11571). `key_taps=None` means no
        convolution.

    Raises:
      ValueError: A value is invalid. The error message names the argument and the value.
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
    phi: Phi = DEFAULT_PHI
    phi_hidden: int | None = None
    kv: Kv = "separate"
    gate: Gate = DEFAULT_GATE
    gate_hidden: int | None = None
    gate_temp: float = 1.0
    gate_bias: Sequence[float] | None = None
    rope_base: float = 10000.0
    rope_scale: float = 1.0
    num_initial: int = NSAConfig.num_initial
    num_local: int = NSAConfig.num_local
    bias: bool = False
    rope_scaling: rotation.Scaling | None = None
    qk_norm_eps: float | None = None
    key_taps: int | None = None

    def __post_init__(self) -> None:
        if self.key_taps is not None:
            validate.sizes(2, key_taps=self.key_taps)
        sizes = ["dim", "n_heads", "n_kv_groups", "d_k", "d_v"]
        sizes += [x for x in ("gate_hidden", "phi_hidden") if getattr(self, x) is not None]
        validate.sizes(**{name: getattr(self, name) for name in sizes})
        if self.n_heads % self.n_kv_groups:
            raise ValueError(
                f"n_heads must be a multiple of n_kv_groups={self.n_kv_groups}, "
                f"got {self.n_heads}"
            )
        validate.even("d_k", self.d_k)
        for name, known in (("phi", PHI), ("kv", KV), ("gate", GATES)):
            validate.one_of(name, getattr(self, name), known)
        if self.kv == "shared" and self.phi == "mlp_rope":
            raise ValueError(
                "kv must be 'separate' if phi='mlp_rope', got 'shared'; mlp_rope needs unrotated "
                "keys, and shared keys are rotated"
            )
        for name, gates in (("gate_bias", ["head"]), ("gate_hidden", ["sigmoid", "softmax"])):
            if self.gate not in gates and getattr(self, name) is not None:
                raise ValueError(
                    f"{name} must be None if gate={str(self.gate)!r}, got "
                    f"{getattr(self, name)!r}"
                )
        if self.gate_bias is not None:
            try:
                start = tuple(map(float, self.gate_bias))
            except (TypeError, ValueError):
                start = ()
            if len(start) != 3 or not all(map(math.isfinite, start)):
                raise ValueError(
                    f"gate_bias must be three finite numbers, got {self.gate_bias!r}"
                )
            object.__setattr__(self, "gate_bias", start)  # JSON and YAML provide lists
        for name in ("gate_temp", "rope_base", "rope_scale"):
            validate.positive(name, getattr(self, name))
        validate.scaling(self.qk_norm_eps, "qk_norm_eps")
        object.__setattr__(self, "rope_scaling", rotation.scaling(self.rope_scaling))
        if self.rope_scaling is not None and (self.rope_scale != 1 or self.rope_base <= 1):
            raise ValueError(
                f"rope_scale must be 1 and rope_base > 1 if rope_scaling is given, "
                f"got {self.rope_scale} and {self.rope_base}"
            )
        validate.flag("bias", self.bias)
        _ = self.config

    @functools.cached_property
    def config(self) -> NSAConfig:
        return self.computed_in(None)

    def computed_in(self, compute_dtype: str | None) -> NSAConfig:
        """Return `config` with the compute dtype `compute_dtype`."""
        sizes = {field: getattr(self, name) for name, field in FIELD_OF.items()}
        return NSAConfig(**sizes, compute_dtype=compute_dtype)

    @property
    def all_selected(self) -> int:
        """The largest length of a sequence at which every query selects all blocks up to its
        own.
        """
        return self.n_sel * self.l_sel

    def check_dense_below(self, dense_below: int) -> None:
        """Check that dense attention computes the same function as the layer for sequences of
        fewer tokens than `dense_below`.

        Raises:
          ValueError: A branch other than the selected branch contributes to the output, or some
            block is not selected.
        """
        validate.sizes(0, dense_below=dense_below)
        if dense_below and self.gate != "selected":
            raise ValueError(
                f"dense_below must be 0 if gate={str(self.gate)!r}, got {dense_below}; dense "
                "attention is another function than the sum of the branches, so use gate='selected'"
            )
        if dense_below > self.all_selected + 1:
            raise ValueError(
                f"dense_below must be at most n_sel * l_sel + 1 = {self.all_selected + 1}, got "
                f"{dense_below}; in longer sequences some blocks are not selected"
            )

    @property
    def dense_config(self) -> NSAConfig:
        """A config whose sliding branch equals dense attention up to `all_selected` tokens."""
        return dataclasses.replace(self.config, window=self.all_selected)

    @functools.cached_property
    def cached(self) -> Facts:
        """Facts (`cache_contents`) about how this layer computes the tokens that it writes to a
        cache."""
        return tuple((name, getattr(self, name)) for name in CACHED)

    @property
    def rope_factor(self) -> float:
        """The factor by which the rotation multiplies queries and keys."""
        return 1.0 if self.rope_scaling is None else self.rope_scaling.attention_scaling

    @property
    def gate_width(self) -> int:
        """The hidden width of the MLP that computes gates."""
        return self.gate_hidden or max(1, self.d_k // 2)

    @property
    def separate(self) -> bool:
        """Whether each branch has separate keys and values."""
        return self.kv == "separate"

    @property
    def gate_start(self) -> Sequence[float]:
        """The initial biases of the gates of each query head."""
        return (-2.0, 2.0, 2.0) if self.gate_bias is None else self.gate_bias

    @property
    def gate_heads(self) -> int:
        """The number of heads that have their own gates."""
        return self.n_heads if self.gate == "head" else self.n_kv_groups

    def phi_width(self, width: int) -> int:
        """Return the hidden width of the MLP that compresses heads of `width`."""
        return self.phi_hidden or 2 * width

    @property
    def key_values(self) -> list[tuple[str, str]]:
        """The projections of keys and values: one pair per branch, or one pair for all branches."""
        if not self.separate:
            return [("W_K", "W_V")]
        return [(f"W_K_{branch}", f"W_V_{branch}") for branch in ("cmp", "sel", "win")]

    @property
    def kept_keys(self) -> tuple[int, int]:
        """The shape of the projected keys that a cache stores for the newest tokens: (tokens,
        columns).
        """
        columns = len(self.key_values) * self.n_kv_groups * self.d_k
        return (self.key_taps or 1) - 1, columns

    def heads(self, batch: int, length: int) -> list[tuple[int, int, int, int]]:
        """Return the shapes of query, key and value for `batch` rows of `length` tokens."""
        pairs = (
            (self.n_heads, self.d_k),
            (self.n_kv_groups, self.d_k),
            (self.n_kv_groups, self.d_v),
        )
        return [(batch, length, *pair) for pair in pairs]

    @property
    def phi_names(self) -> tuple[str, ...]:
        """The names of the submodules that compress keys and values."""
        if self.phi == "avg":
            return ()
        kind = "conv" if self.phi == "mlp" else "mlp"
        return f"phi_k_{kind}", f"phi_v_{kind}"

    def compress_params(self, layer: Any, rates: Any) -> Any:
        """Return the parameters of `phi` for keys and for values of a layer of this spec, in either
        framework.

        Args:
          rates: A function that returns the angle by which column pairs turn per token. The
            argument of `rates` is the parameters of `phi` for keys.
        """
        if self.phi == "avg":
            return None, None
        key, value = (getattr(layer, name).params() for name in self.phi_names)
        if self.phi == "mlp_rope":
            key = key.turned(rates(key) / self.rope_scale, self.rope_factor)
        return key, value

    def check_input(
        self, x, kv, kind: type, prefill, attention_mask, padding: str, **packed: Any
    ) -> None:
        """Check the input `x` [B, T, dim] of a layer, and its cache `kv`, which is None or an
        object of class `kind` with B rows.

        Args:
          padding: the alternative to a mask that error messages recommend.
          packed: Arguments that must be None if a cache is given, keyed by name.
        """
        validate.array("x", x, (None, None, self.dim))
        validate.queries(x, "x", 3)
        validate.flag("prefill", prefill)
        if attention_mask is not None:
            raise ValueError(f"attention_mask must be None, got a mask; {padding}")
        if kv is None:
            if not prefill:
                raise ValueError(
                    "kv must be a cache from init_cache if prefill=False, got None"
                )
            return
        if not isinstance(kv, kind):
            name = f"{type(kv).__module__}.{type(kv).__name__}"
            raise ValueError(f"kv must be a cache from init_cache, got {name}")
        rows = kv.length.shape[0]
        if rows != x.shape[0]:
            raise ValueError(f"kv must have batch {x.shape[0]}, the same as x, got {rows}")
        taps = None if kv.newest_keys is None else kv.newest_keys.shape[1] + 1
        if taps != self.key_taps:
            raise ValueError(
                f"kv must be from init_cache of a layer with key_taps={self.key_taps}, got a cache "
                f"for key_taps={taps}"
            )
        for name, given in packed.items():
            if given is not None:
                raise ValueError(
                    f"{name} must be None if a cache is given, got both; {padding}"
                )

    def as_dict(self) -> dict[str, Any]:
        """Return the values that are not None and that determine the function of the layer, for the
        metadata of a checkpoint. `num_initial`, `num_local`, `bias` and `kv` are included only if
        they differ from their defaults. A value that a checkpoint does not record has its default.
        """
        values = dataclasses.asdict(self)
        values |= {name: str(values[name]) for name in KIND}
        for name in UNSTATED:
            if values[name] == getattr(LayerSpec, name):
                values[name] = None
        kept = (name for name in values if name not in START and values[name] is not None)
        return {name: values[name] for name in kept}

    def start(self) -> dict[str, Any]:
        """Return the values that affect only the initial weights and are not None. `as_dict`
        omits the values that affect only the initial weights.
        """
        found = {name: getattr(self, name) for name in START}
        return {name: list(value) for name, value in found.items() if value is not None}

    def kind_marks(self) -> tuple[str, ...]:
        """Return the names that record the kind of the layer, such as `("gate_sigmoid",
        "phi_avg")`. The names include `"kv_shared"` if branches share keys and values.
        """
        words = {name: str(getattr(self, name)) for name in KIND}
        return tuple(f"{k}_{v}" for k, v in words.items() if v != SILENT.get(k))

    def kind_keys(self, prefix: str = "") -> list[str]:
        """Return the keys of a torch state_dict that record the kind of the layer at `prefix`."""
        return [f"{prefix}{KIND_MODULE}.{mark}.{EXTRA_STATE}" for mark in self.kind_marks()]

    def check_kind(self, stated: dict[str, str], where: str) -> None:
        """Check that the weights of a checkpoint belong to a layer of this kind.

        Args:
          stated: The record in the checkpoint. If the record is empty, the weights are accepted
            only if the caller passed gate and phi.
          where: The location in the checkpoint, for the error message.

        Raises:
          ValueError: gate, phi or kv differ, or gate and phi are not known.
        """
        missing = [name for name in KIND if isinstance(getattr(self, name), Unnamed)]
        if not stated and missing:
            raise ValueError(
                f"{' and '.join(missing)} must be passed to the layer's constructor to load "
                f"weights without a record of them, got no {where!r}; checkpoints of the seed "
                "system have gate='softmax' (docs/seed.md)"
            )
        for name in sorted({*KIND, *stated}) if stated else ():
            ours = str(getattr(self, name)) if name in KIND else "no such name"
            theirs = stated.get(name, SILENT.get(name, "no such name"))
            if ours != theirs:
                raise ValueError(
                    f"{name} must be {ours!r} as in the module, got {theirs!r} in the "
                    f"checkpoint ({where})"
                )


FIELDS = frozenset(x.name for x in dataclasses.fields(LayerSpec))
# The defaults of a layer whose sizes are given as an `NSAConfig`. docs/quality.md gives the
# reasons.
RECOMMENDED: dict[str, Any] = {"gate": Unnamed("head"), "kv": "shared"}


def spec_of(config: NSAConfig | None, **values: Any) -> LayerSpec:
    """Make a `LayerSpec` from the entries of `values` that are not None.

    Args:
      config: An `NSAConfig`, which replaces the sizes in `FIELD_OF`. With `config`, `gate` and
        `kv` default to the recommended values. The `compute_dtype` of `config` is not part of a
        spec.

    Raises:
      ValueError: A size is given in addition to `config`, or a value is invalid for
        `LayerSpec`.
    """
    named = {name: value for name, value in values.items() if value is not None}
    if config is None:
        return LayerSpec(**named)
    validate.configuration(config)
    if both := sorted(named.keys() & FIELD_OF):
        raise ValueError(f"{', '.join(both)} must be None if config is given, got both")
    sizes = {name: getattr(config, field) for name, field in FIELD_OF.items()}
    return LayerSpec(**RECOMMENDED | sizes | named)


def computed(config: NSAConfig | None, compute_dtype: str | None) -> str | None:
    """Return the compute dtype of a layer, from `config` or from the argument `compute_dtype`.

    Raises:
      ValueError: `config` has a compute dtype, and `compute_dtype` is given too.
    """
    if config is None or config.compute_dtype is None:
        return compute_dtype
    if compute_dtype is not None:
        raise ValueError("compute_dtype must be None if config has a compute_dtype, got both")
    return config.compute_dtype


def take_kind(state: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Remove the record of the layer at `prefix` from a torch state_dict, and return it.

    Raises:
      ValueError: The record contradicts itself, or cannot be read.
    """
    former = state.pop(f"{prefix}{EXTRA_STATE}", None)
    found = {} if former is None else _from_json(former, f"{prefix}{EXTRA_STATE}")
    start = f"{prefix}{KIND_MODULE}."
    for key in [key for key in state if key.startswith(start)]:
        name, _, word = key.removeprefix(start).removesuffix(f".{EXTRA_STATE}").partition("_")
        if found.get(name, word) != word:
            raise ValueError(
                f"{name} must have one value in a checkpoint, got {found[name]!r} and {word!r} "
                f"({start.removesuffix('.')})"
            )
        found[name] = word
        del state[key]
    return found


def _from_json(tensor: Any, key: str) -> dict[str, str]:
    """Decode a record that is stored as bytes of JSON, as in older checkpoints. The numbers are
    rounded, since averaging of checkpoints turns the bytes into floating-point numbers.
    """
    values = tensor.tolist()
    try:
        return json.loads(bytes(map(round, values)))
    except (ValueError, OverflowError) as error:
        raise ValueError(
            f"{key} must hold bytes of JSON, or be absent from the checkpoint, got {values}"
        ) from error
