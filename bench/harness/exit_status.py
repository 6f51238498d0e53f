"""The exit statuses of all commands, as a table that `--help` shows."""

from collections.abc import Iterable

from .records import Record

OK, WRONG, USAGE, NOT_MEASURED = range(4)
INTERRUPTED = 130  # the status that a shell reports after Ctrl-C
TABLE = """
Exit status:
  0  every requested result was measured and is correct
  1  a result is wrong, or the code failed
  2  the command line is invalid, or it names an invalid file
  3  some or all requested results could not be measured on this machine
  130  the command was interrupted
"""


def of(asked_for: Iterable[Record], beside: Iterable[Record] = ()) -> int:
    """Return the status of a run.

    Args:
      asked_for: The records of the rows that the command was asked to measure.
      beside: The records of baselines of these rows. Baselines count only if their status is
        wrong or an error.
    """
    return of_statuses((x.status for x in asked_for), (x.status for x in beside))


def of_statuses(asked_for: Iterable[str], beside: Iterable[str] = ()) -> int:
    """Compute the status as the function `of` does, but from the statuses of rows instead of their
    records."""
    asked_for = list(asked_for)
    if {"wrong", "error"} & {*asked_for, *beside}:
        return WRONG
    return OK if set(asked_for) == {"ok"} else NOT_MEASURED


def worst(ends: Iterable[int]) -> int:
    """Return the status of a command that ran several commands, given the statuses `ends` of these
    commands. A status outside 0 to 3 counts as 1.
    """
    found = {end if end in range(4) else WRONG for end in ends}
    return next((end for end in (WRONG, USAGE, NOT_MEASURED, OK) if end in found), NOT_MEASURED)
