"""Formats measurements with templates. `tables.yaml` has templates for cells of tables, and
`lines.yaml` has templates for printed lines and CSV columns of commands.

A template has the syntax of Python's `str.format`. In addition, a format specification may be a
name of `FORMATS`. A specification may also be a C format, followed by `or` and the text for a
missing value, as in `{ms:%.3f ms or n/a}`.
"""

import collections
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from .harness.markdown import length

MISSING, REFUSED = "-", "unsupported"

type Line = dict[str, Any]
type Kind = Mapping[str, Any]  # of bench/tables.yaml


def ms(time: float) -> str:
    return f"{time:.{2 if time < 10 else 1 if time < 100 else 0}f}"


def packing(lengths: Sequence[int]) -> str:
    if len({*lengths}) == 1:
        return f"{len(lengths)} x {length(lengths[0])}"
    return f"{len(lengths)} documents, {sum(lengths)} tokens"


KINDS, LINES = (
    yaml.safe_load(Path(__file__).with_name(f"{name}.yaml").read_text())
    for name in ("tables", "lines")
)
# Formats in addition to those of Python.
FORMATS: Mapping[str, Callable[[Any], str]] = {
    "ms": ms,
    "tokens": length,
    "packing": packing,
    "documents": lambda lengths: f", {len(lengths)} documents" if lengths else "",
    "GiB": lambda size: f"{size / 2**30:.1f}",
    "GiB to 2 digits": lambda size: f"{size / 2**30:.2f}",
    "difference": lambda share: f"{share:.1g}" if share else "same bits",
    "percent": lambda share: f"{100 * share:.1f}",
    "yes": lambda ok: "yes" if ok else "no",
    "plain": lambda text: text.replace("|", "/"),
    "GiB of MiB": lambda size: f"{size / 2**10:.1f}",
    "ranges": lambda label: label.partition("ranges=")[2] or "none",
}


class _Template(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        spec, absent, instead = format_spec.rpartition("or ")
        if absent and (value is None or value == ""):
            width = re.match(r"%(\d+)", spec)
            return instead.rjust(int(width[1]) if width else 0)
        if absent:
            return spec.rstrip() % value if spec else str(value)
        if value is None:
            raise KeyError
        own = FORMATS.get(format_spec)
        return own(value) if own else format(value, format_spec)


TEMPLATE = _Template()


def text(template: str, line: Line) -> str:
    """Fill a template with the values of a line, and return the text. If a field has no value,
    return `-`.
    """
    try:
        return TEMPLATE.vformat(template, (), line)
    except KeyError:  # there is no such field, or the field has no value
        return MISSING


def cell(template: str, line: Line) -> str:
    """Return `text`. If the template shows a time and the line failed, return the status. If the
    path was refused, return `-`.
    """
    if line.get("status", "ok") != "ok" and "ms:" in template:
        return MISSING if line["status"] == REFUSED else line["status"]
    return text(template, line)


def rows(name: str, lines: Iterable[Line]) -> list[dict[str, str]]:
    """Return the text of each line by the title of the column, for a table with one row per line.
    The status of a line does not matter.
    """
    kind = KINDS[name]
    return [{title: text(x, line) for title, x in kind["cells"].items()} for line in lines]


def columns(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cells of a CSV row of `bench.<name>` by column. A cell whose path does not exist
    is None.
    """

    def value(path: str) -> Any:
        try:
            return TEMPLATE.get_field(path, (), values)[0]
        except (KeyError, AttributeError):
            return None

    return {title: value(path) for title, path in LINES[name]["csv"].items()}


def line(name: str, values: Mapping[str, Any]) -> str:
    """Return a printed line of `bench.<name>`. If a name has no value, the value is None."""
    known = collections.defaultdict(lambda: None, values)
    return TEMPLATE.vformat(LINES[name]["line"], (), known).rstrip()
