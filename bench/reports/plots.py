"""Plots of records against length: milliseconds, speed-up, and the roofline.

Every point is a row with status ok. Lines join rows of one implementation whose problems
differ in nothing but the length; what was measured at one length is in the tables only. A
figure is saved as PNG on white, and as SVG whose ink is the colour of the text around it.
"""

import dataclasses
import io
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..harness import cost
from ..harness.records import Record
from . import render

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
}
OTHER = "#a13d87"
MARKERS = {"jax": "o", "torch": "^"}
INK = "#010203"  # becomes currentColor


@dataclasses.dataclass(frozen=True)
class Plot:
    """A figure as SVG text and where its PNG is."""

    title: str
    svg: str
    png: Path


def length(record: Record) -> tuple[int, str]:
    """What the row is drawn over, and its name: `bench.selection` varies the selected keys."""
    if record.bench == "selection":
        keys = record.config["num_selected"] * record.config["select_block"]
        return keys, "selected keys a query"
    return record.S, "tokens"


def lines_of(rows: Sequence[Record], value: Callable) -> list[list[Record]]:
    """The rows of each line, by length: those with a value, of two lengths at least."""
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
    """Branch, axis and lines of each panel, in the order of the branches."""
    for branch in BRANCHES:
        some = [r for r in records if r.branch == branch]
        for axis in dict.fromkeys(length(r)[1] for r in some):
            lines = lines_of([r for r in some if length(r)[1] == axis], value)
            if lines:
                yield branch, axis, lines


def plots(records: Sequence[Record], folder: Path) -> list[Plot]:
    """All plots of each device and mode, the PNG files under `folder`."""
    times, gains, rooflines = [], [], []
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
            known = lines_of(some, lambda r: r.tflops and r.bytes and r.useful_flops)
            rows = [r for line in known for r in line]
            if rows:
                rooflines.append(_saved(_roofline(rows, device), f"Roofline: {name}", folder))
    return [*times, *gains, *rooflines]


def _figure(**options) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style = {"font.size": 8, "svg.fonttype": "none", "axes.spines.top": False}
    style |= {"axes.spines.right": False}
    names = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    style |= dict.fromkeys(names, INK)
    with pyplot.rc_context(style):
        return pyplot.subplots(layout="constrained", **options)


def _by_length(shown, label: str, value: Callable, level: float | None = None):
    """The panels `shown`, as `panels` gives them."""
    columns = min(2, len(shown))
    height = -(-len(shown) // columns)
    figure, grid = _figure(
        nrows=height, ncols=columns, figsize=(3.6 * columns, 2.3 * height + 0.5), squeeze=False
    )
    for axes in grid.flat[len(shown) :]:
        axes.axis("off")
    for axes, (branch, axis, lines) in zip(grid.flat, shown, strict=False):
        for line in lines:
            at = [(length(r)[0], value(r)) for r in line]
            style = {"color": _color(line[0]), "marker": MARKERS[line[0].framework]}
            axes.plot(
                *zip(*at, strict=True), markersize=3.5, linewidth=0.8, alpha=0.85, **style
            )
        if level is not None:
            axes.axhline(level, color=INK, linewidth=0.6, linestyle=":")
        _log_log(axes, branch, axis, label)
    _legend(figure, [r for _, _, lines in shown for line in lines for r in line])
    return figure


def _color(record: Record) -> str:
    return COLORS.get(record.implementation, OTHER)


def _log_log(axes, title: str, x: str, y: str) -> None:
    """Scales, labels and grid; the vertical axis spans a factor of 4 at least, so that noise is
    no slope and a number stands beside it."""
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    stretch = max(1.0, (4 * low / high) ** 0.5)
    axes.set_ylim(low / stretch, high * stretch)
    subs = (1, 2, 5) if high / low < 100 else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.set_title(title, loc="left", size=9, weight="bold", color=INK)
    axes.set_xlabel(x, size=8)
    axes.set_ylabel(y, size=8)
    axes.grid(color=INK, alpha=0.12, linewidth=0.5)
    axes.xaxis.set_major_formatter(lambda value, _: _short(value))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()


def _short(value: float) -> str:
    return f"{value / 1024:g}k" if value >= 1024 else f"{value:g}"


def _legend(figure, rows: Sequence[Record]) -> None:
    from matplotlib.lines import Line2D

    known = dict.fromkeys((r.implementation, r.framework) for r in rows)
    handles = [
        Line2D(
            [],
            [],
            color=COLORS.get(name, OTHER),
            marker=MARKERS[framework],
            markersize=3.5,
            linewidth=0.8,
            label=f"{name} ({framework})",
        )
        for name, framework in sorted(known)
    ]
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=4,
        frameon=False,
        labelcolor=INK,
        fontsize=8,
    )


def _roofline(rows: Sequence[Record], device: str):
    """Achieved TFLOP/s over useful FLOPs a byte, below what the device's data sheet allows."""
    figure, axes = _figure(figsize=(7.2, 4.2))
    at = [((r.useful_flops or 0) / (r.bytes or 1), r.tflops or 0.0) for r in rows]
    for record, (x, y) in zip(rows, at, strict=True):
        style = {"color": _color(record), "marker": MARKERS[record.framework]}
        axes.plot(x, y, linestyle="", markersize=3.5, alpha=0.85, **style)
    known = cost.limits(device)
    if known:
        peak, slope = known.flops_16bit / 1e12, known.bytes_per_s / 1e12
        corner = peak / slope
        left = min(corner, *(x for x, _ in at)) / 2
        right = max(corner, *(x for x, _ in at)) * 2
        roof = {"color": INK, "linewidth": 1.0}
        axes.plot([left, corner, right], [slope * left, peak, peak], **roof)
        text = {"color": INK, "size": 8, "va": "bottom"}
        axes.text(right, peak * 1.1, f"{peak:g} TFLOP/s, 16 bit", ha="right", **text)
        middle = (left * corner) ** 0.5
        axes.text(middle, slope * middle * 1.3, f"{slope:g} TB/s", ha="right", **text)
    _log_log(axes, "", "useful FLOPs a byte of compulsory traffic", "TFLOP/s")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _legend(figure, rows)
    return figure


def _saved(figure, title: str, folder: Path) -> Plot:
    from matplotlib import pyplot

    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=160, facecolor="white")
    buffer = io.StringIO()
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    pyplot.close(figure)
    return Plot(title, _inline(buffer.getvalue(), name), path)


def _inline(svg: str, name: str) -> str:
    """The `svg` element alone, its ids its own, its ink the colour of the text around it."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return svg.replace(INK, "currentColor").strip()
