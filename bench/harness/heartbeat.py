"""A command that prints nothing for a while reports on stderr that it is running, and its step."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO

SILENCE_S = 8.0
_doing = ""


def say(doing: str) -> None:
    """Set the name of the step for the next lines, without output."""
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
    """A context that writes a line to stderr whenever stdout and stderr were silent for
    `silence_s`.
    """
    start, before, ended = time.monotonic(), (sys.stdout, sys.stderr), threading.Event()
    out, err = map(_Watched, before)

    def beat():
        while True:
            quiet = time.monotonic() - max(out.last, err.last)
            if ended.wait(max(silence_s - quiet, 0.01)):
                return
            if time.monotonic() - max(out.last, err.last) >= silence_s:
                print(f"... {time.monotonic() - start:.0f} s {_doing}".rstrip(), file=err)
                err.flush()

    sys.stdout, sys.stderr = out, err
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        out.flush()
        sys.stdout, sys.stderr = before
