"""bench.against: rows, waves and verdicts, with processes that only pretend to compute."""

import dataclasses
import json
import re

import pytest
import torch

from bench import against, run
from bench.harness import exit_status, records
from bench.harness.timed_problem import Problem
from tests import commands, pretend
from tests.tables import table

PRETENDED = """
import json, os, sys
say = lambda **x: print(json.dumps(x), flush=True)
problem = json.loads(sys.argv[1])
checkout = os.environ["PYTHONPATH"].split(os.pathsep)[0]
assert os.path.samefile(checkout, os.getcwd())
after = checkout.endswith("after")
if problem["name"] == "broken" and after:
    sys.exit(5)
say(forward="other" if problem["name"] == "bits" and after else "same")
slower = 1.1 if problem["name"] == "slow" and after else 1.0
for round, _ in enumerate(sys.stdin):
    say(forward=slower * (2.0 + round))
"""
SHAPE = {"T": 1024, "H": 16, "Hkv": 1, "D": 64, "Dv": 64}


@pytest.mark.parametrize("name, more, status, said", table("bench")["verdicts"])
def test_verdicts(name, more, status, said, tmp_path, monkeypatch, capsys):
    """Beside a row that is alike."""
    script = tmp_path / "pretended.py"
    script.write_text(PRETENDED)
    pretend.gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(against, "SCRIPT", script)
    monkeypatch.setattr(against, "__file__", str(tmp_path / "after" / "bench" / "against.py"))
    monkeypatch.setattr(run, "CALLS", [Problem(name=x, **SHAPE) for x in (name, "other")])
    for folder in ("before/nsa_torch", "after"):
        (tmp_path / folder).mkdir(parents=True)
    out = tmp_path / "against.jsonl"
    words = "--checkout", tmp_path / "before", "--rounds=3 --out", out, *more
    assert commands.called(against, *words) == getattr(exit_status, status)
    assert re.search(said, capsys.readouterr().out, re.MULTILINE)
    found = {x["name"]: x for x in records.flat_lines(out)}
    assert set(found) == {name, "other"} - {"broken"}
    assert found["other"]["ratio"] == 1 and found["other"]["same_bits"]
    assert found["other"]["before_ms"] == [2.0, 3.0, 4.0]
    if name == "slow":
        assert found[name]["ratio"] == pytest.approx(1.1)


def test_waves_fit_and_hold_every_row():
    for memory in (1, 40, 70, 10_000):
        found = against.waves(run.CALLS, memory)
        assert [p for wave in found for p in wave] == run.CALLS
        each = [len(against.waves(wave, memory)) for wave in found]
        assert each == [1] * len(found)
    assert len(found) == 1 < len(against.waves(run.CALLS, 70))


def test_a_problem_travels_as_json():
    for problem in run.CALLS:
        assert Problem(**json.loads(json.dumps(dataclasses.asdict(problem)))) == problem


def test_calls_in_a_row_are_timed(monkeypatch):
    """Milliseconds of one call, whatever the number of calls."""
    from bench.harness import timed_problem

    now = [0.0]
    monkeypatch.setattr(timed_problem.time, "perf_counter", lambda: now[0])

    def call():
        now[0] += 0.004

    assert timed_problem.milliseconds(call, lambda _: None) == pytest.approx(4.0)
