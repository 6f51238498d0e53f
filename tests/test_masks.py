"""Which keys each query of each branch sees, measured by gradients, against the rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nsa_jax
from tests.inputs import SMALL, Case, problem

T, S = 23, 70


def seen(function, value):
    """`[T, rows]`: whether query `t` has a gradient to value row `s`."""
    jacobian = jax.jit(jax.jacrev(lambda v: function(v)[0][0, :, 0, 0]))(value)
    return np.asarray(jacobian[:, 0, :, 0, 0] != 0)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_masks(implementation):
    p = problem(Case(T, S, H=1, Hkv=1, D=4, Dv=2, B=1))
    options = dict(config=SMALL, implementation=implementation)
    position = np.arange(T) + S - T
    token, block = np.arange(S), np.arange(S) // SMALL.select_block
    small = tuple(nsa_jax.compress(x, config=SMALL) for x in (p.key, p.value))
    indices = jnp.asarray([[[[0, 2, 3, -1]] if t % 2 else [[1, 3, 4, -1]] for t in range(T)]])
    indices = indices.astype(jnp.int32)

    sliding = seen(lambda v: nsa_jax.sliding_attention(p.query, p.key, v, **options), p.value)
    reach = token > position[:, None] - SMALL.window
    np.testing.assert_array_equal(sliding, (token <= position[:, None]) & reach)

    selected = seen(
        lambda v: nsa_jax.selected_attention(p.query, p.key, v, indices, **options), p.value
    )
    chosen = (np.asarray(indices)[0, :, 0, :, None] == block).any(axis=1)
    np.testing.assert_array_equal(selected, (token <= position[:, None]) & chosen)

    compressed = seen(
        lambda v: nsa_jax.compressed_attention(p.query, small[0], v, kv_len=S, **options),
        small[1],
    )
    end = np.arange(small[0].shape[1]) * SMALL.compress_stride + SMALL.compress_block - 1
    np.testing.assert_array_equal(compressed, end <= position[:, None])
