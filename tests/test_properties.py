"""What holds of every path, whatever the numbers: masks keep NaN from whoever does not see it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import nsa_jax
import nsa_torch
from tests.oracles import nsa
from tests.problems import Case, array, problem
from tests.reach import NUMBERS, check_reach, check_torch, steps

TOKEN = 40  # that is not finite
CASE = Case(70, 70, D=8, Dv=8, blocks="any")
by_branch = pytest.mark.parametrize("branch", nsa.BRANCHES)


@by_branch
@pytest.mark.parametrize("name", ["sdpa", "reference"])
def test_masks_of_torch(name, branch):
    """Of one token in both directions, as docs/kernels/numerics.md says."""
    check_torch(problem(CASE), branch, name)


@by_branch
@pytest.mark.parametrize("name", ["xla", "reference"])
def test_masks_of_jax(name, branch):
    p = problem(CASE)
    step = steps(nsa_jax, CASE, name, jnp.asarray(p.block_indices.numpy()))[0][branch]

    @jax.jit
    def function(query, key, value, do):
        out, pull, lse = jax.vjp(step, query, key, value, has_aux=True)
        return out, lse, *pull(do)

    arrays = [array(x) for x in (p.query, p.keys[0], p.values[0], p.weight)]
    check_reach(lambda *x: [*map(np.asarray, function(*x))], arrays, name, branch, TOKEN)


@pytest.mark.parametrize(
    ("api", "name"),
    [(nsa_jax, "xla"), (nsa_jax, "reference"), (nsa_torch, "sdpa"), (nsa_torch, "reference")],
)
def test_no_selection_reads_later_tokens(api, name):
    p, to = problem(CASE), torch.tensor if api is nsa_torch else jnp.asarray
    select = steps(api, CASE, name, None)[1]
    query, key = (array(x).copy() for x in (p.query, p.keys[0]))
    found = []
    for number in (0, *NUMBERS):
        key[:, TOKEN] = number
        found.append(np.asarray(select(to(query), to(key)))[:, :TOKEN])
        np.testing.assert_array_equal(found[-1], found[0])
