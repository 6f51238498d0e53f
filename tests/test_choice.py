"""Which implementation runs a call, and why no other: a row is a problem and what is asked for.

Rules of devices (`configs/devices`), thresholds, flags, names, and what Mosaic kernels can do. What
is accepted runs forward and backward; a refusal comes before any kernel runs.
"""

import builtins
import dataclasses
import functools
import itertools
import logging
import re
import types
import typing
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
import torch
import yaml
from absl import flags as absl_flags
from torch._subclasses.fake_tensor import FakeTensorMode

import nsa_jax
import nsa_torch
from bench.harness import problems
from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import capability
from kernels_pallas.runtime import lowering
from kernels_pallas.specs.tile import Tile, slab_width
from nsa_core import flags, policy
from nsa_jax import Branches, NSAConfig
from nsa_jax.dispatch import REGISTRY
from nsa_torch import dispatch as torch_dispatch
from nsa_torch import fa2
from tests import pretend, refusals, test_mosaic_compiled
from tests.measured import GPU, problem
from tests.posed import pose
from tests.problems import SMALL, Case
from tests.stand_in_kernels import stand_ins
from tests.tables import table
from tests.test_refusals import WORLDS
from tests.torch_inputs import run as run_step

REGISTRIES = {"jax": REGISTRY, "torch": torch_dispatch.REGISTRY}
FILE = "nvidia-test-80gb.yaml"
FAKE = 60  # the first index of GPUs that no other test asks about


@pytest.fixture
def device(tmp_path, monkeypatch):
    """Writes the file of `GPU`, which FA-2 can use as far as it asks."""
    pretend.folder(monkeypatch, "devices", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", None)

    def write(**sections):
        data = {"schema": 1, "device": GPU} | sections
        (tmp_path / FILE).write_text(yaml.safe_dump(data))
        policy.of.cache_clear()
        return tmp_path / FILE

    return write


def chosen(problem, name=None):
    return REGISTRIES[problem.framework].choose(problem, name)


HOPPER = dict(framework="jax", platform="gpu", capability=(9, 0))
TABLE = table("choice")
(SLOW,) = TABLE["forbidden"]


def described(row):
    return f"{row['step']} of {row.get('length', 512)}: {row['chosen']}"


@pytest.mark.parametrize("row", TABLE["rules"], ids=described)
def test_the_thresholds_of_a_device(device, row):
    path = device(**{x: y for x, y in row.items() if x in ("runtime", "evidence", "policy")})
    changes = refusals.given(row.get("changes", {}))
    problem = pose(row["step"], row.get("length", 512), **changes)
    with policy.overridden(policy.Thresholds(**row.get("flags", {})), "a flag"):
        choice = chosen(problem)
    assert choice.implementation == row["chosen"]
    assert row.get("not triton", "") in choice.refused.get("triton", "")
    if "reason" in row:
        kernel = "fa2" if problem.framework == "torch" else "mosaic"
        assert choice.refused[kernel] == f"{row['reason']} ({row.get('by', path)})"
        assert f"not {kernel}: " in str(choice)
    # A name is not affected.
    if problem.framework == "torch":
        assert chosen(problem, "fa2").implementation == "fa2"


def test_the_seeds_rule_for_its_card():
    """No thresholds, and no Triton for the selected branch; files of all devices can be read."""
    card = dict(device="NVIDIA GeForce RTX 4090", capability=(8, 7))
    for step in Branches._fields:
        refused = chosen(pose(step, **card)).refused
        for name in ("fa2", "triton") if step == "selected" else ("fa2",):
            assert "not allowed on NVIDIA GeForce RTX 4090" in refused[name]
            assert "to be derived again" in refused[name]
    assert set(chosen(pose("scores", **card)).refused) == {"mosaic", "triton"}
    folder = Path(__file__).parents[1] / "configs" / "devices"
    files = [yaml.safe_load(path.read_text()) for path in folder.glob("*.yaml")]
    assert all(chosen(pose("sliding", device=file["device"])) for file in files)
    assert [file.get("runtime") for file in files if file["device"] == card["device"]] == [None]


@pytest.fixture
def values():
    """Parsed flags."""
    found = absl_flags.FLAGS
    if not found.is_parsed():
        found(["test"])
    return found


def test_overrides_stand_above_the_file(device, values):
    path = device(runtime=dict(fa2_min_len_win=300))
    assert chosen(pose("sliding", 300)).implementation == "fa2"
    path.write_text("read once")
    assert chosen(pose("sliding", 999)).implementation == "fa2"
    for name, expected in (("never", "sdpa"), ("1000", "sdpa"), ("999", "fa2")):
        try:
            values["fa2_min_len_win"].parse(name)
            got = flags.implementation(REGISTRIES["torch"], pose("", 999)).sliding
        finally:
            values["fa2_min_len_win"].unparse()
        assert got == expected
    for bad in ("-1", "1e3", "soon", ""):
        with pytest.raises(absl_flags.IllegalFlagValueError, match="never or an integer"):
            values["fa2_min_len_win"].parse(bad)
    assert flags.thresholds() == policy.Thresholds()


@pytest.mark.parametrize("data, message, _", refusals.rows("device file"))
def test_a_damaged_file_of_a_device_is_an_error(device, data, message, _):
    device(**data)
    with pytest.raises(ValueError) as error:
        chosen(pose("sliding"))
    assert message in str(error.value) and FILE in str(error.value)


@pytest.mark.parametrize("name", TABLE["plans of problems"])
def test_a_plan_says_what_runs(device, name):
    """All steps run at once where every step has the name. From which length a plan is faster than
    dense attention is of these heads alone, and of what runs all steps at once.
    """
    row = TABLE["plans of problems"][name]
    path = device(**row.get("file", {}))
    problem = pose("", **refusals.given(row["problem"]))
    plan = str(REGISTRIES[problem.framework].choices(problem, refusals.given(row.get("name"))))
    assert re.fullmatch(refusals.words(row["plan"].replace("PATH", str(path))), plan)


# Names, refusals and flags


def test_automatic_choice_walks_the_order_and_tells_why(device, caplog):
    caplog.set_level(logging.INFO)
    path = device(policy=[SLOW])  # a reason of its own
    table, sliding = REGISTRIES["torch"], pose("sliding")
    choice = table.choose(sliding)
    assert list(choice.refused) == ["mosaic", "triton", "fa2"]
    assert str(choice).startswith("sliding: sdpa (not mosaic: needs compute capability")
    table.choose(sliding._replace(T=9, S=9))
    assert caplog.text.count(str(path)) == 1  # told once
    old = pose("sliding", capability=(7, 5))
    with pytest.raises(NotImplementedError, match=r"sliding: fa2: .*7\.5"):
        table.choose(old, "fa2")
    choice = table.choose(old, "fa2", "fallback")
    assert choice.implementation == "sdpa" and "7.5" in choice.refused["fa2"]
    assert "fa2 cannot run, so another implementation is chosen: " in caplog.text
    for name in ("d", "auto"):  # automatic choice is None
        with pytest.raises(ValueError, match=rf"one of \(.*\) or None, got '{name}'"):
            table.choose(sliding, name)


def test_flags_name_implementations(values):
    on_cpu = dict(framework="jax", platform="cpu", capability=None, device=None)
    at = pose("", dtype="float32", config=SMALL, **on_cpu)
    assert flags.named() == Branches(None, None, None)
    assert flags.implementation(REGISTRIES["jax"], at) == Branches("xla", "xla", "xla")
    with pytest.raises(absl_flags.IllegalFlagValueError):
        values["selected_kernel"].parse("cuda")
    saved = values["selected_kernel"].value, values["on_unsupported"].value
    try:
        values.selected_kernel = "mosaic"
        with pytest.raises(NotImplementedError, match=r"^selected: mosaic: "):
            flags.implementation(REGISTRIES["jax"], at)
        values.on_unsupported = "fallback"
        assert flags.implementation(REGISTRIES["jax"], at).selected == "xla"
        values.selected_kernel = "fa2"
        with pytest.raises(ValueError, match="'fa2'"):
            flags.implementation(REGISTRIES["jax"], at)
    finally:
        values.selected_kernel, values.on_unsupported = saved


# Calls


def test_what_is_explained_is_what_runs(monkeypatch):
    """On the CPU; with a stand-in for FA-2, which has no gradient and a threshold."""
    x = jnp.zeros((1, 20, 4, 16))
    entry = REGISTRIES["jax"].entry("sliding", "xla")
    no_gradient = lambda problem: "no gradient" if problem.requires_grad else None
    stand_in = dataclasses.replace(entry, name="mosaic", why_not=no_gradient)
    monkeypatch.setitem(REGISTRIES["jax"].table, "sliding", (stand_in, entry))
    plan = str(nsa_jax.explain(x, x, x, config=SMALL))
    assert "sliding: xla (not mosaic: no gradient)" in plan
    entry = REGISTRIES["torch"].entry("sliding", "sdpa")
    stand_in = dataclasses.replace(entry, name="fa2", why_not=no_gradient)
    for step in ("sliding", "scores"):  # which have no gradient anyway
        monkeypatch.setitem(REGISTRIES["torch"].table, step, (stand_in, entry))
    query, key, gates = (torch.zeros(1, 20, 4, width) for width in (8, 8, 3))
    pair = (torch.zeros(1, SMALL.num_compressed(20), 4, 8),) * 2

    def sliding():
        plan = nsa_torch.explain(query, key, key, gates, compressed=pair, config=SMALL)
        return plan.sliding.implementation, str(plan)

    assert sliding()[0] == "fa2"
    for least, expected in ((20, "fa2"), (21, "sdpa")):
        with policy.overridden(policy.Thresholds(fa2_min_len_win=least), "a test"):
            found, said = sliding()
        assert found == expected
        assert ("below fa2_min_len_win=21 (a test)" in said) == (found == "sdpa")
    for wants in (query, key, gates, pair[0]):
        wants.requires_grad_()
        found, said = sliding()
        assert found == "sdpa" and "scores: fa2" in said
        with torch.no_grad():
            assert sliding()[0] == "fa2"
        wants.requires_grad_(False)


def test_names_and_refusals_in_torch():
    given = WORLDS["torch"].arguments("attention")
    doubles = {x: y.double() for x, y in given.items() if x != "config"}
    with pytest.raises(NotImplementedError, match="jax_enable_x64"):
        nsa_torch.attention(**doubles, config=SMALL, implementation="jax")
    for library, registry in ((nsa_jax, REGISTRIES["jax"]), (nsa_torch, REGISTRIES["torch"])):
        hint = typing.get_type_hints(library.sliding_attention)["implementation"]
        (name,) = (x for x in typing.get_args(hint) if isinstance(x, typing.TypeAliasType))
        assert registry.names() == typing.get_args(name.__value__)


@pytest.mark.parametrize("row", TABLE["named"], ids=str)
def test_a_named_implementation_says_why_not(row, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)  # FA-2 packs without Triton
    changes = {"capability": (9, 0)} | refusals.given(row)
    name, reason = (changes.pop(x, y) for x, y in (("name", "fa2"), ("says", None)))
    problem = pose("selected", 64, **changes)
    if reason is None:
        assert chosen(problem, name).implementation == name
    else:
        with pytest.raises(NotImplementedError, match=rf"selected: {name}: .*{reason}"):
            chosen(problem, name)
    assert fa2.library().startswith(("flash_attn ", "torch "))


def test_too_many_sequences_for_one_call_of_fa2_are_refused():
    query, bounds = torch.zeros(1, 70000, 1, 8), torch.arange(70001)
    options = dict(config=SMALL, kv_len=70000, cu_seqlens=bounds)
    with pytest.raises(NotImplementedError, match="at most 65535 sequences"):
        run_step("sliding", "fa2", query, query, query, **options)


def test_a_problem_names_its_device(device, monkeypatch):
    """JAX is asked about its default device, not the first, which may be of another kind."""
    path = device(policy=[SLOW | {"kernel": "mosaic"}])
    forbidden = f"not allowed on {GPU} since 2025-09-04: too slow ({path})"
    x = jnp.zeros((1, 8, 2, 64), jnp.bfloat16)
    kinds = {None: ("gpu", GPU, "9.0"), "cpu": ("cpu", "cpu", None)}
    names = "platform", "device_kind", "compute_capability"
    of = lambda x=None: [types.SimpleNamespace(**dict(zip(names, kinds[x], strict=True)))]
    monkeypatch.setattr(jax, "devices", of)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    missing = "needs compute capability (9, 0), got None"
    for default, said in ((None, forbidden), ("cpu", missing)):
        with jax.default_device(default):
            plan = nsa_jax.explain(x, x, x, config=SMALL)
        assert plan.sliding.refused["mosaic"] == said
    # torch about that of the tensors, not the current one.
    pretend.gpu(monkeypatch)
    asked = lambda index=0: (9, index - FAKE)
    monkeypatch.setattr(torch.cuda, "get_device_capability", asked)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: GPU)
    pretend.machine(monkeypatch, can_build=True)
    with FakeTensorMode():
        for index, said in ((FAKE, forbidden), (FAKE + 1, "got (9, 1)")):
            x = torch.empty(1, 8, 2, 64, dtype=torch.bfloat16, device=f"cuda:{index}")
            plan = nsa_torch.explain(x, x, x, config=SMALL)
            assert plan.sliding.refused["mosaic"].endswith(said)
    settings = problems.settings("tiny")
    assert problem(settings, "cpu", device="cpu").device is None
    assert problem(settings, device=GPU).device == GPU


def test_a_choice_that_is_kept_follows_the_thresholds(monkeypatch):
    """On a GPU calls of one problem are decided once, until the thresholds change."""
    asked = []
    pretend.gpu(monkeypatch)
    capability = lambda index: asked.append(index) or (7, 5)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)

    def decided():
        with FakeTensorMode():
            x = torch.empty(1, 8, 2, 8, device=f"cuda:{FAKE + 2}")
            nsa_torch.sliding_attention(x, x, x, config=SMALL)
        return len(asked)

    assert [decided(), decided()] == [1, 1]
    with policy.overridden(policy.Thresholds(sel_min_len=3), "a test"):
        assert decided() == 2
    assert decided() == 2


# What Mosaic kernels can do

MOVING = ("tile_block_lists", "dkv_merge")  # kernels that have sizes of others
LENGTH = 8192  # so long that tiles may be gathered
REFUSED = TABLE["not accepted"]


def asked(D=128, Dv=128, G=4, **change):
    """The problem of this shape on a Hopper GPU."""
    return pose("selected", LENGTH, H=2 * G, D=D, Dv=Dv, **HOPPER | change)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_width_and_group_is_accepted(dtype):
    shapes = list(itertools.product(TABLE["widths"], TABLE["widths"], TABLE["groups"]))
    assert len(shapes) == 900
    reasons = {shape: capability.why_not(asked(*shape, dtype=dtype)) for shape in shapes}
    assert {shape: reason for shape, reason in reasons.items() if reason} == {}


def narrowest(group: int) -> int:
    """Of which number widths must be multiples, so that a copy can move rows of `group` heads:
    rows * width of a slab * 2 bytes are a multiple of 128, of up to 64 rows.
    """
    if group % 2:
        return 16 if group <= 15 else 32 if group <= 31 else 64
    return 32 if group % 4 and group > 32 else 16


def test_large_groups_whose_rows_no_copy_moves_are_refused():
    for group, width in itertools.product(range(1, 65), (16, 48, 96, 160, 64, 256)):
        reason, least = capability.why_not(asked(width, 128, group)), narrowest(group)
        if width % least == 0:
            assert reason is None
            tile = Tile(group, slab_width(width, 128))
            assert tile.used > 0 == tile.used * tile.slab * 2 % 128
            continue
        assert reason == (
            f"needs D, Dv and select_block to be multiples of {least} if {group} query "
            f"heads share a key/value head, got D={width}, Dv=128, select_block=64"
        )
    narrow = asked(G=17, config=NSAConfig(select_block=48))
    assert capability.why_not(narrow).endswith("got D=128, Dv=128, select_block=48")


# What is accepted is compiled by Mosaic, and what is refused would not. Mosaic counts the shared
# memory; what ptxas makes of such kernels is in `test_mosaic_compiled.py`.


@functools.cache
def kernels(D=128, Dv=128, G=4, config=NSAConfig()):
    """The kernels of both passes that multiply, one of a kind: others depend on no width, or
    move rows of one width.
    """
    name, found = f"{D=} {Dv=} {G=} {config}", {}
    case = Case(LENGTH, LENGTH, 2 * G, 2, D, Dv, 1, config, dtype="bfloat16")
    with mock.patch.dict(test_mosaic_compiled.SHAPES, {name: case}):
        for backward in (False, True):
            for kernel in test_mosaic_compiled.kernels(name, backward):
                if hasattr(kernel.spec, "D") and kernel.name not in MOVING:
                    gathered = getattr(kernel.spec, "gathered", False)
                    found[kernel.name, gathered] = kernel
    return list(found.values())


def test_gathered_query_tiles_can_be_copied():
    """Three tokens of five heads are 480 bytes a slab, which no copy moves."""
    kernel = next(k for k in kernels(96, 80, 5) if getattr(k.spec, "gathered", False))
    assert (kernel.spec.query_tile, kernel.spec.query_tile.tokens) == (Tile(5, 16, 32), 4)
    assert lowering.lower(kernel)


@pytest.mark.parametrize("shape, names", TABLE["accepted"])
def test_what_is_accepted_compiles(shape, names):
    assert not capability.why_not(asked(*shape))
    found = [kernel for kernel in kernels(*shape) if kernel.name.startswith(names)]
    assert len(found) == {"best_blocks": 1, "gathered_": 4}.get(names, len(kernels(*shape)))
    assert all(lowering.lower(kernel) for kernel in found)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_does_not_compile(name, monkeypatch):
    change, error, message = REFUSED[name]
    change = refusals.given(change)
    assert capability.why_not(asked(**change))
    if error == "NotImplementedError":  # with as many tokens as a tile has room for
        monkeypatch.setattr(Tile, "tokens", property(lambda tile: tile.rows // tile.group))
    with pytest.raises(getattr(builtins, error), match=message):
        first, *others = kernels(**change)  # the likeliest before others, which take long
        for kernel in (first, *sorted(others, key=lambda x: not x.name.endswith("_dq"))):
            lowering.lower(kernel)


@pytest.mark.parametrize("framework", REGISTRIES)
def test_mosaic_refuses_before_the_forward_pass(framework, monkeypatch):
    """No GPU is asked for, as in the interpreter, and a kernel that runs is an error."""

    def run(*arguments, **options):
        raise AssertionError("a Mosaic kernel ran")

    monkeypatch.setattr(Kernel, "__call__", run)
    library, xp = (nsa_torch, torch) if framework == "torch" else (nsa_jax, jnp)
    # 17 query heads share a head.
    shapes = (1, 20, 17, 48), (1, 20, 1, 48), (1, 20, 1, 16), (1, 20, 17, 3)
    query, *rest = (xp.ones(shape, dtype=xp.bfloat16) for shape in shapes)

    def gradient(name):
        call = lambda x: library.attention(x, *rest, config=SMALL, implementation=name).sum()
        if framework == "jax":
            return jax.jit(jax.grad(call))(query)
        leaf = query.clone().requires_grad_()
        return torch.autograd.grad(call(leaf), leaf)[0]

    reason = "needs D, Dv and select_block to be multiples of 32 if 17 query heads share"
    with stand_ins(monkeypatch, run):
        with pytest.raises(NotImplementedError, match=f"mosaic: {reason}"):
            gradient("mosaic")
        plan = library.explain(query, *rest[:2], config=SMALL)
        portable = {"jax": "xla", "torch": "sdpa"}[framework]
        assert {choice.implementation for choice in plan} == {portable}
        assert all(choice.refused["mosaic"].startswith(reason) for choice in plan)
        assert gradient(None).shape == shapes[0]


def test_settings_override_too(tmp_path):
    assert problems.settings("tiny").runtime.thresholds == policy.Thresholds()
    path = tmp_path / "mine.yaml"
    path.write_text("runtime: {fa2_min_len_win: never, sel_triton_min_L: 2048}")
    run = problems.settings(path, {"fa2_min_len_cmp": 7}).runtime
    assert run.thresholds == policy.Thresholds("never", 7, sel_triton_min_L=2048)
