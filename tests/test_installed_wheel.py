"""What is told of the first calls of an installed wheel; on a GPU, the calls themselves."""

import contextlib
import sys

import pytest
import torch

import nsa_torch
from kernels_pallas.mosaic import capability
from kernels_pallas.runtime import loaded
from kernels_pallas.runtime.description import canonical, describe
from nsa_interop import build
from nsa_torch import NSAConfig, installed
from tests import pretend
from tests.planned import on_the_cpu


def test_what_a_wheel_has_no_need_of_is_a_fault(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    (tmp_path / "empty").mkdir()
    assert installed.faults(tmp_path) == []
    (tmp_path / "empty" / "kernel").touch()
    pretend.no_module(monkeypatch, "jax")
    monkeypatch.setattr(loaded.store(), "_memory", {"key": None})
    assert installed.faults(tmp_path) == [
        "wrote empty/kernel",
        "imported jax",
        "built 1 kernels",
    ]


def test_a_wheel_serves_every_length_between_those_that_it_is_made_of():
    between = (64, 700, 5000, 70000, 500000)
    missing = {*build.kernels_of("paper", True, between)} - {*build.kernels_of("paper", True)}
    assert not missing, [kernel.name for kernel in missing]


def key(kernel):
    """What it is on a GPU, though it was described for an interpreter."""

    def compiled(value):
        if isinstance(value, dict):
            return {k: False if k == "interpret" else compiled(x) for k, x in value.items()}
        return [*map(compiled, value)] if isinstance(value, list) else value

    return canonical(compiled(describe(kernel.for_any_length())))


def zeros(kernel, *tensors):
    return [torch.zeros(x.shape, dtype=getattr(torch, x.dtype)) for x in kernel.outputs]


@contextlib.contextmanager
def of_a_wheel(preset, monkeypatch):
    """The kernels that run within, without computing; a wheel has each."""
    there = {key(kernel) for kernel in build.kernels_of(preset, True)}
    with capability.interpreted(True), on_the_cpu(monkeypatch, zeros) as ran:
        yield ran
    assert not [kernel.name for kernel in ran if key(kernel) not in there]


@pytest.mark.parametrize("preset", ["seed", "smallgroup"])
def test_a_wheel_has_what_a_layer_runs_with_a_cache_too(preset, monkeypatch):
    """Forward, backward, a prompt, a token."""
    layer = build.layer_of(preset)
    config = NSAConfig(**layer["config"])
    windows = config.compress_block, config.compress_stride, config.select_block
    sizes = (layer[x] for x in ("heads", "kv_heads", "key_width", "value_width"))
    rest = *windows, config.num_selected, config.window
    options = {"dtype": torch.bfloat16, "implementation": "mosaic"}
    x = torch.randn(1, 200, 32, dtype=torch.bfloat16)
    with of_a_wheel(preset, monkeypatch) as ran:
        made = nsa_torch.NSAAttention(32, *sizes, *rest, **options)
        made(x)[0].sum().backward()
        with torch.no_grad():
            _, cache = made(x, made.init_cache(batch=1, capacity=201))
            made(x[:, :1], cache, prefill=False)
    assert len(ran) > 20


@pytest.mark.parametrize("preset", build.PRESETS)
def test_a_wheel_has_what_a_chunk_on_pages_runs(preset, monkeypatch):
    """In groups above 8 heads, the selected branch reads its keys from pages."""
    layer = build.layer_of(preset)
    heads, kv_heads = layer["heads"], layer["kv_heads"]
    widths = layer["key_width"], layer["value_width"]
    cache = nsa_torch.PagedCache(5, kv_heads, *widths, config=NSAConfig(**layer["config"]))
    query = torch.randn(100, heads, widths[0], dtype=torch.bfloat16)
    gates = torch.rand(100, heads, 3, dtype=torch.bfloat16)
    at = torch.arange(4).int()[None], *(torch.tensor(x).int() for x in ([200], [0, 100]))
    runs = nsa_torch.plan_runs([0, 100], [200], cache.config.select_block)
    with of_a_wheel(preset, monkeypatch) as ran:
        nsa_torch.paged_attention(query, gates, cache, *at, runs=runs, implementation="mosaic")
    pages = [x.spec.pages for x in ran if x.name == "selected_forward"]
    assert pages == [4 if heads // kv_heads > 8 else 0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(capsys):
    assert installed.main([]) == 3
    assert capsys.readouterr().err == "this command needs a Hopper GPU\n"


@pytest.mark.gpu
@pytest.mark.parametrize("preset", installed.PRESETS)
def test_first_calls_of_each_preset(preset):
    found = installed.first_calls(preset, 200)
    assert 0 < found["again_s"] and found["total_s"] > 0
