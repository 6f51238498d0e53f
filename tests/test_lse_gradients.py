"""Gradients through the log-sum-exp of the branches of intervals by kernels, where these are
interpreted. Other paths: `test_parity.py`; the selected branch: `test_blocks.py`.
"""

import pytest
import torch

import nsa_torch
from tests import interpreted_triton, pretend, problems
from tests.interpreted_triton import DEVICE, INTERPRETED, TRITON, kernel
from tests.problems import Case
from tests.test_torch_mosaic import interpreted  # noqa: F401, a fixture

plain = pytest.mark.skipif(INTERPRETED, reason="no kernel of Triton")
by_branch = pytest.mark.parametrize("branch", ["compressed", "sliding"])


def check(branch, name, dtype, device="cpu"):
    p = problems.problem(Case(12, 12, H=2, Hkv=1, dtype=dtype, blocks="given"))
    leaves = [x.to(device).requires_grad_() for x in p.steps[branch]]
    step, where = getattr(nsa_torch, f"{branch}_attention"), {"kv_len": 12}
    results = step(*leaves, config=p.case.config, implementation=name, **where)
    weights = [x.to(device) for x in (p.weight, p.lse_weight)]
    found = *results, *torch.autograd.grad(results, leaves, weights)
    names = (f"{branch}.{x}" for x in problems.STEP_NAMES)
    problems.check(p, dict(zip(names, found, strict=True)), p.expected_steps())


@plain
@pytest.mark.usefixtures("interpreted")
@by_branch
def test_mosaic(branch):
    check(branch, "mosaic", "bfloat16")


@pytest.mark.skipif(not TRITON, reason="triton is not installed")
@kernel
@by_branch
def test_triton(branch, monkeypatch):
    if INTERPRETED:  # it takes tensors on the CPU
        pretend.machine(monkeypatch, kernels_why_not=None)
    check(branch, "triton", "float32", DEVICE)


@plain
@pytest.mark.skipif(not TRITON, reason="triton is not installed")
def test_triton_in_its_interpreter():
    interpreted_triton.run_again(__file__)
