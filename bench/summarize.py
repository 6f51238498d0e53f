"""Prints a table from a CSV file of `bench.decode`. The table has the share of each branch in the
time of a step, and the number of keys that are read.

    python -m bench.summarize bench/results/<time>/decode.csv

The shares are percentages of `ms_total`. The shares need not add up to 100 %, since each branch
was timed separately. A share above 100 % is marked with `*`. A row that was not measured is shown
with its status. If the file is damaged, the error message names the line and the column.
"""

from collections.abc import Sequence
from pathlib import Path

from absl import app

from . import tables
from .harness import cli, command

TIMES = ("ms_total", "ms_cmp", "ms_sel", "ms_win")
READS = ("reads_actual", "reads_expected", "reads_actual_decode", "reads_expected_decode")
NEEDED = ("S", *TIMES, *READS)


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of the file. Rows whose status is ok must have a number in every needed
    column.

    Raises:
      ValueError: A column is missing, a row is incomplete, or a cell is not a positive number.
    """
    found = command.read_csv(path, NEEDED)
    for where, row in found:
        for name in NEEDED if row.get("status", "ok") == "ok" else ("S",):
            command.positive(row[name], f"{where}: {name}")
    return [row for _, row in found]


def table(rows: Sequence[dict[str, str]]) -> str:
    """Return the columns `S total cmp% sel% win% reads(dec) reads(tot)`."""
    lines = [tables.LINES["summarize"]["head"]]
    for row in rows:
        status, cells = row.get("status", "ok"), {"S": row["S"]}
        if status != "ok":
            cells["fate"] = f"{status}: {row.get('reason', '')}"
        else:
            total, *parts = (float(row[name]) for name in TIMES)
            actual, formula, of_head, formula_of_head = (f"{float(row[x]):g}" for x in READS)
            shares = (f"{100 * x / total:.1f}{'*' if x > total else ''}" for x in parts)
            cells |= {"total": total, **dict(zip(("cmp", "sel", "win"), shares, strict=True))}
            cells |= {
                "decode": f"{of_head}/{formula_of_head}",
                "all": f"{actual}/{formula}",
            }
        lines.append(tables.line("summarize", cells))
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    if len(argv) != 2:
        raise app.UsageError(f"expected one CSV file, got {argv[1:]}")
    print(table(read(Path(argv[1]))))
    return 0


if __name__ == "__main__":
    cli.run(main, arguments=True)
