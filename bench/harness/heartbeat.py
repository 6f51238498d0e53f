"""Reports on stderr that a command is still running, and the current step of the command, if the
command prints nothing for a while.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

SILENCE_S = 8.0
_doing = ""


def say(doing: str) -> None:
    """Set the name of the step that the next lines report. This prints nothing."""
    global _doing
    _doing = doing


class _Watched:
    """A stream that records the time of the last write."""

    def __init__(self, stream: TextIO):
        self.stream, self.last = stream, time.monotonic()

    def write(self, text: str) -> int:
        self.last = time.monotonic()
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def beating(silence_s: float = SILENCE_S) -> Iterator[None]:
    """Return a context that prints a line to stderr whenever stdout and stderr have been silent
    for `silence_s` seconds.
    """
    start, before = time.monotonic(), (sys.stdout, sys.stderr)
    out, err = map(_Watched, before)

    def beat():
        print(f"... {time.monotonic() - start:.0f} s {_doing}".rstrip(), file=err)
        err.flush()

    sys.stdout, sys.stderr = out, err
    try:
        with on_silence(lambda: max(out.last, err.last), silence_s, beat):
            yield
    finally:
        out.flush()
        sys.stdout, sys.stderr = before


@contextlib.contextmanager
def on_silence(
    last: Callable[[], float], seconds: float, call: Callable[[], None]
) -> Iterator[None]:
    """Return a context that calls the function `call` in a thread when the time `last()` was at
    least `seconds` ago. `last()` is a time of `time.monotonic`. The call is repeated until the time
    `last()` advances.
    """
    ended = threading.Event()

    def watch():
        while not ended.wait(max(0.01, last() + seconds - time.monotonic())):
            if time.monotonic() - last() >= seconds:
                call()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
