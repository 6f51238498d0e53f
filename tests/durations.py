"""Recorded durations of tests: which are slow, and which file a worker takes first.

    make durations    # runs everything and writes tests/durations.json

A test that took longer than `SLOW` seconds carries the marker `slow`: `make test` leaves it
out. Files begin in the order of what they take, the longest first, so that no worker is left
with a long one at the end (`--dist loadfile`: tests of a file share what they compile). A test
without a record is not slow. Seconds are of the machine that recorded them.
"""

import collections
import json
from pathlib import Path

import pytest

FILE = Path(__file__).with_suffix(".json")
SLOW = 2.0  # seconds


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
    for item in items:
        if recorded.get(item.nodeid, 0.0) > SLOW:
            item.add_marker(pytest.mark.slow)
    longest_first(items, recorded, without_slow="not slow" in config.getoption("markexpr"))


def longest_first(items, recorded, without_slow: bool) -> None:
    """Puts files in the order of what their tests take; tests stay in the order of the file."""
    total = collections.Counter()
    for item in items:
        if not (without_slow and item.get_closest_marker("slow")):
            total[item.path] += recorded.get(item.nodeid, 0.0)
    items.sort(key=lambda item: (-total[item.path], str(item.path)))


class Recorder:
    """Adds up what the phases of each test took, of all workers."""

    def __init__(self):
        self.seconds = collections.Counter()

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self):
        kept = {name: round(x, 2) for name, x in sorted(self.seconds.items()) if x >= 0.05}
        FILE.write_text(json.dumps(kept, indent=0) + "\n")
