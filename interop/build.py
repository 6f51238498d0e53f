"""Compiles the kernels of configurations ahead of time, so that the first calls of a program
compile nothing.

    python -m nsa_interop.build --preset paper,seed             # into the user's cache
    python -m nsa_interop.build --preset paper --out FOLDER     # into another folder
    python -m nsa_interop.build --list | --clear                # list stored kernels; remove them

The command needs no GPU. JAX with its CUDA plugin, ptxas and a C compiler must be installed.
"""

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from typing import Any

from kernels_pallas.kernel import LENGTHS, Kernel
from kernels_pallas.runtime.build import progress
from kernels_pallas.runtime.store import Store
from nsa_core import config_files
from nsa_core.config import NSAConfig
from nsa_core.dispatch import layer_note
from nsa_core.plan import kernels
from nsa_core.steps import mosaic_append, mosaic_decode, mosaic_forward

PRESETS = ("paper", "seed", "smallgroup")
DTYPES = {"bf16": "bfloat16", "f16": "float16"}


def layer_of(preset: str) -> dict[str, Any]:
    """Return the layer that a file of `configs/` describes, in the form of the store of kernels."""
    settings = config_files.over_base(preset)
    model, config = settings["model"], NSAConfig(**settings["nsa"])
    return layer_note(
        heads=model["n_heads"],
        kv_heads=model["n_kv_groups"],
        key_width=model["d_k"],
        value_width=model["d_v"],
        dtype=DTYPES[settings["runtime"]["precision"]],
        config=config,
    )


def kernels_of(
    preset: str, decode: bool = False, lengths: Sequence[int] = LENGTHS
) -> list[Kernel]:
    """Return the kernels that a layer of `configs/` runs, forward and backward, for any length,
    with and without packed rows.

    Args:
      decode: Whether to include the kernels for paged caches, including the kernels that append
        tokens.
      lengths: Lengths of sequences whose kernels are returned. Defaults to all lengths.
    """
    layer = layer_of(preset)
    layer["config"] = NSAConfig(**layer["config"])
    found: dict[Kernel, None] = {}
    if decode:
        for step in (mosaic_append, mosaic_decode):
            found |= dict.fromkeys(step.kernels_of(**layer))
        if (on_pages := mosaic_forward.selected_on_pages(**layer)) is not None:
            found[on_pages] = None
    for packed in (False, True):
        wanted = kernels.kernels_of_layer(lengths, packed=packed, **layer)
        found |= dict.fromkeys(x.for_any_length() for x in wanted)
    return list(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return the exit status: 0, or 1 if a kernel could not be built."""
    parser = argparse.ArgumentParser("python -m nsa_interop.build", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--preset", default="", help=f"comma-separated names out of {', '.join(PRESETS)}"
    )
    parser.add_argument(
        "--decode",
        action="store_true",
        help="also build the kernels of paged caches: decode steps with one token per row, append, "
        "and attention of prompts to pages",
    )
    parser.add_argument(
        "--jobs", type=int, help="number of processes; default: one per processor"
    )
    parser.add_argument(
        "--out", help="folder to which kernels are written; default: the user's cache"
    )
    parser.add_argument("--list", action="store_true", help="list the kernels in the folder")
    parser.add_argument(
        "--clear", action="store_true", help="remove the kernels from the folder"
    )
    options = parser.parse_args(arguments)
    presets = [name for name in options.preset.split(",") if name]
    if odd := sorted(set(presets) - set(PRESETS)):
        parser.error(f"--preset must be one of {', '.join(PRESETS)}, got {', '.join(odd)}")
    if options.jobs is not None and options.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {options.jobs}")
    if not (presets or options.list or options.clear):
        parser.error("one of --preset, --list and --clear must be given")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")

    # Kernels in the installed package do not count as stored (`presets=None`), so that the
    # folder becomes complete.
    store, status = Store(options.out, presets=None), 0
    if options.clear:
        print(f"{store.clear()} kernels removed from {store.folder}")
    if presets:
        begin = time.perf_counter()
        try:
            kernels = [
                kernel for name in presets for kernel in kernels_of(name, options.decode)
            ]
            built = store.fetch(kernels, options.jobs, progress(waited_for=True))
            store.add_layers([layer_of(name) for name in presets])
            words = f"{len(built)} kernels of {', '.join(presets)} in {store.folder}"
            print(f"{words}, {time.perf_counter() - begin:.1f} s")
        except (ModuleNotFoundError, RuntimeError) as error:
            print(f"{error}", file=sys.stderr)
            status = 1
    if options.list:
        for x in (entries := store.entries()):
            used = time.strftime("%Y-%m-%d %H:%M", time.localtime(x.used))
            print(f"{x.name:<24} {x.bytes / 1024:8.1f} KiB  used {used}  {x.key[:16]}")
        total = sum(x.bytes for x in entries) / 2**20
        print(f"{len(entries)} kernels, {total:.1f} MiB, in {store.folder}")
    return status


if __name__ == "__main__":
    sys.exit(main())
