"""Records for tests of what is derived from them."""

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.harness import runners
from bench.harness.records import Record
from bench.lm import log
from nsa_jax import NSAConfig
from tests.tables import table

TABLE = table("measured")
GPU = TABLE["row"]["device"]


def record(branch: str, implementation: str, ms: float | None, **fields: Any) -> Record:
    """A row; without a time it is one that failed, `wrong` unless said otherwise."""
    length = fields.pop("S", 512)
    config = fields.pop("config", {})
    config = NSAConfig(**config) if isinstance(config, dict) else config
    values = TABLE["row"] | dict(T=length, S=length, config=config.as_dict())
    if ms is None:
        values |= TABLE["failed"]
    else:
        values |= TABLE["timed"] | dict(time_ms=ms, p20_ms=ms * 0.9, p80_ms=ms * 1.1)
        values |= dict(tflops=1 / ms, gbps=1 / ms)
    return Record(**values | fields, branch=branch, implementation=implementation)


def pairs(
    branch: str, gains: dict[int, float | None], fast: str = "fa2", *, base="sdpa", **fields
) -> list:
    """Rows of the kernel and of `base`, 1 ms, at each length; `gains`: speed-up by length."""
    rows = []
    for length, gain in gains.items():
        own = {"S": length}
        if branch == "selected":
            config = NSAConfig(num_selected=length // 64, num_initial=0, num_local=1)
            own = {"S": 8192, "config": config}
        rows.append(record(branch, base, 1.0, **own | fields))
        rows.append(record(branch, fast, gain and 1.0 / gain, **own | fields))
    return rows


def made(rows: Iterable[Any], pairs: Callable = pairs) -> list[Record]:
    """Records of rows of a table: branch, speed-up of a kernel by length, the kernel and fields of
    all of these `pairs`; or branch, implementation, time, and fields of one record.
    """
    found = []
    for branch, one, other, fields in rows:
        if isinstance(one, dict):
            found += pairs(branch, one, other, **fields)
        else:
            found.append(record(branch, one, other, **fields))
    return found


def logged(kind: Any, **fields: Any) -> Any:
    """A line of a training log, of torch's NSA unless said otherwise."""
    name = dict(framework="torch", attention="nsa", implementation="x")
    return kind(**name | TABLE["logged"][kind.__name__] | fields)


def problem(settings, platform="cuda", capability=None, device=None):
    """The problem of these settings in torch on a device."""
    about = {"platform": platform, "capability": capability, "device": device}
    return runners.asked(settings, SimpleNamespace(framework="torch", **about))


def of_kind(kind: Any, path: Path) -> list:
    """The lines of a kind in a training log."""
    return [line for line in log.read(path) if isinstance(line, kind)]
