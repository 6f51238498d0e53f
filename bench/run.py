"""Prints and records the rows that commands measure. For each command, `lines.yaml` has the form
of a printed line.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from . import tables
from .harness import cli, records
from .harness.records import Values
from .harness.timed_problem import Problem, named

CALLS = [Problem(name=name, **sizes) for name, sizes in named("calls").items()]
EAGER = [p for p in CALLS if p.framework == "torch" and not p.graph]


def rows(
    bench: str,
    own: Any,
    made: Iterable[Values],
    show: Callable[[Values], Values] = lambda row: {},
    kept: str | None = None,
    out: Path | None = None,
) -> list[str]:
    """Print each row as soon as it is measured and append its record to a file, since another
    process may end this process. Return the statuses.

    Args:
      bench: Name of the command.
      own: Flags of the command.
      made: The rows, as fields of records.
      show: Function that returns values of the printed line in addition to the values of the row.
      kept: The file in the device's folder to which `--save_records` also appends, by default no
        file.
      out: The file to which records are appended. Defaults to `--out`.
    """
    statuses = []
    for row in made:
        status = row.get("status", "ok")
        fate = {"fate": None if status == "ok" else f"{status}: {row['reason']}"}
        print(tables.line(bench, row | fate | show(row)), flush=True)
        record = records.record(bench, own.commit, **row)
        if path := out or own.out:
            records.append(path, [record])
        if kept and own.save_records:
            records.keep([record], kept)
        statuses.append(status)
    return statuses


def variants(own: Any, kernel: str, name: str, times: Mapping[str, float]) -> None:
    """Print named times and append their records to `--out`."""
    print(f"{name}: {', '.join(f'{x} {time:.3f}' for x, time in times.items())}", flush=True)
    commit = records.environment(own.commit)["commit"]
    if own.out:
        made = [records.variant(kernel, x, name, time, commit) for x, time in times.items()]
        records.append(own.out, made)


def chosen(own: Any, problems: Iterable[Problem], unit: str = "") -> Iterator[Problem]:
    """Yield the `problems` that `--only` names. The device is printed first if the lines of the
    command are times in `unit`.

    Raises:
      NotImplementedError: There is no GPU.
      ValueError: `--only` names no problem.
    """
    import torch

    known = {p.name: p for p in problems}
    names = cli.chosen(own.only, known)
    if not torch.cuda.is_available():
        raise NotImplementedError("a Hopper GPU is needed")
    if unit:
        print(f"{torch.cuda.get_device_name()}, {unit}", flush=True)
    for name in names:
        yield known[name]
        torch.cuda.empty_cache()
