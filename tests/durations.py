"""Recorded durations of tests: which are slow, and which file a worker takes first.

    make durations    # runs everything and writes tests/durations.json

Seconds are those of a processor, of the test's process and of those that it starts: what else
the machine does changes them little. The dearest tests carry the marker `slow`, which `make test`
leaves out: the others fit in `BUDGET` seconds together. The cheapest of each file is never
slow, nor is a test without a record. A fixture that tests share is recorded by itself, as
`@name file`, and counts once where any of them runs. Files begin in the order of what they
take, the longest first, so that no worker is left with a long one at the end (`--dist
loadfile`: tests of a file share what they compile).
"""

import collections
import json
import os
from pathlib import Path

import pytest

FILE = Path(__file__).with_suffix(".json")
# Seconds. Imports, collection and results that move to another test take 380 more.
BUDGET = 320.0

served = 0.0  # Seconds of processes that outlive a test, which whoever asks them adds.


def read() -> dict[str, float]:
    """Seconds by test, and by fixture that tests share; setup and teardown count."""
    return json.loads(FILE.read_text()) if FILE.is_file() else {}


def pytest_addoption(parser):
    parser.addoption("--record-durations", action="store_true", help=f"Write {FILE.name}.")


def pytest_configure(config):
    if config.getoption("record_durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(config, items):
    mark_and_order(items, config.getoption("markexpr"), read())


def mark_and_order(items, markexpr: str, recorded, budget: float = BUDGET) -> None:
    """Marks the dearest tests as slow, and puts the longest files first."""
    slow = slow_of(recorded, {item.nodeid: shared_by(item) for item in items}, budget)
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)
    longest_first(items, recorded, without_slow="not slow" in markexpr)


def name_of(fixture) -> str:
    return f"@{fixture.argname} {fixture.baseid}"


def shared_by(item) -> set[str]:
    """The fixtures of a test that other tests use too."""
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    return {name_of(found[-1]) for found in fixtures if found[-1].scope != "function"}


def slow_of(recorded, needed, budget: float = BUDGET) -> set[str]:
    """The tests that do not fit in the budget, the cheapest of each file first in it;
    `needed`: the shared fixtures of each test."""

    def seconds(name, paid=frozenset()):
        fixtures = needed.get(name, set()) - paid
        return recorded[name] + sum(recorded.get(x, 0.0) for x in fixtures)

    first, rest = {}, []
    for name in sorted(filter(is_test, recorded), key=lambda name: (seconds(name), name)):
        if first.setdefault(name.split("::")[0], name) != name:
            rest.append(name)
    left, paid, slow = budget, set(), set()
    for name in [*first.values(), *rest]:
        if seconds(name, paid) > left and name in rest:
            slow.add(name)
            continue
        left -= seconds(name, paid)
        paid |= needed.get(name, set())
    return slow


def is_test(name: str) -> bool:
    return not name.startswith("@")


def longest_first(items, recorded, without_slow: bool) -> None:
    """Puts files in the order of what their tests take; tests stay in the order of the file."""
    total, paid = collections.Counter(), set()
    for item in items:
        if not (without_slow and item.get_closest_marker("slow")):
            fixtures = shared_by(item) - paid
            paid |= fixtures
            total[item.path] += sum(recorded.get(x, 0.0) for x in {item.nodeid, *fixtures})
    items.sort(key=lambda item: (-total[item.path], str(item.path)))


_spent = 0.0  # when the last phase ended
_shared = collections.Counter()  # seconds of fixtures since then


def spent() -> float:
    """Seconds of this process and of its children that have ended."""
    return sum(os.times()[:4]) + served


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol():
    global _spent
    _spent = spent()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    before = spent()
    try:
        return (yield)
    finally:
        if fixturedef.scope != "function":
            _shared[name_of(fixturedef)] += spent() - before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """A report says what its phase took, and what the shared fixtures that it made."""
    global _spent
    report, before = (yield), _spent
    _spent = spent()
    report.shared_seconds = dict(_shared)
    report.cpu_seconds = _spent - before - _shared.total()
    _shared.clear()
    return report


class Recorder:
    """Adds up what the phases of each test took, of all workers."""

    def __init__(self, path: Path = FILE):
        self.path, self.seconds = path, collections.Counter()

    def pytest_runtest_logreport(self, report):
        self.seconds.update({report.nodeid: report.cpu_seconds} | report.shared_seconds)

    def pytest_sessionfinish(self):
        kept = {name: round(x, 2) for name, x in sorted(self.seconds.items()) if x >= 0.05}
        self.path.write_text(json.dumps(kept, indent=0) + "\n")
