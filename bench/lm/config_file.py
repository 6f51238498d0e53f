"""Reads the settings of training runs from YAML: `bench.train --config NAME_OR_PATH --set
key=value`.

A value comes from the first of these sources that has the value: the flag on the command line,
`--set`, the file, the default of the command. Keys of the seed system (docs/seed.md) are accepted
(`SEED_KEYS`). An unknown key or a value of another type is an error.
"""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from nsa_core import config_files

from .config import TrainConfig

FOLDER = config_files.FOLDER / "train"
_KEYS = config_files.load(Path(__file__).with_name("train_keys.yaml"))
FLAGS, SEED_KEYS, SEED_IGNORED = _KEYS["flags"], _KEYS["seed"], _KEYS["ignored"]
# Two keys that exclude each other. A later source replaces the key of an earlier source. Both
# keys in one source are an error.
EITHER = {"train.batch": "train.batch_size", "train.batch_size": "train.batch"}


def path_of(name: str) -> Path:
    """Return the file that `--config` names: a path, or a file of `configs/train`. The seed system
    has its runs in `configs/`. A missing path in `configs/` is replaced by the file of the same
    name in `configs/train`.

    Raises:
      FileNotFoundError: there is no such file.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml", ".json"):
        path = FOLDER / f"{name}.yaml"
    elif path.parent == Path("configs") and not path.is_file():
        path = FOLDER / path.name
    if not path.is_file():
        known = sorted(x.stem for x in FOLDER.glob("*.yaml"))
        raise FileNotFoundError(f"no config file {str(path)!r}; configs/train/ has {known}")
    return path


def read(
    name: str | None, changes: Sequence[str] = ()
) -> tuple[TrainConfig, dict[str, Any], list[str]]:
    """Read the file `name` and override its values with `changes`, such as "train.lr=3e-4".

    Returns:
      The config, the given values by key, and a line for each key that has no meaning in this
      library.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: A key is unknown, or a value without a flag has the wrong type or is out of
        range. The error message names the file or `--set`, and the key.
    """
    values: dict[str, Any] = {}
    told: list[str] = []
    if name is not None:
        path = path_of(name)
        values = _renamed(_flat(config_files.load(path)), str(path), told)
        _built(values, str(path))
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"--set must be key=value, got {change!r}")
        try:
            given = {key.strip(): config_files.parsed(text)}
        except ValueError as error:
            raise ValueError(
                f"--set {key} must have a value in YAML, got {text!r}; the value {error}"
            ) from None
        one = _renamed(_flat(given), "--set", told)
        _built(one, "--set")
        for key in one:
            values.pop(EITHER.get(key, ""), None)
        values |= one
    return _built(values, ""), values, told


def apply(values: Mapping[str, Any], given: Sequence[flags.FlagValues]) -> None:
    """Set each flag that corresponds to a key, except flags that the command line sets.

    Raises:
      ValueError: the flag cannot have the value.
    """
    for key, value in values.items():
        if key not in FLAGS or value is None:
            continue
        name, instead = FLAGS[key], FLAGS.get(EITHER.get(key, ""), "")
        if any(instead in own and own[instead].present for own in given):
            continue
        flag = next(own[name] for own in given if name in own)
        if not flag.present:
            try:
                flag.parse(value)
            except flags.IllegalFlagValueError as error:
                raise ValueError(f"{key}: {error}") from None
            flag.using_default_value = False


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested sections to values by dotted keys."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        where = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= _flat(value, f"{where}.")
        elif value is not None or where not in SECTIONS:  # a section may be empty
            found[where] = value
    return found


def _renamed(values: Mapping[str, Any], where: str, told: list[str]) -> dict[str, Any]:
    """Return the values with keys of the seed system renamed to the keys of this library."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key in SEED_IGNORED:
            if key == "train.lr_schedule" and value != "cosine":
                raise ValueError(f"{where}: {key} must be cosine, got {value!r}")
            told.append(f"{where}: {key}={value} is ignored: {SEED_IGNORED[key]}")
            continue
        if key == "data.tokenizer" and value == "byte":
            value = None
        name = SEED_KEYS.get(key, key)
        if name in found:
            raise ValueError(
                f"{where}: {name} must be given only once, got {key} and another name of"
                " this key"
            )
        if name not in KEYS:
            nearest = difflib.get_close_matches(name, KEYS, n=1, cutoff=0)[0]
            section = name.partition(".")[0]
            known = [x for x in KEYS if x.startswith(f"{section}.")] or list(SECTIONS)
            raise ValueError(
                f"{where}: unknown key {key!r}, the nearest is {nearest!r}; known: {known}"
            )
        found[name] = value
    for one, other in EITHER.items():
        if found.get(one) is not None and found.get(other) is not None:
            raise ValueError(f"{where}: {one} and {other} are both given")
    return found


def _built(values: Mapping[str, Any], where: str) -> TrainConfig:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        if key not in FLAGS and value is not None:
            tree.setdefault(section, {})[name] = value
    try:
        return config_files.build(TrainConfig, tree, "")
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


OWN = [
    f"{section}.{key}"
    for section, kind in TrainConfig.__annotations__.items()
    for key in kind.__annotations__
]
KEYS = sorted({*FLAGS, *OWN})
SECTIONS = sorted({key.partition(".")[0] for key in KEYS})
