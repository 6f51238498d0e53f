"""Answers from which length NSA is faster than dense attention, for the first chart of the
report's page.

    records, lines of training -> runs -> panels (one per question) -> sentence, curves

A run is one kernel at one length. If a kernel has several runs at one length, only the newest run
counts. A panel answers one question for the problem that was measured at the most lengths. The
panel compares our kernel with all dense kernels of the same framework. The curves of a panel show
the time of the fastest dense kernel divided by the time of each kernel.

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
from collections.abc import Iterable, Iterator, Sequence

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


@dataclasses.dataclass(frozen=True)
class Run:
    """One kernel at one length of one problem."""

    question: str
    problem: tuple
    tokens: int
    dense: bool
    row: Record | Speed

    @property
    def kernel(self) -> str:
        return self.row.implementation

    @property
    def about(self) -> str:
        """The text on the page about the problem."""
        return render.filled("problem.txt.jinja", row=self.row)


def runs(records: Iterable[Record], lines: Iterable[Line]) -> Iterator[Run]:
    """Yield the runs of attention of all branches and of dense attention from records and training
    logs."""
    for r in records:
        compared = r.branch == "dense" or (r.branch == "all" and _is_plain(r.implementation))
        if compared and r.mode in QUESTIONS and r.extra.get("judged", True):
            config = json.dumps(r.config, sort_keys=True)
            queries = r.T if r.T < r.S else None
            shape = r.framework, r.B, queries, r.H, r.Hkv, r.D, r.Dv, r.dtype, r.input
            yield Run(r.mode, (r.bench, *shape, config), r.S, r.branch == "dense", r)
    for x in lines:
        if isinstance(x, Speed):
            problem = x.framework, x.model, x.dtype, x.batch * x.seq_len
            yield Run("step", problem, x.seq_len, x.attention == "dense", x)


def _is_plain(implementation: str) -> bool:
    """Return whether a record measured our kernel in its plain form. Names such as `mosaic
    packed` and `mosaic recompute` are other forms.
    """
    return " " not in implementation and implementation not in PEERS


@dataclasses.dataclass(frozen=True)
class Point:
    """Our kernel and the dense kernels at one length. `missing` has the dense kernels that have
    no row at this length but are the fastest at another length.
    """

    tokens: int
    ours: Run
    dense: tuple[Run, ...]
    missing: tuple[str, ...] = ()

    @property
    def best(self) -> Run | None:
        timed = [run for run in self.dense if run.row.times_ms]
        return min(timed, key=lambda run: run.row.times_ms or (), default=None)

    def ratio(self, run: Run) -> float | None:
        """Return the time of the fastest dense kernel divided by the time of `run`."""
        best = self.best.row.times_ms if self.best else None
        return best[0] / run.row.times_ms[0] if best and run.row.times_ms else None

    @property
    def gain(self) -> str:
        """The ratio of our kernel as text, or its status."""
        ratio = self.ratio(self.ours)
        return self.ours.row.status if ratio is None else f"{ratio:.2g}x"

    @property
    def faster(self) -> bool | None:
        """Whether NSA is faster, or None if the answer is not known."""
        best, ours = self.best.row.times_ms if self.best else None, self.ours.row.times_ms
        if not best:
            return None
        if ours is None or ours[2] >= best[1]:
            return False
        return None if self.missing else True


@dataclasses.dataclass(frozen=True)
class Panel:
    """The answer to one question. If the panel has no points, there are no measurements for the
    question."""

    question: str
    points: tuple[Point, ...] = ()

    @property
    def name(self) -> str:
        return QUESTIONS[self.question]

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
        for point in self.points:
            for run in (*point.dense, point.ours):
                name, status = run.kernel if run.dense else "", run.row.status
                dot = point.tokens, point.ratio(run), status, bool(point.missing)
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
        return f"{ours.about}; NSA by {ours.kernel}"

    @property
    def rows(self) -> list[Record | Speed]:
        """All compared rows."""
        return [run.row for point in self.points for run in (point.ours, *point.dense)]

    @property
    def commits(self) -> str:
        return ", ".join(dict.fromkeys((row.commit or "unknown")[:7] for row in self.rows))

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
    """Return the panels of each device, including the panels that cannot be drawn."""
    groups: dict[str, dict[str, dict[tuple, list[Run]]]] = {}
    for run in sorted(runs(records, lines), key=lambda run: run.row.time):
        problems = groups.setdefault(run.row.device, {}).setdefault(run.question, {})
        problems.setdefault(run.problem, []).append(run)
    return {
        device: [_most_lengths(x, by_question.get(x, {}).values()) for x in QUESTIONS]
        for device, by_question in groups.items()
    }


def _most_lengths(question: str, problems: Iterable[list[Run]]) -> Panel:
    """Return the panel of the problem that has the most lengths. Among problems with equally many
    lengths, the longest problem is used, then the newest.
    """
    some = [Panel(question, points) for points in map(_points, problems) if points]

    def rank(panel: Panel) -> tuple[int, int, str]:
        ends = panel.points[-1]
        return len(panel.points), ends.tokens, ends.ours.row.time

    return max(some, key=rank, default=Panel(question))


def _points(found: Sequence[Run]) -> tuple[Point, ...]:
    """Return the lengths at which our kernel and a dense kernel have runs. `found` has the runs of
    one problem, oldest first. If several of our kernels have runs, the kernel with the most timed
    lengths is used. Among kernels with the same number of timed lengths, the kernel that is the
    fastest at its longest length is used.
    """
    lines: dict[tuple[bool, str], dict[int, Run]] = {}
    for run in found:
        lines.setdefault((run.dense, run.kernel), {})[run.tokens] = run
    dense = [line for (is_dense, _), line in lines.items() if is_dense]

    def rank(line: dict[int, Run]) -> tuple[int, float]:
        times = line[max(line)].row.times_ms
        timed = sum(run.row.times_ms is not None for run in line.values())
        return timed, -times[0] if times else -math.inf

    ours = max((x for (is_dense, _), x in lines.items() if not is_dense), key=rank, default={})
    points = []
    for tokens in sorted(ours):
        here = tuple(line[tokens] for line in dense if tokens in line)
        if here:
            points.append(Point(tokens, ours[tokens], here))
    fastest = {point.best.kernel for point in points if point.best}
    lacking = ((point, fastest - {run.kernel for run in point.dense}) for point in points)
    return tuple(dataclasses.replace(x, missing=tuple(sorted(names))) for x, names in lacking)


def sentence(device: str, each: Iterable[Panel]) -> str:
    """Return all answers of a device as one sentence."""
    return f"{device}: {'; '.join(f'{panel.name} {panel.answer}' for panel in each)}."
