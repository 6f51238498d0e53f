"""Common parts of the commands that measure attention: flags, output folder, table, exit status.

The module of a command that measures attention begins with `FLAGS = command.flag_values()` and ends
with `cli.run(main, FLAGS)`. The flags are in `flags.FLAGS` only if the command is the main program,
since other commands define flags with the same names.
"""

import csv
import dataclasses
import datetime
import io
import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from nsa_core.config import NSAConfig

from .. import tables
from . import cli, exit_status, problems, records
from .measure import shape_of
from .records import Record, Values

# Short words for sizes, and their meanings.
SEED_FLAGS = {
    "heads": "Query heads.",
    "groups": "Key/value heads.",
    "dk": "Width of queries and keys.",
    "dv": "Width of values.",
    "l": "Number of tokens per compressed token.",
    "d": "Number of tokens between two compressed tokens.",
    "l_sel": "Number of tokens per selection block.",
    "n_sel": "Number of selected blocks per query.",
    "w": "Number of keys in the sliding window.",
}
# Default sizes of most commands.
SIZES: Values = {"heads": 8, "groups": 2, "dk": 64, "dv": 64}
SIZES |= {"l": 32, "d": 16, "l_sel": 64, "n_sel": 16, "w": 512}


def flag_values(
    *, frameworks: bool = False, text: bool = False, **known: Any
) -> flags.FlagValues:
    """Define the flags of a command and return their values.

    Args:
      frameworks: Whether the command has `--framework`.
      text: Whether the inputs may be text, which adds `--input` and `--dim`.
      known: Defaults of the flags of `SEED_FLAGS` that the command has, and other flags in the form
        of `cli.define`.
    """
    common: Values = {
        "out": (str, "New folder for the results; default: bench/results/<time>."),
        "save_records": (
            False,
            "Also append the records to bench/records/<device>/<bench>.jsonl.",
        ),
        "device": ("auto", "Device on which the calls run.", ("auto", "cpu", "cuda")),
        "seed": (0, "Seed of the random arrays.", 0),
        "iters": (int, "Number of samples per row; default: 100, or 0.2 s without a GPU."),
        "warmup": (int, "Number of calls before the first sample."),
        "dtype": (str, "Precision; default: bf16, or f32 without a GPU.", problems.PRECISIONS),
        "csv": (str, "Path of the CSV table; default: <bench>.csv in --out."),
    }
    if text:
        common["input"] = "text", "Kind of input arrays.", problems.KINDS
        common["dim"] = 256, "Width of the model that projects the text."
    if frameworks:
        common["framework"] = "torch", "Framework that runs the calls.", ("torch", "jax")
    sizes = {
        name: (known.pop(name), what, int(name != "w"))
        for name, what in SEED_FLAGS.items()
        if name in known
    }
    return cli.define(**common | sizes | known)


def integers(name: str, values: Iterable[str] | None, default: Sequence[int]) -> list[int]:
    """Return the numbers of a list flag, or `default` if the flag is not given.

    Raises:
      ValueError: A value is not a positive integer, or there are no values.
    """
    given = list(map(str, default)) if values is None else [x.strip() for x in values]
    if not given or not all(x.isdecimal() and int(x) > 0 for x in given):
        raise ValueError(f"{name} must be positive integers, got {','.join(given)!r}")
    return list(map(int, given))


def sampling(
    own: flags.FlagValues, gpu: bool, *, iters: int | None = None, warmup: int | None = None
) -> Values:
    """Return the arguments of `timing` from `--iters` and `--warmup`, or from `iters` and `warmup`
    if the flags are not given. By default, a GPU is timed for 100 samples, and a CPU for 0.2 s.
    """
    iters = iters if own.iters is None else own.iters
    warmup = warmup if own.warmup is None else own.warmup
    how: Values = {} if warmup is None else {"warmup": warmup}
    if iters is None and not gpu:
        return how | {"seconds": 0.2}
    return how | {"iters": iters or 100}


def config_of(own: flags.FlagValues) -> NSAConfig:
    """Return the config of NSA from the short names."""
    names = ("l", "d", "l_sel", "n_sel", "w")
    return NSAConfig.from_seed(**{name: getattr(own, name) for name in names})


def settings(
    own: flags.FlagValues,
    config: NSAConfig,
    gpu: bool,
    *,
    seq_len: int,
    batch: int = 1,
    dtype: Any = None,
    **model,
) -> problems.Settings:
    """Return the settings of a problem with the sizes of the flags. `model` overrides sizes by
    name, and `dtype` is used if `--dtype` is not given.

    Raises:
      ValueError: `heads` is not a multiple of `groups`.
    """
    given = {name: getattr(own, name) for name in SEED_FLAGS if name in own} | model
    if given["heads"] % given["groups"]:
        raise ValueError(
            f"heads must be a multiple of groups={given['groups']}, got {given['heads']}"
        )
    return problems.Settings(
        problems.Model(
            dim=given.get("dim", given["heads"] * given["dk"]),
            n_heads=given["heads"],
            n_kv_groups=given["groups"],
            d_k=given["dk"],
            d_v=given["dv"],
            rope_base=1e4,
        ),
        config,
        problems.Runtime(
            precision=own.dtype or dtype or ("bf16" if gpu else "f32"),
            batch=batch,
            seq_len=seq_len,
            compressed_kernel="auto",
            selected_kernel="auto",
            sliding_kernel="auto",
            on_unsupported="error",
        ),
    )


def folder(out: str | None) -> Path:
    """Return the output folder of a run: `out`, or a folder in `bench/results` with the time in
    its name. If the library is installed, `bench/results` is in the current folder.
    """
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S")
    return Path(out) if out else records.FOLDER.with_name("results") / stamp


def new_folder(out: str | None) -> Path:
    """Return `folder(out)`.

    Raises:
      ValueError: The folder contains files, or is a file.
    """
    path = folder(out)
    if path.is_file() or any(path.glob("*")):
        raise ValueError(f"{path} has files; --out must name a new folder")
    return path


def least(wins: Sequence[tuple[int, bool]]) -> int | None:
    """Return the smallest length from which on every row wins, or None. `wins` has the length of
    each row, and whether the row wins.
    """
    lost = max((length for length, won in wins if not won), default=0)
    return min((length for length, _ in wins if length > lost), default=None)


def speed_up(slow: Record, fast: Record) -> float | None:
    """Return the speed-up, or None if one of the two rows is not valid."""
    if slow.times_ms is None or fast.times_ms is None:
        return None
    return slow.times_ms[0] / fast.times_ms[0]


class Results:
    """The records and the table of one run, which are written and printed row by row."""

    def __init__(self, bench: str, own: flags.FlagValues):
        self.bench, self.save = bench, own.save_records
        self.folder = folder(own.out)
        self.path = self.folder / f"{bench}.jsonl"
        self.table = Path(own.csv) if own.csv else self.folder / f"{bench}.csv"
        for path in (self.path, self.table):
            if path.exists():
                raise ValueError(f"{path} exists; --out and --csv must name new files")
        self.commit = own.commit
        self.done: list[Record] = []
        self.beside: list[Record] = []
        self.rows: list[Values] = []

    def keep(self, made: Sequence[Record], beside: bool = False) -> Sequence[Record]:
        """Write and return records. `beside=True` means that the records are only baselines of
        other rows.
        """
        records.append(self.path, made)
        self.done += made
        if beside:
            self.beside += made
        return made

    def add(self, *, beside: bool = False, **fields: Any) -> Record:
        """Write the record with the given fields."""
        (made,) = self.keep([records.record(self.bench, self.commit, **fields)], beside)
        return made

    def row(self, **values: Any) -> Values:
        """Add a row to the table and print its line. `lines.yaml` describes the row and the line.

        Args:
          values: Records and other values, keyed by the names that the columns use. The status of
            the row is the status of the first record that is not ok, unless `worst` is given.
            `more` has additional columns at the end, and `line` has values that are only printed.
        """
        found = [x for x in values.values() if isinstance(x, Record)]
        failed = [x for x in found if x.status != "ok"]
        worst = values.setdefault("worst", (failed or found)[0])
        cells = tables.columns(self.bench, values) | values.get("more", {})
        bad = "" if worst.status == "ok" else f"  {worst.status}: {worst.reason}"
        faults = "; ".join(f"{x.implementation} {x.status}: {x.reason}" for x in failed)
        about = {"bad": bad, "faults": faults and f"  ({faults})"} | values.get("line", {})
        print(tables.line(self.bench, cells | about), flush=True)
        self.rows.append(cells)
        return cells

    @property
    def columns(self) -> dict[str, None]:
        """The columns of the table, which are known even if there are no rows."""
        return dict.fromkeys(itertools.chain(tables.LINES[self.bench]["csv"], *self.rows))

    def finish(self) -> int:
        """Write the table as CSV, and append the records to the file of their device if
        `--save_records` is given. Return the exit status.
        """
        write_csv(self.table, self.columns, self.rows)
        outside = self.table.parent != self.folder
        print(f"written to {self.folder}" + (f" and {self.table}" if outside else ""))
        if self.save:
            records.keep(self.done, self.path.name)
        asked_for = [record for record in self.done if record not in self.beside]
        status = exit_status.of(asked_for, self.beside)
        if status == exit_status.NOT_MEASURED:
            lost = [record for record in asked_for if record.status != "ok"]
            reasons = "; ".join(dict.fromkeys(record.reason for record in lost))
            print(
                f"{len(lost)} of {len(asked_for)} rows were not measured: {reasons}",
                file=sys.stderr,
            )
        return status


def write_csv(path: Path, columns: Iterable[str], rows: Iterable[Values]) -> None:
    """Write a CSV file with the given columns. Missing values are empty cells."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*columns], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_csv(path: str | Path, needed: Iterable[str]) -> list[tuple[str, dict[str, str]]]:
    """Return the rows of a CSV file that has these columns, each with its location `<path>:<line>`.

    Raises:
      ValueError: The file is not CSV, a column is missing, a row is incomplete, or there is no row.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        lines = [(f"{path}:{reader.line_num}", cells) for cells in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a CSV file: {error}") from None
    names = lines[0][1] if lines else []
    if missing := [name for name in needed if name not in names]:
        raise ValueError(f"{path}:1: columns {missing} are missing, got {names}")
    if not lines[1:]:
        raise ValueError(f"{path} must have rows, got none")
    for where, cells in lines[1:]:
        if len(cells) != len(names):
            raise ValueError(f"{where} must have {len(names)} cells, got {len(cells)}")
    if not text.endswith("\n"):
        raise ValueError(f"{lines[-1][0]} must be a complete line, got a truncated one")
    return [(where, dict(zip(names, cells, strict=True))) for where, cells in lines[1:]]


def positive(text: str, where: str) -> float:
    """Return a number of a CSV file.

    Raises:
      ValueError: The text is not a positive number.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{where} must be a positive number, got {text!r}")
    return value


def about(
    runner,
    settings: problems.Settings,
    inputs: problems.Inputs | None = None,
    queries: Any = None,
) -> Values:
    """Return the fields of a record that describe the problem. If `inputs` is None, the fields
    describe a problem with random arrays and `queries` queries, which need not exist.
    """
    sizes: Values = dataclasses.asdict(shape_of(settings, inputs, queries))
    del sizes["itemsize"]
    found = sizes | {
        "framework": runner.framework,
        "dtype": settings.runtime.dtype.name,
        "config": settings.nsa.as_dict(),
        "input": "random",
        "device": runner.device,
    }
    if inputs is None:
        return found
    given = {"input_sha256": inputs.sha256, "overlap": inputs.overlap}
    return found | given | {"input": inputs.name}
