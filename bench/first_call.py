"""Measures the cost of a first call, with kernels built, with kernels read from disk, and for a new
length.

    python -m bench.first_call
    python -m bench.first_call --H 32 --Hkv 8 --lengths 50

The folder of kernels is empty at the start. Each stage is a separate process and writes one line
of JSON to `--out`. The command measures the kernels of `mosaic` and therefore needs a Hopper GPU.

- `cold` builds all kernels of the layer.
- `warm` runs the first forward and backward pass in torch, with kernels from disk.
- `lengths` runs four calls of each new length in torch. The longest length is first, and the other
  lengths are in random order.
- `jax` runs the first call and calls of new lengths in JAX, which also traces and compiles the
  operations around the kernels.
- `jax_again` repeats `jax` in another process, with JAX's persistent compilation cache.
"""

import json
import random
import statistics
import tempfile
from collections.abc import Sequence

import torch
from absl import app

from nsa_torch.installed import seconds

from . import run
from .harness import cli, exit_status, process
from .harness.timed_problem import Problem, jax_calls, torch_calls

JAX_LENGTHS = 5  # number of new lengths in a stage in JAX
FLAGS = cli.define(
    H=(64, "Query heads."),
    Hkv=(4, "Key/value heads."),
    D=(128, "Number of columns per head."),
    lengths=(50, "Number of new lengths that torch calls."),
    longest=(16384, "Longest length in tokens.", 64),
    seed=(0, "Seed of the random lengths.", None),
    jobs=(int, "Number of processes that build kernels; default: one per core."),
    stage=(
        str,
        "Internal: measure only this stage, in this process.",
        ("cold", "warm", "lengths", "jax", "jax_again"),
    ),
    folder=(str, "Internal: folder of the kernels, with --stage."),
)
cli.define_lines(FLAGS)


def problem(length: int) -> Problem:
    sizes = {"H": FLAGS.H, "Hkv": FLAGS.Hkv, "D": FLAGS.D, "Dv": FLAGS.D}
    return Problem(name=str(length), T=length, **sizes)


def cold() -> dict:
    """Build and load all kernels of the layer."""
    import nsa_torch

    layer = {"heads": FLAGS.H, "kv_heads": FLAGS.Hkv, "key_width": FLAGS.D}
    torch.zeros(1, device="cuda")
    lengths = [2**i for i in range(9, FLAGS.longest.bit_length())]
    build = lambda: nsa_torch.prepare(**layer, lengths=lengths, jobs=FLAGS.jobs)
    return {"build_s": seconds(build)}


def warm() -> dict:
    """Measure the first call of a process that finds all kernels on disk."""
    import nsa_torch.mosaic  # noqa: F401  programs import this before their first call

    calls, _ = torch_calls(problem(4096))
    return {"first_both_s": seconds(calls["fwdbwd"])}


def new_lengths() -> dict:
    """Measure calls with new lengths. The longest length comes first, so that torch's allocator
    need not grow later. `more_ms` is the time of the first call minus the time of the second call.
    `three_more_ms` compares the first three calls with the fourth, since the first call postpones
    some work.
    """
    draw = random.Random(FLAGS.seed)
    lengths = [FLAGS.longest, *(draw.randint(65, FLAGS.longest) for _ in range(FLAGS.lengths))]
    more_ms, three_more_ms, memory = [], [], []
    for length in lengths:
        calls, _ = torch_calls(problem(length))
        *three, known = (seconds(calls["fwdbwd"]) * 1e3 for _ in range(4))
        more_ms.append(three[0] - three[1])
        three_more_ms.append(sum(three) - 3 * known)
        free, total = torch.cuda.mem_get_info()
        memory.append((total - free) / 2**20)
        del calls
    more_ms = sorted(more_ms[1:])
    return {
        "lengths": len(more_ms),
        "more_ms_median": statistics.median(more_ms),
        "more_ms_p90": more_ms[len(more_ms) * 9 // 10],
        "more_ms_max": more_ms[-1],
        "three_more_ms_median": statistics.median(three_more_ms[1:]),
        "longest_alone_mib": memory[0],
        "after_all_mib": memory[-1],
    }


def in_jax() -> dict:
    """Measure the first call of a process in JAX, and then one call per new length. JAX's cache of
    programs is in the folder of the kernels. The second process finds the cache in the folder of
    the kernels.
    """
    import jax

    jax.config.update("jax_compilation_cache_dir", f"{FLAGS.folder}/jax")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

    def first(length: int) -> float:
        calls, wait = jax_calls(problem(length))
        return seconds(lambda: wait(calls["fwdbwd"]()))

    draw, found = random.Random(FLAGS.seed), first(4096)
    new = [first(draw.randint(65, FLAGS.longest)) for _ in range(JAX_LENGTHS)]
    return {
        "first_both_s": found,
        "lengths": JAX_LENGTHS,
        "new_length_s_median": statistics.median(new),
        "new_length_s_max": max(new),
    }


STAGES = {
    "cold": cold,
    "warm": warm,
    "lengths": new_lengths,
    "jax": in_jax,
    "jax_again": in_jax,
}


def main(argv: Sequence[str]) -> int:
    if not torch.cuda.is_available():
        raise NotImplementedError("this command needs a Hopper GPU")
    if FLAGS.stage:
        if not FLAGS.folder:
            raise app.UsageError("--stage needs --folder")
        print(json.dumps(STAGES[FLAGS.stage]()), flush=True)
        return exit_status.OK
    about = {name: FLAGS[name].value for name in ("H", "Hkv", "D", "longest")}
    given = about | {name: FLAGS[name].value for name in ("lengths", "seed", "jobs")}
    words = [f"--{name}={value}" for name, value in given.items() if value is not None]
    about["device"] = torch.cuda.get_device_name()
    with tempfile.TemporaryDirectory() as folder:
        for stage in STAGES:
            own = *words, f"--stage={stage}", f"--folder={folder}"
            cache = {"XDG_CACHE_HOME": folder}
            status, found = process.answer("bench.first_call", *own, variables=cache)
            if status:
                print(f"{stage}: exit status {status}", flush=True)
                return exit_status.worst([status])
            shown = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
            row = about | {"stage": stage} | found
            run.rows("first_call", FLAGS, [row], lambda _, shown=shown: {"shown": shown})
    return exit_status.OK


if __name__ == "__main__":
    cli.run(main, FLAGS)
