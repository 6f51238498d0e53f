"""Stores the machine code of kernels on disk, so that each kernel is compiled once per machine.

A file has one kernel: a line with a checksum, a line of JSON (the `Cubin`), and the image. The name
of the file contains a key. The key is a hash of the kernel (source and spec), of the sources that
determine its machine code, of the architecture and of the file format. Any change of the sources,
even of a comment, rebuilds all kernels. A damaged file counts as missing, so its kernel is compiled
again. A file from another version of JAX counts as missing if this machine can rebuild the kernel.
Kernels that are part of the package may have been built with any version of JAX. Kernels that are
part of the package run with any version of JAX, or without JAX.

Since stored code is executed, a folder is refused if it belongs to another user or if other users
may write to it. If the folder cannot be used, kernels are stored only in memory.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import platformdirs

from kernels_pallas.kernel import Kernel
from kernels_pallas.runtime import build as building
from kernels_pallas.runtime import cubin
from kernels_pallas.runtime.build import LOG, Built, Progress
from kernels_pallas.runtime.description import canonical, describe

FORMAT = 3
PRESETS = Path(__file__).with_name("presets")  # kernels that are part of the package, if any
# maximum bytes of a folder; above the maximum the least recently used files are removed
LIMIT_BYTES = 1 << 30
SUFFIX = ".kernel"
LAYERS = "layers.json"  # file with the layers whose kernels are all in the folder
SOURCES = Path(__file__).parents[1]
IN_MEMORY = "kernels that are built now stay in memory"


def key_of(kernel: Kernel) -> str:
    """Return the key of a kernel's machine code: 64 hexadecimal digits.

    Raises:
      ValueError: The kernel cannot be described (`description.describe`), or its name is not valid
        in a file name.
    """
    if not re.fullmatch(r"[\w.-]+", kernel.name):
        raise ValueError(
            f"a kernel's name must be letters, digits, '_', '.' and '-', got {kernel.name!r}"
        )
    parts = cubin.ARCHITECTURE, FORMAT, describe(kernel), sources(SOURCES)
    return hashlib.sha256(canonical(parts).encode()).hexdigest()


@functools.cache
def sources(folder: Path) -> str:
    """Return the SHA-256 of the names and contents of all sources of a package, except the
    sources of Triton kernels.
    """
    found = hashlib.sha256()
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.c")]):
        name, content = path.relative_to(folder).as_posix(), path.read_bytes()
        if not name.startswith("triton/"):
            found.update(f"{name} {len(content)}\n".encode() + content)
    return found.hexdigest()


class Entry(NamedTuple):
    """A file of a store. `used` is the time of the file's last use, in seconds since the epoch."""

    path: Path
    name: str
    key: str
    bytes: int
    used: float
    preset: bool


class Store:
    """A folder of kernels. Any thread and any number of processes may use a store at once.

    Args:
      folder: Folder, created before the first kernel is built or stored. The default folder is in
        the user's cache directory.
      presets: Read-only folder of kernels that is searched first, by default the folder in the
        package. If `presets` is None, no read-only folder is searched.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        presets: str | os.PathLike[str] | None = PRESETS,
    ):
        cache = platformdirs.user_cache_path("native-sparse-attention", appauthor=False)
        self.folder = cache / "kernels" if folder is None else Path(folder)
        self._presets = None if presets is None else Path(presets)
        self._memory: dict[str, Built] = {}

    def get(self, kernel: Kernel) -> Built | None:
        """Return the stored machine code of `kernel`. Return None if no machine code is stored,
        or if the stored machine code must not be used.
        """
        key = key_of(kernel)
        if built := self._memory.get(key):
            return built
        name = f"{kernel.name}-{key}{SUFFIX}"
        if self._presets and (built := _read(self._presets / name, key, preset=True)):
            return built
        return _read(self.folder / name, key) if self._is_trusted() else None

    def put(self, kernel: Kernel, built: Built) -> None:
        """Store the machine code of `kernel` in the folder, or in memory if the folder cannot
        be used.
        """
        key = key_of(kernel)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._is_trusted():
                rest = canonical(built.cubin._asdict()).encode() + b"\n" + built.image
                path = self.folder / f"{kernel.name}-{key}{SUFFIX}"
                _write_whole(path, _checksum(key, rest) + b"\n" + rest)
                kept = 0
                for entry in self._files(self.folder, False):
                    kept += entry.bytes
                    if kept > LIMIT_BYTES:
                        entry.path.unlink(missing_ok=True)
                return
        except OSError as error:
            _warn(f"{self.folder} cannot store kernels: {error}; {IN_MEMORY}")
        self._memory[key] = built

    def fetch(
        self,
        kernels: Sequence[Kernel],
        jobs: int | None = None,
        progress: Progress | None = None,
    ) -> list[Built]:
        """Return the machine code of `kernels`.

        Kernels that are not stored are built. If several processes on the machine need a kernel,
        only one process builds it.

        Raises:
          ValueError: The same as in `description.describe`.
          RuntimeError: This machine lacks a tool to build kernels, or some kernels could not be
            built. If some kernels could not be built, all other kernels were built and stored.
        """
        wanted = {key_of(kernel): kernel for kernel in kernels}
        found = {key: self.get(kernel) for key, kernel in wanted.items()}
        errors = {}
        with contextlib.ExitStack() as stack:
            locks = {}
            # All processes acquire locks in the order of the keys, which prevents deadlocks.
            for key in sorted(key for key, built in found.items() if built is None):
                locks[key] = lock = self._lock(key)
                stack.callback(lock.release)
                if built := self.get(wanted[key]):  # another process built it meanwhile
                    found[key] = built
                    lock.release()
            missing = [key for key, built in found.items() if built is None]
            todo = [wanted[key] for key in missing]
            for i, built in building.build(todo, jobs, progress) if todo else ():
                key = missing[i]
                if isinstance(built, RuntimeError):
                    errors[wanted[key].name] = built
                else:
                    found[key] = built
                    self.put(wanted[key], built)
                locks[key].release()
        if errors:
            first, *others = errors.values()
            more = f"{len(errors)} of {len(wanted)} kernels ({', '.join(errors)}); the first: "
            raise RuntimeError(f"{more if others else ''}{first}") from first
        return [built for kernel in kernels if (built := found[key_of(kernel)])]

    def layers(self) -> list[dict[str, Any]]:
        """Return the layers that `add_layers` recorded. Layers of the presets come first."""
        found = [_layers(x) for x in (self._presets, self.folder) if x is not None]
        return [layer for layers in found for layer in layers]

    def add_layers(self, layers: Sequence[dict[str, Any]]) -> None:
        """Record that all kernels of the given layers are stored.

        The layers are described by JSON values.
        """
        known = _layers(self.folder)
        known += [layer for layer in layers if layer not in known]
        _write_whole(self.folder / LAYERS, json.dumps(known, indent=1).encode())

    def serves(self, layer: dict[str, Any]) -> bool:
        """Return whether the kernels of a layer are stored, or may be stored. A folder that has
        kernels but no record of layers may contain the layer's kernels.
        """
        if self._presets is not None and layer in _layers(self._presets):
            return True
        if not self._is_trusted():
            return False
        noted = _layers(self.folder)
        return layer in noted or (not noted and bool(self._files(self.folder, False)))

    def entries(self) -> list[Entry]:
        """Return the files of stored kernels. Presets come first. Other files follow, most recently
        used first.
        """
        presets = self._files(self._presets, True) if self._presets else []
        return [*presets, *self._files(self.folder, False)]

    def clear(self) -> int:
        """Remove the kernels in memory. From the folder, remove the kernels, the record of
        layers and the temporary files. Presets stay. Return the number of kernels that the
        folder had.
        """
        self._memory.clear()
        found = self._files(self.folder, False)
        for path in (
            self.folder / LAYERS,
            *self.folder.glob("*.tmp"),
            *[x.path for x in found],
        ):
            with contextlib.suppress(OSError):
                path.unlink()
        return len(found)

    def refusal(self) -> str | None:
        """Return the reason why the existing folder may not be trusted, or None."""
        status = self.folder.stat()
        if status.st_uid != os.geteuid():
            return (
                f"{self.folder} is refused, since its contents are executed; it must belong to "
                f"user {os.geteuid()}, got {status.st_uid}"
            )
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return (
                f"{self.folder} is refused, since others may write to it and its contents are "
                f"executed; run chmod go-w '{self.folder}'"
            )
        return None

    def _is_trusted(self) -> bool:
        """Return whether the folder exists and may be trusted. If the folder may not be
        trusted, the reason is logged once.
        """
        if not self.folder.is_dir():
            return False
        if reason := self.refusal():
            _warn(f"{reason}; {IN_MEMORY}")
        return reason is None

    @staticmethod
    def _files(folder: Path, preset: bool) -> list[Entry]:
        """Return the files of kernels in `folder`, most recently used first."""
        found = []
        for path in folder.glob(f"*{SUFFIX}"):
            name, _, key = path.stem.rpartition("-")
            with contextlib.suppress(OSError):  # another process removed it
                status = path.stat()
                found.append(Entry(path, name, key, status.st_size, status.st_mtime, preset))
        return sorted(found, key=lambda entry: -entry.used)

    def _lock(self, key: str) -> filelock.BaseFileLock:
        """Return a lock that prevents other processes from building the kernel.

        If the folder cannot contain locks, the lock has no effect.
        """
        folder = self.folder / "locks"
        lock = filelock.FileLock(folder / key)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._is_trusted():
                folder.mkdir(mode=0o700, exist_ok=True)
                lock.acquire()
        except (OSError, NotImplementedError) as error:
            _warn(f"{self.folder} cannot store kernels: {error}; {IN_MEMORY}")
        return lock


@functools.cache
def _warn(message: str) -> None:
    """Log a message once."""
    LOG.warning("%s", message)


def _read(path: Path, key: str, preset: bool = False) -> Built | None:
    """Return the contents of a file that `Store.put` has written. Return None if the file is
    missing or damaged, or if its kernel must be rebuilt.
    """
    try:
        head, _, rest = path.read_bytes().partition(b"\n")
        if head != _checksum(key, rest):
            raise ValueError("the file is damaged")
        line, _, image = rest.partition(b"\n")
        found = cubin.Cubin.from_json(json.loads(line))
        if not preset:
            made, here = found.versions["jax"], _jax_version()
            if here not in (None, made) and building.why_not() is None:
                raise ValueError(
                    f"the file was built with jax {made}, but jax {here} is installed"
                )
            with contextlib.suppress(OSError):
                os.utime(path)
        return Built(found, image)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _warn(f"{path} is ignored, and its kernel is built again: {error}")
        return None


def _layers(folder: Path) -> list[dict[str, Any]]:
    """Return the layers recorded in a folder. The result is empty if the record is missing or
    damaged.
    """
    try:
        return json.loads((folder / LAYERS).read_bytes())
    except (OSError, ValueError):
        return []


def _write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    with tempfile.NamedTemporaryFile(suffix=".tmp", dir=path.parent, delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _checksum(key: str, content: bytes) -> bytes:
    """Return the checksum of a file's `content` and of its `key`."""
    return b"sha256 " + hashlib.sha256(key.encode() + content).hexdigest().encode()


@functools.cache
def _jax_version() -> str | None:
    try:
        return importlib.metadata.version("jax")
    except importlib.metadata.PackageNotFoundError:
        return None
