"""The oracle against the paper's equations in plain loops."""

import functools
from typing import NamedTuple

import numpy as np
import pytest
import torch

from nsa_jax import reference as jax_reference
from nsa_torch import NSAConfig, reference
from tests import loops
from tests.oracles import nsa
from tests.paths import to_jax
from tests.problems import Case, array, problem

SMALL = NSAConfig(8, 4, 16, num_selected=3, num_initial=1, num_local=1, window=10)
FINE = NSAConfig(4, 2, 8, num_selected=4, num_initial=1, num_local=1, window=7)


class Sizes(NamedTuple):
    config: NSAConfig
    T: int
    S: int
    H: int
    Hkv: int
    documents: tuple[int, ...] | None = None
    scale: float | None = None
    keys: float | None = None  # all compressed tokens have this number; None: random


CASES = {
    "G=1": Sizes(SMALL, 61, 61, 2, 2),
    "G=3, T<S": Sizes(SMALL, 29, 61, 6, 2, scale=0.3),
    "paper's sizes": Sizes(NSAConfig(num_selected=4, window=50), 9, 411, 1, 1),
    "packed": Sizes(SMALL, 40, 63, 4, 2, documents=(1, 23, 35)),
    "2 + 3 forced": Sizes(NSAConfig(4, 2, 8, 6, 2, 3, 7), 40, 95, 2, 1),
    "none forced": Sizes(NSAConfig(4, 2, 8, 2, 0, 0, 7), 43, 43, 2, 1),
    "equal scores": Sizes(FINE, 70, 70, 6, 2, keys=0.0),
}


@functools.cache
def drawn(name):
    case, rng = CASES[name], np.random.default_rng([*name.encode()])
    query = rng.normal(size=(case.T, case.H, 4))
    keys = [rng.normal(size=(case.S, case.Hkv, 4)) for _ in range(3)]
    values = [rng.normal(size=(case.S, case.Hkv, 3)) for _ in range(3)]
    if case.keys is not None:
        keys[0][:] = case.keys
    return query, keys, values, rng.normal(size=(case.T, case.H, 3))


def by_loops(name):
    case, rules = CASES[name], loops.Rules(CASES[name].config)
    ends = np.cumsum(case.documents or (case.S,)).tolist()
    spans = [*zip([0, *ends], ends, strict=False)]
    return loops.packed(spans, *drawn(name), rules, scale=case.scale)


@functools.cache
def by_oracle(name):
    case = CASES[name]
    batch = lambda x: torch.from_numpy(x)[None]
    query, keys, values, gates = drawn(name)
    tensors = batch(query), [*map(batch, keys)], [*map(batch, values)], batch(gates)
    where = {"documents": case.documents, "scale": case.scale}
    found = nsa.attention(*tensors, config=case.config, **where)
    outs = [x for branch in nsa.BRANCHES for x in found.branches[branch]]
    parts = *outs[:2], found.scores, found.block_indices, *outs[2:], found.out
    return dict(zip(loops.Stages._fields, (array(x)[0] for x in parts), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_equiv_small_loops(name):
    """That a wrong rule of the oracle is noticed is shown by `mutants.toml`."""
    want = by_loops(name)._asdict()
    for stage, x in by_oracle(name).items():
        np.testing.assert_allclose(x, want[stage], rtol=1e-12, atol=1e-13, err_msg=stage)


@pytest.mark.parametrize("branch", nsa.BRANCHES)
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_references_are_yardsticks(framework, branch):
    """float32 inside, the inputs' dtype outside; all in `compute_dtype` when it is given, which
    bounds errors of paths in `bench`: as the oracle's own arithmetic in that dtype.
    """
    p = problem(Case(61, 61, H=2, dtype="bfloat16", blocks="given"))
    module, convert, dtype = {
        "jax": (jax_reference, to_jax, "bfloat16"),
        "torch": (reference, lambda x: x, torch.bfloat16),
    }[framework]
    run = getattr(module, f"{branch}_attention")
    given, where = map(convert, p.steps[branch]), {"config": p.case.config, "kv_len": 61}
    out, lse = map(array, run(*given, **where, compute_dtype=dtype))
    exact, rough = p.expected_steps()
    seen = np.isfinite(exact[f"{branch}.lse"])
    for name, x in (("out", out), ("lse", lse)):
        errors = (
            y[seen] - exact[f"{branch}.{name}"][seen] for y in (x, rough[f"{branch}.{name}"])
        )
        mine, oracles = (np.sqrt(np.square(np.float64(e)).mean()) for e in errors)
        assert 0.5 * oracles < mine < 2 * oracles
