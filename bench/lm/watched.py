"""Evaluates the observations of training runs, and makes the report of a run."""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..harness.markdown import table
from ..reports import render
from . import curves, health, watch
from .curves import Verdict
from .log import Header, Line, Speed, Step, Watch

# Bounds of the relative difference of losses between one and several devices. Only the first steps
# are judged, since the losses diverge later.
PARITY = {"float32": 1e-5, "bfloat16": 1e-2}
PARITY_STEPS = 20
# number of consecutive observations with collapsed heads after which the verdict is bad
IN_A_ROW = 3
STALL_S = 180.0  # the longest allowed time between two lines of a heartbeat, in seconds
DROP = 0.2  # largest allowed drop of tokens/s, from all steps to the last tenth of the steps
LEAST_STEPS = 20  # minimum number of steps of a run whose tokens/s are judged
LOSS_OF_SCALE = 0.08  # largest allowed loss of tokens/s per device, compared with one device


def markdown(lines: Sequence[Line], found: Sequence[Verdict]) -> str:
    """Return the report in Markdown: runs, verdicts, and tables of runs, speeds and layers."""
    tables = {
        "runs": curves.run_table(lines),
        "speeds": curves.speed_table(lines),
        "gates": gate_table(lines),
    }
    return render.filled(
        "train.md.jinja",
        headers=[*curves.last(lines, Header).values()],
        verdicts=found,
        mfu_is=next((line.mfu_is for line in lines if isinstance(line, Speed)), ""),
        **{
            name: table(rows[0], (row.values() for row in rows)) if rows else ""
            for name, rows in tables.items()
        },
    )


def verdicts(path: str | Path, lines: Sequence[Line]) -> list[Verdict]:
    """Return verdicts on the runs in the file at `path`, which has `lines`, and on the heartbeats
    next to the file.
    """
    return [*_gates(lines), *_drops(lines), *_gaps(Path(path).parent)]


def _gates(lines: Sequence[Line]) -> Iterable[Verdict]:
    """Judge whether a layer had collapsed heads in each of the last `IN_A_ROW` observations."""
    for run, found in _by_run(lines, Watch).items():
        recent = [line.layers for line in found if line.layers][-IN_A_ROW:]
        if not recent:
            continue
        shares = [min(x["collapsed"] for x in same) for same in zip(*recent, strict=True)]
        entropies = [layer["entropy_min"] for layer in recent[-1]]
        where = f", layer {int(np.argmax(shares))}; lowest entropy {min(entropies):.2f}"
        where += f" of {health.EVEN:.2f}"
        yield Verdict(f"No head's gates have collapsed, {run}", max(shares), 0.0, where)


def _drops(lines: Sequence[Line]) -> Iterable[Verdict]:
    """Judge whether tokens/s drop at the end of a run."""
    for run, found in _by_run(lines, Step).items():
        rates = np.array([line.tokens_per_s for line in found])
        if len(rates) < LEAST_STEPS:
            continue
        late = float(np.median(rates[-max(1, len(rates) // 10) :]))
        drop = 1 - late / float(np.median(rates))
        yield Verdict(f"Tokens/s do not drop at the end, {run}", drop, DROP)


def _gaps(folder: Path) -> Iterable[Verdict]:
    """Judge the longest silence of each rank within a run."""
    for name, beats in watch.heartbeats(folder).items():
        pairs = [
            (after["ts"] - before["ts"], before)
            for before, after in itertools.pairwise(beats)
            if before["msg"] not in ("end", "error") and after["msg"] != "boot"
        ]
        if pairs:
            gap, before = max(pairs, key=lambda pair: pair[0])
            where = f" s, after step {before['step']} of {before['run']}"
            yield Verdict(f"No gap in {name}", gap, STALL_S, where)


def parity(training: Sequence[tuple[str, Sequence[Line]]]) -> list[Verdict]:
    """Judge whether runs of a task on several devices have the same losses as the run on one
    device. Also judge the share of tokens/s that a device loses.
    """
    found = [
        (path, run, header, curves.losses(lines).get(run))
        for path, lines in training
        for run, header in curves.last(lines, Header).items()
    ]
    verdicts = []
    for one, other in itertools.permutations(found, 2):
        (_, run, single, expected), (path, name, several, losses) = one, other
        if run != name or single.parallel is not None or several.parallel is None:
            continue
        if task_of(single) != task_of(several) or expected is None or losses is None:
            continue
        values = curves.difference(losses, expected)[:PARITY_STEPS]
        question = f"Losses of {_spread(several)} are those of one device, {run}"
        where = f", step {values.argmax()} of {len(values)}, {Path(path).parent.name}"
        bound = PARITY[several.dtype]
        verdicts.append(Verdict(question, float(values.max()), bound, where))
    speeds = [x for _, lines in training for x in lines if isinstance(x, Speed)]
    return verdicts + _scaling([x for x in speeds if x.status == "ok" and x.tokens_per_s])


def _scaling(speeds: Sequence[Speed]) -> list[Verdict]:
    found = []
    for one, other in itertools.permutations(speeds, 2):
        same = "run implementation model dtype seq_len device".split()
        if any(getattr(one, x) != getattr(other, x) for x in same):
            continue
        alike = other.batch in (one.batch, one.batch * other.devices)
        if one.devices > 1 or other.devices == 1 or not alike or other.device == "cpu":
            continue
        kept = (other.tokens_per_s or 0) / ((one.tokens_per_s or 0) * other.devices)
        what = f"{other.run} S={other.seq_len} B={other.batch}, compared with B={one.batch}"
        question = f"{other.devices} devices keep their tokens/s, {what}"
        found.append(Verdict(question, 1 - kept, LOSS_OF_SCALE))
    return found


def gate_table(lines: Sequence[Line]) -> list[dict[str, str]]:
    """Return a table of the last observation of each layer."""
    return [
        {"run": run, "step": str(line.step), "layer": str(number)}
        | {name.replace("_", " "): f"{value:.3f}" for name, value in layer.items()}
        for run, line in curves.last(lines, Watch).items()
        for number, layer in enumerate(line.layers)
    ]


def _by_run[L: Line](lines: Sequence[Line], kind: type[L]) -> dict[str, list[L]]:
    found: dict[str, list[L]] = {}
    for line in lines:
        if isinstance(line, kind):
            found.setdefault(line.run, []).append(line)
    return found


def task_of(header: Header) -> list[Any]:
    """Return the settings that are equal for runs with equal losses."""
    return [header.model, header.training, header.dtype, header.input_sha256]


def _spread(header: Header) -> str:
    """Return a short description of the layout of a run on several devices."""
    found = header.parallel or {}
    tensor = f", {found['tensor']} of them by heads" if found.get("tensor", 1) > 1 else ""
    parts = f", {found['accumulate']} micro-batches" if found["accumulate"] > 1 else ""
    return f"{found['kind']} on {found['devices']} devices{tensor}{parts}"
