"""Every implementation on torch tensors against JAX's float64 oracle, on the CPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import nsa_torch
from bench.judge.parity import assert_parity
from nsa_jax import reference
from nsa_torch import MLPParams, NSAConfig, PoolParams, RopeMLPParams, sdpa, select
from nsa_torch import reference as torch_reference
from tests.inputs import PAPER, SMALL, Case, any_blocks, problem, selection
from tests.torch_inputs import (
    BRANCHES,
    TIGHT,
    array,
    check_branch,
    check_selection,
    check_under_a_loss_scale,
    check_whole,
    compiled,
    cu_seqlens,
    expected,
    float64,
    float64_world,
    on_the_cpu,
    poison,
    run,
    tensor,
    where_of,
)

CASES = (
    Case(63, 63, H=2, Hkv=2, D=8, Dv=16),
    Case(63, 111, H=6, Hkv=2, D=24, Dv=8),  # G=3, T < S
    Case(111, 111, B=1, H=6, Hkv=1, D=8, Dv=8, config=TIGHT),
    Case(33, 97, B=1, H=16, Hkv=1, D=16, Dv=8),
    Case(5, 5, B=1),  # no compressed token at all
    Case(40, 40, config=dataclasses.replace(SMALL, window=0, num_selected=9)),  # n > blocks
    Case(91, 91, B=1, H=6, Hkv=2, segments=(1, 20, 0, 1, 43, 8, 0, -18)),
    Case(40, 40, B=1, D=8, Dv=8, segments=(7, 6, -27)),  # each shorter than a window
    Case(130, 130, H=8, Hkv=2, D=32, Dv=16, dtype="bfloat16", config=PAPER),
    Case(77, 77, H=3, Hkv=1, dtype="float16"),
)
IMPLEMENTATIONS = ("reference", "sdpa", "fa2", "jax")
# XLA compiles every shape anew, and its own suite covers the shapes.
JAX_CASES = (CASES[1], CASES[6], CASES[8])
RUNS = [(c, i) for c in CASES for i in IMPLEMENTATIONS if i != "jax" or c in JAX_CASES]

by_case = pytest.mark.parametrize("case", CASES, ids=str)
by_run = pytest.mark.parametrize("case, implementation", RUNS, ids=str)


@pytest.fixture(autouse=True)
def _cpu(monkeypatch):
    with on_the_cpu(monkeypatch):
        yield


@by_run
@pytest.mark.parametrize("branch", BRANCHES)
def test_branch_forward_and_backward(case, branch, implementation):
    check_branch(case, branch, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_any_blocks_in_any_order(implementation):
    """Blocks behind the query, empty slots anywhere: output and gradients."""
    check_branch(CASES[1], "selected", implementation, blocks=any_blocks)


@pytest.mark.parametrize("short", [5, 1024])
@pytest.mark.parametrize("case", [CASES[1], CASES[6]], ids=str)
def test_chunks_of_any_length(case, short, monkeypatch):
    """Shorter than the window of these cases is, or longer than all queries, as on a GPU."""
    monkeypatch.setitem(sdpa.SHORT_CHUNK, "cpu", short)
    check_branch(case, "sliding", "sdpa")


@by_run
def test_selection(case, implementation):
    check_selection(case, implementation)


@by_case
@pytest.mark.parametrize("module", [select, torch_reference])
def test_scores(case, module):
    want = expected(case)
    inputs = map(tensor, want.inputs["compressed"][:2])
    got = module.block_scores(*inputs, **where_of(case) | {"kv_len": case.S})
    assert got.dtype == torch.float32
    assert_parity("scores", array(got), want.exact["scores"], want.rough["scores"])


@pytest.mark.parametrize("num_blocks", [1, 4, 5, 23])
@pytest.mark.parametrize(
    "config", [SMALL, TIGHT, dataclasses.replace(SMALL, num_selected=9, num_initial=3)]
)
def test_equal_scores_go_to_the_lower_index(num_blocks, config, rng):
    scores = rng.integers(0, 3, size=(40, num_blocks)).astype(np.float32)
    own = rng.integers(-1, num_blocks, size=40)
    got = select.select_from_scores(torch.tensor(scores), torch.tensor(own), config).numpy()
    for row, last, indices in zip(scores, own, got, strict=True):
        forced = {*range(config.num_initial), *range(last - config.num_local + 1, last + 1)}
        forced &= set(range(last + 1))
        order = sorted(range(last + 1), key=lambda j: (j not in forced, -row[j], j))
        want = sorted(order[: config.num_selected])
        assert indices.tolist() == want + [-1] * (config.num_selected - len(want))


@pytest.mark.parametrize("implementation", ["reference", "sdpa", "jax"])
def test_equal_keys_select_as_the_reference_does(implementation):
    case = Case(111, 111, H=3, Hkv=1)
    query = problem(case).query
    key = jnp.zeros((2, case.config.num_compressed(111), 1, 16))
    got = run("scores", implementation, tensor(query), tensor(key), config=case.config)
    want = selection(query, key, config=case.config)
    np.testing.assert_array_equal(array(got), want)


WHOLE = (
    Case(63, 111, H=6, Hkv=2, D=8, Dv=12),
    Case(91, 91, B=1, H=6, Hkv=2, segments=(1, 20, 0, 1, 43, 8, 0, -18)),
)


@pytest.mark.parametrize("implementation", [None, "reference", "jax"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_under_a_loss_scale(dtype, implementation):
    check_under_a_loss_scale(dtype, implementation)


@pytest.mark.parametrize("implementation", [None, "reference", "jax"])
def test_tensors_with_the_negative_bit(implementation):
    """Memory holds their negative; the gradient that comes in has the bit too."""
    leaves = [torch.randn(1, 24, n, 8).requires_grad_() for n in (4, 2, 2)]
    leaves.append(torch.randn(1, 24, 4, 3).requires_grad_())
    found = []
    for change in torch.clone, lambda x: torch._neg_view(-x):
        given = map(change, leaves)
        out = nsa_torch.attention(*given, config=SMALL, implementation=implementation)
        found.append([out, *torch.autograd.grad(out, leaves, change(torch.ones_like(out)))])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("case", WHOLE, ids=str)
@pytest.mark.parametrize("implementation", [None, "reference", "jax"])
def test_attention(case, implementation):
    check_whole(case, implementation)


def phi_params(kind, width, block, rng):
    """Parameters of a compression as NumPy, of a `kind` that both frameworks know."""
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32) / 3
    if kind in (MLPParams, RopeMLPParams):
        shapes = (
            (block, width),
            (block * width, 12),
            (12,),
            (12, width),
            (width,),
            (width // 2,),
        )
        return kind(*(normal(*shape) for shape in shapes[: len(kind._fields)]))
    return None if kind is None else PoolParams(normal(block, width))


@pytest.mark.parametrize("kind", [None, PoolParams, MLPParams, RopeMLPParams])
@pytest.mark.parametrize("segments", [None, (1, 20, 0, 7, 43, 8, 0, -18)])
def test_compress(kind, segments, rng):
    case = Case(97, 97, B=1, segments=segments)
    p, params = problem(case), phi_params(kind, 16, case.config.compress_block, rng)
    weight = rng.normal(size=(1, case.config.num_compressed(97), 2, 16)).astype(np.float32)

    def both(params, x, weight):
        run = functools.partial(
            reference.compress, config=case.config, segment_ids=p.segment_ids
        )
        out, pull = jax.vjp(lambda params, x: run(x, params), params, x)
        return jax.tree.leaves((out, pull(weight)))

    rough = compiled(both, params, p.key, weight)
    with float64_world():
        exact = compiled(both, *jax.tree.map(float64, (params, p.key, weight)))
        exact, rough = jax.tree.map(np.asarray, (exact, rough))
    params = jax.tree.map(lambda x: torch.tensor(x, requires_grad=True), params)
    x = poison(tensor(p.key), [97 - 18 if segments else 97]).requires_grad_()
    out = nsa_torch.compress(x, params, config=case.config, cu_seqlens=cu_seqlens(case))
    leaves = [*(params or ()), x]
    got = (out, *torch.autograd.grad(out, leaves, tensor(weight)))
    for i, (a, want, near) in enumerate(zip(got, exact, rough, strict=True)):
        if kind is RopeMLPParams and i == 1 + kind._fields.index("rates"):
            continue  # nobody learns it; it grows with the position, as its error does
        assert_parity(f"{i}", array(a), want, near)


@pytest.mark.parametrize("block", [4, 12])
@pytest.mark.parametrize("length", [3, 60, 62])
def test_the_mean_is_rounded_once(block, length):
    config = NSAConfig(block, 4, 12)
    x = torch.randn(2, length, 3, 5).bfloat16().requires_grad_()
    exact = x.detach().double().requires_grad_()
    out, want = (nsa_torch.compress(t, config=config) for t in (x, exact))
    assert out.shape == (2, config.num_compressed(length), 3, 5)
    weight = torch.randn(out.shape).bfloat16()
    if length >= block:
        (grad,) = torch.autograd.grad(out, x, weight)
        (want_grad,) = torch.autograd.grad(want, exact, weight.double())
        half_ulp = dict(rtol=2**-8, atol=1e-6)
        torch.testing.assert_close(grad.double(), want_grad, **half_ulp)
        torch.testing.assert_close(out.double(), want, **half_ulp)
    none = nsa_torch.compress(x[:0], config=config)
    assert none.shape == (0, *out.shape[1:])
