"""`NSAAttention` in Flax NNX, with projections, rotary embedding, compression, gates and a cache.

The attribute names are the same as in the state_dict of the torch module, so `nsa_interop.weights`
can load a checkpoint of one framework in the other framework.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nsa_core import extras, rotation, validate
from nsa_core.array_ops import masked
from nsa_core.cache_contents import UNSAID, facts_of
from nsa_core.compress_params import CompressParams, MLPParams, PoolParams
from nsa_core.config import NSAConfig
from nsa_core.context_layout import Layout
from nsa_core.context_layout import check as check_layout
from nsa_core.dispatch import Choices
from nsa_core.layer import KIND, LayerSpec, computed, spec_of
from nsa_core.types import Branches
from nsa_jax import api, cache, context, geometry
from nsa_jax.eager import any_rank
from nsa_jax.geometry import PackedRows, rows_of

try:
    from flax import nnx
except ModuleNotFoundError as error:
    raise extras.missing("nnx", error) from error


@any_rank
def apply_rope(
    x,
    position,
    *,
    base: float = 10000.0,
    scale: float = 1.0,
    scaling: rotation.Scaling | None = None,
):
    """Apply the rotary embedding to the column pairs `(2i, 2i+1)` of each head of `x` [B, T, H,
    D], for positions `[B, T]`.
    """
    factor = 1.0 if scaling is None else scaling.attention_scaling
    angle = (position.astype(jnp.float32) / scale)[..., None] * rates(
        x.shape[-1], base, scaling
    )
    cos, sin = (f(angle)[:, :, None] * factor for f in (jnp.cos, jnp.sin))
    return rotation.rotated(jnp, x.astype(jnp.float32), cos, sin).astype(x.dtype)


def rates(width: int, base: float, scaling: rotation.Scaling | None) -> np.ndarray:
    """Return the angle by which each column pair turns per position, float32 `[width / 2]`."""
    columns = np.arange(0, width, 2, dtype=np.float32)
    # The power is rounded once, as in `nsa_torch.heads`.
    found = 1 / (base ** (columns / np.float32(width)).astype(np.float64)).astype(np.float32)
    return found if scaling is None else scaling.scaled(found, columns / 2, base)


class HeadNorm(nnx.Module):
    """Computes RMSNorm over the columns of each head of `x` [.., D]. Computation and result are
    in float32.
    """

    def __init__(self, width: int, eps: float, *, param_dtype):
        self.weight, self.eps = nnx.Param(jnp.ones((width,), param_dtype)), eps

    def __call__(self, x):
        wide = x.astype(jnp.float32)
        square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        weight = self.weight[...].astype(jnp.float32)
        return wide * jax.lax.rsqrt(square + self.eps) * weight


# All gates start near the same value.
GATE_START = nnx.initializers.variance_scaling(0.01, "fan_avg", "uniform")


class Gate(nnx.Module):
    """Computes three gates per key/value head from the mean of the query heads of this key/value
    head. The module maps `[B, T, Hkv, D]` to `[B, T, Hkv, 3]`.
    """

    def __init__(self, spec: LayerSpec, **factory: Any):
        self.fc1 = nnx.Linear(spec.d_k, spec.gate_width, **factory)
        self.fc2 = nnx.Linear(spec.gate_width, 3, kernel_init=GATE_START, **factory)
        self.spec = spec

    @any_rank
    def __call__(self, pooled_query):
        logits = self.fc2(jax.nn.silu(self.fc1(pooled_query))) / self.spec.gate_temp
        if self.spec.gate == "softmax":
            return jax.nn.softmax(logits, axis=-1)
        return jax.nn.sigmoid(logits)


class HeadGate(nnx.Linear):
    """Computes the logits of three gates per query head from the layer's input. The module maps
    `[B, T, dim]` to `[B, T, 3 H]`. Each head has the logits of the compressed, the selected and
    the sliding branch, in this order.
    """

    def __init__(self, spec: LayerSpec, **factory: Any):
        def start(key, shape, dtype):
            return jnp.tile(jnp.asarray(spec.gate_start, dtype), spec.n_heads)

        starts: Any = {"kernel_init": GATE_START, "bias_init": start}
        super().__init__(spec.dim, 3 * spec.n_heads, **starts, **factory)


class Pool(nnx.Module):
    """A compressor `phi` that is a depthwise convolution over a window. The weights `[l, D]`
    initially compute the mean.
    """

    def __init__(self, length: int, width: int, *, param_dtype):
        self.weight = nnx.Param(jnp.full((length, width), 1 / length, param_dtype))

    def params(self) -> PoolParams:
        return PoolParams(self.weight[...])


class MLP(nnx.Module):
    """The compressor `phi` of the paper, an MLP over a window of tokens. The parameters of this
    module are `nsa_jax.MLPParams`.
    """

    def __init__(self, length: int, width: int, hidden: int, param_dtype, rngs: nnx.Rngs):
        def normal(shape, deviation):
            value = jax.random.normal(rngs.params(), shape, jnp.float32)
            return nnx.Param((value * deviation).astype(param_dtype))

        self.position = normal((length, width), 0.02)
        self.w1 = normal((length * width, hidden), 1 / math.sqrt(length * width))
        self.b1 = nnx.Param(jnp.zeros((hidden,), param_dtype))
        self.w2 = normal((hidden, width), 1 / math.sqrt(hidden))
        self.b2 = nnx.Param(jnp.zeros((width,), param_dtype))

    def params(self) -> MLPParams:
        return MLPParams(
            self.position[...], self.w1[...], self.b1[...], self.w2[...], self.b2[...]
        )


class KeyConvolution(nnx.Module):
    """Computes `k + silu(c)` for projected keys `k`. Here `c` is the causal depthwise convolution
    of the keys (`key_taps` of `LayerSpec`). The weight is `[taps, columns]`. The last row of the
    weight is the factor of the key at the same position.
    """

    def __init__(self, taps: int, columns: int, param_dtype, rngs: nnx.Rngs):
        bound = taps**-0.5
        start = jax.random.uniform(rngs.params(), (taps, columns), minval=-bound, maxval=bound)
        self.weight = nnx.Param(start.astype(param_dtype))

    def __call__(self, key, position, before=None):
        """Convolve `key` [B, T, columns].

        Args:
          position: `[B, T]` or `[1, T]`, the position of each token in its sequence, from 0.
          before: `[B C, taps - 1, columns]`, the projected keys before each of the `C` equal
            chunks of a row. `before=None` means that each row begins a new sequence.
        """
        weight, (rows, length, columns) = self.weight[...].astype(jnp.float32), key.shape
        taps = len(weight)
        if before is None:
            before = jnp.zeros((rows, taps - 1, columns), key.dtype)
        chunks = key.reshape(before.shape[0], -1, columns)
        position = jnp.broadcast_to(position, (rows, length)).reshape(*chunks.shape[:2], 1)
        joined = jnp.concatenate([before.astype(key.dtype), chunks], axis=1).astype(jnp.float32)
        total = weight[-1] * chunks
        for back in range(1, taps):
            earlier = joined[:, taps - 1 - back : joined.shape[1] - back]
            total = total + weight[-1 - back] * jnp.where(position >= back, earlier, 0)
        return (chunks + jax.nn.silu(total)).astype(key.dtype).reshape(key.shape)


class Mark(nnx.Variable):
    """A scalar in the state that records a property of the layer. The scalar's name records the
    property, and the scalar's value is not used.
    """


class Kind(nnx.Module):
    """Records the kind of a layer in the names of its state, such as `gate_sigmoid` and
    `phi_avg`. Names can be compared without reading a value from a device, even under `jit`. The
    state of another kind of layer has another structure. `nnx.update` and Orbax refuse a state with
    another structure, but `nnx.merge` does not compare names.
    """

    def __init__(self, spec: LayerSpec):
        self.spec = spec
        for mark in spec.kind_marks():
            # The value is not an integer, since `jax.grad` differentiates the whole state of a
            # module.
            setattr(self, mark, Mark(jnp.zeros(())))

    def __setattr__(self, name: str, value) -> None:
        kind, _, got = name.partition("_")
        if kind in KIND and got != getattr(self.spec, kind):
            ours = str(getattr(self.spec, kind))
            raise ValueError(
                f"{kind} must be {ours!r} as in the module, got {got!r} in the state"
            )
        super().__setattr__(name, value)


class NSAAttention(nnx.Module):
    """Causal self-attention layer with Native Sparse Attention. The branches share their keys
    and values, or each branch has its own.

    Args:
      spec: the hyper-parameters (`nsa_core.layer.LayerSpec`). `spec=None` means that `fields` has
        the hyper-parameters.
      config: sizes of the branches, an `NSAConfig`. `config` replaces the arguments `l`, `d`,
        `l_sel`, `n_sel`, `w`, `num_initial`, `num_local` and `compute_dtype`. If you pass
        `config`, `gate` and `kv` default to the recommended "head" and "shared". Without
        `config`, `gate` and `kv` default to "sigmoid" and "separate".
      dtype, param_dtype: dtypes of the computation and of the parameters.
      implementation: as in `nsa_jax.attention`.
      dense_below: whole sequences with fewer tokens than this number use dense attention.
        `dense_below` requires `gate="selected"`, and may be at most `n_sel * l_sel + 1`. In
        sequences of at most `n_sel * l_sel` tokens, all blocks are selected, so dense attention
        computes the same function. If times were measured on the device, `nsa_jax.explain` reports
        the length from which NSA is faster than dense attention. Attention to a cache does not use
        dense attention.
      compute_dtype: as in `NSAConfig`, for inference on whole sequences. You may also set the
        attribute `compute_dtype` later. Attention to a cache computes in `dtype`.
      context_axis, context_layout: as in `nsa_jax.attention`. With `context_axis`, the inputs `x`
        and `segment_ids` have only the tokens of this device.
      rngs: random number generators for the initial parameters.
      fields: fields of `LayerSpec` by name: `dim`, `n_heads`, ..

    Raises:
      ValueError: An argument is invalid, or contradicts another argument.
    """

    def __init__(
        self,
        spec: LayerSpec | None = None,
        *,
        config: NSAConfig | None = None,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        implementation: api.Names = None,
        dense_below: int = 0,
        compute_dtype: str | None = None,
        context_axis: str | None = None,
        context_layout: Layout = "zigzag",
        rngs: nnx.Rngs,
        **fields: Any,
    ):
        if spec is None:
            spec = spec_of(config, **fields)
        elif not isinstance(spec, LayerSpec):
            raise ValueError(f"spec must be a LayerSpec, got {type(spec).__name__}")
        elif both := [*fields, *(["config"] if config is not None else [])]:
            raise ValueError(f"spec must be None if {', '.join(both)} is given, got both")
        self.spec = spec
        self.dtype = dtype
        self.implementation = implementation
        spec.check_dense_below(dense_below)
        check_layout(context_layout)
        if dense_below and context_axis is not None:
            raise ValueError(
                f"dense_below must be 0 if context_axis is given, got {dense_below}"
            )
        self.context_axis, self.context_layout = context_axis, context_layout
        self.dense_below, self.compute_dtype = dense_below, computed(config, compute_dtype)
        _ = self.config  # the property checks the compute dtype

        factory: Any = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        linear = functools.partial(nnx.Linear, use_bias=spec.bias, **factory)
        keys, values = spec.n_kv_groups * spec.d_k, spec.n_kv_groups * spec.d_v
        self.W_Q = linear(spec.dim, spec.n_heads * spec.d_k)
        for key, value in spec.key_values:
            setattr(self, key, linear(spec.dim, keys))
            setattr(self, value, linear(spec.dim, values))
        self.out = linear(spec.n_heads * spec.d_v, spec.dim)
        if spec.qk_norm_eps is not None:
            self.q_norm, self.k_norm = (
                HeadNorm(spec.d_k, spec.qk_norm_eps, param_dtype=param_dtype) for _ in range(2)
            )
        if spec.key_taps is not None:
            columns = spec.kept_keys[1]
            self.key_conv = KeyConvolution(spec.key_taps, columns, param_dtype, rngs)
        if spec.gate != "selected":
            kind = HeadGate if spec.gate == "head" else Gate
            self.gate = kind(spec, **factory)
        self.kind = Kind(spec)
        for name, width in zip(spec.phi_names, (spec.d_k, spec.d_v), strict=False):
            if spec.phi == "mlp":
                made = Pool(spec.l, width, param_dtype=param_dtype)
            else:
                made = MLP(spec.l, width, spec.phi_width(width), param_dtype, rngs)
            setattr(self, name, made)

    @property
    def config(self) -> NSAConfig:
        """The sizes of the branches, and the dtype in which whole sequences are computed."""
        return self.spec.computed_in(self.compute_dtype)

    def explain(self, seq_len: int, *, batch: int = 1) -> Choices:
        """Report which implementations run whole sequences of `seq_len` tokens. The report has one
        choice per step, like the report of `nsa_jax.explain`. With `gate="selected"`, and without
        `implementation` and `context_axis`, the layer computes only the scores and the selected
        branch. Sequences shorter than `dense_below` use dense attention.
        """
        validate.sizes(seq_len=seq_len, batch=batch)
        shapes = self.spec.heads(batch, seq_len)
        heads: Any = [jax.ShapeDtypeStruct(shape, self.dtype) for shape in shapes]
        how = {"config": self.config, "implementation": self.implementation}
        return api.explain(*heads, **how)

    def varlen(self, segment_ids, **limits: Any) -> PackedRows:
        """Call `nsa_jax.varlen_metadata` with the config of this layer. Pass further arguments of
        `varlen_metadata` as `limits`.
        """
        return api.varlen_metadata(segment_ids, config=self.spec.config, **limits)

    def hyper_parameters(self):
        """Return the hyper-parameters of this layer, for the metadata of a checkpoint."""
        return self.spec.as_dict()

    def compress_params(self) -> tuple[CompressParams, CompressParams]:
        """Return the parameters of the compressor `phi`: first the parameters for keys, then the
        parameters for values."""
        turns = self.spec.d_k, self.spec.rope_base, self.spec.rope_scaling
        return self.spec.compress_params(self, lambda key: rates(*turns))

    def init_cache(self, batch: int, capacity: int) -> cache.NSACache:
        """Make an empty cache for `capacity` tokens of this layer. Each call of the layer returns
        a new cache that includes the call's tokens.
        """
        made = cache.init_cache(
            batch,
            capacity,
            self.spec.n_kv_groups,
            self.spec.d_k,
            self.spec.d_v,
            config=self.spec.config,
            dtype=self.dtype,
            separate=self.spec.separate,
        )
        facts = facts_of(self.compress_params(), self.spec.cached)
        newest = None
        if self.spec.key_taps is not None:
            newest = jnp.zeros((batch, *self.spec.kept_keys), self.dtype)
        return made._replace(contents=UNSAID.with_facts(facts), newest_keys=newest)

    def project(self, x, position, convolve=None):
        """Compute `query, key, value, gates`, the arguments of `nsa_jax.attention`, from `x` [B,
        T, dim].

        With `phi="mlp_rope"` this function does not rotate the keys of the compressed branch,
        since `compress` rotates them.

        Args:
          position: `[B, T]` or `[1, T]`, the position of each token in its sequence.
          convolve: With `key_taps`, the function that convolves the projected keys `[B, T,
            columns]`. `convolve=None` means that each row begins a new sequence.
        """
        spec = self.spec
        batch, length, _ = x.shape

        def heads(linear, count, width):
            return linear(x).reshape(batch, length, count, width)

        turns = dict(base=spec.rope_base, scale=spec.rope_scale, scaling=spec.rope_scaling)

        def turned(x, norm, raw=False):
            x = x.reshape(batch, length, -1, spec.d_k)
            wide = x if spec.qk_norm_eps is None else getattr(self, norm)(x)
            return (wide if raw else apply_rope(wide, position, **turns)).astype(x.dtype)

        query = turned(self.W_Q(x), "q_norm")
        names = zip(*spec.key_values, strict=True)
        of_keys, of_values = ([getattr(self, name) for name in each] for each in names)
        raw = int(spec.phi == "mlp_rope")
        projected = [linear(x) for linear in of_keys]
        if spec.key_taps is not None:
            joined = jnp.concatenate(projected, axis=-1)
            convolve = convolve or functools.partial(self.key_conv, position=position)
            joined = convolve(joined)
            projected = jnp.split(joined, len(of_keys), axis=-1)
        keys = [turned(each, "k_norm", number < raw) for number, each in enumerate(projected)]
        values = [heads(linear, spec.n_kv_groups, spec.d_v) for linear in of_values]
        # An array that all branches share stays one array, so that caches and kernels read it
        # once.
        key, value = (
            Branches(*x) if spec.separate else Branches.each(*x) for x in (keys, values)
        )
        if spec.gate == "head":
            gates = jax.nn.sigmoid(heads(self.gate, spec.n_heads, 3) / spec.gate_temp)
        elif spec.gate == "selected":
            alone = jnp.asarray([0, 1, 0], query.dtype)
            gates = jnp.broadcast_to(alone, (*query.shape[:3], 3))
        else:
            group = spec.n_heads // spec.n_kv_groups
            pooled = query.reshape(batch, length, spec.n_kv_groups, group, -1).mean(axis=3)
            gates = jnp.repeat(self.gate(pooled), group, axis=2)
        return query, key, value, gates

    @any_rank
    def __call__(
        self,
        x,
        kv: cache.NSACache | None = None,
        *,
        prefill: bool = True,
        segment_ids=None,
        varlen: PackedRows | None = None,
        attention_mask: None = None,
    ):
        """Apply the layer to `x`. Return `(y, kv)` with the output `y` [B, T, dim]. The returned
        `kv` is a new cache that includes the tokens, or None if no cache was given.

        Args:
          x: `[B, T, dim]`.
          kv: a cache from `init_cache`. `kv=None` means that the rows are whole sequences, and
            the returned `kv` is None. A given cache is unchanged by the call, or invalid if it is
            donated.
          prefill: False declares that `x` continues a cache that contains tokens. Traced code does
            not check this declaration. Chunks of any length may be appended with both values of
            `prefill`.
          segment_ids: `[B, T]`, for packed rows (`nsa_jax.attention`). `segment_ids` must be None
            if a cache is given.
          varlen: the result of `varlen_metadata`, which replaces `segment_ids`. Make this metadata
            once for all layers.
          attention_mask: must be None. Mark padding by negative `segment_ids`. Rows of a cache
            have no padding.

        Raises:
          ValueError: An argument is invalid, or the cache does not fit the layer or the tokens.
          NotImplementedError: The layer's `implementation` cannot run this call.
        """
        spec = self.spec
        padding = "mark padding by negative segment_ids; rows of a cache have no padding"
        packed = {"segment_ids": segment_ids, "varlen": varlen}
        spec.check_input(x, kv, cache.NSACache, prefill, attention_mask, padding, **packed)
        if (
            kv is not None
            and not prefill
            and not isinstance(kv.length, jax.core.Tracer)
            and not np.any(kv.length)
        ):
            raise ValueError("kv must hold tokens if prefill=False, got an empty cache")
        batch, length, _ = x.shape
        shards: dict[str, Any] = {}
        if self.context_axis is None:
            rows, compress = (
                rows_of(segment_ids, varlen, spec.config, batch, length),
                api.compress,
            )
            longer = None if kv is None else kv.length + length
            position = geometry.layout_of(x, length, spec.config, longer, rows).position
        else:
            for name, given in (("kv", kv), ("varlen", varlen)):
                if given is not None:
                    raise ValueError(f"{name} must be None if context_axis is given, got both")
            shards = dict(context_axis=self.context_axis, context_layout=self.context_layout)
            rows, compress = segment_ids, functools.partial(context.compress, **shards)
            position = context.shard_positions(length, segment_ids=segment_ids, **shards)
        if rows is not None:
            # The gradient of a weight is a product with x, and 0 times NaN is NaN.
            (x,) = masked(jnp, geometry.ids_of(rows) >= 0, x)
        convolve, newest = None, None
        if kv is not None:

            def convolve(key):
                nonlocal newest
                assert kv.newest_keys is not None
                newest = jnp.concatenate([kv.newest_keys, key], axis=1)[:, length:]
                return self.key_conv(key, position, kv.newest_keys)

        elif shards and spec.key_taps is not None:
            before = functools.partial(context.tokens_before, count=spec.key_taps - 1, **shards)
            convolve = lambda key: self.key_conv(key, position, before(key))
        query, key, value, gates = self.project(x.astype(self.dtype), position, convolve)
        longest = length if varlen is None else varlen.max_seqlen or length
        params = self.compress_params()
        sizes: dict[str, Any] = dict(config=self.config, segment_ids=segment_ids)
        if varlen is not None:
            sizes["varlen"] = varlen
        names = Branches.each(self.implementation)
        if kv is not None:
            out, kv = cache.cached_attention(
                *(query, key, value, gates, kv),
                compress_params=params,
                made_with=spec.cached,
                config=spec.config,
                implementation=self.implementation,
            )
            kv = kv._replace(newest_keys=newest)
        elif longest < self.dense_below:
            out, _ = api.sliding_attention(
                *(query, key.selected, value.selected),
                config=spec.dense_config,
                segment_ids=geometry.ids_of(rows),
                implementation=names.sliding,
            )
        elif spec.gate == "selected" and not shards and names == Branches.each(None):
            compressed = api.compress(key.compressed, params[0], **sizes)
            indices = api.select_blocks(query, compressed, **sizes)
            out, _ = api.selected_attention(
                query, key.selected, value.selected, indices, **sizes
            )
        else:
            compressed = (
                compress(key.compressed, params[0], **sizes),
                compress(value.compressed, params[1], **sizes),
            )
            out = api.attention(
                *(query, key, value, gates),
                compressed=compressed,
                implementation=self.implementation,
                **sizes,
                **shards,
            )
        return self.out(out.reshape(batch, length, -1)), kv
