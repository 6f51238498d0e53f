"""bench.against: rows, waves and verdicts, with processes that only pretend to compute."""

import dataclasses
import json

import pytest

from bench import against, tables
from bench.harness.timed_problem import Problem

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


@pytest.fixture
def checkouts(tmp_path, monkeypatch):
    script = tmp_path / "pretended.py"
    script.write_text(PRETENDED)
    monkeypatch.setattr(against, "SCRIPT", script)
    found = tmp_path / "before", tmp_path / "after"
    for folder in found:
        folder.mkdir()
    return found


def verdicts(checkouts, *names):
    children = [
        (p, tuple(against.Child(folder, p) for folder in checkouts))
        for p in (Problem(name=name, **SHAPE) for name in names)
    ]
    try:
        ready, broken = against.compiled(children)
        rows = {
            problem.name: row
            for problem, pair, digests in ready
            for row in against.measure(*pair, digests, rounds=3)
        }
    finally:
        for _, pair in children:
            for child in pair:
                child.end()
    return rows, broken


def test_verdicts(checkouts):
    rows, broken = verdicts(checkouts, "alike", "slow", "bits", "broken")
    assert [str(error) for error in broken] == ["broken in after: exit status 5"]
    assert rows["alike"]["ratio"] == 1 and not against.faults(rows["alike"], 0.02, False)
    assert rows["slow"]["ratio"] == pytest.approx(1.1)
    assert against.faults(rows["slow"], 0.02, False) == "10.0% slower"
    assert not against.faults(rows["slow"], 0.11, False)
    assert against.faults(rows["bits"], 0.02, False) == "other bits"
    assert not against.faults(rows["bits"], 0.02, True)
    found = {"name": "a", "before": 1.0, "after": 1.1, "change": 0.1, "faults": "slower"}
    text = tables.line("against", rows["slow"] | found)
    assert text == "a                            forward     1.000    1.100  +10.0%  slower"


def test_waves_fit_and_hold_every_row():
    for memory in (1, 40, 70, 10_000):
        found = list(against.waves(against.ROWS, memory))
        assert [p for wave in found for p in wave] == list(against.ROWS)
        assert all(
            len(wave) == 1 or 2 * sum(map(against.gib, wave)) <= memory for wave in found
        )
    assert len(found) == 1


def test_a_problem_travels_as_json():
    for problem in against.ROWS:
        assert Problem(**json.loads(json.dumps(dataclasses.asdict(problem)))) == problem


def test_calls_in_a_row_are_timed(monkeypatch):
    """Milliseconds of one call, whatever the number of calls."""
    from bench.harness import timed_problem

    now = [0.0]
    monkeypatch.setattr(timed_problem.time, "perf_counter", lambda: now[0])

    def call():
        now[0] += 0.004

    assert timed_problem.milliseconds(call, lambda _: None) == pytest.approx(4.0)
