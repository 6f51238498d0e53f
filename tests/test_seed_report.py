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
from tests.measured import made, problem, record
from tests.tables import table

TABLE = table("bench")["seed report"]


@pytest.fixture
def folder(tmp_path):
    """Files as `bench.oneshot` leaves them."""
    for path, rows in TABLE["records"].items():
        records.append(tmp_path / path, made(rows))
    (tmp_path / "decode.log").write_text("device: x\n 4096 0.3 0.1\nwritten to nowhere\n")
    (tmp_path / "summary.json").write_text(json.dumps(TABLE["summary"]))
    return tmp_path


def test_both_templates(folder, capsys):
    assert seed_report.main(["seed_report", str(folder)]) == 0
    text = (folder / "seed_report.md").read_text()
    assert capsys.readouterr().out == text + "\n"
    assert not [part for part in TABLE["report"] if part not in text]


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
