"""What records say of a kernel beside what it is compared with: pairs of times for one problem.

A pair belongs to one of the thresholds of `nsa_core.policy` and to a length. It comes from rows
of JSON lines that differ in nothing but the implementation, or from a row of the CSV files of
`bench.fa2` and `bench.selection`.

| kernel | decides: its speed-up over | second column |
|---|---|---|
| `fa2`, sliding and compressed | `masked`: one SDPA under the whole mask | the portable path |
| of the selection | the portable path, `sdpa` or `xla` | |
"""

import csv
import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nsa_core import policy

from ..harness import records
from ..harness.records import Record

PORTABLE = {"torch": "sdpa", "jax": "xla"}
MASKED = "masked"
FILES = ("fa2.jsonl", "selection.jsonl")  # of the benches that measure pairs
# What two rows of one pair have in common.
SAME = (
    "bench",
    "framework",
    "mode",
    "B",
    "T",
    "S",
    "H",
    "Hkv",
    "D",
    "Dv",
    "dtype",
    "config",
    "input",
)
SAME += ("input_sha256", "commit")
# The columns of a CSV that hold a pair: the length, the time of what decides, the kernel's.
FA2_COLUMNS = ("T", "sdpa_ms", "fa_ms")
SELECTION_COLUMNS = ("L", "ref_ms", "tri_ms")
FA2_PORTABLE = "library_ms"


def thresholds_of(branch: str) -> dict[str, tuple[str, ...]]:
    """The thresholds of a branch, each with its kernels."""
    return {name: kernels for name, (step, kernels) in policy.DECIDES.items() if step == branch}


def baseline(threshold: str, framework: str) -> str:
    """The implementation whose time decides beside a kernel's."""
    return PORTABLE[framework] if policy.DECIDES[threshold][0] == "selected" else MASKED


@dataclasses.dataclass(frozen=True)
class Pair:
    """A kernel and what it is compared with on one problem; times in milliseconds."""

    threshold: str
    length: int  # tokens, or selected keys
    kernel: str
    kernel_ms: float | None  # None: it failed, `problem` says how
    over: str  # the implementation that decides
    over_ms: float | None
    portable_ms: float | None  # the second column
    problem: str
    where: str  # file:line
    device: str
    commit: str | None = None
    time: str = ""

    @property
    def speed_up(self) -> float:
        """Of the kernel over what decides; 0 where it failed."""
        return self.over_ms / self.kernel_ms if self.kernel_ms and self.over_ms else 0.0

    @property
    def over_portable(self) -> float | None:
        """Of the kernel over the portable path; None where one of them has no time."""
        if not self.kernel_ms or not self.portable_ms:
            return None
        return self.portable_ms / self.kernel_ms

    def __str__(self) -> str:
        text = f"{self.length}: {self.speed_up:.3g}x {self.kernel} over {self.over}"
        if not self.kernel_ms:
            return f"{text} (no time) {self.problem}"
        text += f" ({self.over_ms:.4g} / {self.kernel_ms:.4g} ms)"
        if self.over == MASKED and self.over_portable is not None:
            text += f", {self.over_portable:.3g}x over the portable path"
        return f"{text} {self.problem}"


@dataclasses.dataclass
class Evidence:
    """All pairs that were found, and what was left out and why."""

    pairs: list[Pair] = dataclasses.field(default_factory=list)
    notes: Counter[str] = dataclasses.field(default_factory=Counter)
    first: dict[str, str] = dataclasses.field(default_factory=dict)
    devices: set[str] = dataclasses.field(default_factory=set)

    def note(self, text: str, where: str) -> None:
        self.notes[text] += 1
        self.first.setdefault(text, where)

    def of(self, threshold: str) -> list[Pair]:
        """The pairs of the kernel that automatic choice tries first, of those measured: what
        stands behind it decides nothing here."""
        found = [pair for pair in self.pairs if pair.threshold == threshold]
        measured = {pair.kernel for pair in found if pair.kernel_ms}
        first = next((k for k in policy.DECIDES[threshold][1] if k in measured), None)
        return [pair for pair in found if pair.kernel == first]

    def left_out(self) -> list[str]:
        """One line for each reason."""
        lines = [
            f"{count} {'row' if count == 1 else 'rows'}, the first {self.first[text]}: {text}"
            for text, count in self.notes.items()
        ]
        for threshold in policy.DECIDES:
            used = self.of(threshold)
            others = [p for p in self.pairs if p.threshold == threshold and p not in used]
            for kernel in dict.fromkeys(pair.kernel for pair in others if used):
                each = [pair for pair in others if pair.kernel == kernel]
                lines.append(
                    f"{len(each)} rows, the first {each[0].where}: {threshold} {kernel}: "
                    f"{used[0].kernel} stands before it"
                )
        return lines


def files_of(path: str | Path) -> list[Path]:
    """The files of records at `path`: itself, or those about thresholds below a folder.

    Raises:
      ValueError: the folder has none.
    """
    path = Path(path)
    if not path.is_dir():
        return [path]
    found = sorted(x for name in FILES for x in path.rglob(name))
    if not found:
        raise ValueError(f"{path} has no file {' or '.join(FILES)}")
    return found


def read_records(paths: Iterable[str | Path], device: str | None, into: Evidence) -> None:
    """Adds the pairs of files of JSON lines; those of other devices only where none is asked.

    Raises:
      ValueError: a line is damaged, or a file is empty; the message names file and line.
    """
    groups: dict[tuple, list[tuple[str, Record]]] = {}
    for path in paths:
        placed = list(records.placed(path))
        if not placed:
            raise ValueError(f"{path}: holds no records")
        for where, record in placed:
            if not thresholds_of(record.branch):
                continue
            if device is not None and record.device != device:
                into.note(f"of another device, {record.device}", where)
                continue
            extra = record.extra
            if reason := _other(extra):
                into.note(reason, where)
                continue
            same = {name: x for name, x in extra.items() if name not in ("kernel", "path")}
            values = *(getattr(record, name) for name in SAME), same
            key = *map(repr, values), record.branch, record.device
            groups.setdefault(key, []).append((where, record))
    for group in groups.values():
        _pair(group, into)


def _pair(group: Sequence[tuple[str, Record]], into: Evidence) -> None:
    """The pairs of the rows of one problem: the slowest run of each kernel beside the fastest
    of what it is compared with."""
    for threshold, kernels in thresholds_of(group[0][1].branch).items():
        _pair_for(threshold, kernels, group, into)


def _pair_for(threshold: str, kernels, group, into: Evidence) -> None:
    branch, framework = group[0][1].branch, group[0][1].framework
    over, portable = baseline(threshold, framework), PORTABLE[framework]
    bases: dict[str, list[float]] = {name: [] for name in dict.fromkeys((over, portable))}
    rows: dict[str, list[tuple[str, Record]]] = {name: [] for name in kernels}
    for where, record in group:
        name = record.implementation
        if name in rows:
            rows[name].append((where, record))
        elif name in bases and record.times_ms is not None:
            bases[name].append(record.times_ms[0])
        elif name in bases:
            what = f"{record.status}: {record.reason}"
            into.note(f"{framework} {branch} {name}, which it is compared with: {what}", where)
    base, beside = bases[over], bases[portable]
    for name, listed in rows.items():
        able = []
        for where, record in listed:
            if record.status == "unsupported":
                into.note(f"{framework} {branch} {name}: unsupported: {record.reason}", where)
            else:
                able.append((where, record))
        failed = [row for row in able if row[1].times_ms is None]
        if failed:
            where, record = failed[0]
            into.note(f"{framework} {branch} {name} counts as a loss: {record.status}", where)
            problem, slowest = f"{record.status}: {record.reason}; {_problem(record)}", None
        elif able and not base:
            into.note(f"{framework} {branch} {name}: no {over} row of the problem", able[0][0])
            continue
        elif able:
            timed = [(r.times_ms[0], place, r) for place, r in able if r.times_ms]
            slowest, where, record = max(timed, key=lambda row: row[:2])
            problem = _problem(record)
        else:
            continue
        into.devices.add(record.device)
        times = slowest, over, min(base, default=None), min(beside, default=None)
        about = problem, where, record.device, record.commit, record.time
        into.pairs.append(Pair(threshold, _length(threshold, record), name, *times, *about))


def _other(extra: Mapping[str, Any]) -> str | None:
    """Why a row is about something else than what choice decides, or None."""
    if extra.get("path") == "dense":
        return "the dense call of FA-2, which the library does not use"
    if str(extra.get("streams") or 1) != "1":
        return "several streams at once"
    return None


def _length(threshold: str, record: Record) -> int:
    if policy.DECIDES[threshold][0] == "selected":
        return record.config["num_selected"] * record.config["select_block"]
    return max(record.T, record.S)


def _problem(record: Record) -> str:
    sizes = f"B={record.B} T={record.T} H={record.H}/{record.Hkv} D={record.D}/{record.Dv}"
    window = f" w={record.config['window']}" if record.branch == "sliding" else ""
    return f"{record.framework} {record.mode} {record.dtype} {sizes}{window}"


def read_csv(path: str | Path, device: str | None, into: Evidence) -> None:
    """Adds the pairs of a CSV file of `bench.fa2` or `bench.selection`.

    Args:
      device: what its rows are of where it has no column `device`, and the only one wanted.

    Raises:
      ValueError: it is empty, damaged or of neither; the message names file and line.
    """
    text = Path(path).read_bytes()
    try:
        lines = text.decode().splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text file: {error}") from None
    rows = list(csv.reader(lines))
    if len(rows) < 2:
        raise ValueError(f"{path}: holds no rows")
    if not text.endswith(b"\n"):
        raise ValueError(f"{path}:{len(lines)}: the last line is truncated")
    names = rows[0]
    columns = next((c for c in (FA2_COLUMNS, SELECTION_COLUMNS) if set(c) <= set(names)), None)
    if columns is None:
        raise ValueError(
            f"{path}:1: columns must have {FA2_COLUMNS} (bench.fa2) or {SELECTION_COLUMNS} "
            f"(bench.selection), got {names}"
        )
    if columns is FA2_COLUMNS and "branch" not in names:
        raise ValueError(
            f"{path}:1: no column branch says whether rows are sliding or compressed"
        )
    for number, cells in enumerate(rows[1:], 2):
        where = f"{path}:{number}"
        if len(cells) != len(names):
            raise ValueError(f"{where}: {len(names)} columns expected, got {len(cells)}")
        row = dict(zip(names, cells, strict=True))
        here = row.get("device") or device
        if here is None:
            raise ValueError(f"{where}: no column device; say --device")
        if device is not None and here != device:
            into.note(f"of another device, {here}", where)
            continue
        _csv_pair(row, columns, here, where, into)


def _csv_pair(row: dict[str, str], columns, device: str, where: str, into: Evidence) -> None:
    kernel, branch, over = row.get("kernel") or "triton", "selected", "the portable path"
    if columns is FA2_COLUMNS:
        kernel, branch, over = "fa2", row["branch"], MASKED
        if branch not in ("sliding", "compressed"):
            raise ValueError(f"{where}: branch must be sliding or compressed, got {branch!r}")
    known = thresholds_of(branch)
    threshold = next((name for name, kernels in known.items() if kernel in kernels), None)
    if not (row[columns[0]].isascii() and row[columns[0]].isdigit()):
        raise ValueError(f"{where}: {columns[0]} must be a length, got {row[columns[0]]!r}")
    status, times = row.get("status") or "ok", dict.fromkeys(columns[1:])
    for name in times:
        times[name] = _ms(row[name], f"{where}: {name}", needed=status == "ok")
    portable = None
    if columns is FA2_COLUMNS and row.get(FA2_PORTABLE):
        portable = _ms(row[FA2_PORTABLE], f"{where}: {FA2_PORTABLE}", needed=True)
    sizes = [f"{k}={v}" for k, v in row.items() if k in ("N", "H", "D", "Dv", "dtype", "mode")]
    problem = " ".join(sizes)
    if reason := _other(row):
        into.note(reason, where)
        return
    if status == "unsupported" or (status != "ok" and times[columns[2]] is not None):
        into.note(f"{branch} {kernel}: {status}: {row.get('reason', '')}", where)
        return
    if threshold is None:
        into.note(f"{branch}: {kernel} is no kernel that a threshold is about", where)
        return
    if status != "ok":
        into.note(f"{threshold} {kernel} counts as a loss: {status}", where)
        problem = f"{status}: {row.get('reason', '')}; {problem}"
    base, fast = (times[name] if status == "ok" else None for name in columns[1:])
    every = fast, over, base, base if portable is None and branch == "selected" else portable
    about: dict[str, Any] = {"commit": row.get("commit"), "time": row.get("time") or ""}
    length = int(row[columns[0]])
    pair = Pair(threshold, length, kernel, *every, problem, where, device, **about)
    into.devices.add(device)
    into.pairs.append(pair)


def _ms(text: str, where: str, needed: bool) -> float | None:
    if not text and not needed:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{where} must be a time in milliseconds, got {text!r}")
    return value
