"""Rows for `test_parts.py`, as a command: one aborts, one hangs, the others are measured."""

import os
import sys
import time

from absl import flags

from bench.harness import parts
from bench.harness.records import Record
from tests.measured import record

ROWS = ("good", "aborts", "hangs", "good", "error")


class Row:
    """A row that does what its name says."""

    def __init__(self, what: str):
        self.what = what

    def judge(self) -> None:
        if self.what == "aborts":
            os.abort()

    def time(self) -> list[Record]:
        if self.what == "hangs":
            time.sleep(60)
        return [record("selected", self.what, 1.0)]

    def lost(self, reason: str) -> list[Record]:
        return [record("selected", self.what, None, status="error", reason=reason)]


if __name__ == "__main__":
    parts.ROW_S = 1
    own = flags.FlagValues()
    these = parts.Parts(own)
    own(sys.argv)
    these.child([Row(what) for what in ROWS])
