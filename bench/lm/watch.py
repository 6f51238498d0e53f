"""Observes a training run. The observations are in files next to `train.jsonl`:

| file | content |
|---|---|
| `heartbeat_rank<r>.jsonl` | a line at observed steps, and at other steps if 10 s have passed |
| `<run>.csv` | from rank 0, the observed values |
| `tb/<run>` | from rank 0, the observed values for TensorBoard, if requested |
| `stackdump_rank<r>.txt` | the stacks of a rank that hangs |

`progress` shows the steps on stderr.
"""

import contextlib
import csv
import dataclasses
import datetime
import faulthandler
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..harness import heartbeat
from . import log
from .ranks import Ranks

EVERY, HEARTBEAT_S, HANG_S = 50, 10.0, 900.0
HEARTBEATS = "heartbeat_rank*.jsonl"
MIB = 2**20
HUNG = 76  # the exit status of a run that hangs; no other error has it
REPORTS = 10  # number of lines of progress per run if stderr is no terminal


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the observation.

    Attributes:
      every: Steps between observations of gates and selection.
      tensorboard: Whether to write files for TensorBoard.
      csv: Whether to write the CSV file.
      heartbeat_s: Seconds without a line of the heartbeat after which the next step writes a
        line.
      hang_s: Seconds without a step after which a process ends. With `hang_s=0`, a process never
        ends because a step is late.
    """

    every: int = EVERY
    tensorboard: bool = False
    csv: bool = True
    heartbeat_s: float = HEARTBEAT_S
    hang_s: float = HANG_S


class Watch:
    """A context manager that observes one run on one rank. The files of the observations are in
    `folder`."""

    def __init__(self, folder: Path, run: str, ranks: Ranks, settings: Settings):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.run, self.ranks, self.settings = folder, run, ranks, settings
        self.last = 0.0  # the time of the last line of the heartbeat
        self.board: Any = None
        dump = folder / f"stackdump_rank{ranks.rank}.txt"
        self.within = contextlib.ExitStack()
        self.watchdog = watchdog(dump, settings.hang_s)

    def __enter__(self) -> "Watch":
        if self.settings.tensorboard and self.ranks.rank == 0:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ModuleNotFoundError as error:
                raise ValueError(
                    f"--tensorboard needs the optional dependencies [tensorboard]: {error}"
                ) from None
            self.board = SummaryWriter(str(self.folder / "tb" / self.run))
            self.within.callback(self.board.close)
        self.fed = self.within.enter_context(self.watchdog)
        self.beat("boot", None)
        return self

    def __exit__(self, *raised: Any) -> None:
        self.beat("end" if raised[0] is None else "error", None)
        self.within.close()

    def due(self, done: int) -> bool:
        """Return whether gates and selection are observed after `done` steps."""
        return done % self.settings.every == 0

    def stepped(self, line: log.Step) -> None:
        """Record that a step ended. Every rank must call this method after each step."""
        self.fed()
        silent_s = time.monotonic() - self.last
        if self.due(line.step + 1) or silent_s > self.settings.heartbeat_s:
            numbers = dict(
                loss=line.loss, toks_per_s=line.tokens_per_s, grad_norm=line.grad_norm
            )
            self.beat("step_end", line.step, **numbers)

    def beat(self, what: str, step: int | None, **numbers: Any) -> None:
        """Append a line to the heartbeat, with memory in MiB."""
        self.last = time.monotonic()
        now = datetime.datetime.now(datetime.UTC)
        line = {
            "ts": now.timestamp(),
            "iso": now.isoformat(timespec="milliseconds"),
            "pid": os.getpid(),
            "rank": self.ranks.rank,
            "run": self.run,
            "step": step,
            "msg": what,
            **memory(),
            **numbers,
        }
        path = self.folder / HEARTBEATS.replace("*", str(self.ranks.rank))
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def observed(self, line: log.Watch) -> None:
        """Append a row to the CSV file, and scalars to TensorBoard. Only rank 0 calls this
        method."""
        numbers = scalars(line)
        if self.settings.csv:
            with (self.folder / f"{self.run}.csv").open("a", newline="") as file:
                writer = csv.DictWriter(file, ["step", *numbers])
                if not file.tell():
                    writer.writeheader()
                writer.writerow({"step": line.step, **numbers})
        if self.board is not None:
            for name, value in numbers.items():
                if value is not None:
                    self.board.add_scalar(name, value, line.step)
            self.board.flush()


def scalars(line: log.Watch) -> dict[str, float | None]:
    """Return the numbers of a line by name. The name of a number of a layer is
    `gates/<name>/layer<i>`."""
    names = "loss", "lr", "tokens_per_s", "mfu", "grad_norm"
    found = {name: getattr(line, name) for name in names}
    for number, layer in enumerate(line.layers):
        found |= {f"gates/{name}/layer{number}": value for name, value in layer.items()}
    return found


def memory() -> dict[str, float | None]:
    """Return the memory of the process in MiB: on the GPU from torch's allocator, and on the
    host.
    """
    alloc = reserved = None
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        alloc = torch.cuda.memory_allocated() / MIB
        reserved = torch.cuda.memory_reserved() / MIB
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    host = pages * os.sysconf("SC_PAGE_SIZE") / MIB
    return {"gpu_mem_alloc": alloc, "gpu_mem_reserved": reserved, "host_mem": host}


def heartbeats(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the lines of each rank's heartbeat in `folder`, by file. An incomplete last line,
    which a process that was killed may leave, is omitted.
    """
    found = {}
    for path in sorted(folder.glob(HEARTBEATS)):
        lines = path.read_text().splitlines(keepends=True)
        found[path.name] = [json.loads(line) for line in lines if line.endswith("\n")]
    return found


@contextlib.contextmanager
def watchdog(path: Path, hang_s: float) -> Iterator[Callable[[], None]]:
    """Return a context with a function that must be called at least every `hang_s` seconds. If
    `hang_s` is 0, the function need not be called.

    If the function is not called in time, the stacks of all threads are written to the file at
    `path`, and the process ends immediately with status `HUNG`. Other processes get no message.

    Raises:
      ValueError: `hang_s` is negative.
    """
    if not hang_s >= 0:
        raise ValueError(f"hang_s must be >= 0, got {hang_s}")
    last = time.monotonic()

    def fed() -> None:
        nonlocal last
        last = time.monotonic()

    def end() -> None:
        with path.open("a") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        text = f"error: no step ended for {hang_s:.0f} s; the stacks of all threads are in {path}\n"
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())
        os._exit(HUNG)

    watched = heartbeat.on_silence(lambda: last, hang_s, end)
    with watched if hang_s else contextlib.nullcontext():
        yield fed


@contextlib.contextmanager
def progress(
    name: str, first: int, steps: int, silent: bool = False
) -> Iterator[Callable[[int, float, float], None]]:
    """Return a context that shows the progress of a run on stderr. On a terminal the progress is a
    bar with the remaining time, otherwise about `REPORTS` lines.

    The context has a function that must be called after each step. The arguments of this function
    are the number of steps done, the loss, and the milliseconds of the step.

    Args:
      name: Name of the run.
      first: Number of steps that are already done.
      steps: Total number of steps.
      silent: Whether to show nothing.
    """
    start = time.monotonic()

    def line(done: int, loss: float, time_ms: float) -> None:
        if silent or done % max(1, steps // REPORTS):
            return
        a_step = (time.monotonic() - start) / max(1, done - first)
        left = datetime.timedelta(seconds=round(a_step * (steps - done)))
        where = f"{name} step {done} of {steps}"
        print(f"{where}: loss {loss:.4f}, {time_ms:.0f} ms, {left} left", file=sys.stderr)

    if silent or not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield line
        return
    from rich import console
    from rich import progress as bars

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TextColumn("loss {task.fields[loss]}"),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=console.Console(stderr=True)) as bar:
        task = bar.add_task(name, total=steps, completed=first, loss="-")
        yield lambda done, loss, _: bar.update(task, completed=done, loss=f"{loss:.4f}")
