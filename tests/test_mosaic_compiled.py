"""Mosaic kernels compiled for Hopper on any machine: registers, spills, shared memory."""

import dataclasses
import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas.mosaic.operands import REGISTERS
from kernels_pallas.runtime import lowering
from kernels_pallas.specs import interval
from kernels_pallas.specs.tile import SMEM_BYTES
from nsa_core.steps import mosaic_forward
from nsa_jax import Branches, kernel_path
from nsa_jax.dispatch import REGISTRY
from nsa_jax.jax_ops import JaxOps
from nsa_torch import NSAConfig
from tests.cross_compile import compile_report
from tests.problems import of_kind
from tests.tables import table

SHAPES, EDGES = of_kind("chip"), of_kind("chip edge")
# Products in e4m3, which have no backward pass.
FP8 = {
    f"fp8 {name}": dataclasses.replace(
        case, config=dataclasses.replace(case.config, compute_dtype="float8_e4m3")
    )
    for name, case in (SHAPES | EDGES).items()
    if name in ("paper", "widest groups")
}
# The others are like `SHAPES`.
EDGES_BACKWARD = ("widest", "widest groups", "longest blocks", "narrowest")
EACH_STEP = ("paper", "fp8 paper")  # where the steps are compiled by themselves too
# Registers a thread that the occupancy meant for each kernel leaves: one block of three
# warpgroups, three blocks of one, or four warpgroups; of others as many as a thread can have.
ALLOWED = {
    "interval_forward": REGISTERS // (3 * 128) // 8 * 8,
    "interval_dq": REGISTERS // (3 * 128) // 8 * 8,
    "selected_forward": REGISTERS // (3 * 128) // 8 * 8,
    "gathered_merge": REGISTERS // (2 * 128) // 8 * 8,
    "gathered_merge_dq": REGISTERS // (2 * 128) // 8 * 8,
    "best_blocks": REGISTERS // (4 * 128),
}
NAMES = table("test_mosaic_compiled")
GRADIENTS, SUMS, FROM_STORED, BY_WALK = map(set, NAMES["gradients"].values())
FORWARD, BACKWARD = map(set, NAMES["gathered"].values())
GATHERED = ("G4", "G1")
STORED = ("paper", "wide", "long")
SPILLS, SPILLS_OF_THREE = NAMES["spills"], NAMES["spills of three"]


@functools.cache
def kernels(name, backward=False):
    """The kernels that `nsa_jax.mosaic` builds for a shape; `backward`: those of gradients."""
    case, found = (SHAPES | EDGES | FP8)[name], []

    class Recording(JaxOps):
        def run(self, kernel, *arrays):
            assert [x.size for x in arrays] == [x.size for x in kernel.inputs]
            found.append(kernel)
            return [jnp.zeros(x.shape, x.dtype) for x in kernel.outputs]

    def array(*shape, dtype=case.dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    count = case.config.num_compressed(case.S)
    query = array(case.B, case.T, case.H, case.D)
    key, value = (array(case.B, case.S, case.Hkv, width) for width in (case.D, case.Dv))
    compressed = [array(case.B, count, case.Hkv, width) for width in (case.D, case.Dv)]
    gates = Branches.each(array(case.B, case.T, case.H))
    indices = array(case.B, case.T, case.Hkv, case.config.num_selected, dtype="int32")
    keys = Branches.each(key), Branches.each(value)
    calls = [("attention", query, *keys, gates, compressed, None)]
    calls += EACH_STEP.count(name) * [
        ("compressed", query, *compressed),
        ("scores", query, compressed[0]),
        ("selected", query, key, value, indices),
        ("sliding", query, key, value),
    ]
    with mock.patch.object(kernel_path, "JAX_OPS", Recording()):
        for step, *arrays in calls:
            function = REGISTRY.entry(step, "mosaic").load()
            function = functools.partial(function, config=case.config, kv_len=case.S)
            jax.eval_shape(pulled(function) if backward else function, *arrays)
    gradients = GRADIENTS | SUMS | FROM_STORED | BY_WALK | BACKWARD
    wanted = [k for k in found if not backward or k.name in gradients]
    return tuple(dict.fromkeys(wanted))


def pulled(function):
    def pull(*arrays):
        outputs, pull = jax.vjp(function, *arrays)
        return pull(jax.tree.map(jnp.ones_like, outputs))

    return pull


def build(name, index, backward):
    return any_length(name, backward)[index]


@functools.cache
def any_length(name, backward=False):
    """`kernels` as torch runs them; those of `test_choice.py` are for a length, as JAX's."""
    return tuple(dict.fromkeys(x.for_any_length() for x in kernels(name, backward)))


# Shapes share kernels that serve any length and differ in counts of heads alone.
REPORTS, LOWERED = {}, set()


def but_for_heads(kernel):
    """What such kernels have in common, which have groups of one size."""
    spec = kernel.spec
    group = spec.H // spec.Hkv if hasattr(spec, "H") and hasattr(spec, "Hkv") else None
    return kernel.name, group, re.sub(r"\b(H|Hkv)=\d+", "", repr(spec))


def wanted_of(name, backward=False):
    """The kernels of a shape that ptxas takes; of edges one of a kind."""
    every = any_length(name, backward)
    return list({x.name: x for x in every}.values()) if name in EDGES else every


def compiled(name, backward=False):
    """What ptxas says of the kernels of a shape."""
    every = any_length(name, backward)
    known = {but_for_heads(x): every.index(x) for x in wanted_of(name, backward)}
    missing = [key for key in known if key not in REPORTS]
    options = ({"name": name, "index": known[key], "backward": backward} for key in missing)
    reports = compile_report([(f"{__name__}:build", each) for each in options])
    REPORTS.update(zip(missing, reports, strict=True))
    return [REPORTS[key] for key in known]


def excess(report, case):
    """What of a kernel is more than the chip or this library allows."""
    three = interval.consumers(case.D, case.Dv) == 3
    spills = (SPILLS | (SPILLS_OF_THREE if three else {})).get(report["name"], {})
    limits = {"registers": ALLOWED.get(report["name"], 255), "shared_bytes": SMEM_BYTES}
    limits |= {key: spills.get(key, 0) for key in ("spill_store_bytes", "spill_load_bytes")}
    found = {key: report[key] for key, limit in limits.items() if report[key] > limit}
    remarks = [x for x in report["remarks"] if not (spills and "Registers are spilled" in x)]
    return found | ({"remarks": remarks} if remarks else {})


def names(name, backward=False):
    return {kernel.name for kernel in kernels(name, backward)}


def test_every_kernel_is_compiled():
    allowed = set(ALLOWED) - GRADIENTS - BACKWARD | FORWARD
    assert set().union(*map(names, SHAPES)) >= allowed
    for name in SHAPES:
        gathered = name in GATHERED
        assert bool(names(name) & FORWARD) == gathered
        dq = FROM_STORED if name in STORED else BY_WALK
        gathering = BACKWARD if gathered else set()
        assert names(name, backward=True) == GRADIENTS | SUMS | dq | gathering


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_fit_the_chip(name, backward):
    bad = [report for report in compiled(name, backward) if excess(report, SHAPES[name])]
    assert not bad, bad


def on_pages(heads):
    widths = {"key_width": 128, "value_width": 128, "dtype": "bfloat16"}
    return mosaic_forward.selected_on_pages(
        heads=heads, kv_heads=4, **widths, config=NSAConfig()
    )


def build_on_pages():
    made = on_pages(64)
    assert made is not None
    return made


def test_keys_in_pages_fit_the_chip():
    """As those in order: three CTAs on an SM."""
    (report,) = compile_report([(f"{__name__}:build_on_pages", {})])
    assert not excess(report, SHAPES["paper"])
    assert on_pages(32) is None  # 8 heads a group: gathered


# Bytes a thread, stored and loaded once a work item.
FP8_SPILLS = {"fp8 widest groups": 60}


@pytest.mark.parametrize("name", FP8)
def test_products_in_e4m3_fit_the_chip(name):
    """On the paper's heads three CTAs an SM, as in 16 bits."""
    names = {"selected_forward", "interval_forward", "fp8_sums", "fp8_round"}
    builders = [
        (f"{__name__}:build", {"name": name, "index": i, "backward": False})
        for i, x in enumerate(any_length(name))
        if x.name in names and getattr(x.spec, "fp8", True)
    ]
    reports = compile_report(builders)
    assert {x["name"] for x in reports} == names
    for report in reports:
        most = ALLOWED.get(report["name"], 255) if name == "fp8 paper" else 255
        assert report["registers"] <= most and report["shared_bytes"] <= SMEM_BYTES
        spilled = max(report["spill_store_bytes"], report["spill_load_bytes"])
        assert spilled <= FP8_SPILLS.get(name, 0), (report["name"], spilled)
        assert all("spilled" in remark for remark in report["remarks"])


@pytest.mark.parametrize(
    ("name", "backward"),
    [(name, False) for name in EDGES] + [(name, True) for name in EDGES_BACKWARD],
)
def test_what_is_not_refused_compiles(name, backward):
    """By Mosaic, which counts the shared memory; the largest of each kind by ptxas then too."""
    whole = wanted_of(name, backward) if name == "widest" else []
    left = {but_for_heads(x): x for x in any_length(name, backward) if x not in whole}
    new = left.keys() - LOWERED - REPORTS.keys()
    assert all(lowering.lower(left[key]) for key in new)
    LOWERED.update(new)
    if whole:
        assert all(report["shared_bytes"] <= SMEM_BYTES for report in compiled(name, backward))
        # The most that a walk that overlaps P V holds in registers.
        forward = [x for x in compiled(name, backward) if x["name"] == "selected_forward"]
        assert backward or (forward and not any(x["spill_store_bytes"] for x in forward))
