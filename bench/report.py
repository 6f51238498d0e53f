"""Writes an HTML page, Markdown and plots from records.

    python -m bench.report bench/records/*/*.jsonl --out bench/results/report

The command writes `report.html` (one self-contained file), `report.md` (environment, parity,
speed-ups by length, thresholds) and the plots as PNG. The first chart of the page shows from
which length NSA is faster than dense attention (`reports.crossover`). Failed rows are included
with their reason and without a speed-up. Files of `bench.train` become tables of runs.
"""

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from nsa_core import policy

from .harness import cli, process, records
from .harness.records import Values
from .lm import curves, watched
from .reports import crossover, plots, render
from .reports.sources import Report, read

FLAGS = cli.define(
    flags.FlagValues(),
    out=(str, "Folder for the report, which must have no report.md and no report.html."),
    title=(str, "Title of the report; default: the devices of the records."),
)


def about(report: Report) -> Values:
    """Return what both forms of the report show."""
    return {
        "report": report,
        "charts": crossover.panels(report.records, report.training_lines),
        "training": [
            (path, lines, [*curves.verdicts(lines), *watched.verdicts(path, lines)])
            for path, lines in report.training
        ],
        "several": watched.parity(report.training),
        "files": [*map(records.shown, report.files)],
    }


def html(report: Report, figures: Sequence[plots.Plot]) -> str:
    """Return the page `report.html`, which loads no other files."""
    gains = (render.speed_ups(report.records, over) for over in ("dense", "portable"))
    number = itertools.count()  # makes the ids of the drawings different
    return render.filled(
        "page.html",
        **about(report),
        shown=records.shown,
        tables=(curves.run_table, curves.speed_table, watched.gate_table),
        drawing=lambda panel: plots.answer(panel, next(number)),
        tally=Counter(record.status for record in report.records).most_common(),
        tuner=process.module("bench.tune_thresholds"),
        figures=figures,
        rows=[*zip(report.rows, *gains, strict=True)],
        note_of=render.note,
    )


def markdown(report: Report) -> str:
    """Return `report.md`: environment, parity, speed-ups by length, thresholds, failed rows."""
    devices = []
    for device in dict.fromkeys(record.device for record in report.records):
        some = [record for record in report.records if record.device == device]
        decode = [r for r in some if r.mode == "decode"]
        gains = (render.speed_ups(some, over) for over in ("masked", "portable"))
        failed = Counter(
            (r.status, f"{r.framework} {r.branch} {r.implementation}", r.reason.splitlines()[0])
            for r in some
            if r.status != "ok"
        )
        found = {
            "name": device,
            "environments": {(r.commit, json.dumps(r.versions)): r for r in some}.values(),
            "parity": render.judged(some),
            "rows": [*zip(some, map(plots.length, some), *gains, strict=True)],
            "decode": [*zip(decode, render.speed_ups(decode), strict=True)],
            "failed": sorted(failed.items()),
        }
        devices.append(found)
    how = {"table": watched.markdown, "name_of": lambda path: Path(path).name}
    how |= {"devices": devices, "kernels": policy.KERNELS}
    return render.filled("report.md.jinja", **about(report), **how)


def main(argv: Sequence[str]) -> int:
    if FLAGS.out is None:
        raise ValueError("--out must name a folder for the report")
    folder = Path(FLAGS.out)
    if there := [name for name in ("report.md", "report.html") if (folder / name).exists()]:
        raise ValueError(f"{folder / there[0]} exists; --out must name a new folder")
    report = read(argv[1:], FLAGS.title)
    folder.mkdir(parents=True, exist_ok=True)
    figures = plots.plots(report.records, folder)
    (folder / "report.md").write_text(markdown(report), encoding="utf-8")
    (folder / "report.html").write_text(html(report, figures), encoding="utf-8")
    print(f"{len(report.rows)} rows of {len(report.files)} files: {folder / 'report.html'}")
    return 0


if __name__ == "__main__":
    cli.run(main, FLAGS, arguments=True)
