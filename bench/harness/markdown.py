"""Tables in Markdown."""

from collections.abc import Iterable


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def number(value: float | None, form: str, unit: str = "") -> str:
    """A cell; one that was not measured is -."""
    return "-" if value is None else f"{value:{form}}{unit}"


def length(tokens: int) -> str:
    """Tokens; multiples of 1024 in k."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def table(head: Iterable[str], rows: Iterable[Iterable[str]] = ()) -> str:
    """Ends with a line break; without `rows` it is the head, which lines of a run follow."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"{line(cells)}\n" for cells in lines)
