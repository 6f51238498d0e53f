"""Torch's arrays in the reference, which judges on a GPU, beside JAX's, which judges elsewhere."""

import jax
import numpy as np
import pytest

from tests import inputs, torch_oracle
from tests.inputs import Case, problem
from tests.mosaic_checks import steps_of

CASE = Case(111, 130, H=6, Hkv=2, D=24, Dv=8, dtype="bfloat16")
PACKED = Case(130, 130, H=6, Hkv=2, D=24, Dv=8, B=1, segments=(20, 1, 63, 38, -8))
EMPTY = Case(5, 5, B=1, dtype="bfloat16")  # no compressed token


@pytest.mark.parametrize("case", [CASE, PACKED, EMPTY], ids=str)
def test_steps(case, monkeypatch):
    p = problem(case)
    steps = steps_of(p)
    pair = steps["compressed_attention"][:2]
    judged = [(inputs.oracle, name, *arrays) for name, arrays in steps.items()]
    judged += [(inputs.oracle, "block_scores", *pair), (inputs.selection, *pair)]
    for judge, *given in judged:
        found = []
        for used in (False, True):
            monkeypatch.setattr(torch_oracle, "USED", used)
            found.append(jax.tree.leaves(judge.__wrapped__(*given, **p.where)))
        for x, y in zip(*found, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-11)
