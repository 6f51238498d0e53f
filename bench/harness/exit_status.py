"""How every command ends, in one table, which `--help` shows."""

from collections.abc import Iterable

from bench.harness.records import Record

OK, WRONG, USAGE, NOT_MEASURED = range(4)
TABLE = """
Exit status:
  0  what was asked for was measured, and is right
  1  a result is wrong, or code broke
  2  the command line is wrong, or a file that it names
  3  what was asked for could not be measured here
"""


def of(asked_for: Iterable[Record], beside: Iterable[Record] = ()) -> int:
    """The status of a run.

    Args:
      asked_for: the rows that the command is about.
      beside: what they are compared with; alone it is no answer.
    """
    asked_for = list(asked_for)
    if any(record.status in ("wrong", "error") for record in (*asked_for, *beside)):
        return WRONG
    return OK if any(record.status == "ok" for record in asked_for) else NOT_MEASURED
