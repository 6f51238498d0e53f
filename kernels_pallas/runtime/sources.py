"""One hash of all sources that machine code follows from: kernels, and what builds them."""

import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parents[1]
# Relative to `FOLDER`. Other modules of the package launch kernels, or are for other compilers.
PATTERNS = ("kernel.py", "specs/**/*.py", "mosaic/**/*.py", "runtime/recorder.c")
BUILDER = ("build_child", "cubin", "description", "lowering", "plugin")  # modules of `runtime`


def files(folder: Path = FOLDER) -> Iterator[Path]:
    """The files that `digest` reads, in an order that is the same everywhere."""
    found = {path for pattern in PATTERNS for path in folder.glob(pattern)}
    found |= {folder / "runtime" / f"{name}.py" for name in BUILDER}
    return iter(sorted(found, key=lambda path: path.relative_to(folder).as_posix()))


@functools.cache
def digest(folder: Path = FOLDER) -> str:
    """SHA-256 of the names and contents of `files`, read once per process."""
    found = hashlib.sha256()
    for path in files(folder):
        content = path.read_bytes()
        found.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode())
        found.update(content)
    return found.hexdigest()
