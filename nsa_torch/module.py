"""`NSAAttention`, an attention layer with projections, rotary positions, compression and gates.

The signature `forward(x, kv, *, prefill) -> (y, kv)`, the constructor arguments and the
`state_dict` keys are compatible with older programs and must not change (docs/seed.md). The
counterpart in JAX is `nsa_jax.nn.NSAAttention`. `nsa_interop.weights` converts checkpoints.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from nsa_core import layer, rotation, validate
from nsa_core.cache_contents import Contents
from nsa_core.compress_params import CompressParams, MLPParams, PoolParams
from nsa_core.config import NSAConfig
from nsa_core.context_layout import Layout
from nsa_core.context_layout import check as check_layout
from nsa_core.dispatch import INVARIANT, Choices
from nsa_core.layer import KIND_MODULE, spec_of, take_kind
from nsa_core.types import Branches
from nsa_torch import cache, checks, context, functional, geometry, heads
from nsa_torch.context_ranks import check_mesh
from nsa_torch.functional import Names
from nsa_torch.geometry import own_tokens, without_padding
from nsa_torch.heads import Gate, HeadGate, SelectedGate
from nsa_torch.key_convolution import KeyConvolution, newest_keys
from nsa_torch.plain import as_given, product_dtype
from nsa_torch.varlen import VarlenMetadata, borders_of, varlen_metadata

# the name for all branches, and the name of each branch
INVARIANT_NAMES = INVARIANT, Branches.each(INVARIANT)


class MLP(nn.Module):
    """The compressor `phi` of the paper, an MLP over a window of tokens. `nsa_jax.MLPParams` is
    the counterpart of this class in JAX.
    """

    def __init__(self, length: int, width: int, hidden: int, **factory: Any):
        super().__init__()

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, **factory))

        self.position = empty(length, width)
        self.w1, self.b1 = empty(length * width, hidden), empty(hidden)
        self.w2, self.b2 = empty(hidden, width), empty(width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the weights again at random."""
        nn.init.normal_(self.position, std=0.02)
        nn.init.normal_(self.w1, std=1 / math.sqrt(self.w1.shape[0]))
        nn.init.zeros_(self.b1)
        nn.init.normal_(self.w2, std=1 / math.sqrt(self.w2.shape[0]))
        nn.init.zeros_(self.b2)

    def params(self) -> MLPParams:
        return MLPParams(self.position, self.w1, self.b1, self.w2, self.b2)


class Pool(nn.Conv1d):
    """A compressor `phi` that is a depthwise convolution. The initial weights compute the mean of
    the window."""

    def __init__(self, length: int, stride: int, width: int, **factory: Any):
        options = {"stride": stride, "groups": width, "bias": False}
        super().__init__(width, width, length, **options, **factory)

    def reset_parameters(self) -> None:
        """Set the weights so that the convolution computes the mean of the window."""
        nn.init.constant_(self.weight, 1 / self.kernel_size[0])

    def params(self) -> PoolParams:
        return PoolParams(
            self.weight[:, 0].T
        )  # the convolution's weights, [D, 1, l], as [l, D]


class Mark(nn.Module):
    """An entry of the state_dict that records a property of the layer. The name of the entry
    records the property, and the value of the entry is not used.
    """

    def get_extra_state(self) -> Tensor:
        return torch.zeros(())

    def set_extra_state(self, state: Tensor) -> None:
        """Ignore the entry's value, since only its name matters."""


class NSAAttention(nn.Module):
    """Causal self-attention layer with Native Sparse Attention. The branches share their keys
    and values, or each branch has its own.

    Args:
      dim ... rope_scale, num_initial, num_local, bias, rope_scaling, qk_norm_eps, key_taps:
        see `nsa_core.layer.LayerSpec`, which also documents the errors and the meaning of None
        for these arguments.
      config: sizes of the branches, an `NSAConfig`. `config` replaces the arguments `l`, `d`,
        `l_sel`, `n_sel`, `w`, `num_initial`, `num_local` and `compute_dtype`. If you pass
        `config`, `gate` and `kv` default to the recommended "head" and "shared". Without
        `config`, `gate` and `kv` default to "sigmoid" and "separate".
      rope_impl: must be "llama".
      use_flash: If True, the implementation is chosen automatically. If False, every branch runs on
        SDPA.
      use_triton_sel: whether the selected branch must run on the Triton kernels, regardless of
        `use_flash`.
      implementation: as in `nsa_torch.attention`. You cannot combine `implementation` with
        `use_flash` or `use_triton_sel`.
      dense_below: whole sequences with fewer tokens than this number use dense attention.
        `dense_below` requires `gate="selected"`, and may be at most `n_sel * l_sel + 1`. Up to
        `n_sel * l_sel` tokens all blocks are selected, so that dense attention computes the same
        function. For a packed row, `dense_below` is compared with the `max_seqlen` of `varlen`, or
        with the total length if `varlen` is None. On measured GPUs `nsa_torch.explain` reports the
        length from which NSA is faster than dense attention. Attention to a cache never uses dense
        attention.
      compute_dtype: as in `NSAConfig`, only for inference on whole sequences. You may also set the
        attribute `compute_dtype` later. Attention to a cache computes in the dtype of the layer's
        input.
      context_mesh, context_layout: as in `nsa_torch.attention`. With a mesh, the input `x` has
        only the tokens of this rank.
      device, dtype: of the parameters; None means torch's defaults.

    The state_dict has entries whose names record `gate` and `phi` (for example
    `kind.gate_sigmoid`). If `kv` is "shared", an entry also records `kv`. Averaging weights does
    not change these names. `load_state_dict` raises `ValueError` if the recorded kinds do not fit
    the layer. Without recorded kinds, `load_state_dict` raises `ValueError` unless you passed
    `gate` and `phi` to the constructor.
    """

    # Whether the layer sets padding to zero if a gradient is recorded. False means that the
    # surrounding model already sets it to zero.
    zeroes_padding = True
    phi_k_mlp: MLP
    phi_v_mlp: MLP
    key_conv: KeyConvolution

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_groups: int,
        d_k: int,
        d_v: int,
        l: int | None = None,
        d: int | None = None,
        l_sel: int | None = None,
        n_sel: int | None = None,
        w: int | None = None,
        phi: layer.Phi | None = None,
        gate_hidden: int | None = None,
        gate_temp: float = 1.0,
        rope_impl: str = "llama",
        use_flash: bool = True,
        use_triton_sel: bool = False,
        *,
        config: NSAConfig | None = None,
        kv: layer.Kv | None = None,
        gate: layer.Gate | None = None,
        gate_bias: Sequence[float] | None = None,
        phi_hidden: int | None = None,
        rope_base: float = 10000.0,
        rope_scale: float = 1.0,
        num_initial: int | None = None,
        num_local: int | None = None,
        bias: bool = False,
        rope_scaling: rotation.Scaling | Mapping[str, Any] | None = None,
        qk_norm_eps: float | None = None,
        key_taps: int | None = None,
        implementation: Names = None,
        dense_below: int = 0,
        compute_dtype: str | None = None,
        context_mesh: DeviceMesh | None = None,
        context_layout: Layout = "zigzag",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        given = {name: x for name, x in locals().items() if name in layer.FIELDS}
        super().__init__()
        if context_mesh is not None:
            check_mesh(context_mesh)
        check_layout(context_layout)
        self.context_mesh, self.context_layout = context_mesh, context_layout
        self.spec = spec = spec_of(config, **given)
        if rope_impl != "llama":
            raise ValueError(f"rope_impl must be 'llama', got {rope_impl!r}")
        self.implementation = _seed_switches(implementation, use_flash, use_triton_sel)
        spec.check_dense_below(dense_below)
        if dense_below and context_mesh is not None:
            raise ValueError(
                f"dense_below must be 0 if context_mesh is given, got {dense_below}"
            )
        self.dense_below = dense_below
        self.compute_dtype = layer.computed(config, compute_dtype)
        _ = self.config  # reading the property `config` checks the compute dtype
        factory: dict[str, Any] = {"device": device, "dtype": dtype}

        def linear(size_in: int, size_out: int) -> nn.Linear:
            return nn.Linear(size_in, size_out, bias=bias, **factory)

        keys, values = n_kv_groups * d_k, n_kv_groups * d_v
        self.W_Q = linear(dim, n_heads * d_k)
        for key, value in spec.key_values:
            self.add_module(key, linear(dim, keys))
            self.add_module(value, linear(dim, values))
        self.out = linear(n_heads * d_v, dim)
        if qk_norm_eps is not None:
            self.q_norm, self.k_norm = (
                nn.RMSNorm(d_k, eps=qk_norm_eps, **factory) for _ in range(2)
            )
        if key_taps is not None:
            self.key_conv = KeyConvolution(key_taps, spec.kept_keys[1], **factory)
        kinds = {"head": HeadGate, "selected": SelectedGate}
        self.gate: nn.Module = kinds.get(spec.gate, Gate)(spec, **factory)
        for name, width in zip(spec.phi_names, (d_k, d_v), strict=False):
            made = (
                Pool(spec.l, spec.d, width, **factory)
                if spec.phi == "mlp"
                else MLP(spec.l, width, spec.phi_width(width), **factory)
            )
            self.add_module(name, made)
        self.add_module(KIND_MODULE, nn.ModuleDict({x: Mark() for x in spec.kind_marks()}))
        self.register_load_state_dict_pre_hook(_check_kind)

    @property
    def config(self) -> NSAConfig:
        """The sizes of the branches, and the dtype in which whole sequences are computed."""
        return self.spec.computed_in(self.compute_dtype)

    def explain(
        self, seq_len: int, *, batch: int = 1, dtype: torch.dtype | None = None
    ) -> Choices:
        """Report which implementations run whole sequences of `seq_len` tokens.

        Args:
          seq_len: number of tokens per row.
          batch: number of rows.
          dtype: dtype of the projections' results. `dtype=None` means the dtype of autocast if
            autocast is on, otherwise the dtype of the weights.

        Returns:
          One choice per step, as from `nsa_torch.explain`. The choice accounts for the backward
          pass if gradients are recorded. `explain` allocates no memory on the device. With
          `gate="selected"` the layer computes only the scores and the selected branch. Sequences
          shorter than `dense_below` use dense attention.
        """
        validate.sizes(seq_len=seq_len, batch=batch)
        spec, weight = self.spec, self.W_Q.weight
        dtype = dtype or product_dtype(weight.device, weight.dtype)
        with FakeTensorMode(allow_non_fake_inputs=True):
            place = {"dtype": dtype, "device": weight.device, "requires_grad": True}
            heads = (torch.empty(shape, **place) for shape in spec.heads(batch, seq_len))
            how = {"config": self.config, "implementation": self.implementation}
            return functional.explain(*heads, **how)

    def varlen(self, cu_seqlens: Tensor, **sizes: Any) -> VarlenMetadata:
        """Call `nsa_torch.varlen_metadata` with the config of this layer. Pass further arguments
        of `varlen_metadata` as `sizes`.
        """
        return varlen_metadata(cu_seqlens, config=self.spec.config, **sizes)

    def reset_parameters(self) -> None:
        """Initialize all weights again. Call this method, for example, after the layer was made on
        `meta` and moved with `to_empty`.
        """
        for module in self.children():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()

    def hyper_parameters(self) -> dict[str, Any]:
        """Return the hyper-parameters of this layer, for the metadata of a checkpoint."""
        return self.spec.as_dict()

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.spec.as_dict().items())

    def compress_params(self) -> tuple[CompressParams, CompressParams]:
        """Return the parameters of the compressor `phi`, first for keys, then for values."""
        turns = self.spec.d_k, self.spec.rope_base, self.spec.rope_scaling
        rates = lambda key: heads.rates(*turns, key.position.device)
        return self.spec.compress_params(self, rates)

    def init_cache(
        self,
        batch: int,
        capacity: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> cache.NSACache:
        """Make an empty `NSACache` for `capacity` tokens. Each call of the layer with this cache
        appends its tokens to the cache.

        Args:
          batch, capacity: number of rows, and maximum number of tokens per row.
          dtype: dtype of the stored keys and values, which is also the dtype of the projections'
            results. `dtype=None` means the dtype of autocast if autocast is on, otherwise the dtype
            of the first floating-point parameter with at least 16 bits. Pass `dtype` if weights are
            quantized, or if autocast is on in later calls but not during `init_cache`.
          device: None means the device of the parameters.
        """
        spec = self.spec
        tensors = [*self.parameters(), *self.buffers(), torch.empty(0)]
        floating = next(x for x in tensors if x.is_floating_point() and x.itemsize > 1)
        place = torch.device(device or tensors[0].device)
        made = cache.init_cache(
            batch,
            capacity,
            spec.n_kv_groups,
            spec.d_k,
            spec.d_v,
            config=spec.config,
            dtype=dtype or product_dtype(place, floating.dtype),
            device=place,
            separate=spec.separate,
        )
        made.pages.contents = Contents(spec.cached)
        made.newest_keys = self.empty_newest_keys(made.length, made.pages.selected_key.dtype)
        return made

    def empty_newest_keys(self, lengths: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the field `newest_keys` for an empty cache with `B` rows. Return None if the
        layer has no `key_taps`."""
        if self.spec.key_taps is None:
            return None
        return lengths.new_zeros((len(lengths), *self.spec.kept_keys), dtype=dtype)

    def convolve_after(self, before, position, count):
        """Return a function and a list. The function is the argument `convolve` of the method
        `project`, for tokens that follow the tokens of a cache. Each call of the function puts the
        newest keys into the list.

        Args:
          before: The newest projected keys of the cache.
          position: as in `project`.
          count: int `[B]`, the number of tokens of each row. `count=None` means all tokens.
        """
        newest = []

        def convolve(key):
            newest.append(newest_keys(before, key, count))
            return self.key_conv(key, position, before)

        return convolve, newest

    def project(
        self,
        x: Tensor,
        position: Tensor,
        convolve: Callable[[Tensor], Tensor] | None = None,
    ):
        """Compute `query, key, value, gates`, the arguments of `nsa_torch.attention`, from `x`
        [B, T, dim].

        With `phi="mlp_rope"` this function does not rotate the keys of the compressed branch,
        since `compress` rotates them.

        Args:
          position: `[B, T]` or `[1, T]`, the position of each token in its sequence.
          convolve: With `key_taps`, the function that convolves the projected keys `[B, T,
            columns]`. `convolve=None` means that each row begins a new sequence.
        """
        spec = self.spec
        if spec.key_taps is None:
            convolve = None
        elif convolve is None:
            convolve = functools.partial(self.key_conv, position=position)
        names = zip(*spec.key_values, strict=True)
        keys, values = [[getattr(self, name) for name in each] for each in names]
        gate = self.gate if spec.gate == "head" else None
        query, key, value, mean, logits = heads.project(
            *(x, self.W_Q, keys, values, position, spec),
            norms=heads.norms_of(self),
            means=spec.gate in ("sigmoid", "softmax"),
            gate=gate,
            raw_keys=int(spec.phi == "mlp_rope"),
            convolve=convolve,
            may_fuse=self.implementation not in INVARIANT_NAMES,
        )
        if spec.gate == "selected":
            gates = self.gate(query)
        elif logits is None:
            group = spec.n_heads // spec.n_kv_groups
            gates = self.gate(mean)[:, :, :, None].expand(-1, -1, -1, group, -1).flatten(2, 3)
        else:
            gates = (logits if spec.gate_temp == 1 else logits / spec.gate_temp).sigmoid()
        key, value = [x + x[-1:] * (len(Branches._fields) - len(x)) for x in (key, value)]
        return query, Branches(*key), Branches(*value), gates

    def _selected(self, query: Tensor, key: Branches[Tensor], value: Tensor, cu_seqlens):
        """Compute only the selected branch, `[B, T, H, Dv]`. The scores that select blocks come
        from the compressed tokens.
        """
        packed: dict[str, Any] = dict(config=self.config, cu_seqlens=cu_seqlens)
        with torch.no_grad():  # block selection has no gradient
            compressed = functional.compress(
                key.compressed, self.compress_params()[0], **packed
            )
            indices = functional.select_blocks(query, compressed, **packed)
        return functional.selected_attention(query, key.selected, value, indices, **packed)[0]

    def _dense(self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None):
        """Compute dense attention of at most `spec.all_selected` tokens, `[B, T, H, Dv]`."""
        name = Branches.each(self.implementation).sliding
        if name is None and cu_seqlens is None and key.shape[-1] == value.shape[-1]:
            query, key, value = (x.transpose(1, 2) for x in (query, key, value))
            with as_given(query):
                out = F.scaled_dot_product_attention(
                    query, key, value, is_causal=True, enable_gqa=True
                )
            return out.transpose(1, 2)
        return functional.sliding_attention(
            *(query, key, value),
            config=self.spec.dense_config,
            cu_seqlens=cu_seqlens,
            implementation=name,
        )[0]

    def forward(
        self,
        x: Tensor,
        kv: cache.NSACache | None = None,
        *,
        prefill: bool = True,
        cu_seqlens: Tensor | None = None,
        varlen: VarlenMetadata | None = None,
        new_lengths: Tensor | None = None,
        attention_mask: None = None,
    ) -> tuple[Tensor, cache.NSACache | None]:
        """Apply the layer to `x`. Return `(y, kv)` with the output `y` [B, T, dim]. The returned
        `kv` is the given cache with the tokens appended, or None if no cache was given.

        Args:
          x: `[B, T, dim]`.
          kv: a cache from `init_cache`. `kv=None` means that the rows are whole sequences, as in
            training, and the returned `kv` is None. The call appends the tokens to a given cache
            and returns the cache, with or without gradients. Decode under `torch.no_grad()`: if
            gradients are recorded, each call copies the tensors of the cache, and the autograd
            graph retains the tensors of every call.
          prefill: False declares that `x` continues a cache, which must then contain tokens. With
            either value of `prefill`, chunks may have any length.
          cu_seqlens: int `[sequences + 1]`, boundaries of a packed batch (`B = 1`). `cu_seqlens`
            must be None if a cache is given.
          varlen: the result of `varlen_metadata`, which replaces `cu_seqlens`. Make one metadata
            object for all layers.
          new_lengths: int `[B]`, as in `cached_attention`. `new_lengths` requires a cache.
          attention_mask: must be None. Put padding after the tokens of a row. With a cache, pass
            the number of real tokens per row as `new_lengths`.
        """
        spec = self.spec
        checks.tensors(x=x)
        padding = (
            "put a row's padding after its tokens, and with a cache pass the number of tokens "
            "as new_lengths"
        )
        given = {"cu_seqlens": cu_seqlens, "varlen": varlen}
        spec.check_input(x, kv, cache.NSACache, prefill, attention_mask, padding, **given)
        if kv is not None and not (prefill or kv.longest):
            raise ValueError("kv must hold tokens if prefill=False, got an empty cache")
        if kv is None and new_lengths is not None:
            raise ValueError("new_lengths must be None if no cache is given, got a tensor")
        if kv is not None and self.context_mesh is not None:
            raise ValueError("kv must be None if context_mesh is given, got a cache")
        batch, length, _ = x.shape
        zeroes_padding = self.zeroes_padding and torch.is_grad_enabled()
        if kv is not None:
            steps = torch.arange(length, device=x.device)
            if zeroes_padding:
                (x,) = own_tokens(new_lengths, x)
            position = kv.length[:, None] + steps
            convolve, newest = self.convolve_after(kv.newest_keys, position, new_lengths)
            query, key, value, gates = self.project(x, position, convolve)
            out, kv = cache.cached_attention(
                query,
                key,
                value,
                gates,
                kv,
                config=spec.config,
                compress_params=self.compress_params(),
                made_with=spec.cached,
                new_lengths=new_lengths,
                implementation=self.implementation,
            )
            if newest:
                (kv.newest_keys,) = newest
            return self.out(out.flatten(2)), kv
        if varlen is not None:
            shards = 1 if self.context_mesh is None else self.context_mesh.size()
            cu_seqlens = borders_of(cu_seqlens, varlen, x, "x", spec.config, length * shards)
        ranks: dict[str, Any] = {}
        if self.context_mesh is None:
            checks.packed(cu_seqlens, x, "x")
            padded = cu_seqlens is not None and checks.may_be_padded(cu_seqlens, length)
            cu_seqlens = checks.clamped(cu_seqlens, length)
            where = geometry.geometry(
                batch,
                length,
                config=spec.config,
                kv_len=length,
                cu_seqlens=cu_seqlens,
                device=x.device,
            )
            position, compress = where.position, functional.compress
        else:
            ranks = {"context_mesh": self.context_mesh, "context_layout": self.context_layout}
            own = {"cu_seqlens": cu_seqlens, "device": x.device}
            position = context.shard_positions(local_length=length, **own, **ranks)
            compress, padded = context.compress, cu_seqlens is not None
        if zeroes_padding and padded:
            x = without_padding(x, position >= 0)
        convolve = None
        if ranks and spec.key_taps is not None:
            before = functools.partial(context.tokens_before, count=spec.key_taps - 1, **ranks)
            convolve = lambda key: self.key_conv(key, position, before(key))
        query, key, value, gates = self.project(x, position, convolve)
        longest = length if varlen is None else varlen.max_seqlen or length
        names = Branches.each(self.implementation)
        if longest < self.dense_below and INVARIANT not in names:
            out = self._dense(query, key.selected, value.selected, cu_seqlens)
        elif spec.gate == "selected" and not ranks and names == Branches.each(None):
            out = self._selected(query, key, value.selected, cu_seqlens)
        else:
            key_params, value_params = self.compress_params()
            packed: dict[str, Any] = dict(config=self.config, cu_seqlens=cu_seqlens) | ranks
            compressed = (
                None  # the compressed tokens are means, which `attention` computes itself
            )
            if key_params is not None:
                compressed = (
                    compress(key.compressed, key_params, **packed),
                    compress(value.compressed, value_params, **packed),
                )
            out = functional.attention(
                query,
                key,
                value,
                gates,
                compressed=compressed,
                implementation=self.implementation,
                **packed,
            )
        return self.out(out.flatten(2)), None


def _check_kind(module, state_dict, prefix, *_) -> None:
    """Before any weight is copied, check that the checkpoint was saved from a layer with the same
    gate, phi and kv.

    If the state_dict lacks entries for gate and phi, this function adds the entries, provided that
    the caller passed gate and phi to the constructor. If `strict` is False, the state_dict may lack
    all weights of this layer.
    """
    stated = take_kind(state_dict, prefix)
    if stated or any(f"{prefix}{x}.weight" in state_dict for x, _ in module.named_children()):
        module.spec.check_kind(stated, f"{prefix}{KIND_MODULE}")
        state_dict.update(dict.fromkeys(module.spec.kind_keys(prefix), torch.zeros(())))


def _seed_switches(implementation, use_flash, use_triton_sel) -> Names:
    """Convert the arguments `use_flash` and `use_triton_sel` to names of implementations."""
    if implementation is not None:
        if use_triton_sel or not use_flash:
            raise ValueError(
                "use_flash and use_triton_sel must keep their defaults if implementation "
                f"is given, got {implementation=}, {use_flash=}, {use_triton_sel=}"
            )
        return implementation
    base = None if use_flash else "sdpa"
    return Branches(base, "triton" if use_triton_sel else base, base)
