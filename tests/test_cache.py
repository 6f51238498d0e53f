"""Prefill, chunks and single tokens through the cache: the same numbers and indices."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nsa_jax
from bench.judge.parity import FLOAT32_MAX, assert_parity
from nsa_core.compress_params import MLPParams, PoolParams, RopeMLPParams
from tests import loops
from tests.inputs import SMALL, Case, call, problem

CASE = Case(63, 63, H=6, Hkv=2, D=8, Dv=5)
SPLITS = {"whole": [63], "chunks": [20, 1, 30, 12], "tokens": [1] * 63}


def phi(kind, rng, width):
    if kind == "mean":
        return None
    if kind == "pool":
        return PoolParams(jnp.asarray(rng.normal(size=(8, width)), jnp.float32))
    shapes = ((8, width), (8 * width, 12), (12,), (12, width), (width,))
    arrays = [jnp.asarray(rng.normal(size=s) * 0.3, jnp.float32) for s in shapes]
    if kind == "rope" and width % 2 == 0:
        return RopeMLPParams(*arrays, jnp.asarray(10.0 ** -np.arange(width // 2), jnp.float32))
    return MLPParams(*arrays)


def decode(p, sizes, step, cache):
    outs, begin = [], 0
    for size in sizes:
        part = slice(begin, begin + size)
        out, cache = step(
            p.query[:, part], p.key[:, part], p.value[:, part], p.gates[:, part], cache
        )
        outs.append(out)
        begin += size
    return jnp.concatenate(outs, axis=1), cache


@pytest.mark.parametrize("kind", ["mean", "pool", "mlp", "rope"])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_decode_equals_attention(split, kind, rng):
    p = problem(CASE)
    params = phi(kind, rng, 8), phi(kind, rng, 5)
    compressed = tuple(
        call(nsa_jax.compress, x, y, config=SMALL)
        for x, y in zip((p.key, p.value), params, strict=True)
    )
    whole = call(
        nsa_jax.attention, p.query, p.key, p.value, p.gates, config=SMALL, compressed=compressed
    )
    cache = nsa_jax.init_cache(2, 70, 2, 8, 5, config=SMALL)
    step = jax.jit(
        functools.partial(nsa_jax.cached_attention, config=SMALL, compress_params=params)
    )
    out, cache = decode(p, SPLITS[split], step, cache)
    chex.assert_trees_all_close(out, whole, rtol=0, atol=FLOAT32_MAX)
    assert cache.length.tolist() == [63, 63]
    # What the cache made of the windows is as near to the exact ones as what `compress` makes of
    # the whole: programs of other shapes may add up in another order.
    count = SMALL.num_compressed(63)
    kept = map(np.asarray, (cache.compressed_key, cache.compressed_value))
    raw = zip(("key", "value"), kept, (p.key, p.value), compressed, params, strict=True)
    for name, made, tokens, whole, param in raw:
        tokens, param = jax.tree.map(lambda x: np.asarray(x, np.float64), (tokens, param))
        exact = np.stack([loops.compress(row, param, SMALL) for row in tokens])
        assert_parity(name, made[:, :count], exact, np.asarray(whole))
        assert not made[:, count:].any()


GROUPS = {
    1: Case(111, 111, H=2, Hkv=2, D=8, Dv=5),
    3: CASE,
    6: Case(111, 111, H=6, Hkv=1, D=8, Dv=12),
    16: Case(111, 111, H=16, Hkv=1, D=8, Dv=5),
}


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("split", ["chunks", "tokens"])
def test_every_group_decodes_as_a_whole(split, group):
    case = GROUPS[group]
    p = problem(case)
    sizes = [47, 1, case.S - 48] if split == "chunks" else [1] * case.S
    whole = call(nsa_jax.attention, p.query, p.key, p.value, p.gates, config=SMALL)
    cache = nsa_jax.init_cache(2, 120, case.Hkv, case.D, case.Dv, config=SMALL)
    step = jax.jit(functools.partial(nsa_jax.cached_attention, config=SMALL))
    out, _ = decode(p, sizes, step, cache)
    chex.assert_trees_all_close(out, whole, rtol=0, atol=FLOAT32_MAX)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("split", ["chunks", "tokens"])
def test_indices_are_bitwise_those_of_the_whole(split, group):
    p = problem(GROUPS[group])
    sizes = [47, 1, p.case.S - 48] if split == "chunks" else [1] * p.case.S
    key = call(nsa_jax.compress, p.key, config=SMALL)
    whole = np.asarray(call(nsa_jax.select_blocks, p.query, key, config=SMALL))
    select = jax.jit(
        lambda query, kv_len: nsa_jax.select_blocks(query, key, config=SMALL, kv_len=kv_len)
    )
    begin, parts = 0, []
    for size in sizes:
        begin += size
        parts.append(select(p.query[:, begin - size : begin], jnp.int32(begin)))
    chex.assert_trees_all_equal(np.concatenate(parts, axis=1), whole)


def test_rows_of_different_length():
    """Sequences that started at different times decode side by side."""
    p = problem(CASE)
    step = jax.jit(functools.partial(nsa_jax.cached_attention, config=SMALL))
    cache = nsa_jax.init_cache(2, 70, 2, 8, 5, config=SMALL)
    cache = cache._replace(length=jnp.array([0, 5], jnp.int32))
    late, _ = decode(p, [30, 33], step, cache)
    fresh, _ = decode(p, [30, 33], step, nsa_jax.init_cache(2, 70, 2, 8, 5, config=SMALL))
    chex.assert_trees_all_close(late[0], fresh[0], rtol=1e-7, atol=1e-6)
    # Row 1 has five zero tokens before it: attention over them and the rest.
    pad = lambda x: jnp.pad(x[1:], ((0, 0), (5, 0), (0, 0), (0, 0)))
    padded = map(pad, (p.query, p.key, p.value, p.gates))
    whole = call(nsa_jax.attention, *padded, config=SMALL)
    chex.assert_trees_all_close(late[1], whole[0, 5:], rtol=1e-7, atol=2e-6)


def test_separate_keys_of_the_branches():
    p, other = problem(CASE), problem(CASE, 7)
    key = nsa_jax.Branches(p.key, other.key, p.key + other.key)
    value = nsa_jax.Branches(other.value, p.value, p.value)
    whole = call(nsa_jax.attention, p.query, key, value, p.gates, config=SMALL)
    cache = nsa_jax.init_cache(2, 63, 2, 8, 5, config=SMALL, separate=True)
    outs = []
    for part in (slice(0, 40), slice(40, 63)):
        cut = lambda x, part=part: jax.tree.map(lambda y: y[:, part], x)
        arrays = map(cut, (p.query, key, value, p.gates))
        out, cache = call(nsa_jax.cached_attention, *arrays, cache, config=SMALL)
        outs.append(out)
    chex.assert_trees_all_close(jnp.concatenate(outs, 1), whole, rtol=1e-7, atol=2e-6)


def test_full_cache_is_an_error_or_nan():
    p = problem(CASE)
    cache = nsa_jax.init_cache(2, 62, 2, 8, 5, config=SMALL)
    with pytest.raises(ValueError, match="capacity is 62 tokens, got 63"):
        nsa_jax.cached_attention(p.query, p.key, p.value, p.gates, cache, config=SMALL)
    step = jax.jit(functools.partial(nsa_jax.cached_attention, config=SMALL))
    with pytest.raises(ValueError, match="capacity is 62 tokens, got 63"):
        step(p.query, p.key, p.value, p.gates, cache)
    out, cache = step(p.query[:, :60], p.key[:, :60], p.value[:, :60], p.gates[:, :60], cache)
    assert np.isfinite(np.asarray(out)).all()
    out, _ = step(p.query[:, 60:], p.key[:, 60:], p.value[:, 60:], p.gates[:, 60:], cache)
    assert np.isnan(np.asarray(out)).all()


def test_a_step_makes_no_nan_where_jax_looks_for_them():
    p = problem(Case(4, 4, B=1, H=2, Hkv=1, D=8, Dv=4))
    cache = nsa_jax.init_cache(1, 4, 1, 8, 4, config=SMALL)
    with jax.debug_nans(True):
        out, _ = nsa_jax.cached_attention(p.query, p.key, p.value, p.gates, cache)
    assert np.isfinite(np.asarray(out)).all()


@pytest.mark.parametrize("begin", [0, 40])
def test_a_cache_that_is_full_at_the_end_is_no_error(begin, monkeypatch):
    """Where the length is known: tokens are appended, here for the sake of time not really."""
    p = problem(CASE)
    cache = nsa_jax.init_cache(2, 63, 2, 8, 5, config=SMALL)
    cache = cache._replace(length=jnp.array([0, begin], jnp.int32))

    def update(*_):
        raise StopIteration

    monkeypatch.setattr(nsa_jax.cache, "update", update)
    with pytest.raises(StopIteration):
        rest = (x[:, begin:] for x in (p.query, p.key, p.value, p.gates))
        nsa_jax.cached_attention(*rest, cache, config=SMALL)


def test_a_cache_that_jit_closes_over_is_checked():
    """Its length is known there, and the check must not be traced."""
    p = problem(CASE)
    for capacity in (63, 62):
        cache = nsa_jax.init_cache(2, capacity, 2, 8, 5, config=SMALL)

        def step(*arrays, cache=cache):
            return nsa_jax.cached_attention(*arrays, cache, config=SMALL)

        arrays = p.query, p.key, p.value, p.gates
        if capacity == 63:
            jax.eval_shape(step, *arrays)
            continue
        with pytest.raises(ValueError, match="capacity is 62 tokens, got 63"):
            jax.eval_shape(step, *arrays)


@pytest.mark.parametrize("length", [96, 128])
def test_decode_counters(length):
    """`reads(S)` against the value rows that one token really reads: those with a gradient.

    The query's block is full, so that no selected row is cut off.
    """
    config = SMALL
    p = problem(Case(1, length, H=4, Hkv=1, B=1))
    small = tuple(call(nsa_jax.compress, x, config=config) for x in (p.key, p.value))
    indices = call(nsa_jax.select_blocks, p.query, small[0], config=config, kv_len=length)

    def read(function, value):
        """Value rows with a gradient."""
        grad = jax.jit(jax.grad(lambda v: (function(v)[0] ** 2).sum()))(value)
        return int((np.abs(np.asarray(grad)).sum(axis=(0, 2, 3)) > 0).sum())

    compressed = read(
        lambda v: nsa_jax.compressed_attention(
            p.query, small[0], v, config=config, kv_len=length
        ),
        small[1],
    )
    selected = read(
        lambda v: nsa_jax.selected_attention(p.query, p.key, v, indices, config=config),
        p.value,
    )
    sliding = read(
        lambda v: nsa_jax.sliding_attention(p.query, p.key, v, config=config), p.value
    )
    assert compressed + selected + sliding == config.reads(length)
    assert compressed == config.num_compressed(length)
    assert selected == config.num_selected * config.select_block
    assert sliding == config.window


def test_decode_counters_of_gathers():
    """The selected branch gathers `n` blocks a token from the cache, whatever its length."""
    for length in (40, 400):
        p = problem(Case(1, length, H=4, Hkv=1, B=1))
        indices = jnp.zeros((1, 1, 1, 4), jnp.int32)
        jaxpr = jax.make_jaxpr(
            lambda *x: nsa_jax.selected_attention(*x, config=SMALL, implementation="xla")
        )(p.query, p.key, p.value, indices)
        gathered = [
            eqn.outvars[0].aval.size // p.key.shape[-1]
            for eqn in equations(jaxpr.jaxpr)
            if eqn.primitive.name == "gather"
        ]
        assert gathered == [SMALL.num_selected * SMALL.select_block] * 2  # keys and values


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in jax.tree.leaves(
            list(eqn.params.values()),
            is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
        ):
            inner = getattr(sub, "jaxpr", sub)
            if hasattr(inner, "eqns"):
                yield from equations(inner)
