"""Runs commands that prepare in parallel and are timed one after the other.

A child is a process of a command. A child prints `ready` when only the timing is left, and waits
for a line on its standard input before it starts the timing. With this protocol, compilation uses
all cores of the machine, and one process at a time uses the GPU.
"""

import contextlib
import itertools
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from . import heartbeat, process, records
from .records import Record

READY, GO = "ready\n", "go\n"
# If JAX computes only inputs and oracles, it must return unused memory to the device.
ALONE = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}


def wait() -> None:
    """In a child, report that everything is prepared, and return when it is the turn of this
    child.

    Raises:
      EOFError: The parent process ended before the turn of this child.
    """
    print(READY, end="", flush=True)
    if sys.stdin.readline() != GO:
        raise EOFError("the parent process ended before the turn of this child")


class Child:
    """A process of `python -m <words>`, whose standard error goes to the file `log`."""

    def __init__(self, words: Sequence[str], log: Path, environment: Mapping[str, str]):
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-m", process.module(words[0]), *words[1:]],
                env=process.environment(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.start, self.printed = time.monotonic(), ""

    def ready(self) -> str:
        """Wait until the child is ready or has ended. Return a phrase that states whether the child
        is ready or has ended, and after how many seconds.
        """
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line == READY:
                return f"ready after {time.monotonic() - self.start:.0f} s"
            self.printed += line
        return f"ended after {time.monotonic() - self.start:.0f} s"

    def take_turn(self) -> tuple[int, str]:
        """Give the child its turn. Return the exit status and the output of the child."""
        printed, _ = self.process.communicate(GO)
        return self.process.returncode, self.printed + printed

    def end(self) -> None:
        with self.process:  # closes the pipes too
            self.process.kill()


def measured(
    commands: Mapping[str, Sequence[str]],
    lines: Path,
    environment: Mapping[str, str],
    *,
    unit: str = "",
    at_once: int | None = None,
) -> Iterator[tuple[str, int, list[Record]]]:
    """Run commands, and collect their records in the file `lines`.

    Args:
      commands: The words of each command by name. A command writes its records to a file with the
        name of `lines`, in a folder that has the name of the command and is next to `lines`.
      lines: The file for all records.
      environment: Additional environment variables.
      unit: The text that is printed after each name.
      at_once: Maximum number of commands that run together. Defaults to all.

    Yields:
      The name, the exit status and the records of each command. The records are appended to `lines`
      immediately, since another process may end a later command.
    """
    for wave in itertools.batched(commands.items(), at_once or len(commands)):
        for name, status in of_names(dict(wave), lines.parent, environment, unit):
            path = lines.parent / name / lines.name
            done = records.read(path) if path.exists() else []
            records.append(lines, done)
            yield name, status, done


def of_lengths(
    flag: str, lengths: Iterable[int], lines: Path, framework: str, *more: str
) -> Iterator[tuple[str, int, list[Record]]]:
    """Run this command once per length, with the other flags of the command line and `more`. The
    command with the longest length starts first, since it has the most work. The command with the
    shortest length is timed first.

    Yields:
      The same as `measured`, with the length as name.
    """
    commands = {}
    for length in sorted(lengths, reverse=True):
        own = [f"--{flag}={length}", f"--out={lines.parent / str(length)}", "--turn"]
        words = [f"bench.{lines.stem}", *sys.argv[1:], *more, *own, "--nosave_records"]
        commands[str(length)] = words
    alone = ALONE if framework == "torch" else {}
    return measured(commands, lines, alone, unit=" tokens")


def of_names(
    commands: Mapping[str, Sequence[str]],
    folder: Path,
    environment: Mapping[str, str],
    unit: str = "",
) -> Iterator[tuple[str, int]]:
    """Run commands. The commands start in order and prepare in parallel. After the preparation, the
    commands are timed one after the other, the last command first. The standard error of each
    command is in `<name>.log` in `folder`.

    Yields:
      The name and the exit status of each command when it ends. The output of the command is
      printed, with `unit` after its name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as ends:
        children = {}
        for name, words in commands.items():
            children[name] = Child(words, folder / f"{name}.log", environment)
            ends.callback(children[name].end)
        for name, child in children.items():
            heartbeat.say(f"{name}{unit}: compiles")
            print(f"{name}{unit}: {child.ready()}", flush=True)
        for name in reversed(children):
            heartbeat.say(f"{name}{unit}: has its turn")
            status, printed = children[name].take_turn()
            print(f"{name}{unit}: exit status {status}\n\n{printed}", flush=True)
            yield name, status
