"""Converts text to tokens, which are bytes or tokens of a `tokenizers` file. The module also
caches the tokens of local files in a folder.
"""

import array
import dataclasses
import hashlib
import itertools
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import filelock
import numpy as np
import platformdirs

from nsa_core import extras

SCHEMA = 1
TOGETHER = 256  # number of documents per call of a tokenizer


@dataclasses.dataclass(frozen=True)
class Documents:
    """The tokens of documents, one document after the other.

    Attributes:
      name: name of the dataset, for messages.
      tokens: integers `[total]`, in memory or in a file.
      starts: int64 `[documents + 1]`: the index at which each document begins, and the end of the
        last document.
      vocabulary: size of the vocabulary.
      sha256: The hash of the tokens and the boundaries.
      held_out: The number of tokens at the end that are held out. `held_out=None` means that the
        reader decides.
    """

    name: str
    tokens: np.ndarray
    starts: np.ndarray
    vocabulary: int
    sha256: str
    held_out: int | None = None


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8."""

    name, vocabulary = "bytes", 256

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]


def tokenizer_file(path: str | Path) -> bytes:
    """Return the contents of the file of a tokenizer.

    Raises:
      FileNotFoundError: There is no such file.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise FileNotFoundError(
            f"tokenizer must be a tokenizer.json file (Hugging Face tokenizers), got {path}: "
            f"{error.strerror}; download the tokenizer.json of a model"
        ) from None


class FromFile:
    """A tokenizer of the library `tokenizers`, with the special tokens that its own
    post-processor adds to a document.

    Args:
      data: The contents of the tokenizer's file.
      path: The path of the tokenizer's file, for messages.

    Raises:
      ValueError: The library cannot read `data`, or there are no tokens.
    """

    def __init__(self, data: bytes, path: str | Path):
        try:
            import tokenizers
        except ModuleNotFoundError as error:
            raise extras.missing("data", error) from error
        try:
            self.tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises no narrower exception
            raise ValueError(
                f"tokenizer must be a tokenizer.json file (Hugging Face tokenizers), got {path}: "
                f"{error}"
            ) from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        numbers = self.tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocabulary = max(numbers, default=-1) + 1
        if not self.vocabulary:
            raise ValueError(f"tokenizer must have tokens, got none in {path}")
        self.name = f"tokenizer {hashlib.sha256(data).hexdigest()}"
        self.dtype = np.uint16 if self.vocabulary <= 2**16 else np.int32

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        found = self.tokenizer.encode_batch(list(texts))
        return [np.array(each.ids, self.dtype) for each in found]


# Converts text to tokens. Equal names mean equal tokens.
type Tokenizer = Bytes | FromFile


def tokenizer(path: str | None) -> Tokenizer:
    """Return the tokenizer in the file at `path`. If `path` is None, return the tokenizer of
    bytes."""
    return Bytes() if path is None else FromFile(tokenizer_file(path), path)


def encoded(texts: Iterable[str], by: Tokenizer) -> Iterator[np.ndarray]:
    """Yield the tokens of each document that has at least one token.

    Raises:
      ValueError: A text cannot be encoded in UTF-8, for example half of a surrogate pair.
    """
    for group in itertools.batched(texts, TOGETHER):
        yield from filter(len, by.encode(group))


def gathered(name: str, texts: Iterable[str], by: Tokenizer) -> Documents:
    """Return the tokens of all `texts`, in memory."""
    parts = list(encoded(texts, by))
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
    starts = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    return Documents(name, tokens, starts, by.vocabulary, _digest(tokens, starts))


def kept(
    name: str, texts: Iterable[str], by: Tokenizer, source: object, folder: Path | None
) -> Documents:
    """Return the tokens of all `texts` from a cache in files. If no earlier call with an equal
    `source` and tokenizer has written the files, this call writes the files.

    Args:
      name: Name of the dataset, for messages.
      texts: The texts, which are read only if there are no files.
      by: The tokenizer.
      source: The identity of the texts, as a JSON value.
      folder: Folder of the cache, by default in the user's cache folder.

    Raises:
      ValueError: There is no document with a token, or the files are damaged.
    """
    if folder is None:
        cache = platformdirs.user_cache_dir("native-sparse-attention", appauthor=False)
        folder = Path(cache) / "tokens"
    folder.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(json.dumps([SCHEMA, by.name, source]).encode()).hexdigest()[:32]
    target = folder / key
    # Processes on one machine that need the same files wait for the first of them.
    with filelock.FileLock(folder / f"{key}.lock"):
        if not target.exists():
            _write(name, texts, by, target)
    about = json.loads((target / "about.json").read_text())
    tokens = np.memmap(target / "tokens", np.dtype(about["dtype"]), "r")
    starts = np.fromfile(target / "starts", np.int64)
    if not len(starts) or starts[-1] != len(tokens):
        raise ValueError(
            f"the tokens that are stored in {target} have changed; remove this folder"
        )
    return Documents(name, tokens, starts, by.vocabulary, about["sha256"])


def _write(name: str, texts: Iterable[str], by: Tokenizer, target: Path) -> None:
    starts, dtype = array.array("q", [0]), None
    # Errors are ignored, since the folder is moved if it is complete.
    with tempfile.TemporaryDirectory(
        prefix=".", dir=target.parent, ignore_cleanup_errors=True
    ) as folder:
        scratch = Path(folder)
        with (scratch / "tokens").open("wb") as file:
            for part in encoded(texts, by):
                dtype = part.dtype
                file.write(part.tobytes())
                starts.append(starts[-1] + len(part))
        if dtype is None:
            raise ValueError(f"dataset {name} has no document with a token")
        borders = np.array(starts, np.int64)
        borders.tofile(scratch / "starts")
        sha256 = _digest(np.memmap(scratch / "tokens", dtype, "r"), borders)
        about = {"name": name, "dtype": dtype.name, "sha256": sha256}
        (scratch / "about.json").write_text(json.dumps(about))
        os.replace(scratch, target)


def _digest(tokens: np.ndarray, starts: np.ndarray) -> str:
    found = hashlib.sha256(str(tokens.dtype).encode())
    found.update(tokens)
    found.update(starts)
    return found.hexdigest()
