"""What holds of every path, whatever the numbers: who sees whom, and what NaN reaches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import nsa_jax
import nsa_torch
from tests.oracles import nsa
from tests.problems import SMALL, Case, array, problem
from tests.reach import NUMBERS, check_reach, steps

LENGTH, TOKEN = 70, 40
# The width of values is the length, so that values of ones and zeros show probabilities.
WHOLE = Case(LENGTH, LENGTH, D=8, Dv=LENGTH, blocks="any")
PACKED = Case(LENGTH, LENGTH, D=8, Dv=LENGTH, blocks="any", documents=(40, 1, 20))


@functools.cache
def of_jax(name, case):
    p, ids = problem(case), {}
    if case.documents:
        ids = {"segment_ids": jnp.asarray(p.rows.tokens()[0][None].numpy(), jnp.int32)}
    blocks = jnp.asarray(p.block_indices.numpy())
    branches, select = steps(nsa_jax, case, ids, name, blocks)

    @jax.jit
    def function(query, key, value, do):
        found = {"indices": select(query, key)}
        for branch, step in branches.items():
            out, pull, lse = jax.vjp(step, query, key, value, has_aux=True)
            found[branch] = out, lse, *pull(do)
        return found

    return function


@functools.cache
def of_torch(name, case):
    p, bounds = problem(case), {}
    if case.documents:
        bounds = {"cu_seqlens": torch.tensor(np.cumsum([0, *case.documents]))}
    branches, select = steps(nsa_torch, case, bounds, name, p.block_indices)

    def function(*arrays):
        *leaves, do = map(torch.tensor, arrays)
        leaves = [x.requires_grad_() for x in leaves]
        found = {"indices": select(*leaves[:2])}
        for branch, step in branches.items():
            out, lse = step(*leaves)
            found[branch] = out, lse, *torch.autograd.grad(out, leaves, do)
        return found

    return function


PATHS = {
    "jax xla": of_jax,
    "jax reference": of_jax,
    "torch sdpa": of_torch,
    "torch reference": of_torch,
}


def run(path, case, *arrays):
    found = PATHS[path](path.partition(" ")[2], case)(*arrays)
    return {
        branch: [array(y) for y in x] if branch in nsa.BRANCHES else array(x)
        for branch, x in found.items()
    }


@pytest.mark.parametrize("case", [WHOLE, PACKED], ids=["whole", "packed"])
@pytest.mark.parametrize("path", PATHS)
def test_masks(path, case):
    """A query's probabilities, of one sequence and of several, add up to one over the very tokens
    that it may see.
    """
    p = problem(case)
    ones = np.broadcast_to(np.eye(LENGTH, dtype=np.float32)[:, None], p.values[0].shape)
    given = [array(x) for x in (p.query, p.keys[0], p.weight)]
    found = run(path, case, *given[:2], ones, given[2])
    _, _, first = p.rows.windows(SMALL)
    token = torch.arange(LENGTH)
    windows = (first[:, None] <= token) & (token < first[:, None] + SMALL.compress_block)
    compressed = nsa.compressed_mask(SMALL, p.rows).double() @ windows.double() > 0
    masks = (
        compressed,
        nsa.selected_mask(p.block_indices, SMALL, p.rows),
        nsa.sliding_mask(SMALL, p.rows),
    )
    for branch, mask in zip(nsa.BRANCHES, masks, strict=True):
        out = found[branch][0].reshape(LENGTH, case.Hkv, -1, LENGTH)
        mask = mask[0].expand(case.Hkv, -1, -1).permute(1, 0, 2).numpy()
        np.testing.assert_array_equal((out != 0).any(2), mask, err_msg=branch)
        np.testing.assert_array_equal((out != 0).all(2), mask, err_msg=branch)
        some = np.broadcast_to(mask.any(-1)[..., None], out.shape[:3])
        np.testing.assert_allclose(out.sum(-1), some, atol=1e-5, err_msg=branch)


@pytest.mark.parametrize("path", PATHS)
def test_what_nan_reaches(path):
    """Of one token in both directions, as docs/kernels/numerics.md says; no selection reads it."""
    p, known = problem(WHOLE), {}

    def function(*arrays):
        key = b"".join(x.tobytes() for x in arrays)
        if key not in known:
            known[key] = run(path, WHOLE, *arrays)
        return known[key]

    arrays = [array(x) for x in (p.query, p.keys[0], p.values[0], p.weight)]
    for branch in nsa.BRANCHES:
        of_branch = lambda *x, branch=branch: function(*x)[branch]
        check_reach(of_branch, arrays, path.partition(" ")[2], branch, TOKEN)
    clean = function(*arrays)["indices"][:, :TOKEN]
    for number in NUMBERS:
        changed = arrays[1].copy()
        changed[:, TOKEN] = number
        found = function(arrays[0], changed, *arrays[2:])["indices"]
        np.testing.assert_array_equal(found[:, :TOKEN], clean)
