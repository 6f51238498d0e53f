"""The oracle against the paper's equations in plain loops."""

import functools

import numpy as np
import pytest
import torch

from nsa_jax import dispatch as jax_dispatch
from nsa_torch import dispatch
from tests import loops
from tests.oracles import nsa
from tests.paths import to_jax
from tests.problems import Case, array, of_kind, problem

CASES = of_kind("oracle")


@functools.cache
def drawn(name):
    case, rng = CASES[name], np.random.default_rng([*name.encode()])
    query = rng.normal(size=(case.T, case.H, 4))
    keys = [rng.normal(size=(case.S, case.Hkv, 4)) for _ in range(3)]
    values = [rng.normal(size=(case.S, case.Hkv, 3)) for _ in range(3)]
    if case.ties:
        keys[0][:] = 0
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
    registry, convert, dtype = {
        "jax": (jax_dispatch.REGISTRY, to_jax, "bfloat16"),
        "torch": (dispatch.REGISTRY, lambda x: x, torch.bfloat16),
    }[framework]
    run = registry.entry(branch, "reference").load()
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
