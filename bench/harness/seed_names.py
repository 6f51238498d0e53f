"""Lists the scripts and tests of the seed system, and the commands of this library that replace
them.

The names are in `seed_names.yaml`. `seed_env` has the environment variables.
`bench/reports/seed_names.md.jinja` has the tables of the documentation.
"""

from pathlib import Path
from typing import NamedTuple

import yaml


class Name(NamedTuple):
    """A script, command or flag of the seed system, and its replacement in this library."""

    seed: str
    here: str
    note: str = ""


_FOUND = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
SCRIPTS, COMMANDS, TRAIN_FLAGS = (
    [Name(*x) for x in _FOUND[name]] for name in ("scripts", "commands", "train_flags")
)
TESTS: dict[str, str] = _FOUND["tests"]
