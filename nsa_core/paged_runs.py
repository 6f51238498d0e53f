"""Which rows of a paged call run together, planned on the host.

A call of prompts and decode rows is cut into runs of rows that stand side by side: decode rows stay
on the kernels that read pages, and a prompt's rows are gathered from as many pages as they have.
Without it a prompt in a call would gather every row, each as wide as the page table.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kernels_pallas.triton.decode_descriptions import QUERIES

# Of one run with several rows that are gathered, at most: keys that it copies from pages, and
# queries that pad rows to the longest.
GATHERED_KEYS = 1 << 17
PADDING = 1 << 9


class Run(NamedTuple):
    """Rows side by side that one call takes.

    Attributes:
      rows: of the page table.
      tokens: of the call.
      queries: of the longest row.
      columns: of the page table that the longest row reaches.
      even: whether each row has `queries` tokens, as few as kernels on pages take.
    """

    rows: slice
    tokens: slice
    queries: int
    columns: int
    even: bool


def plan_runs(starts: Sequence[int], lengths: Sequence[int], page_size: int) -> list[Run]:
    """The runs of a call, in its order. Rows without a new token are in none.

    Args:
      starts: `[B + 1]`, where each row's new tokens begin (`cu_seqlens_q`).
      lengths: `[B]`, of each row with the new tokens, or bounds of that.
      page_size: tokens of a page (`select_block`).

    Raises:
      ValueError: `starts` is not a row longer than `lengths`, or descends; a size below 1.
    """
    if len(starts) != len(lengths) + 1:
        raise ValueError(
            f"starts must have {len(lengths) + 1} entries, one more than lengths, "
            f"got {len(starts)}"
        )
    if page_size < 1:
        raise ValueError(f"page_size must be at least 1, got {page_size}")
    runs: list[Run] = []
    for row, length in enumerate(lengths):
        begin, end = starts[row : row + 2]
        if end < begin:
            raise ValueError(f"starts must not descend, got {begin}, {end} at row {row}")
        if begin == end:
            continue
        columns, count = -(-max(length, 1) // page_size), end - begin
        one = Run(slice(row, row + 1), slice(begin, end), count, columns, count <= QUERIES)
        joined = _join(runs[-1], one, page_size) if runs else None
        if joined is None:
            runs.append(one)
        else:
            runs[-1] = joined
    return runs


def _join(run: Run, row: Run, page_size: int) -> Run | None:
    """Both as one run, where the same kernels take them and copies stay within bounds."""
    if run.rows.stop != row.rows.start or run.even != row.even:
        return None
    rows = slice(run.rows.start, row.rows.stop)
    queries, columns = max(run.queries, row.queries), max(run.columns, row.columns)
    tokens, count = slice(run.tokens.start, row.tokens.stop), rows.stop - rows.start
    if run.even:
        fits = run.queries == row.queries
    else:
        padding = count * queries - (tokens.stop - tokens.start)
        fits = count * columns * page_size <= GATHERED_KEYS and padding <= PADDING
    return Run(rows, tokens, queries, columns, run.even) if fits else None
