"""The library paths on a GPU: the table of the CPU tests in the precisions that FA-2 takes.

`-k fa2_gpu_varlen` runs those that prove the varlen packing: rows outside every sequence,
sequences without queries or keys, more sequences than one call takes, no wait for the device.
"""

import dataclasses

import jax
import pytest
import torch

import nsa_torch
from nsa_torch import NSAConfig, chunks, fa2
from tests.inputs import PAPER, SMALL, Case, any_blocks
from tests.limits import set_limits
from tests.torch_inputs import (
    BRANCHES,
    FEW,
    TIGHT,
    check_branch,
    check_reach,
    check_selection,
    check_whole,
    poison,
    run,
    steps,
)

pytestmark = pytest.mark.gpu

CASES = (
    Case(63, 63, H=2, Hkv=2, D=64, Dv=64, dtype="float16"),
    Case(63, 111, H=6, Hkv=2, D=64, Dv=32, config=FEW, dtype="bfloat16"),
    Case(111, 111, B=1, H=6, Hkv=1, D=32, Dv=64, config=TIGHT, dtype="bfloat16"),
    Case(1, 75, D=64, Dv=64, dtype="bfloat16"),
    Case(5, 5, B=1, dtype="bfloat16"),
    Case(40, 40, config=dataclasses.replace(SMALL, window=0), dtype="float16"),
    Case(91, 91, B=1, H=6, Hkv=2, segments=(1, 20, 0, 1, 43, 8, 0, -18), dtype="bfloat16"),
    Case(299, 299, B=1, H=16, Hkv=1, D=128, Dv=128, config=PAPER, dtype="bfloat16"),
    Case(130, 413, B=2, H=8, Hkv=2, D=192, Dv=128, config=PAPER, dtype="float16"),
)
WHOLE = (CASES[1], CASES[6])
# XLA compiles every shape anew, and its own suite covers the shapes.
RUNS = [(c, i) for c in CASES for i in ("sdpa", "jax") if i != "jax" or c in WHOLE]

by_case = pytest.mark.parametrize("case", CASES, ids=str)
by_branch = pytest.mark.parametrize("branch", BRANCHES)


@pytest.fixture(autouse=True)
def _oracle_on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@by_case
@by_branch
def test_fa2_gpu_varlen_branch(case, branch, monkeypatch):
    set_limits(monkeypatch, torch_chunk_bytes=2**20)  # several chunks
    check_branch(case, branch, "fa2", "cuda")


@pytest.mark.parametrize("case, implementation", RUNS, ids=str)
@by_branch
def test_gpu_branch(case, branch, implementation, monkeypatch):
    set_limits(monkeypatch, torch_chunk_bytes=2**20)
    check_branch(case, branch, implementation, "cuda")


SEVEN_HUNDRED = Case(
    700,
    700,
    B=1,
    H=8,
    Hkv=2,
    D=64,
    Dv=64,
    config=dataclasses.replace(PAPER, num_selected=11),
    dtype="bfloat16",
)
ANY_BLOCKS = (
    SEVEN_HUNDRED,
    dataclasses.replace(SEVEN_HUNDRED, H=2),
    dataclasses.replace(SEVEN_HUNDRED, H=32, dtype="float16"),
    dataclasses.replace(SEVEN_HUNDRED, T=350),
    dataclasses.replace(SEVEN_HUNDRED, segments=(300, 1, 380, -19)),
)
ANY_BLOCKS_RUNS = [(c, i) for c in ANY_BLOCKS for i in ("sdpa", "fa2", "triton")] + [
    (dataclasses.replace(SEVEN_HUNDRED, H=h, dtype="float32"), "triton") for h in (2, 8, 32)
]


@pytest.mark.parametrize("case, implementation", ANY_BLOCKS_RUNS, ids=str)
def test_gpu_any_blocks_in_any_order(case, implementation):
    """Blocks behind the query, empty slots anywhere: output and gradients."""
    check_branch(case, "selected", implementation, "cuda", any_blocks)


REACH_ON_GPU = Case(300, 300, B=1, H=8, Hkv=2, D=64, Dv=64, config=PAPER, dtype="bfloat16")


@by_branch
def test_fa2_gpu_what_nan_reaches(branch):
    """Of one token, in both directions, as docs/kernels/numerics.md says."""
    check_reach(REACH_ON_GPU, branch, "fa2", "cuda")


@by_case
def test_gpu_selection(case):
    check_selection(case, "sdpa", "cuda")


@pytest.mark.parametrize("case", WHOLE, ids=str)
@pytest.mark.parametrize("implementation", ["fa2", "sdpa", "jax"])
def test_fa2_gpu_varlen_attention(case, implementation):
    check_whole(case, implementation, "cuda")


def bf16(*shape):
    make = torch.Generator("cuda").manual_seed(sum(shape))
    x = torch.randn(shape, generator=make, device="cuda", dtype=torch.bfloat16)
    return x.requires_grad_()


@pytest.mark.parametrize("implementation", ["fa2", "sdpa"])
def test_fa2_gpu_varlen_nan_in_padding_goes_nowhere(implementation):
    leaves = bf16(1, 300, 8, 64), bf16(1, 300, 2, 64), bf16(1, 300, 2, 64)
    bounds = torch.tensor([0, 0, 150, 151, 249], device="cuda", dtype=torch.int32)
    results = []
    for dirty in (True, False):
        inputs = [poison(x, [249]) if dirty else x for x in leaves]
        found = steps(implementation, *inputs, FEW, cu_seqlens=bounds)
        outs, lses = zip(*(found[branch] for branch in BRANCHES), strict=True)
        grads = torch.autograd.grad(sum(x.float().square().sum() for x in outs), leaves)
        results.append((*outs, *lses, *grads))
        assert all((x[:, 249:] == 0).all() for x in (*outs, *grads))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)  # dq adds up in any order


@pytest.mark.parametrize("implementation", ["fa2", "sdpa"])
@pytest.mark.parametrize("T", [1, 17])
def test_fa2_gpu_varlen_cache_lengths_differ_by_row(implementation, T):
    lengths = [T, 150, 400]
    query, key, value = bf16(3, T, 8, 64), bf16(3, 400, 2, 64), bf16(3, 400, 2, 64)
    dirty = [poison(x, lengths) for x in (key, value)]
    kv_len = torch.tensor(lengths, device="cuda", dtype=torch.int32)
    got = steps(implementation, query, *dirty, FEW, kv_len=kv_len)
    for row, length in enumerate(lengths):
        part = slice(row, row + 1)
        alone = [x[part, :length] for x in (key, value)]
        want = steps("reference", query[part], *alone, FEW, kv_len=length)
        for branch in BRANCHES:
            for a, b in zip(got[branch], want[branch], strict=True):
                torch.testing.assert_close(a[part], b, rtol=2e-2, atol=2e-2)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("implementation", ["fa2", "sdpa"])
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
    assert query.shape[1] * 2 > fa2.MAX_SEQUENCES
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


@pytest.mark.parametrize("implementation", ["fa2", "sdpa"])
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
    assert peak < 8 * chunks.BUDGET_BYTES, f"{peak / 2**20:.0f} MiB"


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
