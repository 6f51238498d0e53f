"""Measures the rows of a table in several processes. The processes prepare in parallel, so that
compilation uses all cores of the machine. Only one process is timed at a time.

Each process measures some of the rows. If a process crashes during a row, or needs more than
`ROW_S` seconds for the row, the row is an error, and a new process gets the remaining rows. A
kernel that crashes or hangs makes only one row fail. A process times its rows twice and uses the
shorter time of each call, so that a short disturbance of the host has no effect.
"""

import faulthandler
import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from ..judge.checks import Checker
from . import command, problems, records, turns
from .jobs import Job
from .measure import Judged, guarded, judge
from .records import Record, Values

ROW_S = 120
STDERR = 2  # the file descriptor of stderr, even if Python has replaced sys.stderr
ROUNDS = 4  # the number of times that processes are started for the remaining rows
FAULT = re.compile(r"^(Timeout \(|Fatal Python error|\w*Error\b|error: ).*", re.MULTILINE)


class Problem:
    """A row of a command's table. The records of a row come from several jobs on one problem.

    Args:
      bench: Name of the command.
      runner: The runner of all jobs.
      settings: The problem.
      own: Flags of the command.
      inputs: Function that returns the inputs.
      jobs: Function that returns the jobs.
      how: Arguments of `timing`.
      queries: Number of queries. Defaults to all tokens.
      refusal: The reason why the problem does not exist, or an empty string if it exists.
      about: Further fields of each record.
    """

    def __init__(
        self,
        bench: str,
        runner,
        settings: problems.Settings,
        own: flags.FlagValues,
        inputs: Callable[[], problems.Inputs],
        jobs: Callable[[], Iterable[Job]],
        how: Values,
        *,
        queries: int | None = None,
        refusal: str = "",
        **about: Any,
    ):
        self.of = runner, settings
        self.inputs, self.jobs, self.how, self.refusal = inputs, jobs, how, refusal
        self.about = command.about(*self.of, queries=queries) | about
        self.record = functools.partial(records.record, bench, own.commit)

    def judge(self) -> Callable[[], list[Record]]:
        """Do all work that precedes timing. Return a function that times the jobs and then
        returns their records.
        """
        judged, jobs = list[Judged](), [*self.jobs()]

        def take():
            (runner, settings), inputs = self.of, self.inputs()
            self.about |= command.about(runner, settings, inputs)
            checker = Checker(settings, inputs, backward=False)
            judged.extend(judge(job, runner, checker) for job in jobs)
            return {}

        failed = {"status": "unsupported", "reason": self.refusal}
        if self.refusal or (failed := guarded("inputs", take)):
            judged[:] = [Judged("", False, failed)] * len(jobs)
        return lambda: self._records(jobs, [each.timed(**self.how) for each in judged])

    def lost(self, reason: str) -> list[Record]:
        """Return the records of a row whose process ended."""
        jobs = [*self.jobs()]
        return self._records(jobs, [{"status": "error", "reason": reason}] * len(jobs))

    def _records(self, jobs: Sequence[Job], found: Sequence[Values]) -> list[Record]:
        calls = (
            {"implementation": job.label, "refused": job.refused, "extra": job.extra}
            for job in jobs
        )
        pairs = zip(calls, found, strict=True)
        return [self.record(**self.about | call | each) for call, each in pairs]


FLAGS = {
    "processes": (
        1,
        "Number of processes that prepare in parallel. Each process measures some of the rows. "
        "With 1, only this process measures.",
    ),
    "rows": (list, "Measure only the rows with these indices, which count from 0."),
    "turn": (
        str,
        "Internal: folder of the rows. A process passes it to the processes that it starts.",
    ),
}  # flags in the form that `cli.define` accepts


def child(own: flags.FlagValues, rows: Sequence[Any]) -> int:
    """Measure rows for the process that started this process with `--turn`, and return the exit
    status. The records of a row are written to `<number>.jsonl` in the folder of `--turn`.
    `<number>.begun` exists in the folder of `--turn` while this process works on the row.
    """
    faulthandler.enable(STDERR)
    folder, numbered = Path(own.turn), _asked(own, rows)
    begun = {number: folder / f"{number}.begun" for number in numbered}
    times = {number: _guarded(row.judge, begun[number]) for number, row in numbered.items()}
    turns.wait()
    found = {number: _guarded(time, begun[number]) for number, time in times.items()}
    for number, time in times.items():
        pairs = zip(found[number], _guarded(time, begun[number]), strict=True)
        records.append(folder / f"{number}.jsonl", itertools.starmap(_better, pairs))
    return 0


def measured(
    own: flags.FlagValues, name: str, rows: Sequence[Any], folder: Path
) -> Iterator[list[Record]]:
    """Yield the records of each row of the command `bench.<name>` when they are complete. The
    logs of the processes are in the subfolder `parts` of `folder`.

    Raises:
      ValueError: `--rows` has an index without a row.
    """
    wanted = _asked(own, rows)
    if own.processes > 1:
        words = [f"bench.{name}", *sys.argv[1:]]
        yield from by_processes(words, wanted, own.processes, folder / "parts")
        return
    for row in wanted.values():
        yield row.judge()()


def _asked(own: flags.FlagValues, rows: Sequence[Any]) -> dict[int, Any]:
    if own.rows is None:
        return dict(enumerate(rows))
    numbers = [x.strip() for x in own.rows]
    for x in numbers:
        if not x.isdecimal() or int(x) >= len(rows):
            raise ValueError(f"rows must be in 0..{len(rows) - 1}, got {x!r}")
    return {int(x): rows[int(x)] for x in numbers}


def by_processes(
    words: Sequence[str], rows: Mapping[int, Any], processes: int, folder: Path
) -> Iterator[list[Record]]:
    """Start processes of `python -m <words>` that measure `rows`. Yield the records of each
    row."""
    left, reasons = list(rows), dict[int, str]()
    for _ in range(ROUNDS):
        if not left:
            return
        split = np.array_split(left, min(processes, len(left)))
        # `of_names` times in reverse order
        parts = {f"rows_{part[0]}": part.tolist() for part in reversed(split)}
        commands = {
            name: [*words, f"--rows={','.join(map(str, part))}", f"--turn={folder}"]
            for name, part in parts.items()
        }
        left = []
        for name, status in turns.of_names(commands, folder, turns.ALONE):
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
    for number in left:
        yield rows[number].lost(
            f"the row did not start in {ROUNDS} processes; {reasons[number]}"
        )


def _ended(status: int, log: Path) -> str:
    """Return a sentence about the end of a process, with the last fault in its log."""
    faults = [found[0] for found in FAULT.finditer(log.read_text(errors="replace"))]
    return ": ".join([f"its process ended with status {status}", *faults[-1:]])


def _better(first: Record, second: Record) -> Record:
    """Return the faster of two measurements of one call. If a measurement is invalid, return the
    invalid measurement.
    """
    return min(first, second, key=lambda record: record.time_ms if record.times_ms else 0.0)


def _guarded[T](function: Callable[[], T], begun: Path) -> T:
    """Call `function()`. The marker file `begun` exists during the call. If the call takes too
    long, the process ends.
    """
    begun.touch()
    faulthandler.dump_traceback_later(ROW_S, exit=True, file=STDERR)
    found = function()
    faulthandler.cancel_dump_traceback_later()
    begun.unlink()
    return found
