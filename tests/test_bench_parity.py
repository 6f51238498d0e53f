"""Each rule of the tolerance can fail: a path that breaks it is called broken."""

import dataclasses
import itertools

import ml_dtypes
import numpy as np
import pytest
import torch

from bench.judge import parity
from nsa_core.config import NSAConfig
from tests.limits import set_limits
from tests.oracles import nsa
from tests.refusals import refused
from tests.tables import table

CONFIG = NSAConfig(4, 2, 4, 4, num_initial=1, num_local=1, window=8)
# Query positions of the selections below: blocks 2, 4 and 7 are their own.
POSITIONS = np.array([9, 17, 31])


@pytest.fixture
def oracle(rng):
    return rng.standard_normal((1, 8, 2, 4))


@pytest.fixture
def many(rng):
    """So many elements that a single one counts for little in the rms."""
    return rng.standard_normal((64, 8, 16, 4))


def check(oracle, actual, yardstick=None, dtype=np.float32, **options):
    yardstick = oracle if yardstick is None else yardstick
    return parity.check_parity("x", actual, oracle, yardstick, dtype=dtype, **options)


def expect(result, reason):
    """The result is right, or refused for this reason."""
    assert result.ok == (not reason) and reason in result.reason, result


PLACES = table("bench")["places of errors"]


@pytest.mark.parametrize("row", table("bench")["bounds of errors"], ids=str)
def test_bounds_of_errors(row, oracle, many):
    """Of an array in which some elements are off, and a yardstick in which some are."""
    exact = many if row["of"] == "many" else oracle
    exact = exact.astype(np.float16).astype(np.float64)
    yardstick, actual = exact.copy(), exact.copy()
    for x, changes in ((yardstick, row["yardstick"]), (actual, row["actual"])):
        for place, error in changes.items():
            x[tuple(PLACES[place])] += error
    selection = row.get("selection", False)
    result = check(exact, actual.astype(row["dtype"]), yardstick, None, selection=selection)
    expect(result, row["reason"])


DTYPES = (ml_dtypes.bfloat16, np.float16, np.float32, np.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part", [0.9, 1.1])
def test_rms_has_a_share_of_the_oracle(many, dtype, part):
    """An error of no direction; its maximum and mean are within their bounds."""
    ok = part < 1
    error = np.where(np.arange(many.size).reshape(many.shape) % 2, 1.0, -1.0)
    most = parity.RMS_OF_ORACLE[np.dtype(dtype).name] * np.sqrt(np.square(many).mean())
    result = check(many, many + part * most * error, dtype=dtype)
    assert (result.error_rms <= result.error_rms_bound) == ok
    if np.dtype(dtype).itemsize == 2:
        assert result.ok == ok, result
        assert ok or "rms error" in result.reason
    else:  # 32 roundings, of which the maximum and the mean allow 4
        assert not result.ok


@pytest.mark.parametrize("times, reason", [(1.4, ""), (1.6, "rms error")])
def test_rms_bound_is_one_and_a_half_of_the_yardstick(many, rng, times, reason):
    error = 0.1 * rng.standard_normal(many.shape)
    shifted = times * np.roll(error, 1)
    expect(check(many, many + shifted, many + error, ml_dtypes.bfloat16), reason)


@pytest.mark.parametrize("factor, reason", [(1.0009, ""), (1.0011, "slope"), (0.9989, "slope")])
def test_slope_of_many_elements_is_one(rng, factor, reason):
    """The yardstick's error hides the factor from all other bounds."""
    exact = rng.standard_normal(parity.SLOPE_ELEMENTS)
    yardstick = exact + 0.1 * rng.standard_normal(exact.shape)
    result = check(exact, factor * exact, yardstick, ml_dtypes.bfloat16)
    assert result.slope == pytest.approx(factor)
    expect(result, reason)
    few = check(exact[1:], factor * exact[1:], yardstick[1:], ml_dtypes.bfloat16)
    assert few.ok and few.slope is None


def test_chunks_change_nothing(many, rng, monkeypatch):
    actual = many + 1e-3 * rng.standard_normal(many.shape)
    set_limits(monkeypatch, slope_elements=many.size)
    whole = check(many, actual, actual[::-1])
    set_limits(monkeypatch, judged_elements=1000)
    parts = check(many, actual, actual[::-1])
    for name in "error_max error_mean error_rms error_bound error_rms_bound slope".split():
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=1e-12), name
    actual[-1, -1, -1, -1] = np.nan
    assert "at other places than the oracle (1)" in check(many, actual).reason


@pytest.mark.parametrize(
    "one, other", [*itertools.permutations([np.nan, np.inf, -np.inf, 1.0], 2)]
)
def test_nan_and_inf_must_stand_at_the_same_places(oracle, one, other):
    arrays = oracle, oracle.copy()
    for array, value in zip(arrays, (one, other), strict=True):
        array[0, 1, 1, 1] = value
        assert check(array, array).ok
    expect(check(*arrays), "at other places")


def test_shapes_must_agree(oracle):
    with refused("shapes"):
        check(oracle, oracle[:, :4])


def test_assert_parity_raises_with_the_reason(oracle):
    actual = oracle.astype(np.float32)
    parity.assert_parity("out", actual, oracle, oracle)
    with refused("out: max error", AssertionError):
        parity.assert_parity("out", actual + 1, oracle, oracle)


@pytest.fixture
def scores(rng):
    return rng.uniform(0.1, 1, (1, 3, 1, 8))


def own_selection(scores):
    whole = torch.zeros(1, 32, 1, 8, dtype=torch.float64)
    whole[:, POSITIONS] = torch.from_numpy(scores)
    return nsa.select(whole, CONFIG, nsa.Rows(32, 32, (32,)))[:, POSITIONS].numpy()


def test_a_row_of_padding_chooses_nothing(scores):
    indices, positions = own_selection(scores), POSITIONS.copy()
    indices[:, -1], positions[-1] = -1, -1
    assert parity.check_indices(indices, scores, positions, CONFIG).ok
    indices[0, -1, 0, 0] = 0
    assert not parity.check_indices(indices, scores, positions, CONFIG).ok


@pytest.mark.parametrize("row, blocks, reason", table("bench")["broken selections"])
def test_broken_selection_fails(scores, row, blocks, reason):
    indices = own_selection(scores)
    indices[0, row, 0] = blocks.split()
    expect(parity.check_indices(indices, scores, POSITIONS, CONFIG), reason)


@pytest.mark.parametrize("slack", [0, 2.0**-11, 2.0**-9])
def test_a_block_may_score_a_little_less(scores, slack):
    ok = slack < 2.0**-10
    scores[0, 2, 0] = [0.1, 0.9, 0.5, 0.5 * (1 - slack), 0.1, 0.1, 0.1, 0.1]
    indices = own_selection(scores)
    assert indices[0, 2, 0].tolist() == [0, 1, 2, 7], "of equal scores the lower block"
    indices[0, 2, 0] = [0, 1, 3, 7]
    result = parity.check_indices(indices, scores, POSITIONS, CONFIG)
    assert result.ok == ok and result.rows_differ == 1, result
    assert result.error_max == pytest.approx(slack)
    assert parity.decided(scores, POSITIONS, CONFIG)[0, :, 0].tolist() == [True, True, not ok]


FINE = parity.Parity(1e-7, 1e-8, 1e-6, 1e-6, True)


@pytest.mark.parametrize("worse, share", table("bench")["shares of bounds"])
def test_all_errors_count_in_the_share(worse, share):
    assert dataclasses.replace(FINE, **worse).share == pytest.approx(share)


def test_the_worst_part_speaks_and_a_broken_one_before_it():
    near = dataclasses.replace(FINE, error_max=9e-7, rows_differ=3)
    bad = dataclasses.replace(FINE, ok=False, reason="bad")
    assert parity.merge([FINE, near]) == near
    merged = parity.merge([near, bad])
    assert not merged.ok and merged.reason == "bad" and merged.rows_differ == 3
