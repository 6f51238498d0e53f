"""Measures whether a language model predicts a passage better after an earlier occurrence of the
passage.

Each row of held-out text gives three rows. The row `read` ends in a copy of an earlier passage p of
64 tokens. The other two rows are copies of `read`, in which a passage q of another row replaces one
of the two occurrences of p:

    `read`      .. p_1 .. p_64 .. .. .. .. .. .. p_1 .. p_64
    `control`   .. p_1 .. p_64 .. .. .. .. .. .. q_1 .. q_64
    `unread`    .. q_1 .. q_64 .. .. .. .. .. .. p_1 .. p_64

Two differences of mean losses of the last 64 tokens, in nats per token, are measured:

- `recall` is the loss in the row `control` minus the loss in the row `read`.
- `copied` is the loss in the row `unread` minus the loss in the row `read`.

For `copied`, the two rows end in the same 64 tokens after the same preceding tokens. Only the
earlier passage differs. The whole difference `copied` therefore comes from the earlier passage. The
earlier passage is beyond the sliding window, so that only the compressed and the selected branch
can reach this passage.

`recall` also includes the gain from the fact that p fits the text of its row better than q. A model
that only counts the tokens of the preceding window already gains 0.5 for rows of 2k tokens, and 0.2
for rows of 8k tokens. These gains were measured on `configs/corpus/python.yaml`.
"""

from typing import NamedTuple

import numpy as np

from .data import Batch

PASSAGE = 64  # tokens


class Copies(NamedTuple):
    """The three kinds of rows. Each kind has one row per row of the original batch, in the same
    order."""

    read: Batch
    control: Batch
    unread: Batch


def passages(batch: Batch, window: int, seed: tuple[int, ...]) -> np.ndarray | None:
    """Return a random position per row of `batch`, at which the passage begins.

    Args:
      batch: The rows.
      window: Minimum number of tokens between the passage and its copy at the end of the row.
      seed: Seed of the positions.

    Returns:
      Integers `[rows]`. The result is None if rows are packed or too short, or if there is only
      one row.
    """
    rows, width = batch.tokens.shape
    places = width - 2 * PASSAGE - window
    if batch.segment_ids is not None or rows < 2 or places < 1:
        return None
    return np.random.default_rng(seed).integers(0, places, rows)


def copies(batch: Batch, starts: np.ndarray) -> Copies:
    """Return the three kinds of rows for `batch`, whose passages begin at `starts`. The passage q
    comes from the same position of the previous row."""
    tokens = batch.tokens
    columns = starts[:, None] + np.arange(PASSAGE)
    passage = np.take_along_axis(tokens, columns, axis=1)
    other = np.take_along_axis(np.roll(tokens, 1, axis=0), columns, axis=1)
    read, control, unread = (tokens.copy() for _ in Copies._fields)
    read[:, -PASSAGE:] = unread[:, -PASSAGE:] = passage
    control[:, -PASSAGE:] = other
    np.put_along_axis(unread, columns, other, axis=1)
    return Copies(Batch(read), Batch(control), Batch(unread))
