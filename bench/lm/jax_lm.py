"""The language model in Flax NNX, and one step of its training with optax.

Master weights and moments are float32. Blocks, norms and head compute in `dtype`; the embedding
is looked up, and softmax and loss are computed, in float32.
"""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from bench.lm.data import Batch
from bench.lm.spec import DivergedError, ModelSpec, Task, Training
from interop import weights
from nsa_jax.layer import LayerSpec
from nsa_jax.nn import NSAAttention, apply_rope

NORM_EPS = 1e-6


class RMSNorm(nnx.Module):
    """`x / rms(x) * scale` over the last axis, in float32."""

    def __init__(self, width: int):
        self.scale = nnx.Param(jnp.ones(width))

    def __call__(self, x):
        wide = x.astype(jnp.float32)
        square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(square + NORM_EPS)).astype(x.dtype) * self.scale[...]


def _linear(size_in: int, size_out: int, dtype, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(size_in, size_out, use_bias=False, dtype=dtype, rngs=rngs)


class DenseAttention(nnx.Module):
    """Causal attention to all keys; `implementation` as in `jax.nn.dot_product_attention`."""

    def __init__(self, spec: LayerSpec, *, dtype, implementation, rngs: nnx.Rngs):
        self.spec, self.implementation = spec, implementation
        groups = spec.n_kv_groups
        self.W_Q = _linear(spec.dim, spec.n_heads * spec.d_k, dtype, rngs)
        self.W_K = _linear(spec.dim, groups * spec.d_k, dtype, rngs)
        self.W_V = _linear(spec.dim, groups * spec.d_v, dtype, rngs)
        self.out = _linear(spec.n_heads * spec.d_v, spec.dim, dtype, rngs)

    def __call__(self, x):
        spec, (batch, length, _) = self.spec, x.shape
        position = jnp.broadcast_to(jnp.arange(length), (batch, length))

        def heads(linear, count):
            return linear(x).reshape(batch, length, count, -1)

        def rotate(x):
            return apply_rope(x, position, base=spec.rope_base, scale=spec.rope_scale)

        query = rotate(heads(self.W_Q, spec.n_heads))
        key = rotate(heads(self.W_K, spec.n_kv_groups))
        value = heads(self.W_V, spec.n_kv_groups)
        out = jax.nn.dot_product_attention(
            query, key, value, is_causal=True, implementation=self.implementation
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
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, spec: ModelSpec, *, dtype, implementation, rngs: nnx.Rngs):
        how = dict(dtype=dtype, implementation=implementation, rngs=rngs)
        kind = NSAAttention if spec.attention == "nsa" else DenseAttention
        self.norm_attention = RMSNorm(spec.layer.dim)
        self.attention = kind(spec.layer, **how)
        self.norm_mlp = RMSNorm(spec.layer.dim)
        self.mlp = MLP(spec.layer.dim, spec.hidden, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm_attention(x))[0]
        return x + self.mlp(self.norm_mlp(x))


class LM(nnx.Module):
    """Logits `[B, T, vocabulary]` in `dtype` of integer tokens `[B, T]` (`ModelSpec`)."""

    def __init__(self, spec: ModelSpec, *, dtype, implementation=None):
        rngs = nnx.Rngs(0)
        self.spec, self.dtype = spec, dtype
        self.embedding = nnx.Param(jnp.zeros((spec.vocabulary, spec.layer.dim)))
        how = dict(dtype=dtype, implementation=implementation, rngs=rngs)
        self.blocks = nnx.List([Block(spec, **how) for _ in range(spec.layers)])
        self.norm = RMSNorm(spec.layer.dim)
        self.head = _linear(spec.layer.dim, spec.vocabulary, dtype, rngs)

    def hyper_parameters(self) -> dict[str, Any]:
        return self.spec.as_dict()

    def __call__(self, tokens):
        x = self.embedding[...][tokens].astype(self.dtype)
        # A scan over the blocks' weights: one block is compiled, not all of them.
        graphs, states = zip(*map(nnx.split, self.blocks), strict=True)
        stacked = jax.tree.map(lambda *each: jnp.stack(each), *states)
        x, _ = jax.lax.scan(lambda x, w: (nnx.merge(graphs[0], w)(x), None), x, stacked)
        return self.head(self.norm(x))


class Program(NamedTuple):
    """What the compiled functions are made of; learners with equal ones share them."""

    graph: nnx.GraphDef[LM]
    training: Training
    dtype: jnp.dtype

    def optimizer(self) -> optax.GradientTransformationExtraArgs:
        """AdamW without the learning rate, of the clipped gradient."""
        at = self.training
        return optax.chain(
            optax.clip_by_global_norm(at.clip),
            optax.scale_by_adam(at.beta1, at.beta2, at.eps),
            optax.add_decayed_weights(
                at.weight_decay, lambda tree: jax.tree.map(lambda x: x.ndim >= 2, tree)
            ),
        )


@functools.partial(jax.jit, static_argnames="program")
def _loss(program: Program, params, tokens):
    embedding = params["embedding"]
    params = jax.tree.map(lambda x: x.astype(program.dtype), params)
    params["embedding"] = embedding  # its gradient adds up over many tokens
    tokens = tokens.astype(jnp.int32)
    logits = nnx.merge(program.graph, params)(tokens[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@functools.partial(jax.jit, static_argnames="program", donate_argnames=("params", "state"))
def _step(program: Program, params, state, rate, tokens):
    """Weights and moments after a step, or those before it where it is not finite."""
    loss, grads = jax.value_and_grad(_loss, argnums=1)(program, params, tokens)
    norm = optax.tree.norm(grads)
    with jax.numpy_dtype_promotion("standard"):  # optax is not strict
        updates, new_state = program.optimizer().update(grads, state, params)
    updates = jax.tree.map(lambda x: -rate * x, updates)
    new = optax.apply_updates(params, updates), new_state
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (params, state))
    return *kept, jnp.stack([loss, norm])


class Learner:
    """The model, its optimizer, and both in a folder.

    Args:
      task: what to train and how.
      initial: file of `interop.weights` with the initial weights.
      implementation: of NSA, as in `nsa_jax.attention`; of dense attention "xla" or "cudnn".
    """

    def __init__(self, task: Task, initial: Path, implementation):
        self.training = task.training
        self.dtype = jnp.dtype(task.dtype)
        options = dict(dtype=self.dtype, implementation=implementation)
        # All weights come from the file: none are drawn, which would be compiled.
        self.graph, shapes = nnx.split(nnx.eval_shape(lambda: LM(task.model, **options)))
        self.params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        self.params = self._read(initial)
        self.program = Program(self.graph, task.training, self.dtype)
        self.state: Any = _committed(self.program.optimizer().init(self.params))
        self.shape: tuple[int, ...] | None = None  # of the last step's tokens

    def step(self, batch: Batch, step: int) -> tuple[float, float]:
        """Loss and gradient norm before clipping of the batch.

        Raises:
          DivergedError: one of them is not finite; weights and moments are as before.
        """
        rate = jnp.float32(self.training.rate(step))
        arguments = self.program, self.params, self.state, rate, _tokens(batch)
        with self._precision():
            self.params, self.state, numbers = _step(*arguments)
        self.shape = batch.tokens.shape
        loss, norm = map(float, np.asarray(numbers))
        if not np.isfinite([loss, norm]).all():
            raise DivergedError(step, loss, norm)
        return loss, norm

    def loss(self, batch: Batch) -> float:
        """The mean loss of a batch, in nats a token."""
        with self._precision():
            return float(_loss(self.program, self.params, _tokens(batch)))

    def parameters(self) -> int:
        """Numbers in the weights."""
        weights_only = nnx.filter_state(self.params, nnx.Param)
        return sum(x.size for x in jax.tree.leaves(weights_only))

    def peak_bytes(self) -> int | None:
        """Arguments, results and temporaries of a step, as the compiler lays them out."""
        if self.shape is None:
            return None
        tokens = jax.ShapeDtypeStruct(self.shape, jnp.uint8)
        rate = jax.ShapeDtypeStruct((), jnp.float32)
        arguments = self.program, self.params, self.state, rate, tokens
        with self._precision():
            memory = _step.lower(*arguments).compile().memory_analysis()
        if memory is None:
            return None
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes
        return int(held + memory.temp_size_in_bytes - memory.alias_size_in_bytes)

    def save(self, folder: Path) -> None:
        """Writes weights and moments, each as `interop.weights` does."""
        adam = self.state[1]
        for name, tree in (("weights", self.params), ("mean", adam.mu), ("square", adam.nu)):
            weights.save(folder / f"{name}.safetensors", nnx.merge(self.graph, tree))

    def load(self, folder: Path, step: int) -> None:
        """Reads what `save` of either framework wrote after `step` steps."""
        self.params = self._read(folder / "weights.safetensors")
        adam = self.state[1]._replace(
            count=jnp.int32(step),
            mu=self._read(folder / "mean.safetensors"),
            nu=self._read(folder / "square.safetensors"),
        )
        self.state = _committed((self.state[0], adam, *self.state[2:]))

    def _precision(self):
        # A GPU would take TF32 for float32, which torch does not.
        exact = self.dtype == jnp.float32
        return jax.default_matmul_precision("highest" if exact else None)

    def _read(self, path: Path) -> nnx.State:
        # Copies: what no file holds, as marks of a kind, may not be shared by what `_step` donates.
        module = nnx.merge(self.graph, jax.tree.map(jnp.array, self.params))
        weights.load(path, module)
        return nnx.split(module)[1]


def _tokens(batch: Batch) -> jax.Array:
    if batch.segment_ids is not None:
        raise NotImplementedError("the model attends to whole rows, got segment_ids")
    return jnp.asarray(batch.tokens)


def _committed(tree):
    """`tree` bound to its device as results of `_step` are, which is then compiled but once."""
    return jax.device_put(tree, jax.devices()[0])
