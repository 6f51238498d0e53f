"""Automatic choice keeps to a device's thresholds and policy, and says so; names do not."""

import dataclasses

import jax.numpy as jnp
import pytest
import torch
import yaml
from absl import flags as absl_flags

import nsa_torch
from bench.harness import problems, runners
from nsa_core import flags, policy
from nsa_core.dispatch import Problem
from nsa_jax import NSAConfig, jax_problem
from nsa_jax import dispatch as jax_dispatch
from nsa_torch import dispatch as torch_dispatch
from nsa_torch import operators
from tests import pretend

GPU = "NVIDIA Test 80GB"
FILE = "nvidia-test-80gb.yaml"


@pytest.fixture
def device(tmp_path, monkeypatch):
    """Writes the file of `GPU`, which FA-2 can use as far as it asks."""
    pretend.folder(monkeypatch, "devices", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", None)
    policy.of.cache_clear()

    def write(**sections):
        data = {"schema": policy.SCHEMA, "device": GPU} | sections
        (tmp_path / FILE).write_text(yaml.safe_dump(data))
        policy.of.cache_clear()
        return tmp_path / FILE

    yield write
    policy.of.cache_clear()


def pose(step, length=512, framework="torch", **changes) -> Problem:
    values = dict(platform="cuda", dtype="bfloat16", B=1, T=length, S=length, H=8, Hkv=2)
    values |= dict(D=64, Dv=64, packed=False, config=NSAConfig(), device=GPU)
    # A GPU on which Triton is no default.
    values |= dict(capability=(8, 7), framework=framework, step=step)
    return Problem(**values | changes)


def chosen(problem, name=None):
    registry = jax_dispatch.REGISTRY
    if problem.framework == "torch":
        registry = torch_dispatch.REGISTRY
    return registry.choose(problem, name)


@pytest.mark.parametrize(
    "name,branch", [("fa2_min_len_win", "sliding"), ("fa2_min_len_cmp", "compressed")]
)
def test_fa2_is_chosen_from_the_threshold_on(device, name, branch):
    assert chosen(pose(branch, 8)).implementation == "fa2"  # no file, no threshold
    path = device(runtime={name: 300})
    assert chosen(pose(branch, 300)).implementation == "fa2"
    below = chosen(pose(branch, 299))
    assert below.implementation == "sdpa"
    assert below.refused["fa2"] == f"a length of 299 is below {name}=300 ({path})"
    assert f"not fa2: a length of 299 is below {name}=300" in str(below)
    # The other branches have their own.
    others = {"sliding", "compressed", "selected"} - {branch}
    assert {chosen(pose(other, 299)).implementation for other in others} == {"fa2"}


def test_a_name_is_not_affected(device):
    device(
        runtime=dict(fa2_min_len_win="never", sel_min_len="never"),
        policy=[
            dict(kernel="fa2", steps=["sliding"], allowed=False, reason="r", since="2025-09-04")
        ],
    )
    assert chosen(pose("sliding"), "fa2").implementation == "fa2"
    assert chosen(pose("selected"), "fa2").implementation == "fa2"
    plan = torch_dispatch.REGISTRY.choices(pose(""), nsa_torch.Branches(None, None, "fa2"))
    assert [c.implementation for c in plan] == ["fa2", "fa2", "sdpa", "fa2"]


def test_never_holds_at_every_length(device):
    device(runtime=dict(fa2_min_len_cmp="never"))
    choice = chosen(pose("compressed", 2**20))
    assert choice.implementation == "sdpa"
    assert "fa2_min_len_cmp is never: no length at which it pays" in choice.refused["fa2"]


def test_the_selection_is_judged_by_its_keys(device, monkeypatch):
    device(runtime=dict(sel_min_len=512))
    few = pose("selected", 2**16, config=NSAConfig(num_selected=7))
    assert chosen(few).implementation == "sdpa"
    assert "448 selected keys are below sel_min_len=512" in chosen(few).refused["fa2"]
    many = few._replace(config=NSAConfig(num_selected=8))
    assert chosen(many).implementation == "fa2"
    # In JAX the same threshold keeps back the Mosaic kernel, and only for this step.
    hopper = dict(framework="jax", platform="gpu", capability=(9, 0))
    few, many = (p._replace(**hopper) for p in (few, many))
    assert (chosen(few).implementation, chosen(many).implementation) == ("xla", "mosaic")
    assert "sel_min_len=512" in chosen(few).refused["mosaic"]
    scores = few._replace(step="scores")
    assert chosen(scores).implementation == "mosaic"


def test_a_threshold_measured_on_one_kernel_leaves_those_before_it(device):
    device(runtime=dict(sel_min_len="never"), evidence=dict(sel_min_len=dict(kernel="fa2")))
    assert chosen(pose("selected")).implementation == "sdpa"
    hopper = pose("selected", framework="jax", platform="gpu", capability=(9, 0))
    assert chosen(hopper).implementation == "mosaic"


def test_a_branch_alone_counts_queries_and_compile_counts_nothing(device):
    device(runtime=dict(fa2_min_len_cmp=512))
    alone = pose("compressed", 512, S=31)  # S: compressed tokens
    assert chosen(alone).implementation == "fa2"
    assert chosen(pose("compressed", 0)).implementation == "fa2"  # no number under compile
    device(runtime=dict(fa2_min_len_cmp="never"))
    assert chosen(pose("compressed", 0)).implementation == "sdpa"


def test_triton_has_a_threshold_of_its_own(device):
    ampere = pose("selected", config=NSAConfig(num_selected=8))
    names = [entry.name for entry in torch_dispatch.REGISTRY.table["selected"]]
    assert names.index("triton") < names.index("fa2")

    def why(**sections):
        device(**sections)
        return policy.why_not("triton", ampere)

    assert "not measured on this device" in why(runtime=dict(sel_min_len=512))
    about = dict(kernel="triton", commits=["c0ffee"])
    measured = dict(evidence=dict(sel_triton_min_L=about))
    assert why(runtime=dict(sel_triton_min_L=512, sel_min_len="never"), **measured) is None
    assert "sel_triton_min_L=1024" in why(runtime=dict(sel_triton_min_L=1024), **measured)
    device()
    with policy.overridden(policy.Thresholds(sel_triton_min_L=512), "a flag"):
        assert policy.why_not("triton", ampere) is None, "whoever gives one has decided"
    with policy.overridden(policy.Thresholds(sel_min_len=512), "a flag"):
        assert "not measured" in policy.why_not("triton", ampere)


def test_policy_forbids_with_its_reason(device):
    rule = dict(kernel="fa2", steps=["sliding"], allowed=False, reason="too slow")
    path = device(policy=[rule | {"since": "2025-09-04"}])
    choice = chosen(pose("sliding"))
    expected = f"not allowed on {GPU} since 2025-09-04: too slow ({path})"
    assert choice.implementation == "sdpa" and choice.refused["fa2"] == expected
    assert chosen(pose("compressed")).implementation == "fa2"
    device(policy=[rule | {"since": "2025-09-04", "allowed": True}])
    assert chosen(pose("sliding")).implementation == "fa2"


def test_the_seeds_rule_for_its_card():
    card = policy.of("NVIDIA GeForce RTX 4090")
    assert card.thresholds == policy.Thresholds()
    rules = {(rule.kernel, step) for rule in card.policy for step in rule.steps}
    assert rules == {("triton", "selected")} | {
        ("fa2", branch) for branch in nsa_torch.Branches._fields
    }
    assert all("to be derived again" in rule.reason for rule in card.policy)
    for path in policy.FOLDER.glob("*.yaml"):
        assert policy.read(path)


def test_overrides_stand_above_the_file(device):
    device(runtime=dict(fa2_min_len_win=300))
    with policy.overridden(policy.Thresholds(fa2_min_len_win=1000), "a test"):
        below = chosen(pose("sliding", 999))
        assert below.refused["fa2"].endswith("below fa2_min_len_win=1000 (a test)")
    with policy.overridden(policy.Thresholds(fa2_min_len_win=0), "a test"):
        assert chosen(pose("sliding", 1)).implementation == "fa2"
    assert chosen(pose("sliding", 999)).implementation == "fa2"


def test_flags_override_too(device):
    device(runtime=dict(fa2_min_len_win=300))
    values = absl_flags.FLAGS
    if not values.is_parsed():
        values(["test"])
    at = pose("", 999)
    for name, expected in (("never", "sdpa"), ("1000", "sdpa"), ("999", "fa2")):
        try:
            values["fa2_min_len_win"].parse(name)
            got = flags.implementation(torch_dispatch.REGISTRY, at).sliding
        finally:
            values["fa2_min_len_win"].unparse()
        assert got == expected
    for bad in ("-1", "1e3", "soon", ""):
        with pytest.raises(absl_flags.IllegalFlagValueError, match="never or an integer"):
            values["fa2_min_len_win"].parse(bad)
    assert flags.thresholds() == policy.Thresholds()


def test_settings_override_too(tmp_path):
    assert problems.settings("tiny").runtime.thresholds == policy.Thresholds()
    path = tmp_path / "mine.yaml"
    path.write_text("runtime: {fa2_min_len_win: never, sel_triton_min_L: 2048}")
    run = problems.settings(path, {"fa2_min_len_cmp": 7}).runtime
    assert run.thresholds == policy.Thresholds("never", 7, sel_triton_min_L=2048)
    for bad in ("-1", "soon", "1.5", "true"):
        path.write_text(f"runtime: {{fa2_min_len_win: {bad}}}")
        with pytest.raises(ValueError, match="fa2_min_len_win"):
            problems.settings(path)


@pytest.mark.parametrize(
    "text,message",
    [
        ("[1]", "must hold a mapping"),
        ("a: [", "is not YAML"),
        ("{schema: 2, device: NVIDIA Test 80GB}", "schema must be 1, got 2"),
        ("{schema: 1, device: Other}", "must be of the device in its name, got 'Other'"),
        ("{schema: 1, device: NVIDIA Test 80GB, x: 1}", "unknown key 'x'"),
        ("{schema: 1, device: NVIDIA Test 80GB, runtime: 3}", "runtime must be a dict"),
        (
            "{schema: 1, device: NVIDIA Test 80GB, runtime: {fa2_min_len_win: -1}}",
            "fa2_min_len_win: a threshold must be never or an integer from 0, got -1",
        ),
        (
            "{schema: 1, device: NVIDIA Test 80GB, runtime: {fa2_min_len: 1}}",
            "unknown key 'fa2_min_len'",
        ),
        (
            "{schema: 1, device: NVIDIA Test 80GB, policy: [{kernel: fa2}]}",
            r"policy\[0\] must have the keys",
        ),
        (
            "{schema: 1, device: NVIDIA Test 80GB, policy: [{kernel: sdpa, steps: [sliding], "
            "allowed: false, reason: r, since: 2025-01-01}]}",
            r"policy\[0\]: kernel must be one of .* got 'sdpa'",
        ),
        (
            "{schema: 1, device: NVIDIA Test 80GB, policy: [{kernel: fa2, steps: [sliding], "
            "allowed: false, reason: '', since: 2025-01-01}]}",
            r"policy\[0\]: reason must not be empty",
        ),
        *(
            (
                f"{{schema: 1, device: NVIDIA Test 80GB, policy: [{{kernel: fa2, steps: {steps}, "
                "allowed: false, reason: r, since: 2025-01-01}]}",
                r"policy\[0\]: steps must be a list of",
            )
            for steps in ("sliding", "[]", "[sliding, all]")
        ),
    ],
    ids=range(14),
)
def test_a_damaged_file_is_an_error(tmp_path, text, message):
    path = tmp_path / FILE
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        policy.read(path)


def test_a_problem_names_its_device(monkeypatch):
    query = jnp.zeros((1, 8, 2, 4))
    assert jax_problem.problem_of(query, 1, 8, 4, NSAConfig(), False).device is None
    pretend.machine(monkeypatch, jax_device_name=GPU)
    assert jax_problem.problem_of(query, 1, 8, 4, NSAConfig(), False).device == GPU
    pretend.gpu(monkeypatch)
    monkeypatch.setattr(torch_dispatch, "device_name", lambda index: f"{GPU} {index}")
    numbers = operators.numbers_of(NSAConfig())
    sizes = (1, 8, 8, 2, 1, 4, 4)
    for kind, expected in ((("cuda", 1), f"{GPU} 1"), (("cpu", None), None)):
        at = torch_dispatch._problem(kind, "bfloat16", sizes, numbers, (False,) * 3, None)
        assert at.device == expected
    settings = problems.settings("tiny")
    assert runners.problem(settings, "torch", "cpu", None, "cpu").device is None
    assert runners.problem(settings, "torch", "cuda", (9, 0), GPU).device == GPU


@pytest.mark.parametrize(
    ("framework", "registry"), [("torch", torch_dispatch), ("jax", jax_dispatch)]
)
def test_a_plan_names_the_length_from_which_it_is_faster_than_dense(
    device, framework, registry
):
    """Of these heads alone, and of what runs all steps at once."""
    hopper = dict(framework=framework, platform="cuda", capability=(9, 0))
    if framework == "jax":
        hopper["platform"] = "gpu"
    heads = f"{framework} 8/2 heads of 64"
    path = device(faster_than_dense={heads: {"forward": 16384, "fwdbwd": "never"}})
    plan = registry.REGISTRY.choices(pose("", **hopper), "mosaic")
    said = f"from 16384 tokens forward, at no measured length with backward ({path})"
    assert str(plan).splitlines()[-1] == f"attention: faster than dense attention {said}"
    for other in (pose("", **hopper, H=4), pose("", **hopper, device=None)):
        assert "dense" not in str(registry.REGISTRY.choices(other, "mosaic"))
    portable = "sdpa" if framework == "torch" else "xla"
    assert "dense" not in str(registry.REGISTRY.choices(pose("", **hopper), portable))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"torch 8/2 heads of 64": 16384},
            "must have the keys ('forward', 'fwdbwd'), got 16384",
        ),
        ({"torch 8/2 heads of 64": {"decode": 1}}, "must have the keys ('forward', 'fwdbwd')"),
        ({"torch 8/2 heads of 64": {"forward": "soon"}}, "forward: a threshold must be never"),
        ([], "faster_than_dense must be a dict"),
    ],
)
def test_damaged_lengths_beside_dense_are_named(device, section, message):
    device(faster_than_dense=section or ["x"])
    with pytest.raises(ValueError) as error:
        chosen(pose("sliding"))
    assert message in str(error.value) and FILE in str(error.value)


def test_the_file_is_read_once(device, monkeypatch):
    device(runtime=dict(fa2_min_len_win=300))
    reads = pretend.calls_of(monkeypatch, policy, "read")
    for length in (1, 299, 300):
        chosen(pose("sliding", length))
    assert len(reads) == 1


def test_what_is_explained_is_what_runs(monkeypatch):
    """On the CPU with a stand-in for FA-2, by the public functions."""
    entry = next(e for e in torch_dispatch.REGISTRY.table["sliding"] if e.name == "sdpa")
    stand_in = dataclasses.replace(entry, name="fa2")
    monkeypatch.setitem(torch_dispatch.REGISTRY.table, "sliding", (stand_in, entry))
    x = torch.zeros(1, 9, 1, 8)
    with policy.overridden(policy.Thresholds(fa2_min_len_win=10), "a test"):
        plan = nsa_torch.explain(x, x, x)
        assert plan.sliding.implementation == "sdpa"
        assert "below fa2_min_len_win=10 (a test)" in str(plan)
        x = torch.zeros(1, 10, 1, 8)
        assert nsa_torch.explain(x, x, x).sliding.implementation == "fa2"
