"""Recorded durations: what is slow, which file comes first, what is written."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import durations

RECORDED, BUDGET = {"a.py::long": 9.0, "a.py::short": 0.1, "b.py::some": 2.0}, 2.5


def fixture(name, scope="module"):
    return SimpleNamespace(argname=name, baseid="a.py", scope=scope)


class Item:
    def __init__(self, name, *fixtures):
        self.nodeid, self.path, self.marks = name, Path(name.split("::")[0]), []
        found = {x: (fixture(x, scope),) for x, scope in fixtures}
        self._fixtureinfo = SimpleNamespace(name2fixturedefs=found)

    def add_marker(self, mark):
        self.marks.append(mark.name)

    def get_closest_marker(self, name):
        return name in self.marks


def collected(markexpr, *names):
    """The tests in the order in which they run, and those that are slow."""
    items = [Item(name) for name in names]
    durations.mark_and_order(items, markexpr, RECORDED, BUDGET)
    return [x.nodeid for x in items], [x.nodeid for x in items if x.marks]


NAMES = "c.py::new", "b.py::some", "a.py::short", "a.py::long"


def test_what_does_not_fit_is_slow():
    assert collected("", *NAMES)[1] == ["a.py::long"]


def test_the_cheapest_fit_but_each_file_has_one():
    tests = {"a.py::1": 200.0, "a.py::2": 350.0, "b.py::1": 300.0, "c.py::1": 30, "c.py::2": 40}
    for seconds, slow in (
        (300, {"a.py::2"}),
        (400, both := {"a.py::2", "c.py::2"}),
        (9000, both),
    ):
        assert durations.slow_of(tests | {"b.py::1": seconds}, {}, 600.0) == slow


def test_a_shared_fixture_is_paid_for_once():
    tests = {"a.py::1": 1.0, "a.py::2": 2.0, "a.py::3": 3.0, "@x a.py": 50.0}
    needed = {"a.py::2": {"@x a.py"}, "a.py::3": {"@x a.py"}}
    for budget, slow in ((54.0, {"a.py::3"}), (52.0, {"a.py::2", "a.py::3"}), (56.0, set())):
        assert durations.slow_of(tests, needed, budget) == slow


def test_fixtures_that_tests_share_are_those_of_more_than_a_function():
    item = Item("a.py::1", ("x", "module"), ("y", "function"), ("z", "session"))
    assert durations.shared_by(item) == {"@x a.py", "@z a.py"}


def test_the_longest_file_comes_first():
    order, _ = collected("", *NAMES)
    assert order == ["a.py::short", "a.py::long", "b.py::some", "c.py::new"]


def test_what_is_left_out_does_not_count():
    order, _ = collected("not slow", *NAMES)
    assert order == ["b.py::some", "a.py::short", "a.py::long", "c.py::new"]


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
