"""Reads documents from local files. In `.jsonl` and `.parquet` files each row is a document, whose
text is in one column. A `.txt` file is one document.
"""

import glob
import json
from collections.abc import Iterator
from pathlib import Path

from nsa_core import extras

SUFFIXES = (".jsonl", ".parquet", ".txt")
ROWS = 1024  # rows of a parquet file that are read at a time


def files(pattern: str) -> list[Path]:
    """Return the files that a path, a folder or a glob names, in sorted order.

    Raises:
      FileNotFoundError: No file matches.
      ValueError: One of the files has an unknown kind.
    """
    path = Path(pattern)
    if path.is_dir():
        found = [x for x in path.rglob("*") if x.suffix in SUFFIXES and x.is_file()]
    elif path.exists():
        found = [path]
    else:
        matches = map(Path, glob.glob(pattern, recursive=True))
        found = [x for x in matches if x.is_file()]
    if not found:
        raise FileNotFoundError(
            f"dataset {pattern!r}: no such file with one of {SUFFIXES}; the name of a dataset of "
            "the Hugging Face Hub has the form owner/name"
        )
    for x in found:
        if x.suffix not in SUFFIXES:
            raise ValueError(f"dataset must consist of files with one of {SUFFIXES}, got {x}")
    return sorted(found)


def identity(paths: list[Path]) -> list[tuple[str, int, int]]:
    """Return the identity of each file: path, size in bytes and time of the last change in ns."""
    found = ((path.resolve(), path.stat()) for path in paths)
    return [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in found]


def texts(paths: list[Path], column: str) -> Iterator[str]:
    """Yield the documents in the order of the files and of their rows.

    Raises:
      ValueError: A file is damaged, lacks the column, or has values other than text in the column.
        The message names the file.
    """
    readers = {".jsonl": _jsonl, ".parquet": _parquet, ".txt": _txt}
    for path in paths:
        yield from readers[path.suffix](path, column)


def _txt(path: Path, column: str) -> Iterator[str]:
    try:
        yield path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None


def _jsonl(path: Path, column: str) -> Iterator[str]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where} is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{where} must be a JSON object, got {line[:40]!r}")
            if column not in row:
                raise no_column(where, column, row)
            yield text_of(row[column], where, column)


def _parquet(path: Path, column: str) -> Iterator[str]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise extras.missing("data", error) from error
    try:
        with parquet.ParquetFile(path) as file:
            names, row = file.schema_arrow.names, 0
            if column not in names:
                raise no_column(path, column, names)
            for batch in file.iter_batches(ROWS, columns=[column]):
                for value in batch.column(0).to_pylist():
                    yield text_of(value, f"{path} row {row}", column)
                    row += 1
    except (pyarrow.ArrowException, OSError) as error:
        # Arrow raises OSError if a column chunk is damaged.
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise ValueError(f"{path} is not a complete parquet file: {error}") from None


def text_of(value: object, where: object, column: str) -> str:
    """Return the text in a column.

    Raises:
      ValueError: The value is not text.
    """
    if not isinstance(value, str):
        raise ValueError(f"{where}: column {column!r} must be text, got {value!r:.60}")
    return value


def no_column(where: object, column: str, known) -> ValueError:
    return ValueError(
        f"{where} has no column {column!r}; its columns are {sorted(known)}, of which "
        "--text_column must name one"
    )
