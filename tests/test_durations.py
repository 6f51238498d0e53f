"""Recorded durations: parts of equal seconds, of which each test is in one."""

from types import SimpleNamespace

import pytest

from tests import durations


def items(count):
    return [SimpleNamespace(nodeid=f"a.py::{i}") for i in range(count)]


def test_parts_take_equal_seconds():
    every = items(12)
    recorded = {"a.py::0": 8.0, "a.py::1": 4.0} | {f"a.py::{i}": 1.0 for i in range(2, 10)}
    parts = [durations.part_of(every, f"{k}/3", recorded)[0] for k in (1, 2, 3)]
    assert [x for part in parts for x in part] == every
    assert [sum(recorded.get(x.nodeid, 0) for x in part) for part in parts] == [8, 6, 6]


def test_tests_without_a_record_are_shared_out_by_count():
    every = items(11)
    parts = [durations.part_of(every, f"{k}/3", {}) for k in (1, 2, 3)]
    assert [x for kept, _ in parts for x in kept] == every
    assert all(len(kept) + len(others) == 11 for kept, others in parts)
    assert max(len(kept) for kept, _ in parts) == 4


@pytest.mark.parametrize("part", ["0/2", "3/2", "one", "1"])
def test_a_part_that_is_none_is_refused(part):
    with pytest.raises(pytest.UsageError, match="--part must be K/N"):
        durations.part_of(items(1), part, {})
