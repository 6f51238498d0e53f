"""Batches of real text: windows of the corpus of `bench.harness.text`, one token a byte."""

from typing import NamedTuple

import numpy as np

from bench.harness import text

CORPUS_BYTES = 8 * 2**20
HELD_OUT_SHARE = 1 / 16


class Batch(NamedTuple):
    """Rows of a batch."""

    tokens: np.ndarray  # integers [rows, length + 1]: inputs and the token after each
    segment_ids: np.ndarray | None = None  # int32, of `tokens`; None: a row is one sequence


class Batches:
    """Windows of the first `size` bytes of the corpus; the last sixteenth is held out.

    A batch follows from the seed and the step alone, so the step is the position in the data,
    and a process that computes some of its rows asks for those.

    Args:
      batch, length: sequences, and tokens that each predicts.
      seed: of the windows.
      size: bytes of the corpus.

    Raises:
      ValueError: the held-out part is shorter than one window.
    """

    def __init__(self, batch: int, length: int, seed: int, size: int = CORPUS_BYTES):
        held_out = int(size * HELD_OUT_SHARE)
        if held_out <= length:
            raise ValueError(
                f"corpus_bytes must be over {int((length + 1) / HELD_OUT_SHARE)} "
                f"for seq_len={length}, got {size}"
            )
        found = text.corpus(size)
        self.sha256 = found.sha256
        self.shape, self.seed = (batch, length + 1), seed
        self.training, self.held_out = np.split(found.tokens, [size - held_out])

    def train(self, step: int, rows: slice = slice(None)) -> Batch:
        """The `rows` of the batch of `step`, uint8."""
        return self._windows(self.training, (self.seed, 0, step), rows)

    def evaluation(self, count: int, rows: slice = slice(None)) -> list[Batch]:
        """The `rows` of `count` batches of held-out text, always the same."""
        return [self._windows(self.held_out, (self.seed, 1, i), rows) for i in range(count)]

    def _windows(self, tokens: np.ndarray, seed: tuple[int, ...], rows: slice) -> Batch:
        batch, width = self.shape
        starts = np.random.default_rng(seed).integers(0, len(tokens) - width + 1, batch)
        return Batch(tokens[starts[rows, None] + np.arange(width)])
