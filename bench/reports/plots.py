"""Plots of records against length: milliseconds, speed-up, and the answers of `crossover`.

A line joins rows of one implementation whose status is ok and whose problems differ only in the
length. Problems that were measured at only one length are not plotted. A figure of the report is
saved as PNG on white, and as SVG in the text colour of the page.
"""

import dataclasses
import io
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..harness.records import Record
from . import render
from .crossover import Panel

BRANCHES = ("compressed", "scores", "selected", "sliding", "all", "dense")
COLORS = {
    "mosaic": "#0e8a5f",
    "triton": "#b4602c",
    "fa2": "#c2410c",
    "flash": "#c2410c",
    "cudnn": "#8a63d2",
    "sdpa": "#2f74c0",
    "xla": "#2f74c0",
    "jax": "#b08900",
    "reference": "#7c8794",
    "math": "#7c8794",
}
OTHER, OURS = "#a13d87", "#0b6b4c"
MARKERS = {"jax": "o", "torch": "^"}
INK = "#010203"  # becomes currentColor


@dataclasses.dataclass(frozen=True)
class Plot:
    """A figure as SVG text, and the path of the same figure as PNG."""

    title: str
    svg: str
    png: Path


def length(record: Record) -> tuple[int, str]:
    """Return the value of the horizontal axis for a row, and its name. `bench.selection` varies the
    number of selected keys.
    """
    if record.bench == "selection":
        keys = record.config["num_selected"] * record.config["select_block"]
        return keys, "selected keys per query"
    return record.S, "tokens"


def lines_of(rows: Sequence[Record], value: Callable) -> list[list[Record]]:
    """Return the rows of each line of the plot, sorted by length. Rows without a value, and lines
    with fewer than two lengths, are left out.
    """
    lines: dict[tuple[str, ...], list[Record]] = {}
    for record in rows:
        if record.times_ms and value(record):
            shape = dataclasses.replace(record, T=0, S=0, input_sha256=None)
            if length(record)[1] != "tokens":
                shape = dataclasses.replace(shape, config=record.config | {"num_selected": 0})
            key = *render.problem_of(shape), record.branch, record.implementation
            lines.setdefault(key, []).append(record)
    found = [sorted(line, key=lambda r: length(r)[0]) for line in lines.values()]
    return [line for line in found if length(line[0])[0] < length(line[-1])[0]]


def panels(
    records: Sequence[Record], value: Callable
) -> Iterator[tuple[str, str, list[list[Record]]]]:
    """Yield the branch, the axis and the lines of each panel, in the order of the branches."""
    for branch in BRANCHES:
        some = [r for r in records if r.branch == branch]
        for axis in dict.fromkeys(length(r)[1] for r in some):
            lines = lines_of([r for r in some if length(r)[1] == axis], value)
            if lines:
                yield branch, axis, lines


def plots(records: Sequence[Record], folder: Path) -> list[Plot]:
    """Return all plots of each device and mode, and write the PNG files to `folder`."""
    times, gains = [], []
    for device in sorted({r.device for r in records}):
        for mode in ("forward", "fwdbwd", "backward", "decode"):
            some = [r for r in records if (r.device, r.mode) == (device, mode)]
            name = f"{device}, {mode}"
            shown = list(panels(some, lambda r: r.time_ms))
            if shown:
                figure = _by_length(shown, "ms", lambda r: r.time_ms)
                times.append(_saved(figure, f"Time: {name}", folder))
            over = dict(zip(map(id, some), render.speed_ups(some), strict=True))
            gain = lambda r, over=over: over[id(r)]
            shown = list(panels([r for r in some if r.branch != "dense"], gain))
            if shown:
                figure = _by_length(shown, "x dense", gain, 1.0)
                gains.append(_saved(figure, f"Speed-up over dense attention: {name}", folder))
    return [*times, *gains]


def answer(panel: Panel, number: int) -> str:
    """Return the SVG of one answer. `number` is the index of the answer on the page."""
    figure, grid = _grid(1, (3.0, 2.4))
    _draw(panel, grid[0])
    _legend(figure, columns=2)
    name = f"answer{number}"
    return _inline(_svg(figure, name, transparent=True), name)


def answers(each: Sequence[Panel]) -> str:
    """Return the SVG of all answers that can be drawn, on white."""
    drawn = [panel for panel in each if panel.drawn]
    figure, grid = _grid(len(drawn), (3.6, 2.4))
    for axes, panel in zip(grid, drawn, strict=False):
        _draw(panel, axes)
        axes.set_title(f"{panel.name.capitalize()}: {panel.answer}", loc="left", size=8)
    _legend(figure)
    return _svg(figure, "crossover", facecolor="white")


def distances(found: Mapping[str, Mapping[str, Any]], places: Sequence[int]) -> str:
    """Return the SVG of gains by distance on white. `found` has the values of all runs for each
    of `places`, in nats per token, by title and label. Bars show the range of the runs.
    """
    figure, grid = _grid(len(found), (3.6, 2.4))
    for axes, (title, curves) in zip(grid, found.items(), strict=False):
        for label, runs in curves.items():
            color = {"dense": OTHER, "16 blocks": COLORS["fa2"]}.get(label, OURS)
            means = [sum(x) / len(x) for x in runs]
            bars = [[m - min(x) for m, x in zip(means, runs, strict=True)]]
            bars.append([max(x) - m for m, x in zip(means, runs, strict=True)])
            how = {"marker": "o", "markersize": 3, "capsize": 2, "linewidth": 1.2}
            axes.errorbar(places, means, yerr=bars, label=label, color=color, **how)
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, map(str, places), size=7)
        _labels(axes, title, "tokens back", "nats per token")
    _legend(figure)
    return _svg(figure, "distance", facecolor="white")


def needles(found: Mapping[str, Mapping[str, Sequence[float]]], depths: Sequence[float]) -> str:
    """Return the SVG of heat maps on white: the share of needles that each model of `found` finds,
    by number of tokens and by depth. Depth 0 is the first token of a row.
    """
    figure, grid = _grid(len(found), (2.4, 2.2))
    for axes, (model, shares) in zip(grid, found.items(), strict=False):
        columns = [[shares[n][row] for n in shares] for row in range(len(depths))]
        axes.pcolormesh(columns, cmap="Greens", vmin=0, vmax=1)
        axes.invert_yaxis()
        for (row, line), column in itertools.product(enumerate(columns), range(len(shares))):
            ink = "white" if line[column] > 0.6 else INK
            place = column + 0.5, row + 0.5
            axes.text(
                *place, f"{line[column]:.1f}", ha="center", va="center", size=6, color=ink
            )
        across, down = ([x + 0.5 for x in range(len(each))] for each in (shares, depths))
        axes.set_xticks(across, [f"{int(n) // 1024}k" for n in shares], size=7)
        axes.set_yticks(down, map(str, depths), size=7)
        _labels(axes, model, "tokens of a row", "depth")
    return _svg(figure, "needle", facecolor="white")


def _draw(panel: Panel, axes) -> None:
    """Draw an answer. A ratio above 1 means that NSA is faster than dense attention. A hollow dot
    means that a fast dense kernel was not measured at that length. A word is the status of a row
    without a time.
    """
    for name, curve in panel.curves.items():
        tokens, ratios, failed, missing = zip(*curve, strict=True)
        own = {"linewidth": 1.0, "markersize": 2.5, "color": COLORS.get(name, OTHER)}
        if not name:
            own = {"linewidth": 2.0, "markersize": 4.0, "color": OURS, "zorder": 3}
        values = [math.nan if ratio is None else ratio for ratio in ratios]
        label = render.KERNEL_NAMES.get(name, name) if name else "NSA"
        axes.plot(tokens, values, marker="o", label=label, **own)
        for x, ratio, status, open_ in zip(tokens, ratios, failed, missing, strict=True):
            if not name and ratio is None:
                axes.text(x, 1, status, color="#b3261e", size=8, ha="center", va="bottom")
            elif not name and open_:
                axes.plot(x, ratio, marker="o", markerfacecolor="white", **own)
    _log_log(axes, "", "tokens", "x the fastest dense kernel")
    axes.axhline(1, color=INK, linewidth=0.8)
    axes.axhspan(1, axes.get_ylim()[1], color=OURS, alpha=0.08, linewidth=0)
    if panel.crossover is not None:
        axes.axvline(panel.crossover, color=OURS, linestyle="--", linewidth=1.0)


def _grid(count: int, size: tuple[float, float]) -> tuple[Any, Sequence[Any]]:
    """Return a figure with `count` panels, and the axes of the panels. At most two panels, each of
    the size `size` in inches, are next to each other."""
    import matplotlib
    from matplotlib.figure import Figure

    names = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    style: dict[str, Any] = dict.fromkeys(names, INK)
    style |= {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}
    columns = min(2, count)
    rows = -(-count // columns)
    with matplotlib.rc_context(style):
        figure = Figure((size[0] * columns, size[1] * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[count:]:
        axes.axis("off")
    return figure, list(grid.flat)


def _by_length(shown, label: str, value: Callable, level: float | None = None):
    """Return a figure of the panels `shown`, which are results of `panels`."""
    figure, grid = _grid(len(shown), (3.6, 2.5))
    for axes, (branch, axis, lines) in zip(grid, shown, strict=False):
        for line in lines:
            first = line[0]
            axes.plot(
                [length(r)[0] for r in line],
                [value(r) for r in line],
                color=COLORS.get(first.implementation, OTHER),
                marker=MARKERS[first.framework],
                label=f"{first.implementation} ({first.framework})",
                markersize=3.5,
                linewidth=0.8,
                alpha=0.85,
            )
        if level is not None:
            axes.axhline(level, color=INK, linewidth=0.6, linestyle=":")
        _log_log(axes, branch, axis, label)
    _legend(figure)
    return figure


def _log_log(axes, title: str, x: str, y: str) -> None:
    """Set scales, labels and grid. The vertical axis spans a factor of at least 4, so that
    noise does not look like a slope and the axis has numbers."""
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    stretch = max(1.0, (4 * low / high) ** 0.5)
    axes.set_ylim(low / stretch, high * stretch)
    subs = (1, 2, 5) if high / low < 100 else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.xaxis.set_major_formatter(
        lambda value, _: f"{value / 1024:g}k" if value >= 1024 else f"{value:g}"
    )
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _labels(axes, title, x, y)


def _labels(axes, title: str, x: str, y: str) -> None:
    """Set title, labels and grid."""
    axes.set_title(title, loc="left", size=9, weight="bold", color=INK)
    axes.set_xlabel(x, size=8)
    axes.set_ylabel(y, size=8)
    axes.grid(color=INK, alpha=0.12, linewidth=0.5)
    axes.minorticks_off()


def _legend(figure, columns: int = 4) -> None:
    """Draw the legend below the panels. Each label occurs once."""
    known = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        known |= dict(zip(labels, handles, strict=True))
    figure.legend(
        handles=[known[label] for label in sorted(known)],
        loc="outside lower left",
        ncols=columns,
        frameon=False,
        labelcolor=INK,
        fontsize=8,
    )


def _saved(figure, title: str, folder: Path) -> Plot:
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=160, facecolor="white")
    return Plot(title, _inline(_svg(figure, name, transparent=True), name), path)


def _svg(figure, name: str, **how: Any) -> str:
    """Return the figure as SVG. Equal values give equal text."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, **how)
    return buffer.getvalue()


def _inline(svg: str, name: str) -> str:
    """Return only the `svg` element, with unique ids and the colour of the text around it."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    # the size of the `svg` element
    svg = re.sub(r' (?:width|height)="[^"]*pt"', "", svg, count=2)
    return svg.replace(INK, "currentColor").strip()
