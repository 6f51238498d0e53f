"""The Triton kernels of all steps: on a GPU, and without one in Triton's interpreter.

Where the interpreter is not asked for, this file runs once more in a process that asks for it.
"""

import dataclasses
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import kernels_pallas
import nsa_jax
import nsa_torch
from kernels_pallas.triton import capability
from kernels_pallas.triton import tiling as tilings
from nsa_jax import dispatch as jax_dispatch
from nsa_torch import NSAConfig, dispatch
from tests import interpreted_triton, posed, pretend, problems, refusals
from tests.interpreted_triton import DEVICE, INTERPRETED, TRITON, kernel
from tests.jaxprs import layer_types
from tests.limits import set_limits
from tests.oracles.nsa import BRANCHES
from tests.paths import named, negated, same, steps_of_jax, steps_of_torch
from tests.problems import SMALL
from tests.reach import NUMBERS, check_torch
from tests.tables import table
from tests.test_small_scores import BY_SCORE, FAR, LOWEST, far_blocks

pytestmark = pytest.mark.skipif(not TRITON, reason="triton is not installed")

JAX_TRITON = importlib.util.find_spec("jax_triton") is not None


small = pytest.fixture(interpreted_triton.small, autouse=True)


@kernel
@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
def test_what_nan_reaches(branch):
    """Of one token, in both directions, as docs/kernels/numerics.md says."""
    p = problems.problem(problems.Case(24, 24, 2, 1, 8, 8, blocks="given"))
    check_torch(p, branch, "triton", DEVICE, NUMBERS[::2] if INTERPRETED else NUMBERS)


@kernel
def test_a_compressed_token_counts_from_its_last_token_on():
    """The 29th, of the tokens 112 to 127, has nearly all of the probability where it is seen."""
    query = torch.ones(1, 6, 4, 16, device=DEVICE)
    key = torch.zeros(1, 29, 2, 16, device=DEVICE)
    key[:, 28] = 4
    config = NSAConfig(16, 4, 16, num_selected=3, num_initial=0, num_local=0, window=7)
    options = {"config": config, "kv_len": 130, "implementation": "triton"}
    indices = nsa_torch.select_blocks(query, key, **options)
    found = (indices == 7).any(dim=-1)[0]
    assert found.tolist() == [[position >= 127] * 2 for position in range(124, 130)]


def draw(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


@kernel
def test_scores_below_the_range_of_float32_are_equal():
    given = (torch.tensor(x, device=DEVICE) for x in far_blocks(2, "float32"))
    options = {"config": FAR, "kv_len": 480, "scale": 1.0, "implementation": "triton"}
    found = nsa_torch.select_blocks(*given, **options)
    assert found.tolist() == [[[BY_SCORE]], [[LOWEST]]]


@kernel
@pytest.mark.parametrize("branch", range(3))
def test_a_gate_that_is_nan(branch):
    """Its token's output is, of a branch that sees no key as well, and no other; with a gradient
    and without.
    """
    tensors = [draw(1, 24, n, 8, seed=n) for n in (2, 1, 1)]
    gates = draw(1, 24, 2, 3, seed=4)
    gates[0, 2, 1, branch] = torch.nan

    def results(name):
        leaves = [x.clone().requires_grad_() for x in (*tensors, gates)]
        options = {"config": SMALL, "implementation": name}
        with torch.no_grad():
            alone = nsa_torch.attention(*leaves, **options)
        out = nsa_torch.attention(*leaves, **options)
        return alone, out, torch.autograd.grad(out.sum(), leaves)[-1]

    got, want = results("triton"), results("sdpa")
    assert want[0].isnan().any(dim=-1).nonzero().tolist() == [[0, 2, 1]]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)


def on_pages(bit, call):
    """What `call` makes of a cache that was given tokens, and the cache."""
    cache = nsa_torch.PagedCache(4, 2, 16, 16, config=SMALL, dtype=torch.float32, device=DEVICE)
    table = torch.arange(4, dtype=torch.int32, device=DEVICE).view(2, 2)
    at = cache, table, torch.full((2,), 20, dtype=torch.int32, device=DEVICE)
    key, value = (bit(draw(40, 2, 16, seed=i)) for i in range(2))
    nsa_torch.append(at[0], key, value, *at[1:], implementation="triton")
    found = call(bit, *at)
    return *([found] if isinstance(found, torch.Tensor) else found), *cache.tensors().values()


def step(bit, cache, *at):
    query, gates = bit(draw(2, 4, 16, seed=2)), bit(draw(2, 4, 3, seed=3))
    new = {"key": bit(draw(2, 2, 16, seed=4)), "value": bit(draw(2, 2, 16, seed=5))}
    return nsa_torch.paged_attention(query, gates, cache, *at, **new, implementation="triton")


def lists(*shape):
    return torch.zeros(shape, dtype=torch.int32, device=DEVICE)


def block_step(bit, cache, *at):
    query, pages = bit(draw(2, 4, 16)), map(bit, (cache.selected_key, cache.selected_value))
    options = {"block_size": 16, "return_residual": True, "implementation": "triton"}
    return nsa_torch.paged_block_attention(query, *pages, *at, lists(2, 1, 1), **options)


def loss(bit):
    tensors = [draw(1, 24, heads, 16, seed=heads) for heads in (4, 2)]
    kept = [bit(x) for x in (*tensors, draw(1, 24, 4, seed=5))]
    pair = draw(1, 24, 2, 16).requires_grad_(), draw(1, 24, 16).requires_grad_()
    options = {"block_size": 16, "implementation": "triton"}
    out = nsa_torch.indexer_kl(*kept, *map(bit, pair), lists(1, 24, 2, 1), **options)
    return out, *torch.autograd.grad(out, pair, bit(draw(*out.shape, seed=9)))


WITH_THE_BIT = {
    "a cache": lambda bit: on_pages(bit, step),
    "blocks of pages": lambda bit: on_pages(bit, block_step),
    "indexer's loss": loss,
}


@kernel
@pytest.mark.parametrize("name", WITH_THE_BIT)
def test_tensors_with_the_negative_bit(name, monkeypatch):
    """Kernels read memory, which is the negative of such a tensor."""
    if INTERPRETED:
        # It reads in place what a GPU would.
        set_limits(monkeypatch, alignment=16)
        pretend.machine(monkeypatch, append_why_not=None, indexer_why_not=None)
    clean, marked = WITH_THE_BIT[name](same), WITH_THE_BIT[name](negated)
    for got, want in zip(marked, clean, strict=True):
        assert torch.equal(got, want)


@pytest.mark.gpu
def test_chunks_give_the_same_bits():
    """A row's sums depend on no other row of its tile. (NumPy's products do.)"""
    config = dataclasses.replace(SMALL, num_selected=3)
    shapes = enumerate(((2, 16), (1, 16), (1, 16), (2, 3)))
    query, key, value, gates = (draw(1, 30, *shape, seed=i) for i, shape in shapes)

    def call(first, last):
        tensors = query[:, first:last], key[:, :last], value[:, :last], gates[:, first:last]
        tensors = [x.clone(memory_format=torch.contiguous_format) for x in tensors]
        return nsa_torch.attention(*tensors, config=config, implementation="triton")

    assert torch.equal(call(0, 30)[:, 17:], call(17, 30))


if not INTERPRETED:

    @pytest.mark.skipif(not TRITON, reason="triton is not installed")
    def test_triton_sel_parity_in_the_interpreter():
        interpreted_triton.run_again(__file__, "tests/test_parity.py", "-k", "triton")


CHOICES = table("choice")
CAPABILITIES = {name: tuple(x) for name, x in CHOICES["devices"].items()}
EVERYWHERE = pytest.mark.skipif(INTERPRETED, reason="needs no kernel: not run once more")


def pose(device="NVIDIA L4", framework="torch", **changes):
    """A problem on a GPU that need not be there."""
    sizes = dict(H=64, Hkv=4, D=128, Dv=128, device=device, capability=CAPABILITIES[device])
    return posed.pose("selected", 4096, framework, **sizes | changes)


@pytest.fixture
def installed(monkeypatch):
    """Everything is installed."""
    pretend.machine(monkeypatch, triton_missing=None)


@EVERYWHERE
@pytest.mark.usefixtures("installed")
@refusals.by_row("triton")
def test_refusals(row):
    assert kernels_pallas.why_not("triton", pose()) is None
    assert row.sentence in kernels_pallas.why_not("triton", pose(**row.given()))


@pytest.mark.parametrize(("caller", "compiler", "reason"), CHOICES["jax-triton"])
def test_jax_triton_that_does_not_fit_triton(caller, compiler, reason, monkeypatch):
    """A call ended in an AttributeError of jax-triton."""
    of_triton = {} if compiler is None else {"triton": compiler}
    pretend.packages(monkeypatch, jax_triton=caller, **of_triton)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert capability.copies_why_not((9, 0), "bfloat16", "jax") == reason


@EVERYWHERE
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "registry", [jax_dispatch.REGISTRY, dispatch.REGISTRY], ids=["jax", "torch"]
)
@pytest.mark.parametrize("device", CAPABILITIES)
def test_choice_on_posed_devices(registry, device, monkeypatch):
    """Triton where no other kernel is for a GPU, but where the device's file forbids it."""
    pretend.machine(monkeypatch, can_build=True)
    plan = str(registry.choices(pose(device, registry.framework)))
    assert re.fullmatch(refusals.words(CHOICES["plans"][device]), plan)


@EVERYWHERE
@pytest.mark.parametrize("kind", ["forward", "dq", "dkv"])
def test_tiles_fit_every_architecture(kind):
    """The model never gives more than there is, and gives less where there is less, but where
    several programs share it.
    """
    for width in (32, 48, 64, 128, 192, 256):
        for itemsize in (2, 4):
            sizes = []
            for found in CAPABILITIES.values():
                tiling = tilings.choose(kind, 128, 64, width, width, itemsize, found)
                needed = tilings.needed(kind, tiling, width, width, itemsize)
                assert needed <= tilings.smem_of(found)
                together = needed <= tilings.smem_of(found) // 2 and tiling.stages > 1
                if found[0] not in tilings.WIDE or not together:
                    sizes.append((tilings.smem_of(found), needed))
            assert [x for _, x in sorted(sizes)] == sorted(x for _, x in sizes)


with_jax_triton = pytest.mark.skipif(not JAX_TRITON, reason="jax-triton is not installed")


@EVERYWHERE
@with_jax_triton
def test_jax_lowers_forward_backward_and_vmap(monkeypatch):
    """The kernels of all steps, compiled into what JAX would run on a GPU."""
    fast = tilings.Tiling(16, 16, 1, 1)  # to compile
    set_limits(monkeypatch, triton_tiles=lambda *given: fast)
    pretend.jax_gpu(monkeypatch, (8, 0))
    options = {"config": SMALL, "implementation": "triton"}
    loss = lambda *x: nsa_jax.attention(*x, **options).astype(jnp.float32).sum()
    gradients = jax.jit(jax.vmap(jax.grad(loss, (0, 1, 2, 3))))
    arrays = layer_types(2, 1, 64, heads=4, kv_heads=2, width=16)
    # Forward: 3 branches, a block list, scores, the sum. Backward: delta, the block list again,
    # 3 dq, and of dk, dv 3 and the sums of two.
    assert pretend.triton_launches(gradients, *arrays, capability=(8, 0)) == 6 + 10


@pytest.mark.gpu
@with_jax_triton
@pytest.mark.parametrize("case", named("gpu kernel: *"))
def test_both_frameworks_give_the_same_bits(case):
    p = problems.problem(problems.CASES[case])
    found, others = steps_of_torch(p, "triton", DEVICE), steps_of_jax(p, "triton")
    assert found.keys() == others.keys()
    for name, x in found.items():
        np.testing.assert_array_equal(problems.array(x), problems.array(others[name]), name)
