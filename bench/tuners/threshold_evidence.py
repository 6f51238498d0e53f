"""Makes pairs of times from records. A pair has the times of a kernel and of its baseline on one
problem.

A pair of times belongs to a length and to one of the thresholds of `nsa_core.policy`. A pair of
times comes from records that differ only in the implementation. A row of a CSV file of `bench.fa2`
or `bench.selection` counts as two or three records.

| kernel | baseline of the threshold | second baseline |
|---|---|---|
| `fa2`, sliding and compressed | `masked`: one SDPA with the whole mask | the portable path |
| kernels of the selection | the portable path, `sdpa` or `xla` | |
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from nsa_core import policy

from ..harness import command, records
from ..harness.records import Record, Values
from ..reports import render

PORTABLE = {"torch": "sdpa", "jax": "xla"}
MASKED = "masked"
FILES = ("fa2.jsonl", "selection.jsonl")  # the files of the commands that measure pairs
# The columns of a CSV file that make a pair: the length, the time of the baseline, and the time
# of the kernel.
FA2_COLUMNS = ("T", "sdpa_ms", "fa_ms")
SELECTION_COLUMNS = ("L", "ref_ms", "tri_ms")
FA2_PORTABLE = "library_ms"

type Row = tuple[str, Record]  # with its location, <file>:<line>
type Notes = dict[str, list[str]]  # the locations of excluded rows by reason


class Pair(NamedTuple):
    """A kernel's row and its baseline on the same problem. Times are in milliseconds. The length is
    in tokens, or in selected keys.
    """

    row: Record
    where: str
    length: int
    kernel_ms: float | None  # None if the kernel failed, for the reason that `problem` has
    over: str  # the baseline of the threshold
    over_ms: float | None
    speed_up: float  # over the baseline, or 0 if the kernel failed
    over_portable: float | None  # the speed-up over the portable path if it is another baseline

    @property
    def problem(self) -> str:
        return render.filled("pair.txt.jinja", row=self.row, kernel_ms=self.kernel_ms)


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The pairs of times of each threshold that has pairs, the devices of all rows that make pairs,
    and the excluded rows by reason.
    """

    pairs: dict[str, list[Pair]]
    devices: set[str]
    notes: Notes


def evidence(rows: Iterable[Row], device: str | None = None) -> Evidence:
    """Return the pairs of times that the rows contain. A threshold has the pairs of the measured
    kernel that the automatic choice tries first, since kernels that the automatic choice tries
    later do not affect the threshold. If `device` is given, rows from other devices are ignored.
    """
    notes: Notes = collections.defaultdict(list)
    groups: dict[tuple, list[Row]] = {}
    for where, record in rows:
        if not any(record.branch == branch for branch, _ in policy.DECIDES.values()):
            continue
        if device not in (None, record.device):
            notes[f"of another device, {record.device}"].append(where)
        elif record.extra.get("path") == "dense":
            notes["the dense call of FA-2, which the library does not use"].append(where)
        elif str(record.extra.get("streams") or 1) != "1":
            notes["several streams at once"].append(where)
        else:
            own = {k: x for k, x in record.extra.items() if k not in ("kernel", "path")}
            problem = *render.problem_of(record), record.branch, repr(own)
            groups.setdefault(problem, []).append((where, record))
    found: dict[str, list[Pair]] = {name: [] for name in policy.DECIDES}
    for group in groups.values():
        for name, (branch, kernels) in policy.DECIDES.items():
            for kernel in kernels if branch == group[0][1].branch else ():
                found[name] += _pairs(kernel, group, notes)
    devices = {pair.row.device for pairs in found.values() for pair in pairs}
    for name, pairs in found.items():
        measured = {pair.row.implementation for pair in pairs if pair.kernel_ms}
        first = next((k for k in policy.DECIDES[name][1] if k in measured), None)
        found[name] = [pair for pair in pairs if pair.row.implementation == first]
        for pair in pairs if first else ():
            if pair.row.implementation != first:
                text = f"{name} {pair.row.implementation}: {first} comes before it"
                notes[text].append(pair.where)
    return Evidence({name: pairs for name, pairs in found.items() if pairs}, devices, notes)


def _pairs(kernel: str, group: Sequence[Row], notes: Notes) -> Iterator[Pair]:
    """Yield the pair of the slowest run of a kernel and the fastest run of its baseline, if the
    rows of a problem have both.
    """
    _, first = group[0]
    portable = PORTABLE[first.framework]
    over = portable if first.branch == "selected" else MASKED
    name, able = f"{first.framework} {first.branch} {kernel}", []
    least: dict[str, float] = {}
    for where, record in group:
        if record.times_ms:
            ms = record.times_ms[0]
            least[record.implementation] = min(ms, least.get(record.implementation, ms))
        if record.implementation == kernel and record.status == "unsupported":
            notes[f"{name}: unsupported: {record.reason}"].append(where)
        elif record.implementation == kernel:
            able.append((where, record))
    if not able:
        return
    where, slowest = max(able, key=lambda row: row[1].times_ms or (float("inf"),))
    if slowest.times_ms is None:
        notes[f"{name} counts as a loss: {slowest.status}"].append(where)
    elif over not in least:
        told = {f": {r.status}: {r.reason}" for _, r in group if r.implementation == over}
        text = f"{name}: no time of {over} on the problem{''.join(sorted(told))}"
        notes[text].append(where)
        return
    length = max(slowest.T, slowest.S)
    if slowest.branch == "selected":
        length = slowest.config["num_selected"] * slowest.config["select_block"]
    ms = slowest.times_ms and slowest.times_ms[0]
    base, other = least.get(over), least.get(portable)
    gain = base / ms if base and ms else 0.0
    beside = other / ms if other and ms and over == MASKED else None
    yield Pair(slowest, where, length, ms, over, base, gain, beside)


def read_records(path: str | Path) -> list[Row]:
    """Return the rows of a file of JSON lines, or of the files `FILES` in a folder at any depth.

    Raises:
      ValueError: A line is damaged, a file is empty, or the folder has no such file. The error
        message names the file and the line.
    """
    path = Path(path)
    paths = sorted(x for name in FILES for x in path.rglob(name)) if path.is_dir() else [path]
    if not paths:
        raise ValueError(f"{path} has no file {' or '.join(FILES)}")
    found: list[Row] = []
    for each in paths:
        rows = list(records.placed(each))
        if not rows:
            raise ValueError(f"{each} has no records")
        found += rows
    return found


def read_csv(path: str | Path, device: str | None) -> Iterator[Row]:
    """Return the rows of a CSV file of `bench.fa2` or `bench.selection`.

    Args:
      device: The device, if the file has no column `device`.

    Raises:
      ValueError: The file is empty, damaged or of another command. The error message names the
        file and the line.
    """
    for where, row in command.read_csv(path, ()):
        fa2 = {*FA2_COLUMNS, "branch"} <= row.keys()
        length, *columns = FA2_COLUMNS if fa2 else SELECTION_COLUMNS
        if not {length, *columns} <= row.keys():
            raise ValueError(
                f"{path}:1: columns must have all names of bench.fa2, {(*FA2_COLUMNS, 'branch')}, "
                f"or all names of bench.selection, {SELECTION_COLUMNS}, got {[*row]}"
            )
        about: Values = {"device": row.get("device") or device, "branch": "selected"}
        if about["device"] is None:
            raise ValueError(f"{where}: no column device: pass --device")
        over, kernel = PORTABLE["torch"], row.get("kernel") or "triton"
        if fa2:
            over, kernel, about["branch"] = MASKED, "fa2", row["branch"]
            if row["branch"] not in ("sliding", "compressed"):
                raise ValueError(
                    f"{where}: branch must be sliding or compressed, got {row['branch']!r}"
                )
        if not (row[length].isascii() and row[length].isdigit()):
            raise ValueError(f"{where}: {length} must be a length, got {row[length]!r}")
        at = int(row[length])
        about |= {n: row[n] for n in ("mode", "dtype", "commit", "time") if row.get(n)}
        about |= {n: int(row[n]) for n in ("H", "D", "Dv") if row.get(n)}
        about |= {"bench": "csv", "framework": "torch", "T": at if fa2 else 0, "samples": 1}
        about["config"] = {"window": row.get("w", "?"), "num_selected": at, "select_block": 1}
        about["extra"] = {n: row[n] for n in ("path", "streams") if row.get(n)}
        about["extra"]["where"] = where
        status, reason = row.get("status") or "ok", row.get("reason") or "no reason"
        each = dict(zip((over, kernel), columns, strict=True))
        if row.get(FA2_PORTABLE):
            each[PORTABLE["torch"]] = FA2_PORTABLE
        for name, column in each.items():
            found: Values = {"implementation": name, "status": status, "reason": reason}
            if status == "ok" or (row[column] and name != kernel):
                time = command.positive(row[column], f"{where}: {column}")
                found |= dict.fromkeys(("time_ms", "p20_ms", "p80_ms"), time)
                found["status"] = "ok"
            # the kernel has a time, so the failure was that of another path of the row
            elif row[column]:
                found |= {"status": "unsupported", "reason": f"{status}: {reason}"}
            yield where, records.checked(Record, about | found, where)
