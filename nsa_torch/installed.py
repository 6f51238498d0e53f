"""Measures the first calls of this library after an installation from a wheel. The first calls
must not build or write anything.

    python -m nsa_torch.installed                    # a cold and a warm process per preset
    python -m nsa_torch.installed --preset paper --out installed.jsonl

Each process imports torch, starts the GPU, runs attention forward and backward, prefills a paged
cache, and decodes a token with the cache. Then a layer with the same heads runs forward and
backward, and reads a prompt and decodes a token with its own cache. The folders in which a process
caches kernels are new and empty at first. The exit status is 1 if a process built or wrote
something, or imported JAX, and 3 without a GPU. The command needs a Hopper GPU and torch.

A record has these durations in seconds:

- import_s: import of torch and nsa_torch
- start_s: the GPU's first tensor
- forward_backward_s, prefill_s, decode_s: the first calls of attention
- total_s: sum of forward_backward_s, prefill_s and decode_s
- again_s: the same sum for a second run of the three calls
- layer_s: first calls of a layer, which are forward and backward, a prompt and a token
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import nsa_torch
from kernels_pallas.runtime import loaded
from nsa_core import config_files
from nsa_core.config import NSAConfig
from nsa_core.extras import version
from nsa_torch import paged

PRESETS = "paper", "seed", "smallgroup"
STAGES = "cold", "warm"
PROCESS = """
import sys, time
begin = time.perf_counter()
from nsa_torch import installed
installed.tell(time.perf_counter() - begin, *sys.argv[1:])
"""
SHOWN = "native-sparse-attention", "torch", "triton", "jax"
# The caches of compiled code. Each of them gets its own folder.
VARIABLES = "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH"


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes, including its work on the GPU."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def first_calls(preset: str, length: int) -> dict[str, float]:
    """Measure the seconds of the first calls of this process."""
    settings = config_files.over_base(preset)
    model, config = settings["model"], NSAConfig(**settings["nsa"])
    names = "dim", "n_heads", "n_kv_groups", "d_k", "d_v"
    dim, heads, kv_heads, width, value_width = (model[name] for name in names)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def call():
        return nsa_torch.attention(*tensors, config=config, implementation="mosaic")

    def forward_backward():
        out = call()
        torch.autograd.grad(out, tensors, out)

    @torch.no_grad()
    def prefill():
        call()
        paged.append(cache, key, value, table, lengths)

    @torch.no_grad()
    def decode():
        paged.append(cache, key[:1], value[:1], table, lengths + 1)
        given = tensors[0][0, :1], tensors[3][0, :1], cache, table, lengths + 1
        nsa_torch.paged_attention(*given, implementation="mosaic")

    def whole_layer():
        windows = config.compress_block, config.compress_stride, config.select_block
        sizes = dim, heads, kv_heads, width, value_width, *windows
        made = nsa_torch.NSAAttention(
            *sizes, config.num_selected, config.window, device="cuda", dtype=torch.bfloat16
        )
        x = random(1, length, dim)
        made(x)[0].sum().backward()
        with torch.no_grad():
            _, kept = made(x, made.init_cache(batch=1, capacity=length + 1))
            made(x[:, :1], kept, prefill=False)

    shapes = (heads, width), (kv_heads, width), (kv_heads, value_width), (heads, 3)
    tensors: list[torch.Tensor] = []

    def start():
        tensors.extend(random(1, length, *shape).requires_grad_() for shape in shapes)

    found = {"start_s": seconds(start)}
    pages = -(-(length + 1) // config.select_block)
    cache = nsa_torch.PagedCache(
        pages, kv_heads, width, value_width, config=config, device="cuda"
    )
    table = torch.arange(pages, device="cuda", dtype=torch.int32)[None]
    lengths = torch.full((1,), length, device="cuda", dtype=torch.int32)
    key, value = tensors[1].detach()[0], tensors[2].detach()[0]
    calls = {"forward_backward_s": forward_backward, "prefill_s": prefill, "decode_s": decode}
    found |= {name: seconds(each) for name, each in calls.items()}
    found["total_s"] = sum(found[name] for name in calls)
    found["again_s"] = sum(map(seconds, calls.values()))
    found["layer_s"] = seconds(whole_layer)
    return found


def faults(caches: Path) -> list[str]:
    """List the actions of this process that must not happen after an installation from a
    wheel."""
    written = [str(path.relative_to(caches)) for path in caches.rglob("*") if path.is_file()]
    found = [f"wrote {', '.join(written[:3])}"] if written else []
    if "jax" in sys.modules:
        found.append("imported jax")
    if loaded.store()._memory:
        found.append(f"built {len(loaded.store()._memory)} kernels")
    return found


def tell(import_s: float, preset: str, length: str, caches: str) -> None:
    """Print the row with the measurements of this process."""
    row = {"import_s": import_s, **first_calls(preset, int(length))}
    print(json.dumps(row | {"faults": faults(Path(caches))}))


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, or 1 if a process built or wrote something or imported JAX, or
    3 without a GPU.
    """
    parser = argparse.ArgumentParser("python -m nsa_torch.installed", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--preset",
        default=",".join(PRESETS),
        help="comma-separated names of presets in configs/",
    )
    parser.add_argument(
        "--length", type=int, default=4096, help="number of tokens, at least 64"
    )
    parser.add_argument(
        "--out", type=Path, help="JSON Lines file to which the rows are appended"
    )
    parser.add_argument(
        "--commit", help="commit from which the wheel was built, for the records"
    )
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("this command needs a Hopper GPU", file=sys.stderr)
        return 3
    about = {
        "device": torch.cuda.get_device_name(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        "commit": options.commit,
        "versions": {name: version(name) for name in SHOWN},
        "length": options.length,
    }
    status = 0
    for preset in options.preset.split(","):
        for stage in STAGES:
            with tempfile.TemporaryDirectory() as folder:
                caches = [f"{name}={Path(folder, name.lower())}" for name in VARIABLES]
                words = preset, str(options.length), folder
                command = ["env", *caches, sys.executable, "-c", PROCESS, *words]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            row = json.loads(done.stdout.splitlines()[-1])
            numbers = (f"{x} {y:.3f}" for x, y in row.items() if isinstance(y, float))
            print(
                f"{preset} {stage}: {', '.join(numbers)}", *row["faults"], sep="; ", flush=True
            )
            status |= bool(row["faults"])
            if options.out:
                line = json.dumps(about | {"preset": preset, "stage": stage} | row)
                with options.out.open("a") as file:
                    print(line, file=file)
    return status


if __name__ == "__main__":
    sys.exit(main())
