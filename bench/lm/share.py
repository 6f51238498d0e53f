"""Determines which rows of a global batch each process computes, and which tokens have a loss."""

import dataclasses
from collections.abc import Callable

import numpy as np

from .data import Batch, joined


@dataclasses.dataclass(frozen=True)
class Share:
    """The rows of one of `ranks` processes. A process has its slice of each micro-batch, in the
    order of micro-batches.

    A micro-batch consists of `batch / accumulate` adjacent rows of the global batch. The number of
    processes does not change the rows of a micro-batch.

    Attributes:
      batch: Rows of the global batch.
      accumulate: Number of micro-batches.
      rank: Index of this process.
      ranks: Number of processes.

    Raises:
      ValueError: The batch cannot be divided.
    """

    batch: int
    accumulate: int = 1
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        parts = self.ranks * self.accumulate
        if self.batch % parts:
            raise ValueError(
                f"batch must be a multiple of {parts}, the number of processes or devices "
                f"({self.ranks}) times accumulate ({self.accumulate}), got {self.batch}"
            )

    @property
    def rows(self) -> int:
        """The number of rows of this process per micro-batch."""
        return self.batch // (self.ranks * self.accumulate)

    def slices(self) -> list[slice]:
        """Return the slice of this process for each micro-batch."""
        whole = self.batch // self.accumulate
        starts = (i * whole + self.rank * self.rows for i in range(self.accumulate))
        return [slice(start, start + self.rows) for start in starts]

    def of(self, fetch: Callable[[slice], Batch]) -> Batch:
        """Fetch the rows of this process from each micro-batch. Return the fetched rows one after
        the other.
        """
        return joined([fetch(rows) for rows in self.slices()])

    def rows_of(self, whole: np.ndarray) -> np.ndarray:
        """Return this process's rows of an array with one entry per row of the global batch."""
        return np.concatenate([whole[rows] for rows in self.slices()])

    def of_whole(self, batch: Batch) -> Batch:
        """Return this process's rows of a global batch that is available as a whole."""
        tokens, ids = batch
        return Batch(self.rows_of(tokens), None if ids is None else self.rows_of(ids))


def split(batch: Batch, count: int) -> list[Batch]:
    """Split `batch` into `count` parts of equal size."""
    tokens, ids = batch
    parts = [None] * count if ids is None else np.split(ids, count)
    return list(map(Batch, np.split(tokens, count), parts))


def counted(batch: Batch) -> np.ndarray | None:
    """Return whether each token predicts a token of its own document, bool `[rows, length]`. Return
    None if every token predicts a token of its own document.
    """
    ids = batch.segment_ids
    if ids is None:
        return None
    return (ids[:, 1:] == ids[:, :-1]) & (ids[:, :-1] >= 0)


def count(batch: Batch) -> int:
    """Return the number of tokens of the batch that have a loss."""
    which = counted(batch)
    return batch.tokens[:, 1:].size if which is None else int(which.sum())


def begins(batch: Batch) -> np.ndarray:
    """Return whether a document, or padding, begins at each token of the inputs, bool `[rows,
    length]`."""
    assert batch.segment_ids is not None
    ids = batch.segment_ids[:, :-1]
    return np.diff(ids, axis=1, prepend=ids[:, :1] - 1) != 0


def check_vocabulary(batch: Batch, vocabulary: int) -> None:
    """Raise `ValueError` if a token is not in the vocabulary of the model."""
    tokens = batch.tokens
    if np.iinfo(tokens.dtype).max < vocabulary or not tokens.size:
        return
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocabulary:
        raise ValueError(
            f"vocabulary must exceed every token of the data, got vocabulary={vocabulary} "
            f"and tokens {low} to {high}"
        )
