"""Defines the problems of `bench.selection`. A problem has sizes from lists, and a layout of the
selected blocks."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

import numpy as np
import pydantic
from annotated_types import Gt, MinLen

from .records import STRICT

SPANS = {"few": 1, "many": 8, "mixed": 4}  # runs of adjacent blocks


class Row(NamedTuple):
    """One problem: `N` queries of `H` heads select `L` keys, in blocks of `l_sel`."""

    N: int
    H: int
    D: int
    Dv: int
    L: int
    dist: str
    l_sel: int

    @property
    def count(self) -> int:
        """The number of selected blocks per query."""
        return self.L // self.l_sel

    @property
    def runs(self) -> int:
        return SPANS[self.dist]

    @property
    def why_not(self) -> str:
        """The reason why the problem does not exist, or an empty string."""
        if self.runs <= self.count:
            return ""
        needed = f"{self.runs} runs need {self.runs} blocks of {self.l_sel} tokens"
        return f"{needed}, but L={self.L} has only {self.count}"


type Sizes = Annotated[list[Annotated[int, Gt(0)]], MinLen(1)]


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class Matrix:
    """The rows of a table, which are all combinations of its lists. The attributes have the names
    of columns.

    Attributes:
      N: Queries per sequence.
      H: Query heads.
      D: Width of queries and keys.
      Dv: Width of values.
      L: Numbers of selected keys per query, keyed by the layout of the blocks (`SPANS`).
      l_sel: Sizes of a selection block in tokens. A row uses the first size that divides `L` and
        gives at least one block per run, or the smallest size if no size does.
      streams: Numbers of concurrent calls.
      kernel: The implementation to measure, by default the automatic choice.
      ref: The baseline, by default the portable path.
      beside: Further implementations, with separate columns.
      dtype: A name of `problems.PRECISIONS`, by default the dtype of the command.
      iters: Samples of a row, by default as in the command.
      warmup: Calls before the first sample, by default as in the command.

    Raises:
      ValueError: A list is empty or has values other than positive integers, or a length of `L` is
        not a multiple of the smallest block.
    """

    N: Sizes
    H: Sizes
    D: Sizes
    Dv: Sizes
    L: Annotated[dict[Literal["few", "many", "mixed"], Sizes], MinLen(1)]
    l_sel: Sizes
    streams: Sizes
    kernel: str | None = None
    ref: str | None = None
    beside: list[str] = dataclasses.field(default_factory=list)
    dtype: Literal["bf16", "f16", "f32"] | None = None
    iters: int | None = None
    warmup: int | None = None

    @pydantic.model_validator(mode="after")
    def _check(self):
        least = min(self.l_sel)
        if any(length % least for length in self.lengths):
            raise ValueError(f"L_list must be multiples of l_sel={least}, got {self.lengths}")
        return self

    @property
    def lengths(self) -> list[int]:
        """All lengths in `L`, ascending."""
        return sorted({length for listed in self.L.values() for length in listed})

    def rows(self) -> Iterator[Row]:
        """Yield a row for every combination. The innermost loop is over the layouts of blocks, and
        the next loop is over the lengths.
        """
        for H, D, Dv, N in itertools.product(self.H, self.D, self.Dv, self.N):
            for length in self.lengths:
                for dist in (name for name, listed in self.L.items() if length in listed):
                    yield Row(N, H, D, Dv, length, dist, self._block(length, SPANS[dist]))

    def _block(self, length: int, runs: int) -> int:
        fits = (x for x in self.l_sel if length % x == 0 and length // x >= runs)
        return next(fits, min(self.l_sel))


def spans(rows: int, blocks: int, count: int, runs: int, seed: int) -> np.ndarray:
    """Return random blocks below `blocks`, int32 `[rows, count]`. Each row ascends and consists of
    `runs` runs that do not touch.

    Raises:
      ValueError: The runs do not fit in `blocks` blocks.
    """
    free = blocks - count - (runs - 1)
    if not 1 <= runs <= count or free < 0:
        raise ValueError(f"{count} of {blocks} blocks cannot form {runs} runs")
    random = np.random.default_rng(seed)
    before = np.sort(random.integers(0, free + 1, (rows, runs)), axis=-1) + np.arange(runs)
    # the run to which each block belongs; runs have similar sizes
    run = np.sort(np.arange(count) % runs)
    return (before[:, run] + np.arange(count)).astype(np.int32)
