"""Loads the YAML files of `configs/` into checked dataclasses.

The function `load` reads a YAML file of `configs/` by its name, or a YAML or JSON file by its path.
The function `build` turns the loaded mapping into a dataclass. An unknown key, or a value of
another type than the field, raises an error. `nsa_bench.tune_thresholds` derives
`devices/<device>.yaml` from records.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "configs"
if not FOLDER.is_dir():  # in a checkout `configs/` is next to this package
    FOLDER = FOLDER.parents[1] / "configs"


@functools.cache
def slug(device: str) -> str:
    """Convert the driver's name of a device to a valid part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses repeated keys.

    The loader of PyYAML would use the last of several equal keys.
    """

    def construct_mapping(self, node, deep=False):
        _once([(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
        return super().construct_mapping(node, deep)


# PyYAML reads 1e-4 as a string.
_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, [*"+-0123456789"])


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"key {key!r} occurs twice")
    return dict(pairs)


def parsed(text: str | bytes, kind: str = "YAML") -> Any:
    """Parse a text in YAML or JSON.

    Raises:
      ValueError: the text is not valid, or a key occurs twice.
    """
    try:
        if kind == "JSON":
            return json.loads(text, object_pairs_hook=_once)
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"is not {kind}: {error}") from None


def load(name: str | Path, kind: type = dict) -> Any:
    """Load a mapping, or a value of type `kind`, from a file. `name` means the file
    `configs/<name>.yaml`, or is the path of a YAML or JSON file.

    Raises:
      FileNotFoundError: The file does not exist.
      ValueError: The file is not valid, contains a value of another type, or contains a key
        twice.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml", ".json"):
        path = FOLDER / f"{name}.yaml"
    if not path.is_file():
        known = sorted(p.stem for p in FOLDER.glob("*.yaml"))
        raise FileNotFoundError(f"there is no config file {str(path)!r}; configs/ has {known}")
    try:
        data = parsed(path.read_text(), "JSON" if path.suffix == ".json" else "YAML")
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None
    if not isinstance(data, kind):
        raise ValueError(f"{path} must hold a {kind.__name__}, got {type(data).__name__}")
    return data


def over_base(name: str | Path) -> dict[str, Any]:
    """Return the values of the file `configs/base.yaml`, in which the values of the file `name`
    replace others.
    """
    return overlay(load("base"), load(name))


def overlay(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base`, in which values of `top` replace values of `base`, section by section."""
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        both_maps = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = overlay(old, value) if both_maps else value
    return merged


def build[T](cls: type[T], mapping: Mapping[str, Any], where: str = "config") -> T:
    """Build `cls(**mapping)` for a dataclass, including nested dataclasses. Integers are
    converted to floats and lists to tuples where the field needs them. Other values are not
    converted.

    Raises:
      ValueError: A key is unknown, or a value does not have the type of its field. The error
        message names each key with its section.
    """
    # This import takes a fraction of a second. It runs only before the first file is read. On a
    # GPU this may be the file of the device, which the first automatic choice reads.
    import pydantic

    adapter = pydantic.TypeAdapter(list[cls], config={"extra": "forbid", "strict": True})
    try:
        return adapter.validate_json(json.dumps([mapping], default=str))[0]
    except pydantic.ValidationError as error:
        told = []
        for each in error.errors():
            key = ".".join(str(x) for x in (where, *each["loc"][1:]) if x != "")
            rule = each["msg"].removeprefix("Value error, ")
            if each["type"] == "unexpected_keyword_argument":
                rule = "unknown key"
            # The message of a rule on a whole section already contains the value.
            got = "" if isinstance(each["input"], dict) else f", got {each['input']!r}"
            told.append(f"{key}: {rule}{got}")
        raise ValueError("; ".join(told)) from None
