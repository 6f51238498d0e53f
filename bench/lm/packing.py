"""Divides all tokens of an epoch into rows. The tokens are one stream (`Stream`), or documents in
random order with boundaries (`Packed`).
"""

import numpy as np


class Stream:
    """All tokens once, as rows of `width` tokens without boundaries. The order of the rows is
    drawn from `seed`.

    In the stream, a row begins with the last token of the row before it, so that a token is
    predicted at most once. The position at which the stream begins is also drawn from `seed`. At
    most a part of a row is left over after the last row.

    Args:
      tokens: integers `[total]`.
      seed: seed of the order and of the first position.
      width: tokens of a row.
    """

    def __init__(self, tokens: np.ndarray, seed: tuple[int, ...], width: int):
        self.tokens, self.width = tokens, width
        random = np.random.default_rng(seed)
        spare = (len(tokens) - 1) % (width - 1)
        self.begin, self.count = (
            int(random.integers(spare + 1)),
            (len(tokens) - 1) // (width - 1),
        )
        self.order = random.permutation(self.count)

    def rows(self, indices: np.ndarray) -> tuple[np.ndarray, None]:
        """Return the tokens `[rows, width]` of the rows at the positions `indices` in the order.
        Each index is below `count`.
        """
        first = self.begin + self.order[indices] * (self.width - 1)
        return self.tokens[first[:, None] + np.arange(self.width)], None


class Packed:
    """All documents once, as rows of `width` tokens. The order of the documents is drawn from
    `seed`.

    A row begins with the last token of the row before it, so that every token except the first is a
    target exactly once. Tokens at the end that fill no row are dropped. A document that is longer
    than the rest of its row continues in the next row. The rows are shuffled, so that a long
    document does not fill a batch.

    Args:
      tokens: integers `[total]`.
      starts: int64 `[documents + 1]`: where each document begins in `tokens`, and the end of the
        last document.
      seed: seed of the order of documents and of the order of rows.
      width: tokens of a row.
    """

    def __init__(
        self, tokens: np.ndarray, starts: np.ndarray, seed: tuple[int, ...], width: int
    ):
        self.tokens, self.width = tokens, width
        order = np.random.default_rng((*seed, 0)).permutation(len(starts) - 1)
        lengths = np.diff(starts)[order]
        self.ends = np.cumsum(lengths)  # boundaries of the documents in their new order
        self.moved = starts[:-1][order] - (self.ends - lengths)
        total = int(self.ends[-1]) if len(order) else 0
        self.count = max(0, (total - 1) // (width - 1))
        self.order = np.random.default_rng((*seed, 1)).permutation(self.count)

    def rows(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows at the positions `indices` in the order. Each index is below `count`.

        Returns:
          tokens: `[rows, width]`.
          segment_ids: int32 `[rows, width]`, the index of each token's document in the row, from 0.
        """
        first = self.order[indices] * (self.width - 1)
        place = first[:, None] + np.arange(self.width)
        document = np.searchsorted(self.ends, place, side="right")
        tokens = self.tokens[self.moved[document] + place]
        return tokens, (document - document[:, :1]).astype(np.int32)
