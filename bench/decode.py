"""Measures a decode step: attention of one or a few new tokens per sequence to a filled cache.

    python -m bench.decode
    python -m bench.decode --framework=jax --S_list=4096,65536 --dtype=bf16
    python -m bench.summarize <out>/decode.csv
    python -m bench.decode --heads=64 --groups=4 --dk=128 --dv=128 --S_list=4096,16384,65536
    python -m bench.decode --cache_dtype=fp8 --q_len=4

On a GPU each of several lengths has its own process. All processes compile, and compare their
results with the oracle, in parallel. After the compilation, the processes are timed one after the
other.

`S` is the number of tokens in the cache, including the `--q_len` new tokens. More than one new
token means draft tokens that are verified. Columns:

- `ms_total`: `cached_attention`, which appends the tokens and attends. In torch one kernel runs the
  step if all branches have the same implementation and this implementation has such a kernel.
- `ms_paged`: the functions `append` and `paged_attention` on a paged cache with pages in random
  order. With `--cache_dtype=fp8` the paged cache is in fp8, and the reference of `ms_paged` reads
  the rounded tokens.
- `ms_cmp`: only the compressed branch, on contiguous tokens as in the contiguous cache.
- `ms_sel`: only the scores, the selection and the attention to the selected blocks. `ms_scores`
  excludes the attention.
- `ms_win`: only the sliding branch.
- `ms_dense_*`: dense attention to the whole cache. `ms_dense_flashinfer` is measured in torch on a
  GPU for one new token, if FlashInfer is installed. Its time excludes filling pages and planning.
- `kv`: whether all branches share their keys and values, as `--kernels=invariant` needs. With
  `invariant`, the times of single branches are those of `mosaic`.
- `graph`: whether a CUDA graph replayed the step (torch on CUDA, if the step can be captured).
- `ms_host`: host time of consecutive eager steps without the graph. `ms_paged_host` is the host
  time of steps on the paged cache.
- `above_whole`: branches whose time exceeds `ms_total`. The printed line marks branches that exceed
  `ms_total` with `*`.

The branches are launched and timed separately, so that their times need not add up to the time of
the whole step. If another process uses the machine, the median time of a branch can exceed the time
of the whole step. If the difference is larger than noise, the row of the whole step is an error,
unless one kernel runs the whole step.

Reads are the keys, raw or compressed, that the last query reads for one key/value head:

- `reads_actual_decode` is counted, as the sum over the three branches and the mean over sequences
  and key/value heads. The query of the count is zero, so that every logit is 0 and the log-sum-exp
  of a branch is the logarithm of the number of its keys.
- `reads_expected_decode` is `(S - l)/d + 1 + n*l' + w`, with the limits of a short cache.
- `reads_actual` and `reads_expected` are sums over sequences and key/value heads.
"""

import csv
import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nsa_core import flags as kernel_flags
from nsa_core.config import NSAConfig
from nsa_core.dispatch import INVARIANT, STEPS

from . import tables
from .harness import (
    cli,
    command,
    cost,
    decode_steps,
    exit_status,
    flashinfer_peer,
    problems,
    timing,
    turns,
)
from .harness.command import config_of, integers
from .harness.jobs import joined
from .harness.measure import Judged, guarded, judged, judged_row, shape_of, timed
from .harness.records import Record, Values
from .harness.runners import RUNNERS, asked
from .judge.checks import Checker

SIZES = command.SIZES | {"dk": 32, "dv": 32}
FLAGS = command.flag_values(
    frameworks=True,
    text=True,
    **SIZES,
    B=(1, "Sequences."),
    q_len=(1, "Number of new tokens per sequence.", (1, 8)),
    S_list=(
        list,
        "Numbers of tokens in the cache; default: 512,1024,2048,4096, or 512,1024 on a CPU.",
    ),
    branch_force_mode=(
        "run",
        "Flag of the seed system without effect, since each branch runs separately.",
    ),
    paged=(
        "auto",
        "Implementation of the step on a paged cache; auto: chosen automatically, or invariant "
        "with --kernels=invariant; none: the step is not measured.",
        ("auto", "triton", "gathered", "mosaic", "none"),
    ),
    kv=(
        "separate",
        "Whether the branches share their keys and values.",
        ("separate", "shared"),
    ),
    cache_dtype=(
        "same",
        "Dtype of the paged cache: that of the inputs, or fp8.",
        ("same", "fp8"),
    ),
    side_by_side=(
        bool,
        "Whether each length has its own process. They compile in parallel and are timed in turn; "
        "default: true on a GPU.",
    ),
    turn=(
        False,
        "Internal: wait for a line on standard input before timing (used by --side_by_side).",
    ),
)
# Largest allowed ratio of the 20th percentile of a branch to the 80th percentile of the whole
# step.
NOISE = 1.1
PARTS = {"compressed": "cmp", "selected": "sel", "sliding": "win"}
TIMES = {"all": "ms_total", **{branch: f"ms_{name}" for branch, name in PARTS.items()}}


def work(branch: str, shape: cost.Shape, config: NSAConfig) -> cost.Cost:
    """Return the useful work of one step. The whole step reads only the keys that its branches
    read, not all keys.
    """
    steps = {"selected": ("scores", "selected"), "all": ("compressed", "selected", "sliding")}
    parts = [cost.cost(step, shape, config) for step in steps.get(branch, (branch,))]
    return cost.Cost(sum(x.flops for x in parts), sum(x.bytes for x in parts))


def judged_steps(runner, length: int, gpu: bool, results: command.Results) -> Callable:
    """Compile every step of one cache length and compare the step with the oracle. Return a
    function that times the steps and returns the values of the table's row. The returned function
    has the arguments of `timing`.
    """
    config = config_of(FLAGS)
    settings = command.settings(
        FLAGS, config, gpu, seq_len=length, batch=FLAGS.B, dim=FLAGS.dim
    )
    named, refused = kernel_flags.named(), {}
    cached: Any = None
    chosen: Any = None
    on_pages: Any = None
    labels = named._asdict() | {"scores": named.selected}
    try:
        wanted = asked(settings, runner)._replace(T=FLAGS.q_len, cached=INVARIANT in named)
        chosen = runner.registry.choices(wanted, named, kernel_flags.on_unsupported())
    except NotImplementedError as error:
        refused = {"status": "unsupported", "reason": str(error)}
    else:
        labels = {choice.step: choice.implementation for choice in chosen}
    labels = {step: labels[step] or "auto" for step in STEPS}
    kernel = joined(labels.values())
    labels = {step: decode_steps.of_one_step(name) for step, name in labels.items()}
    shared = FLAGS.kv == "shared"
    given = settings, FLAGS.input, FLAGS.seed
    inputs = problems.make(*given, num_queries=FLAGS.q_len, shared=shared)
    checker_of = functools.partial(Checker, settings, backward=False)
    checker = frozen = checker_of(inputs)
    waiting: dict[str, tuple[str, Judged]] = {}
    paged_kernel = FLAGS.paged
    if paged_kernel == "auto" and kernel == INVARIANT:
        paged_kernel = kernel

    def freeze() -> Values:
        """Use the path's own selection of blocks in all later calls. The row `scores` judges the
        path's own selection. A whole step that is one kernel selects its own blocks.
        """
        nonlocal cached, frozen, on_pages
        cached = decode_steps.Cached(runner, inputs, config, chosen)
        on_pages = cached.chosen_on_pages()
        frozen = checker_of(dataclasses.replace(inputs, block_indices=cached.chosen()))
        return {}

    def branch_step(branch: str):
        own = checker if branch == "scores" else frozen
        if branch == "all" and on_pages is not None:
            own = checker_of(dataclasses.replace(inputs, block_indices=on_pages))
        return cached.step(branch), own

    def paged_step():
        nonlocal paged_kernel
        fp8 = FLAGS.cache_dtype == "fp8"
        paged = decode_steps.Paged(
            cached, None if paged_kernel == "auto" else paged_kernel, fp8
        )
        paged_kernel, blocks, own = paged.name, paged.chosen(), frozen
        if blocks is not None or fp8:
            changes: Values = {} if blocks is None else {"block_indices": blocks}
            changes |= paged.stored() if fp8 else {}
            own = checker_of(dataclasses.replace(frozen.inputs, **changes), pools=not fp8)
        return paged.step(), own

    def dense_step(name: str):
        arguments = runner.load(inputs.arguments("dense"))
        if name == flashinfer_peer.NAME:
            attend = flashinfer_peer.cached(**arguments)
            return runner.prepare(lambda x: {"out": attend(x["query"])}, arguments), checker
        return runner.prepare(lambda given: runner.dense(name, **given), arguments), checker

    def time(branch: str, step, **how: Any) -> Values:
        found, graph = decode_steps.timed(runner, step, how)
        shape = shape_of(settings, inputs)
        done = work(branch, shape, config)
        found = timed(found, done, runner.device, shape.itemsize)
        extra: Values = {"graph": graph}
        if branch == "all" and runner.platform == "cuda":  # the time of eager calls
            extra["host_ms"] = float(np.median(timing.in_a_row(step, 100, 5, warmup=3)))
        return found | {"extra": extra}

    def judge(key: str, branch: str, own: Values, prepare: Callable, *given: str):
        """Judge the row `key`. If the row does not exist, `own` is the reason. The function
        `prepare` returns the step and the checker.
        """
        name, library = f"decode {key}", branch == "dense"

        def take():
            step, checker = prepare(*given)
            parity = checker.check(runner, step, branch)
            return judged(parity, len(checker.rows)), functools.partial(time, branch, step)

        row = Judged(name, library, own) if own else judged_row(name, take, library=library)
        waiting[key] = branch, row

    refused = refused or guarded("selection", freeze)
    for branch in ("compressed", "scores", "selected", "sliding", "all"):
        judge(branch, branch, refused, branch_step, branch)
    if FLAGS.paged != "none":
        judge("paged", "all", refused, paged_step)
    # torch's flash kernel for CPUs computes exponentials with 20 bits, which is wrong in float32.
    on_cpu = (runner.framework, gpu) == ("torch", False)
    names = ("math",) if on_cpu else runner.dense_names
    for name in (*names, *flashinfer_peer.dense_names(runner, FLAGS.q_len)):
        judge(f"dense_{name}", "dense", {}, dense_step, name)

    def row(**how: Any) -> Values:
        """Time every step. The branches are timed before the whole step, since the function `doubt`
        compares the time of the whole step with the times of the branches.
        """
        common, done = command.about(runner, settings, inputs), dict[str, Record]()
        common |= {"kv": FLAGS.kv} if shared else {}
        for key, (branch, each) in waiting.items():
            found = each.timed(**how)
            if key == "all" and "status" not in found and on_pages is None:
                found |= doubt(done, found)
            label = labels.get(key, kernel)
            if key == "paged":
                beside = "" if FLAGS.cache_dtype == "same" else f"_{FLAGS.cache_dtype}"
                label = f"paged{beside}/{paged_kernel}"
            elif branch == "dense":
                label = key.removeprefix("dense_")
            about = {"branch": branch, "mode": "decode", "implementation": label}
            done[key] = results.add(beside=branch == "dense", **common | about | found)
        whole, paged = done["all"], done.get("paged")
        formula, rows = config.reads(whole.S), whole.B * whole.Hkv
        reads: Values = {"expected": formula, "expected_all": formula * rows}
        worst = next((done[x] for x in TIMES if done[x].status != "ok"), None)
        if worst is None:
            counts = {branch: int(cached.reads(branch).sum()) for branch in PARTS}
            reads |= {branch: count / rows for branch, count in counts.items()}
            reads |= {"all": sum(counts.values()), "each": sum(counts.values()) / rows}
            worst = whole
            if paged and paged.status != "ok":
                worst = dataclasses.replace(paged, reason=f"paged: {paged.reason}")
        times = {name: done[branch].time_ms for branch, name in TIMES.items()}
        counted = "n/a" if "each" not in reads else f"{reads['each']:.1f}"
        return done | {
            "worst": worst,
            "reads": reads,
            "paged_kernel": paged_kernel if paged else None,
            "above_whole": " ".join(above_whole(times)),
            "cache_dtype": FLAGS.cache_dtype,
            "kv": FLAGS.kv,
            "kernel": kernel,
            "line": {"shown": starred(times), "reads": f"{counted}/{formula}"},
        }

    return row


def doubt(parts: Mapping[str, Record], whole: Values) -> Values:
    """Return fields that make the row of the whole step an error, if a branch is slower than the
    whole step by more than `NOISE`. Return no fields if no branch is slower by more than `NOISE`,
    or if there are few samples.
    """
    longer = [
        f"{branch} {part.time_ms:.4g} ms"
        for branch, part in parts.items()
        if part.times_ms
        and min(part.samples, whole["samples"]) >= timing.MIN_SAMPLES
        and part.times_ms[1] > NOISE * whole["p80_ms"]
    ]
    if not longer:
        return {}
    reason = f"a part must not take longer than the whole, {whole['time_ms']:.4g} ms, got "
    return {"status": "error", "reason": reason + ", ".join(longer)}


def above_whole(times: Mapping[str, float | None]) -> list[str]:
    """Return the columns of the branches whose time exceeds the time of the whole step."""
    whole = times["ms_total"]
    return [name for name, ms in times.items() if ms and whole and ms > whole]


def starred(times: Mapping[str, float | None]) -> dict[str, str]:
    """Return the times of the branches as text. A star marks a time above the time of the whole
    step.
    """
    found, above = {}, above_whole(times)
    for part in PARTS.values():
        ms, star = times[f"ms_{part}"], "*" if f"ms_{part}" in above else ""
        found[part] = "n/a" if ms is None else f"{ms:.3f}{star}"
    return found


def main(argv: Sequence[str]) -> int:
    if FLAGS["branch_force_mode"].present:
        print("--branch_force_mode has no effect: each branch runs separately")
    if FLAGS.paged == "none" and FLAGS.cache_dtype != "same":
        raise ValueError(
            "--cache_dtype must not be given with --paged=none, since --cache_dtype "
            "applies only to the paged cache"
        )
    if INVARIANT in kernel_flags.named() and FLAGS.kv == "separate":
        raise ValueError(
            "--kernels=invariant needs --kv=shared, since invariant attends only to a cache "
            "whose branches share keys and values"
        )
    runner = RUNNERS[FLAGS.framework](FLAGS.device)
    gpu = runner.platform != "cpu"
    default = (512, 1024, 2048, 4096) if gpu else (512, 1024)
    lengths = integers("S_list", FLAGS.S_list, default)
    if min(lengths) < FLAGS.q_len:
        raise ValueError(f"S_list must be at least q_len={FLAGS.q_len}, got {min(lengths)}")
    config_of(FLAGS)
    how = command.sampling(FLAGS, gpu, iters=32 if gpu else None, warmup=8)
    results = command.Results("decode", FLAGS)
    head = tables.LINES["decode"]["head"]
    print(f"device: {runner.device}; {runner.framework}\n{head}", flush=True)
    if len(lengths) > 1 and (gpu if FLAGS.side_by_side is None else FLAGS.side_by_side):
        return side_by_side(lengths, results)
    for length in lengths:
        row = judged_steps(runner, length, gpu, results)
        if FLAGS.turn:
            turns.wait()
        results.row(**row(**how))
    return _finish(results)


def _finish(results: command.Results) -> int:
    if any(cells["above_whole"] for cells in results.rows):
        print(
            "* marks a part longer than the total, since each part is launched and timed alone"
        )
    return results.finish()


def side_by_side(lengths: Sequence[int], results: command.Results) -> int:
    """Start a process per length, and return the exit status. The processes compile in parallel
    and are timed in turn.

    The table and the records have all lengths. The other files of a length are in a folder with
    the length as its name.
    """
    lost, table = False, f"{results.bench}.csv"
    given = lengths, results.path, FLAGS.framework, "--csv="
    for name, _, done in turns.of_lengths("S_list", *given):
        made = results.folder / name
        if not (made / table).exists():
            print(f"{name} tokens failed; see {made}.log", file=sys.stderr)
            lost = True
            continue
        results.done += done
        results.beside += (record for record in done if record.branch == "dense")
        with (made / table).open(newline="") as file:
            results.rows += csv.DictReader(file)
    status = _finish(results)
    return exit_status.WRONG if lost else status


if __name__ == "__main__":
    cli.run(main, FLAGS)
