"""Compiles Mosaic GPU kernels for Hopper on a machine without a GPU.

A process of its own loads the recorder in place of the driver and calls the very code that
builds kernels; what ptxas printed says whether a kernel spills. Compilation proves neither
that a kernel is right nor that it ends. The process serves all calls: to start it takes as long
as to compile three kernels.
"""

import atexit
import functools
import gc
import importlib
import json
import select
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from kernels_pallas.runtime import build_child
from kernels_pallas.runtime.build import environment
from tests import durations

ROOT = Path(__file__).parents[1]

Builder = tuple[str, Mapping[str, Any]]


class Report(TypedDict):
    """What ptxas says of a kernel; registers are a thread's, shared memory a block's."""

    name: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int
    remarks: list[str]  # warnings and performance losses, such as serialised wgmma


def compile_report(builders: Sequence[Builder], timeout: float = 280) -> list[Report]:
    """Builds, lowers and compiles kernels for sm_90a, all in one process.

    Args:
      builders: ("module:function", keyword arguments that JSON can hold) of functions that
        return a `kernels_pallas.kernel.Kernel`.
      timeout: seconds.

    Raises:
      RuntimeError: no C compiler, no ptxas, no CUDA plugin, or a kernel does not compile.
    """
    server = _server()
    try:
        answer = server.ask(json.dumps(builders), timeout)
    except BaseException:  # what it does now is not known
        _server.cache_clear()
        server.close()
        raise
    durations.served += answer["seconds"]
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["reports"]


class Server:
    """This module as a process that answers a line with a line."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory()
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.cross_compile"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            cwd=ROOT,
            env=environment(Path(self.folder.name)),
        )
        atexit.register(self.close)

    def ask(self, question: str, timeout: float) -> Any:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(question + "\n")
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], timeout)[0]:
            raise RuntimeError(f"no answer in {timeout} s:\n{question}")
        answer = self.process.stdout.readline()
        if not answer:
            self.errors.seek(0)
            raise RuntimeError(f"the compiler ended:\n{self.errors.read()}")
        return json.loads(answer)

    def close(self) -> None:
        atexit.unregister(self.close)
        self.process.kill()
        self.process.communicate()
        self.errors.close()
        self.folder.cleanup()


@functools.cache
def _server() -> Server:
    return Server()


def run(arguments: Sequence[str], folder: Path, text: str = "", timeout: float = 280) -> str:
    """What Python prints, run with the recorder in place of the driver; `text` is its input.

    Raises:
      RuntimeError: as `compile_report`, or Python failed.
    """
    done = subprocess.run(
        [sys.executable, *arguments],
        input=text,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(folder),
        timeout=timeout,
    )
    if done.returncode:
        raise RuntimeError(f"{arguments} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def _main() -> None:
    gc.freeze()  # as in `tests/conftest.py`
    gc.set_threshold(100_000, 20, 50)
    before = 0.0
    for line in sys.stdin:
        try:
            answer = {"reports": [_compiled(*builder) for builder in json.loads(line)]}
        except Exception:
            answer = {"error": traceback.format_exc()}
        now = durations.spent()
        answer["seconds"], before = now - before, now
        print(json.dumps(answer), flush=True)


def _compiled(place: str, options: Mapping[str, Any]) -> Report:
    module, function = place.split(":")
    kernel = getattr(importlib.import_module(module), function)(**options)
    try:
        built, _ = build_child.build(kernel)
    except RuntimeError as error:
        raise RuntimeError(f"{place} {options}") from error
    return {name: getattr(built, name) for name in Report.__annotations__}


if __name__ == "__main__":
    _main()
