"""Packed rows of JAX whose metadata bounds the runs: Mosaic kernels by places of sequences, in the
interpreter with its race detector, beside the reference.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nsa_jax
from kernels_pallas.mosaic.capability import HOPPER
from nsa_core import varlen
from nsa_core.config import NSAConfig
from nsa_core.varlen import Capacity
from nsa_jax import jax_problem
from nsa_jax.jax_ops import JAX_OPS

CONFIG = NSAConfig(4, 2, 16, num_selected=2, num_local=1, window=7)
IDS = [[-1] * 3 + [0] * 33 + [-1] * 2 + [1] * 6]
S = len(IDS[0])


def leaves():
    """Query, key, value, gates."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(1, S, n, 16) for n in (2, 1, 1)] + [(1, S, 2, 3)]
    return [jax.random.normal(k, x, jnp.bfloat16) for k, x in zip(keys, shapes, strict=True)]


def metadata():
    ids = jnp.array(IDS, jnp.int32)
    return nsa_jax.varlen_metadata(ids, max_segments=4, max_seqlen=33, config=CONFIG)


def select(how, query, key):
    packed = {"config": CONFIG, "varlen": metadata()}
    compressed = nsa_jax.compress(key, **packed)
    return nsa_jax.select_blocks(query, compressed, **packed, implementation=how)


def close(one, other):
    for x, y in zip(one, other, strict=True):
        x, y = (np.asarray(each, np.float32) for each in (x, y))
        assert np.sqrt(np.mean((x - y) ** 2)) <= 1e-2 * np.sqrt(np.mean(y**2))


def test_selection(interpreted):
    query, key, *_ = leaves()
    np.testing.assert_array_equal(select("mosaic", query, key), select("reference", query, key))


@pytest.mark.parametrize("branch", ["compressed", "selected"])
def test_gradients_of_keys(branch, interpreted):
    """Of the means, in slots, and of tokens, by places."""
    query, key, value, _ = leaves()
    options = {"config": CONFIG, "varlen": metadata()}
    indices = select("reference", query, key) if branch == "selected" else None
    if branch == "compressed":
        key, value = (nsa_jax.compress(x, **options) for x in (key, value))

    def total(how, key, value):
        attend = getattr(nsa_jax, f"{branch}_attention")
        slots = [] if indices is None else [indices]
        out, _ = attend(query, key, value, *slots, **options, implementation=how)
        return jnp.square(out.astype(jnp.float32)).sum()

    gradients = jax.jit(jax.grad(total, argnums=(1, 2)), static_argnums=0)
    close(gradients("mosaic", key, value), gradients("reference", key, value))


@pytest.mark.gpu
@pytest.mark.skipif(jax_problem.capability() != HOPPER, reason="needs a Hopper GPU")
def test_attention_on_gpu():
    inputs = leaves()
    indices = select("mosaic", *inputs[:2])

    def total(how, inputs):
        options = {"config": CONFIG, "varlen": metadata(), "implementation": how}
        out = nsa_jax.attention(*inputs, **options, block_indices=indices)
        return jnp.square(out.astype(jnp.float32)).sum()

    gradients = jax.jit(jax.grad(total, argnums=1), static_argnums=0)
    close(gradients("mosaic", inputs), gradients("reference", inputs))


@pytest.mark.parametrize(
    ("segments", "longest", "fits"),
    [(5, 33, True), (4, 33, True), (3, 33, False), (4, 32, False)],
)
def test_where_there_is_no_room_all_is_padding(segments, longest, fits):
    capacity = Capacity(1, S, S, segments - 1, longest, CONFIG)
    ids = jnp.array(IDS, jnp.int32)
    sequences = varlen.sequences_of_segments(JAX_OPS, ids, capacity)
    tokens = varlen.tokens(JAX_OPS, sequences, capacity)
    position = [*[-1] * 3, *range(33), -1, -1, *range(6)] if fits else [-1] * S
    assert tokens.position[0].tolist() == position
    first, end = varlen.key_tiles(JAX_OPS, sequences, capacity)
    assert int((jnp.minimum(end, first + 64) - first).clip(0, None).sum()) == S
