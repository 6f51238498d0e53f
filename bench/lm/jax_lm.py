"""The language model in Flax NNX.

Blocks, norms and head compute in the dtype of the model. The embedding is looked up in float32,
and softmax and loss are computed in float32.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nsa_core.layer import LayerSpec
from nsa_jax import api
from nsa_jax.api import varlen_metadata
from nsa_jax.nn import KeyConvolution, NSAAttention

from . import jax_parallel
from .spec import TORCH_ONLY, ModelSpec


class RMSNorm(nnx.Module):
    """`x / rms(x) * scale` over the last axis, in float32."""

    def __init__(self, width: int, eps: float):
        self.scale, self.eps = nnx.Param(jnp.ones(width)), eps

    def __call__(self, x):
        wide = x.astype(jnp.float32)
        square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(square + self.eps)).astype(x.dtype) * self.scale[...]


def _linear(size_in: int, size_out: int, dtype, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(size_in, size_out, use_bias=False, dtype=dtype, rngs=rngs)


class DenseAttention(nnx.Module):
    """Causal attention to all keys. `implementation` is an argument of
    `jax.nn.dot_product_attention`."""

    project: Any = NSAAttention.project

    def __init__(self, spec: LayerSpec, *, dtype, implementation, rngs: nnx.Rngs):
        # This spec makes `project` compute one key and value for all branches, and no gates.
        self.spec = dataclasses.replace(
            spec, kv="shared", gate="selected", gate_hidden=None, gate_bias=None, phi="avg"
        )
        self.implementation = implementation
        groups = spec.n_kv_groups
        self.W_Q = _linear(spec.dim, spec.n_heads * spec.d_k, dtype, rngs)
        self.W_K = _linear(spec.dim, groups * spec.d_k, dtype, rngs)
        self.W_V = _linear(spec.dim, groups * spec.d_v, dtype, rngs)
        self.out = _linear(spec.n_heads * spec.d_v, spec.dim, dtype, rngs)
        if spec.key_taps is not None:
            columns = groups * spec.d_k
            self.key_conv = KeyConvolution(spec.key_taps, columns, jnp.float32, rngs)

    def __call__(self, x, *, segment_ids=None):
        batch, length, _ = x.shape
        position = jnp.broadcast_to(jnp.arange(length), (batch, length))
        how: dict[str, Any] = {"is_causal": True}
        if segment_ids is not None:
            border = segment_ids[:, 1:] != segment_ids[:, :-1]
            start = jnp.where(jnp.pad(border, ((0, 0), (1, 0))), position, 0)
            same = segment_ids[:, None, :, None] == segment_ids[:, None, None]
            how["mask"] = same
            position = position - jax.lax.cummax(start, axis=1)

        query, key, value, _ = self.project(x, position)
        out = jax.nn.dot_product_attention(
            query, key.selected, value.selected, implementation=self.implementation, **how
        )
        return self.out(out.reshape(batch, length, -1)), None


class MLP(nnx.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, dim: int, hidden: int, *, dtype, rngs: nnx.Rngs):
        self.gate, self.up = (_linear(dim, hidden, dtype, rngs) for _ in range(2))
        self.down = _linear(hidden, dim, dtype, rngs)

    def __call__(self, x):
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`.

    If `axis` of a mesh divides the heads, each device has some heads. The outputs of attention and
    MLP are summed over the axis.
    """

    def __init__(
        self, spec: ModelSpec, *, dtype, implementation, rngs: nnx.Rngs, axis: str | None = None
    ):
        self.axis = axis
        how = dict(dtype=dtype, implementation=implementation, rngs=rngs)
        kind = NSAAttention if spec.attention == "nsa" else DenseAttention
        self.norm_attention = RMSNorm(spec.layer.dim, spec.norm_eps)
        self.attention = kind(spec.layer, **how)
        self.norm_mlp = RMSNorm(spec.layer.dim, spec.norm_eps)
        self.mlp = MLP(spec.layer.dim, spec.hidden, dtype=dtype, rngs=rngs)

    def __call__(self, x, **packed: Any):
        """Apply the block to `x`. `packed` has the arguments of attention for packed rows."""
        x = x + self._sum(self.attention(self.norm_attention(x), **packed)[0])
        return x + self._sum(self.mlp(self.norm_mlp(x)))

    def _sum(self, x):
        return x if self.axis is None else jax.lax.psum(x, self.axis)

    def observe(self, x):
        """Return the gates `[T, gate_heads, 3]` and the block indices `[T, n_kv_groups, n]` of the
        layer for `x` [1, T, dim].
        """
        attention, spec = self.attention, self.attention.spec
        assert isinstance(attention, NSAAttention)
        position = jnp.arange(x.shape[1])[None]
        query, key, _, gates = attention.project(self.norm_attention(x), position)
        compressed = api.compress(
            key.compressed, attention.compress_params()[0], config=spec.config
        )
        indices = api.select_blocks(query, compressed, config=spec.config, implementation="xla")
        return gates[0, :, :: spec.n_heads // spec.gate_heads], indices[0]


class LM(nnx.Module):
    """The model of a `ModelSpec`, which maps integer tokens `[B, T]` to logits `[B, T,
    vocabulary]` in `dtype`."""

    def __init__(self, spec: ModelSpec, *, dtype, implementation=None, axis: str | None = None):
        for name in TORCH_ONLY:
            if getattr(spec, name):
                raise NotImplementedError(
                    f"{name} must be 0 for the JAX model, got {getattr(spec, name)!r}"
                )
        rngs = nnx.Rngs(0)
        self.spec, self.dtype = spec, dtype
        self.embedding = nnx.Param(jnp.zeros((spec.vocabulary, spec.layer.dim)))
        how = dict(dtype=dtype, implementation=implementation, rngs=rngs)
        self.blocks = nnx.List([Block(spec, axis=axis, **how) for _ in range(spec.layers)])
        self.norm = RMSNorm(spec.layer.dim, spec.norm_eps)
        self.head = _linear(spec.layer.dim, spec.vocabulary, dtype, rngs)

    def hyper_parameters(self) -> dict[str, Any]:
        return self.spec.as_dict()

    def __call__(
        self,
        tokens,
        segment_ids=None,
        prepare=lambda stored: stored,
        again: bool = False,
        max_segments: int | None = None,
    ):
        """Return the logits.

        Args:
          tokens: Integers `[B, T]`.
          segment_ids: int32 `[B, T]`, the document of each token. `segment_ids=None` means one
            sequence per row.
          prepare: Function that computes the weights of a block from the stored weights when the
            block runs.
          again: Whether the backward pass calls the function `prepare` again, instead of storing
            the results of `prepare`.
          max_segments: See `varlen_metadata`.
        """
        x = self.embedding[...][tokens].astype(self.dtype)
        graphs, states = zip(*map(nnx.split, self.blocks), strict=True)
        packed: dict[str, Any] = {}
        if segment_ids is not None and self.spec.attention == "nsa":
            # The metadata is built once here, so that neither the blocks nor their backward
            # passes build it.
            limit = {"max_segments": max_segments}
            packed["varlen"] = varlen_metadata(
                segment_ids, config=self.spec.layer.config, **limit
            )
        elif segment_ids is not None:
            packed["segment_ids"] = segment_ids

        def block(x, stored):
            return nnx.merge(graphs[0], prepare(stored))(x, **packed)

        if again:
            block = jax.checkpoint(block, policy=jax_parallel.KEEP)
        # The loop is no scan. A scan would copy the data for the backward pass into arrays of all
        # blocks, which doubles the memory of a step.
        for stored in states:
            x = block(x, stored)
        return self.head(self.norm(x))

    def observe(self, tokens):
        """Call `Block.observe` for every block, with `tokens` [1, T]."""
        x, found = self.embedding[...][tokens].astype(self.dtype), []
        for block in self.blocks:
            found.append(block.observe(x))
            x = block(x)
        return jax.tree.map(lambda *each: jnp.stack(each), *found)
