"""Lists the scripts and tests of the seed system, and the commands that replace them here.

The names are in `seed_names.yaml`. `seed_env` has the environment variables. `markdown` returns the
tables for the documentation.
"""

from pathlib import Path
from typing import NamedTuple

import yaml

from .markdown import table


class Name(NamedTuple):
    """A script, command or flag of the seed system, and its replacement here."""

    seed: str
    here: str
    note: str = ""


_FOUND = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
SCRIPTS, COMMANDS, TRAIN_FLAGS = (
    [Name(*x) for x in _FOUND[name]] for name in ("scripts", "commands", "train_flags")
)
TESTS: dict[str, str] = _FOUND["tests"]


def markdown() -> str:
    """Return tables of scripts, commands, flags of the training script, and names of tests."""
    commands = [
        x
        for x in COMMANDS
        if "pytest" not in x.seed  # tests have a table of their own
        and not any(f"runbook_s{length}" in x.seed for length in (1024, 2048))
    ]
    named = {
        ("seed", "here", ""): SCRIPTS,
        ("command of the documents", "here", ""): commands,
        ("`train_showcase.py`", "`bench.train`", ""): TRAIN_FLAGS,
        ("`pytest -k`", "where"): TESTS.items(),
    }
    return "\n".join(
        table(head, ((_code(name), _code(here), *note) for name, here, *note in rows))
        for head, rows in named.items()
    )


def _code(text: str) -> str:
    return text if text == "-" else f"`{text}`"
