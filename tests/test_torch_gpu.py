"""The library paths on a GPU: the table of the CPU tests in the precisions that FA-2 takes.

`-k fa2_gpu_varlen` runs those that prove the varlen packing: rows outside every sequence,
sequences without queries or keys, more sequences than one call takes, no wait for the device.
"""

import copy
import functools

import pytest
import torch

import nsa_torch
from nsa_torch import NSAAttention, NSAConfig
from tests.oracles.nsa import BRANCHES
from tests.problems import FEW, PAPER, Case, problem
from tests.reach import check_torch
from tests.torch_inputs import normal, run, steps

pytestmark = pytest.mark.gpu


REACH_ON_GPU = Case(300, 300, 8, 2, 64, 64, config=PAPER, dtype="bfloat16", blocks="given")


@pytest.fixture
def deterministic():
    """FA-2 otherwise adds up the gradient of queries in any order."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("branch", BRANCHES)
def test_fa2_gpu_what_nan_reaches(branch):
    """Of one token, in both directions, as docs/kernels/numerics.md says."""
    check_torch(problem(REACH_ON_GPU), branch, "fa2", "cuda")


bf16 = functools.partial(normal, device="cuda")


by_path = pytest.mark.parametrize("implementation", ["fa2", "sdpa"])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@by_path
@pytest.mark.parametrize("packed", [False, True])
def test_fa2_gpu_varlen_never_waits_for_the_device(implementation, packed):
    query, key, value = bf16(1, 300, 8, 64), bf16(1, 300, 2, 64), bf16(1, 300, 2, 64)
    where = {"kv_len": torch.tensor([300], device="cuda")}
    if packed:
        where = {"cu_seqlens": torch.tensor([0, 100, 290], device="cuda")}
    for mode in ("default", "error"):  # the first call loads the kernels
        torch.cuda.set_sync_debug_mode(mode)
        try:
            found = steps(implementation, query, key, value, FEW, **where)
            sum(found[branch][0].sum() for branch in BRANCHES).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_fa2_gpu_varlen_more_sequences_than_one_call_takes():
    config = NSAConfig(4, 4, 4, num_selected=2, num_initial=1, num_local=1, window=4)
    query, key, value = bf16(1, 40000, 2, 8), bf16(1, 40000, 2, 8), bf16(1, 40000, 2, 8)
    assert query.shape[1] * 2 > 65535
    indices = torch.arange(40000, device="cuda", dtype=torch.int32) // 4
    indices = torch.stack([torch.zeros_like(indices), indices], dim=-1)
    indices[:4, 1] = -1
    indices = indices[None, :, None].repeat(1, 1, 2, 1)
    results = []
    for implementation in ("fa2", "sdpa"):
        out, lse = run("selected", implementation, query, key, value, indices, config=config)
        results.append((out, lse, *torch.autograd.grad(out.sum(), (query, key, value))))
    for a, b in zip(*results, strict=True):
        scale = float(b.detach().float().abs().max())
        torch.testing.assert_close(a, b, rtol=2e-2, atol=4e-3 * scale)


@by_path
def test_fa2_gpu_varlen_memory_is_bounded(implementation):
    """All selected keys and values of 8192 queries would be 8.6 GB."""
    query, key, value = bf16(1, 8192, 16, 128), bf16(1, 8192, 2, 128), bf16(1, 8192, 2, 128)
    gates = bf16(1, 8192, 16, 3)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = nsa_torch.attention(query, key, value, gates, implementation=implementation)
    out.sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert torch.isfinite(query.grad).all()
    assert peak < 8 * 2**28, f"{peak / 2**20:.0f} MiB"


def test_fa2_gpu_varlen_is_deterministic_on_request():
    """Deterministic mode also fills fresh memory with NaN, which must not come through."""
    query, key, value = bf16(1, 700, 8, 64), bf16(1, 700, 2, 64), bf16(1, 700, 2, 64)
    bounds = torch.tensor([0, 1, 1, 333, 650], device="cuda")
    gates = bf16(1, 700, 8, 3)
    options = {"config": FEW, "cu_seqlens": bounds}
    compressed_key = nsa_torch.compress(key, **options)
    # Matrix products of cuBLAS are deterministic only under a setting of the process.
    options["block_indices"] = nsa_torch.select_blocks(query, compressed_key, **options)
    grads = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            out = nsa_torch.attention(query, key, value, gates, implementation="fa2", **options)
            grads.append((out, *torch.autograd.grad(out.sum(), (query, key, value, gates))))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.isfinite(x).all() for x in grads[0])
    for again in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], again, strict=True))


def test_a_layer_with_convolved_keys_equals_its_float32_form():
    """Whole rows with gradients, packed rows, and steps from a cache; all blocks are selected."""
    torch.manual_seed(0)
    device, low = "cuda", torch.bfloat16
    sizes = dict(n_heads=12, n_kv_groups=2, d_k=64, d_v=64, gate="head", kv="shared")
    layer = NSAAttention(256, **sizes, n_sel=8, key_taps=3).to(device)
    torch.nn.init.normal_(layer.key_conv.weight, std=0.5)
    fast = copy.deepcopy(layer).to(low)
    layer.implementation = "reference"
    x = torch.randn(1, 512, 256, device=device)

    def near(found, wanted):
        error = (found.float() - wanted).abs().max() / wanted.abs().max()
        assert error < 0.03, error

    bounds = torch.tensor([0, 200, 201, 512], device=device)
    for packed in (None, bounds):
        inputs = [x.clone().requires_grad_(), x.to(low).requires_grad_()]
        for module, given in zip((layer, fast), inputs, strict=True):
            module.zero_grad()
            module(given, cu_seqlens=packed)[0].square().sum().backward()
        near(fast(inputs[1], cu_seqlens=packed)[0], layer(x, cu_seqlens=packed)[0])
        near(inputs[1].grad, inputs[0].grad)
        for (name, a), b in zip(fast.named_parameters(), layer.parameters(), strict=True):
            assert (a.grad.float() - b.grad).norm() < 0.03 * b.grad.norm(), name
    with torch.no_grad():
        whole, cache, parts = layer(x)[0], fast.init_cache(1, 512), []
        for size in (300, 200, *[1] * 12):
            begin = sum(each.shape[1] for each in parts)
            parts.append(fast(x[:, begin : begin + size].to(low), cache)[0])
        near(torch.cat(parts, dim=1), whole)
