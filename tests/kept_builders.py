"""Processes that build kernels live as long as the tests' process that wants them.

A build of the library ends its processes; to start one takes as long as to build two kernels, and
tests on a GPU build hundreds of times.
"""

import atexit
import contextlib
import functools
import os
import tempfile
from pathlib import Path

from kernels_pallas.runtime import build
from kernels_pallas.runtime.description import PLACES

_all = contextlib.ExitStack()
atexit.register(_all.close)
_idle: dict[tuple[str, ...], list[build.Child]] = {}  # by the places that a process was told
started = build.started


@functools.cache
def _recorder():
    """The folder of a recorder that outlives the build which wants it first: a process whose first
    kernel is refused loads it with a later one.
    """
    folder = Path(_all.enter_context(tempfile.TemporaryDirectory()))
    build.environment(folder)
    return folder


@contextlib.contextmanager
def kept(variables):
    """One that is idle, else a new one; kept where a build has ended and it has not."""
    idle = _idle.setdefault(tuple(PLACES), [])
    if idle:
        child = idle.pop()
    else:
        found = f"{_recorder()}{os.pathsep}{variables['LD_LIBRARY_PATH']}"
        child = _all.enter_context(started(variables | {"LD_LIBRARY_PATH": found}))
    try:
        yield child
    except BaseException:  # in the middle of a kernel
        child.process.kill()
        raise
    if child.process.poll() is None:
        idle.append(child)


def use():
    build.started = kept
