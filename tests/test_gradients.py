"""Gradients of every branch: against the float64 oracle, empty rows, causality."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import nsa_jax
from bench.judge.parity import assert_parity
from nsa_core.compress_params import MLPParams, PoolParams
from nsa_jax import reference
from nsa_jax.select import block_scores
from tests.inputs import CASES, SMALL, Case, call, problem, selection, under_a_loss_scale
from tests.limits import set_limits

# Hundreds of queries share each block: their sum must not be kept in bfloat16.
MANY = Case(600, 600, H=8, Hkv=1, B=1, dtype="bfloat16")
GRADIENT_CASES = (MANY, CASES[1], CASES[2], CASES[3], CASES[5], CASES[6], CASES[8], CASES[9])


def loss(query, key, value, gates, *, cotangent, indices, implementation, case, segments):
    options = dict(config=case.config, segment_ids=segments)
    compressed = tuple(nsa_jax.compress(x, **options) for x in (key, value))
    out = nsa_jax.attention(
        query,
        key,
        value,
        gates,
        compressed=compressed,
        block_indices=indices,
        implementation=implementation,
        **options,
    )
    return (out.astype(cotangent.dtype) * cotangent).sum()


@pytest.mark.parametrize("case", GRADIENT_CASES, ids=str)
def test_backward_parity(case, rng):
    """dQ, dK, dV and the gates' gradients of `xla`, indices frozen, against float64."""
    p = problem(case)
    key = call(nsa_jax.compress, p.key, config=case.config, segment_ids=p.segment_ids)
    indices = selection(p.query, key, **p.where)
    # Small cotangents keep the absolute float32 limit meaningful.
    cotangent = 0.1 * rng.normal(size=(*p.query.shape[:3], case.Dv))
    arrays = (p.query, p.key, p.value, p.gates)

    def gradients(dtype, implementation):
        options = dict(
            cotangent=jnp.asarray(cotangent, jnp.float32 if dtype != "float64" else dtype),
            indices=indices,
            implementation=implementation,
            case=case,
            segments=p.segment_ids,
        )
        wide = [jnp.asarray(np.asarray(x), dtype) for x in arrays]
        grads = call(jax.grad(functools.partial(loss, **options), (0, 1, 2, 3)), *wide)
        return [np.asarray(g) for g in grads]

    with jax.enable_x64(True):
        exact = gradients("float64", "reference")
    low = gradients(case.dtype, "reference")
    fast = gradients(case.dtype, "xla")
    names = ("query", "key", "value", "gates")
    for name, got, want, rough in zip(names, fast, exact, low, strict=True):
        assert_parity(f"d{name}", got, want, rough, dtype=case.dtype)


@pytest.mark.parametrize("blocks", [False, True], ids=["attention", "block_attention"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_under_a_loss_scale(dtype, blocks):
    """dO . V is beyond float16, and no gradient that is asked for."""
    query, key, value, gates, do = under_a_loss_scale()

    def gradients(dtype, implementation):
        def run(*tensors):
            if not blocks:
                options = {"config": SMALL, "implementation": implementation}
                return nsa_jax.attention(*tensors, jnp.asarray(gates, dtype), **options)
            lists = jnp.zeros((1, 40, 1, 1), jnp.int32)
            options = {"block_size": 40, "implementation": implementation}
            return nsa_jax.block_attention(*tensors, lists, **options)

        _, pull = jax.vjp(run, *(jnp.asarray(x, dtype) for x in (query, key, value)))
        return [np.asarray(x, np.float32) for x in pull(jnp.asarray(do / 3**blocks, dtype))]

    for got, want in zip(
        gradients(dtype, "xla"), gradients("float32", "reference"), strict=True
    ):
        assert np.abs(got - want).max() < 0.02 * np.abs(want).max()


@pytest.mark.parametrize("budget", [1, 20_000])
def test_backward_parity_of_chunks(budget, monkeypatch, rng):
    """Any chunk size gives the gradients of one chunk, also when the last is not full."""
    p = problem(Case(63, 75))
    cotangent = jnp.asarray(rng.normal(size=p.query.shape), jnp.float32)
    key = call(nsa_jax.compress, p.key, config=SMALL)
    indices = call(nsa_jax.select_blocks, p.query, key, **p.where)
    options = dict(cotangent=cotangent, indices=indices, case=p.case, segments=None)
    run = functools.partial(loss, implementation="xla", **options)
    arrays = (p.query, p.key, p.value, p.gates)
    whole = call(jax.grad(run, (0, 1, 2, 3)), *arrays)
    set_limits(monkeypatch, jax_chunk_bytes=budget)
    in_chunks = call(jax.grad(run, (0, 1, 2, 3)), *arrays)
    chex.assert_trees_all_close(in_chunks, whole, rtol=0, atol=5e-6)


@pytest.mark.parametrize("kind", ["mean", "pool", "mlp"])
def test_gradcheck(kind, rng):
    """Finite differences in float64 through compression, three branches and gates."""
    config = nsa_jax.NSAConfig(4, 2, 8, 3, 1, 1, 5)
    with jax.enable_x64(True):
        normal = lambda *shape: jnp.asarray(rng.normal(size=shape) * 0.5)
        params = {
            "mean": None,
            "pool": PoolParams(normal(4, 2)),
            "mlp": MLPParams(normal(4, 2), normal(8, 3), normal(3), normal(3, 2), normal(2)),
        }[kind]
        arrays = (
            normal(1, 19, 2, 2),
            normal(1, 19, 1, 2),
            normal(1, 19, 1, 2),
            normal(1, 19, 2, 3),
        )
        small = call(nsa_jax.compress, arrays[1], params, config=config)
        indices = call(nsa_jax.select_blocks, arrays[0], small, config=config)

        def whole(query, key, value, gates, params):
            compressed = tuple(nsa_jax.compress(x, params, config=config) for x in (key, value))
            return nsa_jax.attention(
                query,
                key,
                value,
                gates,
                config=config,
                compressed=compressed,
                block_indices=indices,
                implementation="xla",
            )

        check_grads(jax.jit(whole), (*arrays, params), order=1, modes=["rev"], eps=1e-5)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_rows_without_keys_have_no_gradient(implementation):
    """`t < l - 1` of the compressed branch, `window=0`, padding: exact zeros, never NaN."""
    case = Case(40, 40, B=1, segments=(24, 6, -10))
    p = problem(case)
    key = call(nsa_jax.compress, p.key, config=SMALL, segment_ids=p.segment_ids)
    indices = selection(p.query, key, **p.where)
    options = dict(indices=indices, case=case, segments=p.segment_ids)
    options |= dict(implementation=implementation, cotangent=jnp.ones((1, 40, 4, 16)))
    grads = call(
        jax.grad(functools.partial(loss, **options), (0, 1, 2)),
        p.query,
        p.key,
        p.value,
        p.gates,
    )
    chex.assert_tree_all_finite(grads)
    for grad in map(np.asarray, grads):
        assert grad[:, :30].any() and (grad[:, 30:] == 0).all()
    off = nsa_jax.NSAConfig(8, 4, 16, 4, window=0)

    def total(query):
        where = {"config": off, "implementation": implementation}
        return nsa_jax.sliding_attention(query, p.key, p.value, **where)[0].sum()

    grad = call(jax.grad(total), p.query)
    assert (np.asarray(grad) == 0).all()


def test_causality_of_gradients():
    """The gradient of output `u` is exactly zero at every later input."""
    p = problem(Case(63, 63))

    def total(key, value, token):
        return nsa_jax.attention(p.query, key, value, p.gates, config=SMALL)[:, token].sum()

    gradient = jax.jit(jax.grad(total, (0, 1)))
    for token in (0, 31, 50):
        for grad in map(np.asarray, gradient(p.key, p.value, token)):
            assert (grad[:, token + 1 :] == 0).all()
            assert grad[:, token].any() or token == 0


def test_no_gradient_through_selection():
    p = problem(Case(63, 63))
    key = call(nsa_jax.compress, p.key, config=SMALL)
    grad = call(jax.grad(lambda q: block_scores(q, key, config=SMALL).sum()), p.query)
    assert (np.asarray(grad) == 0).all()


def test_gradients_of_a_packed_batch_add_in_one_order():
    """No scatter adds floats, which a GPU does in any order; a token's sum is in float32."""
    case = Case(90, 90, B=1, H=2, Hkv=2, dtype="bfloat16", segments=(37, 1, 40, -12))
    p = problem(case)
    options = {"config": case.config, "segment_ids": p.segment_ids}

    def pulled(compress, key):
        out, pull = jax.vjp(lambda x: compress(x, **options), key)
        wave = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return out, pull(wave.astype(jnp.bfloat16).astype(out.dtype))[0]

    text = str(jax.make_jaxpr(functools.partial(pulled, nsa_jax.compress))(p.key))
    assert "scatter-add" not in text
    wide = p.key.astype(jnp.float32)
    expected = call(functools.partial(pulled, reference.compress), wide)
    found = call(functools.partial(pulled, nsa_jax.compress), wide)
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)
    _, got = call(functools.partial(pulled, nsa_jax.compress), p.key)
    np.testing.assert_allclose(got.astype(jnp.float32), expected[1], atol=2.0**-8)
