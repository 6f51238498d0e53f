"""The lines that a call writes about itself: what they say is so, and off means off."""

import logging
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import nsa_jax
import nsa_torch
from nsa_core import debug
from tests import spawned
from tests.limits import set_limits
from tests.problems import SMALL

T, H, HKV, D = 24, 4, 2, 8
STEPS = ("scores", "compressed", "selected", "sliding")


@pytest.fixture
def lines(caplog):
    """Turns events on; what was told since, and off again at the end."""

    def enable(*events, limit=100):
        debug.enable(*events, limit=limit)
        caplog.clear()
        return lambda: [x.getMessage() for x in caplog.records if x.name.startswith("nsa_")]

    yield enable
    debug.enable()


@pytest.fixture
def arrays(rng):
    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    key = normal(1, T, HKV, D)
    return normal(1, T, H, D), key, normal(1, T, HKV, D), normal(1, T, H, 3)


def call(framework, arrays, **options):
    if framework == "jax":
        return nsa_jax.attention(*map(jnp.asarray, arrays), config=SMALL, **options)
    return nsa_torch.attention(*map(torch.from_numpy, arrays), config=SMALL, **options)


def fields(*lines):
    return dict(word.split("=", 1) for line in lines for word in line.split() if "=" in word)


both = pytest.mark.parametrize("framework", ["jax", "torch"])


@both
def test_shapes_and_times_of_each_step(framework, arrays, lines):
    """Told where events are on, and nothing where they are off; the results are the same."""
    told = lines()
    out = call(framework, arrays)
    assert told() == [] and not debug.on
    told = lines("shapes", "timing")
    again = call(framework, arrays)
    found = told()
    assert np.array_equal(np.asarray(out), np.asarray(again))
    for package in debug.FRAMEWORKS:
        assert logging.getLogger(f"{package}.timing").level == logging.INFO
    debug.enable()
    assert logging.getLogger("nsa_jax.timing").level == logging.NOTSET
    shapes, times = (
        [fields(line) for line in found if line.startswith(f"NSA-LOG {event} ")]
        for event in ("shapes", "timing")
    )
    steps = ["compress", "compress", *STEPS, "combine"]
    assert [each["step"] for each in shapes] == steps == [each["step"] for each in times]
    sliding = shapes[steps.index("sliding")]
    assert sliding["query"] == f"float32[1,{T},{H},{D}]"
    assert sliding["key"] == f"float32[1,{T},{HKV},{D}]"
    assert all(float(each["ms"]) > 0 and each["synchronizes"] == "true" for each in times)


@both
def test_routing_is_told_once_a_plan_with_every_refusal(framework, arrays, lines):
    told = lines("routing")
    call(framework, arrays)
    call(framework, arrays)
    call(framework, arrays, implementation="reference")
    first, second = told()
    usual = "xla" if framework == "jax" else "sdpa"
    assert first.startswith(f"NSA-LOG routing framework={framework} dtype=float32 B=1 T={T} ")
    for step in STEPS:
        assert f" {step}={usual}" in first and f" {step}=reference" in second
        assert f'{step}.not_mosaic="' in first
    if framework == "torch" and not torch.cuda.is_available():
        assert 'sliding.not_fa2="FA-2 needs CUDA tensors, got cpu"' in first


@both
def test_compare_sees_a_wrong_branch(framework, arrays, lines, monkeypatch):
    out = call(framework, arrays)
    told = lines("compare")
    assert np.array_equal(np.asarray(out), np.asarray(call(framework, arrays)))
    errors = fields(*told())
    assert all(line.startswith("NSA-DBG ") for line in told())
    assert errors["scores_rows_differ"] == "0"
    for name in ("cmp_mae", "sel_mae", "win_mae"):
        assert float(errors[name]) < 1e-6
    module = nsa_jax.branches if framework == "jax" else sys.modules["nsa_torch.sdpa"]
    right = module.sliding_attention

    def wrong(*args, **options):
        out, lse = right(*args, **options)
        return out + 1, lse

    monkeypatch.setattr(module, "sliding_attention", wrong)
    told = lines("compare")
    call(framework, arrays)
    errors = fields(*told())
    assert float(errors["win_mae"]) == pytest.approx(1) and float(errors["cmp_mae"]) < 1e-6


def test_compare_refuses_a_dense_reference_that_is_too_large(arrays, lines, monkeypatch):
    set_limits(monkeypatch, debug_bytes=1000)
    told = lines("compare")
    call("jax", arrays)
    assert len(told()) == len(STEPS)
    assert all("the dense reference needs" in line for line in told())


def test_jit_tells_of_the_trace_and_refuses_the_rest(arrays, lines):
    told = lines(*debug.EVENTS)
    step = jax.jit(lambda *given: nsa_jax.attention(*given, config=SMALL))
    arrays = [*map(jnp.asarray, arrays)]
    out = step(*arrays)
    found = told()
    for event in ("timing", "compare"):
        (refusal,) = (line for line in found if line.startswith(f"NSA-LOG {event} "))
        assert "under a transform (jit, grad, vmap)" in refusal
    assert all("traced=true" in line for line in found if "NSA-LOG shapes" in line)
    count = len(found)
    step(*arrays)
    assert len(told()) == count
    debug.enable()
    wanted = nsa_jax.attention(*arrays, config=SMALL)
    np.testing.assert_allclose(out, wanted, atol=1e-6)


def test_each_event_has_its_limit(arrays, lines):
    told = lines("shapes", "timing", limit=3)
    call("torch", arrays)
    found = told()
    assert sum(line.startswith("NSA-LOG shapes ") for line in found) == 3
    assert sum(line.startswith("NSA-LOG timing ") for line in found) == 3
    assert "NSA-LOG limit event=shapes: further lines are omitted" in found
    assert not debug.on
    with pytest.raises(ValueError, match="limit must be at least 1 line, got 0"):
        debug.enable("shapes", limit=0)
    with pytest.raises(ValueError, match=r"event must be one of .* got 'time'"):
        debug.enable("time")


def test_the_flag_of_the_commands(tmp_path):
    command = ["-m", "bench.compare", "--preset=tiny", "--framework=torch"]
    command += ["--seq_len=64", "--branch=sliding", "--sliding_kernel=sdpa", "--row_seconds=0"]

    def run(*flags):
        on_a_cpu = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        return spawned.python(*command, *flags, **on_a_cpu)

    done = run("--log=routing,timing", "--log_limit=2", f"--out={tmp_path}")
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("NSA-LOG timing")]
    assert len([line for line in told if "framework=torch" in line]) == 2
    assert "warning: with --log=timing the times are not valid measurements" in done.stderr
    done = run("--log=timing", "--save_records")
    assert done.returncode == 2
    assert "error: --log=timing must not be combined with --save_records" in done.stderr
