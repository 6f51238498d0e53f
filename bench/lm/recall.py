"""Measures whether a language model predicts a passage better if it has read it before.

A row of held-out text ends in a passage p that occurs in it before. Two further rows are the same
except in one of the two positions, which has the text of another row:

    read      .. p_1 .. p_64 .. .. .. .. .. .. p_1 .. p_64
    control   .. p_1 .. p_64 .. .. .. .. .. .. q_1 .. q_64
    unread    .. q_1 .. q_64 .. .. .. .. .. .. p_1 .. p_64

    recall    loss of the control's last 64 tokens - loss of those of the row read
    copied    loss of the last 64 tokens of the row unread - loss of those of the row read

in nats per token. Over many rows p and q come from the same text, but p fits the text around it
better, which `recall` includes. A model that only counts the tokens of the window before gains 0.5
at rows of 2k and 0.2 at rows of 8k of `configs/corpus/python.yaml`. For `copied`, both rows end
in the same 64 tokens, after the same preceding tokens; only the earlier passage differs. The whole
difference comes from the first occurrence of the passage, which is beyond the sliding window, in
reach of compressed and selected tokens only.
"""

from typing import NamedTuple

import numpy as np

from .data import Batch

PASSAGE = 64  # tokens


class Copies(NamedTuple):
    """The three kinds of rows, in the order of the rows that they are made of."""

    read: Batch
    control: Batch
    unread: Batch


def passages(batch: Batch, window: int, seed: tuple[int, ...]) -> np.ndarray | None:
    """Random positions in the rows of `batch` at which the passage begins that the end of the
    row repeats.

    Args:
      batch: two rows or more, of one sequence each.
      window: tokens between the passage and its copy, at least.
      seed: seed of the positions.

    Returns:
      None if rows are packed or too short, or if there is only one.
    """
    rows, width = batch.tokens.shape
    places = width - 2 * PASSAGE - window
    if batch.segment_ids is not None or rows < 2 or places < 1:
        return None
    return np.random.default_rng(seed).integers(0, places, rows)


def copies(batch: Batch, starts: np.ndarray) -> Copies:
    """Make the three kinds of rows from `batch`, whose passages begin at `starts`. The other
    texts come from the previous row."""
    tokens = batch.tokens
    columns = starts[:, None] + np.arange(PASSAGE)
    passage = np.take_along_axis(tokens, columns, axis=1)
    other = np.take_along_axis(np.roll(tokens, 1, axis=0), columns, axis=1)
    read, control, unread = (tokens.copy() for _ in Copies._fields)
    read[:, -PASSAGE:] = unread[:, -PASSAGE:] = passage
    control[:, -PASSAGE:] = other
    np.put_along_axis(unread, columns, other, axis=1)
    return Copies(Batch(read), Batch(control), Batch(unread))
