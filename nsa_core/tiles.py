"""Which tiles a kernel uses: those measured for its shape on this device, else its heuristic.

`configs/tiles/<device>.json`, which `python -m nsa_bench.tune_tiles` writes, has one entry for each
kernel and `Shape`, with the measurement that chose it. Only an exact match counts. The file is
read when a kernel is built; one that cannot be understood is an error, a missing one is not.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nsa_core import config_files

SCHEMA = 1
FOLDER = config_files.FOLDER / "tiles"
# What can be tuned of each kernel, by the names of its static part's fields.
TUNABLE = {
    "compressed": ("block", "stages"),
    "scores": ("stages", "held"),
    "selected": ("key_stages", "value_stages"),
    "sliding": ("block", "stages"),
}
# Of Triton's kernels, each pass of a branch by itself.
TRITON = {
    f"triton_{step}_{kernel}": ("rows", "keys", "warps", "stages")
    for step in ("compressed", "selected", "sliding")
    for kernel in ("forward", "dq", "dkv")
} | {"triton_scores_scores": ("rows", "keys", "warps", "stages")}
KNOWN = TUNABLE | TRITON
# The fields of NSAConfig that change how much a kernel computes or holds.
SIZES = {
    "compressed": (),
    "scores": (
        "compress_block",
        "compress_stride",
        "select_block",
        "num_selected",
        "num_initial",
        "num_local",
    ),
    "selected": ("select_block", "num_selected"),
    "sliding": ("window",),
}
SIZES |= {name: SIZES[name.split("_")[1]] for name in TRITON}


@dataclasses.dataclass(frozen=True)
class Shape:
    """What an entry is for. A length is the power of two that it does not exceed: tiles that
    fit the longest of a bucket, which is what is measured, fit all of it.
    """

    kernel: str
    dtype: str
    G: int
    D: int
    Dv: int  # 0: the kernel reads no values
    queries_log2: int
    keys_log2: int  # of what the kernel walks over: keys, compressed tokens, or blocks
    sizes: tuple[tuple[str, int], ...]  # the fields of `SIZES`

    @classmethod
    def of(cls, kernel: str, *, dtype, G, D, Dv, queries, keys, config) -> "Shape":
        """Lengths in tokens, compressed tokens or blocks; `config`: an `NSAConfig`."""
        queries_log2, keys_log2 = (max(x - 1, 0).bit_length() for x in (queries, keys))
        sizes = tuple((name, getattr(config, name)) for name in SIZES[kernel])
        return cls(kernel, dtype, G, D, Dv, queries_log2, keys_log2, sizes)

    def entry(self) -> dict[str, Any]:
        """The part of a table's entry that says what it is for."""
        return dataclasses.asdict(self) | {"sizes": dict(self.sizes)}


type Forced = Mapping[str, Mapping[str, int]]
_forced: contextvars.ContextVar[Forced | None] = contextvars.ContextVar("forced", default=None)


@contextlib.contextmanager
def forced(**tiles: Mapping[str, int]) -> Iterator[None]:
    """Within: kernels of these names have these tiles, and for what is not named their
    heuristic, whatever the tables say (the tuner)."""
    token = _forced.set(tiles)
    try:
        yield
    finally:
        _forced.reset(token)


def are_forced() -> bool:
    """Whether `forced` is in force."""
    return _forced.get() is not None


def tiles_of(
    kernel: str,
    query: Any,
    device: str | None,
    *,
    kv_heads: int,
    keys: int,
    Dv: int,
    config: Any,
    otherwise: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The tiles of `kernel`, integers by the names of its static part's fields.

    Args:
      query: `[B, T, H, D]`; its shape and dtype are read.
      device: what the driver calls the GPU that the kernel runs on; None: no GPU.
      keys: how many it walks over: keys, compressed tokens or blocks.
      config: the `NSAConfig`.
      otherwise: the heuristic; None: the defaults of the static part.

    Raises:
      ValueError: the table of the device is damaged, or of another device.
    """
    given = (_forced.get() or {}).get(kernel)
    if given is None:
        given = {}
        measured = {} if device is None else table(config_files.slug(device))
        if measured:
            _, queries, heads, width = query.shape
            dtype = str(query.dtype).removeprefix("torch.")
            group = heads // kv_heads
            sizes = {"G": group, "D": width, "Dv": Dv, "queries": queries, "keys": keys}
            shape = Shape.of(kernel, dtype=dtype, config=config, **sizes)
            given = measured.get(shape, {})
    return {**(otherwise or {}), **given}


@functools.cache
def table(name: str) -> dict[Shape, dict[str, int]]:
    """The tiles in `configs/tiles/<name>.json`; none where there is no such file."""
    path = FOLDER / f"{name}.json"
    if not path.is_file():
        return {}
    return {shape: entry["tiles"] for shape, entry in read(path).items()}


def read(path: Path) -> dict[Shape, dict[str, Any]]:
    """The entries of a table.

    Raises:
      ValueError: it is damaged, or of another device than its name says; the message names
        the file and the entry.
    """
    data = config_files.load(path)
    if data.get("schema") != SCHEMA:
        raise ValueError(f"{path}: schema must be {SCHEMA}, got {data.get('schema')!r}")
    device, listed = data.get("device"), data.get("entries")
    if not isinstance(device, str) or config_files.slug(device) != path.stem:
        raise ValueError(f"{path} must hold the tiles of its device, got those of {device!r}")
    if not isinstance(listed, list):
        raise ValueError(f"{path}: entries must be a list, got {listed!r}")
    entries: dict[Shape, dict[str, Any]] = {}
    for i, entry in enumerate(listed):
        where = f"{path}: entries[{i}]"
        shape = _shape(entry, where)
        if shape in entries:
            raise ValueError(f"{where} is for the same as an entry before it: {shape}")
        entries[shape] = entry
    return entries


def _shape(entry: Any, where: str) -> Shape:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be a mapping, got {entry!r}")
    kernel = entry.get("kernel")
    if kernel not in KNOWN:
        raise ValueError(f"{where}: kernel must be one of {sorted(KNOWN)}, got {kernel!r}")
    for name, names in (("tiles", KNOWN[kernel]), ("sizes", SIZES[kernel])):
        found = entry.get(name)
        if not isinstance(found, dict) or sorted(found) != sorted(names):
            raise ValueError(f"{where}: {name} of {kernel} must be {names}, got {found!r}")
        low = 1 if name == "tiles" else 0
        if any(type(x) is not int or x < low for x in found.values()):
            raise ValueError(f"{where}: {name} must be integers from {low}, got {found!r}")
    numbers: dict[str, Any] = {}
    for field in dataclasses.fields(Shape)[2:-1]:
        numbers[field.name] = value = entry.get(field.name)
        if type(value) is not int or value < 0:
            raise ValueError(f"{where}: {field.name} must be an integer, got {value!r}")
    if not isinstance(entry.get("dtype"), str):
        raise ValueError(f"{where}: dtype must be a name, got {entry.get('dtype')!r}")
    sizes = tuple((name, entry["sizes"][name]) for name in SIZES[kernel])
    return Shape(kernel, entry["dtype"], **numbers, sizes=sizes)
