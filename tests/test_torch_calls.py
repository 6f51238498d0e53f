"""Calls on torch tensors: packed rows that are refused, FlashAttention-2's reasons, what an import
and a call do besides.
"""

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
from tests.problems import SMALL


def arguments(length=20, batch=1, keys=None):
    """Of `attention`, by name."""
    keys = length if keys is None else keys
    shapes = {
        "query": (length, 4, 8),
        "key": (keys, 2, 8),
        "value": (keys, 2, 8),
        "gates": (length, 4, 3),
    }
    return {name: torch.zeros(batch, *shape) for name, shape in shapes.items()}


BORDERS = torch.zeros(2, dtype=torch.int32)
REFUSED = [
    ({"cu_seqlens": torch.zeros(2)}, {}, "cu_seqlens must have dtype"),
    ({"cu_seqlens": BORDERS[:1]}, {}, "num_seqs \\+ 1 >= 2"),
    ({"cu_seqlens": BORDERS}, {"batch": 2}, "B=1, where cu_seqlens are given, got B=2"),
    ({"cu_seqlens": BORDERS}, {"keys": 30}, "T=20 and S=30"),
    ({"value": torch.zeros(1, 20, 2, 8, device="meta")}, {}, "value.* on the device of query"),
]


@pytest.mark.parametrize(("changes", "sizes", "message"), REFUSED)
def test_bad_input_is_named(changes, sizes, message):
    with pytest.raises(ValueError, match=message):
        nsa_torch.attention(**arguments(**sizes) | changes, config=SMALL)


def test_kv_len_and_cu_seqlens_exclude_each_other():
    x, given = arguments(), dict(config=SMALL, kv_len=20, cu_seqlens=torch.tensor([0, 20]))
    with pytest.raises(ValueError, match="kv_len must be None where cu_seqlens are given"):
        nsa_torch.select_blocks(x["query"], x["key"][:, :4], **given)


POSE = dict(platform="cuda", dtype="bfloat16", T=64, S=64, H=8, Hkv=2, D=128, Dv=128)
POSE |= dict(framework="torch", step="selected", B=1, packed=False, config=SMALL)
POSE |= dict(capability=(9, 0))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"D": 192}, None),
        ({"dtype": "float32"}, "float32"),
        ({"D": 264}, "D=264"),
        ({"Dv": 12}, "Dv=12"),
        ({"platform": "cpu"}, "cpu"),
        ({"B": 40000}, "65535"),
        ({"capability": (7, 5)}, "7.5"),
    ],
)
def test_fa2_says_why_not(changes, reason, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)  # it packs without Triton
    found = fa2.why_not(Problem(**POSE | changes))
    assert found is None if reason is None else reason in found


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
    names, doubles = Branches("sdpa", "fa2", "sdpa"), (x.double() for x in arguments().values())
    with pytest.raises(NotImplementedError, match="FA-2 needs CUDA tensors, got cpu"):
        nsa_torch.attention(**arguments(), config=SMALL, implementation=names)
    with pytest.raises(NotImplementedError, match="jax_enable_x64"):
        nsa_torch.attention(*doubles, config=SMALL, implementation="jax")


def test_explain_names_the_choice_and_every_refusal():
    plan = nsa_torch.explain(*[*arguments().values()][:3], config=SMALL)
    assert [c.step for c in plan] == ["compressed", "scores", "selected", "sliding"]
    assert {c.implementation for c in plan} == {"sdpa"}
    assert all(list(c.refused) == ["mosaic", "triton", "fa2"] for c in plan)
    names = dispatch.REGISTRY.names()
    assert names == typing.get_args(functional.Name.__value__)
    assert nsa_jax.dispatch.REGISTRY.names() == typing.get_args(nsa_jax.api.Name.__value__)
    assert names == ("mosaic", "triton", "fa2", "sdpa", "jax", "reference")


def test_the_whole_attention_is_one_jax_call(monkeypatch):
    first = lambda function, *rest: function
    calls, x = pretend.calls_of(monkeypatch, autograd.dlpack, "call_jax", first), arguments()
    x["query"].requires_grad_()
    for _ in range(2):
        nsa_torch.attention(**x, config=SMALL, implementation="jax").sum().backward()
    assert len(calls) == 4
    assert calls[2:] == calls[:2]  # and the compiled functions are used again


def test_attention_computes_no_log_sum_exp(monkeypatch):
    """SDPA would need a second product for it."""
    monkeypatch.setattr(torch.Tensor, "logsumexp", None)
    query, key, value, gates = arguments().values()
    nsa_torch.attention(query, key, value, gates, config=SMALL)
    with pytest.raises(TypeError, match="NoneType"):
        nsa_torch.sliding_attention(query, key, value, config=SMALL)


def test_fa2_names_its_library():
    assert fa2.library().startswith(("flash_attn ", "torch "))


def test_too_many_sequences_for_one_call_are_refused():
    query, bounds = torch.zeros(1, 70000, 1, 8), torch.arange(70001)
    options = dict(config=SMALL, kv_len=70000, cu_seqlens=bounds)
    with pytest.raises(NotImplementedError, match="at most 65535 sequences"):
        fa2.sliding_attention(query, query, query, **options)


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
