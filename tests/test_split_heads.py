"""Query, keys and values out of one product: the operators of torch and the Triton kernel against
complex numbers, and the layer with one product against the layer with one a weight.

`test_pack.py` runs this file in Triton's interpreter.
"""

import copy
import dataclasses
import functools

import numpy as np
import pytest
import torch
from torch import nn

from bench.judge.parity import assert_parity
from kernels_pallas.triton.descriptions import Heads
from nsa_torch import Branches, heads
from tests import pretend
from tests.interpreted_triton import DEVICE, INTERPRETED, kernel
from tests.limits import set_limits
from tests.problems import TABLE
from tests.test_layers import in_torch

SIZES = [Heads(**row) for row in TABLE["heads"]]
BASE, SCALE = 100.0, 2.0
DTYPES = ["float32"] if INTERPRETED else ["float32", "bfloat16", "float16"]
EPS = 1e-3
by_norms = pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
by_size = pytest.mark.parametrize("sizes", SIZES, ids=str)


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def norm_weights(sizes):
    """Of query heads and of key heads; none of them is neutral."""
    return [1 + drawn(sizes.D, seed=seed) / 2 for seed in (11, 12)]


def norms_of(sizes, dtype=torch.float32):
    made = []
    for weight in norm_weights(sizes):
        made.append(nn.RMSNorm(sizes.D, eps=EPS, dtype=dtype))
        made[-1].weight.data.copy_(torch.from_numpy(weight))
    return tuple(made)


def expected(product, position, sizes, normed):
    """Pairs of columns as complex numbers, in float64: query, keys, values of each branch, mean,
    gates.
    """
    rates = BASE ** -(np.arange(sizes.D // 2) * 2 / sizes.D) / SCALE
    turns = np.exp(1j * position[..., None] * rates)[:, :, None]

    def turned(x):
        pairs = x.reshape(*x.shape[:-1], -1, 2)
        spun = (pairs[..., 0] + 1j * pairs[..., 1]) * turns
        return np.stack([spun.real, spun.imag], axis=-1).reshape(x.shape)

    found, at = [], 0
    for width in [sizes.D] * (1 + sizes.branches) + [sizes.Dv] * sizes.branches:
        count = sizes.Hkv if found else sizes.H
        part = product[..., at : at + count * width].astype(np.float64)
        part = part.reshape(*part.shape[:-1], count, width)
        if normed and len(found) <= sizes.branches:
            weight = norm_weights(sizes)[min(len(found), 1)]
            part = part / np.sqrt((part**2).mean(axis=-1, keepdims=True) + EPS) * weight
        rotated = not found or sizes.raw_keys < len(found) <= sizes.branches
        found.append(turned(part) if rotated else part)
        at += count * width
    assert product.shape[-1] == sizes.row and 0 <= sizes.row - at - sizes.H * sizes.gates < 8
    if sizes.means:
        groups = found[0].reshape(*product.shape[:-1], sizes.Hkv, -1, sizes.D)
        found.append(groups.mean(axis=-2))
    if sizes.gates:
        columns = product[..., at : at + sizes.H * sizes.gates]
        found.append(columns.reshape(*product.shape[:-1], sizes.H, sizes.gates))
    return found


def listed(apart):
    """The same tensors, of what `split` gives."""
    query, keys, values, *rest = apart
    return [query, *keys, *values, *(x for x in rest if x is not None)]


@by_norms
@by_size
def test_heads_by_operators_of_torch(sizes, normed):
    product, position = drawn(2, 5, sizes.row), np.arange(10).reshape(2, 5) * 7
    norms = norms_of(sizes) if normed else None
    turns = {"base": BASE, "scale": SCALE, "norms": norms}
    found = heads.split(torch.from_numpy(product), torch.from_numpy(position), sizes, **turns)
    found = [x.detach() for x in listed(found)]
    for x, y in zip(found, expected(product, position, sizes, normed), strict=True):
        # Of angles rounded to float32, for normal numbers.
        bound = 4e-7 * (1 + position.max() / SCALE)
        np.testing.assert_allclose(x.numpy(), y, atol=bound)
        assert x.is_contiguous()


def one_row():
    """A layer with gates of each query head, and its input."""
    return in_torch(gate="head"), torch.from_numpy(drawn(1, 40, 24))


def outcome(module, x, run=None):
    """Output and all gradients."""
    x = x.clone().requires_grad_()
    y, _ = (run or module)(x)
    y.square().sum().backward()
    return [y, x.grad, *(each.grad for each in module.parameters())]


def frozen(module):
    for name in ("W_Q", "W_V_sel"):
        getattr(module, name).weight.requires_grad_(False)


def biased_alike(module):
    """All projections."""
    for name, each in module.named_children():
        if name.startswith("W_"):
            each.bias = nn.Parameter(torch.randn(each.out_features))


def with_norms(module):
    module.q_norm, module.k_norm = norms_of(SIZES[0])
    module.spec = dataclasses.replace(module.spec, qk_norm_eps=EPS)


def under_autocast(module, x):
    with torch.autocast("cpu", torch.bfloat16):
        return outcome(module, x)


def checkpointed(module, x):
    run = functools.partial(torch.utils.checkpoint.checkpoint, module, use_reentrant=False)
    return outcome(module, x, run)


def compiled(module, x):
    torch.compiler.reset()  # recompilations of other cases count too
    x = x.clone().requires_grad_()
    position = torch.arange(40).expand(2, 40)
    project = torch.compile(module.project, backend="aot_eager", fullgraph=True)
    query, key, value, gates = project(x, position)
    parts = [query, *key, *value, gates]
    sum(part.square().sum() for part in parts).backward()
    return [*parts, x.grad, *(each.grad for each in module.parameters())]


# How a layer runs, what is changed of it, and its gate.
GRADIENTS = [(outcome, x, "head") for x in (frozen, biased_alike, with_norms)]
GRADIENTS += [(x, None, "sigmoid") for x in (outcome, under_autocast, checkpointed)]
GRADIENTS += [(under_autocast, with_norms, "head"), (checkpointed, frozen, "head")]
GRADIENTS += [(compiled, with_norms, "head"), (compiled, frozen, "sigmoid")]


without_kernels = pytest.mark.skipif(INTERPRETED, reason="needs no kernel")


@without_kernels
@pytest.mark.parametrize(("run", "change", "gate"), GRADIENTS)
def test_gradients_of_one_product(run, change, gate, monkeypatch):
    """As those of all products, under what training puts around a layer."""
    module, x = in_torch(gate=gate), torch.from_numpy(drawn(2, 40, 24))
    if change:
        change(module)
    products, linear = [], torch.nn.functional.linear

    def noted(x, weight, bias=None):
        products.append(tuple(weight.shape))
        return linear(x, weight, bias)

    if run is not compiled:  # which would trace this too
        monkeypatch.setattr(torch.nn.functional, "linear", noted)
    apart = run(copy.deepcopy(module), x)
    assert (48, 24) in products or run is compiled
    products.clear()
    set_limits(monkeypatch, fused_heads_from=80)
    one = run(module, x)
    columns = {"sigmoid": 0, "head": 24}[gate]  # 18, rounded up
    assert (48 + 3 * 2 * (8 + 6) + columns, 24) in products or run is compiled
    assert {(48, 24), (18, 24)}.isdisjoint(products)
    rtol, atol = (3e-2, 3e-2) if run is under_autocast else (1e-5, 1e-5)
    for a, b in zip(apart, one, strict=True):
        if a is None:
            assert b is None
        else:
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


class Adapter(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def adapted(module):
    other = Adapter(24, 48, bias=False)
    other.load_state_dict(module.W_Q.state_dict())
    module.W_Q = other


def biased(module):
    module.W_K_sel = nn.Linear(24, 16)


def hooked(module, name="W_V_win"):
    getattr(module, name).register_forward_hook(lambda layer, args, out: 2 * out)


gate_hooked = functools.partial(hooked, name="gate")


def wrapped(module):
    """As accelerate does it."""
    forward = module.W_K_cmp.forward
    module.W_K_cmp.forward = lambda x: 2 * forward(x)


@without_kernels
@pytest.mark.parametrize("change", [adapted, biased, hooked, gate_hooked, wrapped])
def test_a_layer_that_is_more_than_its_product_is_called(change, monkeypatch):
    module, x = one_row()
    plain = module(x)[0]
    change(module)
    wanted = module(x)[0]
    assert not torch.allclose(wanted, plain)
    set_limits(monkeypatch, fused_heads_from=1)
    torch.testing.assert_close(module(x)[0], wanted)


@without_kernels
@pytest.mark.parametrize("fused_from", [1, 2**20])
def test_a_layer_whose_columns_are_sharded(fused_from, monkeypatch):
    """As tensor parallelism gives a rank some heads of a layer that counts all of them."""
    set_limits(monkeypatch, fused_heads_from=fused_from)
    module, x = one_row()
    wanted = module.W_Q.out_features
    module.W_Q = nn.Linear(24, wanted // 2, bias=False)
    with pytest.raises(ValueError, match=r"must return 132 columns for 6 .* and 2 .*, got"):
        module(x)


@without_kernels
def test_gates_of_invariant_layers_are_rounded_once(monkeypatch):
    set_limits(monkeypatch, fused_heads_from=1)
    module, x = (each.bfloat16() for each in one_row())
    wanted = module.gate(x).sigmoid().view(1, 40, -1, 3)
    names = (None, False), ("invariant", True), (Branches.each("invariant"), True)
    for module.implementation, equal in names:
        gates = module.project(x, torch.arange(40)[None])[3]
        assert torch.equal(gates, wanted) == equal


def waves(x):
    return torch.sin(torch.arange(x.numel(), device=x.device)).view(x.shape)


@kernel
@pytest.mark.parametrize("rows", [2] if INTERPRETED else [1, 2])
@by_norms
@pytest.mark.parametrize("dtype", DTYPES)
@by_size
def test_heads_by_the_kernel(sizes, dtype, normed, rows, monkeypatch):
    """Its output and gradient are those of torch's operators, and it is an operator. Of two rows
    with the same positions too.
    """
    length = 701
    if INTERPRETED:  # small tiles, so that few tokens are several programs
        set_limits(monkeypatch, split_numbers=256)
        length = 1 + 400 // max(sizes.D, sizes.Dv)
    kind = getattr(torch, dtype)
    norms = [x.to(DEVICE) for x in norms_of(sizes, kind)] if normed else None
    product = torch.from_numpy(drawn(2, length, sizes.row)).to(DEVICE, kind)
    position = torch.arange(length * rows, device=DEVICE).view(rows, length) * 50
    assert INTERPRETED or pretend.original("heads_by_kernel")(product, sizes)
    results = []
    # The kernel, the same by torch's operators, and these in float64.
    for by_kernel, wide in ((True, kind), (False, kind), (False, torch.float64)):
        leaf = product.detach().to(wide).requires_grad_()
        own = norms and [copy.deepcopy(x).to(wide) for x in norms]
        with monkeypatch.context() as patch:
            pretend.machine(patch, heads_by_kernel=by_kernel)
            apart = listed(heads.split(leaf, position, sizes, norms=own))
        assert all(x.is_contiguous() and x.dtype == leaf.dtype for x in apart)
        if by_kernel and not INTERPRETED:  # which attention's kernels need
            assert all(x.data_ptr() % 256 == 0 for x in apart)
        sums = torch.promote_types(wide, torch.float32)
        loss = sum((x.to(sums) * waves(x)).sum() for x in apart)
        leaves = [leaf, *(x.weight for x in own or ())]
        found = [*apart, *torch.autograd.grad(loss, leaves)]
        results.append([x.detach().double().cpu().numpy() for x in found if x.numel()])
    for name, (found, rough, exact) in enumerate(zip(*results, strict=True)):
        size = max(np.sqrt(np.mean(exact**2)), 1.0)
        assert_parity(str(name), found / size, exact / size, rough / size, dtype=dtype)
    if not INTERPRETED:
        rates = BASE ** -(torch.arange(sizes.D // 2, device=DEVICE) * 2 / sizes.D) / SCALE
        turns = (position[..., None] * rates).expand(2, -1, -1)
        tables = turns.cos(), turns.sin()
        rest = [x.weight for x in norms or ()], EPS, list(dataclasses.astuple(sizes))
        torch.library.opcheck(
            torch.ops.nsa.split_heads.default, (product.requires_grad_(), *tables, *rest)
        )
