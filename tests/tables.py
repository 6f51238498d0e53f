"""Tables of tests: files of YAML in this folder."""

from pathlib import Path
from typing import Any

import yaml


def table(name: str) -> Any:
    return yaml.safe_load((Path(__file__).parent / f"{name}.yaml").read_text())
