"""Other libraries' NSA: refusals that say why, and rows that are judged or marked."""

import dataclasses
import functools

import pytest
import torch

from bench.harness import jobs, measure, peers, problems
from bench.harness.runners import TorchRunner
from bench.judge.checks import Checker
from bench.reports import render
from nsa_torch import functional
from tests import pretend
from tests.measured import problem, record
from tests.tables import table

SETTINGS = problems.settings("tiny", {"seq_len": 63})
FLA = "flash-linear-attention"
BRANCHES = ("compressed", "scores", "selected", "sliding", "all", "dense")


def asked(**changes):
    known = {"H": 64, "Hkv": 4, "D": 128, "platform": "cuda", **changes}
    return problem(SETTINGS)._replace(**known)


@pytest.fixture
def installed(monkeypatch):
    """Says which packages are there."""

    def say(*names):
        monkeypatch.setattr(peers.records, "version", dict.fromkeys(names, "4.0.0").get)

    return say


def test_refusals_say_why(installed):
    installed("flash-attn")
    assert "flash-linear-attention is not installed" in peers.why_not(asked(), "selected")
    installed(FLA, "flash-attn")
    assert peers.why_not(asked(), "selected") is peers.why_not(asked(), "all") is None
    for changes, reason in table("bench")["refusals of fla"]:
        assert reason in peers.why_not(asked(**changes), "selected")
    installed(FLA, "flash-attn-4")
    assert peers.why_not(asked(), "selected") is None
    assert "needs flash_attn for its sliding window" in peers.why_not(asked(), "all")


def test_rows_that_are_not_ours_say_so(installed):
    installed(FLA, "flash-attn")
    found = {job.branch: job for job in peers.jobs(asked(), BRANCHES, ["fla"])}
    assert list(found) == ["selected", "sliding", "all"]
    assert [job.judged for job in found.values()] == [True, True, False]
    assert (
        "means of 32 tokens without overlap (ours: of 16 tokens, every 8)" in found["all"].note
    )
    assert list(peers.jobs(asked(), ["scores"], ["fla"])) == []


@pytest.mark.parametrize("name", ["fa4", "flash_attn"])
def test_flash_attention_packages_are_recorded_as_such(name, monkeypatch):
    (first, *_) = peers.jobs(asked(), BRANCHES, [name])
    assert first.unsupported == f"{peers.FLASH[name][0]} is not installed"
    monkeypatch.setattr(peers.records, "version", lambda package: "4.0.0")
    found = list(peers.jobs(asked(dtype="bfloat16"), BRANCHES, [name]))
    assert [(job.branch, job.label) for job in found] == [("sliding", name), ("dense", name)]
    assert {job.note for job in found} == {f"{peers.FLASH[name][0]} 4.0.0"}
    assert not any(job.unsupported for job in found)
    old = asked(dtype="bfloat16", capability=(7, 5))
    assert "needs compute capability" in peers.flash_why_not(name, old)

    def flash_attn_func(q, k, v, *, causal, window_size=(-1, -1)):
        window = q.shape[1] if window_size[0] < 0 else window_size[0] + 1
        config = problems.dataclasses.replace(SETTINGS.nsa, window=window)
        out = functional.sliding_attention(q, k, v, config=config)[0]
        return (out, None) if name == "fa4" else out

    for module in ("flash_attn", "flash_attn.cute"):
        pretend.module(monkeypatch, module, flash_attn_func=flash_attn_func)
    assert all(row(job)["time_ms"] > 0 for job in found), "they agree with the oracle"


def test_dense_attention_of_installed_packages_is_measured_without_being_asked(installed):
    found = lambda **changes: [
        (job.branch, job.label)
        for job in peers.dense(asked(dtype="bfloat16", **changes), BRANCHES, ["flash_attn"])
    ]
    installed("flash-attn")
    assert found() == []
    installed("flash-attn-4", "flash-attn")
    assert found() == [("dense", "fa4")]
    assert found(capability=(8, 0)) == found(platform="cpu") == []
    assert not any(peers.dense(asked(dtype="bfloat16"), ["all"], []))


def test_torchs_flash_is_said_to_be_a_copy(monkeypatch):
    runner = TorchRunner("cpu")
    assert runner.note("dense", "flash", SETTINGS.model) == ""
    monkeypatch.setattr(runner, "platform", "cuda")
    said = f"the copy of FA-2 in torch {runner.torch.__version__}"
    assert runner.note("dense", "flash", SETTINGS.model) == said


@functools.cache
def judge_of(settings):
    """What judges results of these settings."""
    return Checker(settings, problems.make(settings, "random"), backward=True)


def row(job, settings=SETTINGS, mode="forward"):
    """What a row of the job has in a record."""
    checker = judge_of(settings)
    checker = checker if mode == "fwdbwd" else checker.without_gradients()
    return measure.judge(job, TorchRunner("cpu"), checker).timed(seconds=0.0)


def stand_in(monkeypatch, shift=0):
    """`fla.ops.nsa` by our own functions; `shift`: of the blocks that it reads."""

    def parallel_nsa(  # the arguments of flash-linear-attention 0.6
        q,
        k,
        v,
        g_cmp=None,
        g_slc=None,
        g_swa=None,
        block_indices=None,
        block_counts=16,
        block_size=64,
        window_size=0,
        scale=None,
        cu_seqlens=None,
    ):
        assert scale is None and cu_seqlens is None, "its own scale is D**-0.5"
        if block_indices is None:
            assert g_cmp.shape == g_slc.shape == g_swa.shape == q.shape[:3]
            assert window_size == SETTINGS.nsa.window
            return v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)
        assert (block_counts, block_size) == (SETTINGS.nsa.num_selected, 32)
        blocks = (block_indices - shift).clamp(min=-1)
        return functional.selected_attention(q, k, v, blocks, config=SETTINGS.nsa)[0]

    for name in ("fla", "fla.ops", "fla.ops.nsa"):
        pretend.module(monkeypatch, name, parallel_nsa=parallel_nsa)
    monkeypatch.setattr(peers, "why_not", lambda problem, branch: None)
    return {job.branch: job for job in peers.jobs(asked(), BRANCHES, ["fla"])}


@pytest.mark.parametrize("shift, status", [(0, "ok"), (1, "wrong")])
def test_given_blocks_are_judged(shift, status, monkeypatch):
    found = row(stand_in(monkeypatch, shift)["selected"])
    assert found.get("status", "ok") == status
    assert ("time_ms" in found) == (status == "ok")
    assert found["reason"] == peers.JUDGED or "max error" in found["reason"]


def test_the_selected_branch_of_cudnn_is_judged(monkeypatch):
    (job,) = peers.jobs(asked(), BRANCHES, ["cudnn_nsa"])
    assert job.branch == "selected" and job.unsupported == f"{peers.CUDNN} is not installed"

    def selection_attention_wrapper(q, k, v, indices, counts, ends, of_keys, **how):
        assert of_keys is ends and ends.tolist() == [0, how["max_s_q"]] == [0, how["max_s_k"]]
        assert how.pop("is_causal") and how["block_size"] == SETTINGS.nsa.select_block
        slots = torch.arange(indices.shape[-1])
        # A count that is too large would read the first block again.
        lists = torch.where(slots < counts[..., None], indices.clamp(min=0), -1)
        arrays = [x[None] for x in (q, k, v, lists)]
        out = functional.selected_attention(*arrays, config=SETTINGS.nsa)[0]
        return {"o_tensor": out[0]}

    module = "cudnn.native_sparse_attention"
    pretend.module(monkeypatch, "cudnn")
    pretend.module(monkeypatch, module, selection_attention_wrapper=selection_attention_wrapper)
    found = row(dataclasses.replace(job, unsupported=""))
    assert "time_ms" in found, found


def test_the_whole_is_timed_without_a_speed_up(monkeypatch):
    found = row(stand_in(monkeypatch)["all"])
    assert found["time_ms"] > 0 and found["extra"] == {"judged": False}
    assert (
        "not judged, since its semantics differ" in found["reason"] and "error_max" not in found
    )
    dense = row(jobs.Job("dense", "flash", "flash"))
    lines = [
        record(branch, name, 1.0, **fields)
        for branch, name, fields in (("all", "fla", found), ("dense", "flash", dense))
    ]
    assert render.speed_ups(lines) == [None, 1.0]


def test_a_library_that_breaks_is_a_row(monkeypatch):
    job = stand_in(monkeypatch)["sliding"]
    pretend.no_module(monkeypatch, "flash_attn")
    found = row(job)
    assert found["status"] == "unsupported" and "flash_attn" in found["reason"]
