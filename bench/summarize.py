"""The table of a CSV file of `bench.decode`: what of a step each branch takes, and the reads.

    python -m bench.summarize bench/results/<time>/decode.csv

The shares are of `ms_total`; they need not add up to 100 %, since each branch was timed alone, and
one above 100 % has a `*`.
A row that was not measured is shown with its status. A damaged file is refused with the line
and the column.
"""

import csv
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from absl import app

from .harness import cli

TIMES = ("ms_total", "ms_cmp", "ms_sel", "ms_win")
READS = ("reads_actual", "reads_expected", "reads_actual_decode", "reads_expected_decode")
NEEDED = ("S", *TIMES, *READS)


def read(path: Path) -> list[dict[str, str]]:
    """The rows of the file; those that count have a number in every needed column.

    Raises:
      ValueError: a column is missing, a row is not whole, or a cell is no number over 0.
    """
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file, restkey="", strict=True)
        missing = [name for name in NEEDED if name not in (rows.fieldnames or ())]
        if missing:
            raise ValueError(f"{path}:1: columns {missing} are missing, got {rows.fieldnames}")
        found = []
        for row in _whole(rows, path):
            where = f"{path}:{rows.line_num}"
            if "" in row or None in row.values():
                cells = len(row.get("") or ()) + sum(
                    value is not None for value in row.values()
                )
                cells -= "" in row
                expected = len(rows.fieldnames or ())
                raise ValueError(f"{where}: expected {expected} cells, got {cells}")
            for name in NEEDED if row.get("status", "ok") == "ok" else ("S",):
                _number(row[name], f"{where}: {name}")
            found.append(row)
    if not found:
        raise ValueError(f"{path}: expected rows below the header, got none")
    return found


def _whole(rows: csv.DictReader, path: Path) -> Iterator[dict[str, str]]:
    try:
        yield from rows
    except csv.Error as error:
        raise ValueError(f"{path}:{rows.line_num}: {error}") from None


def _number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{where} must be a number, got {text!r}") from None
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{where} must be a number over 0, got {text!r}")
    return value


def table(rows: Sequence[dict[str, str]]) -> str:
    """The columns `S total cmp% sel% win% reads(dec) reads(tot)`."""
    titles = ("S", "total", "cmp%", "sel%", "win%", "reads(dec)", "reads(tot)")
    widths = (8, 9, 6, 6, 6, 14, 18)
    lines = [" ".join(title.rjust(w) for title, w in zip(titles, widths, strict=True))]
    for row in rows:
        status = row.get("status", "ok")
        if status != "ok":
            lines.append(f"{row['S'].rjust(widths[0])} {status}: {row.get('reason', '')}")
            continue
        total = float(row["ms_total"])
        cells = [row["S"], f"{total:.3f}"]
        shares = [float(row[name]) / total for name in TIMES[1:]]
        cells += [f"{100 * share:.1f}{'*' if share > 1 else ''}" for share in shares]
        for kind in ("_decode", ""):
            actual, expected = (float(row[f"reads_{x}{kind}"]) for x in ("actual", "expected"))
            cells.append(f"{actual:g}/{expected:g}")
        lines.append(" ".join(cell.rjust(w) for cell, w in zip(cells, widths, strict=True)))
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    if len(argv) != 2:
        raise app.UsageError(f"expected one CSV file, got {argv[1:]}")
    print(table(read(Path(argv[1]))))
    return 0


if __name__ == "__main__":
    cli.run(main, arguments=True)
