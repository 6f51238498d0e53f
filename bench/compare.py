"""Every implementation of every branch beside the oracle and beside dense attention.

    python -m bench.compare --framework both
    python -m bench.compare --framework jax --preset paper --mode fwdbwd

Parity first, then time: a path that is wrong is not timed. The exit status is 1 when a parity
fails, a path breaks, or a path that was named on the command line refuses.
"""

import dataclasses
import datetime
import logging
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags
from absl import logging as absl_logging
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import cost, problems, records, render
from bench.checks import Checker
from bench.jobs import Job, explanation, jobs
from bench.records import Record
from bench.runners import RUNNERS, forward, out_of_memory, problem
from nsa_jax import flags as kernel_flags
from nsa_jax.types import Branches

log = logging.getLogger(__name__)

FRAMEWORK = flags.DEFINE_enum("framework", "both", ["jax", "torch", "both"], "What to compare.")
CONFIG = flags.DEFINE_string(
    "config",
    None,
    "Name of a file in configs/ or a path; default: tiny, on a GPU seed.",
)
flags.DEFINE_alias("preset", "config")
INPUT = flags.DEFINE_enum("input", "text", ["random", "text"], "Where the arrays come from.")
MODE = flags.DEFINE_enum("mode", "forward", ["forward", "fwdbwd"], "What is timed and checked.")
BRANCHES = flags.DEFINE_multi_enum(
    "branch", list(problems.BRANCHES), problems.BRANCHES, "Only these branches (repeatable)."
)
SEQ_LEN = flags.DEFINE_integer(
    "seq_len", None, "Tokens, instead of the config's.", lower_bound=1
)
BATCH = flags.DEFINE_integer(
    "batch", None, "Sequences, instead of the config's.", lower_bound=1
)
DTYPE = flags.DEFINE_enum(
    "dtype", None, list(problems.PRECISIONS), "Precision, instead of the config's."
)
SEED = flags.DEFINE_integer("seed", 0, "Of the random arrays and of the text model.")
SECONDS = flags.DEFINE_float(
    "row_seconds", 0.5, "Time spent on samples of a row.", lower_bound=0
)
OUT = flags.DEFINE_string("out", None, "Folder of the results; default: bench/results/<time>.")
SAVE = flags.DEFINE_bool(
    "save_records", False, "Append to bench/records/<device>/compare.jsonl too."
)
COMMIT = flags.DEFINE_string(
    "commit", None, "The commit that this tree is a copy of, where it has no .git."
)
EXPLAIN = flags.DEFINE_bool(
    "explain", False, "Only print what would run, and what refuses why."
)
flags.DEFINE_alias("list", "explain")


def measure(job: Job, runner, settings, inputs, checker: Checker, mode: str, seconds) -> dict:
    """The fields of the record that measuring `job` gives."""
    if job.unsupported:
        return {"status": "unsupported", "reason": job.unsupported}
    try:
        return _measure(job, runner, settings, inputs, checker, mode, seconds)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".strip()
        if out_of_memory(error):
            return {"status": "oom", "reason": reason.splitlines()[0]}
        # The baseline belongs to a library, which may refuse in its own ways.
        if isinstance(error, NotImplementedError) or job.branch == "dense":
            return {"status": "unsupported", "reason": reason}
        log.exception("%s %s %s", runner.framework, job.branch, job.label)
        return {"status": "error", "reason": reason}


def _measure(job, runner, settings, inputs, checker, mode, seconds) -> dict[str, Any]:
    config = settings.nsa

    def function(arguments):
        if job.branch == "dense":
            return runner.dense(job.implementation, **arguments)
        return forward(runner.api, job.branch, config, job.implementation, arguments)

    arguments = runner.load(inputs.arguments(job.branch))
    cotangent = runner.load(inputs.cotangent) if mode == "fwdbwd" else None
    step = runner.prepare(function, arguments, cotangent)
    if job.branch == "all":
        own = selection(runner, config, job, arguments)
        given = arguments | {"block_indices": own[1]}
        frozen = runner.prepare(function, given, cotangent)
        parity = checker.check_whole(runner, step, frozen, arguments, own)
    else:
        parity = checker.check(runner, step, job.branch, arguments)
    found: dict[str, Any] = {
        "rows_checked": len(checker.rows),
        "rows_differ": parity.rows_differ,
    }
    if not parity.ok:
        return found | _errors(parity) | {"status": "wrong", "reason": parity.reason}
    timing = step.time(seconds)
    shape = _shape(settings)
    work = cost.cost(job.branch, shape, config, backward=mode == "fwdbwd")
    found |= _errors(parity) | dataclasses.asdict(timing)
    found |= {
        "useful_flops": work.flops,
        "bytes": work.bytes,
        "tflops": work.flops / timing.time_ms / 1e9,
        "gbps": work.bytes / timing.time_ms / 1e6,
        "extra_peak_bytes": runner.extra_peak_bytes(step, job.label),
        "reason": runner.note(job.branch, job.label, problem(settings, "", "")),
    }
    doubt = cost.impossible(work, timing.time_ms, runner.device, shape.itemsize)
    return found | ({"status": "error", "reason": doubt} if doubt else {})


def selection(runner, config, job: Job, arguments) -> tuple:
    """The compressed keys and the blocks that the whole attention of `job` makes on its way."""
    names = job.implementation
    name = names.selected if isinstance(names, Branches) else names
    if isinstance(name, str) and name not in runner.registry.names("scores"):
        name = None

    def select(given):
        key = runner.api.compress(given["key"].compressed, config=config)
        where = {"config": config, "implementation": name}
        return {"key": key, "blocks": runner.api.select_blocks(given["query"], key, **where)}

    given = {"query": arguments["query"], "key": arguments["key"]}
    result = runner.prepare(select, given)(given)
    return result["key"], result["blocks"]


def _errors(parity) -> dict[str, Any]:
    values = {
        "error_max": parity.error_max,
        "error_mean": parity.error_mean,
        "error_bound": parity.bound_max,
        "error_mean_bound": parity.bound_mean,
    }
    finite = {name: x if math.isfinite(x) else None for name, x in values.items()}
    return {"error_of": parity.name, **finite}


def _shape(settings) -> cost.Shape:
    run, model = settings.runtime, settings.model
    sizes = (model.n_heads, model.n_kv_groups, model.d_k, model.d_v, run.dtype.itemsize)
    return cost.Shape(run.batch, run.seq_len, run.seq_len, *sizes)


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    if not flags.FLAGS["verbosity"].present:
        absl_logging.set_verbosity(absl_logging.WARNING)  # the choices stand in the table
    names = ("jax", "torch") if FRAMEWORK.value == "both" else (FRAMEWORK.value,)
    runners = [RUNNERS[name]() for name in names]
    gpu = any(runner.device != "cpu" for runner in runners)
    given = {"seq_len": SEQ_LEN.value, "batch": BATCH.value, "precision": DTYPE.value}
    given |= {f"{step}_kernel": name for step, name in kernel_flags.named()._asdict().items()}
    if flags.FLAGS["on_unsupported"].present:
        given["on_unsupported"] = kernel_flags.on_unsupported()
    settings = problems.settings(
        CONFIG.value or ("seed" if gpu else "tiny"),
        {name: value for name, value in given.items() if value is not None},
    )
    branches = [name for name in problems.BRANCHES if name in BRANCHES.value]
    if MODE.value == "fwdbwd":  # no gradient flows through a selection
        branches = [name for name in branches if name != "scores"]
    run = settings.runtime
    kernels = (getattr(run, f"{step}_kernel") for step in Branches._fields)
    wanted = Branches(*(None if name == "auto" else name for name in kernels))
    for name in filter(None, wanted):
        if not any(name in runner.registry.names() for runner in runners):
            known = {runner.framework: runner.registry.names() for runner in runners}
            raise ValueError(f"no framework has an implementation {name!r}; known: {known}")
    plan = [
        (runner, job)
        for runner in runners
        for job in jobs(
            runner,
            problem(settings, runner.framework, runner.platform, runner.capability),
            wanted,
            run.on_unsupported,
            branches,
        )
    ]
    if EXPLAIN.value:
        print(explanation(plan))
        return 0
    return compare(plan, settings)


def compare(plan, settings) -> int:
    """Measures every job, writes a line as each ends, then table and plot; the exit status."""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S")
    folder = Path(OUT.value or Path(__file__).parent / "results" / stamp)
    lines = folder / "compare.jsonl"
    if lines.exists():
        raise ValueError(f"{lines} exists; --out must name a new folder")
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("inputs", total=len(plan))
        inputs = problems.make(settings, INPUT.value, SEED.value)
        backward = MODE.value == "fwdbwd"
        checker = Checker(settings, inputs, backward=backward)
        environment = records.environment(COMMIT.value)
        for runner, job in plan:
            name = f"{runner.framework} {job.branch} {job.label}"
            progress.update(task, description=name)
            found = measure(job, runner, settings, inputs, checker, MODE.value, SECONDS.value)
            record = _record(runner, job, settings, inputs, found | environment)
            records.append(lines, [record])
            if not progress.console.is_terminal:
                print(f"{name}: {record.status} {record.time_ms or ''}", file=sys.stderr)
            progress.advance(task)
    done = records.read(lines)
    table = render.markdown(done)
    print(table)
    (folder / "compare.md").write_text(table)
    (folder / "compare.csv").write_text(render.csv_text(done))
    render.plot(done, folder / "compare.png")
    print(f"written to {folder}")
    if SAVE.value:
        for device in {record.device for record in done}:
            kept = [record for record in done if record.device == device]
            records.append(records.folder_of(device) / "compare.jsonl", kept)
    failed = any(record.status in ("wrong", "error") for record in done)
    return int(failed or any(job.fails for _, job in plan))


def _record(runner, job: Job, settings, inputs, found: dict[str, Any]) -> Record:
    shape: dict[str, Any] = dataclasses.asdict(_shape(settings))
    del shape["itemsize"]
    fields: dict[str, Any] = {
        "bench": "compare",
        "framework": runner.framework,
        "branch": job.branch,
        "implementation": job.label,
        "mode": MODE.value,
        "dtype": settings.runtime.dtype.name,
        "config": dataclasses.asdict(settings.nsa),
        "input": inputs.name,
        "input_sha256": inputs.sha256,
        "overlap": inputs.overlap,
        "refused": job.refused,
        "device": runner.device,
        "time": records.utc_now(),
    }
    return Record(**fields, **shape, **found)


if __name__ == "__main__":
    app.run(main)
