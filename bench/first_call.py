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
from absl import app

from nsa_torch.installed import seconds

from .harness import cli, exit_status, process, records, timing
from .harness.timed_problem import Problem, jax_calls, torch_calls

JAX_LENGTHS = 5  # never seen
STAGES = ("cold", "warm", "lengths", "jax", "jax_again")
FLAGS = cli.define(
    H=(64, "Query heads."),
    Hkv=(4, "Key/value heads."),
    D=(128, "Columns of a head."),
    lengths=(50, "Lengths never seen."),
    longest=(16384, "Tokens at most.", 64),
    seed=(0, "Of the random lengths.", None),
    jobs=(int, "Processes that build; default: one a core."),
    stage=(str, "Only this one.", STAGES),
    folder=(str, "Of the kernels, with --stage."),
)
cli.define_lines(FLAGS)


def problem(length: int) -> Problem:
    sizes = {"H": FLAGS.H, "Hkv": FLAGS.Hkv, "D": FLAGS.D, "Dv": FLAGS.D}
    return Problem(name=str(length), T=length, **sizes)


def host_us(call: Callable[[], object]) -> float:
    """Microseconds until a call returns: the median."""
    return statistics.median(timing.in_a_row(call)) * 1e3


def used_mib() -> float:
    """Of the GPU by this process, besides what torch's allocator holds."""
    free, total = torch.cuda.mem_get_info()
    return (total - free - torch.cuda.memory_reserved()) / 2**20


def cold() -> dict:
    """All kernels of the layer, on disk and loaded."""
    import nsa_torch

    layer = {"heads": FLAGS.H, "kv_heads": FLAGS.Hkv, "key_width": FLAGS.D}
    torch.zeros(1, device="cuda")
    lengths = [2**i for i in range(9, FLAGS.longest.bit_length())]
    start = time.perf_counter()
    count = nsa_torch.prepare(**layer, lengths=lengths, jobs=FLAGS.jobs)
    built = time.perf_counter() - start
    files = list(Path(str(FLAGS.folder)).rglob("*.kernel"))
    return {
        "kernels": count,
        "build_s": built,
        "disk_kib": sum(x.stat().st_size for x in files) / 1024,
        "memory_mib": used_mib(),
    }


def warm() -> dict:
    """The first calls of a process that finds all kernels on disk."""
    import nsa_torch.mosaic  # noqa: F401  what a program imports before its first call

    calls, _ = torch_calls(problem(4096))
    forward, both = calls["forward"], calls["fwdbwd"]
    return {
        "first_both_s": seconds(both),
        "first_forward_s": seconds(forward),
        "forward_s": seconds(forward),
        "both_s": seconds(both),
        "forward_host_us": host_us(forward),
        "both_host_us": host_us(both),
        "memory_mib": used_mib(),
    }


def new_lengths() -> dict:
    """Lengths never seen, each called four times; the longest first, so that torch's allocator need
    not grow. What the first call leaves to the second counts in `three_more_ms`."""
    draw = random.Random(FLAGS.seed)
    lengths = [FLAGS.longest, *(draw.randint(65, FLAGS.longest) for _ in range(FLAGS.lengths))]
    more_ms, three_more_ms, memory = [], [], []
    for length in lengths:
        calls, _ = torch_calls(problem(length))
        *three, known = (seconds(calls["fwdbwd"]) * 1e3 for _ in range(4))
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
    """The first call of a process, then lengths never seen, each called once. JAX's cache of
    programs lies beside the kernels: the second process finds them."""
    import jax

    jax.config.update("jax_compilation_cache_dir", f"{FLAGS.folder}/jax")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

    def seconds_of(length: int, times: int = 1) -> list[float]:
        calls, wait = jax_calls(problem(length))
        how = {"samples": times, "wait": wait, "done": True}
        return [ms / 1e3 for ms in timing.in_a_row(calls["fwdbwd"], **how)]

    draw = random.Random(FLAGS.seed)
    first, *later = seconds_of(4096, 11)
    new = [seconds_of(draw.randint(65, FLAGS.longest))[0] for _ in range(JAX_LENGTHS)]
    return {
        "first_both_s": first,
        "lengths": JAX_LENGTHS,
        "new_length_s_median": statistics.median(new),
        "new_length_s_max": max(new),
        "both_s": statistics.median(later),
    }


def main(argv: Sequence[str]) -> int:
    if not torch.cuda.is_available():
        raise NotImplementedError("a Hopper GPU is needed")
    if FLAGS.stage:
        if not FLAGS.folder:
            raise app.UsageError("--stage needs --folder")
        stages = dict(zip(STAGES, (cold, warm, new_lengths, in_jax, in_jax), strict=True))
        stage = stages[FLAGS.stage]
        print(json.dumps(stage()), flush=True)
        return exit_status.OK
    about = {
        "device": torch.cuda.get_device_name(),
        "H": FLAGS.H,
        "Hkv": FLAGS.Hkv,
        "D": FLAGS.D,
        "longest": FLAGS.longest,
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
            if FLAGS.out:
                line = about | {"stage": stage} | found
                records.append(FLAGS.out, [records.record("first_call", FLAGS.commit, **line)])
    return exit_status.OK


def _own_flags() -> list[str]:
    names = "H", "Hkv", "D", "lengths", "longest", "seed", "jobs"
    values = {name: FLAGS[name].value for name in names}
    return [f"--{name}={value}" for name, value in values.items() if value is not None]


if __name__ == "__main__":
    cli.run(main, FLAGS)
