"""Machine code of kernels on disk, so that each is compiled once on a machine.

A file holds one kernel: a line with the checksum of the rest, a line of JSON (the manifest), the
image. It is named by a key: the hash of what the kernel is (source and spec), of the code that its
machine code follows from (`sources`), and of the architecture. Whatever changes in that code, a
comment too, all kernels are built anew. A file that is damaged counts as
missing, so that the worst that a folder can do is cost a compilation. So does one that another
version of JAX made, where this one can make it anew; what comes with the package was made by
whichever JAX packed it, and runs beside any or none.

A folder that others may write to, or that belongs to another user, is refused, since what lies
in it is run; so is a link in it. Where the folder cannot be used, kernels stay in memory.
"""

import contextlib
import errno
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import stat
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import platformdirs

from kernels_pallas.kernel import Kernel
from kernels_pallas.runtime import build as building
from kernels_pallas.runtime import sources
from kernels_pallas.runtime.build import LOG, Built, Progress
from kernels_pallas.runtime.cubin import Cubin
from kernels_pallas.runtime.description import canonical, describe

FORMAT = 2
PRESETS = Path(__file__).with_name("presets")  # comes with the package, or is absent
LIMIT_BYTES = 1 << 30
SUFFIX = ".kernel"
LAYERS = "layers.json"  # beside kernels: the layers that all kernels are there of
LEFT_SECONDS = 3600.0  # after which a file that was not finished is thrown away
WAIT_SECONDS = 10.0  # after which is said what is waited for

_folder: Path | None = None
_in_use: set[Path] = set()  # what this process read or wrote: never removed for room


def use(folder: str | os.PathLike[str] | None) -> None:
    """Makes `folder` that of stores that are made without one; None: the user's cache again."""
    global _folder
    _folder = None if folder is None else Path(folder)


def default_folder() -> Path:
    """That of `use`, else one in the user's cache directory."""
    if _folder is not None:
        return _folder
    return (
        Path(platformdirs.user_cache_dir("native-sparse-attention", appauthor=False))
        / "kernels"
    )


def key_of(kernel: Kernel) -> str:
    """What names a kernel's machine code: 64 hexadecimal digits.

    Raises:
      ValueError: as `description.describe`, or its name is none for a file.
    """
    if not re.fullmatch(r"[\w.-]+", kernel.name):
        raise ValueError(
            f"a kernel's name must be letters, digits, '_', '.' and '-', got {kernel.name!r}"
        )
    parts = {
        "architecture": Cubin.ARCHITECTURE,
        "format": FORMAT,
        "kernel": describe(kernel),
        "sources": sources.digest(),
    }
    return hashlib.sha256(canonical(parts).encode()).hexdigest()


class Entry(NamedTuple):
    """A file of a store; `used`: seconds since the epoch."""

    name: str
    key: str
    bytes: int
    used: float
    preset: bool


class Store:
    """A folder of kernels. Any thread and any number of processes may use it at once."""

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        limit_bytes: int = LIMIT_BYTES,
        presets: str | os.PathLike[str] | None = PRESETS,
    ):
        """
        Args:
          folder: default: `default_folder()`; it is made at the first `put`.
          limit_bytes: of all files; past it those that were not used for longest go first, but
            none that this process uses.
          presets: a folder that is only read, and looked at first.
        """
        self.folder = default_folder() if folder is None else Path(folder)
        self.limit_bytes = limit_bytes
        self._presets = None if presets is None else Path(presets)
        self._memory: dict[str, Built] = {}
        self._lock = threading.RLock()
        self._warned: set[str] = set()

    def get(self, kernel: Kernel) -> Built | None:
        """The machine code of `kernel`, as it is compiled: for any length where it can be.

        None where there is none, or none that may be used.
        """
        return self._get(key_of(kernel), kernel.name)

    def put(self, kernel: Kernel, built: Built) -> None:
        """Keeps the machine code of `kernel`, in memory where the folder cannot be used."""
        self._put(key_of(kernel), kernel, built)

    def fetch(
        self,
        kernels: Sequence[Kernel],
        jobs: int | None = None,
        progress: Progress | None = None,
    ) -> list[Built]:
        """The machine code of `kernels`; what is missing is built, by one process at a time.

        Raises:
          ValueError: as `description.describe`.
          RuntimeError: some could not be built; the others were, and are kept.
        """
        keys = [key_of(kernel) for kernel in kernels]
        wanted = dict(zip(keys, kernels, strict=True))
        found = {key: self._get(key, kernel.name) for key, kernel in wanted.items()}
        missing = sorted(key for key, built in found.items() if built is None)
        errors: dict[str, RuntimeError] = {}
        with contextlib.ExitStack() as stack:
            locks = {}
            # All processes take locks in the order of the keys, so that none waits in a circle.
            for key in missing:
                lock = stack.enter_context(self._locked(key, wanted[key].name))
                found[key] = self._get(key, wanted[key].name, again=True)
                if found[key] is None:
                    locks[key] = lock
                elif lock:
                    lock.release()
            rest = [key for key in wanted if key in locks]
            results = building.build([wanted[key] for key in rest], jobs, progress)
            for i, result in results:
                key = rest[i]
                if isinstance(result, RuntimeError):
                    errors[key] = result
                else:
                    self._put(key, wanted[key], result)
                    found[key] = result
                if lock := locks[key]:
                    lock.release()
        if errors:
            first = next(error for key in wanted if (error := errors.get(key)))
            names = ", ".join(wanted[key].name for key in errors)
            more = f"{len(errors)} of {len(wanted)} kernels ({names}); the first: "
            raise RuntimeError(f"{more if len(errors) > 1 else ''}{first}") from first
        return [built for key in keys if (built := found[key])]

    def layers(self) -> "list[dict[str, Any]]":
        """The layers that `add_layers` was told of, presets first."""
        found = [_layers(x) for x in (self._presets, self.folder) if x is not None]
        return [layer for layers in found for layer in layers]

    def add_layers(self, layers: "Sequence[dict[str, Any]]") -> None:
        """Notes that all kernels of these layers are there: descriptions that JSON holds."""
        known = _layers(self.folder)
        known += [layer for layer in layers if layer not in known]
        _write_whole(self.folder / LAYERS, json.dumps(known, indent=1).encode())

    def serves(self, layer: dict[str, Any]) -> bool:
        """Whether kernels of a layer are there; of a folder where no layer was noted that is not
        known, and they may be."""
        there = self._is_trusted()
        notes = [self._presets, *[self.folder] * there]
        if any(layer in _layers(x) for x in notes if x is not None):
            return True
        return there and not _layers(self.folder) and any(self._files(self.folder, False))

    def list(self) -> "list[Entry]":
        """The files, presets first, then those used last."""
        found = [*self._files(self._presets, True), *self._files(self.folder, False)]
        return sorted(found, key=lambda entry: (not entry.preset, -entry.used))

    def clear(self) -> int:
        """Removes all files but presets, and forgets what is in memory; how many files."""
        count = 0
        with self._lock:
            self._memory.clear()
            with contextlib.suppress(OSError):
                (self.folder / LAYERS).unlink()
            for entry in self._files(self.folder, False):
                with contextlib.suppress(OSError):
                    self._path(self.folder, entry.key, entry.name).unlink()
                    count += 1
            self._sweep(0.0)
        return count

    # Files.

    @staticmethod
    def _path(folder: Path, key: str, name: str) -> Path:
        return folder / f"{name}-{key}{SUFFIX}"

    def _files(self, folder: Path | None, preset: bool) -> Iterator[Entry]:
        if folder is None or not folder.is_dir():
            return
        for path in folder.glob(f"*{SUFFIX}"):
            name, _, key = path.stem.rpartition("-")
            with contextlib.suppress(OSError):  # another process removed it
                status = path.stat() if preset else path.lstat()
                if stat.S_ISREG(status.st_mode):
                    yield Entry(name, key, status.st_size, status.st_mtime, preset)

    def _get(self, key: str, name: str, *, again: bool = False) -> Built | None:
        """`again`: why a file does not count was said before."""
        with self._lock:
            if built := self._memory.get(key):
                return built
        if self._presets is not None:
            if built := _read(self._path(self._presets, key, name), key, again, preset=True):
                return built
        if not self._is_trusted():
            return None
        path = self._path(self.folder, key, name)
        built = _read(path, key, again)
        if built:
            _in_use.add(path)
            with contextlib.suppress(OSError):
                os.utime(path)
        return built

    def _put(self, key: str, kernel: Kernel, built: Built) -> None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._refused():
                path = self._path(self.folder, key, kernel.name)
                _write(path, key, kernel, built)
                _in_use.add(path)
                self._evict()
                return
        except OSError as error:
            self._warn(f"{self.folder} cannot keep kernels: {error}")
        with self._lock:
            self._memory[key] = built

    def refusal(self) -> str | None:
        """Why the folder, which is there, may not be trusted, or None."""
        status = self.folder.stat()
        if status.st_uid != os.geteuid():
            return (
                f"{self.folder} is refused: it must belong to user {os.geteuid()}, not to "
                f"{status.st_uid}, since what lies in it is run"
            )
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return (
                f"{self.folder} is refused: others may write to it, and what lies in it is "
                f"run: chmod go-w '{self.folder}'"
            )
        return None

    def _is_trusted(self) -> bool:
        """Whether the folder is there, and may be trusted."""
        return self.folder.is_dir() and not self._refused()

    def _refused(self) -> bool:
        """Whether the folder may not be trusted; why is said once."""
        reason = self.refusal()
        if reason:
            self._warn(reason)
        return reason is not None

    def _warn(self, message: str) -> None:
        with self._lock:
            if message in self._warned:
                return
            self._warned.add(message)
        LOG.warning("%s; kernels built here are kept in memory", message)

    def _evict(self) -> None:
        """Removes what was not used for longest until all is within the limit."""
        self._sweep(LEFT_SECONDS)
        files = sorted(self._files(self.folder, False), key=lambda entry: entry.used)
        excess = sum(entry.bytes for entry in files) - self.limit_bytes
        for entry in files:
            path = self._path(self.folder, entry.key, entry.name)
            if excess > 0 and path not in _in_use:
                with contextlib.suppress(OSError):
                    path.unlink()
                    LOG.info("removed %s, which was not used for longest", path)
                excess -= entry.bytes

    def _sweep(self, seconds: float) -> None:
        """Removes what processes that ended left unfinished so many seconds ago."""
        for path in self.folder.glob("*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime >= seconds:
                    path.unlink()

    @contextlib.contextmanager
    def _locked(self, key: str, name: str) -> Iterator[filelock.BaseFileLock | None]:
        """While no other process builds this kernel; None: the folder holds no locks."""
        lock = None
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._refused():
                (self.folder / "locks").mkdir(mode=0o700, exist_ok=True)
                lock = filelock.FileLock(self.folder / "locks" / key)
                try:
                    lock.acquire(timeout=WAIT_SECONDS)
                except filelock.Timeout:
                    LOG.info("waiting for another process that builds %s", name)
                    lock.acquire()
        except (OSError, NotImplementedError) as error:
            lock = None
            self._warn(f"{self.folder} cannot keep kernels: {error}")
        try:
            yield lock
        finally:
            if lock is not None:
                lock.release()


def _read(path: Path, key: str, again: bool, preset: bool = False) -> Built | None:
    """What `_write` wrote; None where it is missing, damaged, a link or to be made anew."""
    try:
        head, _, rest = _content(path, trusted=preset).partition(b"\n")
        if head != _checksum(rest):
            raise ValueError("it is damaged")
        line, _, image = rest.partition(b"\n")
        manifest = json.loads(line)
        if manifest["format"] != FORMAT or manifest["key"] != key:
            raise ValueError(f"it is {manifest['key']} of format {manifest['format']}")
        cubin = Cubin.from_json(manifest["cubin"])
        made, here = cubin.versions.get("jax"), _jax_version()
        if not preset and here not in (None, made) and building.why_not() is None:
            raise ValueError(f"it was made by jax {made}, and jax {here} is here")
        return Built(cubin, image)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        if not again:
            LOG.warning("%s does not count, its kernel is built anew: %s", path, error)
        return None


def _content(path: Path, trusted: bool) -> bytes:
    """`trusted`: it may be a link."""
    with open(path, "rb", opener=None if trusted else _open_no_link) as file:
        return file.read()


def _open_no_link(path: str, flags: int) -> int:
    """Package managers link what comes with a package, as its modules; nothing else is linked."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError("it is a symbolic link") from error
        raise


def _write(path: Path, key: str, kernel: Kernel, built: Built) -> None:
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "key": key,
        "kernel": describe(kernel),
        "cubin": built.cubin.to_json(),
    }
    rest = canonical(manifest).encode() + b"\n" + built.image
    _write_whole(path, _checksum(rest) + b"\n" + rest)


def _layers(folder: Path) -> list[dict[str, Any]]:
    """Those noted in a folder; none where the note is missing or damaged."""
    try:
        found = json.loads((folder / LAYERS).read_bytes())
    except (OSError, ValueError):
        return []
    return found if isinstance(found, list) else []


def _write_whole(path: Path, content: bytes) -> None:
    """Writes a file that is there as a whole or not at all."""
    number, name = tempfile.mkstemp(suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _checksum(content: bytes) -> bytes:
    return b"sha256 " + hashlib.sha256(content).hexdigest().encode()


@functools.cache
def _jax_version() -> str | None:
    try:
        return importlib.metadata.version("jax")
    except importlib.metadata.PackageNotFoundError:
        return None
