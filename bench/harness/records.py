"""Reads and writes records. A record is one JSON line and has one measurement. Every table, plot
and threshold is derived from records.

`Record` lists the fields of a measurement of attention: problem, times, errors, environment. Values
that only one command has are in the field `extra`. A line has only the fields that differ from
their defaults. The function `read` checks every line, so that a damaged file raises an error
instead of giving wrong numbers.
"""

import dataclasses
import datetime
import errno
import functools
import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import pydantic
from pydantic import Field

from nsa_core import config_files
from nsa_core.extras import version

from ..judge.parity import SLOPE
from . import process

FOLDER = process.ROOT / "bench" / "records"
FP8_RECORDS = "fp8/compare.jsonl"  # in the folder of a device
STRICT = pydantic.ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
type Values = dict[str, Any]  # keyed by the names of fields or of arguments
type Milliseconds = Annotated[float, Field(gt=0)] | None


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=STRICT)
class Record:
    """A measurement, or the reason why there is no measurement. Lengths are in tokens, times in
    milliseconds.
    """

    schema: Literal[2] = 2
    bench: str  # the command that measured
    framework: Literal["jax", "torch", ""] = ""
    # The part of attention that was measured.
    branch: Literal[
        "compressed", "scores", "selected", "sliding", "combine", "all", "dense", ""
    ] = ""
    # the implementation that ran, which may differ from the requested one
    implementation: str = ""
    mode: str = ""  # forward, fwdbwd, backward, decode
    B: int = 0
    T: int = 0
    S: int = 0
    H: int = 0
    Hkv: int = 0
    D: int = 0
    Dv: int = 0
    dtype: str = ""
    config: Values = dataclasses.field(default_factory=dict)  # fields of NSAConfig
    input: str = ""  # random, text, ...
    input_sha256: str | None = None  # the SHA-256 of the corpus bytes that were read
    # mean share of selected blocks that adjacent queries have in common
    overlap: float | None = None
    time_ms: Milliseconds = None  # median
    p20_ms: Milliseconds = None
    p80_ms: Milliseconds = None
    samples: int = 0
    timer: str | None = None  # host, cuda_events, ...
    useful_flops: int | None = None
    bytes: int | None = None  # compulsory traffic: every array is read or written once
    tflops: float | None = None
    gbps: float | None = None
    extra_peak_bytes: int | None = None  # memory in addition to the inputs
    error_of: str | None = None  # the array that uses the largest share of its bound
    error_max: float | None = None
    error_mean: float | None = None
    error_bound: float | None = None  # the bound of error_max
    error_mean_bound: float | None = None
    error_rms: float | None = None
    error_rms_bound: float | None = None
    # <path, oracle> / <oracle, oracle>; None if there are few elements
    slope: float | None = None
    # number of query positions per sequence whose results were checked
    rows_checked: int | None = None
    # number of rows whose selection differs from that of the oracle
    rows_differ: int | None = None
    extra: Values = dataclasses.field(default_factory=dict)  # values that only one command has
    status: Literal["ok", "wrong", "oom", "unsupported", "error", "timeout"] = "ok"
    reason: str = ""
    refused: Values = dataclasses.field(default_factory=dict)
    device: str = "cpu"
    versions: Values = dataclasses.field(default_factory=dict)
    commit: str | None = None
    dirty: bool | None = None
    time: str = ""  # UTC

    @pydantic.model_validator(mode="after")
    def _check(self):
        if self.status != "ok" and not self.reason:
            raise ValueError(f"a record with status {self.status} must have a reason")
        if self.branch and self.status == "ok":
            timed = self.time_ms, self.p20_ms, self.p80_ms
            if None in timed or self.samples < 1:
                raise ValueError(
                    f"a record with status ok must have times and samples, got {timed}"
                )
        return self

    @property
    def times_ms(self) -> tuple[float, float, float] | None:
        """Return median, p20 and p80 of a valid row, otherwise None."""
        return times_of(self)

    @property
    def bound_share(self) -> float | None:
        """The largest of the errors (maximum, mean, rms, slope) divided by its bound, or None
        without a bound.
        """
        # In 8 bits the limit of the slope depends on the slope of the baseline, which a record
        # does not have.
        judged = "compute_dtype" not in self.config
        slope = abs(self.slope - 1) if judged and self.slope is not None else None
        pairs = (
            (self.error_max, self.error_bound),
            (self.error_mean, self.error_mean_bound),
            (self.error_rms, self.error_rms_bound),
            (slope, SLOPE),
        )
        shares = [error / bound for error, bound in pairs if error is not None and bound]
        return max(shares, default=None)


def times_of(row: Any) -> tuple[float, float, float] | None:
    """Return the same values as `Record.times_ms`, for any object with times and a status."""
    times = row.time_ms, row.p20_ms, row.p80_ms
    return None if row.status != "ok" or None in times else times


FIELDS = tuple(field.name for field in dataclasses.fields(Record))
_EMPTY = dataclasses.asdict(Record(bench=""))
_ALWAYS = frozenset({"schema", "bench", "status"})  # these fields are in every line


def record(bench: str, commit: str | None = None, /, **values: Any) -> Record:
    """Return a record of `bench.<bench>` with the present time. Values that are not fields of
    `Record` go to `extra`. `commit` is the same as in `environment`.
    """
    found: Values = {"bench": bench, "time": utc_now()} | environment(commit) | values
    extra = {name: found.pop(name) for name in found.keys() - set(FIELDS)}
    found["extra"] = found.get("extra", {}) | extra
    return Record(**found)


def append(path: str | Path, records: Iterable[Record]) -> None:
    """Append one line per record to the file at `path`, in one write (`append_lines`)."""
    lines = map(dataclasses.asdict, records)
    append_lines(
        path,
        [{k: x for k, x in line.items() if k in _ALWAYS or x != _EMPTY[k]} for line in lines],
    )


def append_lines(path: str | Path, lines: Iterable[Values]) -> None:
    """Append one JSON line per mapping to the file at `path`, in one write.

    Raises:
      OSError: The disk is full, and the file is unchanged.
      ValueError: The last line of the file is truncated.
    """
    path = Path(path)
    text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file:
        end = _check_end(file, path)
        data = text.encode()
        if file.write(data) < len(data):  # a full disk stores only a part, without an error
            file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(file.fileno())


def replace_file(path: Path, text: str) -> None:
    """Write `text` to the file at `path`. Other processes read the old file or the whole new file,
    since the new file is renamed when it is complete.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        scratch.write_text(text)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def check_appendable(path: str | Path) -> None:
    """Check that lines can be appended to the file at `path`. Call this function before anything
    is measured.

    Raises:
      ValueError: The path is not a file, its last line is truncated, or its folder is a file.
      OSError: The file or its folder cannot be written.
    """
    path = Path(path)
    if path.is_file():
        with path.open("r+b") as file:
            _check_end(file, path)
    elif path.exists():
        raise ValueError(f"{path} must be a regular file or not exist")
    elif not (folder := next(x for x in path.absolute().parents if x.exists())).is_dir():
        raise ValueError(f"{path} must be in a folder, but {folder} is not a folder")
    else:
        tempfile.TemporaryFile(dir=folder).close()


def _check_end(file: BinaryIO, path: Path) -> int:
    """Return the size of a file, which must end with a whole line."""
    if end := file.seek(0, os.SEEK_END):
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            raise ValueError(
                f"{path} must end with a complete line, got a truncated one; nothing was appended"
            )
    return end


def variant(kernel: str, shape: str, name: str, time: float, commit: str | None) -> Record:
    """Return a line of `<device>/kernel_log/variants.jsonl`. The line has the time in ms of a
    variant of a kernel that is not in use.
    """
    what = {"kernel": kernel, "shape": shape, "variant": name, "in_use": False}
    return Record(
        bench="variant", time_ms=round(time, 3), commit=commit and commit[:7], extra=what
    )


def keep(done: Iterable[Record], name: str) -> None:
    """Append records to the file `name` in the folder of their device."""
    done = list(done)
    for device in dict.fromkeys(record.device for record in done):
        append(folder_of(device) / name, [record for record in done if record.device == device])


def read(path: str | Path) -> list[Record]:
    """Return the records of the file at `path`.

    Raises:
      ValueError: A line is not a complete, valid record. The error message names file and line.
    """
    return [record for _, record in placed(path)]


def placed(path: str | Path) -> Iterator[tuple[str, Record]]:
    """Return the same records as the function `read`, each with its location `<path>:<line>`."""
    return ((where, checked(Record, data, where)) for where, data in read_lines(path))


def checked[T](kind: type[T], data: Any, where: str) -> T:
    """Return an object of the class `kind` with the fields `data` of a line, which was read at
    `where`.

    Raises:
      ValueError: The data is not a valid `kind`.
    """
    try:
        return kind(**data)
    except pydantic.ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, x['loc']))} {x['msg']}".strip() for x in error.errors()
        )
        raise ValueError(f"{where}: {faults.replace('Input should', 'must')}") from None
    except TypeError:
        raise ValueError(f"{where} must be one JSON object, got {data!r:.60}") from None


def flat_lines(path: str | Path) -> list[Values]:
    """Return the fields of each line, including the fields in a record's `extra`."""
    return [line | line.pop("extra", {}) for _, line in read_lines(path)]


def read_lines(path: str | Path) -> Iterator[tuple[str, Any]]:
    """Yield the data in each line of the file at `path`, with its location `<path>:<line>`.

    Raises:
      ValueError: A line is incomplete.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            try:
                data = json.loads(line.decode())
            except ValueError as error:
                raise ValueError(f"{where} must be a complete JSON line, got {error}") from None
            yield where, data


def folder_of(device: str) -> Path:
    """Return the folder of the records of a device: `bench/records/<slug of its name>`."""
    return FOLDER / config_files.slug(device)


def shown(path: str | Path) -> str:
    """Return a path as text, without the part that depends on this machine."""
    full, root = Path(path).resolve(), FOLDER.parent.parent.resolve()
    return str(full.relative_to(root)) if full.is_relative_to(root) else full.name


def utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@functools.cache
def environment(commit: str | None = None) -> Values:
    """Return the fields `versions`, `commit` and `dirty` of this process.

    Args:
      commit: The commit whose files this tree contains. Defaults to the commit that git reports. If
        git reports another commit or no commit, `dirty` is None, since a copy may have the .git of
        another tree.
    """
    versions = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "jax": version("jax"),
        "torch": version("torch"),
        "triton": version("triton"),
        "cuda": version("nvidia-cuda-runtime") or version("nvidia-cuda-runtime-cu12"),
        "driver": _driver(),
    }
    here, status = head(Path(__file__).parents[1] / "records"), None
    if here and here.startswith(commit or ""):
        # Records that a run adds do not change what the next run measures.
        changed = "git", "status", "--porcelain", "--", ":/", ":(top,exclude)bench/records"
        commit, status = here, output(*changed)
    dirty = None if status is None else bool(status)
    return {"versions": versions, "commit": commit, "dirty": dirty}


def head(folder: Path) -> str | None:
    """Return the commit that is checked out in `folder`, or None without git."""
    return output("git", "-C", str(folder), "rev-parse", "HEAD")


def _driver() -> str | None:
    listed = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return listed.splitlines()[0] if listed else None


def output(*command: str) -> str | None:
    """Return the output of the command, or None if the command cannot run or fails."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=20,
            cwd=Path(__file__).parents[1],
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
