"""Ranks of a process group: processes of one machine, each with a number."""

import multiprocessing
from collections.abc import Callable, Sequence
from pathlib import Path

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
