"""Makes the report as one HTML page from the template `page.html`. Every text from a record is
escaped."""

import itertools
from collections import Counter
from collections.abc import Sequence

from ..harness import process, records
from ..lm import curves, watched
from . import crossover, render
from .plots import Plot, answer
from .sources import Report

FILTERS = ("device", "framework", "branch", "implementation", "mode", "status")
NUMERIC = ("ms", "over dense", "over portable", "TFLOP/s", "error / bound")
COLUMNS = ("status", "branch", "implementation", "problem", *NUMERIC, "note")


def html(report: Report, plots: Sequence[Plot]) -> str:
    """Return the whole page, which loads no other files."""
    found = report.records
    gains = [render.speed_ups(found, over) for over in ("dense", "portable")]
    number = itertools.count()  # makes the ids of the drawings different
    charts = [
        (
            crossover.sentence(device, each),
            [(x, x.drawn and answer(x, next(number))) for x in each],
        )
        for device, each in crossover.panels(found, report.training_lines).items()
    ]
    devices = {record.device for record in found}
    unknown = sorted(devices - {device.device for device in report.devices} - {"cpu"})
    times = [record.time for record in found if record.time]
    span = f", {min(times)[:10]} to {max(times)[:10]}" if times else ""
    sections = {
        "Crossover": charts,
        "Thresholds": report.devices or unknown,
        "Plots": plots,
        "Rows": found,
        "Training": report.training,
        "Environment": found,
    }
    return render.filled(
        "page.html",
        report=report,
        about=f"{len(found)} rows{span}",
        tally=Counter(record.status for record in found).most_common(),
        sections=[name for name, inside in sections.items() if inside],
        charts=charts,
        unknown=unknown,
        tuner=process.module("bench.tune_thresholds"),
        plots=plots,
        filters={name: sorted({getattr(r, name) for r in found}) for name in FILTERS},
        columns=COLUMNS,
        numeric=NUMERIC,
        rows=[
            (record, *both, where, render.note(record))
            for (where, record), *both in zip(report.rows, *gains, strict=True)
        ],
        training=[
            (
                records.shown(path),
                [*curves.verdicts(lines), *watched.verdicts(path, lines)],
                (curves.run_table(lines), curves.speed_table(lines), watched.gate_table(lines)),
            )
            for path, lines in report.training
        ],
        environments=report.environments,
        several=watched.parity(report.training),
        files=[records.shown(name) for name in report.files],
    )
