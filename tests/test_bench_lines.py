"""`bench.lines`: lines of Python by package."""

import collections

import pytest
from absl import app

from bench import lines


def test_packages_are_summed_without_tests():
    before = collections.Counter(a=10, b=3, tests=100)
    after = collections.Counter(a=7, c=1, tests=101)
    assert lines.table(before, after) == [
        "| package | before | now | |",
        "| --- | --- | --- | --- |",
        "| a | 10 | 7 | -3 |",
        "| c | 0 | 1 | +1 |",
        "| b | 3 | 0 | -3 |",
        "| all of these | 13 | 8 | -5 |",
        "| tests | 100 | 101 | +1 |",
    ]


def test_a_commit_that_is_none():
    own = lines.FLAGS
    own(["lines", "--before", "no-such-commit"])
    with pytest.raises(app.UsageError, match="--before"):
        lines.main([])
