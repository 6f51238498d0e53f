"""What the first calls cost where the library came from a wheel: nothing is built, nothing written.

    python -m nsa_bench.installed                      # of each preset: a cold process, a warm one
    python -m nsa_bench.installed --presets paper --out installed.jsonl

Each process imports torch, starts the GPU, and then calls attention forward and backward, prefills
a paged cache and decodes a token from it. Its cache folders are new and empty. The exit status is 1
where a process built or wrote something, or imported JAX. A Hopper GPU is needed.

    import_s   torch and nsa_torch          forward_backward_s, prefill_s, decode_s   first calls
    start_s    the GPU's first tensor       total_s   of the three     again_s   of all three again
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import app, flags

from nsa_core import config_files
from nsa_core.config import NSAConfig

from .harness import cli, exit_status, process, records

FLAGS = flags.FlagValues()
at = {"flag_values": FLAGS}
PRESETS = flags.DEFINE_list("presets", ["paper", "seed", "smallgroup"], "Of configs/.", **at)
LENGTH = flags.DEFINE_integer("length", 4096, "Tokens.", lower_bound=64, **at)
OUT = flags.DEFINE_string("out", None, "A JSON file to append the rows to.", **at)
CACHES = flags.DEFINE_string(
    "caches", None, "Be the process that calls one preset; the folder of its caches.", **at
)
COMMIT = cli.define_commit(FLAGS)
STAGES = "cold", "warm"
# Each cache of what a process may compile, in a folder of its own.
VARIABLES = "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH"


def first_calls(preset: str, length: int) -> dict[str, float]:
    """Seconds of the first calls of this process."""
    begin = time.perf_counter()
    import torch

    import nsa_torch
    from nsa_torch import paged

    found = {"import_s": time.perf_counter() - begin}
    if not torch.cuda.is_available():
        raise NotImplementedError("a Hopper GPU is needed")

    def seconds(call: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    settings = config_files.overlay(config_files.load("base"), config_files.load(preset))
    model, config = settings["model"], NSAConfig(**settings["nsa"])
    heads, kv_heads, width, value_width = (
        model[name] for name in ("n_heads", "n_kv_groups", "d_k", "d_v")
    )

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def call(tensors):
        return nsa_torch.attention(*tensors, config=config, implementation="mosaic")

    def forward_backward():
        out = call(tensors)
        torch.autograd.grad(out, tensors, out)

    @torch.no_grad()
    def prefill():
        call(tensors)
        paged.append(cache, *new, table, lengths, implementation="torch")

    @torch.no_grad()
    def decode():
        key, value = (x[:1] for x in new)
        paged.append(cache, key, value, table, lengths + 1, implementation="torch")
        query, gates = tensors[0][0, :1], tensors[3][0, :1]
        nsa_torch.paged_attention(
            query, gates, cache, table, lengths + 1, implementation="mosaic"
        )

    def start():
        return [
            random(1, length, heads, width).requires_grad_(),
            random(1, length, kv_heads, width).requires_grad_(),
            random(1, length, kv_heads, value_width).requires_grad_(),
            random(1, length, heads, 3).requires_grad_(),
        ]

    found["start_s"] = seconds(start)
    tensors = start()
    pages = -(-(length + 1) // config.select_block)
    cache = nsa_torch.PagedCache(
        pages, kv_heads, width, value_width, config=config, device="cuda"
    )
    table = torch.arange(pages, device="cuda", dtype=torch.int32)[None]
    lengths = torch.full((1,), length, device="cuda", dtype=torch.int32)
    new = tensors[1].detach()[0], tensors[2].detach()[0]
    calls = {"forward_backward_s": forward_backward, "prefill_s": prefill, "decode_s": decode}
    found |= {name: seconds(each) for name, each in calls.items()}
    found["total_s"] = sum(found[name] for name in calls)
    found["again_s"] = sum(map(seconds, calls.values()))
    return found


def faults(caches: Path) -> list[str]:
    """What a process did that an installed wheel has no need of."""
    from kernels_pallas.runtime import loaded

    written = [str(path.relative_to(caches)) for path in caches.rglob("*") if path.is_file()]
    found = [f"wrote {', '.join(written[:3])}"] if written else []
    if "jax" in sys.modules:
        found.append("imported jax")
    if loaded.store()._memory:
        found.append(f"built {len(loaded.store()._memory)} kernels")
    return found


def main(argv: Sequence[str]) -> int:
    if CACHES.value:
        (preset,) = PRESETS.value
        found = first_calls(preset, LENGTH.value)
        print(json.dumps(found | {"faults": faults(Path(CACHES.value))}), flush=True)
        return exit_status.OK
    import torch

    if not torch.cuda.is_available():
        raise NotImplementedError("a Hopper GPU is needed")
    status = exit_status.OK
    about = {
        "device": torch.cuda.get_device_name(),
        "time": records.utc_now(),
        "length": LENGTH.value,
    } | records.environment(COMMIT.value)
    for preset in PRESETS.value:
        for stage in STAGES:
            row = _row(preset)
            bad = row.pop("faults")
            shown = ", ".join(f"{name} {value:.3f}" for name, value in row.items())
            print(f"{preset:10} {stage:4} {shown}", *bad, sep="; " if bad else "", flush=True)
            if bad:
                status = exit_status.worst([status, 1])
            if OUT.value:
                own = {"preset": preset, "stage": stage, "faults": bad}
                records.append_lines(OUT.value, [about | own | row])
    return status


def _row(preset: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: str(Path(folder, name.lower())) for name in VARIABLES}
        module, flags = process.module("bench.installed"), [f"--length={LENGTH.value}"]
        flags += [f"--presets={preset}", f"--caches={folder}"]
        done = subprocess.run(
            [sys.executable, "-m", module, *flags],
            stdout=subprocess.PIPE,
            text=True,
            env=process.environment(caches),
        )
        if done.returncode:
            raise app.UsageError(f"the process of {preset} ended with {done.returncode}")
        return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    cli.run(main, FLAGS)
