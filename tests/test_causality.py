"""Nothing reads the future: not an output, a score, an index or a log-sum-exp."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nsa_jax
from nsa_jax import reference, select
from tests.inputs import SMALL, Case, problem, segment_ids, selection
from tests.reach import check_reach
from tests.torch_inputs import BRANCHES, on_the_cpu
from tests.torch_inputs import check_reach as check_torch_reach

LENGTH = 141
CASES = {
    1: Case(LENGTH, LENGTH, H=2, Hkv=2, D=8, Dv=5),
    3: Case(LENGTH, LENGTH, H=6, Hkv=2),
    6: Case(LENGTH, LENGTH, H=6, Hkv=1, D=8, Dv=5),
    16: Case(LENGTH, LENGTH, H=16, Hkv=1, D=8, Dv=12),
}


def everything(implementation, key, value, query, segments=None):
    """Every quantity of every branch, by name, `[B, T, ...]`."""
    options = dict(config=SMALL, segment_ids=segments)
    chosen = dict(implementation=implementation, **options)
    compressed_key = nsa_jax.compress(key, **options)
    compressed_value = nsa_jax.compress(value, **options)
    indices = nsa_jax.select_blocks(query, compressed_key, **chosen)
    scores = (reference if implementation == "reference" else select).block_scores(
        query, compressed_key, **options
    )
    branches = {
        "compressed": nsa_jax.compressed_attention(
            query, compressed_key, compressed_value, **chosen
        ),
        "selected": nsa_jax.selected_attention(query, key, value, indices, **chosen),
        "sliding": nsa_jax.sliding_attention(query, key, value, **chosen),
    }
    parts = {
        f"{n}.{p}": x
        for n, pair in branches.items()
        for p, x in zip(("out", "lse"), pair, strict=True)
    }
    return {"indices": indices, "scores": scores, **parts}


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("group", CASES)
def test_the_past_does_not_see_a_changed_token(group, implementation, packed):
    p = problem(CASES[group])
    lengths = (100, 1, 40)
    segments = jnp.asarray(np.repeat(segment_ids(lengths), 2, 0)) if packed else None
    compiled = jax.jit(lambda *x: everything(implementation, *x, segments=segments))
    run = lambda *x: jax.tree.map(np.asarray, compiled(*x))
    before = run(p.key, p.value, p.query)
    moved = set()
    for token in (0, 16, 47, 64, 75, 101, 140):
        # Large enough to turn softmaxes and selections over wherever it is seen.
        key = p.key.at[:, token].multiply(-9.0)
        value = p.value.at[:, token].add(5.0)
        after = run(key, value, p.query)
        for name, x in before.items():
            x, y = np.asarray(x), np.asarray(after[name])
            np.testing.assert_array_equal(
                x[:, :token], y[:, :token], err_msg=f"{name}, {token}"
            )
            if packed:
                # Nor does a sequence see another one.
                ends = np.cumsum(lengths)
                end = ends[np.searchsorted(ends, token, side="right")]
                np.testing.assert_array_equal(x[:, end:], y[:, end:], err_msg=name)
            if (x != y).any():
                moved.add(name)
    # The test can see a change: every quantity moved somewhere at or after the token.
    assert moved == set(before)


def test_a_query_changes_its_own_row_only():
    p = problem(CASES[3])
    run = jax.jit(lambda query: everything("xla", p.key, p.value, query))
    before, after = run(p.query), run(p.query.at[:, 130].multiply(-3.0))
    for name, x in before.items():
        differs = (np.asarray(x) != np.asarray(after[name])).reshape(2, LENGTH, -1)
        assert not np.delete(differs, 130, axis=1).any(), name
        assert differs[:, 130].any(), name


REACH = Case(70, 70, B=1, D=8, Dv=8)


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_what_nan_reaches(implementation, branch):
    """Of one token, in both directions, as docs/kernels/numerics.md says."""
    p = problem(REACH)
    options = dict(config=SMALL, implementation=implementation)
    compress = lambda x: nsa_jax.compress(x, config=SMALL)
    indices = selection(p.query, compress(p.key), config=SMALL)

    def attend(query, key, value):
        if branch == "compressed":
            pair = compress(key), compress(value)
            return nsa_jax.compressed_attention(query, *pair, **options)
        if branch == "selected":
            return nsa_jax.selected_attention(query, key, value, indices, **options)
        return nsa_jax.sliding_attention(query, key, value, **options)

    @jax.jit
    def function(query, key, value, do):
        out, pull, lse = jax.vjp(attend, query, key, value, has_aux=True)
        return out, lse, *pull(do)

    do = np.random.default_rng(1).normal(size=p.query.shape)
    arrays = [np.array(x, np.float32) for x in (p.query, p.key, p.value, do)]
    numpy = lambda *x: [np.asarray(y) for y in function(*x)]
    check_reach(numpy, arrays, implementation, branch, 40)


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("implementation", ["sdpa", "reference"])
def test_what_nan_reaches_in_torch(implementation, branch, monkeypatch):
    with on_the_cpu(monkeypatch):
        check_torch_reach(REACH, branch, implementation)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_huge_keys_of_the_future_change_no_index(implementation):
    p = problem(REACH)
    run = jax.jit(
        lambda key: nsa_jax.select_blocks(
            p.query,
            nsa_jax.compress(key, config=SMALL),
            config=SMALL,
            implementation=implementation,
        )
    )
    clean = run(p.key)[:, :40]
    for number in (jnp.nan, jnp.inf, 3e38):
        found = run(p.key.at[:, 40].set(number))[:, :40]
        np.testing.assert_array_equal(found, clean)
