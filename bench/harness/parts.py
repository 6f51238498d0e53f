"""Rows of a table by several processes: made ready side by side, timed one process at a time.

Each process has some of the rows. One that dies, or is longer than `ROW_S` over a row, loses
that row: what it had not timed yet goes to a new process. So a kernel that crashes or hangs is
one row that failed, and compilation takes the cores of the machine. A process times its rows
twice, one after the other, and the least time of each call counts: what slows the host for a
moment is not there at both.
"""

import faulthandler
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from absl import flags

from . import records, turns
from .records import Record

ROW_S = 120
STDERR = 2  # as a file, whatever Python has made of it
ROUNDS = 4  # of processes for what is left
# Where JAX only makes inputs and oracles, it gives back what it does not use.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
FAULT = re.compile(r"^(Timeout \(|Fatal Python error|\w*Error\b|error: ).*", re.MULTILINE)


class Row(Protocol):
    """What a command measures for one row of its table."""

    def judge(self) -> Callable[[], list[Record]]:
        """Does all that comes before timing; what times it, and gives the row's records."""
        ...

    def lost(self, reason: str) -> list[Record]:
        """The same records where the process ended over them."""
        ...


class Parts:
    """The flags that a command has for it, and its rows as they ask."""

    def __init__(self, own: flags.FlagValues):
        at = {"flag_values": own}
        self._processes = flags.DEFINE_integer(
            "processes",
            1,
            "Processes that get ready side by side, each with some of the rows; 1: none but "
            "this one.",
            lower_bound=1,
            **at,
        )
        self._rows = flags.DEFINE_list("rows", None, "Only these rows, by number from 0.", **at)
        self._turn = flags.DEFINE_string(
            "turn", None, "Folder of the rows: what several processes start.", **at
        )

    @property
    def is_child(self) -> bool:
        """Whether another process keeps what this one measures: it calls `child` alone."""
        return self._turn.value is not None

    def child(self, rows: Sequence[Row]) -> int:
        """Measures for another process."""
        measure_for_parent(self._asked(rows), Path(self._turn.value or ""))
        return 0

    def measure(self, name: str, rows: Sequence[Row], folder: Path) -> Iterator[list[Record]]:
        """The records of each of the rows of the command `bench.<name>`, as they come; what
        processes write goes to `folder`.

        Raises:
          ValueError: `--rows` names one that is not there.
        """
        wanted = self._asked(rows)
        if self._processes.value > 1:
            words = [f"bench.{name}", *sys.argv[1:]]
            yield from by_processes(words, wanted, self._processes.value, folder / "parts")
            return
        for row in wanted.values():
            yield row.judge()()

    def _asked(self, rows: Sequence[Row]) -> dict[int, Row]:
        if self._rows.value is None:
            return dict(enumerate(rows))
        numbers = [x.strip() for x in self._rows.value]
        for x in numbers:
            if not x.isdecimal() or int(x) >= len(rows):
                raise ValueError(f"rows must be of 0..{len(rows) - 1}, got {x!r}")
        return {int(x): rows[int(x)] for x in numbers}


def by_processes(
    words: Sequence[str], rows: Mapping[int, Row], processes: int, folder: Path
) -> Iterator[list[Record]]:
    """The records of each of `rows`, measured by processes of `python -m <words>`."""
    folder.mkdir(parents=True, exist_ok=True)
    left, reasons = list(rows), dict[int, str]()
    for _ in range(ROUNDS):
        parts = {f"rows_{part[0]}": part for part in _split(left, processes)}
        parts = dict(reversed(parts.items()))  # the last that begins is timed first
        commands = {
            name: [*words, f"--rows={','.join(map(str, part))}", f"--turn={folder}"]
            for name, part in parts.items()
        }
        left = []
        for name, status in turns.of_names(commands, folder, ENVIRONMENT):
            reason = _ended(status, folder / f"{name}.log")
            for number in parts[name]:
                made, begun = (folder / f"{number}.{end}" for end in ("jsonl", "begun"))
                if begun.exists():
                    yield rows[number].lost(reason)
                elif made.exists():
                    yield records.read(made)
                else:
                    left.append(number)
                    reasons[number] = reason
                made.unlink(missing_ok=True)
                begun.unlink(missing_ok=True)
        left.sort()
        if not left:
            return
    for number in left:
        yield rows[number].lost(f"not begun in {ROUNDS} processes; {reasons[number]}")


def _split(numbers: Sequence[int], count: int) -> Iterator[list[int]]:
    """`numbers` in at most `count` runs of sizes alike."""
    count = min(count, len(numbers))
    for i in range(count):
        yield list(numbers[i * len(numbers) // count : (i + 1) * len(numbers) // count])


def _ended(status: int, log: Path) -> str:
    """How a process ended, in one line."""
    faults = [found[0] for found in FAULT.finditer(log.read_text(errors="replace"))]
    return ": ".join([f"its process ended with status {status}", *faults[-1:]])


def measure_for_parent(rows: Mapping[int, Row], folder: Path) -> None:
    """One of those processes: `<number>.jsonl` in `folder` for each row, `<number>.begun`
    while it is at it."""
    faulthandler.enable(STDERR)
    begun = {number: folder / f"{number}.begun" for number in rows}
    times = {number: _guarded(row.judge, begun[number]) for number, row in rows.items()}
    turns.wait()
    found = {number: _guarded(time, begun[number]) for number, time in times.items()}
    for number, time in times.items():
        pairs = zip(found[number], _guarded(time, begun[number]), strict=True)
        records.append(folder / f"{number}.jsonl", itertools.starmap(_better, pairs))


def _better(first: Record, second: Record) -> Record:
    """The faster of two measurements of one call; where one does not count, that one."""
    return min(first, second, key=lambda record: record.time_ms if record.times_ms else 0.0)


def _guarded[T](function: Callable[[], T], begun: Path) -> T:
    """`function()`, marked by the file, in a process that ends if it takes too long."""
    begun.touch()
    faulthandler.dump_traceback_later(ROW_S, exit=True, file=STDERR)
    found = function()
    faulthandler.cancel_dump_traceback_later()
    begun.unlink()
    return found
