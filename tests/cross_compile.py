"""Compiles Mosaic GPU kernels for Hopper on a machine without a GPU.

A process of its own loads the recorder in place of the driver and calls the very code that
builds kernels; what ptxas printed says whether a kernel spills. Compilation proves neither
that a kernel is right nor that it ends.
"""

import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from kernels_pallas.runtime import build_child
from kernels_pallas.runtime.build import environment

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
    """Builds, lowers and compiles kernels for sm_90a, all in one new process.

    Args:
      builders: ("module:function", keyword arguments that JSON can hold) of functions that
        return a `kernels_pallas.kernel.Kernel`.
      timeout: seconds.

    Raises:
      RuntimeError: no C compiler, no ptxas, no CUDA plugin, or a kernel does not compile.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = run(["-m", "tests.cross_compile"], Path(folder), json.dumps(builders), timeout)
    return json.loads(output.splitlines()[-1])


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
    reports = []
    for place, options in json.load(sys.stdin):
        module, function = place.split(":")
        kernel = getattr(importlib.import_module(module), function)(**options)
        try:
            built, _ = build_child.build(kernel)
        except RuntimeError as error:
            raise RuntimeError(f"{place} {options}") from error
        reports.append({name: getattr(built, name) for name in Report.__annotations__})
    print(json.dumps(reports))


if __name__ == "__main__":
    _main()
