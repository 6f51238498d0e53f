"""Computes the fused projection of a layer, the norms of its heads, and the rotary embedding.

    x -> projection [B, T, query | keys of each branch | values of each branch | gates]
      -> split, rotated

On an NVIDIA GPU one Triton launch splits, normalizes and rotates the heads, and another launch
computes the gradient (`kernels_pallas/triton/split_heads.py`). On other devices torch operators
compute the same results.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels_pallas.triton import capability
from kernels_pallas.triton.descriptions import Heads, split_heads
from nsa_core import rotation
from nsa_core.layer import LayerSpec
from nsa_core.validate import dtype_name
from nsa_torch.plain import constant, refuse, under_transforms, undisturbed
from nsa_torch.shared import SHARED
from nsa_torch.torch_ops import TORCH_OPS, capability_of, readable


class GateOutput(nn.Linear):
    """A linear layer with initial weights near zero, so that all gates start near the same
    value.
    """

    def reset_parameters(self) -> None:
        """Initialize the weights again at random."""
        nn.init.xavier_uniform_(self.weight, gain=0.1)
        nn.init.zeros_(self.bias)


class Gate(nn.Module):
    """Computes three gates per key/value head from the mean of the query heads of this key/value
    head. The module maps `[B, T, Hkv, D]` to `[B, T, Hkv, 3]`.
    """

    def __init__(self, spec: LayerSpec, **factory: Any):
        super().__init__()
        self.fc1 = nn.Linear(spec.d_k, spec.gate_width, **factory)
        self.fc2 = GateOutput(spec.gate_width, 3, **factory)
        self.spec = spec

    def reset_parameters(self) -> None:
        """Initialize the weights again at random."""
        self.fc1.reset_parameters()
        self.fc2.reset_parameters()

    @torch.no_grad()
    def set_constant(self, *logits: float) -> None:
        """Set the logits of the gates (compressed, selected, sliding) to constants, the same for
        every query."""
        self.fc2.weight.zero_()
        self.fc2.bias.copy_(torch.tensor(logits) * self.spec.gate_temp)

    def forward(self, pooled_query: Tensor) -> Tensor:
        logits = self.fc2(F.silu(self.fc1(pooled_query))) / self.spec.gate_temp
        return logits.softmax(dim=-1) if self.spec.gate == "softmax" else logits.sigmoid()


class HeadGate(nn.Linear):
    """Computes the logits of three gates per query head from the layer's input. The module maps
    `[B, T, dim]` to `[B, T, 3 H]`. Each head has the logits of the compressed, the selected and
    the sliding branch, in this order.
    """

    def __init__(self, spec: LayerSpec, **factory: Any):
        self.start, self.temp = spec.gate_start, spec.gate_temp
        super().__init__(spec.dim, 3 * spec.n_heads, **factory)

    def reset_parameters(self) -> None:
        """Initialize the weights again, so that the gates start near `sigmoid(bias /
        gate_temp)`.
        """
        self.draw_weight()
        with torch.no_grad():
            self.bias.copy_(self.start_bias())

    def draw_weight(self) -> None:
        """Initialize only the weight, and leave the bias unchanged."""
        nn.init.xavier_uniform_(self.weight, gain=0.1)

    def start_bias(self) -> Tensor:
        """Return the initial bias of the layer, sharded like its current bias."""
        start = torch.tensor(self.start, dtype=self.bias.dtype, device=self.bias.device)
        return _placed(start.repeat(self.out_features // 3), self.bias)

    @torch.no_grad()
    def set_constant(self, *logits: float) -> None:
        """Set the logits of the gates (compressed, selected, sliding) to constants, the same for
        every query and head.
        """
        self.weight.zero_()
        self.bias.copy_((torch.tensor(logits) * self.temp).repeat(self.out_features // 3))


class SelectedGate(nn.Module):
    """Returns the constant gates 0, 1 and 0. With these gates, only the selected branch contributes
    to the output. This module has no weights.
    """

    def __init__(self, spec: LayerSpec, **factory: Any):
        super().__init__()

    def forward(self, query: Tensor) -> Tensor:
        """Return the gates `[B, T, H, 3]` for a query `[B, T, H, D]`."""
        # Values from the host would need a copy to the device, which a CUDA graph cannot capture.
        gates = torch.arange(3, device=query.device) == 1
        return gates.to(query.dtype).expand(*query.shape[:3], 3)


def _placed(x: Tensor, like: Tensor) -> Tensor:
    """Shard `x` in the same way as `like`. All ranks must pass the same `x`."""
    mesh = getattr(like, "device_mesh", None)
    if mesh is None:
        return x
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(x, mesh, like.placements, src_data_rank=None)


# From this number of tokens on, the products of all projections are fused to one. For the fused
# product, each call concatenates the weights, which costs 4 bytes of traffic per weight. The
# product has 2 FLOP per weight and token.
FUSED_FROM = 8192


# the norm of the query heads, and the norm of the key heads of all branches
type Norms = tuple[nn.Module, nn.Module]


class QKV(NamedTuple):
    """The heads of a layer. Keys and values are listed by branch."""

    query: Tensor  # [B, T, H, D]
    keys: tuple[Tensor, ...]  # [B, T, Hkv, D]
    values: tuple[Tensor, ...]  # [B, T, Hkv, Dv]
    # mean over the query heads of each key/value head, [B, T, Hkv, D], if requested
    mean: Tensor | None
    gates: Tensor | None  # logits of the gates of each query head, [B, T, H, 3], or None


def project(
    x: Tensor,
    query: nn.Linear,
    keys: Sequence[nn.Linear],
    values: Sequence[nn.Linear],
    position: Tensor,
    spec: LayerSpec,
    *,
    norms: Norms | None = None,
    means: bool = False,
    gate: nn.Module | None = None,
    raw_keys: int = 0,
    convolve: Callable[[Tensor], Tensor] | None = None,
    may_fuse: bool = True,
) -> QKV:
    """Compute the query, and the keys and values of each branch, from `x` [B, T, dim]. Query and
    keys are normalized and rotated.

    Args:
      query, keys, values: The projection layers. `keys` and `values` have one layer per branch.
      position: as in `split`.
      spec: sizes of the heads, and the rotation.
      norms: as in `split`.
      means: Whether the mean of the query heads of each key/value head is returned in addition.
      gate: A further projection layer, which computes the logits of the gates, or None.
      raw_keys: The number of branches whose keys are not rotated. The branches with unrotated
        keys are the first in the list.
      convolve: A function that is applied to the projected keys of all branches, `[B, T,
        columns]`, or None.
      may_fuse: Whether the products of many tokens may be fused. The fused product rounds the
        logits of the gates twice.

    Raises:
      ValueError: The projections do not have the number of columns of all heads, or `x` does not
        have the dtype of the weights.
    """
    layers = query, *keys, *values
    # An exported program must support any number of tokens.
    few = not may_fuse or torch.compiler.is_exporting() or math.prod(x.shape[:-1]) < FUSED_FROM
    plain = not few and all(_is_plain(each, x) for each in layers)
    fused = plain and len({each.bias is None for each in layers}) == 1
    beside = None  # the gate, if its product is fused with the other projections
    if fused and isinstance(gate, HeadGate) and _is_plain(gate, x, HeadGate):
        beside = gate
    sizes = Heads(
        *(spec.n_heads, spec.n_kv_groups, spec.d_k, spec.d_v),
        branches=len(keys),
        means=int(means),
        gates=0 if beside is None else 3,
        raw_keys=raw_keys,
    )
    try:
        if fused:
            columns = sum(each.weight.shape[0] for each in layers)
            projection = _product(x, layers, beside, sizes.row)
        else:
            projection = torch.cat([each(x) for each in layers], dim=-1)
            columns = projection.shape[-1]
    except RuntimeError as error:
        _check_dtype(x, query, error)
        raise
    if columns != sizes.row - sizes.gate_columns:
        raise ValueError(
            f"projections must return {sizes.row - sizes.gate_columns} columns for "
            f"{spec.n_heads} query heads and {spec.n_kv_groups} key/value heads, got "
            f"{columns}; heads cannot be sharded over devices (tensor parallelism)"
        )
    if convolve is not None:
        first, count = sizes.H * sizes.D, sizes.branches * sizes.Hkv * sizes.D
        parts = projection.split([first, count, projection.shape[-1] - first - count], dim=-1)
        projection = torch.cat([parts[0], convolve(parts[1]), parts[2]], dim=-1)
    turns = {"base": spec.rope_base, "scale": spec.rope_scale, "scaling": spec.rope_scaling}
    found = split(projection, position, sizes, norms=norms, **turns)
    if gate is None:
        return found
    each = spec.n_heads, 3
    if beside is None or found.gates is None:
        return found._replace(gates=gate(x).unflatten(-1, each))
    bias = beside.bias.to(projection.dtype).unflatten(0, each)
    return found._replace(gates=found.gates + bias)


def _check_dtype(x: Tensor, layer: nn.Module, error: RuntimeError) -> None:
    """Raise ValueError if the reason for `error` is that `x` and the weights have different
    dtypes.
    """
    weight = getattr(layer, "weight", x)
    if type(error) is RuntimeError and weight.itemsize > 1 and weight.dtype != x.dtype:
        raise ValueError(
            f"x must have the dtype of the layer's weights, {dtype_name(weight)}, got "
            f"{dtype_name(x)}"
        ) from error


def _product(
    x: Tensor, layers: Sequence[nn.Linear], gate: nn.Linear | None, row: int
) -> Tensor:
    """Apply `layers`, and `gate` without its bias, to `x` [B, T, dim] in one matrix product. The
    result is `[B, T, row]`, with zeros in unused columns at the end.
    """
    weights, bias = [each.weight for each in layers], None
    if layers[0].bias is not None:
        bias = torch.cat([each.bias for each in layers])
        bias = F.pad(bias, (0, row - bias.shape[0]))
    if gate is not None:
        weights.append(gate.weight)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weights = x.to(dtype), [each.to(dtype) for each in weights]
        bias = None if bias is None else bias.to(dtype)
    return _FusedLinear.apply(x, bias, row, *weights)


class _FusedLinear(torch.autograd.Function):
    """Computes `x @ cat(weights).T + bias` with `row` columns. The function saves the weights,
    not their concatenation, for the backward pass. Sharded training could not free a
    concatenation between the forward and the backward pass.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x, bias, row, *weights):
        return F.linear(x, _stacked(weights, row), bias)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, _, ctx.row, *weights = inputs
        ctx.save_for_backward(x, *weights)

    @staticmethod
    def backward(ctx, grad):
        x, *weights = ctx.saved_tensors
        wanted_x, wanted_bias, _, *wanted = ctx.needs_input_grad
        grad_x = grad @ _stacked(weights, ctx.row) if wanted_x else None
        rows, grad = x.flatten(0, -2), grad.flatten(0, -2)
        grad_bias = grad.sum(dim=0) if wanted_bias else None
        sizes = [each.shape[0] for each in weights]
        rest = ctx.row - sum(sizes)
        if all(wanted):
            *parts, _ = (grad.T @ rows).split([*sizes, rest])
            return grad_x, grad_bias, None, *parts
        *parts, _ = grad.split([*sizes, rest], dim=-1)
        pairs = zip(wanted, parts, strict=True)
        return grad_x, grad_bias, None, *(x.T @ rows if each else None for each, x in pairs)


def _stacked(weights: Sequence[Tensor], row: int) -> Tensor:
    """Concatenate the rows of all weights, followed by zeros up to `row` rows."""
    missing = row - sum(each.shape[0] for each in weights)
    zeros = [weights[0].new_zeros(missing, weights[0].shape[1])] if missing else []
    return torch.cat([*weights, *zeros])


def split(
    projection: Tensor,
    position: Tensor,
    sizes: Heads,
    *,
    base: float = 10000.0,
    scale: float = 1.0,
    scaling: rotation.Scaling | None = None,
    norms: Norms | None = None,
) -> QKV:
    """Split a projection into the query and, for each branch, the key and the value. All returned
    tensors are contiguous. Query and keys are normalized and rotated.

    Args:
      projection: `[B, T, sizes.row]`.
      position: Positions of the tokens, `[B, T]`, or `[1, T]` if all rows have the same
        positions.
      base, scale, scaling: Parameters of the rotation.
      norms: The norm of query heads and the norm of key heads, each over the columns of a head;
        None means no norms.
    """
    cos, sin = _angles(position, sizes.D, base, scale, scaling)
    plain = norms is None or all([_is_plain(x, projection, nn.RMSNorm) for x in norms])
    if plain and _by_kernel(projection, sizes):
        cos, sin = (x.expand(*projection.shape[:-1], -1) for x in (cos, sin))
        weights = [cast(Tensor, x.weight) for x in norms or ()]
        eps = cast(float, norms[0].eps) if norms else 0.0
        found = _split(projection, cos, sin, weights, eps, [*dataclasses.astuple(sizes)])
        query, *each, mean, gates = found
        keys, values = (tuple(each[i : i + sizes.branches]) for i in (0, 3))
        mean, gates = mean if sizes.means else None, gates if sizes.gates else None
        return QKV(query, keys, values, mean, gates)
    pairs = sizes.branches * sizes.Hkv
    columns = [sizes.H * sizes.D, pairs * sizes.D, pairs * sizes.Dv, sizes.H * sizes.gates]
    query, key, value, gates, _ = projection.split([*columns, sizes.row - sum(columns)], -1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    query, key = query.unflatten(-1, (sizes.H, sizes.D)), key.unflatten(-1, (pairs, sizes.D))
    if norms is not None:
        normed = _normed if plain else nn.Module.__call__
        query, key = normed(norms[0], query), normed(norms[1], key)
    wide, raw = torch.promote_types(projection.dtype, torch.float32), sizes.raw_keys * sizes.Hkv
    query = rotation.rotated(torch, query.to(wide), cos, sin)
    turned = rotation.rotated(torch, key[:, :, raw:].to(wide), cos, sin)
    key = torch.cat([key[:, :, :raw], turned], dim=2)
    query, key = [x.to(projection.dtype) for x in (query, key)]
    value = value.unflatten(-1, (pairs, sizes.Dv))
    keys, values = [
        tuple([each.contiguous() for each in x.split(sizes.Hkv, dim=2)]) for x in (key, value)
    ]
    mean = query.unflatten(2, (sizes.Hkv, -1)).mean(dim=3) if sizes.means else None
    gates = gates.unflatten(-1, (sizes.H, sizes.gates)).contiguous() if sizes.gates else None
    return QKV(query, keys, values, mean, gates)


def norms_of(layer: nn.Module) -> Norms | None:
    """Return the modules `q_norm` and `k_norm` of an attention layer, or None if the layer has no
    norms."""
    query, key = getattr(layer, "q_norm", None), getattr(layer, "k_norm", None)
    return None if query is None or key is None else (query, key)


def _normed(norm: nn.Module, x: Tensor) -> Tensor:
    """Apply a plain norm to `x` in float32 or wider. The result has the wider dtype, since heads
    are rounded only after the rotation.
    """
    norm, wide = cast(nn.RMSNorm, norm), torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), norm.normalized_shape, norm.weight.to(wide), norm.eps)


def _angles(
    position: Tensor,
    width: int,
    base: float,
    scale: float,
    scaling: rotation.Scaling | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine of the angle of each pair of columns, float32 `[B, T, width / 2]`,
    multiplied by the factor of `scaling`.
    """
    turns = rates(width, base, scaling, position.device)
    angle = (position.to(torch.float32) / scale)[..., None] * turns
    if scaling is None or scaling.attention_scaling == 1:
        return angle.cos(), angle.sin()
    return angle.cos() * scaling.attention_scaling, angle.sin() * scaling.attention_scaling


def rates(
    width: int, base: float, scaling: rotation.Scaling | None, device: torch.device
) -> Tensor:
    """Return the angle by which each pair of columns turns per position, float32 `[width / 2]`.
    If `scaling` is given, the rates are cached, since their computation needs several launches.
    """
    if scaling is not None and undisturbed():
        given = width, base, scaling, device
        return SHARED.get(("rates", *given), device, lambda: [_rates(*given)])[0]
    return _rates(width, base, scaling, device)


def _rates(width, base, scaling, device) -> Tensor:
    columns = torch.arange(0, width, 2, dtype=torch.float32, device=device)
    # The power is computed in float64 and rounded once, as in dense models. A float32 power on
    # a GPU has a larger error. A rate that is off by one ulp is an angle that is off by 1e-4 at
    # position 1000.
    found = 1 / (base ** (columns / width).double()).float()
    return found if scaling is None else scaling.scaled(found, columns / 2, base)


def _is_plain(layer: nn.Module, x: Tensor, kind: type[nn.Module] = nn.Linear) -> bool:
    """Return whether a layer computes only its product or norm. A plain layer has no adapter, no
    hook, no shards and no other `forward`.
    """
    if type(layer) is not kind:
        return False
    hooks = layer._forward_hooks, layer._forward_pre_hooks
    hooks = *hooks, layer._backward_hooks, layer._backward_pre_hooks
    if any(hooks) or nn.modules.module._has_any_global_hook() or "forward" in vars(layer):
        return False
    bias = getattr(layer, "bias", None)
    tensors = (layer.weight,) if bias is None else (layer.weight, bias)
    return all([type(y) in (nn.Parameter, Tensor) and y.device == x.device for y in tensors])


def _by_kernel(projection: Tensor, sizes: Heads) -> bool:
    if projection.device.type != "cuda" or sizes.D % 2 or not projection.numel():
        return False
    if (
        under_transforms()
    ):  # torch.func does not support gradients that are registered with torch.library
        return False
    return _kernel_runs(projection.device.index, projection.dtype)


@constant
def _kernel_runs(device: int, dtype: torch.dtype) -> bool:
    return capability.copies_why_not(capability_of(device), dtype) is None


@torch.library.custom_op("nsa::split_heads", mutates_args=())
def _split(
    projection: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: list[Tensor],
    eps: float,
    sizes: list[int],
) -> list[Tensor]:
    """Split a projection `[B, T, row]` into tensors of the shapes `Heads(*sizes).split_shapes`.
    `norms` has the norm weights of query and keys, or is empty.
    """
    made = _apart(projection, cos, sin, norms, eps, sizes)
    launch(Heads(*sizes), False, projection, made, cos, sin, norms, eps)
    return made


@_split.register_fake
def _apart(projection, cos, sin, norms, eps, sizes):
    return [projection.new_empty(x) for x in Heads(*sizes).split_shapes(*projection.shape[:-1])]


def launch(
    heads: Heads,
    back: bool,
    projection: Tensor,
    apart: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    norms: Sequence[Tensor] = (),
    eps: float = 0.0,
    given: Tensor | None = None,
    partials: Tensor | None = None,
) -> None:
    """Launch the Triton kernel that splits `projection` into the tensors `apart`, one per group of
    heads.

    If `back` is true, the kernel computes the gradient of a projection and writes the gradient to
    `projection`. With `back`, `apart` has the gradients of the heads, and `given` has the
    projection. If heads have norms, the kernel that computes the gradient also writes `partials`,
    which are sums of the gradients of the norm weights.
    """
    kernel = split_heads(heads, cos.shape[:-1].numel(), back, eps if norms else None)
    if back:
        apart = [readable(x) for x in apart]
    else:
        projection = readable(projection)
    read = given, *(norms or (None, None)), cos, sin
    read = [readable(cos if x is None else x) for x in read]
    written = projection, tuple(apart), read[0] if partials is None else partials
    TORCH_OPS.run_in_place(kernel, *written, *read)


@torch.library.custom_op("nsa::join_heads", mutates_args=())
def _join(
    grads: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    normed: list[Tensor],
    eps: float,
    sizes: list[int],
) -> list[Tensor]:
    """Compute the gradient `[B, T, row]` of the projection from the gradients of the results of
    `_split`. If the heads were normalized, `normed` has the projection and the norm weights of
    query and keys. For normalized heads, the gradients of the norm weights are returned too.
    """
    heads, (made, *of_norms) = Heads(*sizes), _joined(grads, cos, sin, normed, eps, sizes)
    if not normed:
        launch(heads, True, made, grads, cos, -sin)
        return [made]
    partials = cos.new_empty(heads.partials(cos.shape[:-1].numel()))
    launch(heads, True, made, grads, cos, -sin, normed[1:], eps, normed[0], partials)
    pair = partials.sum(dim=0).split([heads.H, heads.branches * heads.Hkv])
    return [made, *(x.sum(dim=0).to(w.dtype) for x, w in zip(pair, of_norms, strict=True))]


@_join.register_fake
def _joined(grads, cos, sin, normed, eps, sizes):
    made = grads[0].new_empty((*cos.shape[:-1], Heads(*sizes).row))
    return [made, *(torch.empty_like(x) for x in normed[1:])]


def _keep(ctx, inputs, output):
    projection, cos, sin, norms, ctx.eps, ctx.sizes = inputs
    ctx.save_for_backward(cos, sin, *([projection, *norms] if norms else ()))


def _gradients(ctx, grads):
    cos, sin, *normed = ctx.saved_tensors
    grad, *of_norms = _join(list(grads), cos, sin, normed, ctx.eps, ctx.sizes)
    return grad, None, None, of_norms, None, None


def _keep_join(ctx, inputs, output):
    _, cos, sin, normed, _, ctx.sizes = inputs
    ctx.normed = bool(normed)
    ctx.save_for_backward(cos, sin)


def _second_gradients(ctx, grads):
    if ctx.normed:
        refuse(ctx)
    return _split(grads[0], *ctx.saved_tensors, [], 0.0, ctx.sizes), None, None, [], None, None


# Without norms, `_split` and `_join` are linear, and each is the gradient of the other.
_split.register_autograd(_gradients, setup_context=_keep)
_join.register_autograd(_second_gradients, setup_context=_keep_join)
