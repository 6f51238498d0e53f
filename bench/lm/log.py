"""The lines of `train.jsonl`. Times are in milliseconds, losses in nats per token.

Framework and attention identify a run. A resumed run appends lines. A later line for a step
replaces an earlier line.
"""

import dataclasses
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import pydantic

from ..harness import records

SCHEMA = 1


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def _line[T](cls: type[T]) -> type[T]:
    make: Any = pydantic.dataclasses.dataclass
    return make(cls, frozen=True, kw_only=True, config=records.STRICT)


@_line
class Line:
    """The fields of every line. `implementation` is the implementation that ran. For NSA
    `implementation` names the implementation of the forward pass.
    """

    framework: str
    attention: str
    implementation: str

    @property
    def kind(self) -> str:
        return type(self).__name__.lower()

    @property
    def run(self) -> str:
        return f"{self.framework}-{self.attention}"


@_line
class Header(Line):
    """The description of a run, written before its first step."""

    model: dict[str, Any]
    parameters: int
    training: dict[str, Any]
    dtype: str
    first_step: int  # above 0 if the run was resumed
    flops: int  # useful FLOPs of a step (`spec.flops`)
    input_sha256: str
    device: str
    versions: dict[str, Any]
    commit: str | None
    dirty: bool | None
    time: str  # UTC
    parallel: dict[str, Any] | None = None  # `parallel.Parallel`; None on one device
    epochs: float | None = None  # how often the run reads every token; None if not known


@_line
class Step(Line):
    """One step. The loss was computed before the weights changed. The gradient norm was computed
    before clipping.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    time_ms: float
    tokens_per_s: float


@_line
class Watch(Line):
    """Values that are observed at intervals. `layers` has the results of `health.layer`, and is
    empty for dense attention.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    mfu: float | None
    layers: list[Any]


@_line
class Evaluation(Line):
    """Mean losses on held-out text after `steps` steps, by name (`bench.lm.measures`)."""

    steps: int
    measures: dict[str, Any]


@_line
class Speed(Line):
    """The cost of a step at one shape, in a run or measured separately (`--throughput`)."""

    model: str
    dtype: str
    batch: int
    seq_len: int
    status: Literal["ok", "oom", "unsupported", "error"]
    reason: str = ""
    time_ms: float | None = None  # median
    p20_ms: float | None = None
    p80_ms: float | None = None
    samples: int = 0
    tokens_per_s: float | None = None
    # in torch from its allocator, in JAX from the compiler's plan of a step
    peak_bytes: int | None = None
    flops: int | None = None
    mfu: float | None = None
    mfu_is: str = ""
    device: str
    versions: dict[str, Any]
    commit: str | None
    dirty: bool | None
    time: str
    devices: int = 1  # devices that share the step; `peak_bytes` is per device

    @property
    def times_ms(self) -> tuple[float, float, float] | None:
        """The median, p20 and p80, as in `records.Record`."""
        return records.times_of(self)


@_line
class Summary(Line):
    """The end of a run."""

    status: Literal["ok", "stopped", "diverged"]
    reason: str = ""
    steps: int  # number of steps done
    held_out_loss: float | None = None
    recall_gain: float | None = None  # `bench.lm.recall`; None if rows are too short
    copied_gain: float | None = None  # the same
    # the same measures, by the distance between passage and copy
    copied_at: dict[str, Any] | None = None
    # By layer: how often the selection contains the source of a copy, and how often a random
    # selection would contain it (`measures.hit`).
    hits: list[Any] | None = None
    # By layer, head and half of the rows, for a passage just beyond the window: how often its
    # block is selected, and how often if another text replaces the passage (`measures.copies`).
    heads: list[Any] | None = None
    # The measures of rows with tasks (`tasks.measured`).
    records_at: dict[str, Any] | None = None
    needle: dict[str, Any] | None = None


# the classes of lines, by the value of `kind` in a line
KINDS: dict[str, type[Line]] = {
    cls.__name__.lower(): cls for cls in (Evaluation, Header, Step, Speed, Summary, Watch)
}


def append(path: str | Path, lines: Iterable[Line]) -> None:
    """Append the lines to the file at `path` in one write."""
    found = [{"kind": x.kind, "schema": SCHEMA, **dataclasses.asdict(x)} for x in lines]
    records.append_lines(path, found)


def read(path: str | Path) -> list[Line]:
    """Return the lines of the file at `path`.

    Raises:
      ValueError: A line is damaged. The error message names file and line.
    """
    return [_checked(data, where) for where, data in records.read_lines(path)]


def _checked(data: Any, where: str) -> Line:
    """Check `data` and return the line."""
    if not isinstance(data, dict) or data.get("kind") not in KINDS:
        raise ValueError(f"{where}: kind must be one of {sorted(KINDS)}, got {data!r:.60}")
    if (schema := data.pop("schema", None)) != SCHEMA:
        raise ValueError(f"{where}: schema must be {SCHEMA}, got {schema!r}")
    return records.checked(KINDS[data.pop("kind")], data, where)
