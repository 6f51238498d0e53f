# %% [markdown]
# # NSA in your own JAX model
# This tutorial puts `nsa_jax.attention` into a model in plain JAX, and trains it under
# `jax.shard_map`. One mesh axis splits the rows of a batch, the other axis splits the tokens of
# each row. The tutorial needs the extras `train` and `bench`. Without GPUs it runs on four virtual
# devices.

# %%
import functools
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import nsa_jax
from nsa_jax.context import shard_positions, shard_sequence

count = min(4, 1 << (jax.device_count().bit_length() - 1))  # a power of two
parts = max(1, count // 2)
mesh = jax.make_mesh(
    (count // parts, parts), ("data", "context"), devices=jax.devices()[:count]
)
by_token = PartitionSpec("data", "context")
small = jax.default_backend() == "cpu"
length, batch_size, steps = (128, 2, 10) if small else (8192, 4, 200)
dim, heads, kv_heads, width = (32, 4, 2, 8) if small else (512, 8, 1, 64)
config = nsa_jax.NSAConfig()
if small:
    config = nsa_jax.NSAConfig(compress_block=8, compress_stride=4, select_block=16, window=16)
print(mesh)

# %% [markdown]
# ## Model
# The model is one block of attention and an MLP over bytes. Only `attention` communicates with
# other devices, along `context_axis`. Positions must be those of the whole sequence. On a GPU the
# model computes in bfloat16 with weights in float32.


# %%
def initial(key):
    shapes = {
        "embed": (256, dim),
        "position": (length, dim),
        "query": (dim, heads, width),
        "key": (dim, kv_heads, width),
        "value": (dim, kv_heads, width),
        "gates": (dim, heads, 3),
        "out": (heads, width, dim),
        "up": (dim, 4 * dim),
        "down": (4 * dim, dim),
    }
    keys = jax.random.split(key, len(shapes))
    draw = lambda key, shape: jax.random.normal(key, shape) * shape[0] ** -0.5
    return dict(zip(shapes, map(draw, keys, shapes.values()), strict=True))


def norm(x):
    square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(square + 1e-6).astype(x.dtype)


def loss(params, tokens, labels, position, **context):
    """The mean loss of these tokens. Labels of padding are -1."""
    dtype = jnp.float32 if small else jnp.bfloat16
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    x = params["embed"][tokens] + params["position"][position]
    q, k, v, gates = (
        jnp.einsum("btd,dhw->bthw", norm(x), params[name])
        for name in ("query", "key", "value", "gates")
    )
    gates = jax.nn.sigmoid(gates)
    mixed = nsa_jax.attention(q, k, v, gates, config=config, **context)
    x = x + jnp.einsum("bthw,hwd->btd", mixed, params["out"])
    x = x + jax.nn.silu(norm(x) @ params["up"]) @ params["down"]
    logits = (norm(x) @ params["embed"].T).astype(jnp.float32)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
    return each.mean(where=labels >= 0)


# %% [markdown]
# ## Loss on the mesh
# Inside `shard_map` each device has its own rows and tokens. The loss is the mean over the devices.
# JAX sums the gradients of the replicated parameters over the devices.


# %%
@functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(PartitionSpec(), by_token, by_token),
    out_specs=PartitionSpec(),
)
def sharded_loss(params, tokens, labels):
    position = shard_positions(tokens.shape[1], context_axis="context")
    local = loss(params, tokens, labels, position, context_axis="context")
    return jax.lax.pmean(local, ("data", "context"))


# %% [markdown]
# ## Data
# `shard_sequence` reorders the tokens so that each device gets an equal amount of work.

# %%
files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]
text = np.frombuffer(b"".join(x.read_bytes() for x in files), np.uint8).astype(np.int32)
random = np.random.default_rng(0)


def rows():
    start = random.integers(0, len(text) - length - 1, (batch_size, 1))
    found = text[start + np.arange(length + 1)]
    return found[:, :-1], found[:, 1:]


def sharded(x):
    return jax.device_put(shard_sequence(x, parts), NamedSharding(mesh, by_token))


# %% [markdown]
# ## Train
# Up to rounding, the first loss on the mesh equals the loss on a single device.

# %%
params = initial(jax.random.key(0))
optimizer = optax.adamw(3e-3)
state = optimizer.init(params)


@jax.jit
def step(params, state, tokens, labels):
    value, grads = jax.value_and_grad(sharded_loss)(params, tokens, labels)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


batches = [rows() for _ in range(steps)]
one_device = jax.jit(loss)(params, *batches[0], jnp.arange(length)[None])
losses = []
for batch in batches:
    params, state, value = step(params, state, *map(sharded, batch))
    losses.append(float(value))
print(f"first loss on one device {one_device:.5f}, on the mesh {losses[0]:.5f}")

plt.figure(figsize=(6, 3))
plt.plot(losses)
plt.xlabel("step")
plt.ylabel("loss, nats per byte")
plt.show()

# %% [markdown]
# [One sequence on several devices](../context_parallel.md) describes layouts, packed rows and
# the communication.
