"""Shows the progress of a run: a bar with the remaining time on a terminal, otherwise some
lines.
"""

import datetime
import importlib.util
import sys
import time
from typing import Any

REPORTS = 10  # lines of a run


class Progress:
    """The progress of `steps` steps from `first` on, while entered; `silent` prints nothing."""

    def __init__(self, name: str, first: int, steps: int, silent: bool = False):
        self.name, self.first, self.steps, self.silent = name, first, steps, silent
        self.bar: Any = None

    def __enter__(self) -> "Progress":
        self.start = time.monotonic()
        shown = sys.stderr.isatty() and importlib.util.find_spec("rich") is not None
        if not self.silent and shown:
            self.bar = _bar()
            self.task = self.bar.add_task(
                self.name, total=self.steps, completed=self.first, loss="-"
            )
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def stepped(self, done: int, loss: float, time_ms: float) -> None:
        """After `done` steps."""
        if self.bar is not None:
            self.bar.update(self.task, completed=done, loss=f"{loss:.4f}")
        elif not self.silent and done % max(1, self.steps // REPORTS) == 0:
            where = f"{self.name} step {done} of {self.steps}"
            print(f"{where}: loss {loss:.4f}, {time_ms:.0f} ms, {self.left(done)} left",
                  file=sys.stderr)  # fmt: skip

    def left(self, done: int) -> str:
        """Return the estimated time of the remaining steps."""
        a_step = (time.monotonic() - self.start) / max(1, done - self.first)
        return str(datetime.timedelta(seconds=round(a_step * (self.steps - done))))


def _bar() -> Any:
    from rich import console, progress

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("loss {task.fields[loss]}"),
        progress.TimeRemainingColumn(),
        console=console.Console(stderr=True),
    )
