"""Makes tables and plots from records, and fills the templates in `bench/reports`."""

import csv
import dataclasses
import functools
import io
import math
import operator
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from .. import tables
from ..harness.markdown import commits, length, number
from ..harness.records import FIELDS, Record

COLUMNS = tuple(tables.KINDS["compared"]["cells"])
NUMERIC = frozenset(COLUMNS[COLUMNS.index("error") : -1])
PORTABLE = ("sdpa", "xla")
type Over = Literal["dense", "portable", "masked"]
# The names of dense kernels in tables and charts. torch's own SDPA runs `flash`.
KERNEL_NAMES = {
    "cudnn": "cuDNN",
    "flash": "FA-2 (torch's bundled copy)",
    "flash_attn": "FA-2 (flash-attn)",
    "fa4": "FA-4 (flash-attn-4)",
}


@functools.cache
def _templates() -> Any:
    """Return the templates of this folder. All text in a page is escaped."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    found: Any = jinja2.Environment(
        loader=loader,
        autoescape=lambda name: name is None or name.endswith(".html"),
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    found.filters.update(number=number, tokens=length, commits=commits)
    found.globals.update(filled=filled, cell=tables.cell)
    return found


def filled(name: str, **values: Any) -> str:
    """Return a template with its values."""
    return _templates().get_template(name).render(values)


def problem_of(record: Record) -> tuple[str, ...]:
    """Return the common properties of comparable rows as text, without the branch."""
    names = ("device", "bench", "framework", "mode", "B", "T", "S", "H", "Hkv", "D", "Dv")
    names += ("dtype", "config", "input", "input_sha256", "commit")
    return tuple(repr(getattr(record, name)) for name in names)


def speed_ups(records: Sequence[Record], over: Over = "dense") -> list[float | None]:
    """Return the time of a baseline divided by the time of each row. The baseline is the fastest
    dense row of the same problem, the portable path (`sdpa`, `xla`) of the same branch, or one call
    of SDPA with the whole mask. A value is None if the parity of the row failed or was not judged,
    or if the row or the baseline has no time.
    """

    def key(record: Record) -> tuple:
        return *problem_of(record), over == "dense" or record.branch

    names = {"portable": PORTABLE, "masked": ("masked",)}
    base: dict[tuple, float] = {}
    for r in records:
        dense = r.branch == "dense"
        is_base = dense if over == "dense" else not dense and r.implementation in names[over]
        if is_base and r.times_ms:
            base[key(r)] = min(r.times_ms[0], base.get(key(r), math.inf))
    return [
        base[key(r)] / r.times_ms[0]
        if r.times_ms and r.extra.get("judged", True) and key(r) in base
        else None
        for r in records
    ]


def judged(records: Iterable[Record], *names: str) -> dict[tuple[str, ...], list[Record]]:
    """Return the records with a parity verdict, grouped by path. The path consists of framework,
    branch, implementation and pass. In the keys, the fields `names` precede the path.
    """
    groups: dict[tuple[str, ...], list[Record]] = {}
    path = operator.attrgetter(*names, "framework", "branch", "implementation", "mode")
    for r in records:
        if r.branch == "dense" or not r.extra.get("judged", True):
            continue
        if r.status not in ("unsupported", "oom"):
            groups.setdefault(path(r), []).append(r)
    return dict(sorted(groups.items()))


def note(record: Record) -> str:
    """Return the note of a row. The note has the row's reason, the number of rows whose selection
    differs, and the implementations that could not run.
    """
    names = (name.rpartition(".")[2] for name in record.refused)
    return filled("note.txt.jinja", r=record, names=names)


def heading(records: Sequence[Record]) -> str:
    """Return the lines above a table. The lines have the device, the problem and the versions of
    the rows, and explain the columns.
    """
    return filled("heading.txt.jinja", records=records)


def markdown(records: Sequence[Record]) -> str:
    """Return one table of `records`, padded for reading as plain text, with the notes below
    it."""
    notes, lines = list(dict.fromkeys(filter(None, map(note, records)))), []
    for record, speed_up in zip(records, speed_ups(records), strict=True):
        said, extra = note(record), record.extra_peak_bytes
        about: tables.Line = {"speed_up": speed_up}
        about |= {"extra_mib": "n/a" if extra is None else f"{extra / 2**20:.1f}"}
        about["note"] = f"[{notes.index(said) + 1}]" if said else ""
        lines.append(dataclasses.asdict(record) | about)
    rows = tables.rows("compared", lines)
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in COLUMNS}
    titles = dict(zip(COLUMNS, COLUMNS, strict=True))
    about = {"widths": widths, "numeric": NUMERIC, "head": heading(records)}
    text = filled("compared.md.jinja", rows=[titles, *rows], notes=notes, **about)
    return text.rstrip() + "\n"


def csv_text(records: Sequence[Record]) -> str:
    """Return every field of every record, and its speed-up, as CSV."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*FIELDS, "speed_up"])
    for record, speed_up in zip(records, speed_ups(records), strict=True):
        writer.writerow([*(getattr(record, name) for name in FIELDS), speed_up])
    return buffer.getvalue()


def plot(records: Sequence[Record], path: Path) -> None:
    """Plot the milliseconds of each branch and implementation on a logarithmic axis. Bars span
    p20 to p80.
    """
    from matplotlib.figure import Figure

    timed = [record for record in records if record.times_ms]
    figure = Figure(figsize=(9, 1.5 + 0.28 * max(len(timed), 1)))
    axes = figure.subplots()
    colors = {"jax": "tab:blue", "torch": "tab:orange"}
    times = np.array([r.times_ms for r in timed]).reshape(-1, 3)
    ms, p20, p80 = times.T
    places = np.arange(len(timed))
    axes.barh(places, ms, color=[colors[r.framework] for r in timed], xerr=[ms - p20, p80 - ms])
    for place, (time, _, end) in enumerate(times):
        axes.text(end * 1.05, place, f"{time:.3g}", va="center", size=8)
    axes.set_yticks(places, [f"{r.branch}  {r.framework} {r.implementation}" for r in timed])
    axes.invert_yaxis()
    if timed:
        axes.set_xscale("log")
        axes.margins(x=0.15, y=0.01)
    axes.set_xlabel("ms (median; bar: p20 to p80)")
    title = heading(records).splitlines()
    axes.set_title(f"{title[0]}\n{title[1]}", size=9, loc="left")
    figure.savefig(path, dpi=150, bbox_inches="tight")
