"""A needle for a language model: does it predict a passage better that it has read before?

A row of held-out text ends in a passage that stands in it further up, or, the control, in one
that stands at the same place of another row. All tokens before are the same in both, and over
many rows both passages come from the same text, so that what differs is what was read:

    row       .. p_1 .. p_64 .. .. .. .. .. .. p_1 .. p_64
    control   .. p_1 .. p_64 .. .. .. .. .. .. q_1 .. q_64

    gain = (mean loss of the control - mean loss of the row) * tokens / 64     nats a token

The passage lies beyond the sliding window: only compressed and selected tokens tell of it.
"""

import numpy as np

from .data import Batch

PASSAGE = 64  # tokens


def pair(batch: Batch, window: int, seed: tuple[int, ...]) -> tuple[Batch, Batch] | None:
    """Rows of `batch` that end in what they hold, and in what the row before holds.

    Args:
      batch: two rows or more, of one sequence each.
      window: tokens between the passage and its copy, at least.
      seed: of the places.

    Returns:
      None where rows are packed, where there is one only, or where they are too short.
    """
    tokens, segments = batch
    rows, width = tokens.shape
    places = width - 2 * PASSAGE - window
    if segments is not None or rows < 2 or places < 1:
        return None
    columns = passages(batch, window, seed)[:, None] + np.arange(PASSAGE)
    found = np.take_along_axis(tokens, columns, axis=1)
    others = np.take_along_axis(np.roll(tokens, 1, axis=0), columns, axis=1)
    copies = tokens.copy(), tokens.copy()
    for each, passage in zip(copies, (found, others), strict=True):
        each[:, -PASSAGE:] = passage
    return Batch(copies[0]), Batch(copies[1])


def passages(batch: Batch, window: int, seed: tuple[int, ...]) -> np.ndarray:
    """Where in the rows of `batch` the passages of `pair` begin."""
    rows, width = batch.tokens.shape
    return np.random.default_rng(seed).integers(0, width - 2 * PASSAGE - window, rows)


def gain(losses: np.ndarray, tokens: int) -> float:
    """Nats a token of the passage, of mean losses `[batches, 2]` of rows of `tokens`."""
    return float((losses[:, 1] - losses[:, 0]).mean() * tokens / PASSAGE)
