"""Every branch and implementation of JAX against the float64 oracle, forward."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nsa_jax
from bench.judge.parity import assert_parity, check_indices
from tests.inputs import CASES, SMALL, Case, call, once, oracle, problem, selection, yardstick
from tests.limits import set_limits

IMPLEMENTATIONS = ("xla", "reference")
# The reference, which `test_reference.py` checks in float64, in lower precision too: G = 3 and
# T < S, packed, without a compressed token, in 16 bits.
OF_REFERENCE = (CASES[1], CASES[2], CASES[5], *CASES[8:])

by_case = pytest.mark.parametrize("case", CASES, ids=str)
by_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
by_both = pytest.mark.parametrize(
    ("implementation", "case"),
    [("xla", case) for case in CASES] + [("reference", case) for case in OF_REFERENCE],
    ids=str,
)


def compare(name, actual, arrays, measure=yardstick, **options):
    """Against the float64 oracle; `measure(name, *arrays, **options)`: the yardstick."""
    exact = oracle(name, *arrays, **options)
    low = measure(name, *arrays, **options)
    for part, got, want, rough in zip(("out", "lse"), actual, exact, low, strict=True):
        dtype = arrays[0].dtype
        assert_parity(f"{name}.{part}", np.asarray(got), want, rough, dtype=dtype)
    assert actual[0].dtype == arrays[0].dtype
    assert actual[1].dtype == jnp.float32


def measure_of(implementation, case):
    """Of the reference in float32, which is the yardstick: what one rounding changes."""
    if (implementation, case.dtype) != ("reference", "float32"):
        return yardstick

    def rounded(name, *arrays, **options):
        exact = oracle(name, *arrays, **options)
        return jax.tree.map(lambda x: x.astype(np.float32), exact)

    return rounded


@once
def compressed(x, **options):
    return call(nsa_jax.compress, x, **options)


def compressed_of(p):
    options = {"config": p.case.config, "segment_ids": p.segment_ids}
    return tuple(compressed(x, **options) for x in (p.key, p.value))


@by_both
def test_compressed(case, implementation):
    p = problem(case)
    arrays = (p.query, *compressed_of(p))
    out = call(nsa_jax.compressed_attention, *arrays, implementation=implementation, **p.where)
    measure = measure_of(implementation, case)
    compare("compressed_attention", out, arrays, measure, **p.where)


@by_both
def test_selected(case, implementation):
    p = problem(case)
    indices = selection(p.query, compressed_of(p)[0], **p.where)
    arrays = (p.query, p.key, p.value, indices)
    out = call(nsa_jax.selected_attention, *arrays, implementation=implementation, **p.where)
    measure = measure_of(implementation, case)
    compare("selected_attention", out, arrays, measure, **p.where)


@by_both
def test_sliding(case, implementation):
    p = problem(case)
    arrays = (p.query, p.key, p.value)
    out = call(nsa_jax.sliding_attention, *arrays, implementation=implementation, **p.where)
    measure = measure_of(implementation, case)
    compare("sliding_attention", out, arrays, measure, **p.where)


@by_both
def test_selection(case, implementation):
    p = problem(case)
    key = compressed_of(p)[0]
    indices = call(
        nsa_jax.select_blocks, p.query, key, implementation=implementation, **p.where
    )
    exact = oracle("select_blocks", p.query, key, **p.where)
    # Random float32 scores have no near ties: the path must choose what float64 chooses.
    np.testing.assert_array_equal(np.asarray(indices), exact)
    if case.segments is None:
        scores = oracle("block_scores", p.query, key, **p.where)
        positions = np.arange(case.T) + case.S - case.T
        assert check_indices(np.asarray(indices), scores, positions, case.config).ok


@by_case
def test_whole(case):
    p = problem(case)
    arrays = (p.query, p.key, p.value, p.gates)
    options = dict(config=case.config, segment_ids=p.segment_ids)
    whole = call(nsa_jax.attention, *arrays, implementation="xla", **options)
    dense = call(nsa_jax.attention, *arrays, implementation="reference", **options)
    # The path's own rounding of the compressed keys decides its selection.
    indices = selection(p.query, compressed_of(p)[0], **p.where)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x), jnp.float64) for x in arrays]
        exact = call(
            nsa_jax.attention,
            *wide,
            block_indices=indices,
            implementation="reference",
            **options,
        )
    if case.dtype == "float32":
        assert_parity("whole", np.asarray(whole), np.asarray(exact), np.asarray(dense))
    else:
        scale = 16 * float(jnp.finfo(whole.dtype).eps)
        np.testing.assert_allclose(
            np.asarray(whole, np.float64), np.asarray(exact), rtol=scale, atol=scale
        )


@pytest.mark.parametrize("budget", [1, 20_000])
def test_chunks_change_nothing(budget, monkeypatch):
    """Any chunk size gives the same numbers, with a last chunk that is not full."""
    p = problem(Case(63, 75))
    options = dict(config=SMALL, implementation="xla")
    key, value = compressed_of(p)

    def run(query, *keys):
        indices = nsa_jax.select_blocks(query, key, kv_len=75, **options)
        return (
            nsa_jax.compressed_attention(query, key, value, kv_len=75, **options),
            nsa_jax.selected_attention(query, *keys, indices, **options),
            nsa_jax.sliding_attention(query, *keys, **options),
            indices,
        )

    arrays = p.query, p.key, p.value
    whole = call(run, *arrays)
    set_limits(monkeypatch, jax_chunk_bytes=budget)
    chex.assert_trees_all_close(call(run, *arrays), whole, rtol=0, atol=1e-6)


def test_branches_of_keys():
    """Separate keys and values per branch: each branch reads its own."""
    case = Case(50, 50)
    first, second, third = (problem(case, seed) for seed in (0, 1, 2))
    key = nsa_jax.Branches(first.key, second.key, third.key)
    value = nsa_jax.Branches(first.value, second.value, third.value)
    query, gates = first.query, first.gates
    whole = call(nsa_jax.attention, query, key, value, gates, config=SMALL)

    def apart(query, one, two, three):
        compressed = tuple(nsa_jax.compress(x, config=SMALL) for x in one)
        indices = nsa_jax.select_blocks(query, compressed[0], config=SMALL)
        return (
            nsa_jax.compressed_attention(query, *compressed, config=SMALL)[0],
            nsa_jax.selected_attention(query, *two, indices, config=SMALL)[0],
            nsa_jax.sliding_attention(query, *three, config=SMALL)[0],
        )

    outs = call(apart, query, *zip(key, value, strict=True))
    expected = sum(out * gates[..., i, None] for i, out in enumerate(outs))
    np.testing.assert_allclose(np.asarray(whole), np.asarray(expected), atol=1e-6)


@by_implementation
def test_padding_may_be_nan(implementation):
    """Not even NaN of padding gets out: of inputs, gates and cotangents, in both directions."""
    case = Case(40, 60, B=1, segments=(24, -7, 20, -9))
    p = problem(case)
    where = dict(config=SMALL, segment_ids=p.segment_ids)
    options = where | {"implementation": implementation}

    def function(query, key, value, gates):
        pair = tuple(nsa_jax.compress(x, **where) for x in (key, value))
        indices = nsa_jax.select_blocks(query, pair[0], **options)
        whole = nsa_jax.attention(query, key, value, gates, **options)
        return indices.astype(query.dtype), (
            whole,
            nsa_jax.compressed_attention(query, *pair, **options),
            nsa_jax.selected_attention(query, key, value, indices, **options),
            nsa_jax.sliding_attention(query, key, value, **options),
        )

    @jax.jit
    def run(arrays, cotangents):
        (indices, out), pull = jax.vjp(function, *arrays)
        return indices, out, pull((jnp.zeros_like(indices), cotangents))

    arrays = p.query, p.key, p.value, p.gates
    rng = np.random.default_rng(0)
    draw = lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype)
    cotangents = jax.tree.map(draw, jax.eval_shape(function, *arrays)[1])

    def dirty(x):
        padding = p.segment_ids[:, -x.shape[1] :] < 0
        return jnp.where(padding.reshape(padding.shape + (1,) * (x.ndim - 2)), jnp.nan, x)

    clean = run(arrays, cotangents)
    chex.assert_trees_all_equal(run(*jax.tree.map(dirty, (arrays, cotangents))), clean)
    _, (whole, (_, lse), *_), gradients = clean
    assert all((np.asarray(x)[:, -9:] == 0).all() for x in (whole, *gradients))
    assert np.isneginf(np.asarray(lse)[:, -9:]).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_lengths_of_a_buffer(implementation):
    """`kv_len` of each row, traced, over buffers that are longer than any of them."""
    case = Case(9, 80)
    p = problem(case)
    lengths = (80, 41)
    options = dict(config=SMALL, implementation=implementation)
    count = SMALL.num_compressed(41)
    key, value = (x.at[1, count:].set(jnp.nan) for x in compressed_of(p))
    buffers = (p.key.at[1, 41:].set(jnp.nan), p.value.at[1, 41:].set(jnp.nan))

    @jax.jit
    def run(kv_len):
        indices = nsa_jax.select_blocks(p.query, key, kv_len=kv_len, **options)
        return (
            indices,
            nsa_jax.compressed_attention(p.query, key, value, kv_len=kv_len, **options)[0],
            nsa_jax.selected_attention(p.query, *buffers, indices, kv_len=kv_len, **options)[0],
            nsa_jax.sliding_attention(p.query, *buffers, kv_len=kv_len, **options)[0],
        )

    def run_alone(query, keys, values):
        one = dict(config=SMALL, implementation="reference")
        length = keys.shape[1]
        small = tuple(nsa_jax.compress(x, config=SMALL) for x in (keys, values))
        indices = nsa_jax.select_blocks(query, small[0], kv_len=length, **one)
        return (
            indices,
            nsa_jax.compressed_attention(query, *small, kv_len=length, **one)[0],
            nsa_jax.selected_attention(query, keys, values, indices, **one)[0],
            nsa_jax.sliding_attention(query, keys, values, **one)[0],
        )

    together = run(jnp.asarray(lengths, jnp.int32))
    for row, length in enumerate(lengths):
        pair = (x[row : row + 1, :length] for x in (p.key, p.value))
        alone = call(run_alone, p.query[row : row + 1], *pair)
        got, want = [x[row] for x in together], [x[0] for x in alone]
        chex.assert_trees_all_equal(got[0], want[0])
        chex.assert_trees_all_close(got[1:], want[1:], rtol=1e-7, atol=2e-6)


def test_repeat_runs_are_bitwise_equal():
    """Op by op, which a call without `jit` is."""
    p = problem(dataclasses.replace(CASES[1], B=1))
    runs = [
        np.asarray(nsa_jax.attention(p.query, p.key, p.value, p.gates, config=p.case.config))
        for _ in range(3)
    ]
    chex.assert_trees_all_equal(*runs)
