"""Provides batches of a dataset that is streamed over the network.

The stream is read in blocks of `buffer` documents (the shuffle buffer). The documents of a block
are packed in random order, and the rows of the block are shuffled. A row depends only on the seed
and its index. Since the stream must be read up to the block of a row, the position of each block is
noted, in memory and in a folder. With these positions, a resumed run reads no document before the
block at which the run continues.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..harness import records
from .data import PACKS, Batch, Batches, digest, drawn
from .hub import Hub
from .packing import Packed
from .tokens import Documents, Tokenizer, gathered

BUFFER = 4096  # documents of a block
HELD_OUT_EVERY = 16


class Position(NamedTuple):
    """The position in the stream at which a block begins."""

    block: int = 0
    row: int = 0  # first row of the block, counted over the run
    epoch: int = 0
    document: int = 0  # first document of the block, counted over the epoch
    state: dict[str, Any] | None = None  # state of the source; None at the start of an epoch


class Block(NamedTuple):
    start: Position
    end: Position
    training: Packed
    held_out: Documents


class Streamed(Batches):
    """The rows of a stream. Every sixteenth document is held out.

    Only the held-out documents of the first block are used. After the last document the stream
    begins again, and its blocks are shuffled in another order. The remainder of a block that fills
    no row is dropped.

    Args:
      source: The source of the documents. Sources with equal `repr` must have equal documents.
      by: The tokenizer.
      batch: See `Batches`.
      length: See `Batches`.
      seed: See `Batches`.
      pack: "documents" gives rows with document boundaries, and "none" gives rows without
        boundaries. The tokens are the same for both values of `pack`.
      buffer: Number of documents per block. A block is held in memory.
      notes: Folder for the positions of blocks. By default the positions are only in memory.

    Raises:
      ConnectionError: See `hub.Hub.take`.
      FileNotFoundError: See `hub.Hub.take`.
      ValueError: See `hub.Hub.take`. `ValueError` is also raised if an argument is invalid or if
        the documents do not fill a row.
    """

    def __init__(
        self,
        source: Hub,
        by: Tokenizer,
        batch: int,
        length: int,
        seed: int,
        pack: str,
        *,
        buffer: int = BUFFER,
        notes: Path | None = None,
    ):
        if buffer < HELD_OUT_EVERY:
            raise ValueError(f"shuffle_buffer must be >= {HELD_OUT_EVERY}, got {buffer}")
        if pack not in (packs := PACKS[:2]):
            raise ValueError(f"pack of a stream must be one of {packs}, got {pack!r}")
        self.source, self.by, self.buffer = source, by, buffer
        self.shape, self.seed, self.pack = (batch, length + 1), seed, pack
        self.vocabulary = by.vocabulary
        # The order within a block also depends on the seed and the width of a row, and so does the
        # name of the notes.
        what = source, by.name, pack, buffer, HELD_OUT_EVERY
        self.sha256 = digest(*what)
        key = digest(repr(what), seed, length)[:16]
        self.notes = None if notes is None else notes / f"stream-{key}"
        self.known = [Position(), *self._noted()]
        self.block = self.first = self._read(Position())

    def epochs(self, steps: int) -> None:
        pass

    def train(self, step: int, rows: slice = slice(None)) -> Batch:
        batch = self.shape[0]
        found = [self._row(i) for i in range(step * batch, (step + 1) * batch)[rows]]
        return self._batch(*map(np.concatenate, zip(*found, strict=True)))

    def evaluation(self, count: int) -> list[Batch]:
        held_out = self.first.held_out
        packed = Packed(held_out.tokens, held_out.starts, (self.seed, 3), self.shape[1])
        if not packed.count:
            raise ValueError(
                f"held-out documents of dataset {self.source} must fill a row of "
                f"{self.shape[1]} tokens, got {len(held_out.tokens)} tokens in the first "
                f"{self.buffer} documents; increase --shuffle_buffer or shorten the rows"
            )
        found = drawn(packed, self.shape[0], (self.seed, 1), count)
        return [self._batch(*each) for each in found]

    def _batch(self, tokens: np.ndarray, segment_ids: np.ndarray | None) -> Batch:
        return Batch(tokens, segment_ids if self.pack == "documents" else None)

    def _row(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        if row < self.block.start.row or row > self.block.end.row:
            self._seek(row)
        while row >= self.block.end.row:
            self.block = self._read(self.block.end)
        return self.block.training.rows(np.array([row - self.block.start.row]))

    def _seek(self, row: int) -> None:
        """Make the last noted block at or before `row` the current one."""
        at = max((x for x in self.known if x.row <= row), key=lambda x: x.block)
        if at.block == 0:
            self.block = self.first
            return
        print(
            f"dataset {self.source}: to continue at row {row}, the stream is read from document "
            f"{at.document} of epoch {at.epoch} on. Row {at.row} begins there, and nothing before "
            f"it is read. The shuffle buffer of {self.buffer} documents is filled again, and the "
            "order does not change",
            file=sys.stderr,
        )
        self.block = self._read(at)

    def _read(self, at: Position) -> Block:
        texts, state = self.source.take(at.state, self.buffer)
        kinds: tuple[list[str], list[str]] = [], []
        for i, text in enumerate(texts, at.document):
            kinds[i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1].append(text)
        training, held_out = (gathered(str(self.source), kind, self.by) for kind in kinds)
        seed = self.seed, 2, at.block
        packed = Packed(training.tokens, training.starts, seed, self.shape[1])
        end = Position(at.block + 1, at.row + packed.count, at.epoch, at.document + len(texts))
        if len(texts) < self.buffer:  # this is the last block of its epoch
            end = end._replace(epoch=at.epoch + 1, document=0)
            if end.row == min(x.row for x in self.known if x.epoch == at.epoch):
                raise ValueError(
                    f"dataset {self.source} must fill a row of {self.shape[1]} tokens, got "
                    f"{len(training.tokens)} tokens in {len(texts)} documents"
                )
            print(f"dataset {self.source}: epoch {at.epoch} ends", file=sys.stderr)
        else:
            end = end._replace(state=state)
        self._note(end)
        return Block(at, end, packed, held_out)

    def _note(self, at: Position) -> None:
        if any(x.block == at.block for x in self.known):
            return
        self.known.append(at)
        if self.notes is not None:  # the processes of one run write the same notes
            path = self.notes / f"{at.block:06d}.json"
            records.replace_file(path, json.dumps(at._asdict()))

    def _noted(self) -> list[Position]:
        """Return the positions that are noted in the folder, up to the first position that is
        missing or damaged.
        """
        found: list[Position] = []
        while self.notes is not None:
            try:
                text = (self.notes / f"{len(found) + 1:06d}.json").read_text()
                found.append(Position(**json.loads(text)))
            except (OSError, ValueError, TypeError):
                break
        return found
