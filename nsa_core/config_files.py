"""The files of `configs/` and their loader: YAML in, checked dataclasses out.

`load` reads a YAML file of that folder (by name) or of any path; `build` turns the mapping
into a dataclass. An unknown key is an error, and numbers are read by the type of the field
(PyYAML takes `1e-4` for a string). `devices/<device>.yaml` is what `nsa_bench.tune_thresholds` made
of records.
"""

import collections
import dataclasses
import functools
import json
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "configs"
if not FOLDER.is_dir():  # in a checkout: it stands beside this package there
    FOLDER = FOLDER.parents[1] / "configs"


@functools.cache
def slug(device: str) -> str:
    """A device's name, as the driver gives it, as part of a path."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


class _Loader(yaml.SafeLoader):
    """Of mappings whose keys stand once: YAML's own takes the last of two."""

    def construct_mapping(self, node, deep=False):
        _once([key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
        return super().construct_mapping(node, deep)


def _once(keys: list[str]) -> None:
    if twice := [key for key, count in collections.Counter(keys).items() if count > 1]:
        raise ValueError(f"key {twice[0]!r} stands twice")


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _once([key for key, _ in pairs])
    return dict(pairs)


def parsed(text: str | bytes) -> Any:
    """What a text in YAML says.

    Raises:
      ValueError: it is no YAML, or has a key twice.
    """
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"is not YAML: {error}") from None


def load(name: str | Path) -> dict[str, Any]:
    """The mapping in `configs/<name>.yaml`, or in the YAML or JSON file at `name` when that is
    a path.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it holds no mapping, no YAML or JSON, or a key twice.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml", ".json"):
        path = FOLDER / f"{name}.yaml"
    if not path.is_file():
        known = sorted(p.stem for p in FOLDER.glob("*.yaml"))
        raise FileNotFoundError(f"no config file {str(path)!r}; configs/ has {known}")
    if path.suffix == ".json":
        try:
            data = json.loads(path.read_text(), object_pairs_hook=_mapping)
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
    else:
        data = _parsed(path)
    if not isinstance(data, dict):
        raise ValueError(f"{path.name} must hold a mapping, got {type(data).__name__}")
    return data


def _parsed(path: Path) -> Any:
    try:
        return parsed(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None


def sequence(path: str | Path) -> list[Any]:
    """The list in the YAML file at `path`.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it holds no YAML, no list, or a key twice.
    """
    data = _parsed(Path(path))
    if not isinstance(data, list):
        raise ValueError(f"{path} must hold a list, got {type(data).__name__}")
    return data


def overlay(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `top` laid over it, section by section."""
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        both_maps = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = overlay(old, value) if both_maps else value
    return merged


def build[T](cls: type[T], mapping: Mapping[str, Any], where: str = "config") -> T:
    """`cls(**mapping)` for a dataclass, nested dataclasses included.

    Raises:
      ValueError: an unknown key, or a value that is not of the field's type; the message
        names the key with its section.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(mapping) - set(fields))
    if unknown:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}; known: {sorted(fields)}")
    hints = typing.get_type_hints(cls)
    values = {
        key: _coerce(value, hints[key], f"{where}.{key}") for key, value in mapping.items()
    }
    return cls(**values)


def _coerce(value: Any, kind: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} must be a mapping, got {value!r}")
        return build(kind, value, where)  # type: ignore[arg-type]
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        inner = [k for k in typing.get_args(kind) if k is not type(None)]
        if value is None and len(inner) < len(typing.get_args(kind)):
            return None
        reasons = []
        for option in inner:
            try:
                return _coerce(value, option, where)
            except ValueError as error:
                reasons.append(str(error))
        raise ValueError("; or ".join(reasons))
    if origin is typing.Literal:
        if value not in typing.get_args(kind):
            raise ValueError(f"{where} must be one of {typing.get_args(kind)}, got {value!r}")
        return value
    if kind is bool or isinstance(value, bool):
        if kind is bool and isinstance(value, bool):
            return value
        raise ValueError(f"{where} must be of type {kind.__name__}, got {value!r}")
    # PyYAML takes 1e-4 for a text, which a float may be; nothing else is made of another type.
    text = isinstance(value, str)
    if (text and kind not in (str, float)) or (kind is str and not text):
        raise ValueError(f"{where} must be of type {kind.__name__}, got {value!r}")
    try:
        number = kind(value) if kind in (int, float) else value
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{where} must be of type {kind.__name__}, got {value!r}") from None
    if kind is int and isinstance(value, float) and value != number:
        raise ValueError(f"{where} must be of type int, got {value!r}")
    return number
