"""Gradients through the log-sum-exp of each branch in torch: every implementation against autograd
on the dense reference in float64, and that against finite differences.
"""

import functools

import pytest
import torch

import nsa_torch
from nsa_torch import fa2, reference
from tests import interpreted_triton, pretend
from tests.inputs import SMALL
from tests.interpreted_triton import DEVICE, INTERPRETED, TRITON, kernel
from tests.test_torch_mosaic import interpreted  # noqa: F401, a fixture
from tests.torch_inputs import on_the_cpu

plain = pytest.mark.skipif(INTERPRETED, reason="no kernel of Triton")
by_branch = pytest.mark.parametrize("branch", ["compressed", "selected", "sliding"])
KERNELS = "compressed", "sliding"  # the selected branch: `test_blocks.py`
by_rows = pytest.mark.parametrize("bounds", [None, (0, 21, 22, 37)], ids=["row", "packed"])
SIZES, FEW, D = (41, 4, 2), (12, 2, 1), 16  # tokens, heads, key heads


@functools.cache
def inputs(branch, sizes=SIZES):
    """Query, key, value, block indices or none, and gradients of out and lse; in float64."""
    T, H, HKV = sizes
    make = torch.Generator().manual_seed(2)
    draw = lambda *shape: torch.randn(shape, generator=make, dtype=torch.float64)
    count = SMALL.num_compressed(T) if branch == "compressed" else T
    tensors = draw(1, T, H, D), draw(1, count, HKV, D), draw(1, count, HKV, D)
    lists = []
    if branch == "selected":
        blocks = SMALL.num_blocks(T) + SMALL.num_selected
        order = torch.rand(1, T, HKV, blocks, generator=make).argsort(-1)
        lists = [order[..., : SMALL.num_selected].int()]
    return tensors, lists, (draw(1, T, H, D), draw(1, T, H))


def run(function, branch, bounds, dtype, device="cpu", sizes=SIZES, **named):
    """out, lse and gradients by `function`."""
    tensors, lists, grads = inputs(branch, sizes)
    leaves = [x.to(device, dtype).requires_grad_() for x in tensors]
    options = {"config": SMALL, "kv_len": sizes[0]} | named
    if bounds is not None:
        options |= {"cu_seqlens": torch.tensor(bounds, device=device)}
        options |= {} if "implementation" not in named else {"kv_len": None}
    out, lse = function(*leaves, *(x.to(device) for x in lists), **options)
    do, dlse = (x.to(device) for x in grads)
    found = torch.autograd.grad([out, lse], leaves, [do.to(out.dtype), dlse.to(lse.dtype)])
    return [x.detach().double().cpu() for x in (out, lse, *found)]


@functools.cache
def expected(branch, bounds, sizes):
    attend = getattr(reference, f"{branch}_attention")
    return run(attend, branch, bounds, torch.float64, sizes=sizes)


def check(
    branch, bounds, implementation, dtype=torch.float32, device="cpu", most=5e-5, sizes=SIZES
):
    public = getattr(nsa_torch, f"{branch}_attention")
    found = run(public, branch, bounds, dtype, device, sizes, implementation=implementation)
    for got, want in zip(found, expected(branch, bounds, sizes), strict=True):
        torch.testing.assert_close(got, want, rtol=most, atol=most)


@plain
@pytest.mark.parametrize("implementation", ["sdpa", "jax", "reference"])
@by_rows
@by_branch
def test_torch(branch, bounds, implementation):
    check(branch, bounds, implementation)


@plain
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("branch", KERNELS)
def test_mosaic(branch):
    check(branch, None, "mosaic", torch.bfloat16, most=0.06, sizes=FEW)


@pytest.mark.skipif(not TRITON, reason="triton is not installed")
@kernel
@pytest.mark.parametrize("branch", KERNELS)
def test_triton(branch, monkeypatch):
    if INTERPRETED:  # it takes tensors on the CPU
        pretend.machine(monkeypatch, kernels_why_not=None)
    check(branch, None, "triton", device=DEVICE, most=1e-4, sizes=FEW)


@plain
@pytest.mark.skipif(not TRITON, reason="triton is not installed")
def test_triton_in_its_interpreter():
    interpreted_triton.run_again(__file__)


@plain
@by_branch
def test_the_reference_by_finite_differences(branch):
    tensors, lists, _ = inputs(branch)
    attend = getattr(reference, f"{branch}_attention")

    def lse_of(query, key):
        lse = attend(query, key, tensors[2], *lists, config=SMALL, kv_len=SIZES[0])[1]
        return lse.masked_fill(lse == -torch.inf, 0)

    leaves = [x.clone().requires_grad_() for x in tensors[:2]]
    assert torch.autograd.gradcheck(lse_of, leaves, fast_mode=True)


@plain
@by_branch
def test_fa2_refuses(branch, monkeypatch):
    """The gradient of the output is there."""
    tensors, lists, grads = inputs(branch)
    attend = getattr(fa2, f"{branch}_attention")
    with on_the_cpu(monkeypatch):
        leaves = [x.half().requires_grad_() for x in tensors]
        out, lse = attend(*leaves, *lists, config=SMALL, kv_len=SIZES[0])
        torch.autograd.grad(out, leaves, grads[0].half(), retain_graph=True)
        with pytest.raises(NotImplementedError, match="no gradient of its log-sum-exp"):
            torch.autograd.grad([out, lse], leaves, [grads[0].half(), torch.ones_like(lse)])
