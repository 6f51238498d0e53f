"""Choice of implementation: names never fall back, refusals are told, flags mean the same."""

import dataclasses
import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from absl import flags as absl_flags

import kernels_pallas
import nsa_jax
import nsa_torch
from nsa_core import flags, policy
from nsa_core.dispatch import STEPS, WHOLE, Implementation, Problem, Registry
from nsa_core.policy import DECODE
from nsa_jax import paged_attend
from nsa_jax.dispatch import REGISTRY
from nsa_jax.jax_problem import problem_of
from nsa_torch import dispatch as torch_dispatch
from nsa_torch import paged_attend as torch_paged_attend
from nsa_torch.dispatch import REGISTRY as TORCH_REGISTRY
from tests.inputs import SMALL, Case, problem

PROBLEM = Problem("jax", "selected", "cpu", "float32", 1, 8, 8, 2, 1, 4, 4, False, SMALL)


def registry(*refusals):
    """A registry of steps whose `i`-th implementation refuses with `refusals[i]`."""
    row = tuple(
        Implementation(name, "nsa_jax.branches:combine", lambda p, why=why: why)
        for name, why in zip("abc", refusals, strict=False)
    )
    return Registry(
        "jax", {step: row for step in ("compressed", "scores", "selected", "sliding")}
    )


def test_automatic_choice_walks_the_order_and_tells_why():
    choice = registry("too old", None, None).choose(PROBLEM)
    assert (choice.implementation, dict(choice.refused)) == ("b", {"a": "too old"})
    assert str(choice) == "selected: b (not a: too old)"
    assert choice.load() is nsa_jax.branches.combine


def test_a_named_implementation_never_falls_back(caplog):
    table = registry("too old", None)
    with pytest.raises(NotImplementedError, match="selected: a: too old"):
        table.choose(PROBLEM, "a")
    with caplog.at_level(logging.WARNING):
        choice = table.choose(PROBLEM, "a", "fallback")
    assert choice.implementation == "b" and choice.refused == {"a": "too old"}
    assert "a refused, choosing another: too old" in caplog.text
    for name in ("d", "auto"):  # automatic choice is None
        with pytest.raises(ValueError, match=rf"one of \('a', 'b'\) or None, got '{name}'"):
            table.choose(PROBLEM, name)


def test_all_refused_names_each_reason():
    with pytest.raises(NotImplementedError, match=r"can run this: a: no GPU; b: wrong dtype$"):
        registry("no GPU", "wrong dtype").choose(PROBLEM)


def test_kernels_say_why_they_refuse():
    """In float32 no machine has a kernel."""
    p = problem(Case(20, 20))
    reasons = {
        "mosaic": "needs a Hopper GPU|needs compute capability|computes in bfloat16",
        "triton": "needs an NVIDIA GPU|needs compute capability|needs jax_triton",
    }
    for name, reason in reasons.items():
        with pytest.raises(NotImplementedError, match=f"^compressed: {name}: ({reason})"):
            nsa_jax.attention(
                p.query, p.key, p.value, p.gates, config=SMALL, implementation=name
            )


def test_every_registered_kernel_is_there():
    paged = paged_attend.REGISTRY, torch_paged_attend.REGISTRY
    for name, step in kernels_pallas.KERNELS:
        for registry in paged if step == DECODE else (REGISTRY, TORCH_REGISTRY):
            entry = registry.entry(step, name)
            assert entry and callable(entry.load())
    at = PROBLEM._replace(step="selected")
    assert kernels_pallas.why_not("cuda", at).startswith("kernels_pallas has no cuda kernel")


def test_explain_is_what_runs():
    p = problem(Case(20, 20))
    plan = nsa_jax.explain(p.query, p.key, p.value, config=SMALL)
    assert [c.implementation for c in plan] == ["xla"] * 4
    assert "not mosaic: " in str(plan)
    mixed = nsa_jax.Branches("reference", "xla", None)
    plan = nsa_jax.explain(p.query, p.key, p.value, config=SMALL, implementation=mixed)
    assert [c.implementation for c in plan] == ["reference", "xla", "xla", "xla"]


def test_explain_asks_whether_gates_or_compressed_tokens_want_a_gradient(monkeypatch):
    entry = TORCH_REGISTRY.entry("sliding", "sdpa")
    why_not = lambda problem: "no gradient" if problem.requires_grad else None
    forward_only = dataclasses.replace(entry, name="fa2", why_not=why_not)
    monkeypatch.setitem(TORCH_REGISTRY.table, "sliding", (forward_only, entry))
    query, key, gates = (torch.zeros(1, 20, *rest) for rest in ((4, 8), (2, 8), (4, 3)))
    pair = (torch.zeros(1, SMALL.num_compressed(20), 2, 8),) * 2

    def sliding():
        given = {"compressed": pair, "config": SMALL}
        return nsa_torch.explain(query, key, key, gates, **given).sliding.implementation

    assert sliding() == "fa2"
    for x in (gates, pair[0]):
        x.requires_grad_()
        assert sliding() == "sdpa"
        x.requires_grad_(False)


def named(name, why_not=lambda problem: None):
    return Implementation(name, "nsa_jax.branches:combine", why_not)


def test_all_steps_run_at_once_where_every_step_has_the_name():
    row = named("a"), named("b")
    refuses = named("a", lambda problem: "too long" if problem.T > 8 else None)
    table = dict.fromkeys(STEPS, row) | {WHOLE: (refuses,)}
    plan = Registry("jax", table).choices(PROBLEM)
    assert plan.attention.implementation == "a" and plan.attention.step == WHOLE
    assert str(plan).splitlines()[4:] == ["attention: a"]
    mixed = Registry("jax", table).choices(PROBLEM, nsa_jax.Branches(None, None, "b"))
    assert mixed.attention is None and mixed.whole_refused == {"a": "sliding runs on b"}
    longer = Registry("jax", table).choices(PROBLEM._replace(T=9, S=9))
    assert [c.implementation for c in longer] == ["a"] * 4
    assert str(longer).endswith("attention: step by step (not a: too long)")


def test_what_cannot_go_backward_is_refused_before_it_runs_forward():
    forward_only = named("a", lambda p: "no gradient" if p.requires_grad else None)
    table = Registry("jax", dict.fromkeys(STEPS, (forward_only, named("b"))))
    assert [c.implementation for c in table.choices(PROBLEM)] == ["a"] * 4
    plan = table.choices(PROBLEM._replace(requires_grad=True))
    assert [c.implementation for c in plan] == ["b", "a", "b", "b"]  # no gradient of scores
    assert problem_of(jnp.zeros((1, 8, 2, 4)), 1, 8, 4, SMALL, False).requires_grad


def test_jax_is_asked_about_its_default_device(monkeypatch):
    """Not about the first one, which may be of another kind."""
    gpu = {"platform": "gpu", "device_kind": "a GPU", "compute_capability": "9.0"}
    devices = {None: gpu, "cpu": {"platform": "cpu", "device_kind": "cpu"}}
    found = lambda backend=None: [types.SimpleNamespace(**devices[backend])]
    monkeypatch.setattr(jax, "devices", found)
    for default, known in ((None, ("a GPU", (9, 0))), ("cpu", (None, None))):
        with jax.default_device(default):
            at = problem_of(np.zeros((1, 8, 2, 4)), 1, 8, 4, SMALL, False)
        assert (at.device, at.capability) == known


def test_torch_knows_whether_a_gradient_is_wanted():
    tensors = torch.zeros(1, 8, 2, 4), torch.zeros(1, 8, 1, 4)
    gate = torch.zeros(1, 8, 2, requires_grad=True)

    def requires_grad(*gates):
        memory = dict(zip(("query", "key"), tensors, strict=True))
        given = torch_dispatch.description(*tensors, 4, SMALL, False, memory, gates)
        return torch_dispatch._problem(*given).requires_grad

    assert requires_grad() is False
    assert requires_grad(gate) is True
    with torch.no_grad():
        assert requires_grad(gate) is False
    tensors[1].requires_grad_()
    assert requires_grad() is True


def test_choice_is_logged_once(caplog):
    table = registry("reason number 7", None)
    with caplog.at_level(logging.INFO):
        table.choose(PROBLEM)
        table.choose(PROBLEM._replace(T=9, S=9))
    assert caplog.text.count("reason number 7") == 1


def test_flags():
    values = absl_flags.FLAGS
    if not values.is_parsed():
        values(["test"])
    query = jnp.zeros((1, 8, 2, 4))
    at = problem_of(query, 1, 8, 4, SMALL, False)
    assert flags.named() == nsa_jax.Branches(None, None, None)
    assert flags.implementation(REGISTRY, at) == nsa_jax.Branches("xla", "xla", "xla")
    with pytest.raises(absl_flags.IllegalFlagValueError):
        values["selected_kernel"].parse("cuda")
    saved = values["selected_kernel"].value, values["on_unsupported"].value
    try:
        values.selected_kernel = "mosaic"
        with pytest.raises(NotImplementedError, match=r"^selected: mosaic: "):
            flags.implementation(REGISTRY, at)
        values.on_unsupported = "fallback"
        assert flags.implementation(REGISTRY, at).selected == "xla"
        values.selected_kernel = "fa2"
        with pytest.raises(ValueError, match="'fa2'"):
            flags.implementation(REGISTRY, at)
    finally:
        values.selected_kernel, values.on_unsupported = saved


def test_a_choice_that_is_kept_follows_the_thresholds(monkeypatch):
    """On a GPU calls alike are decided once, until what decides changes."""
    asked, found = [], ("sdpa",) * 4 + (None, False)
    monkeypatch.setattr(torch_dispatch, "_choose", lambda *given: asked.append(given) or found)
    torch_dispatch._chosen_before.cache_clear()
    problem = ("cuda", 0), "bfloat16"
    for _ in range(2):
        assert torch_dispatch._chosen(None, None, *problem) == found
    assert len(asked) == 1
    with policy.overridden(policy.Thresholds(sel_min_len=3), "a test"):
        torch_dispatch._chosen(None, None, *problem)
    assert len(asked) == 2
    torch_dispatch._chosen(None, None, *problem)
    assert len(asked) == 2
    torch_dispatch._chosen_before.cache_clear()
