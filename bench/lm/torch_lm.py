"""The language model in torch, which is the counterpart of `jax_lm`.

The model computes the same function as `jax_lm`. Blocks, norms and head compute in the dtype of
their weights. The embedding is looked up in float32, and softmax and loss are computed in
float32.
"""

import functools
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa_core.layer import LayerSpec
from nsa_interop import weights
from nsa_torch import heads
from nsa_torch.key_convolution import KeyConvolution
from nsa_torch.module import NSAAttention
from nsa_torch.varlen import VarlenMetadata

from . import selection
from .spec import ModelSpec

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


class Packing(NamedTuple):
    """The positions of the documents in rows `[B, T]`. Token positions restart in each
    document.
    """

    varlen: VarlenMetadata  # boundaries of the documents of all rows, one row after the other
    segment: Tensor  # int32 [B, T]
    position: Tensor  # int64 [B, T]
    counted: (
        Tensor  # bool [B, T]: the next token belongs to the same document, and is no padding
    )


class RMSNorm(nn.Module):
    """`x / rms(x) * scale` over the last axis, in float32."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.scale, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.scale.shape, eps=self.eps) * self.scale


def _linear(size_in: int, size_out: int) -> nn.Linear:
    return nn.Linear(size_in, size_out, bias=False)


class DenseAttention(nn.Module):
    """Causal attention to all keys with `scaled_dot_product_attention` and a backend of
    `BACKENDS`. The backend None means that torch chooses a backend."""

    def __init__(self, spec: LayerSpec, backend: str | None):
        super().__init__()
        self.spec = spec
        self.backends = list(BACKENDS.values()) if backend is None else [BACKENDS[backend]]
        self.W_Q = _linear(spec.dim, spec.n_heads * spec.d_k)
        self.W_K = _linear(spec.dim, spec.n_kv_groups * spec.d_k)
        self.W_V = _linear(spec.dim, spec.n_kv_groups * spec.d_v)
        self.out = _linear(spec.n_heads * spec.d_v, spec.dim)
        if spec.key_taps is not None:
            self.key_conv = KeyConvolution(spec.key_taps, self.W_K.out_features)

    def forward(self, x: Tensor, packing: Packing | None = None) -> tuple[Tensor, None]:
        position = torch.arange(x.shape[1], device=x.device).expand(*x.shape[:2])
        if packing is not None:
            position = packing.position
        query, key, value, _ = self.project(x, position)
        return self.out(self.attend(query, key, value, packing).flatten(2)), None

    def project(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Compute `query, key, value` from `x` `[B, T, dim]`. The fourth result, which is gates in
        NSA, is None.
        """
        convolve = None
        if self.spec.key_taps is not None:
            convolve = functools.partial(self.key_conv, position=position)
        layers = self.W_Q, [self.W_K], [self.W_V]
        query, (key,), (value,), *_ = heads.project(
            x, *layers, position, self.spec, convolve=convolve
        )
        return query, key, value, None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, packing: Packing | None = None):
        """Return the output of attention, `[B, T, H, d_v]`."""
        if packing is not None and query.is_cuda and self.backends == [BACKENDS["flash"]]:
            return self._varlen(query, key, value, packing)
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        how: dict[str, Any] = {"is_causal": packing is None}
        if packing is not None:
            same = packing.segment[:, None, :, None] == packing.segment[:, None, None]
            how["attn_mask"] = same.tril()
        with sdpa_kernel(self.backends):
            out = F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **how)
        return out.transpose(1, 2)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
        """Compute attention of documents from their boundaries. No mask is used, since the size of
        a mask would be the square of the length.
        """
        from torch.nn.attention.varlen import varlen_attn

        group = self.spec.n_heads // self.spec.n_kv_groups
        rows, bounds = query.shape[:2], packing.varlen.cu_seqlens
        longest = rows[1]  # an upper bound, for which the host reads no value from the device
        key, value = (each.repeat_interleave(group, dim=2) for each in (key, value))
        query, key, value = (each.flatten(0, 1) for each in (query, key, value))
        window = {"window_size": (-1, 0)}  # causal
        out = varlen_attn(query, key, value, bounds, bounds, longest, longest, **window)
        assert isinstance(out, Tensor)
        return out.unflatten(0, rows)


class MLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate, self.up = _linear(dim, hidden), _linear(dim, hidden)
        self.down = _linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, spec: ModelSpec, implementation, number: int = 0):
        super().__init__()
        self.norm_attention = RMSNorm(spec.layer.dim, spec.norm_eps)
        if spec.attention == "dense":
            self.attention = DenseAttention(spec.layer, implementation or "math")
        elif spec.is_dense(number):
            self.attention = DenseAttention(spec.layer, None)
        else:
            options = spec.layer.as_dict() | spec.layer.start()
            self.attention = NSAAttention(**options, implementation=implementation)
        self.spec = spec
        # further losses of the last forward pass with gradients
        self.losses: list[Tensor] = []
        self.norm_mlp = RMSNorm(spec.layer.dim, spec.norm_eps)
        self.mlp = MLP(spec.layer.dim, spec.hidden)

    def forward(self, x: Tensor, packing: Packing | None = None) -> Tensor:
        x = x + self._attend(self.norm_attention(x), packing)
        return x + self.mlp(self.norm_mlp(x))

    def _attend(self, x: Tensor, packing: Packing | None) -> Tensor:
        attention, spec = self.attention, self.spec
        if packing is None:
            trains = torch.is_grad_enabled() and isinstance(attention, NSAAttention)
            if trains and spec.selection_loss:
                self.losses.append(spec.selection_loss * selection.loss(attention, x))
            return attention(x)[0]
        if spec.selection_loss:
            raise NotImplementedError(
                f"selection_loss must be 0 for packed rows, got {spec.selection_loss}"
            )
        if isinstance(attention, DenseAttention):
            return attention(x, packing)[0]
        flat = x.flatten(0, 1)[None]
        return attention(flat, varlen=packing.varlen)[0].view_as(x)


class LM(nn.Module):
    """The model, from integer tokens `[B, T]` to logits `[B, T, vocabulary]` in the dtype of
    the head.
    """

    def __init__(self, spec: ModelSpec, implementation=None):
        super().__init__()
        self.spec = spec
        self.embedding = nn.Parameter(torch.zeros(spec.vocabulary, spec.layer.dim))
        self.blocks = nn.ModuleList(Block(spec, implementation, i) for i in range(spec.layers))
        self.norm = RMSNorm(spec.layer.dim, spec.norm_eps)
        self.head = _linear(spec.layer.dim, spec.vocabulary)

    def hyper_parameters(self) -> dict[str, Any]:
        return self.spec.as_dict()

    def forward(self, tokens: Tensor, packing: Packing | None = None) -> Tensor:
        x = F.embedding(tokens, self.embedding).to(self.head.weight.dtype)
        for block in self.blocks:
            x = block(x, packing)
        return self.head(self.norm(x))


def initialize(path: Path, spec: ModelSpec, seed: int) -> None:
    """Write the initial weights of `spec` for both frameworks to the file at `path`.

    Matrices are drawn from a normal distribution. The standard deviation is torch's default,
    `1 / sqrt(3 inputs)` (0.021 for 768 inputs). For matrices whose output is added to the residual
    stream, the standard deviation is divided by `sqrt(2 layers)`. The standard deviation of the
    embedding is 0.02. Gates, `phi` and vectors start as in their modules. A matrix depends only on
    `seed`, its name and its shape. NSA and dense attention therefore start with equal values in
    matrices with equal names. With a standard deviation of 0.02 at every width, the tiny model
    learns markedly slower with NSA than with dense attention.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = LM(spec)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim < 2 or ".attention.gate." in name or ".phi_" in name:
                continue
            deviation = 1 / math.sqrt(3 * parameter.shape[-1])
            if name == "embedding":
                deviation = 0.02
            elif name.endswith((".out.weight", ".down.weight")):
                deviation /= math.sqrt(2 * spec.layers)
            values = np.random.default_rng([seed, *name.encode()])
            drawn = values.standard_normal(tuple(parameter.shape), np.float32)
            parameter.copy_(torch.from_numpy(drawn * np.float32(deviation)))
    weights.save(path, module)
