"""A long judgement says that it goes on: a silent command looks like one that hangs."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

QUIET_SECONDS = 8.0


@contextlib.contextmanager
def heartbeat(what: str) -> Iterator[None]:
    """While the block (or the decorated function) runs, a line on stderr every 8 s."""
    ended, begun = threading.Event(), time.monotonic()

    def speak():
        while not ended.wait(QUIET_SECONDS):
            print(f"{what}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    try:
        yield
    finally:
        ended.set()
        speaker.join()
