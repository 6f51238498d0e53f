"""Borders of packed sequences that contradict themselves: an error where the host reads them, and
one result, that of borders that hold, where it does not.
"""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import nsa_torch
from nsa_core import debug
from nsa_torch import NSAAttention
from tests import torch_inputs
from tests.devices import needs_gpu
from tests.inputs import SMALL

LENGTH = 60
BAD = {
    "decreasing": ([0, 25, 10, 40], "must not decrease, got 10 after 25 at index 2"),
    "later": ([3, 25, 40], "must begin with 0, got 3"),
    "negative": ([-2, 25, 40], "must begin with 0, got -2"),
    "beyond": ([0, 25, 61], "must end with 60, the number of tokens, at most, got 61"),
}


def tensors(device="cpu", dtype=torch.float32, width=16, heads=4):
    make = torch.Generator().manual_seed(0)
    shapes = [(1, LENGTH, n, width) for n in (heads, 2, 2)] + [(1, LENGTH, heads, 3)]
    return [torch.randn(x, generator=make).to(device, dtype) for x in shapes]


def steps(bounds, implementation=None, config=SMALL, inputs=None):
    """By name, each public function that takes borders."""
    query, key, value, gates = inputs or tensors(bounds.device)
    packed = {"config": config, "cu_seqlens": bounds}
    count = config.num_compressed(LENGTH)
    pair = key[:, :count].contiguous(), value[:, :count].contiguous()
    shape = 1, LENGTH, 2, config.num_selected
    indices = torch.full(shape, -1, dtype=torch.int32, device=query.device)
    indices[..., 0] = 0
    chosen = packed | {"implementation": implementation}
    run = lambda step, *x: torch_inputs.run(step, implementation, query, *x, **packed)
    return {
        "attention": lambda: nsa_torch.attention(query, key, value, gates, **chosen),
        "compress": lambda: nsa_torch.compress(key, **packed),
        "scores": lambda: run("scores", pair[0]),
        "compressed": lambda: run("compressed", *pair)[0],
        "selected": lambda: run("selected", key, value, indices)[0],
        "sliding": lambda: run("sliding", key, value)[0],
    }


@pytest.mark.parametrize("name", BAD)
def test_refused_on_a_cpu(name):
    numbers, message = BAD[name]
    bounds = torch.tensor(numbers)
    layer = NSAAttention(16, 4, 2, 8, 8, l=8, d=4, l_sel=16, n_sel=4, w=10)
    calls = steps(bounds) | {
        "layer": lambda: layer(torch.zeros(1, LENGTH, 16), cu_seqlens=bounds)
    }
    for call in calls.values():
        with pytest.raises(ValueError, match=f"cu_seqlens {message}"):
            call()


class Unread(TorchDispatchMode):
    """Where the host reads no numbers."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(function)
        return function(*args, **(kwargs or {}))


def held(numbers, like):
    ends = np.maximum.accumulate(np.clip(numbers[1:], 0, LENGTH))
    return torch.tensor([0, *ends], dtype=like.dtype, device=like.device)


@pytest.mark.parametrize("implementation", ["sdpa", "reference"])
@pytest.mark.parametrize("name", BAD)
def test_defined_where_they_are_not_read(name, implementation, monkeypatch):
    bounds = torch.tensor(BAD[name][0], dtype=torch.int32)
    with torch_inputs.on_the_cpu(monkeypatch):
        right = steps(held(BAD[name][0], bounds), implementation)
        for step, call in steps(bounds, implementation).items():
            with Unread():
                found = call()
            assert torch.equal(found, right[step]()) and found.isfinite().all()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("implementation", ["mosaic", "triton", "fa2", "sdpa", "reference"])
def test_defined_on_a_gpu(implementation):
    """Outputs and gradients of any numbers, in the list of a call too, without a wait."""
    draw, inputs = np.random.default_rng(0), tensors("cuda", torch.bfloat16, 64, 32)
    config = nsa_torch.NSAConfig()
    cases = [x for x, _ in BAD.values() if len(x) == 4]
    cases += [draw.integers(-100, 200, 4).tolist() for _ in range(12)]
    cases += [[0, 2**31 - 1, -(2**31), 60], [0, 60, 0, 60]]
    waits = "default"  # the first call loads kernels
    for numbers in cases:
        found = []
        bounds = torch.tensor(numbers, dtype=torch.int32, device="cuda")
        for each in (bounds, held(numbers, bounds)):
            leaves = [x.detach().requires_grad_() for x in inputs]
            torch.cuda.set_sync_debug_mode(waits)
            try:
                out = steps(each, implementation, config, leaves)["attention"]()
                grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
            finally:
                torch.cuda.set_sync_debug_mode("default")
            found.append([out, *grads])
            with torch.no_grad():
                calls = steps(each, implementation, config, inputs)
                found[-1] += [call() for call in calls.values()]
        assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
        assert all(x.isfinite().all() for x in found[0])
        waits = "default" if implementation == "reference" else "error"


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", BAD)
def test_debug_reads_them_on_a_gpu(name):
    numbers, message = BAD[name]
    debug.enable("routing")
    try:
        with pytest.raises(ValueError, match=message):
            steps(torch.tensor(numbers, device="cuda"))["attention"]()
    finally:
        debug.enable()
