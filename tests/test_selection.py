"""Top-n: ties, forced blocks, padding, the group's share, and the view as ranges."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nsa_jax
from nsa_jax import reference
from nsa_jax.ranges import to_ranges
from nsa_jax.select import choose
from tests.inputs import SMALL, Case, call, problem, segment_ids


def top_n(scores, own, config):
    """Eq. 11 for one row, in Python: forced first, then by score, the lower index on ties."""
    candidates = range(int(own) + 1)
    forced = {j for j in candidates if j < config.num_initial or j > own - config.num_local}
    rest = sorted((-scores[j], j) for j in candidates if j not in forced)
    chosen = sorted(forced | {j for _, j in rest[: config.num_selected - len(forced)]})
    return chosen + [-1] * (config.num_selected - len(chosen))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@given(data=st.data())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_selection_tiebreak(dtype, data):
    """A handful of values, so that most scores tie, among them 0 and subnormal ones."""
    values = st.sampled_from([0.0, 1e-40, 0.25, 0.25 + 2.0**-20, 1.0, 3.0])
    rows = data.draw(
        st.lists(st.lists(values, min_size=12, max_size=12), min_size=4, max_size=4)
    )
    own = data.draw(st.lists(st.integers(-1, 11), min_size=4, max_size=4))
    config = nsa_jax.NSAConfig(8, 4, 16, 5, 1, 2, 10)
    scores = jnp.asarray(np.array(rows, np.float32)).astype(dtype)
    chosen = np.asarray(choose(scores, jnp.asarray(own, jnp.int32), config))
    for row, last, got in zip(np.asarray(scores, np.float64), own, chosen, strict=True):
        flushed = np.where(np.abs(row) < 1e-37, 0, row)
        assert got.tolist() in (top_n(row, last, config), top_n(flushed, last, config))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_selection_tiebreak_of_equal_keys(implementation):
    """Identical keys give every complete block the same score: the lowest indices win."""
    query = jnp.ones((1, 160, 2, 8))
    key = jnp.ones((1, SMALL.num_compressed(160), 1, 8))
    options = {"config": SMALL, "implementation": implementation}
    indices = call(nsa_jax.select_blocks, query * 0, key, **options)
    assert np.asarray(indices)[0, -1, 0].tolist() == [0, 1, 8, 9]
    assert np.asarray(indices)[0, 3, 0].tolist() == [0, -1, -1, -1]


def test_selection_never_takes_the_future_over_a_zero_score():
    """A candidate of score 0 wins over every block after the query's own."""
    scores = jnp.zeros((1, 10)).at[0, 7:].set(1.0)
    chosen = choose(scores, jnp.asarray([5]), SMALL)
    assert np.asarray(chosen)[0].tolist() == [0, 1, 4, 5]


def test_group_consistency():
    """The heads of a group share one selection, made of the sum of their scores."""
    p = problem(Case(111, 111, H=6, Hkv=2))
    key = call(nsa_jax.compress, p.key, config=SMALL)
    scores = call(reference.block_scores, p.query, key, config=SMALL)
    alone = [
        call(
            reference.block_scores,
            p.query[:, :, h : h + 1],
            key[:, :, h // 3, None],
            config=SMALL,
        )
        for h in range(6)
    ]
    total = np.stack([sum(np.asarray(x) for x in alone[g * 3 : g * 3 + 3]) for g in (0, 1)], 2)
    np.testing.assert_allclose(np.asarray(scores), total[..., 0, :], atol=1e-6)
    # Equal queries of a group give equal outputs, and other groups do not see them.
    query = p.query.at[:, :, 1:3].set(p.query[:, :, :1])
    out = np.asarray(
        call(nsa_jax.attention, query, p.key, p.value, p.gates * 0 + 1, config=SMALL)
    )
    np.testing.assert_array_equal(out[:, :, 0], out[:, :, 1])
    before = call(nsa_jax.attention, p.query, p.key, p.value, p.gates * 0 + 1, config=SMALL)
    np.testing.assert_array_equal(out[:, :, 3:], np.asarray(before)[:, :, 3:])
    assert (out[:, :, 1] != np.asarray(before)[:, :, 1]).any()


def ranges_by_loop(indices, position, size):
    """v1: one row after the other; `[start, end)`, merged, cut at the query."""
    out = np.zeros((*indices.shape, 2), np.int32)
    for b, t, k in np.ndindex(indices.shape[:3]):
        spans = []
        for block in indices[b, t, k]:
            if block < 0:
                continue
            start, end = block * size, min((block + 1) * size, position[b, t] + 1)
            if spans and spans[-1][1] == start:
                spans[-1][1] = end
            else:
                spans.append([start, end])
        for slot, span in enumerate(spans):
            out[b, t, k, slot] = span
    return out


@pytest.mark.parametrize("case", [Case(63, 63), Case(20, 141, H=2, Hkv=2), Case(3, 3)], ids=str)
def test_selection_v2_equiv(case):
    p = problem(case)
    key = call(nsa_jax.compress, p.key, config=SMALL)
    indices = call(nsa_jax.select_blocks, p.query, key, config=SMALL, kv_len=case.S)
    position = np.broadcast_to(np.arange(case.T) + case.S - case.T, (case.B, case.T))
    ranges = call(to_ranges, indices, jnp.asarray(position, jnp.int32), config=SMALL)
    expected = ranges_by_loop(np.asarray(indices), position, SMALL.select_block)
    np.testing.assert_array_equal(np.asarray(ranges), expected)
    # The ranges hold exactly the keys that the selected branch reads.
    lengths = (expected[..., 1] - expected[..., 0]).sum(axis=-1)
    blocks = np.asarray(indices)
    ends = np.minimum((blocks + 1) * SMALL.select_block, position[..., None, None] + 1)
    keys = np.where(blocks >= 0, ends - blocks * SMALL.select_block, 0).sum(axis=-1)
    np.testing.assert_array_equal(lengths, keys)


def test_selection_packed():
    """Every sequence of a packed row selects and attends as it does alone."""
    lengths = (37, 1, 80, 23)
    total = sum(lengths)
    p = problem(Case(total, total, H=4, Hkv=2, B=1))
    segments = jnp.asarray(segment_ids(lengths))
    options = dict(config=SMALL, segment_ids=segments)
    key = call(nsa_jax.compress, p.key, **options)
    indices = np.asarray(call(nsa_jax.select_blocks, p.query, key, **options))
    out = np.asarray(call(nsa_jax.attention, p.query, p.key, p.value, p.gates, **options))
    begin = 0
    for length in lengths:
        part = slice(begin, begin + length)
        arrays = [x[:, part] for x in (p.query, p.key, p.value, p.gates)]
        small = call(nsa_jax.compress, arrays[1], config=SMALL)
        alone = call(nsa_jax.select_blocks, arrays[0], small, config=SMALL)
        np.testing.assert_array_equal(indices[:, part], np.asarray(alone))
        want = call(nsa_jax.attention, *arrays, config=SMALL)
        np.testing.assert_allclose(out[:, part], np.asarray(want), atol=2e-6)
        begin += length
