"""Recorded durations of tests: which are slow, and which file a worker takes first.

    make durations    # runs everything and writes tests/durations.json

Seconds are those of a processor, of the test's process and of those that it starts: what else
the machine does changes them little. The dearest tests carry the marker `slow`, which `make test`
leaves out: the others fit in `BUDGET` seconds together. The cheapest of each file is never
slow, nor is a test without a record. Files begin in the order of what they take, the longest
first, so that no worker is left with a long one at the end (`--dist loadfile`: tests of a file
share what they compile).
"""

import collections
import json
import os
from pathlib import Path

import pytest

FILE = Path(__file__).with_suffix(".json")
# Seconds. Imports, collection and fixtures that move to another test take as much again.
BUDGET = 330.0

served = 0.0  # Seconds of processes that outlive a test, which whoever asks them adds.


def read(path=FILE) -> dict[str, float]:
    """Seconds by test; setup and teardown count."""
    return json.loads(path.read_text()) if path.is_file() else {}


def pytest_addoption(parser):
    parser.addoption("--record-durations", action="store_true", help=f"Write {FILE.name}.")


def pytest_configure(config):
    if config.getoption("record_durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(config, items):
    recorded = read()
    slow = slow_of(recorded)
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)
    longest_first(items, recorded, without_slow="not slow" in config.getoption("markexpr"))


def slow_of(recorded) -> set[str]:
    """The tests that do not fit in the budget, the cheapest of each file first in it."""
    first, rest = {}, []
    for name in sorted(recorded, key=lambda name: (recorded[name], name)):
        if first.setdefault(name.split("::")[0], name) != name:
            rest.append(name)
    left = BUDGET - sum(recorded[name] for name in first.values())
    slow = set()
    for name in rest:
        left -= recorded[name]
        if left < 0:
            slow.add(name)
    return slow


def longest_first(items, recorded, without_slow: bool) -> None:
    """Puts files in the order of what their tests take; tests stay in the order of the file."""
    total = collections.Counter()
    for item in items:
        if not (without_slow and item.get_closest_marker("slow")):
            total[item.path] += recorded.get(item.nodeid, 0.0)
    items.sort(key=lambda item: (-total[item.path], str(item.path)))


_spent = 0.0  # when the last phase ended


def spent() -> float:
    """Seconds of this process and of its children that have ended."""
    return sum(os.times()[:4]) + served


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol():
    global _spent
    _spent = spent()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """A report says what its phase took."""
    global _spent
    report, before = (yield), _spent
    _spent = spent()
    report.cpu_seconds = _spent - before
    return report


class Recorder:
    """Adds up what the phases of each test took, of all workers."""

    def __init__(self):
        self.seconds = collections.Counter()

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] += report.cpu_seconds

    def pytest_sessionfinish(self):
        kept = {name: round(x, 2) for name, x in sorted(self.seconds.items()) if x >= 0.05}
        FILE.write_text(json.dumps(kept, indent=0) + "\n")
