"""Runs a command as a step of a longer run, in a process with a timeout, a log and a result. The
process has its own process group, so that its children end with it.
"""

import contextlib
import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

CHECKOUT = Path(__file__).parents[2]
# The working directory of commands. It is the checkout, or the current folder if the library is
# installed.
ROOT = CHECKOUT if (CHECKOUT / "pyproject.toml").exists() else Path.cwd()
SHOWN_LINES = 15
GRACE_S = 5.0  # seconds between SIGTERM and SIGKILL

# Adding, discarding and copying are each one operation for other threads.
_running: set[subprocess.Popen] = set()

Status = Literal["ok", "failed", "timeout", "skipped", "interrupted"]


@dataclasses.dataclass(frozen=True)
class Step:
    """An entry of a plan. `configs/oneshot/gpu.yaml` describes the fields."""

    name: str
    command: str
    timeout_s: float
    quick: str | None = None
    hopper: str | None = None
    needs: list[str] = dataclasses.field(default_factory=list)
    last: bool = False


@dataclasses.dataclass(frozen=True)
class Result:
    """How a step ended. `command` is relative to the root of the repository, and `files` are
    relative to the folder of the run.
    """

    name: str
    command: str
    status: Status
    seconds: float = 0.0
    reason: str = ""
    files: tuple[str, ...] = ()


class Interrupted(BaseException):
    """The exception that is raised if SIGINT or SIGTERM was received."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Return a context in which the first SIGINT or SIGTERM raises `Interrupted` in the main
    thread, so that the current step can be ended.
    """
    numbers = signal.SIGINT, signal.SIGTERM

    def stop(number, frame):
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of this process with `changes`, for a child process. A
    changed `PYTHONPATH` is put before the present value.
    """
    variables = os.environ | changes
    before = os.environ.get("PYTHONPATH")
    if before and "PYTHONPATH" in changes:
        variables["PYTHONPATH"] += f"{os.pathsep}{before}"
    return variables


def expand(template: str, words: Mapping[str, str], records: Sequence[str]) -> list[str]:
    """Return the words of a command in which `{name}` has been replaced by its value. An empty
    word is omitted, and a word with `{records}` is repeated for each record.
    """
    found = []
    for word in shlex.split(template):
        each = records if "{records}" in word else [""]
        for record in each:
            text = word.replace("{records}", record)
            for name, value in words.items():
                text = text.replace(f"{{{name}}}", value)
            found += [text] if text else []
    return found


def module(text: str) -> str:
    """Return the text with `nsa_bench.<command>` in place of `bench.<command>`, if `bench` is
    installed as `nsa_bench`.
    """
    return re.sub(r"\bbench(?=\.[a-z])", __name__.partition(".")[0], text)


def run(
    name: str,
    words: Sequence[str],
    folder: Path,
    timeout_s: float,
    budget: bool,
    before: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Result:
    """Run `python -m <words>` and write its output to `<folder>/<name>.log`. Python stores compiled
    modules for the next step, even if the environment disables such files. Stored modules save 2 s
    when torch is imported.

    Args:
      name: Name of the step.
      words: Module and arguments.
      folder: Folder of the log.
      timeout_s: Seconds after which the process is ended.
      budget: Whether `timeout_s` is the remaining time of the whole run. If `budget` is true, the
        reason for a timeout names the time limit of the run.
      before: The words of a command that starts this command, such as a launcher.
      variables: Environment variables in addition to the variables of this process.
    """
    command = [*before, sys.executable, "-u", "-m", module(words[0]), *words[1:]]
    log = folder / f"{name}.log"
    start = time.monotonic()
    status: Status = "ok"
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment({"PYTHONDONTWRITEBYTECODE": ""} | dict(variables or {})),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _running.add(child)
        try:
            code = child.wait(timeout_s)
            status, reason = ("ok", "") if code == 0 else ("failed", _ended(code))
        except subprocess.TimeoutExpired:
            what = "the time limit of the run was reached" if budget else "timeout"
            status, reason = "timeout", f"{what} after {timeout_s:.0f} s"
        except Interrupted as error:
            status, reason = "interrupted", str(error)
        finally:
            _end(child)
            _running.discard(child)
    seconds = round(time.monotonic() - start, 2)
    shown = shlex.join(["python", "-m", module(words[0]), *words[1:]]).replace(
        f"{ROOT}{os.sep}", ""
    )
    return Result(name, shown, status, seconds, reason)


def answer(
    command: str, *words: str, variables: Mapping[str, str] | None = None
) -> tuple[int, Any]:
    """Return the exit status of `python -m <command>`, and the JSON of the last printed line, or
    None if the command fails. `variables` has the same meaning as in `run`.
    """
    called = [sys.executable, "-m", module(command), *words]
    env = environment(variables or {})
    done = subprocess.run(called, stdout=subprocess.PIPE, text=True, env=env)
    said = None if done.returncode else json.loads(done.stdout.splitlines()[-1])
    return done.returncode, said


def end_all() -> None:
    """End the processes that the function `run` has started in other threads. Each call then
    returns a `Result`.
    """
    for child in _running.copy():
        _end(child)


def _ended(code: int) -> str:
    return f"exit status {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"


def _end(child: subprocess.Popen) -> None:
    """End the process and its children, which are the only processes in its group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            break
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
    child.wait()


def tail(path: Path, lines: int = SHOWN_LINES) -> str:
    """Return the last lines of a log."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
