"""Provides batches of tokens of real text. A batch depends only on the dataset, the seed and the
step.

The function `load` returns the batches of the dataset that `--dataset` names. Each process requests
only the rows of a batch that it computes. A row is the same in every process, for any number of
processes.
"""

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..harness import text
from . import corpus, sources, tokens
from .packing import Packed, Stream
from .tokens import Documents

CORPUS_BYTES = 8 * 2**20
HELD_OUT_SHARE = 1 / 16
TEXT = "text"  # the dataset that needs no file and no network

PACKS = ("documents", "none", "once")


class Batch(NamedTuple):
    """Rows of a batch."""

    tokens: np.ndarray  # integers [rows, length + 1]: the inputs, and the last target
    # int32, the document of each of `tokens`; None if a row is one sequence
    segment_ids: np.ndarray | None = None


class Batches:
    """Rows of local documents. The last sixteenth of the tokens is held out, unless
    `documents.held_out` gives another number of tokens.

    A batch depends only on the seed and the step, so that the step is the position in the data.

    Args:
      batch: Rows of a batch.
      length: Number of tokens that a row predicts. A row has `length + 1` tokens.
      seed: Seed of the order.
      size: Bytes of the corpus of `bench.harness.text`, if no documents are given.
      documents: The source of the rows. The held-out part may begin within a document.
      pack: "none": windows at random positions in the stream of all tokens. "once": every row of
        the stream once per epoch; held-out rows are evenly spaced, and equal for every seed.
        "documents": rows with document boundaries, every document once per epoch (`Packed`).

    Attributes:
      shape: Rows of a batch, and tokens of a row.
      vocabulary: Size of the vocabulary.
      sha256: Hash of the tokens and of the packing.

    Raises:
      ValueError: The training part or the held-out part is shorter than a row, or `pack` is not one
        of the three names.
    """

    def __init__(
        self,
        batch: int,
        length: int,
        seed: int,
        size: int = CORPUS_BYTES,
        documents: Documents | None = None,
        pack: str = "none",
    ):
        if pack not in PACKS:
            raise ValueError(f"pack must be one of {PACKS}, got {pack!r}")
        name = "corpus_bytes"
        if documents is None:
            found = text.corpus(size)
            given = found.tokens, found.starts, tokens.Bytes.vocabulary, found.sha256
            documents = Documents(TEXT, *given)
        else:
            size, name = len(documents.tokens), f"tokens of dataset {documents.name}"
        held_out = documents.held_out
        if held_out is None:
            held_out = int(size * HELD_OUT_SHARE)
            least = int((length + 1) / HELD_OUT_SHARE)
            if held_out <= length:
                raise ValueError(f"{name} must exceed {least} for seq_len={length}, got {size}")
        if min(held_out, size - held_out) <= length:
            raise ValueError(
                f"{name}: the numbers of training tokens and of held-out tokens must each exceed "
                f"seq_len={length}, got {size - held_out} and {held_out}"
            )
        self.shape, self.seed, self.pack = (batch, length + 1), seed, pack
        self.vocabulary = documents.vocabulary
        self.sha256 = documents.sha256 if pack == "none" else digest(documents.sha256, pack)
        self.training, self.held_out = np.split(documents.tokens, [size - held_out])
        if pack == "documents":
            border = size - held_out
            self._starts = np.append(documents.starts[documents.starts < border], border)
            later = documents.starts[documents.starts > border] - border
            self._held_out = Packed(
                self.held_out, np.insert(later, 0, 0), (seed, 3), length + 1
            )
        if pack != "none":
            self._epoch, self._packed = 0, self._of_epoch(0)

    def epochs(self, steps: int) -> float | None:
        """Return how often a token is read in `steps` steps on average, or None if the number of
        tokens is not known.
        """
        rows, width = self.shape
        return steps * rows * (width - 1) / len(self.training)

    def train(self, step: int, rows: slice = slice(None)) -> Batch:
        """Return the rows `rows` of the batch of the step `step`."""
        if self.pack == "none":
            return self._windows(self.training, (self.seed, 0, step), rows)
        batch = self.shape[0]
        wanted = np.arange(step * batch, (step + 1) * batch)[rows]
        parts: list[Batch] = []
        for epoch in np.unique(wanted // self._packed.count).tolist():
            if epoch != self._epoch:
                self._epoch, self._packed = epoch, self._of_epoch(epoch)
            within = wanted[wanted // self._packed.count == epoch] % self._packed.count
            parts.append(Batch(*self._packed.rows(within)))
        return joined(parts)

    def evaluation(self, count: int) -> list[Batch]:
        """Return `count` batches of held-out text. Every call returns the same batches."""
        if self.pack == "none":
            return [self._windows(self.held_out, (self.seed, 1, i)) for i in range(count)]
        if self.pack == "once":
            batch, width = self.shape
            starts = np.linspace(0, len(self.held_out) - width, count * batch).astype(int)
            return [self._at(self.held_out, x) for x in starts.reshape(count, batch)]
        return drawn(self._held_out, self.shape[0], (self.seed, 1), count)

    def _windows(
        self, tokens: np.ndarray, seed: tuple[int, ...], rows: slice = slice(None)
    ) -> Batch:
        batch, width = self.shape
        starts = np.random.default_rng(seed).integers(0, len(tokens) - width + 1, batch)
        return self._at(tokens, starts[rows])

    def _at(self, tokens: np.ndarray, starts: np.ndarray) -> Batch:
        return Batch(tokens[starts[:, None] + np.arange(self.shape[1])])

    def _of_epoch(self, epoch: int) -> Packed | Stream:
        if self.pack == "once":
            return Stream(self.training, (self.seed, 5, epoch), self.shape[1])
        return Packed(self.training, self._starts, (self.seed, 2, epoch), self.shape[1])


class Edited(Batches):
    """`Batches` whose training rows `edit` changes. Held-out rows do not change.

    Attributes:
      numbers: A number that makes the random numbers of each subclass different.
    """

    numbers: int

    def edit(self, row: np.ndarray, random: np.random.Generator) -> None:
        """Change the tokens of a row in place. `random` is a generator that depends only on the
        seed, the step and the row's number.
        """
        raise NotImplementedError

    def train(self, step: int, rows: slice = slice(None)) -> Batch:
        tokens = super().train(step, rows).tokens.copy()
        for row, number in zip(tokens, range(self.shape[0])[rows], strict=True):
            self.edit(row, np.random.default_rng((self.seed, self.numbers, step, number)))
        return Batch(tokens)


class Repeating(Edited):
    """`Batches` in whose training rows copies of earlier passages replace some tokens, so that
    distant tokens help the prediction. Held-out rows do not change.

    Args:
      passages: Number of copies per row.
      size: Tokens of a passage.
      apart: The minimum number of tokens between a passage and its copy.

    Raises:
      ValueError: Rows are too short, or have several documents.
    """

    numbers = 6

    def __init__(self, *given, passages: int, size: int, apart: int, **more):
        super().__init__(*given, **more)
        self.passages, self.size, self.apart = passages, size, apart
        if self.pack == "documents" or self.shape[1] < 2 * size + apart:
            raise ValueError(
                "rows with repeated passages must come from one text (pack other than 'documents') "
                f"and have at least {2 * size + apart} tokens, got pack={self.pack!r} and rows of "
                f"{self.shape[1]} tokens"
            )
        self.sha256 = digest(self.sha256, "repeating", passages, size, apart)

    def edit(self, row: np.ndarray, random: np.random.Generator) -> None:
        first, last = self.size + self.apart, len(row) - self.size
        for to in np.sort(random.integers(first, last + 1, self.passages)).tolist():
            start = int(random.integers(0, to - first + 1))
            row[to : to + self.size] = row[start : start + self.size]


def joined(parts: list[Batch]) -> Batch:
    """Concatenate the rows of `parts`."""
    if len(parts) == 1:
        return parts[0]
    tokens, segments = zip(*parts, strict=True)
    packed = segments[0] is not None
    return Batch(np.concatenate(tokens), np.concatenate(segments) if packed else None)


def drawn(packed: Packed, batch: int, seed: tuple[int, ...], count: int) -> list[Batch]:
    """Return `count` batches, which consist of random rows of `packed`."""
    places = np.random.default_rng(seed).integers(0, packed.count, (count, batch))
    return [Batch(*packed.rows(each)) for each in places]


def load(
    dataset: str,
    batch: int,
    length: int,
    seed: int,
    *,
    size: int = CORPUS_BYTES,
    pack: str | None = None,
    tokenizer: str | None = None,
    column: str = "text",
    split: str = "train",
    revision: str | None = None,
    buffer: int | None = None,
    notes: Path | None = None,
    cache: Path | None = None,
) -> Batches:
    """Return the batches of `dataset`.

    Args:
      dataset: One of four sources: "text" (the source of the standard library), the folder of a
        corpus that `bench.lm.corpus` built, a path, folder or glob of local files (`sources`), or
        `owner/name[:config]` of a dataset of the Hugging Face Hub.
      batch: See `Batches`.
      length: See `Batches`.
      seed: See `Batches`.
      size: Bytes of "text".
      pack: See `Batches`. `pack` defaults to "none" for the dataset "text", to "once" for a corpus,
        and to "documents" for all other datasets.
      tokenizer: Path of a tokenizer.json file (Hugging Face `tokenizers`). By default bytes
        are tokens, but a corpus has its own tokenizer.
      column: Name of the text column, in files with columns and on the Hub.
      split: Split of a dataset of the Hub.
      revision: Revision of a dataset of the Hub, by default the newest.
      buffer: See `stream.Streamed`.
      notes: See `stream.Streamed`.
      cache: Folder for the tokens of local files, by default the user's cache.

    Raises:
      FileNotFoundError: There is no such file, and no such dataset on the Hub.
      ValueError: A file is damaged, empty or too short, or lacks the column, or the tokenizer
        differs from the tokenizer of the corpus.
      ConnectionError: The Hub cannot be reached.
    """
    if dataset != TEXT and corpus.is_corpus(dataset):
        found = corpus.read(dataset, tokenizer)
        return Batches(batch, length, seed, documents=found, pack=pack or "once")
    by = tokens.tokenizer(tokenizer)
    if dataset == TEXT and tokenizer is None:
        return Batches(batch, length, seed, size, pack=pack or "none")
    if dataset == TEXT:
        found = text.corpus(size)
        parts = np.split(found.tokens, found.starts[1:-1])
        texts = (part.tobytes().decode(errors="replace") for part in parts)
        documents = tokens.kept(TEXT, texts, by, found.sha256, cache)
        return Batches(batch, length, seed, documents=documents, pack=pack or "none")
    if is_hub(dataset):
        from . import hub, stream

        name, _, config = dataset.partition(":")
        source = hub.Hub(name, config or None, split, column, revision).pinned()
        given = {} if buffer is None else {"buffer": buffer}
        return stream.Streamed(
            source, by, batch, length, seed, pack or "documents", notes=notes, **given
        )
    paths = sources.files(dataset)
    identity = sources.identity(paths), column
    documents = tokens.kept(dataset, sources.texts(paths, column), by, identity, cache)
    return Batches(batch, length, seed, documents=documents, pack=pack or "documents")


def is_hub(dataset: str) -> bool:
    """Return whether `dataset` may be a name on the Hub, `owner/name[:config]`. A name that is also
    a local file does not count as a name on the Hub.
    """
    name = dataset.partition(":")[0]
    parts = name.split("/")
    words = all(
        part and part.strip("-_.") and not set(part) & set("*?[]~\\ ") for part in parts
    )
    suffix = Path(name).suffix in sources.SUFFIXES
    local = Path(dataset).exists() or dataset.startswith(("/", "."))
    return dataset != TEXT and not local and words and len(parts) == 2 and not suffix


def digest(*parts: object) -> str:
    """Return the SHA-256 of values by their `repr`, in hexadecimal."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()
