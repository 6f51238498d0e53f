"""What a first call costs: kernels built, kernels read from disk, a length never seen.

    python -m bench.first_call
    python -m bench.first_call --H 32 --Hkv 8 --lengths 50

A new folder of kernels, then a process for each stage, and one row of JSON each, in `--out`.
`mosaic`, so a Hopper GPU.

    cold        builds all kernels of the layer
    warm        torch: finds them on disk, calls forward and backward for the first time
    lengths     torch: lengths never seen, each called four times, in random order
    jax         the same as both in JAX, where a new shape is traced and compiled around kernels
    jax_again   the same program in another process, with JAX's persistent compilation cache

Host time: microseconds until a call returns, the GPU left alone to finish.
"""

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from absl import app, flags

from nsa_torch.installed import seconds

from .harness import cli, exit_status, process, records
from .harness.attention_calls import Calls

FLAGS = flags.FlagValues()
at = {"flag_values": FLAGS}
HEADS = flags.DEFINE_integer("H", 64, "Query heads.", lower_bound=1, **at)
KV_HEADS = flags.DEFINE_integer("Hkv", 4, "Key/value heads.", lower_bound=1, **at)
WIDTH = flags.DEFINE_integer("D", 128, "Columns of a head.", lower_bound=1, **at)
LENGTHS = flags.DEFINE_integer("lengths", 50, "Lengths never seen.", lower_bound=1, **at)
LONGEST = flags.DEFINE_integer("longest", 16384, "Tokens at most.", lower_bound=64, **at)
SEED = flags.DEFINE_integer("seed", 0, "Of the random lengths.", **at)
JOBS = flags.DEFINE_integer(
    "jobs", None, "Processes that build; default: one a core.", lower_bound=1, **at
)
OUT = cli.define_lines(FLAGS)
COMMIT = cli.define_commit(FLAGS)
STAGES = ("cold", "warm", "lengths", "jax", "jax_again")
STAGE = flags.DEFINE_enum("stage", None, STAGES, "Only this one.", **at)
FOLDER = flags.DEFINE_string("folder", None, "Of the kernels, with --stage.", **at)


def calls_of(length: int) -> Calls:
    return Calls.of(1, length, HEADS.value, KV_HEADS.value, WIDTH.value)


def host_us(call: Callable[[], object], times: int = 20) -> float:
    """Microseconds until a call returns: the median."""
    found = []
    for _ in range(times):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        found.append((time.perf_counter() - start) * 1e6)
    return statistics.median(found)


def used_mib() -> float:
    """Of the GPU by this process, besides what torch's allocator holds."""
    free, total = torch.cuda.mem_get_info()
    return (total - free - torch.cuda.memory_reserved()) / 2**20


def cold() -> dict:
    """All kernels of the layer, on disk and loaded."""
    import nsa_torch

    layer = {"heads": HEADS.value, "kv_heads": KV_HEADS.value, "key_width": WIDTH.value}
    torch.zeros(1, device="cuda")
    lengths = [2**i for i in range(9, LONGEST.value.bit_length())]
    start = time.perf_counter()
    count = nsa_torch.prepare(**layer, lengths=lengths, jobs=JOBS.value)
    built = time.perf_counter() - start
    files = list(Path(str(FOLDER.value)).rglob("*.kernel"))
    return {
        "kernels": count,
        "build_s": built,
        "disk_kib": sum(x.stat().st_size for x in files) / 1024,
        "memory_mib": used_mib(),
    }


def warm() -> dict:
    """The first calls of a process that finds all kernels on disk."""
    import nsa_torch.mosaic  # noqa: F401  what a program imports before its first call

    calls = calls_of(4096)
    first = seconds(calls.both)
    forward = seconds(calls.forward)
    again = {"forward_s": seconds(calls.forward), "both_s": seconds(calls.both)}
    return {
        "first_both_s": first,
        "first_forward_s": forward,
        **again,
        "forward_host_us": host_us(calls.forward),
        "both_host_us": host_us(calls.both),
        "memory_mib": used_mib(),
    }


def new_lengths() -> dict:
    """Lengths never seen, each called four times; the longest first, so that torch's allocator need
    not grow. What the first call leaves to the second counts in `three_more_ms`."""
    draw = random.Random(SEED.value)
    lengths = [LONGEST.value, *(draw.randint(65, LONGEST.value) for _ in range(LENGTHS.value))]
    more_ms, three_more_ms, memory = [], [], []
    for length in lengths:
        calls = calls_of(length)
        *three, known = (seconds(calls.both) * 1e3 for _ in range(4))
        more_ms.append(three[0] - three[1])
        three_more_ms.append(sum(three) - 3 * known)
        memory.append(torch.cuda.memory_reserved() / 2**20 + used_mib())
        del calls
    more_ms = more_ms[1:]
    three = three_more_ms[1:]
    return {
        "lengths": len(more_ms),
        "more_ms_median": statistics.median(more_ms),
        "more_ms_p90": sorted(more_ms)[len(more_ms) * 9 // 10],
        "more_ms_max": max(more_ms),
        "three_more_ms_median": statistics.median(three),
        "longest_alone_mib": memory[0],
        "after_all_mib": memory[-1],
    }


def in_jax() -> dict:
    """JAX's cache of programs lies beside the kernels: the second process finds them."""
    import jax

    from .harness import jax_first_call

    jax.config.update("jax_compilation_cache_dir", f"{FOLDER.value}/jax")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    layer = HEADS.value, KV_HEADS.value, WIDTH.value
    return jax_first_call.lengths(layer, LONGEST.value, SEED.value)


def main(argv: Sequence[str]) -> int:
    if not torch.cuda.is_available():
        raise NotImplementedError("a Hopper GPU is needed")
    if STAGE.value:
        if not FOLDER.value:
            raise app.UsageError("--stage needs --folder")
        stages = dict(zip(STAGES, (cold, warm, new_lengths, in_jax, in_jax), strict=True))
        stage = stages[STAGE.value]
        print(json.dumps(stage()), flush=True)
        return exit_status.OK
    about = {
        "device": torch.cuda.get_device_name(),
        "H": HEADS.value,
        "Hkv": KV_HEADS.value,
        "D": WIDTH.value,
        "longest": LONGEST.value,
    }
    with tempfile.TemporaryDirectory() as folder:
        for stage in STAGES:
            words = *_own_flags(), f"--stage={stage}", f"--folder={folder}"
            start = time.perf_counter()
            cache = {"XDG_CACHE_HOME": folder}
            status, found = process.answer("bench.first_call", *words, variables=cache)
            if status:
                print(f"{stage}: exit status {status}", flush=True)
                return exit_status.worst([status])
            found["process_s"] = time.perf_counter() - start
            shown = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
            print(f"{stage:9} {shown}", flush=True)
            if OUT.value:
                line = about | {"stage": stage} | found
                records.append(OUT.value, [records.record("first_call", COMMIT.value, **line)])
    return exit_status.OK


def _own_flags() -> list[str]:
    names = "H", "Hkv", "D", "lengths", "longest", "seed", "jobs"
    values = {name: FLAGS[name].value for name in names}
    return [f"--{name}={value}" for name, value in values.items() if value is not None]


if __name__ == "__main__":
    cli.run(main, FLAGS)
