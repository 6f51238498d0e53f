"""The seed system's templates, filled in from the files of one run."""

import dataclasses
import json

import pytest

from bench import compare, seed_report
from bench.harness import records
from bench.harness.jobs import jobs
from bench.harness.runners import TorchRunner
from nsa_core.config import FLOAT8
from nsa_core.types import Branches
from tests.measured import GPU, problem, record

VARLEN = {"path": "varlen", "kernel": "FA"}


@pytest.fixture
def folder(tmp_path):
    """Files as `bench.oneshot` leaves them."""
    rows = [record("sliding", "masked", 1.07, S=4096), record("sliding", "sdpa", 29.0, S=4096)]
    rows += [record("sliding", "fa2", 1.0, S=4096, extra=VARLEN)]
    records.append(tmp_path / "fa2" / "fa2.jsonl", rows)
    triton = record("selected", "triton", 1.0, mode="fwdbwd")
    records.append(tmp_path / "triton" / "compare.jsonl", [triton])
    (tmp_path / "decode.log").write_text("device: x\n 4096 0.3 0.1\nwritten to nowhere\n")
    step = {"status": "ok", "seconds": 12.3, "reason": "", "files": []}
    steps = [step | {"name": name} for name in ("fa2", "triton", "train")]
    steps += [step | {"name": "tests", "status": "failed", "reason": "exit status 1"}]
    steps += [step | {"name": "lengths", "status": "skipped", "reason": "the budget"}]
    versions = {"torch": "2.11.0", "cuda": "13.0", "triton": "3.6.0", "driver": None}
    about = {"device": GPU, "commit": "c0ffee", "versions": versions, "steps": steps}
    (tmp_path / "summary.json").write_text(json.dumps(about))
    return tmp_path


def test_both_templates(folder, capsys):
    assert seed_report.main(["seed_report", str(folder)]) == 0
    text = (folder / "seed_report.md").read_text()
    assert capsys.readouterr().out == text + "\n"
    assert f"### GPU Bench Results (Device: {GPU}, Torch 2.11.0, CUDA 13.0)" in text
    assert (
        "- S=4096: w=512 x1.07\n" in text and "Compressed (S; masked vs FA-2):\n- not" in text
    )
    assert "- runtime.fa2_min_len_win: never (fa2 over masked, 1 rows, margin 1.2; over" in text
    assert "- runtime.sel_triton_min_L: not measured" in text
    for line in (
        "- Triton FWD parity: PASS (12 s)",
        "- Triton BWD parity: PASS (12 s)",
        "- FA-2 varlen: PASS (12 s)",
        "- Training step: PASS (12 s)",
        "- Test suite: FAIL (12 s): exit status 1",
        "- Gradients: NOT RUN (12 s): the budget",
        "    4096 0.3 0.1",
    ):
        assert line in text, line


@pytest.mark.parametrize(
    "status, word", [("wrong", "FAIL"), ("error", "FAIL"), ("unsupported", "NOT RUN")]
)
def test_what_is_not_right_is_no_pass(folder, status, word):
    path = folder / "triton" / "compare.jsonl"
    path.unlink()
    bad = record("selected", "triton", None, mode="fwdbwd", status=status, reason="far off")
    records.append(path, [bad])
    assert f"- Triton BWD parity: {word} (12 s): far off" in seed_report.report(folder)
    path.unlink()
    assert "- Triton BWD parity: FAIL" in seed_report.report(folder)


def asked_for(chosen, **changes):
    """Rows of sliding, whole and dense attention on a CPU."""
    asked = problem(compare.problems.settings("tiny"), "cpu")
    asked = asked._replace(config=dataclasses.replace(asked.config, **changes))
    branches = ("sliding", "all", "dense")
    runner = TorchRunner("cpu")
    return [*jobs(runner, asked, Branches.each(None), "error", branches, chosen=chosen)]


def test_only_what_is_chosen_is_compared():
    """What a plan names must run on every GPU: it names no kernel where it need not."""
    found = asked_for(True)
    assert [(job.branch, job.label) for job in found] == [
        ("sliding", "sdpa"), ("all", "sdpa"), ("dense", "flash")
    ]  # fmt: skip
    assert not any(job.unsupported for job in found)


@pytest.mark.parametrize("chosen", [False, True])
def test_what_nothing_can_run_is_a_row(chosen):
    """8 bits without a Hopper GPU: no row but the dense one can be measured, and each says why."""
    found = asked_for(chosen, compute_dtype=FLOAT8)
    assert [job.label for job in found if not job.unsupported] == ["flash"]
    assert "auto" in found[-2].label and "in the dtype of the query" in found[-2].unsupported
