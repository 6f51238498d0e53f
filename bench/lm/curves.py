"""Evaluates the lines of `train.jsonl`. The module makes verdicts, tables, and the plot of the
loss curves."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import tables
from .log import Header, Line, Speed, Step, Summary

# Largest allowed relative difference of JAX's and torch's loss of one step. In its first steps
# AdamW divides each gradient by its own magnitude, which enlarges the rounding errors of small
# gradients. Measured on the CPU: 7e-7 in float32 and 1.3e-2 in bfloat16 over 100 steps of the tiny
# model; 5e-5 in float32 over 3 steps of 125m without a warm-up.
TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2}
# the relative amount by which the final loss of NSA may exceed that of dense attention
MARGIN = 0.01
COLORS = {"nsa": "tab:blue", "dense": "tab:orange"}
STYLES = {"jax": "-", "torch": "--"}


class Verdict(NamedTuple):
    """A question, and its answer: whether `value` is at most `bound`."""

    question: str
    value: float
    bound: float
    where: str = ""

    @property
    def ok(self) -> bool:
        return self.value <= self.bound

    def __str__(self) -> str:
        word = "yes" if self.ok else "NO"
        return f"{self.question}: {word} ({self.value:.3g}, bound {self.bound:.3g}{self.where})"


def losses(lines: Sequence[Line]) -> dict[str, np.ndarray]:
    """Return the losses `[steps]` of each run in the order of its steps. A later line for a step
    replaces an earlier line.
    """
    found: dict[str, dict[int, float]] = {}
    for line in lines:
        if isinstance(line, Step):
            found.setdefault(line.run, {})[line.step] = line.loss
    return {run: np.array([x[i] for i in sorted(x)]) for run, x in found.items()}


def last[L: Line](lines: Sequence[Line], kind: type[L]) -> dict[str, L]:
    """Return the last line of a kind of each run."""
    return {line.run: line for line in lines if isinstance(line, kind)}


def difference(losses: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Compute `|losses - expected| / expected` for each step that both arrays have."""
    steps = min(len(losses), len(expected))
    return np.abs(losses[:steps] - expected[:steps]) / expected[:steps]


def apart(curves: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """For NSA and for dense attention, compute `|jax - torch| / torch` for each step that both
    runs have."""
    found = {}
    for attention in COLORS:
        runs = [f"{framework}-{attention}" for framework in ("jax", "torch")]
        if all(run in curves for run in runs):
            found[attention] = difference(*(curves[run] for run in runs))
    return found


def final(losses: np.ndarray) -> float:
    """Return the mean of the losses over the last tenth of the steps."""
    return float(losses[-max(1, len(losses) // 10) :].mean())


def verdicts(
    lines: Sequence[Line], tolerance: float | None = None, margin: float = MARGIN
) -> list[Verdict]:
    """Judge whether JAX and torch agree at every step, and whether the final loss of NSA is no
    worse than the final loss of dense attention.

    Args:
      lines: the result of `log.read`.
      tolerance: Bound of the relative difference between the losses of JAX and torch in one step,
        by default the bound for the dtype. The means over the last tenth of the steps may differ by
        a fifth of the bound.
      margin: The share by which the loss of NSA may exceed the loss of dense attention, on the last
        tenth of the training batches and on held-out text.
    """
    curves, ends = losses(lines), last(lines, Summary)
    if tolerance is None:
        dtypes = {header.dtype for header in last(lines, Header).values()}
        tolerance = max((TOLERANCE[dtype] for dtype in dtypes), default=0.0)
    found = []
    for attention, values in apart(curves).items():
        where = f", step {values.argmax()} of {len(values)}"
        question = f"JAX and torch agree at every step, {attention}"
        found.append(Verdict(question, float(values.max()), tolerance, where))
        jax, torch = (final(curves[f"{name}-{attention}"]) for name in ("jax", "torch"))
        question = f"JAX and torch end alike, {attention}"
        found.append(Verdict(question, abs(jax - torch) / torch, tolerance / 5))
    for framework in STYLES:
        runs = [f"{framework}-{attention}" for attention in ("nsa", "dense")]
        if not all(run in ends and ends[run].status == "ok" for run in runs):
            continue
        means = [final(curves[run]) for run in runs]
        held_out = [ends[run].held_out_loss or np.nan for run in runs]
        for name, (nsa, dense) in (("training", means), ("held-out", held_out)):
            question = f"NSA's {name} loss within {margin:.1%} of dense or better, {framework}"
            found.append(Verdict(question, nsa / dense - 1, margin))
    return found


def run_table(lines: Sequence[Line]) -> list[dict[str, str]]:
    """Return a table of the runs, with the results at the end of each run and the number of its
    devices."""
    curves, ends = losses(lines), last(lines, Summary)
    found = [
        dataclasses.asdict(h)
        | dataclasses.asdict(ends[run])
        | {"millions": h.parameters / 1e6, "final": final(curves[run]), "devices": devices(h)}
        for run, h in last(lines, Header).items()
        if run in ends and run in curves
    ]
    return tables.rows("runs", found)


def devices(header: Header) -> str:
    """Return a text with the number of devices of a run and the way in which the devices share the
    run.
    """
    found = header.parallel
    if found is None:
        return "1"
    graph = ", graph" if found.get("graph") else ""
    return f"{found['devices']} {found['kind']}{graph}"


def speed_table(lines: Sequence[Line]) -> list[dict[str, str]]:
    """Return a table of the cost of a step."""
    return tables.rows("speeds", (dataclasses.asdict(x) for x in lines if isinstance(x, Speed)))


class Curve(NamedTuple):
    """A curve of a figure. `over` is the difference of this curve from another curve. The
    difference is drawn below the curves.
    """

    losses: np.ndarray
    label: str
    over: np.ndarray | None = None
    style: Mapping[str, Any] = {}


def draw(
    drawn: Sequence[Curve],
    path: Path,
    header: Header | None,
    bound: tuple[float, int | None],
    below_is: str,
) -> None:
    """Draw curves, and their differences below the curves.

    Args:
      drawn: The curves.
      path: The file of the figure.
      header: the header of one of the runs, for the title.
      bound: The bound of the differences, and the number of steps to which the bound applies; None
        means all steps.
      below_is: the name of the axis of the differences.
    """
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    for curve in drawn:
        label = f"{curve.label}: {final(curve.losses):.4f}"
        above.plot(curve.losses, label=label, linewidth=1.2, **curve.style)
        if curve.over is not None:
            apart = np.maximum(curve.over, 1e-9)
            below.semilogy(apart, linewidth=0.8, label=curve.label, **curve.style)
    value, steps = bound
    below.hlines(value, 0, steps or max((len(x.losses) for x in drawn), default=1), "k", ":")
    above.set_ylabel("loss (nats per token)")
    above.legend(title="mean of the last tenth of the steps")
    below.set_ylabel(below_is)
    below.set_xlabel("step")
    if below.lines:
        below.legend()
    if header is not None:
        at = header.training
        rows = f"{at['batch']} x {at['seq_len']} tokens per step"
        size = f"{header.parameters / 1e6:.3g}M parameters, {rows}"
        above.set_title(f"{header.device}, {size}, {header.dtype}", size=9, loc="left")
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}):
        kind = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=150, metadata=kind)


def plot(lines: Sequence[Line], path: Path, tolerance: float) -> None:
    """Draw the loss curves of all runs, and below them the differences between JAX and torch."""
    curves, headers = losses(lines), last(lines, Header)
    far, drawn = apart(curves), []
    for run, values in curves.items():
        framework, _, attention = run.partition("-")
        label = f"{attention} {framework} {getattr(headers.get(run), 'implementation', '')}"
        style = {"color": COLORS[attention], "linestyle": STYLES[framework]}
        over = far.get(attention) if framework == "jax" else None
        drawn.append(Curve(values, label, over, style))
    first = next(iter(headers.values()), None)
    draw(drawn, path, first, (tolerance, None), "|JAX - torch| / torch")
