"""Lists the installed packages, checks them and recommends fixes: `python -m nsa_torch.doctor`.

The command prints one line per subject. The line begins with `ok`, with `note` for a missing or
slow part, or with `broken` for an installed part that cannot run. The exit status is 1 if a
subject is broken.
"""

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Iterator, Sequence

import torch
from packaging.requirements import Requirement

from kernels_pallas.mosaic.capability import HOPPER
from kernels_pallas.runtime import build, cubin, loaded, store
from kernels_pallas.triton.capability import AMPERE, launcher_why_not
from nsa_core.extras import version

LIBRARY = "native-sparse-attention"
# Packages, and the extras that install them.
PACKAGES = {
    "torch": "torch",
    "jax": "jax",
    "triton": "triton",
    "transformers": "hf",
    "flax": "nnx",
}

type Finding = tuple[str, str, str]  # the subject, its state, and a message with the remedy


def packages() -> Iterator[Finding]:
    """Report the versions of packages, and whether this library supports them."""
    try:
        requires = importlib.metadata.requires(LIBRARY) or []
    except importlib.metadata.PackageNotFoundError:  # the library runs from a checkout
        requires = []
    # The extra for tests may have narrower bounds.
    requires = [x for x in map(Requirement, requires) if 'extra == "test"' not in str(x.marker)]
    allowed = {x.name: x.specifier for x in requires}
    for name, extra in PACKAGES.items():
        have, bound = version(name), allowed.get(name)
        if have is None:
            yield name, "note", f"not installed; run pip install '{LIBRARY}[{extra}]'"
        elif bound is not None and not bound.contains(have, prereleases=True):
            words = f"{have} was not tested; run pip install '{name}{bound}'"
            yield name, "note", words
        else:
            yield name, "ok", have


def gpu() -> Finding:
    """Report the GPU, and which kernels can run on it."""
    if torch.version.cuda is None:
        words = (
            "this torch is a CPU build, and attention runs on the CPU; use a CUDA build (pip "
        )
        return "gpu", "note", f"{words}install torch on Linux)"
    if not torch.cuda.is_available():
        words = (
            f"torch (CUDA {torch.version.cuda}) finds no GPU; check that nvidia-smi lists one, "
        )
        return "gpu", "note", f"{words}with a driver for this CUDA version"
    name, found = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    shown = f"{name}, compute capability {found[0]}.{found[1]}"
    if found == HOPPER:
        return "gpu", "ok", f"{shown}: Mosaic and Triton kernels run"
    if found >= AMPERE:
        words = (
            f"Triton kernels; kernels of the wheel are {cubin.ARCHITECTURE}, only for Hopper"
        )
        return "gpu", "note", f"{shown}: {words}"
    return "gpu", "note", f"{shown}: torch's own attention; Triton kernels need 8.0 or more"


def cuda() -> Iterator[Finding]:
    """Check that JAX and torch use the same CUDA version. Two CUDA versions in one process may
    crash the process.
    """
    release = torch.version.cuda
    for major in ("13", "12"):
        if release and version(f"jax-cuda{major}-plugin") is not None:
            mine = release.partition(".")[0]
            words = f"JAX uses CUDA {major}, torch uses CUDA {release}"
            if mine == major:
                yield "cuda", "ok", words
            else:
                words += f"; run pip install '{LIBRARY}[cuda{mine}]' in a separate environment"
                yield "cuda", "broken", words


def kernels() -> Finding:
    """Report which kernels are stored on disk, and for which layers."""
    entries, layers = loaded.store().entries(), loaded.store().layers()
    if not entries:
        reason = build.why_not()
        state = "note" if reason or not torch.cuda.is_available() else "ok"
        words = (
            reason or "kernels are built at the first call, or by python -m nsa_interop.build"
        )
        return "kernels", state, f"none on disk; {words}"
    shown = "; ".join(
        f"H={x['heads']} Hkv={x['kv_heads']} D={x['key_width']}/{x['value_width']} {x['dtype']}"
        for x in layers
    )
    size = sum(x.bytes for x in entries) / 2**20
    return "kernels", "ok", f"{len(entries)} on disk, {size:.1f} MiB; layers: {shown}"


def folder() -> Finding:
    """Check that kernels can be stored on disk after they are built."""
    place = there = loaded.store().folder
    if there.is_dir() and (reason := loaded.store().refusal()):
        return "folder", "note", f"{reason}; {store.IN_MEMORY}"
    while not there.exists():
        there = there.parent
    if os.access(there, os.W_OK | os.X_OK):
        return "folder", "ok", str(place)
    words = f"{place} is not writable, {store.IN_MEMORY}; set XDG_CACHE_HOME to another folder"
    return "folder", "note", words


def compilers() -> Finding:
    """Check that Mosaic and Triton kernels can be built. Both kinds of kernels need a C
    compiler."""
    if reason := launcher_why_not():
        words = f"Triton {reason}; torch operators run instead of Triton kernels"
        return "compiler", "note", words
    if reason := build.why_not():
        return "compiler", "note", f"only kernels that are on disk can run: {reason}"
    return "compiler", "ok", "kernels of any layer can be built"


def main(argv: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args(argv)
    python = "python", "ok", f"{sys.version.split()[0]} in {sys.prefix}"
    # The checks, in the order in which a user needs them.
    found = [python, *packages(), gpu(), *cuda(), kernels(), folder(), compilers()]
    for what, state, words in found:
        print(f"{state:6} {what:12} {words}")
    return int(any(state == "broken" for _, state, _ in found))


if __name__ == "__main__":
    sys.exit(main())
