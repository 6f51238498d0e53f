"""Tables of tests: files of YAML in this folder. A key that occurs twice is an error."""

from pathlib import Path
from typing import Any

from nsa_core.config_files import parsed


def table(name: str) -> Any:
    return parsed((Path(__file__).parent / f"{name}.yaml").read_text())
