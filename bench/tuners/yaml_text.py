"""Writes other values into the text of a YAML file. Unchanged sections keep their text. Comments
above and below a section always stay.
"""

import re
from collections.abc import Mapping
from typing import Any

import yaml


def edited(text: str, wanted: Mapping[str, Any]) -> str:
    """Return `text`, a mapping in block style, with the values of `wanted` in the order of
    `wanted`."""
    made, *parts = re.split(r"(?m)^(?=\w+:)", text)
    sections = {part.partition(":")[0]: part for part in parts}
    for name, value in wanted.items():
        body, below, _ = re.split(
            r"(?m)((?:^(?:#.*)?\n)*)\Z", sections.get(name, ""), maxsplit=1
        )
        if not body or yaml.safe_load(body)[name] != value:
            body = yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True, width=96)
        made += body + below
    return made
