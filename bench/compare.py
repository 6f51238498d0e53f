"""Every implementation of every branch beside the oracle and beside dense attention.

    python -m bench.compare --framework both
    python -m bench.compare --framework jax --preset paper --mode fwdbwd
    python -m bench.compare --framework torch --peers fla --peers fa4

Parity first, then time: a path that is wrong is not timed. A path that was named on the
command line and refuses was not measured, and that is the exit status.
"""

import sys
from collections.abc import Sequence
from typing import Any

from absl import flags
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.harness import cli, command, exit_status, peers, problems, records
from bench.harness.jobs import Job, explanation, jobs, recomputed
from bench.harness.measure import measure
from bench.harness.records import Record
from bench.harness.runners import RUNNERS, asked
from bench.judge.checks import Checker
from bench.reports import render
from nsa_jax import flags as kernel_flags
from nsa_jax import policy
from nsa_jax.types import Branches

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
CHOSEN = flags.DEFINE_bool(
    "chosen", False, "Only what automatic choice takes, not every implementation."
)
RECOMPUTE = flags.DEFINE_bool(
    "recompute", False, "With --mode fwdbwd: also the whole that computes its branches again."
)
PEERS = flags.DEFINE_multi_enum(
    "peers", [], list(peers.NAMES), "Other libraries beside it, in torch (repeatable)."
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


def main(argv: Sequence[str]) -> int:
    names = ("jax", "torch") if FRAMEWORK.value == "both" else (FRAMEWORK.value,)
    runners = [RUNNERS[name]() for name in names]
    gpu = any(runner.device != "cpu" for runner in runners)
    given = {"seq_len": SEQ_LEN.value, "batch": BATCH.value, "precision": DTYPE.value}
    given |= {f"{step}_kernel": name for step, name in kernel_flags.named()._asdict().items()}
    if flags.FLAGS["on_unsupported"].present:
        given["on_unsupported"] = kernel_flags.on_unsupported()
    given |= kernel_flags.thresholds().given()
    settings = problems.settings(
        CONFIG.value or ("seed" if gpu else "tiny"),
        {name: value for name, value in given.items() if value is not None},
    )
    with policy.overridden(settings.runtime.thresholds, "runtime of the settings"):
        return explain_or_compare(runners, settings)


def explain_or_compare(runners, settings) -> int:
    """Explains or measures the rows that the flags ask for; the exit status."""
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
            asked(settings, runner),
            wanted,
            run.on_unsupported,
            branches,
            chosen=CHOSEN.value,
        )
    ]
    if RECOMPUTE.value:
        if MODE.value != "fwdbwd":
            raise ValueError("--recompute says what a backward pass does: give --mode fwdbwd")
        again = ((runner, recomputed(runner, job, settings.nsa)) for runner, job in plan)
        plan += [(runner, job) for runner, job in again if job is not None]
    if PEERS.value:
        torch = next((runner for runner in runners if runner.framework == "torch"), None)
        if torch is None:
            raise ValueError(f"peers need --framework torch or both, got {FRAMEWORK.value}")
        plan += [
            (torch, job) for job in peers.jobs(asked(settings, torch), branches, PEERS.value)
        ]
    if EXPLAIN.value:
        print(explanation(plan))
        return 0
    return compare(plan, settings)


def compare(plan, settings) -> int:
    """Measures every job, writes a line as each ends, then table and plot; the exit status."""
    folder = command.folder(OUT.value)
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
            found = measure(
                job, runner, settings, inputs, checker, MODE.value, seconds=SECONDS.value
            )
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
    beside = [r for r in done if r.branch == "dense"] if len(BRANCHES.value) > 1 else []
    status = exit_status.of([record for record in done if record not in beside], beside)
    if status == exit_status.OK and any(job.fails for _, job in plan):
        return exit_status.NOT_MEASURED
    return status


def _record(runner, job: Job, settings, inputs, found: dict[str, Any]) -> Record:
    fields: dict[str, Any] = {
        "bench": "compare",
        "branch": job.branch,
        "implementation": job.label,
        "mode": MODE.value,
        "refused": job.refused,
        "time": records.utc_now(),
    }
    return Record(**command.about(runner, settings, inputs), **fields, **found)


if __name__ == "__main__":
    cli.run(main)
