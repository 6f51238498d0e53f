"""Recorded durations of tests: which file a worker takes first, and what makes equal parts.

    make durations    # runs everything and writes tests/durations.json

Seconds are those of a processor, of the test's process and of those that it starts: what else
the machine does changes them little. A fixture that tests share is recorded by itself, as
`@name file`, and counts once where any of them runs. Files begin in the order of what they
take, the longest first, so that no worker is left with a long one at the end (`--dist
loadfile`: tests of a file share what they compile).
"""

import collections
import itertools
import json
import os
from pathlib import Path

import pytest

FILE = Path(__file__).with_suffix(".json")
UNRECORDED = 0.1  # seconds of a test without a record, and of each besides

served = 0.0  # Seconds of processes that outlive a test, which whoever asks them adds.


def read() -> dict[str, float]:
    """Seconds by test, and by fixture that tests share; setup and teardown count."""
    return json.loads(FILE.read_text()) if FILE.is_file() else {}


def pytest_addoption(parser):
    parser.addoption("--record-durations", action="store_true", help=f"Write {FILE.name}.")


def pytest_configure(config):
    if config.getoption("record_durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    longest_first(items, read())


def name_of(fixture) -> str:
    return f"@{fixture.argname} {fixture.baseid}"


def shared_by(item) -> set[str]:
    """The fixtures of a test that other tests use too."""
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    return {name_of(found[-1]) for found in fixtures if found[-1].scope != "function"}


def longest_first(items, recorded) -> None:
    """Puts files in the order of what their tests take; tests stay in the order of the file."""
    total, paid = collections.Counter(), set()
    for item in items:
        fixtures = shared_by(item) - paid
        paid |= fixtures
        total[item.path] += sum(recorded.get(x, 0.0) for x in {item.nodeid, *fixtures})
    items.sort(key=lambda item: (-total[item.path], str(item.path)))


def part_of(items, part: str, recorded):
    """The Kth of N parts as "K/N", which take equal seconds, and the other items."""
    k, _, n = part.partition("/")
    if not (k.isdecimal() and n.isdecimal() and 1 <= int(k) <= int(n)):
        raise pytest.UsageError(f"--part must be K/N with 1 <= K <= N, got {part}")
    weights = [recorded.get(x.nodeid, 0.0) + UNRECORDED for x in items]
    middles = [
        end - own / 2 for end, own in zip(itertools.accumulate(weights), weights, strict=True)
    ]
    parts = [int(int(n) * middle / sum(weights)) + 1 for middle in middles]
    chosen = [part == int(k) for part in parts]
    others = [item for item, own in zip(items, chosen, strict=True) if not own]
    return list(itertools.compress(items, chosen)), others


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
