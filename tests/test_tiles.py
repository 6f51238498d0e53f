"""Tiles from a table: found or not, refused when damaged, used by the kernels, and tuned."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import torch
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from bench.harness import problems, records
from bench.harness.runners import JaxRunner
from bench.tuners import tile_search
from kernels_pallas.mosaic import capability
from kernels_pallas.specs import interval, scores, selected, variants
from nsa_core import config_files, tiles
from nsa_core.config import NSAConfig
from nsa_core.types import Branches
from nsa_jax import jax_problem, mosaic
from nsa_jax.jax_ops import JAX_OPS, JaxOps
from nsa_torch import torch_ops
from nsa_torch.torch_ops import TORCH_OPS

ROOT = Path(__file__).parents[1]
GPU = "NVIDIA Test 80GB"
SIZES = {"dtype": "bfloat16", "G": 16, "D": 128, "Dv": 128, "config": NSAConfig()}
SHAPE = tiles.Shape.of("sliding", queries=65536, keys=65536, **SIZES)
ENTRY = SHAPE.entry() | {"tiles": {"block": 64, "stages": 3}, "evidence": {}}


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Writes the table of a device, with these entries or this text."""
    monkeypatch.setattr(tiles, "FOLDER", tmp_path)
    tiles.table.cache_clear()

    def write(*entries, device=GPU, name=None, text=None):
        path = tmp_path / f"{name or config_files.slug(device)}.json"
        data = {"schema": tiles.SCHEMA, "device": device, "entries": entries}
        path.write_text(json.dumps(data) if text is None else text)
        tiles.table.cache_clear()
        return path

    yield write
    tiles.table.cache_clear()


def on(device, monkeypatch):
    monkeypatch.setattr(jax_problem, "device_name", lambda: device)


def ask(queries=65536, *, device=GPU, kernel="sliding", heads=64, dtype="bfloat16", **options):
    query = jax.ShapeDtypeStruct((1, queries, heads, 128), dtype)
    options = {"kv_heads": 4, "keys": queries, "Dv": 128, "config": NSAConfig()} | options
    return tiles.tiles_of(
        kernel, query, device, otherwise={"block": 128, "stages": 2}, **options
    )


def test_only_an_exact_match_is_used(table):
    table(ENTRY)
    heuristic, found = {"block": 128, "stages": 2}, {"block": 64, "stages": 3}
    assert ask() == found
    assert ask(40000) == found, "of the same power of two"
    other = dataclasses.replace(NSAConfig(), window=256)
    misses = (
        ask(32768),
        ask(65537),
        ask(keys=100000),
        ask(kernel="compressed"),
        ask(heads=32),
        ask(dtype="float16"),
        ask(Dv=64),
        ask(config=other),
    )
    assert all(miss == heuristic for miss in misses)
    assert ask(config=dataclasses.replace(NSAConfig(), num_selected=9)) == found
    for device in ("NVIDIA Other", None):
        assert ask(device=device) == heuristic


def test_a_device_without_a_table_uses_the_heuristic(table):
    assert tiles.table("nvidia-unknown") == {}


def changed(**fields):
    return lambda entry: entry | fields


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (changed(kernel="dense"), r"entries\[1\]: kernel must be one of .* got 'dense'"),
        (changed(tiles={"block": 64}), r"tiles of sliding must be \('block', 'stages'\)"),
        (changed(tiles={"block": 64, "stages": 0}), "must be integers from 1"),
        (changed(tiles={"block": "64", "stages": 2}), "must be integers from 1"),
        (changed(sizes={}), r"sizes of sliding must be \('window',\), got {}"),
        (changed(G="16"), "G must be an integer, got '16'"),
        (changed(D=None), "D must be an integer, got None"),
        (changed(dtype=2), "dtype must be a name, got 2"),
        (lambda entry: [], r"entries\[1\] must be a mapping"),
        (lambda entry: entry | {"queries_log2": 16}, "is for the same as an entry before"),
    ],
)
def test_a_damaged_entry_is_an_error(table, damage, message):
    second = ENTRY | {"queries_log2": 15}
    path = table(ENTRY, damage(second))
    with pytest.raises(ValueError, match=message) as error:
        ask()
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": '{"schema": 1, "dev'}, "is not JSON"),
        ({"text": "[]"}, "must hold a mapping"),
        ({"text": '{"schema": 9}'}, "schema must be 1, got 9"),
        ({"text": f'{{"schema": 1, "device": "{GPU}"}}'}, "entries must be a list, got None"),
        (
            {"device": "NVIDIA Other", "name": config_files.slug(GPU)},
            "must hold the tiles of its device, got those of 'NVIDIA Other'",
        ),
    ],
)
def test_a_damaged_or_foreign_table_is_an_error(table, options, message):
    table(ENTRY, **options)
    with pytest.raises(ValueError, match=message):
        ask()


def test_the_tables_here_can_be_read():
    for path in sorted(tiles.FOLDER.glob("*.json")):
        assert tiles.read(path)


def test_the_device_is_the_default_one_or_the_tensors():
    x = jnp.zeros(3)
    backend = jax.default_backend()
    assert JAX_OPS.device_name(x) == (None if backend == "cpu" else x.device.device_kind)
    assert TORCH_OPS.device_name(torch.zeros(3)) is None
    gpu = types.SimpleNamespace(device_kind=GPU, platform="gpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax_problem.jax, "devices", lambda *_: [gpu])
        patch.setattr(torch_ops, "device_name", lambda index: f"GPU {index}")
        tensor = types.SimpleNamespace(device=types.SimpleNamespace(type="cuda", index=1))
        assert JAX_OPS.device_name(x) == GPU
        assert TORCH_OPS.device_name(tensor) == "GPU 1"
        with capability.interpreted(InterpretGPUParams()):
            assert JAX_OPS.device_name(x) is None
            assert TORCH_OPS.device_name(tensor) is None


def test_records_and_tables_of_a_device_have_one_name():
    assert records.folder_of(GPU).name == config_files.slug(GPU) == "nvidia-test-80gb"


# What reaches the kernels

CHOSEN = {
    "compressed": {"block": 64, "stages": 3},
    "scores": {"stages": 3, "held": 512},
    "selected": {"key_stages": 2, "value_stages": 2},
    "sliding": {"block": 64, "stages": 4},
}


def test_what_can_be_tuned_are_fields_of_the_kernels():
    assert (
        set(tiles.TUNABLE) == set(tile_search.SPECS) == set(tile_search.VARIANTS) == set(CHOSEN)
    )
    for kernel, names in tiles.TUNABLE.items():
        fields = {field.name for field in dataclasses.fields(tile_search.SPECS[kernel])}
        assert set(names) <= fields and set(names) == set(tile_search.VARIANTS[kernel])


@pytest.fixture
def specs(monkeypatch):
    """The static parts of the kernels that are built, which none runs."""
    found = []
    for module, name in (
        (interval, "forward"),
        (scores, "best_blocks"),
        (selected, "forward"),
    ):
        build = getattr(module, name)

        def record(spec, build=build):
            found.append(spec)
            return build(spec)

        monkeypatch.setattr(module, name, record)

    class Nothing(JaxOps):
        def run(self, kernel, *arrays):
            return [jnp.zeros(x.shape, x.dtype) for x in kernel.outputs]

    monkeypatch.setattr(mosaic, "OPS", Nothing())
    return found


def trace(length=2048, config=NSAConfig()):
    def array(*shape):
        return jax.ShapeDtypeStruct(shape, "bfloat16")

    query, key = array(1, length, 64, 128), array(1, length, 4, 128)
    count = config.num_compressed(length)
    compressed = [array(1, count, 4, 128)] * 2
    gates = Branches.each(array(1, length, 64))
    jax.eval_shape(
        lambda *arrays: mosaic.attention(*arrays, None, config=config, kv_len=length),
        *(query, Branches.each(key), Branches.each(key), gates, compressed),
    )


def entries(length=2048):
    keys = {"compressed": NSAConfig().num_compressed(length), "scores": length // 64}
    for kernel, chosen in CHOSEN.items():
        sizes = SIZES | ({"Dv": 0} if kernel == "scores" else {})
        at = {"queries": length, "keys": keys.get(kernel, length)}
        yield tiles.Shape.of(kernel, **at, **sizes).entry() | {"tiles": chosen}


@pytest.mark.parametrize("device", [GPU, None])
def test_an_entry_reaches_its_kernel(table, monkeypatch, specs, device):
    table(*entries())
    on(device, monkeypatch)
    trace()
    found = dict(zip(("compressed", "scores", "sliding", "selected"), specs, strict=True))
    heuristics = {
        "compressed": {"block": 128, "stages": 2},
        "scores": {"stages": scores.Scores.stages, "held": scores.Scores.held},
        "selected": {"key_stages": 1, "value_stages": 2},
        "sliding": {"block": 112, "stages": 2},
    }
    for kernel, wanted in (CHOSEN if device else heuristics).items():
        assert {name: getattr(found[kernel], name) for name in wanted} == wanted
        if device is None:  # what the tuner compares with
            assert tile_search.heuristic(kernel, problems.settings("paper")) == wanted


@pytest.mark.parametrize(
    ("widths", "block", "overlap"),
    [
        ((128, 128), 64, True),
        ((256, 256), 64, True),
        ((256, 256), 80, False),
        ((128, 128), 128, True),
        ((64, 80), 64, False),  # a second stage of values would take more than one of keys
    ],
)
def test_forward_overlaps_products_where_registers_hold_them(widths, block, overlap):
    assert variants.overlap_pv(*widths, block) == overlap
    stages = selected.forward_stages(*widths, block)
    assert stages == dict(key_stages=2 - overlap, value_stages=1 + overlap)
    key, value = widths
    needed = stages["key_stages"] * key + stages["value_stages"] * value
    assert needed <= 2 * key + value  # as `capability.selected_bytes` counts


@pytest.mark.parametrize("group", [1, 4, 6, 16, 64])
@pytest.mark.parametrize("window", [0, 1, 64, 512, 700, 4096])
def test_blocks_fit_the_window(group, window):
    """A pair of tiles of 64 rows has no more blocks than of 128 keys, and no smaller ones do."""
    keys = window + 2 * (64 // group) - 1
    chosen = interval.forward_blocks(group, 128, 128, window)["block"]
    assert math.ceil(keys / chosen) == math.ceil(keys / 128)
    for smaller in range(96, chosen, 16):
        assert math.ceil(keys / smaller) > math.ceil(keys / chosen)


@pytest.mark.parametrize("window", [0, 512])
def test_wide_heads_with_a_window_have_small_blocks(window):
    wanted = {"block": 64, "stages": 3}  # larger ones spill where an array is added
    assert interval.forward_blocks(16, 192, 128, window) == wanted
    assert interval.forward_blocks(16, 192, 128, None) == {"block": 128, "stages": 2}


def test_a_damaged_table_stops_the_call(table, monkeypatch, specs):
    table(text="{")
    on(GPU, monkeypatch)
    with pytest.raises(ValueError, match="is not JSON"):
        trace()


# The tuner


class Fake:
    """A step whose times are given, one a call."""

    def __init__(self, *times, result=0):
        self.times, self.result = list(times), result

    def time_ms(self):
        return self.times.pop(0) if len(self.times) > 1 else self.times[0]


BASE = {"block": 128}


def tune(steps):
    """`steps`: by block, a step or an exception."""

    def prepare(chosen):
        step = steps[chosen["block"]]
        if isinstance(step, Exception):
            raise step
        return step

    def differs(found, wanted):
        return "" if found == wanted else "wrong: other"

    return tile_search.tune(BASE, [{"block": block} for block in steps], prepare, differs)


def test_the_fastest_that_is_right_wins():
    found = tune(
        {
            128: Fake(10.0),
            64: Fake(9.0),
            96: Fake(8.0),
            192: Fake(1.0, result=7),
            256: ValueError("exceeds available shared memory\nand more"),
        }
    )
    assert found.winner.tiles == {"block": 96} and found.gain == pytest.approx(0.2)
    trials = {trial.tiles["block"]: trial for trial in found.trials}
    assert list(trials) == [128, 64, 96, 192, 256]
    assert trials[192].wrong and trials[192].time_ms is None
    assert trials[256].reason == "refused: ValueError: exceeds available shared memory"
    assert not trials[256].wrong


@pytest.mark.parametrize(
    ("base", "best"),
    [
        ([10.0], [9.9]),  # too little
        ([10.0], [11.0]),
        ([10.0, 8.1], [8.0]),  # the clock was lower at first
        ([10.0], [8.0, 9.9]),  # not the second time
    ],
)
def test_a_gain_that_is_not_one_gives_no_entry(base, best):
    found = tune({128: Fake(*base), 64: Fake(*best)})
    assert found.winner is None and found.gain <= tile_search.GAIN


def test_a_heuristic_that_cannot_run_is_an_error():
    with pytest.raises(ValueError, match="broken"):
        tune({128: ValueError("broken"), 64: Fake(1.0)})
    assert tune({128: Fake(1.0), 64: ValueError("no")}).winner is None


def test_results_may_differ_by_roundings_only():
    wanted = (jnp.ones((3, 4), jnp.bfloat16), jnp.array([1.0, -jnp.inf]), jnp.arange(3))
    out, lse, indices = wanted
    assert tile_search.differs(wanted, wanted) == ""
    assert tile_search.differs((out.at[0, 0].add(2.0**-6), lse, indices), wanted) == ""
    bad = (
        (out.at[0, 0].add(2.0**-4), lse, indices),
        (out.at[1, 1].set(jnp.nan), lse, indices),
        (out, lse.at[0].add(1e-3), indices),
        (out, lse.at[1].set(0.0), indices),
        (out, lse, indices.at[2].set(1)),
    )
    for i, found in enumerate(bad):
        assert tile_search.differs(found, wanted).startswith("wrong: result"), i


MICRO = """
model: {dim: 32, n_heads: 4, n_kv_groups: 2, d_k: 32, d_v: 32}
nsa: {compress_block: 8, compress_stride: 4, select_block: 16, num_selected: 4, window: 40}
runtime: {precision: bf16, seq_len: 64}
"""


@pytest.fixture
def kernels(tmp_path):
    """The tuner's steps on a micro problem, in Pallas' interpreter."""
    path = tmp_path / "micro.yaml"
    path.write_text(MICRO)
    settings = problems.settings(path)
    inputs = problems.make(settings, "random")
    with capability.interpreted(InterpretGPUParams()):
        yield tile_search.Kernels(settings, inputs, JaxRunner(), 0.0)


@pytest.mark.parametrize("kernel", list(CHOSEN))
def test_the_tuner_runs_the_kernels(kernels, kernel, monkeypatch, table):
    """Real kernels and a fake clock, which prefers `CHOSEN`; the table is read back."""
    prepared = []

    def prepare(chosen):
        step = kernels.prepare(kernel, chosen)
        prepared.append(chosen)
        return Fake(5.0 if chosen == CHOSEN[kernel] else 10.0, result=step.result)

    base = tile_search.heuristic(kernel, kernels.settings)
    found = tile_search.tune(base, [base, CHOSEN[kernel]], prepare, tile_search.differs)
    assert found.winner is not None and found.winner.tiles == CHOSEN[kernel], found
    assert prepared == [base, CHOSEN[kernel]]
    entry = tile_search.entry(kernels, kernel, found, records.environment("abc"))
    evidence = entry["evidence"]
    assert (evidence["heuristic_ms"], evidence["time_ms"], evidence["gain"]) == (10, 5, 0.5)
    assert evidence["heuristic"] == base and evidence["versions"]["jax"] and evidence["time"]
    path = tiles.FOLDER / f"{config_files.slug(GPU)}.json"
    assert tile_search.write(path, GPU, [kernels.shape(kernel)], [entry]) == 1
    assert tiles.table(config_files.slug(GPU)) == {kernels.shape(kernel): CHOSEN[kernel]}


def test_tuning_again_replaces_what_was_tuned(table):
    path = table(ENTRY)
    other = tiles.Shape.of("sliding", queries=2048, keys=2048, **SIZES)
    added = other.entry() | {"tiles": {"block": 64, "stages": 2}}
    assert tile_search.write(path, GPU, [other], [added]) == 2
    faster = ENTRY | {"tiles": {"block": 96, "stages": 2}}
    assert tile_search.write(path, GPU, [SHAPE], [faster]) == 2
    assert {s: e["tiles"]["block"] for s, e in tiles.read(path).items()} == {
        SHAPE: 96,
        other: 64,
    }
    assert tile_search.write(path, GPU, [SHAPE, other], []) == 0
    missing = path.with_name("nvidia-none.json")
    assert tile_search.write(missing, "NVIDIA None", [SHAPE], []) == 0 and not missing.exists()
    table(text="{")
    with pytest.raises(ValueError, match="is not JSON"):
        tile_search.write(path, GPU, [SHAPE], [ENTRY])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--config=tiny", "needs a Hopper GPU, got cpu"),
        ("--config=tiny --implementation=triton", "triton: needs an NVIDIA GPU, got cpu"),
        ("--implementation=triton --kernel=sliding", "kernel must be one of triton's"),
        ("--seq_len=1000", "power of two"),
    ],
)
def test_the_command_says_what_it_needs(words, message):
    done = subprocess.run(
        [sys.executable, "-m", "bench.tune_tiles", *words.split()],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode and message in done.stdout + done.stderr
