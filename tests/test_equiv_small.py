"""Where a branch covers everything it is plain causal attention, written here on its own."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import nsa_jax
from bench.judge.parity import FLOAT32_MAX
from tests.inputs import SMALL, Case, call, problem

CASE = Case(61, 61, H=6, Hkv=2, D=8, Dv=5)


def causal_attention(query, key, value, window=None):
    """float64 NumPy, one query at a time."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    group = query.shape[2] // key.shape[2]
    out = np.zeros((*query.shape[:3], value.shape[3]))
    for b, t, h in np.ndindex(query.shape[:3]):
        first = 0 if window is None else max(0, t - window + 1)
        keys, values = key[b, first : t + 1, h // group], value[b, first : t + 1, h // group]
        logits = keys @ query[b, t, h] / np.sqrt(query.shape[3])
        weights = np.exp(logits - logits.max())
        out[b, t, h] = weights @ values / weights.sum()
    return out


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("branch", nsa_jax.Branches._fields)
def test_equiv_small(branch, implementation):
    """One open gate: the window reaches back to the start, all blocks are selected, or every
    token is its own compressed token."""
    config = {
        "compressed": nsa_jax.NSAConfig(1, 1, 1, 3),
        "selected": dataclasses.replace(SMALL, num_selected=4),
        "sliding": dataclasses.replace(SMALL, window=61),
    }[branch]
    p = problem(CASE)
    gates = jnp.zeros_like(p.gates).at[..., nsa_jax.Branches._fields.index(branch)].set(1)
    out = call(
        nsa_jax.attention,
        p.query,
        p.key,
        p.value,
        gates,
        config=config,
        implementation=implementation,
    )
    exact = causal_attention(p.query, p.key, p.value)
    np.testing.assert_allclose(np.asarray(out), exact, rtol=0, atol=FLOAT32_MAX)


def test_equiv_small_window():
    p = problem(CASE)
    out, _ = call(nsa_jax.sliding_attention, p.query, p.key, p.value, config=SMALL)
    exact = causal_attention(p.query, p.key, p.value, window=SMALL.window)
    np.testing.assert_allclose(np.asarray(out), exact, rtol=0, atol=FLOAT32_MAX)
    wrong = causal_attention(p.query, p.key, p.value, window=SMALL.window + 1)
    assert np.abs(np.asarray(out) - wrong).max() > 0.1
