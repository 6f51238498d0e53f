"""Plans on the host which rows of a paged call are computed together. A call with prompts and
decode rows is split into runs of adjacent rows. Rows with few tokens, as in decoding, run
together in one launch of the kernels that read pages. For a prompt, only its own pages are
gathered. Without runs, a single prompt would cause all rows to be gathered, each with the full
width of the page table.
"""

import operator
from collections.abc import Sequence
from typing import NamedTuple

from kernels_pallas.triton.decode_descriptions import QUERIES
from nsa_core import validate

# Limits for a run of several gathered rows. One limits the keys that are copied from pages, and
# the other limits padding queries.
GATHERED_KEYS = 1 << 17
PADDING = 1 << 9
# Limit for a run on kernels that read pages. Up to this number of queries, including padding, a
# run costs less than another launch. In a larger run at most half of the queries may be padding.
ONE_LAUNCH = 1 << 6


class Run(NamedTuple):
    """Adjacent rows that are computed in one call.

    Attributes:
      rows: The slice of rows of the page table.
      tokens: The slice of tokens of the call.
      queries: Number of queries of the row with the most queries.
      columns: Number of columns of the page table that the longest row uses.
      whole: whether the rows have no tokens except the tokens of the call.
    """

    rows: slice
    tokens: slice
    queries: int
    columns: int
    whole: bool

    @property
    def few(self) -> bool:
        """Whether kernels on pages support `queries` queries per row."""
        return self.queries <= QUERIES

    @property
    def padding(self) -> int:
        """The number of padding queries, summed over all rows of the run."""
        rows = self.rows.stop - self.rows.start
        return rows * self.queries - (self.tokens.stop - self.tokens.start)

    @property
    def even(self) -> bool:
        """Whether each row has `queries` tokens."""
        return self.padding == 0


def plan_runs(starts: Sequence[int], lengths: Sequence[int], page_size: int) -> list[Run]:
    """Return the runs of a call in the order of its rows.

    No run contains a row without new tokens. No run contains a row of length 0 with more than
    `QUERIES` tokens.

    Args:
      starts: `[B + 1]`, the first new token of each row (`cu_seqlens_q`).
      lengths: `[B]`, the length of each row including the new tokens, or an upper bound for the
        length. A row of length 0 is padding.
      page_size: tokens per page (`select_block`).

    Raises:
      ValueError: An argument is invalid. `starts` and `lengths` must be lists of ints, and sizes
        must be positive ints. `starts` must ascend and have one entry more than `lengths`, and each
        row must be at least as long as its new tokens.
    """
    starts, lengths = _ints("starts", starts), _ints("lengths", lengths)
    if len(starts) != len(lengths) + 1:
        raise ValueError(
            f"starts must have {len(lengths) + 1} entries, one more than lengths, "
            f"got {len(starts)}"
        )
    validate.sizes(page_size=page_size)
    runs: list[Run] = []
    for row, length in enumerate(lengths):
        begin, end = starts[row : row + 2]
        if end < begin:
            raise ValueError(f"starts must not descend, got {begin}, {end} at row {row}")
        count = end - begin
        if 0 < length < count:
            raise ValueError(
                f"lengths must include the new tokens, got {length} with {count} new tokens at row "
                f"{row}"
            )
        if count == 0 or (length == 0 and count > QUERIES):
            continue
        columns = -(-max(length, 1) // page_size)
        one = Run(slice(row, row + 1), slice(begin, end), count, columns, count == length)
        joined = _join(runs[-1], one, page_size) if runs else None
        if joined is None:
            runs.append(one)
        else:
            runs[-1] = joined
    return runs


def _ints(name: str, found: Sequence[int]) -> list[int]:
    try:
        return [*map(operator.index, found)]
    except TypeError:
        raise ValueError(f"{name} must be a list of ints, got {found!r}") from None


def fills_pages_of_others(count: int, lengths: Sequence[int], page_size: int) -> bool:
    """Return whether a row may begin with pages that another row fills in the same call of `count`
    tokens per row. Engines that share prefixes make calls in which rows share pages. If the result
    is True, a launch that both appends and attends must not run.

    Args:
      lengths: `[B]`, the length of each row including the new tokens.
    """
    filled = {
        length // page_size * page_size for length in lengths if length % page_size < count
    }
    return any(length - count in filled for length in lengths if length > count)


def _join(run: Run, row: Run, page_size: int) -> Run | None:
    """Return a run that joins two runs, if the same kernels support both and if copied keys and
    padding stay within their limits. Otherwise return None.
    """
    if run.rows.stop != row.rows.start or run.few != row.few:
        return None
    # rows without earlier tokens do not need their pages
    if not run.few and run.whole != row.whole:
        return None
    both = Run(
        slice(run.rows.start, row.rows.stop),
        slice(run.tokens.start, row.tokens.stop),
        max(run.queries, row.queries),
        max(run.columns, row.columns),
        run.whole and row.whole,
    )
    rows = both.rows.stop - both.rows.start
    if both.few:
        fits = rows * both.queries <= max(
            ONE_LAUNCH, 2 * (both.tokens.stop - both.tokens.start)
        )
    else:
        fits = rows * both.columns * page_size <= GATHERED_KEYS and both.padding <= PADDING
    return both if fits else None
