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

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from nsa_core import policy

from ..harness import command, records
from ..harness.records import Record, Values
from ..reports import render

PORTABLE = {"torch": "sdpa", "jax": "xla"}
MASKED = "masked"
FILES = ("fa2.jsonl", "selection.jsonl")  # the files of the commands that measure pairs
# The fields that must be equal in both rows of a pair. Fields that commands add must be equal
# too, except `kernel` and `path`.
SAME = (
    "bench framework mode B T S H Hkv D Dv dtype config input input_sha256 commit branch device"
)
# The columns of a CSV file that make a pair: the length, the time of the baseline, and the time
# of the kernel.
FA2_COLUMNS = ("T", "sdpa_ms", "fa_ms")
SELECTION_COLUMNS = ("L", "ref_ms", "tri_ms")
FA2_PORTABLE = "library_ms"

type Row = tuple[str, Record]  # with its location, <file>:<line>


@dataclasses.dataclass(frozen=True)
class Pair:
    """A kernel's row and its baseline on the same problem. Times are in milliseconds."""

    threshold: str
    row: Record
    where: str
    over: str  # the baseline of the threshold
    over_ms: float | None
    portable_ms: float | None  # time of the portable path

    @property
    def length(self) -> int:
        """The length in tokens, or in selected keys."""
        if self.row.branch == "selected":
            return self.row.config["num_selected"] * self.row.config["select_block"]
        return max(self.row.T, self.row.S)

    @property
    def kernel_ms(self) -> float | None:
        """The time of the kernel, or None if the kernel failed. If the kernel failed, `problem`
        has the reason."""
        return None if self.row.times_ms is None else self.row.times_ms[0]

    @property
    def problem(self) -> str:
        return render.filled("pair.txt.jinja", row=self.row, kernel_ms=self.kernel_ms)

    @property
    def speed_up(self) -> float:
        """The speed-up of the kernel over its baseline, or 0 if the kernel failed."""
        return self.over_ms / self.kernel_ms if self.kernel_ms and self.over_ms else 0.0

    @property
    def over_portable(self) -> float | None:
        """The speed-up of the kernel over the portable path if the baseline is `masked` and both
        the kernel and the portable path have times, otherwise None.
        """
        if self.over != MASKED or not self.kernel_ms or not self.portable_ms:
            return None
        return self.portable_ms / self.kernel_ms


class Evidence:
    """All pairs of times, and the excluded rows by reason."""

    def __init__(self):
        self.pairs: list[Pair] = []
        self.notes: dict[str, list[str]] = {}

    @property
    def devices(self) -> set[str]:
        return {pair.row.device for pair in self.pairs}

    def note(self, text: str, where: str) -> None:
        self.notes.setdefault(text, []).append(where)

    def of(self, threshold: str) -> list[Pair]:
        """Return the pairs of times of the measured kernel that the automatic choice tries first.
        Kernels that the automatic choice tries later do not affect this threshold.
        """
        found = [pair for pair in self.pairs if pair.threshold == threshold]
        measured = {pair.row.implementation for pair in found if pair.kernel_ms}
        first = next((k for k in policy.DECIDES[threshold][1] if k in measured), None)
        return [pair for pair in found if pair.row.implementation == first]

    def left_out(self) -> list[str]:
        """Return the excluded rows as one line per reason."""
        notes = {text: list(places) for text, places in self.notes.items()}
        for threshold in policy.DECIDES:
            used = self.of(threshold)
            for pair in self.pairs if used else ():
                if pair.threshold == threshold and pair not in used:
                    ahead = f"{used[0].row.implementation} comes before it"
                    text = f"{threshold} {pair.row.implementation}: {ahead}"
                    notes.setdefault(text, []).append(pair.where)
        return [
            f"{len(places)} {'row' if len(places) == 1 else 'rows'}, the first {places[0]}: {text}"
            for text, places in notes.items()
        ]

    def add(self, rows: Iterable[Row], device: str | None = None) -> None:
        """Add the pairs of times that the rows `rows` contain. If `device` is given, rows from
        other devices are ignored."""
        groups: dict[str, list[Row]] = {}
        for where, record in rows:
            if not any(record.branch == branch for branch, _ in policy.DECIDES.values()):
                continue
            if device is not None and record.device != device:
                self.note(f"of another device, {record.device}", where)
            elif reason := _other(record.extra):
                self.note(reason, where)
            else:
                own = {k: x for k, x in record.extra.items() if k not in ("kernel", "path")}
                key = repr([*(getattr(record, name) for name in SAME.split()), own])
                groups.setdefault(key, []).append((where, record))
        for group in groups.values():
            for threshold, (branch, kernels) in policy.DECIDES.items():
                for kernel in kernels if branch == group[0][1].branch else ():
                    self._pair(threshold, kernel, group)

    def _pair(self, threshold: str, kernel: str, group: Sequence[Row]) -> None:
        """Add the pair of times of the slowest run of a kernel and the fastest run of its
        baseline."""
        framework, branch = group[0][1].framework, group[0][1].branch
        portable = PORTABLE[framework]
        over = portable if branch == "selected" else MASKED
        name = f"{framework} {branch} {kernel}"
        able = []
        for where, record in group:
            if record.implementation == kernel and record.status == "unsupported":
                self.note(f"{name}: unsupported: {record.reason}", where)
            elif record.implementation == kernel:
                able.append((where, record))
        if not able:
            return
        least = {
            base: min((r.times_ms[0] for _, r in group if r.implementation == base and r.times_ms),
                      default=None)
            for base in (over, portable)
        }  # fmt: skip
        where, slowest = max(able, key=lambda row: row[1].times_ms or (float("inf"),))
        if slowest.times_ms is None:
            self.note(f"{name} counts as a loss: {slowest.status}", where)
        elif least[over] is None:
            told = {f": {r.status}: {r.reason}" for _, r in group if r.implementation == over}
            self.note(f"{name}: no time of {over} on the problem{''.join(sorted(told))}", where)
            return
        self.pairs.append(Pair(threshold, slowest, where, over, least[over], least[portable]))


def _other(extra: Values) -> str | None:
    """Return the reason why a row does not concern the automatic choice, or None if the row
    concerns the automatic choice.
    """
    if extra.get("path") == "dense":
        return "the dense call of FA-2, which the library does not use"
    if str(extra.get("streams") or 1) != "1":
        return "several streams at once"
    return None


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
        here = row.get("device") or device
        if here is None:
            raise ValueError(f"{where}: no column device: pass --device")
        kernel, branch, over = row.get("kernel") or "triton", "selected", PORTABLE["torch"]
        if fa2:
            kernel, branch, over = "fa2", row["branch"], MASKED
            if branch not in ("sliding", "compressed"):
                raise ValueError(
                    f"{where}: branch must be sliding or compressed, got {branch!r}"
                )
        if not (row[length].isascii() and row[length].isdigit()):
            raise ValueError(f"{where}: {length} must be a length, got {row[length]!r}")
        at = int(row[length])
        about: Values = {n: row[n] for n in ("mode", "dtype", "commit") if row.get(n)}
        about |= {n: int(row[n]) for n in ("H", "D", "Dv") if row.get(n)}
        about |= {"bench": "csv", "framework": "torch", "branch": branch, "device": here}
        about |= {"T": at if fa2 else 0, "time": row.get("time") or "", "samples": 1}
        about["config"] = {"window": row.get("w", "?"), "num_selected": at, "select_block": 1}
        extra = {"where": where} | {n: row[n] for n in ("path", "streams") if row.get(n)}
        status, reason = row.get("status") or "ok", row.get("reason") or "no reason"
        each = dict(zip((over, kernel), columns, strict=True))
        if row.get(FA2_PORTABLE):
            each[PORTABLE["torch"]] = FA2_PORTABLE
        for name, column in each.items():
            found: Values = {"status": status, "reason": reason}
            if status == "ok" or (row[column] and name != kernel):
                time = command.positive(row[column], f"{where}: {column}")
                found = dict.fromkeys(("time_ms", "p20_ms", "p80_ms"), time)
            # the kernel has a time, so the failure was that of another path of the row
            elif row[column]:
                found |= {"status": "unsupported", "reason": f"{status}: {reason}"}
            made = about | found | {"implementation": name, "extra": extra}
            yield where, records.checked(Record, made, where)
