"""Mosaic kernels on pages: rows of the table of caches, on emulated warps or a GPU."""

import dataclasses
import functools
import itertools
import json
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import nsa_torch
from kernels_pallas.mosaic import capability, operands
from kernels_pallas.runtime import description
from kernels_pallas.specs import append as append_spec
from kernels_pallas.specs import decode as specs
from kernels_pallas.specs.decode import Variant
from kernels_pallas.specs.tile import SMEM_BYTES
from nsa_core.steps import mosaic_decode
from nsa_torch import NSAConfig, PoolParams, paged
from tests import cross_compile, planned, pretend, refusals
from tests.caches import (
    HISTORIES,
    TABLE,
    WIDTH,
    JaxPages,
    Rows,
    Sizes,
    TorchPages,
    Turn,
    check,
    decoding,
    of_counts,
    sized,
    tables,
    turns,
)
from tests.devices import on_hopper
from tests.limits import forget
from tests.oracles.clusters import ClusterWarps
from tests.oracles.warps import GARBAGE
from tests.stand_in_kernels import stand_ins


@pytest.fixture
def blocks():
    """That steps chose."""
    return []


@pytest.fixture
def ran(monkeypatch, blocks):
    """The kernels that run, on emulated warps; calls are known as on a GPU."""

    def step(kernel, *tensors):
        found = planned.emulated(kernel, *tensors)
        blocks.append(found[-1].numpy())
        return found

    def append(kernel, *tensors, out):
        ran.append(kernel)
        kernel = append_spec.append(dataclasses.replace(kernel.spec, interpret=True))
        for place, x in zip(out, planned.emulated(kernel, *tensors), strict=True):
            place.copy_(torch.where(x == GARBAGE, place, x))

    def why_not(*call):
        return append_spec.why_not(paged.append_spec(*call))

    pretend.machine(monkeypatch, launch_on_pages=append, pages_why_not=why_not)
    with planned.on_the_cpu(monkeypatch, step) as ran, capability.interpreted(True):
        yield ran


SMALLEST = Variant(2, 4, 2, 128)
FEW = NSAConfig(num_selected=6, window=130)
PAPER_SIZES = {"H": 16, "Hkv": 1, "D": 128, "Dv": 128, "dtype": "bfloat16", "separate": True}
PAPER_SIZES |= {"config": NSAConfig()}
STEPS, APPENDED = TABLE["mosaic steps"], TABLE["mosaic appended"]


def few(**rest):
    """A group of two heads."""
    sizes = {"H": 2, "Hkv": 1, "D": 64, "Dv": 64, "config": FEW}
    return Sizes(**PAPER_SIZES | sizes | rest)


def step_of(row):
    """Of a row the sizes, the turns, how long rows become, and the variant."""
    sizes, row = sized(row, **PAPER_SIZES)
    found = decoding(row["lengths"], row.get("queries", 1)) + turns(row.get("turns", []))
    ends = [max(x) for x in zip(*(turn.end for turn in found), strict=True)]
    return sizes, found, ends, Variant(*row["variant"]) if "variant" in row else SMALLEST


def path_of(monkeypatch, sizes, lengths, variant=SMALLEST, more=2, device="cpu"):
    """Steps on the kernel of a variant; `more`: columns of the table."""
    chosen = lambda spec: dataclasses.replace(spec, variant=variant)
    pretend.machine(monkeypatch, variant_of_step=chosen)
    pages = [-(-n // sizes.config.select_block) for n in lengths]
    return TorchPages(sizes, device, "mosaic", "torch", True, sum(pages) + 3, max(pages) + more)


@pytest.mark.parametrize("name", STEPS | TABLE["mosaic turns"])
def test_steps(name, ran, blocks, monkeypatch):
    """Every step is launched as the first."""
    row = (STEPS | TABLE["mosaic turns"])[name]
    sizes, found, ends, variant = step_of(row)
    rows, equal = Rows(sizes, ends), row.get("equal scores", False)
    if equal:
        rows.tokens["query"][0][:] = 0
    path = path_of(monkeypatch, sizes, ends, variant)
    check(path, found, rows, bound=5e-3)
    even = found[-1].even
    assert all(x.spec.append == even and x.spec.variant == variant for x in ran)
    if even:  # lists in 16 bits may differ where scores nearly do
        same = (blocks[-1] == path.blocks).all(-1).mean()
        assert same == 1 if equal else same > 0.9


def test_copies_may_arrive_at_once(ran, monkeypatch):
    early = functools.partialmethod(ClusterWarps.__init__, late=False)
    monkeypatch.setattr(ClusterWarps, "__init__", early)
    sizes = few()
    check(path_of(monkeypatch, sizes, [652]), decoding([652], 1), bound=5e-3)


def test_the_same_bits_alone_and_with_another_capacity(ran, monkeypatch):
    sizes, found = few(), []
    for lengths, capacity, more in (([652, 300], 128, 2), ([652], 512, 40)):
        variant = dataclasses.replace(SMALLEST, capacity=capacity)
        rows = Rows(sizes, [652, 300])
        rows.tokens = {k: x[: len(lengths)] for k, x in rows.tokens.items()}
        path = path_of(monkeypatch, sizes, lengths, variant, more)
        found += check(path, decoding(lengths, 1), rows, bound=5e-3)
    assert (found[0][0] == found[1][0]).all()


def test_values_in_fp8_may_be_small_or_large(ran, monkeypatch):
    """The output is as many times smaller or larger, to the bit; scales of a cache that someone
    filled may be negative. A length beyond the table is that of the table.
    """
    path = path_of(monkeypatch, few(fp8=True), [640], more=0)
    check(path, decoding([640], 1), bound=5e-3)
    call = path.call
    wanted = path.attend(call)
    beyond = dataclasses.replace(call, lengths=np.array([2**31 - 1], np.int32))
    assert (path.attend(beyond) == wanted).all()
    tensors = path.cache.tensors().items()
    scales = [x for name, x in tensors if name.endswith("value_scale")]
    for factor in (2.0**-100, 2.0**90, -(2.0**90)):
        before = [x.clone() for x in scales]
        for x in scales:
            x.mul_(factor)
        assert (path.attend(call) == wanted * factor).all()
        for x, y in zip(scales, before, strict=True):
            x.copy_(y)


def test_a_token_without_a_page_is_not_put(ran, monkeypatch):
    """By an entry of no page, beyond the pool, beyond the table, or in a row of length 0."""
    sizes, lengths = few(), [99, 119, 384, 64]
    path = path_of(monkeypatch, sizes, lengths)
    table = tables(lengths, sizes.config, path.pool, 6)
    table[3, 1] = path.pool - 1
    lost = (0, 1, -1), (1, 1, path.pool)
    turns = decoding(lengths, 1)
    turns += [Turn([99, 119, 385, 64], [100, 120, 386, 65], even=True, lost=lost)]
    check(path, turns, None, table, bound=5e-3)


def test_jax_runs_a_step_on_pages_in_fp8(detectors):
    """The kernel of a step that appends nothing, by the public function."""
    sizes = few(separate=False, fp8=True)
    check(JaxPages(sizes, implementation="mosaic"), decoding([90], 1), bound=5e-3)


# Steps that are known: one launch.


def test_steps_that_are_known_are_neither_checked_nor_decided_anew(ran, monkeypatch):
    sizes = few(separate=False)
    path = path_of(monkeypatch, sizes, [80])
    checked = pretend.watched(monkeypatch, "checked_step")
    checked_tokens = pretend.watched(monkeypatch, "checked_tokens_of_step")
    step = lambda n: Turn([n], [n + 1], even=True)
    check(path, [Turn([0], [70], attends=False), *map(step, range(70, 80))], bound=5e-3)
    assert (len(checked), len(checked_tokens), len(ran)) == (1, 1, 10)


@pytest.fixture
def step(ran, monkeypatch):
    """What runs a step of two rows, which is known, with other arguments; and its path."""
    path = path_of(monkeypatch, few(separate=False), [70, 30])
    check(path, decoding([70, 30], 1), bound=5e-3)
    query, gates, pair, at, _, _ = path.given(path.call)
    given = {"query": query, "gates": gates, "cache": path.cache, "key": pair[0]}
    given |= {"value": pair[1], "page_table": at[0], "lengths": at[1]}
    return functools.partial(nsa_torch.paged_attention, **given)


@refusals.by_row("known step")
def test_a_known_step_is_checked_where_anything_differs(step, row):
    step = functools.partial(step, made_with=(("rotation", "a"),))
    step()
    with row.refused():
        step(**row.given())


def test_a_known_step_has_the_scale_of_its_call(step):
    """Twice the default scale and twice the query give the same bits, decided and known."""
    want, plain = step(query=2 * step.keywords["query"]), step()
    assert not torch.equal(want, plain)
    for _ in range(2):
        assert torch.equal(step(scale=2 * 64**-0.5), want) and torch.equal(step(), plain)


@torch.no_grad()
@pytest.mark.parametrize("named", ["mosaic", nsa_torch.Branches.each("mosaic")])
def test_a_known_step_of_a_layer_is_not_decided_anew(named, monkeypatch):
    """On its cache of rows, which are pages: one launch appends and attends."""
    widths = {"dim": 64, "n_heads": 4, "n_kv_groups": 1, "d_k": 64, "d_v": 64}
    layer = nsa_torch.NSAAttention(**widths, implementation=named).bfloat16()
    cache, x = layer.init_cache(2, 150), torch.randn(2, 1, 64).bfloat16()
    decided = pretend.watched(monkeypatch, "decided_step")
    with stand_ins(monkeypatch) as ran:
        for _ in range(3):
            layer(x, cache)
    assert [kernel.name for kernel in ran] == ["decode"] * 3 and ran[0].spec.append
    assert len(decided) == 1 and cache.length.tolist() == [3, 3]


def test_without_the_kernel_the_tokens_are_appended_first(step, ran, monkeypatch):
    """Where another implementation attends, and where the kernel cannot append."""
    for options, names in (
        ({"implementation": "sdpa"}, []),
        ({"implementation": None}, [False]),
    ):
        pretend.machine(monkeypatch, mosaic_appends=False)
        forget()
        ran.clear()
        want = step(**options)
        assert [x.spec.append for x in ran if x.name == "decode"] == names
        found = step(key=None, value=None, **options)
        torch.testing.assert_close(found, want, rtol=0, atol=0)


@pytest.mark.parametrize("planned", [False, True], ids=["by the longest", "by runs"])
def test_rows_of_different_few_tokens_are_one_launch(ran, monkeypatch, planned):
    """Each row's own stand at its end; what fills up the others is left out again."""
    sizes, turn = few(), Turn([70, 61], [71, 64])
    path = path_of(monkeypatch, sizes, [71, 64])
    if planned:
        runs = nsa_torch.plan_runs([0, 1, 4], [71, 64], 64)
        path.attend = functools.partial(path.attend, runs=runs)
    check(path, [Turn([0, 0], [70, 61], attends=False), turn], bound=5e-3)
    assert [x.spec.q_len for x in ran if x.name == "decode"] == [3]


# Prompts.


def appended(name, device):
    sizes, row = sized(APPENDED[name])
    path = TorchPages(sizes, device, appender="mosaic")
    if "counts" not in row:
        turns = [dataclasses.replace(x, attends=False) for x in HISTORIES[name]]
        return check(path, turns)
    more = row.get("rows_without_a_page", 0)  # which have tokens in the last call
    counts = [[*x, *[2 * (x is row["counts"][-1])] * more] for x in row["counts"]]
    turns = of_counts(*counts, even=counts[0][0] == counts[0][1], attends=False)
    ends = turns[-1].end
    table = np.full((len(ends), WIDTH), -1, np.int32)
    table[:4] = tables(ends[:4], sizes.config)
    params = [PoolParams(np.ones((12, n), np.float32) / 12) for n in (32, 16)]
    rows = Rows(sizes, ends, params if row.get("learned") else None)
    return check(path, turns, rows, table)


@pytest.mark.parametrize("name", APPENDED)
def test_appended_tokens(name, ran):
    appended(name, "cpu")
    assert {x.name for x in ran} == {"append"}


# What kernels take, and what is built.

PAPER = specs.Decode(
    *(1, 1, 16, 1, 128, 128, 32, 16, 64, 16, 1, 2, 512, 90, 80, "bfloat16", 128**-0.5),
    variant=SMALLEST,
)
LAYER = {"Hkv": 4, "H": 64}


def posed(**changes):
    return dataclasses.replace(PAPER, **changes)


@refusals.by_row("decode kernel")
def test_what_the_decode_kernel_cannot_do(row):
    with row.refused():
        specs.decode(posed(**row.given(makers={"Variant": Variant})))


def test_the_variant_follows_batch_and_table():
    for changes, wanted in TABLE["variants"]:
        found = specs.with_variant(posed(**changes))
        assert found.variant == Variant(*wanted) and specs.why_not(found) is None, changes
    reason = specs.why_not(specs.with_variant(posed(table_pages=3000))) or ""
    assert "page tables of up to 2560 columns, got 3000" in reason


def test_what_a_step_runs_is_built_ahead():
    """Of any batch and pages of a row, in fp8 too; gates in the dtype of the queries."""
    sizes, config = (64, 4, 128, 128, "bfloat16"), NSAConfig()
    ahead = mosaic_decode.kernels_of(*sizes, config)
    assert len(set(ahead)) == len(ahead) > 5
    names = dict(zip(("H", "Hkv", "D", "Dv", "dtype"), sizes, strict=True))
    forms = itertools.product(TABLE["decoded"], (False, True), (False, True))
    for (batch, pages), fp8, append in forms:
        step = SimpleNamespace(B=batch, T=1, S=64 * pages, is_fp8=fp8, config=config, **names)
        assert mosaic_decode.kernel_of(step, append) in ahead, (batch, pages, fp8, append)
    assert not mosaic_decode.kernels_of(64, 2, *sizes[2:], config)  # G = 32


def test_one_kernel_serves_all_batches_pools_and_tables():
    generic = lambda **changes: specs.decode(posed(**changes)).for_any_length()
    assert generic() is generic(B=7, pages=1000, table_pages=100)
    assert generic() is not generic(q_len=2)
    there = json.loads(json.dumps(description.describe(generic())))
    assert description.kernel_of(there) is generic(), "another process can describe it"


ALIGNING = 1024  # bytes of shared memory that Mosaic takes beside what a kernel asks for


def test_shared_memory_of_every_variant():
    forms = itertools.product(specs.VARIANTS, (False, True), (False, True))
    for variant, fp8, append in forms:
        spec = posed(**LAYER, variant=variant, fp8=fp8, append=append, any_length=True)
        if specs.why_not(spec) is None:
            most = specs.HALF_SM if variant.warps == 4 else SMEM_BYTES
            assert spec.offsets["end"] + ALIGNING <= most, spec


def compiled(variant=None, **sizes):
    if variant is None:
        return append_spec.append(append_spec.Append(**sizes)).for_any_length()
    return specs.decode(posed(**sizes, variant=Variant(*variant))).for_any_length()


def test_kernels_fit_the_chip():
    """Without spills; golden files have the code of every other variant."""
    given = TABLE["compiled"]
    reports = cross_compile.compile_report([(f"{__name__}:compiled", x) for x in given])
    for sizes, report in zip(given, reports, strict=True):
        assert not report["remarks"] and not report["stack_bytes"], sizes
        assert not report["spill_store_bytes"] + report["spill_load_bytes"], sizes
        most = 255 if "variant" in sizes else operands.REGISTERS // (8 * 128)
        assert report["registers"] <= most, sizes
        if "variant" in sizes:
            counted = compiled(**sizes).spec.offsets["end"]
            assert report["shared_bytes"] <= counted + ALIGNING, sizes


def test_a_plan_launches_clusters_as_the_plugin_does(tmp_path):
    script = """
        from kernels_pallas.runtime import build_child
        from kernels_pallas.specs.decode import decode
        from tests import runtime_oracle as oracle
        from tests.test_caches_mosaic import posed

        kernel = decode(posed(B=3, q_len=2))
        wanted = oracle.plugin(kernel)
        assert wanted["attributes"] == [[4, 2, 1, 1]] and wanted["grid"] == [12, 1, 1]
        built = build_child.build(kernel.for_any_length())
        found = oracle.ours(built, kernel)
        oracle.assert_launched_alike(found, wanted)
        numbers = oracle.numbers(found)
        assert numbers[:2] == [kernel.spec.table_pages << 8, kernel.spec.pages << 8]
        addresses = oracle.addresses(len(kernel.inputs) + len(kernel.outputs))
        assert numbers[2:] == sorted(addresses)
    """
    cross_compile.run(["-c", textwrap.dedent(script)], tmp_path)


# On a GPU.


@on_hopper
@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
@pytest.mark.parametrize("name", STEPS)
def test_steps_on_a_gpu(name, implementation, monkeypatch):
    """And a hundred times the same bits."""
    sizes, found, lengths, variant = step_of(STEPS[name])
    path = path_of(monkeypatch, sizes, lengths, variant, device="cuda")
    path.implementation = implementation
    check(path, found, bound=5e-3)
    first = path.attend(path.call)
    assert all((path.attend(path.call) == first).all() for _ in range(100))


@on_hopper
@pytest.mark.parametrize("name", APPENDED)
def test_appended_tokens_on_a_gpu(name):
    appended(name, "cuda")
