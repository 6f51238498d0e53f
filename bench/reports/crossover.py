"""Answers from which length NSA is faster than dense attention, for the first chart of the
report's page.

    records, lines of training -> runs -> panels (one per question) -> sentence, curves

A run is a row of one kernel at one length. If a kernel has several runs at one length, only the
newest run counts. A panel answers one question for the problem that was measured at the most
lengths. The panel compares our kernel with all dense kernels of the same framework. The curves of a
panel show the time of the fastest dense kernel divided by the time of each kernel.

At one length there are three answers:

- "faster": the 80th percentile of NSA is below the 20th percentile of the fastest dense kernel.
- "not known": at this length no dense kernel has a time. The answer is also not
  known if NSA would be faster, but the fastest dense kernel of another length was not measured at
  this length.
- "not faster": all other cases, for example a tie, or a row of NSA that is wrong or failed.

NSA counts as faster from a length on if it is faster at that length and at all longer lengths for
which the answer is known.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..harness.peers import NAMES as PEERS
from ..harness.records import Record
from ..lm.log import Line, Speed
from . import render

QUESTIONS = {
    "forward": "forward",
    "fwdbwd": "forward + backward",
    "step": "training step",
    "decode": "decode",
}

type Row = Record | Speed
# The newest row of each kernel of a problem, by length; the key states whether the kernel is dense.
type Lines = Mapping[tuple[bool, str], Mapping[int, Row]]


class Run(NamedTuple):
    """One kernel at one length of one problem."""

    question: str
    problem: tuple
    tokens: int
    dense: bool
    row: Row


def runs(records: Iterable[Record], lines: Iterable[Line]) -> Iterator[Run]:
    """Yield the runs of attention of all branches and of dense attention from records and training
    logs. Other forms of our kernel, such as `mosaic packed` and `mosaic recompute`, do not count.
    """
    for r in records:
        plain = " " not in r.implementation and r.implementation not in PEERS
        compared = r.branch == "dense" or (r.branch == "all" and plain)
        if compared and r.mode in QUESTIONS and r.extra.get("judged", True):
            config = json.dumps(r.config, sort_keys=True)
            queries = r.T if r.T < r.S else None
            sizes = r.B, queries, r.H, r.Hkv, r.D, r.Dv
            shape = r.framework, *sizes, r.dtype, r.input, r.extra.get("kv")
            yield Run(r.mode, (r.bench, *shape, config), r.S, r.branch == "dense", r)
    for x in lines:
        if isinstance(x, Speed):
            problem = x.framework, x.model, x.dtype, x.batch * x.seq_len
            yield Run("step", problem, x.seq_len, x.attention == "dense", x)


@dataclasses.dataclass(frozen=True)
class Point:
    """Our kernel and the dense kernels at one length. `missing` states whether a dense kernel has
    no row at this length but is the fastest at another length.
    """

    tokens: int
    ours: Row
    dense: Sequence[Row]
    missing: bool

    @property
    def best(self) -> tuple[float, float, float] | None:
        """The times of the fastest dense kernel."""
        return min((row.times_ms for row in self.dense if row.times_ms), default=None)

    def ratio(self, row: Row) -> float | None:
        """Return the time of the fastest dense kernel divided by the time of `row`."""
        return self.best[0] / row.times_ms[0] if self.best and row.times_ms else None

    @property
    def faster(self) -> bool | None:
        """Whether NSA is faster, or None if the answer is not known."""
        best, ours = self.best, self.ours.times_ms
        if not best:
            return None
        if ours is None or ours[2] >= best[1]:
            return False
        return None if self.missing else True


@dataclasses.dataclass(frozen=True)
class Panel:
    """The answer to one question. If the panel has no points, there are no measurements for the
    question."""

    name: str
    points: Sequence[Point] = ()

    @property
    def known(self) -> list[Point]:
        """The points at which it is known whether NSA is faster."""
        return [point for point in self.points if point.faster is not None]

    @property
    def crossover(self) -> int | None:
        """The length from which NSA is faster at every length for which the answer is known, or
        None.
        """
        wins = list(itertools.takewhile(lambda point: point.faster, reversed(self.known)))
        return wins[-1].tokens if wins else None

    @property
    def curves(self) -> dict[str, list[tuple[int, float | None, str, bool]]]:
        """The curves by dense kernel, with "" for our kernel. A point has tokens, ratio, status,
        and whether a fast dense kernel is missing. A kernel with fewer than two ratios has no
        curve.
        """
        found: dict[str, list[tuple[int, float | None, str, bool]]] = {}
        for x in self.points:
            for name, row in [*((row.implementation, row) for row in x.dense), ("", x.ours)]:
                dot = x.tokens, x.ratio(row), row.status, x.missing
                found.setdefault(name, []).append(dot)
        timed = lambda curve: sum(ratio is not None for _, ratio, *_ in curve)
        return {name: curve for name, curve in found.items() if timed(curve) > 1}

    @property
    def drawn(self) -> bool:
        return "" in self.curves

    @property
    def about(self) -> str:
        """The text about the measured problem and our kernel."""
        ours = self.points[-1].ours
        return f"{render.filled('problem.txt.jinja', row=ours)}; NSA by {ours.implementation}"

    @property
    def rows(self) -> list[Row]:
        """All compared rows."""
        return [row for point in self.points for row in (point.ours, *point.dense)]

    @property
    def answer(self) -> str:
        """The answer as text, which continues a sentence after the name of the question."""
        return render.filled("answer.txt.jinja", panel=self)


def panels(records: Iterable[Record], lines: Iterable[Line]) -> dict[str, list[Panel]]:
    """Return the panels of each device, in the order of the questions. Devices without a panel
    that can be drawn are left out.
    """
    found = asked(records, lines)
    return {x: each for x, each in found.items() if any(panel.drawn for panel in each)}


def asked(records: Iterable[Record], lines: Iterable[Line] = ()) -> dict[str, list[Panel]]:
    """Return the panels of each device, including the panels that cannot be drawn. A panel has the
    problem with the most lengths. Among problems with equally many lengths, the longest problem is
    used, then the newest.
    """
    found: dict[str, dict[str, dict[tuple, dict]]] = {}
    for run in sorted(runs(records, lines), key=lambda run: run.row.time):
        problems = found.setdefault(run.row.device, {}).setdefault(run.question, {})
        kernel = problems.setdefault(run.problem, {}).setdefault(
            (run.dense, run.row.implementation), {}
        )
        kernel[run.tokens] = run.row
    size = lambda points: (len(points), points[-1].tokens, points[-1].ours.time)
    some = lambda problems: filter(None, map(_points, problems.values()))
    return {
        device: [
            Panel(name, max(some(by_question.get(x, {})), key=size, default=()))
            for x, name in QUESTIONS.items()
        ]
        for device, by_question in found.items()
    }


def _points(lines: Lines) -> list[Point]:
    """Return the lengths of one problem at which our kernel and a dense kernel have rows. If
    several of our kernels have rows, the kernel with the most timed lengths is used. Among kernels
    with the same number of timed lengths, the kernel that is the fastest at its longest length is
    used.
    """

    def rank(line: Mapping[int, Row]) -> tuple[int, float]:
        times = line[max(line)].times_ms
        timed = sum(row.times_ms is not None for row in line.values())
        return timed, -times[0] if times else -math.inf

    ours = max((x for (dense, _), x in lines.items() if not dense), key=rank, default={})
    beside = {
        tokens: [line[tokens] for (dense, _), line in lines.items() if dense and tokens in line]
        for tokens in sorted(ours)
    }
    timed = [[row for row in rows if row.times_ms] for rows in beside.values()]
    fastest = {min(x, key=lambda row: row.times_ms or ()).implementation for x in timed if x}
    return [
        Point(tokens, ours[tokens], rows, bool(fastest - {row.implementation for row in rows}))
        for tokens, rows in beside.items()
        if rows
    ]
