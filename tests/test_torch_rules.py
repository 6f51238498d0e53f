"""What torch tensors must obey on the CPU, in several chunks and with a stand-in for FA-2.

`test_parity.py` ties the dense reference to an oracle that shares nothing with it.
"""

import functools

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode

import nsa_torch
from nsa_torch import NSAConfig
from tests import planned, pretend
from tests.model_sizes import MODELS
from tests.oracles.nsa import BRANCHES
from tests.problems import FEW
from tests.torch_inputs import inputs, on_the_cpu, run, steps
from tests.torch_sizes import Sizes


@pytest.fixture(autouse=True)
def _cpu(monkeypatch):
    with on_the_cpu(monkeypatch):
        yield


def test_selected_nan_of_a_sequence_reaches_no_other():
    """Empty slots read no token of another row or sequence."""
    *leaves, _ = inputs(60, 60, dtype=torch.float64)
    bounds = torch.tensor([0, 25, 49])
    indices = steps("reference", *leaves, FEW, cu_seqlens=bounds)["indices"][0]
    results = []
    for number in (0.0, float("nan")):
        tensors = [t.detach().clone() for t in leaves]
        for t in tensors:
            t[:, :25] = number
        tensors = [t.requires_grad_() for t in tensors]
        how = {"config": FEW, "cu_seqlens": bounds, "implementation": "sdpa"}
        out, lse = nsa_torch.selected_attention(*tensors, indices, **how)
        found = out, lse, *torch.autograd.grad(out.sum(), tensors)
        results.append([t[:, 25:] for t in found])
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ["sdpa", "fa2"])
def test_memory_is_bounded_forward_and_backward(name, monkeypatch):
    """No [T, S] or [T, C] for all heads, no copy of all selected keys: only chunks."""
    pretend.machine(monkeypatch, fa2_kernel=lambda q, k, v, *_, **__: hollow(q, k, v))
    config = NSAConfig(8, 4, 16, num_selected=8, window=32)
    *tensors, _ = inputs(256, 256, 8, 2, 4, 4, dtype=torch.float64)
    largest = {}
    for implementation in (name, "reference"):
        with Sizes() as mode:
            found = steps(implementation, *tensors, config)
            sum(found[b][0].sum() for b in BRANCHES).backward()
        largest[implementation] = mode.bytes
    small = 2 * 256 * 8 * 4 * 8
    assert largest["reference"] > 2_000_000
    assert largest[name] <= max(small, 10 * 50_000) < 2_000_000


def hollow(query, key, value):
    """Something of the shapes that FA-2 returns, in the graph of all its inputs."""
    total = sum(torch.nan_to_num(x).mean() for x in (query, key, value))
    lse = query.new_zeros(query.shape[1], query.shape[0])
    return query * 0 + total, lse


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["query", "key", "value", "k_cmp", "indices", "borders"])
def test_what_the_backward_pass_reads_must_stay(name, recompute):
    """An argument that was written to since the forward pass is an error, not another gradient."""
    query, key, value, gates = inputs(40, 40, dtype=torch.float64)
    given = {"query": query, "key": key, "value": value}
    given = {k: v.detach().clone().requires_grad_() * 1 for k, v in given.items()}
    options = {"config": FEW, "recompute": recompute}
    if name == "borders":
        options["varlen"] = nsa_torch.varlen_metadata(torch.tensor([0, 9, 40]), config=FEW)
    else:
        k_cmp, v_cmp = (nsa_torch.compress(y, config=FEW) for y in (key, value))
        options["compressed"] = k_cmp.detach() * given["key"].sum().sign(), v_cmp.detach()
        given["k_cmp"] = options["compressed"][0]
        given["indices"] = nsa_torch.select_blocks(query, k_cmp, config=FEW)
        options["block_indices"] = given["indices"]
    tensors = given["query"], given["key"], given["value"], gates
    out = nsa_torch.attention(*tensors, **options)
    with torch.no_grad():
        if name == "borders":
            options["varlen"].update(torch.tensor([0, 20, 40]))
        else:
            given[name].mul_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch's own, traced
@pytest.mark.parametrize("compiled", [False, True])
def test_the_lse_of_fa2_has_no_gradient(compiled, monkeypatch):
    """What does not ask for it gets its gradients, compiled whole too; with a stand-in that torch
    can trace, since FA-2 needs a GPU and this is about what stands around it.
    """

    def stand_in(query, key, value, bounds, longest, **options):
        return query * 2, query.sum(-1).t().float()

    pretend.machine(monkeypatch, fa2_kernel=stand_in)
    query, key, *_ = inputs(40, 40, dtype=torch.float32)
    keys = nsa_torch.compress(key.detach(), config=FEW)
    options = {"config": FEW, "kv_len": 40}

    def attend(query):
        return run("compressed", "fa2", query, keys, keys, **options)

    def lse(query):
        return attend(query)[1].nan_to_num(neginf=0).sum()

    def out(query):
        return attend(query)[0].sum()

    if compiled:
        out, lse = (torch.compile(f, fullgraph=True, backend="aot_eager") for f in (out, lse))
    (got,) = torch.autograd.grad(out(query), query)
    assert got[:, -1].eq(2).all()
    with pytest.raises((NotImplementedError, RuntimeError), match="no gradient of its log-sum"):
        torch.autograd.grad(lse(query), query)


def test_what_a_compiled_layer_keeps_lies_apart():
    """Inductor writes over what was kept and is read no more, and looks for no other tensor in the
    same memory.
    """
    kept = []

    def forward(graph, example):
        def run(*given):
            found = graph(*given)
            memory = [x.untyped_storage() for x in found if isinstance(x, torch.Tensor)]
            kept.append([x.data_ptr() for x in memory if x.nbytes()])
            return found

        return make_boxed_func(run)

    layer = nsa_torch.NSAAttention(**MODELS["small layer"], kv="shared", gate="head")
    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, example: make_boxed_func(graph.forward),
        partition_fn=functools.partial(
            min_cut_rematerialization_partition, compiler="inductor"
        ),
        decompositions=select_decomp_table(),
    )
    x = torch.randn(2, 40, 16)
    torch.compile(layer, fullgraph=True, backend=backend)(x)[0].sum().backward()
    assert len(kept[0]) > 5 and len(set(kept[0])) == len(kept[0])


@pytest.mark.parametrize("branch", BRANCHES)
def test_gradients_lie_as_compiled_programs_are_told(branch):
    """Of inputs whose axes are in another order in memory."""
    query, *pair, _ = inputs(40, 40, B=2, dtype=torch.float64)
    keys = [nsa_torch.compress(y, config=FEW) for y in pair]
    given = [query, *(keys if branch == "compressed" else pair)]
    turned = [y.detach().transpose(1, 2).contiguous().transpose(1, 2) for y in given]
    if branch == "selected":
        turned.append(nsa_torch.select_blocks(query, keys[0], config=FEW))
    grad = torch.randn(*query.shape[:3], pair[1].shape[-1], dtype=query.dtype)
    kind = f"branch_attention/sdpa/{branch}/without_lse"
    given = kind, grad, [], turned, False, *planned.layout(FEW, 40)
    operator = torch.ops.nsa.branch_attention_backward
    with FakeTensorMode(allow_non_fake_inputs=True):
        told = operator(*given)
    for got, want in zip(operator(*given), told, strict=True):
        assert (got.shape, got.stride()) == (want.shape, want.stride())
