"""Rows by several processes: a crash or a hang costs its own row, and nothing else."""

import pytest

from bench.harness import cli, parts, process
from tests.fake_rows import ROWS, Row
from tests.limits import set_limits
from tests.tables import table

ENDED = "its process ended with status"


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Implementation, status and reason of each row of these numbers."""
    monkeypatch.chdir(process.ROOT)

    def call(numbers, processes, words=("tests.fake_rows",)):
        rows = {number: Row(ROWS[number]) for number in numbers}
        found = parts.by_processes(words, rows, processes, tmp_path / "parts")
        return [(r.implementation, r.status, r.reason, r.time_ms) for (r,) in found]

    return call


def test_a_crash_and_a_hang_are_rows_and_the_rest_is_measured(measured, tmp_path):
    found = measured([0, 1, 2, 3], 2)
    assert sorted(found, key=lambda row: row[0]) == [
        ("aborts", "error", f"{ENDED} -6: Fatal Python error: Aborted", None),
        ("good", "ok", "", 1.0),
        ("good", "ok", "", 1.0),
        ("hangs", "error", f"{ENDED} 1: Timeout (0:00:01)!", None),
    ], "the least time of two passes counts"
    assert {path.suffix for path in (tmp_path / "parts").iterdir()} == {".log"}


def test_what_never_begins_is_not_tried_for_ever(measured, monkeypatch):
    set_limits(monkeypatch, rounds_of_parts=2)
    ((_, status, reason, _),) = measured([0], 2, ["tests.no_such_module"])
    assert status == "error" and reason.startswith(
        "the row did not start in 2 processes; its process ended"
    )


@pytest.mark.parametrize("rows, processes, sizes", table("bench")["shares of processes"])
def test_as_many_processes_as_are_asked_for(rows, processes, sizes, tmp_path, monkeypatch):
    """Their numbers of rows differ by one at most."""
    begun = []
    monkeypatch.setattr(parts.turns, "of_names", lambda words, *_: begun.append(words) or [])
    numbered = dict.fromkeys(range(rows), Row("good"))
    assert not list(parts.by_processes(["x"], numbered, processes, tmp_path))
    commands = [words for each in begun for words in each.values()]
    listed = [words[1].partition("=")[2].split(",") for words in commands]
    assert sorted(map(len, listed)) == sizes
    assert sorted(int(x) for each in listed for x in each) == list(range(rows))


def test_rows_by_number(tmp_path):
    own = cli.define(**parts.FLAGS)
    rows = [Row("good"), Row("error"), Row("good")]
    own(["x", "--rows=2,1"])
    found = parts.measured(own, "none", rows, tmp_path)
    assert [r.implementation for (r,) in found] == ["good", "error"]
    own(["x", "--rows=3"])
    with pytest.raises(ValueError, match=r"rows must be in 0\.\.2, got '3'"):
        list(parts.measured(own, "none", rows, tmp_path))
