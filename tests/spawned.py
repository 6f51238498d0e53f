"""Processes that tests start: ranks of a group, each with a number, and programs of Python."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.harness.process import ROOT

SECONDS = 180  # that they may take


def run(main: Callable[[int, Path], None], count: int, folder: Path) -> Sequence[int | None]:
    """Exit codes of `count` processes that run `main(rank, folder)`, a function of a module."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([main.__module__])
    started = [context.Process(target=main, args=(rank, folder)) for rank in range(count)]
    for process in started:
        process.start()
    for process in started:
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
    return [process.exitcode for process in started]


def raised(call: Callable[[], object]) -> str:
    """The error that a call raises, in words; "" if there is none."""
    try:
        call()
    except (
        ValueError,
        OSError,
        ArithmeticError,
        RuntimeError,
    ) as error:  # not implemented, too
        return f"{type(error).__name__}: {error}"
    return ""


def python(*words, folder: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """A program of Python that ended, with what it printed; `variables`: of its environment."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
