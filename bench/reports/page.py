"""The report as one HTML page: `page.html` filled in, every text from a record escaped."""

import json
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..harness import process, records
from ..harness.markdown import number
from ..harness.records import Record
from ..lm import curves, watched
from . import crossover, render
from .plots import Plot
from .sources import Report

TEMPLATE = Path(__file__).parent / "page.html"
FILTERS = ("device", "framework", "branch", "implementation", "mode", "status")
HEADINGS = {"Crossover": "From which length is NSA faster than dense attention?"}
LONG = 110  # letters of a note that are shown at once
COLUMNS = (
    ("status", ""),
    ("branch", ""),
    ("implementation", ""),
    ("problem", ""),
    ("ms", "n"),
    ("over dense", "n"),
    ("over portable", "n"),
    ("TFLOP/s", "n"),
    ("error / bound", "n"),
    ("note", ""),
)
LEGEND = (
    "ms: median, below it p20 to p80. Over dense: speed-up over the fastest dense attention "
    "of the same framework and problem. Over portable: over sdpa or xla of the same branch. "
    "Error: the largest beside the oracle, below it its bound; sorted by their quotient. "
    "Problem: below it dtype, input and the values of NSAConfig in their order."
)


def html(report: Report, plots: Sequence[Plot]) -> str:
    """The whole page; nothing in it is fetched from elsewhere."""
    sections = {
        "Crossover": _crossover(report),
        "Thresholds": _thresholds(report),
        "Plots": _plots(plots),
        "Rows": _rows(report) if report.rows else "",
        "Training": _training(report),
        "Environment": _environment(report),
    }
    parts, links = [], []
    for name, inside in sections.items():
        if inside:
            at = name.lower()
            links.append(f'<a href="#{at}">{name}</a>')
            title = HEADINGS.get(name, name)
            parts.append(f'<section id="{at}"><h2>{title}</h2>{inside}</section>')
    counts = Counter(record.status for record in report.records)
    tally = "".join(f"<li><b>{n}</b>{status}</li>" for status, n in counts.most_common())
    times = [record.time for record in report.records if record.time]
    about = (
        f"{len(report.rows)} rows"
        + (f", {min(times)[:10]} to {max(times)[:10]}" if times else "")
    ) + ". A path is compared with an oracle before it is timed; a row that failed has no time."
    return string.Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(report.title),
        about=escape(about),
        tally=tally,
        nav="".join(links),
        sections="\n".join(parts),
    )


def _crossover(report: Report) -> str:
    found = crossover.panels(report.records, report.training_lines)
    return "".join(crossover.figure(device, each) for device, each in found.items())


def _cell(label: str, text: str, value: Any = "", kind: str = "", sub: str = "") -> str:
    """A cell; `value` is what it is sorted by, `label` its column's name on a narrow screen."""
    value = "" if value is None else value
    below = f'<span class="sub">{escape(sub)}</span>' if sub else ""
    data = f'data-label="{escape(label)}" data-v="{escape(str(value))}"'
    return f'<td class="{kind}" {data}><span>{text}{below}</span></td>'


def _rows(report: Report) -> str:
    found = report.records
    gains = [render.speed_ups(found, over) for over in ("dense", "portable")]
    lines = [
        _row(where, record, *both)
        for (where, record), *both in zip(report.rows, *gains, strict=True)
    ]
    head = "".join(
        f'<th scope="col" class="{kind}"><button type="button">{escape(name)}</button></th>'
        for name, kind in COLUMNS
    )
    return (
        f"{_form(found)}"
        '<div class="scroll" tabindex="0" role="region" aria-label="Measurements">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
        f'<p class="soft">{escape(LEGEND)}</p>'
    )


def _form(found: Sequence[Record]) -> str:
    fields = []
    for name in FILTERS:
        values = sorted({getattr(record, name) for record in found})
        options = "".join(f"<option>{escape(value)}</option>" for value in values)
        fields.append(
            f'<label>{name}<select name="{name}"><option value="">all</option>{options}'
            "</select></label>"
        )
    return (
        f'<form id="filter" role="search">{"".join(fields)}'
        '<label class="search">text<input type="search" name="text" autocomplete="off" '
        'placeholder="words that a row must have"></label>'
        '<button type="reset">show all</button></form>'
        '<p id="count" class="soft" role="status"></p>'
    )


def _row(where: str, record: Record, dense: float | None, portable: float | None) -> str:
    r = record
    data = "".join(f' data-{name}="{escape(getattr(r, name))}"' for name in FILTERS)
    shape = f"B={r.B} T={r.T}" + (f" S={r.S}" if r.S != r.T else "")
    shape += f" H={r.H}/{r.Hkv} D={r.D}/{r.Dv}"
    config = "/".join(str(value) for value in r.config.values())
    times = r.times_ms
    error = number(r.error_max, ".2g")
    bound = f"of {r.error_bound:.2g}" if r.error_bound else ""
    name, _, line = where.rpartition(":")
    source = f"{Path(name).name}:{line}, {r.bench}, commit {(r.commit or 'unknown')[:9]}"
    note = render.note(r)
    cells: tuple[tuple[Any, ...], ...] = (
        (f'<span class="badge {r.status}">{r.status}</span>', r.status, "t"),
        (escape(r.branch), r.branch, "t", r.mode),
        (escape(r.implementation), r.implementation, "t", r.framework),
        (escape(shape), f"{r.T} {shape}", "problem", f"{r.dtype} {r.input} {config}"),
        (
            number(times and times[0], ".4g"),
            times and times[0],
            "n",
            f"{times[1]:.3g} to {times[2]:.3g}" if times else "",
        ),
        (number(dense, ".3g", "x"), dense, "n"),
        (number(portable, ".3g", "x"), portable, "n"),
        (number(r.tflops if times else None, ".3g"), r.tflops if times else None, "n"),
        (error, r.bound_share, "n", bound),
        (_folded(note), note, "note", source),
    )
    named = (_cell(name, *cell) for (name, _), cell in zip(COLUMNS, cells, strict=True))
    return f"<tr{data}>{''.join(named)}</tr>"


def _folded(text: str) -> str:
    """A long text shows its beginning and opens."""
    if len(text) <= LONG:
        return escape(text)
    begin = text[:LONG].rpartition(" ")[0] or text[:LONG]
    rest = text[len(begin) :]
    return f"<details><summary>{escape(begin)} ...</summary>{escape(rest)}</details>"


def _thresholds(report: Report) -> str:
    cards = []
    for device in report.devices:
        parts = [f"<h3>{escape(device.device)}</h3>"]
        for name, value in device.runtime.given().items():
            about = device.evidence.get(name, {})
            parts.append(
                f'<p><code>runtime.{name}</code> <span class="big">{escape(str(value))}</span> '
                f"<span class=soft>margin {escape(str(about.get('margin', '?')))}, "
                f"{escape(str(about.get('rows', '?')))} rows</span></p>"
            )
            if about:
                facts = {k: v for k, v in about.items() if k not in ("margin", "rows")}
                parts.append(f"<details><summary>evidence</summary>{_facts(facts)}</details>")
        for rule in device.policy:
            fate = "allowed" if rule.allowed else "not allowed"
            text = f"{rule.kernel} {fate} for {', '.join(rule.steps)} since {rule.since}"
            parts.append(f"<p><b>{escape(text)}</b>: {escape(rule.reason)}</p>")
        parts.append(f'<p class="soft">from <code>{escape(device.source)}</code></p>')
        cards.append(f'<div class="card">{"".join(parts)}</div>')
    known = {device.device for device in report.devices}
    for name in sorted({r.device for r in report.records} - known - {"cpu"}):
        cards.append(
            f'<div class="card"><h3>{escape(name)}</h3><p class="soft">No file in '
            "<code>configs/devices/</code>: automatic choice takes the first kernel that can "
            f"run. <code>python -m {process.module('bench.tune_thresholds')}</code> writes one "
            "from records."
            "</p></div>"
        )
    return "".join(cards)


def _facts(values: dict[str, Any]) -> str:
    """A mapping as a list of terms; what is nested as JSON."""
    items = []
    for name, value in values.items():
        listed = value if isinstance(value, list) else [value]
        text = "<br>".join(
            escape(v if isinstance(v, str) else json.dumps(v, ensure_ascii=False, default=str))
            for v in listed
        )
        items.append(f"<dt>{escape(str(name))}</dt><dd>{text}</dd>")
    return f"<dl>{''.join(items)}</dl>"


def _plots(plots: Sequence[Plot]) -> str:
    figures = (
        f'<figure><figcaption>{escape(plot.title)}</figcaption><div tabindex="0" role="img" '
        f'aria-label="{escape(plot.title)}">{plot.svg}</div></figure>'
        for plot in plots
    )
    inside = "".join(figures)
    return f'<div class="plots">{inside}</div>' if inside else ""


def _training(report: Report) -> str:
    parts = []
    for path, lines in report.training:
        parts.append(f"<h3>{escape(records.shown(path))}</h3>")
        found = [*curves.verdicts(lines), *watched.verdicts(path, lines)]
        parts.append(_verdicts(found))
        tables = curves.run_table(lines), curves.speed_table(lines), watched.gate_table(lines)
        for names, rows in tables:
            if rows:
                parts.append(_table(names, rows))
    same = watched.parity(report.training)
    if same:
        parts += ["<h3>Several devices</h3>", _verdicts(same)]
    return "".join(parts)


def _verdicts(found: Iterable[curves.Verdict]) -> str:
    items = "".join(f"<li>{escape(str(each))}</li>" for each in found)
    return f"<ul>{items}</ul>" if items else ""


def _environment(report: Report) -> str:
    found = report.environments
    if not found:
        return ""
    rows = [[str(value) for value in about.values()] for about in found]
    files = "".join(f"<li><code>{escape(records.shown(f))}</code></li>" for f in report.files)
    return f"{_table(list(found[0]), rows)}<h3>Files</h3><ul>{files}</ul>"


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    label = escape(", ".join(names[:3]))
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">'
        f'<table class="plain"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
