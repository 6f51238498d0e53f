"""Recorded durations: which file comes first, parts of equal seconds, what is written."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import durations

RECORDED = {"a.py::long": 9.0, "a.py::short": 0.1, "b.py::some": 2.0}


def fixture(name, scope="module"):
    return SimpleNamespace(argname=name, baseid="a.py", scope=scope)


class Item:
    def __init__(self, name, *fixtures):
        self.nodeid, self.path = name, Path(name.split("::")[0])
        found = {x: (fixture(x, scope),) for x, scope in fixtures}
        self._fixtureinfo = SimpleNamespace(name2fixturedefs=found)


NAMES = "c.py::new", "b.py::some", "a.py::short", "a.py::long"


def test_fixtures_that_tests_share_are_those_of_more_than_a_function():
    item = Item("a.py::1", ("x", "module"), ("y", "function"), ("z", "session"))
    assert durations.shared_by(item) == {"@x a.py", "@z a.py"}


def test_the_longest_file_comes_first():
    items = [Item(name) for name in NAMES]
    durations.longest_first(items, RECORDED)
    assert [x.nodeid for x in items] == ["a.py::short", "a.py::long", "b.py::some", "c.py::new"]


def test_parts_take_equal_seconds():
    items = [Item(f"a.py::{i}") for i in range(12)]
    recorded = {"a.py::0": 8.0, "a.py::1": 4.0} | {f"a.py::{i}": 1.0 for i in range(2, 10)}
    parts = [durations.part_of(items, f"{k}/3", recorded)[0] for k in (1, 2, 3)]
    assert [x for part in parts for x in part] == items
    assert [sum(recorded.get(x.nodeid, 0) for x in part) for part in parts] == [8, 6, 6]


def test_tests_without_a_record_are_shared_out_by_count():
    items = [Item(f"a.py::{i}") for i in range(11)]
    parts = [durations.part_of(items, f"{k}/3", {}) for k in (1, 2, 3)]
    assert [x for kept, _ in parts for x in kept] == items
    assert all(set(kept) | set(others) == set(items) for kept, others in parts)
    assert max(len(kept) for kept, _ in parts) == 4


@pytest.mark.parametrize("part", ["0/2", "3/2", "one", "1"])
def test_a_part_that_is_none_is_refused(part):
    with pytest.raises(pytest.UsageError, match="--part must be K/N"):
        durations.part_of([Item("a.py::x")], part, {})


def test_phases_of_a_test_add_up(tmp_path):
    recorder = durations.Recorder(tmp_path / "durations.json")
    for name, seconds in (("a.py::x", 1.0), ("a.py::x", 0.5), ("a.py::y", 0.01)):
        report = SimpleNamespace(
            nodeid=name, cpu_seconds=seconds, shared_seconds={"@f a.py": 2}
        )
        recorder.pytest_runtest_logreport(report)
    recorder.pytest_sessionfinish()
    assert json.loads(recorder.path.read_text()) == {"@f a.py": 6, "a.py::x": 1.5}


def compute(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def ended(wrapper, value=None):
    with pytest.raises(StopIteration) as found:
        wrapper.send(value)
    return found.value.value


def test_a_phase_takes_what_is_computed_not_what_is_waited_for():
    durations.pytest_runtest_protocol()
    compute(0.1)
    time.sleep(0.5)
    for scope in ("module", "function"):
        wrapper = durations.pytest_fixture_setup(fixture(scope, scope))
        next(wrapper)
        compute(0.1)
        ended(wrapper)
    wrapper = durations.pytest_runtest_makereport()
    next(wrapper)
    report = ended(wrapper, SimpleNamespace())
    assert 0.16 < report.cpu_seconds < 0.6
    assert list(report.shared_seconds) == ["@module a.py"]
    assert 0.08 < report.shared_seconds["@module a.py"] < 0.3
