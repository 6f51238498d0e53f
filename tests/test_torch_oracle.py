"""Torch's reference, which judges on a GPU, beside JAX's, which judges elsewhere."""

import dataclasses

import jax
import numpy as np
import pytest

from tests import inputs, torch_inputs, torch_oracle
from tests import mosaic_checks as gradients
from tests.inputs import Case, problem
from tests.mosaic_checks import steps_of

CASE = Case(111, 130, H=6, Hkv=2, D=24, Dv=8, dtype="bfloat16")
PACKED = dataclasses.replace(CASE, T=130, B=1, segments=(20, 1, 63, 38, -8), dtype="float16")
EMPTY = Case(5, 5, B=1, dtype="bfloat16")  # no compressed token


def by_both(monkeypatch, judge, *arguments, **options):
    """What `judge` says by JAX and by torch: leaves of its result, NumPy."""
    for used in (False, True):
        monkeypatch.setattr(torch_oracle, "USED", used)
        found = judge.__wrapped__(*arguments, **options)
        found = vars(found) if dataclasses.is_dataclass(found) else found
        yield [np.asarray(x) for x in jax.tree.leaves(found)]


def assert_same(one, other, atol=1e-11):
    for x, y in zip(one, other, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=atol)


def assert_allows_no_more(exact, one, other):
    """The errors of torch's yardstick are at most those of JAX's, which bound a path's."""

    def rms(rough, exact):
        there = np.isfinite(exact)
        return np.sqrt(np.square(np.float64(rough)[there] - exact[there]).sum())

    for x, by_jax, by_torch in zip(exact, one, other, strict=True):
        assert rms(by_torch, x) <= 1.05 * rms(by_jax, x) + 1e-9


@pytest.mark.parametrize("case", [CASE, PACKED, EMPTY], ids=str)
def test_steps(case, monkeypatch):
    p = problem(case)
    for name, arrays in steps_of(p).items():
        exact, same = by_both(monkeypatch, inputs.oracle, name, *arrays, **p.where)
        assert_same(exact, same)
        rough = by_both(monkeypatch, inputs.yardstick, name, *arrays, **p.where)
        assert_allows_no_more(exact, *rough)
    pair = steps_of(p)["compressed_attention"][:2]
    assert_same(*by_both(monkeypatch, inputs.oracle, "block_scores", *pair, **p.where))
    assert_same(*by_both(monkeypatch, inputs.selection, *pair, **p.where))


@pytest.mark.parametrize("case", [CASE, PACKED], ids=str)
def test_gradients(case, monkeypatch):
    p = problem(case)
    arrays, indices = gradients.arrays_of(p)
    cotangent = gradients.normal((*p.query.shape[:3], case.Dv), p.query.dtype)
    given = "whole", tuple(arrays), (indices,), cotangent
    one, other = by_both(monkeypatch, gradients.references, *given, **p.where)
    count = len(arrays)
    assert_same(one[:count], other[:count])
    assert_allows_no_more(one[:count], one[count:], other[count:])


@pytest.mark.parametrize("judge", ["expected", "expected_whole"])
def test_of_torch(judge, monkeypatch):
    """Inputs, selection, outputs and gradients; means of 8 tokens may be rounded otherwise."""
    case = dataclasses.replace(PACKED, dtype="float32")
    one, other = by_both(monkeypatch, getattr(torch_inputs, judge), case)
    assert_same(one, other, atol=1e-5)
