"""The files for the observation of a run, in addition to the lines of `train.jsonl`.

`heartbeat_rank<r>.jsonl`, a line at every watched step and every ten seconds in which steps end;
from rank 0 `<run>.csv` and, where asked for, the files
of tensorboard. A stack of a hung rank is in `stackdump_rank<r>.txt`.
"""

import csv
import dataclasses
import datetime
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from . import log
from .ranks import Ranks
from .watchdog import Watchdog

EVERY, HEARTBEAT_S, HANG_S = 50, 10.0, 900.0
HEARTBEATS = "heartbeat_rank*.jsonl"
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Settings:
    """The observed values, and their files.

    Attributes:
      every: steps between looks at gates and selection.
      tensorboard, csv: whether there are such files.
      heartbeat_s: seconds after which the next step that ends is a beat.
      hang_s: seconds without a step after which a process ends; 0: never.
    """

    every: int = EVERY
    tensorboard: bool = False
    csv: bool = True
    heartbeat_s: float = HEARTBEAT_S
    hang_s: float = HANG_S


class Watch:
    """Observes one run on one rank, as a context. Its files are in `folder`."""

    def __init__(self, folder: Path, run: str, ranks: Ranks, settings: Settings):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.run, self.ranks, self.settings = folder, run, ranks, settings
        self.path = heartbeat_path(folder, ranks.rank)
        self.last = -np.inf
        dump = folder / f"stackdump_rank{ranks.rank}.txt"
        self.watchdog = Watchdog(dump, settings.hang_s)
        self.board: Any = None

    def __enter__(self) -> "Watch":
        if self.settings.tensorboard and self.ranks.rank == 0:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ModuleNotFoundError as error:
                raise ValueError(
                    f"--tensorboard needs the extra tensorboard (pip): {error}"
                ) from None
            self.board = SummaryWriter(str(self.folder / "tb" / self.run))
        self.watchdog.__enter__()
        self.beat("boot", None)
        return self

    def __exit__(self, *raised: Any) -> None:
        self.beat("end" if raised[0] is None else "error", None)
        self.watchdog.__exit__(*raised)
        if self.board is not None:
            self.board.close()

    def due(self, done: int) -> bool:
        """Whether gates and selection are looked at after `done` steps."""
        return done % self.settings.every == 0

    def stepped(self, line: log.Step) -> None:
        """After a step, on every rank."""
        self.watchdog.fed()
        if self.due(line.step + 1) or self._silent_s() > self.settings.heartbeat_s:
            numbers = dict(
                loss=line.loss, toks_per_s=line.tokens_per_s, grad_norm=line.grad_norm
            )
            self.beat("step_end", line.step, **numbers)

    def _silent_s(self) -> float:
        return time.monotonic() - self.last

    def beat(self, what: str, step: int | None, **numbers: Any) -> None:
        """A line of the heartbeat; memory in MiB."""
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
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def observed(self, line: log.Watch) -> None:
        """On rank 0: a row of the CSV, scalars of tensorboard."""
        numbers = scalars(line)
        if self.settings.csv:
            path = self.folder / f"{self.run}.csv"
            fresh = not path.exists()
            with path.open("a", newline="") as file:
                writer = csv.writer(file)
                if fresh:
                    writer.writerow(["step", *numbers])
                values = ("" if x is None else x for x in numbers.values())
                writer.writerow([line.step, *values])
        if self.board is not None:
            for name, value in numbers.items():
                if value is not None:
                    self.board.add_scalar(name, value, line.step)
            self.board.flush()


def scalars(line: log.Watch) -> dict[str, float | None]:
    """Return the numbers of a line by name; those of a layer as `gates/<name>/layer<i>`."""
    found: dict[str, float | None] = {
        "loss": line.loss,
        "lr": line.lr,
        "tokens_per_s": line.tokens_per_s,
        "mfu": line.mfu,
        "grad_norm": line.grad_norm,
    }
    for number, layer in enumerate(line.layers):
        found |= {f"gates/{name}/layer{number}": value for name, value in layer.items()}
    return found


def memory() -> dict[str, float | None]:
    """Return the memory of the process: on the GPU from torch's allocator, and on the host."""
    alloc = reserved = None
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        alloc = torch.cuda.memory_allocated() / MIB
        reserved = torch.cuda.memory_reserved() / MIB
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    host = pages * os.sysconf("SC_PAGE_SIZE") / MIB
    return {"gpu_mem_alloc": alloc, "gpu_mem_reserved": reserved, "host_mem": host}


def heartbeat_path(folder: Path, rank: int) -> Path:
    return folder / f"heartbeat_rank{rank}.jsonl"


def heartbeats(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the lines of each rank's heartbeat in `folder`, by file; a last line that was cut off
    where a process ended is left out.
    """
    found = {}
    for path in sorted(folder.glob(HEARTBEATS)):
        lines = path.read_text().splitlines(keepends=True)
        found[path.name] = [json.loads(line) for line in lines if line.endswith("\n")]
    return found
