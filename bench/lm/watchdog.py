"""Ends a process whose steps have stopped, and writes the stacks of its threads."""

import faulthandler
import os
import sys
import threading
import time
from pathlib import Path

HUNG = 76  # the exit status: no other ending has it


class Watchdog:
    """While entered, `fed` has to be called every `hang_s` seconds.

    Where it is not, the stacks of all threads go to the file at `path` and the process ends
    with status `HUNG`, without a word to anyone that it waits for. 0 seconds: never.
    """

    def __init__(self, path: Path, hang_s: float):
        if not hang_s >= 0:
            raise ValueError(f"hang_s must be >= 0, got {hang_s}")
        self.path, self.hang_s = path, hang_s
        self.last, self.ended = time.monotonic(), threading.Event()

    def fed(self) -> None:
        self.last = time.monotonic()

    def __enter__(self) -> "Watchdog":
        self.fed()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        if self.hang_s:
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        if self.hang_s:
            self.thread.join()

    def _watch(self) -> None:
        while not self.ended.wait(max(0.01, self.last + self.hang_s - time.monotonic())):
            if time.monotonic() - self.last < self.hang_s:
                continue
            with self.path.open("a") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            text = f"error: no step for {self.hang_s:.0f} s; stacks are in {self.path}\n"
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())
            os._exit(HUNG)
