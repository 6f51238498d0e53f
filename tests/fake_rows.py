"""Rows for `test_parts.py`, as a command: one aborts, one hangs, the others are measured."""

import os
import sys
import time
from collections.abc import Callable

from bench.harness import cli, parts
from bench.harness.records import Record
from tests.measured import record

ROWS = ("good", "aborts", "hangs", "good", "error")


class Row:
    """A row that does what its name says."""

    def __init__(self, what: str):
        self.what = what

    def judge(self) -> Callable[[], list[Record]]:
        if self.what == "aborts":
            os.abort()
        times = iter((3.0, 1.0, 2.0))  # milliseconds of each pass

        def measure():
            if self.what == "hangs" and next(times) < 3.0:
                time.sleep(60)
            return [record("selected", self.what, next(times))]

        return measure

    def lost(self, reason: str) -> list[Record]:
        return [record("selected", self.what, None, status="error", reason=reason)]


if __name__ == "__main__":
    parts.ROW_S = 1
    own = cli.define(**parts.FLAGS)
    own(sys.argv)
    parts.child(own, [Row(what) for what in ROWS])
