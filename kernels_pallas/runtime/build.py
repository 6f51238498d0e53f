"""Compiles kernels to machine code for Hopper in child processes. No GPU is needed.

A child (`build_child`) imports JAX, traces and lowers a kernel, and compiles it with JAX's plugin.
In the child process, a recorder replaces the CUDA driver. Processes are faster than threads, since
in threads only the plugin runs in parallel. On two cores of a server, 21 kernels take 20 s in two
processes and 25 s in two threads. In two threads, Python code takes 15 s, and more cores would not
shorten this time.
"""

import base64
import contextlib
import importlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import IO, Any, NamedTuple

from kernels_pallas.kernel import Kernel
from kernels_pallas.runtime.cubin import Cubin
from kernels_pallas.runtime.description import PLACES, canonical, describe

LOG = logging.getLogger("kernels_pallas.runtime")
RECORDER = Path(__file__).with_name("recorder.c")
PLUGINS = "jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"
TOOLKIT = "/usr/local/cuda/bin/ptxas"  # path of ptxas after NVIDIA's installer
PTXAS = ("cu13/bin/ptxas", "cuda_nvcc/bin/ptxas")  # packages of CUDA 13 and of CUDA 12
INSTALL = "pip install 'native-sparse-attention[cuda13]', or [compiler] without a GPU"

# Called when a kernel is done, with the number of kernels that are done and the total.
Progress = Callable[[int, int], None]


class Built(NamedTuple):
    """A kernel's machine code."""

    cubin: Cubin
    image: bytes


def progress(waited_for: bool = False) -> Progress | None:
    """Return a function that prints to stderr how many kernels are done, and an estimate of the
    remaining time. On a terminal, the function overwrites one line. Without a terminal, the
    function prints a line per kernel if `waited_for` is true. Without a terminal and with
    `waited_for` false, return None.
    """
    begin, drawn = time.monotonic(), sys.stderr.isatty()

    def tell(done: int, total: int) -> None:
        left = (time.monotonic() - begin) / done * (total - done)
        text = f"kernel {done} of {total}, {left:.0f} s left"
        text = f"\r{text:<40}" + "\n" * (done == total) if drawn else f"{text}\n"
        print(text, end="", file=sys.stderr, flush=True)

    return tell if drawn or waited_for else None


def build(
    kernels: Sequence[Kernel], jobs: int | None = None, progress: Progress | None = None
) -> Iterator[tuple[int, Built | RuntimeError]]:
    """Build `kernels` in `jobs` processes, by default with one process per processor.

    Yields:
      For each kernel, in the order of completion: its index in `kernels`, and its machine code
      or an error. An error of a kernel has the kernel's name and the compiler's message.

    Raises:
      ValueError: A kernel cannot be described to another process.
      RuntimeError: A C compiler, ptxas or JAX's CUDA plugin is missing, or the recorder cannot be
        compiled.
    """
    requests = [canonical(describe(kernel)) for kernel in kernels]
    jobs = min(jobs or len(os.sched_getaffinity(0)), len(kernels))
    LOG.info("building %d kernels in %d processes", len(kernels), jobs)
    # Kernels with more arguments need more time to build, so they are built first.
    todo = sorted(
        range(len(kernels)), key=lambda i: len((*kernels[i].inputs, *kernels[i].outputs))
    )
    idle: list[Child] = []
    busy: dict[Any, tuple[Child, int]] = {}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        variables = environment(Path(folder)) if todo else {}
        while todo or busy:
            while todo and len(busy) < jobs:
                child = idle.pop() if idle else stack.enter_context(started(variables))
                i = todo.pop()
                with contextlib.suppress(BrokenPipeError):  # the process has already ended
                    print(requests[i], file=child.process.stdin, flush=True)
                busy[child.process.stdout] = child, i
            for pipe in connection.wait([*busy]):
                child, i = busy.pop(pipe)
                name, result = kernels[i].name, _read(child)
                if isinstance(result, Built):
                    LOG.info("built %s", name)
                else:
                    result = RuntimeError(f"{name} could not be built{result}")
                if child.process.poll() is None:
                    idle.append(child)
                if progress:
                    progress(len(kernels) - len(todo) - len(busy), len(kernels))
                yield i, result


class Child(NamedTuple):
    """A process that builds one kernel after the other. `log` has the output of the process."""

    process: subprocess.Popen[str]
    log: IO[str]


@contextlib.contextmanager
def started(variables: dict[str, str]) -> Iterator[Child]:
    """Start a child process. The process is killed when the `with` block ends."""
    # With -P, modules in the working directory do not hide other modules.
    command = [sys.executable, "-P", "-m", "kernels_pallas.runtime.build_child", *PLACES]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        tempfile.TemporaryFile("w+", errors="replace") as log,
        subprocess.Popen(command, stderr=log, env=variables, **pipes) as process,
    ):
        try:
            yield Child(process, log)
        finally:
            process.kill()


def _read(child: Child) -> Built | str:
    """Return the reply of a process. The reply is machine code, or the reason why the build
    failed.
    """
    assert child.process.stdout
    if not (line := child.process.stdout.readline()).endswith("\n"):
        status = child.process.wait()
        child.log.seek(0)
        return f": its process ended with status {status}:\n{child.log.read()[-4000:]}"
    reply = json.loads(line)
    if "error" in reply:
        return f":\n{reply['error']}"
    return Built(Cubin.from_json(reply["cubin"]), base64.b64decode(reply["image"]))


def why_not() -> str | None:
    """Return a sentence that names a missing tool that building kernels needs, or None."""
    if _compiler() is None:
        return "a C compiler is missing, which is needed to build kernels; install gcc"
    if not has_plugin():
        return f"JAX's CUDA plugin is missing, which is needed to build kernels; {INSTALL}"
    if _ptxas() is None:
        return f"ptxas is missing, which is needed to build kernels; {INSTALL}"
    return None


def environment(folder: Path) -> dict[str, str]:
    """Return the environment variables with which a child process finds ptxas, the modules of
    this process, and the recorder. The recorder is built in `folder`.

    Raises:
      RuntimeError: A C compiler, ptxas or JAX's CUDA plugin is missing, or the recorder cannot be
        compiled.
    """
    if reason := why_not():
        raise RuntimeError(reason)
    compiler, ptxas = _compiler(), _ptxas()
    assert compiler and ptxas
    library = folder / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", "-pthread", "-o", str(library), str(RECORDER)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"{compiler} could not compile the recorder of driver calls:\n{done.stderr}"
        )
    variables = {k: v for k, v in os.environ.items() if not k.startswith("MOSAIC_GPU_")}
    variables["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    # Otherwise the first use of JAX initializes its CUDA plugin, which fails without a GPU.
    variables["JAX_PLATFORMS"] = "cpu"
    variables["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    # Mosaic uses the first ptxas on PATH, and a CUDA toolkit may have another version.
    for name, first in (("PATH", ptxas.parent), ("LD_LIBRARY_PATH", folder)):
        rest = variables.get(name)
        variables[name] = f"{first}{os.pathsep}{rest}" if rest else str(first)
    return variables


def has_plugin(*names: str) -> bool:
    """Return whether JAX's CUDA plugin is installed, without importing the plugin. The plugin
    counts as installed if one of the modules `names` exists. `names` defaults to the plugins for
    CUDA 13 and CUDA 12.
    """
    # `find_spec` raises this error if no package `jax_plugins` is installed.
    with contextlib.suppress(ModuleNotFoundError):
        return any(map(importlib.util.find_spec, names or PLUGINS))
    return False


def _compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


def _ptxas() -> Path | None:
    """Return the path of ptxas. The ptxas of the plugin is preferred to a ptxas on PATH or in a
    CUDA toolkit.
    """
    with contextlib.suppress(ModuleNotFoundError):
        for root in importlib.import_module("nvidia").__path__:
            for path in PTXAS:
                if (found := Path(root) / path).exists():
                    return found
    found = Path(shutil.which("ptxas") or TOOLKIT)
    return found if found.exists() else None
