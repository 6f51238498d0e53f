"""Context parallelism: several ranks equal one device; bad input and faults."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

import nsa_torch
from bench.harness.process import ROOT
from nsa_core import context_layout as layouts
from nsa_torch import fa2, reference, sdpa
from nsa_torch.select import select_blocks as sdpa_select
from tests import context_devices, spawned, torch_inputs
from tests import context_worker as worker
from tests.context_worker import CASES, MUTATED, Case

# The order of sums differs; relative to the largest entry.
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """What each rank has found, and how it ended."""
    folder = tmp_path_factory.mktemp("context")
    codes = spawned.run(worker.main, worker.RANKS, folder)
    return [torch.load(folder / f"results.{rank}.pt") for rank in range(worker.RANKS)], codes


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest entry."""
    assert found.shape == expected.shape
    if expected.numel() == 0:
        return 0.0
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def assert_equal(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        many = found[name][:, : one.shape[1]] if name == "k_cmp" else found[name]
        if name == "indices":
            assert torch.equal(many, one)
        else:
            assert apart(many, one) < TOLERANCE, name


@pytest.mark.parametrize("name", CASES)
def test_four_ranks_equal_one_device(several, name):
    """Outputs, indices and every gradient, on every rank."""
    expected = worker.run(CASES[name], worker.tensors(CASES[name]))
    for found in several[0]:
        assert_equal(found[name], expected)


def test_metadata_is_made_once(several):
    """Forward, backward, compression and every chunk find what the first call made."""
    for found in several[0]:
        assert found["searches"]["varlen"] == 0 < found["searches"]["cu_seqlens"]


@pytest.mark.parametrize(
    ("mutant", "wrong"), [("order", "out"), ("halo", "k_cmp"), ("reduce-scatter", "d key")]
)
def test_mutants_are_found(several, mutant, wrong):
    expected = worker.run(MUTATED, worker.tensors(MUTATED))
    found = several[0][0][f"mutant {mutant}"]
    assert apart(found[wrong], expected[wrong]) > 1000 * TOLERANCE


def test_the_module_has_positions_of_the_whole_sequence(several):
    expected = worker.through_layer()
    for found in several[0]:
        assert found["layer"].keys() == expected.keys()
        for name, one in expected.items():
            assert apart(found["layer"][name], one) < 10 * TOLERANCE, name


def test_with_heads_on_other_ranks_and_a_checkpoint(several):
    case = Case(48)
    expected = worker.run(case, worker.tensors(case))
    for rank, found in enumerate(several[0]):
        head = rank % 2
        for name, many in found["heads"].items():
            axis, width = (3, 1) if name in ("d key", "d value") else (2, 2)
            one = expected[name].narrow(axis, head * width, width)
            assert apart(many, one) < TOLERANCE, name


def test_scaling_is_measured_and_judged(several):
    """`bench.scale` on ranks: the same row everywhere but for the time of the own work."""
    for name in ("forward", "fwdbwd"):
        rows = [found["scale"][name] for found in several[0]]
        for row in rows:
            assert row["status"] == "ok" and row["p20_ms"] <= row["ms"] <= row["p80_ms"]
            assert row["compute_ms"] > 0 and row["transport_ms"] > 0 and row["imbalance"] >= 1
            assert row["error_rms"] == rows[0]["error_rms"]
            assert len(row["error_rms"]) == (5 if name == "fwdbwd" else 1)
            assert max(row["error_rms"].values()) < 1e-6
    for found in several[0]:
        mutant = found["scale"]["mutant"]
        assert mutant["status"] == "wrong"
        assert "key" in mutant["reason"] and "query" not in mutant["reason"]


def test_a_nan_reaches_the_queries_that_see_it(several):
    expected = worker.run(Case(96), worker.tensors(Case(96)))
    for found in several[0]:
        for name, x in found["nan"].items():
            reached = x.isnan().flatten(2).any(dim=2)[0]
            assert reached[-1]
            assert not reached[:84].any()  # the chunks before the last
            assert apart(x[:, :84], expected[name][:, :84]) < TOLERANCE


def test_second_derivatives_are_refused(several):
    for found in several[0]:
        for error in found["second derivatives"]:
            assert (
                error.startswith("NotImplementedError: ") and "without a context_mesh" in error
            )


def test_borders_that_were_written_to_are_an_error(several):
    """Not the gradients of other sequences."""
    for found in several[0]:
        for error in found["out of date"]:
            assert "modified by an inplace operation" in error


def test_a_graph_that_is_retained(several):
    assert all(found["twice"] for found in several[0])


ERRORS = {
    "length": "arguments must have the same sizes on all ranks of context_mesh, got "
    "query=(1, 12, 4, 8) float32 on rank 0 and query=(1, 4, 4, 8) float32 on rank 2",
    "dtype": "query=(1, 12, 4, 8) float32 on rank 0 and query=(1, 12, 4, 8) float16 on rank 2",
    "sequences": "got cu_seqlens=2 on rank 0 and cu_seqlens=1 on rank 2",
    "gradient": "got gradient=query on rank 0 and gradient=key on rank 2",
    "gradient of means": "got gradient=none on rank 0 and gradient=x on rank 2",
    "odd": "query must have an even number of tokens on each rank",
    "layout": "context_layout must be one of ('zigzag', 'contiguous'), got 'striped'",
    "device": "context_mesh must be of the device of query, meta, got a mesh of cpu",
    "axes": "context_mesh must have one dimension, got 2",
    "mesh": "context_mesh must be a DeviceMesh, got ProcessGroup",
}


@pytest.mark.parametrize(("name", "text"), list(ERRORS.items()))
def test_bad_input_on_every_rank(several, name, text):
    for found in several[0]:
        error = found["errors"][name]
        assert error.startswith("ValueError: ") and text in error


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("invalid", "value"),
        ("axes of query", "query must have 4 axes"),
        ("kind", "query must be a torch tensor"),
        ("metadata", "varlen must be what nsa_torch.varlen_metadata returns"),
    ],
)
def test_invalid_input_on_one_rank(several, name, text):
    errors = [found["errors"][name] for found in several[0]]
    own = errors.pop(2)
    assert text in own and "on all ranks" not in own
    for error in errors:
        assert "must be valid on all ranks of context_mesh, got an error on rank 2" in error


def test_ranks_go_on_after_bad_input(several):
    assert [found["errors"]["after"] for found in several[0]] == [""] * worker.RANKS


def test_calls_that_ranks_have_seen_are_decided_once(several):
    """Where a rank has not, the others say what they have; where they differ, each fails."""
    for rank, each in enumerate(several[0]):
        found = each["known calls"]
        assert found["seen"] == 3  # of four calls
        assert found["asked"] == (rank == 2)
        assert found["equal"] == [True] * 3
        assert found["scale"].startswith(
            "RuntimeError: arguments must have the same sizes on all"
        )
        asked = "ValueError: " if rank == 2 else "RuntimeError: "
        assert found["new"].startswith(asked) and "on all ranks of context_mesh" in found["new"]


@pytest.mark.gpu
@pytest.mark.two_gpus
def test_two_gpus_equal_one_and_stop_where_they_differ(tmp_path):
    ended = spawned.run(worker.main_on_gpus, 2, tmp_path)
    assert set(ended) <= {0, -signal.SIGABRT}
    for rank in range(2):
        found = torch.load(tmp_path / f"results.{rank}.pt")
        first, *others = found["ranks"]
        for one, two in zip(found["alone"], first, strict=True):
            torch.testing.assert_close(two, one, rtol=2e-2, atol=2e-2 * float(one.abs().max()))
        for again in others:
            assert all(map(torch.equal, again, first))


def test_a_rank_that_is_gone(several):
    found, ended = several
    assert ended == [0, 0, 0, 9]
    for each in found[:3]:
        error, seconds = each["gone"]
        assert (
            error.startswith("RuntimeError: context parallel: ") and "a rank is gone" in error
        )
        assert seconds < worker.TIMEOUT_S + 5


@pytest.mark.parametrize(
    ("kv_heads", "head_mib", "together"),
    [(4, 32, 4), (4, 33, 2), (4, 64, 2), (4, 65, 1), (4, 1000, 1), (6, 40, 3), (1, 1, 1)],
)
def test_short_heads_are_gathered_together(kv_heads, head_mib, together):
    """As many as have 128 MiB, in equal groups; a long one goes by itself."""
    groups = layouts.head_groups(kv_heads, head_mib * 2**20)
    assert [x.stop - x.start for x in groups] == [together] * (kv_heads // together)
    assert [i for x in groups for i in range(x.start, x.stop)] == list(range(kv_heads))


def on_devices(*names: str) -> dict[str, dict]:
    """What `tests.context_devices` prints about cases, by name."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.context_devices", *names],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},  # with eight devices, as this process
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    lines = map(json.loads, done.stdout.splitlines())
    return {line.pop("case"): line for line in lines}


def assert_devices_equal_one(found: dict[str, dict], names: set[str]) -> None:
    assert found.keys() == names
    for name, apart in found.items():
        assert apart.pop("gathers") == context_devices.gathered_again(name)
        assert apart.pop("indices") == 0
        assert {"out", "k_cmp", "d query", "d key", "d value", "d gates"} <= apart.keys()
        assert max(apart.values()) < TOLERANCE, name


def test_eight_devices_of_jax_equal_one_of_torch():
    """Outputs, indices and gradients: rows, tokens and heads on their own axes; packed rows."""
    found = on_devices("zigzag", "packed")
    assert_devices_equal_one(found, {"zigzag", "packed"})


def test_more_layouts_on_eight_devices():
    found = on_devices("contiguous", "odd-chunks", "mutant")
    mutant = found.pop("mutant order")
    assert mutant["out"] > 1000 * TOLERANCE and mutant["d key"] > 1000 * TOLERANCE
    assert_devices_equal_one(found, {"contiguous", "odd-chunks"})


@pytest.mark.parametrize("start, end", [(30, 52), (0, 41), (64, 96)])
@pytest.mark.parametrize("name", ["fa2", "sdpa", "reference"])
def test_the_last_queries_of_a_part_of_a_packed_row(name, start, end, monkeypatch):
    """A chunk's call gives what the whole row gives there."""
    case = CASES["packed"]
    x, config, cu_seqlens = worker.tensors(case), case.config, worker.cu_seqlens(case)
    query, key, value = x["query"], x["key"][0], x["value"][0]
    place = {"config": config, "cu_seqlens": cu_seqlens}
    k_cmp, v_cmp = (nsa_torch.compress(t, **place) for t in (key, value))
    indices = sdpa_select(query, k_cmp, kv_len=96, **place)
    whole = dict(kv_len=96, **place)
    one = {
        "compressed_attention": sdpa.compressed_attention(query, k_cmp, v_cmp, **whole)[0],
        "selected_attention": sdpa.selected_attention(query, key, value, indices, **whole)[0],
        "sliding_attention": sdpa.sliding_attention(query, key, value, **whole)[0],
    }
    part, count = slice(start, end), config.num_compressed(end)
    query, key, value = query[:, part], key[:, :end], value[:, :end]
    given = {
        "compressed_attention": (k_cmp[:, :count], v_cmp[:, :count]),
        "selected_attention": (key, value, indices[:, part]),
        "sliding_attention": (key, value),
    }
    module = {"fa2": fa2, "sdpa": sdpa, "reference": reference}[name]
    with torch_inputs.on_the_cpu(monkeypatch):
        for step, tensors in given.items():
            found = getattr(module, step)(query, *tensors, kv_len=end, **place)[0]
            torch.testing.assert_close(found, one[step][:, part], rtol=1e-5, atol=1e-5)
