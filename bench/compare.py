"""Every implementation of every branch beside the oracle and beside dense attention.

    python -m bench.compare --framework both
    python -m bench.compare --framework jax --preset paper --mode fwdbwd
    python -m bench.compare --framework torch --peers fla,native-sparse-attention-triton
    python -m bench.compare --framework torch --preset paper --input random --kernels mosaic \
        --branch all --branch dense --mode forward --mode fwdbwd --seq_len 1024,8192,65536

Of several lengths each has a process of its own: all compile and are judged side by side, then
they are timed in turn, each alone. The last example is how the report's first chart is measured
(docs/benchmarks.md).

Parity first, then time: a path that is wrong is not timed. A path that was named on the
command line and refuses was not measured, and that is the exit status.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from absl import flags
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from nsa_core import flags as kernel_flags
from nsa_core import policy
from nsa_core.config import FLOAT8
from nsa_core.types import Branches

from .harness import cli, command, exit_status, peers, problems, records, turns
from .harness.jobs import Job, explanation, jobs, packed, recomputed
from .harness.measure import Judged, judge, once
from .harness.records import FP8_RECORDS, Record
from .harness.runners import RUNNERS, asked
from .judge.checks import Checker
from .reports import render

FRAMEWORK = flags.DEFINE_enum("framework", "both", ["jax", "torch", "both"], "What to compare.")
CONFIG = flags.DEFINE_string(
    "config",
    None,
    "Name of a file in configs/ or a path; default: tiny, on a GPU seed.",
)
flags.DEFINE_alias("preset", "config")
INPUT = flags.DEFINE_enum("input", "text", problems.KINDS, "Where the arrays come from.")
MODE = flags.DEFINE_multi_enum(
    "mode", ["forward"], ["forward", "fwdbwd"], "What is timed and checked (repeatable)."
)
BRANCHES = flags.DEFINE_multi_enum(
    "branch", list(problems.BRANCHES), problems.BRANCHES, "Only these branches (repeatable)."
)
CHOSEN = flags.DEFINE_bool(
    "chosen", False, "Only what automatic choice takes, not every implementation."
)
RECOMPUTE = flags.DEFINE_bool(
    "recompute", False, "With --mode fwdbwd: also the whole that computes its branches again."
)
PACKED = flags.DEFINE_bool(
    "packed", False, "Also the whole with its rows as one packed row, whose metadata is there."
)
PEERS = command.define_names(
    "peers", peers.NAMES, "Other libraries beside it, in torch (a list; repeatable)."
)
SEQ_LEN = flags.DEFINE_list("seq_len", None, "Tokens, instead of the config's; a list of them.")
ROWS = flags.DEFINE_integer(
    "most_rows",
    None,
    "Parity looks at no more query positions of a sequence than that; default: all, of long "
    "problems 768.",
    lower_bound=12,
)
BATCH = flags.DEFINE_integer(
    "batch", None, "Sequences, instead of the config's.", lower_bound=1
)
DTYPE = flags.DEFINE_enum(
    "dtype", None, list(problems.PRECISIONS), "Precision, instead of the config's."
)
COMPUTE_DTYPE = flags.DEFINE_enum(
    "compute_dtype",
    None,
    [FLOAT8],
    "What products of the selected and the sliding branch are of, instead of the config's. Errors "
    "are then judged beside those of the reference that rounds likewise.",
)
SEED = flags.DEFINE_integer("seed", 0, "Of the random arrays and of the text model.")
SECONDS = flags.DEFINE_float(
    "row_seconds", 0.5, "Time spent on samples of a row.", lower_bound=0
)
OUT = flags.DEFINE_string(
    "out", None, "A new folder for the results; default: bench/results/<time>."
)
SAVE = flags.DEFINE_bool(
    "save_records", False, "Append to bench/records/<device>/compare.jsonl too."
)
COMMIT = cli.define_commit()
EXPLAIN = flags.DEFINE_bool(
    "explain", False, "Only print what would run, and what refuses why."
)
flags.DEFINE_alias("list", "explain")
TURN = flags.DEFINE_bool(
    "turn", False, "Time when told to on standard input: what several lengths start."
)


def main(argv: Sequence[str]) -> int:
    if SEQ_LEN.value is None:
        return of_length(None)
    lengths = command.integers("seq_len", SEQ_LEN.value, ())
    if len(lengths) > 1 and not EXPLAIN.value:
        return side_by_side(lengths)
    return exit_status.worst([of_length(length) for length in lengths])


def side_by_side(lengths: Sequence[int]) -> int:
    """A process a length, ready side by side and timed in turn; the exit status is the worst.

    The records of all are in `compare.jsonl`, what else a length has in the folder of its name.
    """
    lines = command.new_file(OUT.value, "compare.jsonl")
    folder = lines.parent
    folder.mkdir(parents=True, exist_ok=True)
    # Where JAX only makes inputs and oracles, it gives back what it does not use.
    alone = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"} if FRAMEWORK.value == "torch" else {}
    commands, statuses = {}, []
    for length in lengths:
        own = [f"--seq_len={length}", f"--out={folder / str(length)}", "--turn"]
        commands[length] = ["bench.compare", *sys.argv[1:], *own, "--nosave_records"]
    for length, status in turns.of_lengths(commands, folder, alone):
        statuses.append(status)
        made = folder / str(length) / "compare.jsonl"
        done = records.read(made) if made.exists() else []
        records.append(lines, done)  # at once: the next length may be ended from outside
        _save(done)
    print(f"written to {folder}")
    return exit_status.worst(statuses)


def of_length(length: int | None) -> int:
    """Explains or measures one length, None: the config's; the exit status."""
    names = ("jax", "torch") if FRAMEWORK.value == "both" else (FRAMEWORK.value,)
    runners = [RUNNERS[name]() for name in names]
    gpu = any(runner.device != "cpu" for runner in runners)
    given = {"seq_len": length, "batch": BATCH.value, "precision": DTYPE.value}
    given |= {f"{step}_kernel": name for step, name in kernel_flags.named()._asdict().items()}
    if flags.FLAGS["on_unsupported"].present:
        given["on_unsupported"] = kernel_flags.on_unsupported()
    given |= kernel_flags.thresholds().given()
    settings = problems.settings(
        CONFIG.value or ("seed" if gpu else "tiny"),
        {name: value for name, value in given.items() if value is not None},
    )
    if COMPUTE_DTYPE.value:
        nsa = dataclasses.replace(settings.nsa, compute_dtype=COMPUTE_DTYPE.value)
        settings = dataclasses.replace(settings, nsa=nsa)
    with policy.overridden(settings.runtime.thresholds, "runtime of the settings"):
        if RECOMPUTE.value and "fwdbwd" not in MODE.value:
            raise ValueError("--recompute says what a backward pass does: give --mode fwdbwd")
        for name in ("recompute", "packed"):
            if flags.FLAGS[name].value and "all" not in BRANCHES.value:
                raise ValueError(f"--{name} is of whole attention: give --branch all")
        plans = {mode: plan_of(runners, settings, mode) for mode in MODE.value}
        if EXPLAIN.value:
            print("\n".join(explanation(plan) for plan in plans.values()))
            return exit_status.OK
        return compare(plans, settings)


type JobsOfRunners = list[tuple[Any, Job]]


def plan_of(runners, settings, mode: str) -> JobsOfRunners:
    """The rows that the flags ask for."""
    branches = [name for name in problems.BRANCHES if name in BRANCHES.value]
    if mode == "fwdbwd":  # no gradient flows through a selection
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
    whole = list(plan)
    if RECOMPUTE.value and mode == "fwdbwd":
        again = ((runner, recomputed(runner, job, settings.nsa)) for runner, job in plan)
        plan += [(runner, job) for runner, job in again if job is not None]
    if PACKED.value:
        rows = ((runner, packed(runner, job, settings)) for runner, job in whole)
        plan += [(runner, job) for runner, job in rows if job is not None]
    if PEERS.value:
        torch = next((runner for runner in runners if runner.framework == "torch"), None)
        if torch is None:
            raise ValueError(f"peers need --framework torch or both, got {FRAMEWORK.value}")
        found = peers.jobs(asked(settings, torch), branches, PEERS.value)
        plan += [(torch, dataclasses.replace(job, asked=True)) for job in found]
    return plan


def compare(plans: Mapping[str, JobsOfRunners], settings) -> int:
    """Measures the jobs of each mode, writes a line as each ends, then table and plot; the exit
    status."""
    lines = command.new_file(OUT.value, "compare.jsonl")
    folder = lines.parent
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("inputs", total=sum(map(len, plans.values())))
        inputs = problems.make(settings, INPUT.value, SEED.value)
        environment = records.environment(COMMIT.value)
        how: dict[str, Any] = {"seconds": SECONDS.value}
        tell = lambda name: progress.update(task, description=name)
        rows = judged_rows(plans, settings, inputs, tell)
        if TURN.value:
            rows = list(rows)
            turns.wait()
            how["warmup"] = 1  # parity was that already
        measured = []
        for mode, runner, job, row in rows:
            tell(row.name)
            found = row.timed(**how)
            record = _record(mode, runner, job, settings, inputs, found | environment)
            records.append(lines, [record])
            measured.append((job, record))
            if not progress.console.is_terminal:
                print(f"{row.name}: {record.status} {record.time_ms or ''}", file=sys.stderr)
            progress.advance(task)
    done = records.read(lines)
    tables = []
    for mode in plans:
        some = [record for record in done if record.mode == mode]
        tables.append(render.markdown(some))
        name = "compare" if len(plans) == 1 else f"compare_{mode}"
        render.plot(some, folder / f"{name}.png")
    table = "\n".join(tables)
    print(table)
    (folder / "compare.md").write_text(table)
    (folder / "compare.csv").write_text(render.csv_text(done))
    print(f"written to {folder}")
    _save(done)
    status = exit_status.of(asked_for(measured), done)
    if status == exit_status.NOT_MEASURED:
        lost = (record for record in asked_for(measured) if record.status != "ok")
        names = (f"{x.framework} {x.branch} {x.mode} {x.implementation}" for x in lost)
        print(f"not measured: {', '.join(names)}", file=sys.stderr)
    return status


def asked_for(measured: Sequence[tuple[Job, Record]]) -> list[Record]:
    """The rows that decide how the command ends: all that were named, and of others the best of
    each branch. Dense attention beside branches is what they are compared with."""
    named, others = [], dict[tuple, list[Record]]()
    for job, record in measured:
        if job.branch == "dense" and len(BRANCHES.value) > 1:
            continue
        if job.asked:
            named.append(record)
        elif job.asked is not None:
            key = record.framework, record.mode, record.branch, job.form
            others.setdefault(key, []).append(record)
    ok = lambda record: record.status == "ok"
    return named + [next(filter(ok, some), some[0]) for some in others.values()]


def judged_rows(
    plans: Mapping[str, JobsOfRunners], settings, inputs, tell: Callable[[str], None]
) -> Iterator[tuple[str, Any, Job, Judged]]:
    """Mode, runner, job and parity of each row; an array is loaded once for all of them."""
    loads = {id(runner): once(runner.load) for plan in plans.values() for runner, _ in plan}
    checker = Checker(settings, inputs, backward="fwdbwd" in plans, most_rows=ROWS.value)
    for mode, plan in plans.items():
        own = checker if mode == "fwdbwd" else checker.without_gradients()
        for runner, job in plan:
            tell(f"{runner.framework} {job.branch} {job.label}")
            row = judge(job, runner, settings, inputs, own, mode, loads[id(runner)])
            yield mode, runner, job, row


def _save(done: Sequence[Record]) -> None:
    """Keeps records where they are asked for; of products in 8 bits by themselves."""
    if SAVE.value:
        eight = [record for record in done if "compute_dtype" in record.config]
        records.keep(eight, FP8_RECORDS)
        records.keep([record for record in done if record not in eight], "compare.jsonl")


def _record(mode, runner, job: Job, settings, inputs, found: dict[str, Any]) -> Record:
    fields: dict[str, Any] = {
        "bench": "compare",
        "branch": job.branch,
        "implementation": job.label,
        "mode": mode,
        "refused": job.refused,
        "time": records.utc_now(),
    }
    return Record(**command.about(runner, settings, inputs), **fields, **found)


if __name__ == "__main__":
    cli.run(main)
