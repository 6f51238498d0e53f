"""Formats tables in Markdown."""

from collections.abc import Iterable
from typing import Any


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def number(value: float | None, form: str, unit: str = "") -> str:
    """Format a cell. A value that was not measured is `-`."""
    return "-" if value is None else f"{value:{form}}{unit}"


def length(tokens: int) -> str:
    """Format a number of tokens, with multiples of 1024 as k."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def commits(found: Iterable[Any]) -> str:
    """Format the commits of these lines, without repetitions."""
    names = (x.get("commit") if isinstance(x, dict) else x.commit for x in found)
    return ", ".join(dict.fromkeys(name[:7] for name in names if name)) or "-"


def table(head: Iterable[str], rows: Iterable[Iterable[str]] = ()) -> str:
    """Return a Markdown table that ends with a line break. Without `rows` the table is only the
    head."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"{line(cells)}\n" for cells in lines)
