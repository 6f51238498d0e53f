"""Kernels to machine code for Hopper, in child processes; a GPU is not needed.

A child (`build_child`) imports JAX, traces and lowers a kernel, and has the plugin compile it
with the recorder in place of the CUDA driver. Only the plugin would run in threads: 21 kernels
take two processors 20 s in two processes, 25 s in two threads of one, and more processors leave
the latter with 15 s of Python (two cores of a server, 2026-11).
"""

import base64
import concurrent.futures
import contextlib
import importlib
import json
import logging
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from kernels_pallas.kernel import Kernel
from kernels_pallas.runtime import plugin
from kernels_pallas.runtime.cubin import Cubin
from kernels_pallas.runtime.description import PLACES, describe

LOG = logging.getLogger("kernels_pallas.runtime")
RECORDER = Path(__file__).with_name("recorder.c")
TOOLKIT = "/usr/local/cuda/bin/ptxas"  # where NVIDIA's installer puts it
PTXAS = ("cu13/bin/ptxas", "cuda_nvcc/bin/ptxas")  # of CUDA 13 and of CUDA 12
INSTALL = "pip install 'native-sparse-attention[cuda13]', or [compiler] without a GPU"
TOLD_S = 30.0  # between two lines of progress in a log
SECONDS = 600.0  # that a kernel may take

# Called when a kernel is done: how many are, of how many, and its name.
Progress = Callable[[int, int, str], None]


class Built(NamedTuple):
    """A kernel's machine code."""

    cubin: Cubin
    image: bytes


def progress(waited_for: bool = False) -> Progress | None:
    """Tells on stderr how many kernels are done and how long the others take: on a terminal in a
    line that is drawn over itself, elsewhere every half a minute if it is `waited_for`, else None.
    """
    drawn, told = sys.stderr.isatty(), time.monotonic()
    begin = told

    def tell(done: int, total: int, name: str) -> None:
        nonlocal told
        now = time.monotonic()
        if not drawn and done < total and now - told < TOLD_S:
            return
        told, left = now, (now - begin) / done * (total - done)
        time_left = f"{left / 60:.0f} min" if left > 90 else f"{left:.0f} s"
        text = f"kernel {done} of {total}, {time_left} left"
        text = f"\r{text:<40}" + "\n" * (done == total) if drawn else f"{text}\n"
        print(text, end="", file=sys.stderr, flush=True)

    return tell if drawn or waited_for else None


def default_jobs() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def build(
    kernels: Sequence[Kernel], jobs: int | None = None, progress: Progress | None = None
) -> Iterator[tuple[int, Built | RuntimeError]]:
    """Builds `kernels`, each in one of `jobs` processes (default: one a processor).

    Yields:
      The place of a kernel in `kernels`, in the order in which they are done, and its machine
      code, or an error with its name and the compiler's words.

    Raises:
      ValueError: a kernel cannot be described to another process.
      RuntimeError: a C compiler, ptxas or JAX's CUDA plugin is missing.
    """
    requests = [json.dumps(_request(kernel)) for kernel in kernels]
    if not requests:
        return
    jobs = min(jobs or default_jobs(), len(kernels))
    total, begin = len(kernels), time.perf_counter()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        variables = environment(Path(folder))
        LOG.info("building %d kernels in %d processes", total, jobs)
        logs = [Path(folder) / f"child{i}.log" for i in range(jobs)]
        everyone = [stack.enter_context(_Child(variables, log)) for log in logs]
        children: queue.SimpleQueue[_Child] = queue.SimpleQueue()
        for child in everyone:
            children.put(child)
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(jobs))

        def one(i: int) -> Built | RuntimeError:
            child, start = children.get(), time.perf_counter()
            try:
                return child.build(kernels[i].name, requests[i])
            finally:
                children.put(child)
                LOG.debug("%s: %.2f s", kernels[i].name, time.perf_counter() - start)

        # Those with most arguments take longest: none of them is to be what is left at the end.
        counts = [len(kernel.inputs) + len(kernel.outputs) for kernel in kernels]
        order = sorted(range(total), key=lambda i: -counts[i])
        pending = {pool.submit(one, i): i for i in order}
        # Where the caller stops early, threads that wait for a child must not keep it waiting.
        stack.callback(lambda: [child.kill() for child in everyone])
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        for done, future in enumerate(concurrent.futures.as_completed(pending), 1):
            i, result = pending[future], future.result()
            seconds, name = time.perf_counter() - begin, kernels[i].name
            if isinstance(result, RuntimeError):
                LOG.warning("%s was not built (%d of %d, %.1f s)", name, done, total, seconds)
            else:
                LOG.info("built %s (%d of %d, %.1f s)", name, done, total, seconds)
            if progress:
                progress(done, total, name)
            yield i, result
        LOG.info("%d kernels in %.1f s", total, time.perf_counter() - begin)


def why_not() -> str | None:
    """What this machine lacks to build kernels; None: nothing."""
    if _compiler() is None:
        return "a C compiler is missing, which builds kernels: install gcc"
    if not plugin.installed():
        return f"JAX's CUDA plugin is missing, which builds kernels: {INSTALL}"
    if _ptxas() is None:
        return f"ptxas is missing, which builds kernels: {INSTALL}"
    return None


def environment(folder: Path) -> dict[str, str]:
    """Variables that make a process find the recorder, built in `folder`, and ptxas, and the
    modules that this one finds.

    Raises:
      RuntimeError: a C compiler, ptxas or JAX's CUDA plugin is missing.
    """
    if reason := why_not():
        raise RuntimeError(reason)
    compiler, ptxas = _compiler(), _ptxas()
    assert compiler and ptxas
    library = folder / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", "-pthread", "-o", str(library), str(RECORDER)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{compiler} could not build the recorder:\n{done.stderr}")
    variables = {k: v for k, v in os.environ.items() if not k.startswith("MOSAIC_GPU_")}
    variables["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    # Otherwise a first use of JAX has its CUDA plugin ask libraries that fail without a GPU.
    variables["JAX_PLATFORMS"] = "cpu"
    variables["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    # Mosaic takes the first ptxas on PATH; a CUDA toolkit's version may be any.
    for name, first in (("PATH", ptxas.parent), ("LD_LIBRARY_PATH", folder)):
        rest = variables.get(name)
        variables[name] = f"{first}{os.pathsep}{rest}" if rest else str(first)
    return variables


def _compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


def _ptxas() -> Path | None:
    """That which comes with the plugin, else one on PATH or of a CUDA toolkit."""
    with contextlib.suppress(ModuleNotFoundError):
        for root in importlib.import_module("nvidia").__path__:
            for path in PTXAS:
                if (found := Path(root) / path).exists():
                    return found
    found = Path(shutil.which("ptxas") or TOOLKIT)
    return found if found.exists() else None


def _request(kernel: Kernel) -> dict[str, Any]:
    arguments = [[list(x.shape), x.dtype] for x in (*kernel.inputs, *kernel.outputs)]
    return {"description": describe(kernel), "arguments": arguments}


class _Child:
    """A process that builds one kernel after the other; started anew where it has ended."""

    def __init__(self, variables: dict[str, str], log: Path):
        self._variables, self._log = variables, log
        self._process: subprocess.Popen[str] | None = None
        self._lock, self._killed = threading.Lock(), False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._reap()

    def kill(self) -> None:
        """Ends what another thread waits for; nothing is started any more."""
        with self._lock:
            self._killed = True
            if self._process is not None:
                self._process.kill()

    def build(self, name: str, request: str) -> Built | RuntimeError:
        process = self._started()
        if process is None:
            return RuntimeError(f"{name} was not built: building was stopped")
        assert process.stdin and process.stdout
        timer = threading.Timer(SECONDS, process.kill)
        timer.start()
        try:
            process.stdin.write(request + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        finally:
            timer.cancel()
        if not line.endswith("\n"):
            status = self._reap()
            said = self._log.read_text(errors="replace")[-4000:]
            return RuntimeError(
                f"{name} could not be built: its process ended with status {status}:\n{said}"
            )
        reply = json.loads(line)
        if "error" in reply:
            return RuntimeError(f"{name} could not be built:\n{reply['error']}")
        return Built(Cubin.from_json(reply["cubin"]), base64.b64decode(reply["image"]))

    def _started(self) -> subprocess.Popen[str] | None:
        with self._lock:
            if self._process is None and not self._killed:
                with self._log.open("w") as log:
                    self._process = subprocess.Popen(
                        # -P: not the modules of the working directory before this one's.
                        [
                            sys.executable,
                            "-P",
                            "-m",
                            "kernels_pallas.runtime.build_child",
                            *PLACES,
                        ],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                        env=self._variables,
                    )
            return self._process

    def _reap(self) -> int | None:
        """Waits for the end of a process that ends, and gives its pipes back: its status."""
        process, self._process = self._process, None
        if process is None:
            return None
        assert process.stdin and process.stdout
        with contextlib.suppress(OSError):  # what the process did not read
            process.stdin.close()
        process.stdout.close()
        return process.wait()
