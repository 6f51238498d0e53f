"""Lists installed packages and the device, and checks that packages are compatible.

    python -m bench.environment                 # print it
    python -m bench.environment --out env.json  # and store it

Two packages are compatible if the metadata of one allows the installed version of the other. The
metadata of torch names a version of triton, and the metadata of JAX names versions of jaxlib and
the CUDA plugin. On a GPU one process computes in both frameworks, to test whether the CUDA runtimes
of both frameworks load together. The exit status is 1 if a pair of packages is incompatible.
"""

import dataclasses
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from absl import app
from packaging.requirements import Requirement

from .harness import cli, records
from .reports import render

SCHEMA = 1
# These flags are not in flags.FLAGS until this is the main program, since other commands use the
# same names.
FLAGS = cli.define(
    out=(str, "New file to which the list is also written as JSON."),
)

CUDA_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
PAIRS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
DEVICE = """
import torch
cuda = torch.cuda.is_available()
print(*torch.cuda.get_device_capability() if cuda else (0, 0))
print(torch.cuda.get_device_name() if cuda else "cpu")
"""
BOTH = """
import torch, jax, jax.numpy as jnp
x = torch.arange(8.0, device="cuda") + 1
y = jnp.arange(8.0) + 1
assert jax.default_backend() == "gpu", f"JAX computes on {jax.default_backend()}"
assert x.cpu().tolist() == y.tolist(), "they differ"
z = jnp.asarray(x.cpu().numpy()) + y
assert z.tolist() == (2 * x).cpu().tolist(), "an array of torch reads otherwise in JAX"
"""


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two packages that must be compatible, with the status of the pair and the reason for the
    status."""

    first: str
    second: str
    status: Literal["ok", "broken", "unchecked"]
    reason: str


def pair(
    first: str,
    second: str,
    extra: str,
    version: Callable[[str], str | None],
    requires: Callable[[str], Iterable[str] | None],
) -> Pair | None:
    """Check whether the metadata of `first` allows the installed version of `second`. Return
    None if `first` is not installed, or if `second` is not installed and only an extra requires
    it.
    """
    have, other = version(first), version(second)
    if have is None or (extra and other is None):
        return None
    stated = [Requirement(line) for line in requires(first) or ()]
    stated = [
        each
        for each in stated
        if each.name.lower().replace("_", "-") == second
        and (each.marker is None or each.marker.evaluate({"extra": extra}))
    ]
    names = f"{first} {have}", f"{second} {other or 'missing'}"
    if not stated:
        return Pair(*names, "unchecked", f"{first} states no version of {second}")
    wanted = ",".join(sorted(str(each.specifier) or "any" for each in stated))
    fits = other is not None and all(
        each.specifier.contains(other, prereleases=True) for each in stated
    )
    return Pair(*names, "ok" if fits else "broken", f"{first} needs {second} {wanted}")


def installed_pairs() -> list[Pair]:
    """Check and return every pair of installed packages."""
    reads = {"version": records.version, "requires": importlib.metadata.requires}
    found = (pair(*each, **reads) for each in PAIRS)
    return [each for each in found if each is not None]


def cuda_runtimes(device: str) -> Pair:
    """Check whether torch and JAX can both use the GPU in one process."""
    torch = f"torch {records.version('torch')}"
    plugin = next((name for name in CUDA_PLUGINS if records.version(name)), None)
    jax = f"{plugin} {records.version(plugin)}" if plugin else f"jax {records.version('jax')}"
    if device == "cpu":
        return Pair(torch, jax, "unchecked", "there is no GPU")
    if plugin is None:
        return Pair(torch, jax, "unchecked", "JAX is installed without support for CUDA")
    status, said = _python(BOTH)
    if status == 0:
        return Pair(torch, jax, "ok", "both frameworks compute on the GPU in one process")
    last = said.strip().splitlines()[-1] if said.strip() else f"exit status {status}"
    return Pair(
        torch, jax, "broken", f"the frameworks cannot both use the GPU in one process: {last}"
    )


def device_name() -> str:
    """Return the name of the GPU that torch uses, as in a record, or `cpu`."""
    return _device()[1]


def is_hopper() -> bool:
    """Return whether the GPU supports the Mosaic kernels."""
    return _device()[0] == "9 0"


def _device() -> list[str]:
    """Return the compute capability and the name of the GPU. A separate process reads capability
    and name, so that its GPU memory is freed when the process ends.
    """
    status, said = _python(DEVICE)
    if status:
        raise RuntimeError(f"torch does not report its device: {said.strip()[-2000:]}")
    return said.strip().splitlines()[-2:]


def _python(program: str) -> tuple[int, str]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
    except subprocess.TimeoutExpired as error:
        return 1, f"no answer within {error.timeout:g} s"
    return done.returncode, done.stdout


def describe(commit: str | None = None) -> dict[str, Any]:
    """Return the environment in the form of `env.json`, with memory in bytes."""
    device = device_name()
    return {
        "schema": SCHEMA,
        "time": records.utc_now(),
        "device": device,
        **records.environment(commit),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "pairs": [dataclasses.asdict(x) for x in (*installed_pairs(), cuda_runtimes(device))],
    }


def main(argv: Sequence[str]) -> int:
    if FLAGS.out and Path(FLAGS.out).exists():
        raise app.UsageError(f"--out must be a new file, got {FLAGS.out}, which exists")
    found = describe(FLAGS.commit)
    print(render.filled("environment.txt.jinja", **found), end="")
    if FLAGS.out:
        Path(FLAGS.out).parent.mkdir(parents=True, exist_ok=True)
        Path(FLAGS.out).write_text(json.dumps(found, indent=2) + "\n")
    return int(any(each["status"] == "broken" for each in found["pairs"]))


if __name__ == "__main__":
    cli.run(main, FLAGS)
