"""Compiles Mosaic GPU kernels for Hopper on a machine without a GPU.

A process of its own loads a stand-in for the driver and calls the very code that compiles
kernels for torch; what ptxas printed says whether a kernel spills. Compilation proves neither
that a kernel is right nor that it ends. The process serves all calls: to start it takes as long
as to compile three kernels.
"""

import atexit
import contextlib
import ctypes
import functools
import importlib
import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from tests import durations

ROOT = Path(__file__).parents[1]
STAND_IN = ROOT / "tests" / "fake_libcuda.c"
PTXAS = ("cu13/bin/ptxas", "cuda_nvcc/bin/ptxas")  # of CUDA 13 and of CUDA 12

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
            env=_environment(Path(self.folder.name)),
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
    """What Python prints, run with the stand-in in place of the driver; `text` is its input.

    Raises:
      RuntimeError: as `compile_report`, or Python failed.
    """
    done = subprocess.run(
        [sys.executable, *arguments],
        input=text,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=_environment(folder),
        timeout=timeout,
    )
    if done.returncode:
        raise RuntimeError(f"{arguments} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def _environment(folder: Path) -> dict[str, str]:
    """One that makes a process find the stand-in, built in `folder`, and ptxas."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise RuntimeError("a C compiler is missing: install gcc")
    library = folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, STAND_IN], check=True)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MOSAIC_GPU_")}
    environment["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    # Otherwise a first use of JAX has its CUDA plugin ask libraries that fail without a GPU.
    environment["JAX_PLATFORMS"] = "cpu"
    # Mosaic takes the first ptxas on PATH; a CUDA toolkit's version may be any.
    for variable, first in (("PATH", _ptxas().parent), ("LD_LIBRARY_PATH", folder)):
        rest = environment.get(variable)
        environment[variable] = f"{first}:{rest}" if rest else str(first)
    return environment


def _ptxas() -> Path:
    with contextlib.suppress(ModuleNotFoundError):
        for root in importlib.import_module("nvidia").__path__:
            for path in PTXAS:
                if (found := Path(root) / path).exists():
                    return found
    raise RuntimeError("ptxas is missing: pip install nvidia-cuda-nvcc")


def _main() -> None:
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
    from interop import launch

    module, function = place.split(":")
    kernel = getattr(importlib.import_module(module), function)(**options)
    with tempfile.TemporaryFile("w+") as log:
        with _printing_to(log.fileno()):
            try:
                launch._compile(kernel, 0)
            except RuntimeError as error:
                failed = error
            else:
                failed = None
        log.seek(0)
        text = log.read()
    if failed:
        raise RuntimeError(f"{place} {options}:\n{text}") from failed
    return _report(kernel.name, text)


@contextlib.contextmanager
def _printing_to(file: int) -> Iterator[None]:
    """Sends what C code prints to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)


def _report(name: str, log: str) -> Report:
    """The figures in a log of ptxas, summed where a kernel has functions of its own."""
    frames = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log
    )
    registers = re.findall(r"Used (\d+) registers", log)
    if "for 'sm_90a'" not in log or not frames or not registers:
        raise RuntimeError(f"ptxas did not compile {name} for sm_90a:\n{log}")
    stack, stores, loads = (sum(map(int, numbers)) for numbers in zip(*frames, strict=True))
    record = (ctypes.c_uint64 * 70)()
    ctypes.CDLL("libcuda.so.1").fake_record(record)
    return {
        "name": name,
        "registers": max(map(int, registers)),
        "stack_bytes": stack,
        "spill_store_bytes": stores,
        "spill_load_bytes": loads,
        "shared_bytes": record[1],
        "remarks": re.findall(r"ptxas warning.*|.*Potential Performance Loss.*", log),
    }


if __name__ == "__main__":
    _main()
