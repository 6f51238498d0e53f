"""What is installed here, what fits, and what to do: `python -m nsa_torch.doctor`.

A line for each thing: `ok`; `note`, where something is slower or missing without being wrong;
`broken`, where something that is installed cannot run. The exit status is 1 where one is broken.
"""

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from packaging.requirements import Requirement

from kernels_pallas.mosaic.capability import HOPPER
from kernels_pallas.runtime import build, cubin, loaded
from kernels_pallas.triton.capability import AMPERE, launcher_why_not
from nsa_core.extras import version

LIBRARY = "native-sparse-attention"
OPTIONAL = "jax", "triton", "transformers", "flax"  # of the extras; torch is here


class Finding(NamedTuple):
    """What was looked at, how it is, and what to do where it is not `ok`."""

    what: str
    state: Literal["ok", "note", "broken"]
    words: str


def findings() -> Iterator[Finding]:
    """All of them, in the order in which a user needs them."""
    yield Finding("python", "ok", f"{sys.version.split()[0]} in {sys.prefix}")
    yield from packages()
    yield gpu()
    yield from cuda()
    yield kernels()
    yield folder()
    yield compilers()


def packages() -> Iterator[Finding]:
    """Versions, and whether this library allows them."""
    allowed: dict[str, Requirement] = {}
    for line in _requires(LIBRARY):
        requirement = Requirement(line)
        if requirement.name not in allowed or 'extra == "test"' not in str(requirement.marker):
            allowed[requirement.name] = requirement
    for name in ("torch", *OPTIONAL):
        have, bound = version(name), allowed.get(name)
        if have is None:
            yield Finding(
                name, "note", f"not installed: pip install '{LIBRARY}[{_extra(name)}]'"
            )
        elif bound and not bound.specifier.contains(have, prereleases=True):
            words = f"{have} was not tried, {bound.specifier} was: pip install '{name}"
            yield Finding(name, "note", f"{words}{bound.specifier}'")
        else:
            yield Finding(name, "ok", have)


def gpu() -> Finding:
    """Which GPU, and which kernels it runs."""
    if torch.version.cuda is None:
        return Finding(
            "gpu",
            "note",
            "this torch is a CPU build, attention runs on the CPU: install one of CUDA "
            "(pip install torch on Linux)",
        )
    if not torch.cuda.is_available():
        return Finding(
            "gpu",
            "note",
            f"torch of CUDA {torch.version.cuda} finds none: nvidia-smi must show one, and a "
            "driver that is as new as this CUDA",
        )
    name, found = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    shown = f"{name}, compute capability {found[0]}.{found[1]}"
    if found == HOPPER:
        return Finding("gpu", "ok", f"{shown}: Mosaic and Triton kernels")
    if found >= AMPERE:
        words = f"Triton kernels; those of the wheel are {cubin.ARCHITECTURE}, for Hopper alone"
        return Finding("gpu", "note", f"{shown}: {words}")
    return Finding("gpu", "note", f"{shown}: torch's own attention; Triton needs 8.0 or more")


def cuda() -> Iterator[Finding]:
    """Whether JAX's CUDA is torch's: two of them in one process may end it."""
    for major in ("13", "12"):
        if version(f"jax-cuda{major}-plugin") is None or torch.version.cuda is None:
            continue
        mine = torch.version.cuda.partition(".")[0]
        state = "ok" if mine == major else "broken"
        words = f"JAX's plugin is of CUDA {major}, torch of CUDA {torch.version.cuda}"
        if mine != major:
            words += f": pip install '{LIBRARY}[cuda{mine}]' in an environment of its own"
        yield Finding("cuda", state, words)


def kernels() -> Finding:
    """Which kernels are on disk, and for what."""
    entries, layers = loaded.store().entries(), loaded.store().layers()
    if not entries:
        reason = build.why_not()
        state = "note" if reason or not torch.cuda.is_available() else "ok"
        words = reason or "they are built at the first call: python -m nsa_interop.build"
        return Finding("kernels", state, f"none on disk; {words}")
    shown = "; ".join(
        f"H={x['heads']} Hkv={x['kv_heads']} D={x['key_width']}/{x['value_width']} {x['dtype']}"
        for x in layers
    )
    size = sum(x.bytes for x in entries) / 2**20
    return Finding("kernels", "ok", f"{len(entries)} on disk, {size:.1f} MiB; layers: {shown}")


def folder() -> Finding:
    """Whether kernels that are built here can be kept."""
    store = loaded.store()
    place, there = store.folder, store.folder
    if there.is_dir() and (reason := store.refusal()):
        return Finding("folder", "note", f"{reason}; kernels built here are kept in memory")
    while not there.exists():
        there = there.parent
    if os.access(there, os.W_OK | os.X_OK):
        return Finding("folder", "ok", str(place))
    return Finding(
        "folder",
        "note",
        f"{place} cannot be written, kernels built here are kept in memory: set XDG_CACHE_HOME "
        "to a folder of your own",
    )


def compilers() -> Finding:
    """Whether kernels can be built: those of Mosaic, and Triton's, which need C as well."""
    if reason := launcher_why_not():
        words = f"Triton {reason}; torch's operators run in place of its kernels"
        return Finding("compiler", "note", words)
    if reason := build.why_not():
        return Finding("compiler", "note", f"only kernels that are on disk run: {reason}")
    return Finding("compiler", "ok", "kernels of any layer can be built")


def _requires(name: str) -> list[str]:
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:  # a checkout
        return []


def _extra(name: str) -> str:
    return {"transformers": "hf", "flax": "nnx"}.get(name, name)


def main(arguments: Sequence[str] = ()) -> int:
    how = argparse.RawDescriptionHelpFormatter
    about = {"description": __doc__, "formatter_class": how}
    argparse.ArgumentParser("python -m nsa_torch.doctor", **about).parse_args(arguments)
    found = list(findings())
    for each in found:
        print(f"{each.state:6} {each.what:12} {each.words}")
    return int(any(each.state == "broken" for each in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
