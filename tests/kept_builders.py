"""Processes that build kernels live as long as the tests' process that wants them.

A build of the library ends its processes; to start one takes as long as to build two kernels, and
tests on a GPU build hundreds of times.
"""

import atexit
import functools
import itertools
import os
import tempfile
from pathlib import Path

from kernels_pallas.runtime import build
from kernels_pallas.runtime.description import PLACES

_logs = tempfile.TemporaryDirectory()
_count = itertools.count()
_idle: dict[tuple[str, ...], list["Kept"]] = {}  # by the places that a process was told


class Kept(build._Child):
    """A process that only the end of a build that is under way ends."""

    busy = False

    def build(self, name, request):
        self.busy = True
        try:
            return super().build(name, request)
        finally:
            self.busy = False

    def kill(self):
        if self.busy:
            super().kill()

    def __exit__(self, *_):
        if self._process is not None and not self._killed:
            _idle.setdefault(tuple(PLACES), []).append(self)
        else:
            self.end()

    def end(self):
        super().kill()
        self._reap()


@functools.cache
def _recorder():
    """The folder of a recorder that outlives the build which wants it first: a process whose first
    kernel is refused loads it with a later one, and one that ended starts again.
    """
    folder = Path(_logs.name) / "recorder"
    folder.mkdir()
    build.environment(folder)
    return folder


def child(variables, log):
    """One that is idle, else a new one."""
    if idle := _idle.get(tuple(PLACES)):
        return idle.pop()
    found = f"{_recorder()}{os.pathsep}{variables['LD_LIBRARY_PATH']}"
    kept = variables | {"LD_LIBRARY_PATH": found}
    return Kept(kept, Path(_logs.name) / f"{next(_count)}.log")


@atexit.register
def end():
    for kept in itertools.chain(*_idle.values()):
        kept.end()
    _logs.cleanup()


def use():
    build._Child = child
