"""Calls on torch tensors: bad input, the choice of an implementation, what an import does."""

import subprocess
import sys
import typing

import pytest
import torch

import nsa_jax.api
import nsa_jax.dispatch
import nsa_torch
from nsa_core.dispatch import Problem
from nsa_torch import Branches, autograd, dispatch, fa2, functional, operators
from tests import pretend
from tests.inputs import SMALL
from tests.torch_inputs import on_the_cpu


@pytest.fixture(autouse=True)
def _cpu(monkeypatch):
    with on_the_cpu(monkeypatch):
        yield


def bad(**changes):
    """Arguments of a good call of `attention`, changed."""
    zeros = lambda *shape, dtype=torch.float32: torch.zeros(shape, dtype=dtype)
    good = {
        "query": zeros(1, 20, 4, 8),
        "key": zeros(1, 20, 2, 8),
        "value": zeros(1, 20, 2, 8),
        "gates": zeros(1, 20, 4, 3),
        "config": SMALL,
    }
    return good | changes


ZERO = torch.zeros
BAD_INPUT = {
    "rank": (bad(query=ZERO(20, 4, 8)), "query must have 4 axes"),
    "numpy": (bad(gates=ZERO(1, 20, 4, 3).numpy()), "gates.* must be a torch tensor"),
    "a numpy query": (
        bad(query=ZERO(1, 20, 4, 8).numpy()),
        "query must be a torch tensor, got a numpy.ndarray",
    ),
    "dtype": (bad(key=ZERO(1, 20, 2, 8).half()), "key.*dtype of query, float32, got float16"),
    "integers": (bad(query=ZERO(1, 20, 4, 8, dtype=torch.int32)), "query must have dtype"),
    "heads": (
        bad(query=ZERO(1, 20, 3, 8), gates=ZERO(1, 20, 3, 3)),
        "multiple of key.*3 and 2",
    ),
    "width": (bad(key=ZERO(1, 20, 2, 4)), r"key.* must have shape \(1, 20, 2, 8\)"),
    "T > S": (bad(key=ZERO(1, 9, 2, 8), value=ZERO(1, 9, 2, 8)), "T=20 and S=9"),
    "gates": (bad(gates=ZERO(1, 20, 4, 2)), r"gates must have shape \(1, 20, 4, 3\)"),
    "empty": (bad(query=ZERO(1, 0, 4, 8), gates=ZERO(1, 0, 4, 3)), "query must not be empty"),
    "scale": (bad(scale=-1.0), "scale must be a positive number"),
    "config": (bad(config={"l": 32}), "config must be an NSAConfig"),
    "indices": (
        bad(block_indices=ZERO(1, 20, 2, 4, dtype=torch.int64)),
        "block_indices must have dtype",
    ),
    "slots": (
        bad(block_indices=ZERO(1, 20, 2, 3, dtype=torch.int32)),
        r"block_indices must have shape \(1, 20, 2, 4\)",
    ),
    "compressed": (bad(compressed=(ZERO(1, 3, 2, 8),) * 2), "must have C=4 tokens"),
    "compressed three": (bad(compressed=(ZERO(1, 4, 2, 8),) * 3), "a pair .* got 3 of them"),
    "device": (bad(value=ZERO(1, 20, 2, 8, device="meta")), "value.* on the device of query"),
    "cu type": (bad(cu_seqlens=ZERO(2)), "cu_seqlens must have dtype"),
    "cu length": (bad(cu_seqlens=ZERO(1, dtype=torch.int32)), "num_seqs \\+ 1 >= 2"),
    "cu rows": (
        bad(
            query=ZERO(2, 20, 4, 8),
            key=ZERO(2, 20, 2, 8),
            value=ZERO(2, 20, 2, 8),
            gates=ZERO(2, 20, 4, 3),
            cu_seqlens=ZERO(2, dtype=torch.int32),
        ),
        "B=1, where cu_seqlens are given, got B=2",
    ),
    "cu T < S": (
        bad(
            key=ZERO(1, 30, 2, 8),
            value=ZERO(1, 30, 2, 8),
            cu_seqlens=ZERO(2, dtype=torch.int32),
        ),
        "T=20 and S=30",
    ),
    "name": (bad(implementation="fast"), "implementation must be one of .*'fast'"),
}


@pytest.mark.parametrize("arguments, message", BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        nsa_torch.attention(**arguments)


@pytest.mark.parametrize(
    "kv_len, cu, message",
    [
        (19, None, "kv_len must be at least T=20, got 19"),
        (31, None, "at most the keys there are, 30, got 31"),
        (torch.tensor([20, 30, 30]), None, r"kv_len must have shape \(\) or \(1,\)"),
        (torch.tensor(20.0), None, "kv_len must have dtype"),
        ("30", None, "kv_len must be an integer"),
    ],
)
def test_bad_kv_len_is_named(kv_len, cu, message):
    query, key = ZERO(1, 20, 4, 8), ZERO(1, 30, 2, 8)
    with pytest.raises(ValueError, match=message):
        nsa_torch.sliding_attention(query, key, key, config=SMALL, kv_len=kv_len)


def test_kv_len_and_cu_seqlens_exclude_each_other():
    query, key = ZERO(1, 20, 4, 8), ZERO(1, 4, 2, 8)
    with pytest.raises(ValueError, match="kv_len must be None where cu_seqlens are given"):
        nsa_torch.select_blocks(
            query, key, config=SMALL, kv_len=20, cu_seqlens=torch.tensor([0, 20])
        )


def pose(**changes):
    values = dict(platform="cuda", dtype="bfloat16", T=64, S=64, H=8, Hkv=2, D=128, Dv=128)
    values |= dict(framework="torch", step="selected", B=1, packed=False, config=SMALL)
    values |= dict(capability=(9, 0))
    return Problem(**values | changes)


def test_fa2_says_why_not(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)  # it packs without Triton
    assert fa2.why_not(pose()) is None
    assert fa2.why_not(pose(D=192)) is None
    assert "float32" in fa2.why_not(pose(dtype="float32"))
    assert "D=264" in fa2.why_not(pose(D=264))
    assert "Dv=12" in fa2.why_not(pose(Dv=12))
    assert "cpu" in fa2.why_not(pose(platform="cpu"))
    assert "65535" in fa2.why_not(pose(B=40000))
    assert "7.5" in fa2.why_not(pose(capability=(7, 5)))


def test_fa2_is_asked_about_the_device_of_the_tensors(monkeypatch):
    """Not about the current one, which may be of another kind."""
    capabilities = [(7, 5), (9, 0)]
    ask = lambda index=0: capabilities[index or 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", ask)
    monkeypatch.setattr(dispatch, "device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.version, "cuda", None)
    sizes = (1, 64, 64, 8, 2, 128, 128), operators.numbers_of(SMALL), (False, False, False)
    for index, known in enumerate(capabilities):
        asked = dispatch._problem(("cuda", index), "bfloat16", *sizes, None)
        assert (fa2.why_not(asked) is None) == (known == (9, 0))


def test_a_named_implementation_never_falls_back():
    arguments = bad(implementation=Branches("sdpa", "fa2", "sdpa"))
    with pytest.raises(NotImplementedError, match="FA-2 needs CUDA tensors, got cpu"):
        nsa_torch.attention(**arguments)
    with pytest.raises(NotImplementedError, match="jax_enable_x64"):
        doubles = {k: v.double() if k != "config" else v for k, v in bad().items()}
        nsa_torch.attention(**doubles, implementation="jax")


def test_explain_names_the_choice_and_every_refusal():
    x = bad()
    plan = nsa_torch.explain(x["query"], x["key"], x["value"], config=SMALL)
    assert [c.step for c in plan] == ["compressed", "scores", "selected", "sliding"]
    assert {c.implementation for c in plan} == {"sdpa"}
    assert all(list(c.refused) == ["mosaic", "triton", "fa2"] for c in plan)
    names = dispatch.REGISTRY.names()
    assert names == typing.get_args(functional.Name.__value__)
    assert nsa_jax.dispatch.REGISTRY.names() == typing.get_args(nsa_jax.api.Name.__value__)
    assert names == ("mosaic", "triton", "fa2", "sdpa", "jax", "reference")


def test_the_whole_attention_is_one_jax_call(monkeypatch):
    first = lambda function, *rest: function
    calls = pretend.calls_of(monkeypatch, autograd.dlpack, "call_jax", first)
    x = bad()
    x["query"].requires_grad_()
    nsa_torch.attention(**x, implementation="jax").sum().backward()
    assert len(calls) == 2
    nsa_torch.attention(**x, implementation="jax").sum().backward()
    assert calls[2:] == calls[:2]  # and the compiled functions are used again


def test_attention_computes_no_log_sum_exp(monkeypatch):
    """SDPA would need a second product for it."""
    monkeypatch.setattr(torch.Tensor, "logsumexp", None)
    nsa_torch.attention(**bad())
    with pytest.raises(TypeError, match="NoneType"):
        x = bad()
        nsa_torch.sliding_attention(x["query"], x["key"], x["value"], config=SMALL)


def test_fa2_names_its_library():
    assert fa2.library().startswith(("flash_attn ", "torch "))


def test_too_many_sequences_for_one_call_are_refused():
    query = ZERO(1, 70000, 1, 8)
    bounds = torch.arange(70001)
    with pytest.raises(NotImplementedError, match="at most 65535 sequences"):
        fa2.sliding_attention(
            query, query, query, config=SMALL, kv_len=70000, cu_seqlens=bounds
        )


def test_importing_starts_no_jax_backend():
    code = (
        "import nsa_torch, nsa_jax, jax\n"
        "assert nsa_torch.NSAConfig is nsa_jax.NSAConfig\n"
        "assert nsa_torch.Branches is nsa_jax.Branches\n"
        "import torch; x = torch.zeros(1, 40, 2, 8)\n"
        "nsa_torch.attention(x, x, x, torch.zeros(1, 40, 2, 3))\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names_under_torch_compile():
    """A name for a step, and `Branches` of names made inside what is compiled."""
    x = bad()
    given = {"config": SMALL}

    def function(query, key, value, gates):
        names = Branches(None, "sdpa", "sdpa")
        out = nsa_torch.attention(query, key, value, gates, **given, implementation=names)
        local = nsa_torch.sliding_attention(query, key, value, **given, implementation="sdpa")
        return out + local[0] + nsa_torch.sliding_attention(query, key, value, **given)[0]

    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(x[n].shape, generator=generator) for n in ("query", "key", "value", "gates")
    ]
    compiled = torch.compile(function, backend="eager")
    torch.testing.assert_close(compiled(*tensors), function(*tensors))
