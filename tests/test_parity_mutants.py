"""What the tolerance rule must see: small mistakes of a path, in every dtype and branch.

The path is the dense reference in float32, rounded once; unchanged it passes. A mutant is its
result with one mistake: all outputs or one gradient times 1.005, the softmax scale 1 % larger,
a window that is one key shorter or longer, one of sixteen selected blocks dropped. Every array
that a mutant is looked for in has 10^5 elements or more.
"""

import dataclasses

import pytest

from bench.judge import parity
from nsa_torch import NSAConfig
from tests.oracles.nsa import BRANCHES
from tests.paths import of_torch, steps_of_torch
from tests.problems import Case, array, problem

CONFIG = NSAConfig(8, 2, 16, num_selected=16, window=64)
CASE = Case(272, 272, 16, 8, 48, 48, B=2, config=CONFIG, own=True, blocks="given")
FACTOR = 1.005


def results(p, branches=BRANCHES):
    """Of branches alone, with their gradients, and of the whole."""
    found = steps_of_torch(p, "reference", of_lse=False, only=branches)
    found |= of_torch(p, "reference")
    return {name: array(x) for name, x in found.items()}


def mutants(p, right):
    """Of an array by name, what a mistake makes of it, and its name; `right`: without it."""
    for name, x in right.items():
        if not name.endswith(("lse", "dgates")):
            yield f"x {FACTOR}", name, (x.astype("float32") * FACTOR).astype(x.dtype)
    fewer = p.block_indices.clone()
    fewer[..., 7] = -1
    windows = {
        f"window {window}": {"config": dataclasses.replace(CONFIG, window=window)}
        for window in (CONFIG.window - 1, CONFIG.window + 1)
    }
    changes = {"scale + 1 %": {"scale": 1.01 * 48**-0.5}} | windows
    wrong = {x: dataclasses.replace(p, case=p.case.but(**y)) for x, y in changes.items()}
    wrong["one of sixteen blocks dropped"] = dataclasses.replace(p, block_indices=fewer)
    for mistake, q in wrong.items():
        of_one = "selected" if "block" in mistake else "sliding"
        branches = BRANCHES if "scale" in mistake else (of_one,)
        found = results(q, branches)
        for name in (*(f"{x}.out" for x in branches), "out"):
            yield mistake, name, found[name]


def judge(p, name, x):
    expected = p.expected if name in p.expected[0] else p.expected_steps(False)
    exact, rough = (each[name] for each in expected)
    assert exact.size >= parity.SLOPE_ELEMENTS or name.endswith(("lse", "dgates")), name
    selection = name == "selected.out"
    return parity.check_parity(name, x, exact, rough, dtype=p.case.dtype, selection=selection)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_rule_separates(dtype):
    p = problem(CASE.but(dtype=dtype))
    # Means of eight keys that are as large as keys.
    p = dataclasses.replace(p, keys=(3 * p.keys[0], *p.keys[1:]))
    right = results(p)
    broken = {name: judge(p, name, x).reason for name, x in right.items()}
    assert not any(broken.values()), broken
    unseen = [(x, name) for x, name, found in mutants(p, right) if judge(p, name, found).ok]
    assert not unseen
