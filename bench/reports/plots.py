"""Plots of records against length: milliseconds, speed-up, and the answers of `crossover`.

A line joins rows of one implementation whose status is ok and whose problems differ only in the
length. Problems that were measured at only one length are not plotted. A figure of the report is
saved as PNG on white, and as SVG in the text colour of the page.
"""

import dataclasses
import io
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

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


def panels(
    records: Iterable[Record], value: Callable
) -> Iterator[tuple[str, str, list[list[Record]]]]:
    """Yield the branch, the axis and the lines of each panel, in the order of the branches. A line
    has the timed rows with a value that differ only in the length, by length. Lines with fewer than
    two lengths are left out.
    """
    found: dict[tuple[str, str], dict[tuple, list[Record]]] = {}
    for record in records:
        if record.branch in BRANCHES and record.times_ms and value(record):
            _, axis = length(record)
            shape = dataclasses.replace(record, T=0, S=0, input_sha256=None)
            if axis != "tokens":
                shape = dataclasses.replace(shape, config=record.config | {"num_selected": 0})
            key = *render.problem_of(shape), record.implementation
            found.setdefault((record.branch, axis), {}).setdefault(key, []).append(record)
    for branch, axis in sorted(found, key=lambda x: BRANCHES.index(x[0])):
        lines = [sorted(line, key=length) for line in found[branch, axis].values()]
        if lines := [line for line in lines if length(line[0]) < length(line[-1])]:
            yield branch, axis, lines


def plots(records: Sequence[Record], folder: Path) -> list[Plot]:
    """Return all plots of each device and mode, and write the PNG files to `folder`."""
    over = dict(zip(map(id, records), render.speed_ups(records), strict=True))
    times = lambda r: r.time_ms
    gains = lambda r: None if r.branch == "dense" else over[id(r)]
    found = []
    for title, value, label in (
        ("Time", times, "ms"),
        ("Speed-up over dense attention", gains, "x dense"),
    ):
        for device in sorted({r.device for r in records}):
            for mode in ("forward", "fwdbwd", "backward", "decode"):
                some = [r for r in records if (r.device, r.mode) == (device, mode)]
                if shown := [*panels(some, value)]:
                    figure = _by_length(shown, label, value)
                    found.append(_saved(figure, f"{title}: {device}, {mode}", folder))
    return found


def answer(panel: Panel, number: int) -> str:
    """Return the SVG of one answer. `number` is the index of the answer on the page."""
    figure = _figure([panel], (3.0, 2.4), _draw, columns=2)
    name = f"answer{number}"
    return _inline(_svg(figure, name, transparent=True), name)


def answers(each: Iterable[Panel]) -> str:
    """Return the SVG of all answers that can be drawn, on white."""

    def draw(axes, panel: Panel) -> None:
        _draw(axes, panel)
        axes.set_title(f"{panel.name.capitalize()}: {panel.answer}", loc="left", size=8)

    figure = _figure([panel for panel in each if panel.drawn], (3.6, 2.4), draw)
    return _svg(figure, "crossover", facecolor="white")


def distances(found: Mapping[str, Mapping[str, Any]], places: Sequence[int]) -> str:
    """Return the SVG of gains by distance on white. `found` has the values of all runs for each
    of `places`, in nats per token, by title and label. Bars show the range of the runs.
    """

    def draw(axes, item: tuple[str, Mapping[str, Any]]) -> None:
        title, curves = item
        for label, runs in curves.items():
            color = {"dense": OTHER, "16 blocks": COLORS["fa2"]}.get(label, OURS)
            means, least, most = (of(runs, axis=1) for of in (np.mean, np.min, np.max))
            how = {"marker": "o", "markersize": 3, "capsize": 2, "linewidth": 1.2}
            bars = means - least, most - means
            axes.errorbar(places, means, yerr=bars, label=label, color=color, **how)
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, map(str, places), size=7)
        _labels(axes, title, "tokens back", "nats per token")

    figure = _figure(found.items(), (3.6, 2.4), draw)
    return _svg(figure, "distance", facecolor="white")


def needles(found: Mapping[str, Mapping[str, Sequence[float]]], depths: Sequence[float]) -> str:
    """Return the SVG of heat maps on white: the share of needles that each model of `found` finds,
    by number of tokens and by depth. Depth 0 is the first token of a row.
    """

    def draw(axes, item: tuple[str, Mapping[str, Sequence[float]]]) -> None:
        model, by_length = item
        shares = np.array([*by_length.values()]).T  # [depths, lengths]
        axes.pcolormesh(shares, cmap="Greens", vmin=0, vmax=1)
        axes.invert_yaxis()
        how = {"ha": "center", "va": "center", "size": 6}
        for (row, column), share in np.ndenumerate(shares):
            ink = "white" if share > 0.6 else INK
            axes.text(column + 0.5, row + 0.5, f"{share:.1f}", color=ink, **how)
        down, across = (np.arange(count) + 0.5 for count in shares.shape)
        axes.set_xticks(across, [f"{int(n) // 1024}k" for n in by_length], size=7)
        axes.set_yticks(down, map(str, depths), size=7)
        _labels(axes, model, "tokens of a row", "depth")

    return _svg(_figure(found.items(), (2.4, 2.2), draw), "needle", facecolor="white")


def _draw(axes, panel: Panel) -> None:
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


def _figure(
    items: Collection, size: tuple[float, float], draw: Callable, columns: int = 4
) -> Any:
    """Return a figure of panels. `draw(axes, item)` draws the panel of an item. At most two panels,
    each of the size `size` in inches, are next to each other. The legend has `columns` columns and
    each label once.
    """
    import matplotlib
    from matplotlib.figure import Figure

    names = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    style: dict[str, Any] = dict.fromkeys(names, INK)
    style |= {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}
    across = min(2, len(items))
    down = -(-len(items) // across)
    with matplotlib.rc_context(style):
        figure = Figure((size[0] * across, size[1] * down), layout="constrained")
        grid = figure.subplots(down, across, squeeze=False).flat
    for axes in grid[len(items) :]:
        axes.axis("off")
    known = {}
    for axes, item in zip(grid, items, strict=False):
        draw(axes, item)
        handles, labels = axes.get_legend_handles_labels()
        known |= dict(zip(labels, handles, strict=True))
    if known:
        handles = [known[label] for label in sorted(known)]
        figure.legend(
            handles=handles,
            loc="outside lower left",
            ncols=columns,
            frameon=False,
            labelcolor=INK,
            fontsize=8,
        )
    return figure


def _by_length(shown: Sequence[tuple], label: str, value: Callable) -> Any:
    """Return a figure of the panels `shown`, which are results of `panels`."""

    def draw(axes, panel: tuple[str, str, list[list[Record]]]) -> None:
        branch, axis, lines = panel
        how = {"markersize": 3.5, "linewidth": 0.8, "alpha": 0.85}
        for line in lines:
            name, framework = line[0].implementation, line[0].framework
            across, down = ([f(r) for r in line] for f in (lambda r: length(r)[0], value))
            own = {"color": COLORS.get(name, OTHER), "marker": MARKERS[framework]}
            axes.plot(across, down, label=f"{name} ({framework})", **own, **how)
        if label != "ms":
            axes.axhline(1.0, color=INK, linewidth=0.6, linestyle=":")
        _log_log(axes, branch, axis, label)

    return _figure(shown, (3.6, 2.5), draw)


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
