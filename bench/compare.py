"""Compares every implementation of every branch with the oracle and with dense attention.

    python -m bench.compare --framework both
    python -m bench.compare --framework jax --preset paper --mode fwdbwd
    python -m bench.compare --framework torch --peers fla,native-sparse-attention-triton
    python -m bench.compare --framework torch --preset paper --input random --kernels mosaic \
        --branch all --branch dense --mode forward --mode fwdbwd --seq_len 1024,8192,65536

Each of several lengths has its own process. All processes compile and compare with the oracle in
parallel. After the compilation, the processes are timed one after the other. The last example
measures the first chart of the report (docs/benchmarks.md).

Parity is checked first, and an implementation with wrong results is not timed. If an implementation
that is named on the command line cannot run, the exit status is 3 (not measured). Rows of a
framework that has no implementation of this name do not count.
"""

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import flags

from nsa_core import flags as kernel_flags
from nsa_core import policy
from nsa_core.config import FLOAT8
from nsa_core.types import Branches

from .harness import cli, command, exit_status, peers, problems, records, turns
from .harness.jobs import Job, in_form, jobs
from .harness.measure import Judged, judge, once
from .harness.records import FP8_RECORDS, Record
from .harness.runners import asked, started
from .judge.checks import Checker
from .reports import render

FLAGS = cli.define(
    framework=("both", "What to compare.", ["jax", "torch", "both"]),
    config=(
        str,
        "Name of a file in configs/, or a path; default: seed on a GPU, otherwise tiny.",
    ),
    preset="config",
    input=("text", "Kind of input arrays.", problems.KINDS),
    mode=(
        ("forward",),
        "Passes that are timed and checked (repeatable).",
        ["forward", "fwdbwd"],
    ),
    branch=(
        problems.BRANCHES,
        "Only these branches (repeatable).",
        problems.BRANCHES,
    ),
    chosen=(False, "Measure only the automatic choice, not every implementation."),
    recompute=(False, "With --mode fwdbwd, also measure whole attention with recompute=True."),
    packed=(
        False,
        "Also measure whole attention with its rows as one packed row, with metadata that is made "
        "before.",
    ),
    seq_len=(list, "Numbers of tokens, instead of that of the config; separated by commas."),
    most_rows=(
        int,
        "Maximum number of query positions per sequence that parity checks; default: all, or 768 "
        "of long problems.",
        12,
    ),
    batch=(int, "Number of sequences, instead of that of the config."),
    dtype=(str, "Precision, instead of that of the config.", problems.PRECISIONS),
    compute_dtype=(
        str,
        "Dtype of the products in the selected and the sliding branch, instead of that of the "
        "config. Errors are then compared with those of a reference that rounds in the same way.",
        [FLOAT8],
    ),
    seed=(0, "Seed of the random arrays and of the text model.", None),
    row_seconds=(0.5, "Approximate seconds of samples per row."),
    out=(str, "New folder for the results; default: bench/results/<time>."),
    save_records=(False, "Append the records to bench/records/<device>/compare.jsonl too."),
    explain=(False, "Only print which implementations would run, and why others cannot."),
    list="explain",
    turn=(
        False,
        "Internal: wait for a line on standard input before timing (used by the process that "
        "starts several lengths).",
    ),
    peers=(
        (),
        "Other libraries to measure in torch (separated by commas; repeatable). Dense attention of "
        "installed FlashAttention packages is always measured.",
    ),
)


def main(argv: Sequence[str]) -> int:
    if FLAGS.seq_len is None:
        return of_length(None)
    lengths = command.integers("seq_len", FLAGS.seq_len, ())
    if len(lengths) > 1 and not FLAGS.explain:
        return side_by_side(lengths)
    return exit_status.worst([of_length(length) for length in lengths])


def side_by_side(lengths: Sequence[int]) -> int:
    """Start a process per length. The processes compile in parallel and are timed in turn. Return
    the worst exit status. All records are in `compare.jsonl`. The other files of a length are in a
    folder of this length.
    """
    lines, statuses = command.new_folder(FLAGS.out) / "compare.jsonl", []
    for _, status, done in turns.of_lengths("seq_len", lengths, lines, FLAGS.framework):
        statuses.append(status)
        save(done)
    print(f"written to {lines.parent}")
    return exit_status.worst(statuses)


def of_length(length: int | None) -> int:
    """Explain or measure one length, by default the length of the config. Return the exit
    status.
    """
    runners, gpu = started(FLAGS.framework)
    given = {"seq_len": length, "batch": FLAGS.batch, "precision": FLAGS.dtype}
    given |= {f"{step}_kernel": name for step, name in kernel_flags.named()._asdict().items()}
    if flags.FLAGS["on_unsupported"].present:
        given["on_unsupported"] = kernel_flags.on_unsupported()
    given |= kernel_flags.thresholds().given()
    settings = problems.settings(FLAGS.config or ("seed" if gpu else "tiny"), given)
    if FLAGS.compute_dtype:
        nsa = dataclasses.replace(settings.nsa, compute_dtype=FLAGS.compute_dtype)
        settings = dataclasses.replace(settings, nsa=nsa)
    with policy.overridden(settings.runtime.thresholds, "the runtime section of the settings"):
        if FLAGS.recompute and "fwdbwd" not in FLAGS.mode:
            raise ValueError("--recompute affects only a backward pass; pass --mode fwdbwd")
        for name in ("recompute", "packed"):
            if FLAGS[name].value and "all" not in FLAGS.branch:
                raise ValueError(f"--{name} applies only to whole attention; pass --branch all")
        plans = {mode: plan_of(runners, settings, mode) for mode in FLAGS.mode}
        if FLAGS.explain:
            # The implementations that would run, in order, and the reasons of those that refuse.
            print(render.filled("explanation.txt.jinja", plans=plans), end="")
            return exit_status.OK
        return compare(plans, settings)


type JobsOfRunners = list[tuple[Any, Job]]


def plan_of(runners, settings, mode: str) -> JobsOfRunners:
    """Return the rows that the flags request."""
    branches = [name for name in problems.BRANCHES if name in FLAGS.branch]
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
            chosen=FLAGS.chosen,
        )
    ]
    forms = ["recompute"] if FLAGS.recompute and mode == "fwdbwd" else []
    forms += ["packed"] if FLAGS.packed else []
    whole = [(r, job) for r, job in plan if job.branch == "all" and not job.unsupported]
    plan += [(r, in_form(form, r, job, settings)) for form in forms for r, job in whole]
    torch = next((runner for runner in runners if runner.framework == "torch"), None)
    named = peers.named(FLAGS.peers)
    if torch is not None:
        problem = asked(settings, torch)._replace(requires_grad=mode == "fwdbwd")
        found = peers.jobs(problem, branches, named)
        plan += [(torch, dataclasses.replace(job, asked=True)) for job in found]
        plan += [(torch, job) for job in peers.dense(problem, branches, named)]
    elif named:
        raise ValueError(f"peers need --framework torch or both, got {FLAGS.framework}")
    return plan


def compare(plans: Mapping[str, JobsOfRunners], settings) -> int:
    """Measure the jobs of each mode. Write a line after each job, and then a table and a plot.
    Return the exit status.
    """
    lines = command.new_folder(FLAGS.out) / "compare.jsonl"
    folder, inputs = lines.parent, problems.make(settings, FLAGS.input, FLAGS.seed)
    how: dict[str, Any] = {"seconds": FLAGS.row_seconds}
    rows, measured = judged_rows(plans, settings, inputs), []
    if FLAGS.turn:
        rows = list(rows)
        turns.wait()
        how["warmup"] = 1  # the check of parity was a warm-up
    for mode, runner, job, row in rows:
        about = command.about(runner, settings, inputs) | {"branch": job.branch, "mode": mode}
        about |= {"implementation": job.label, "refused": job.refused}
        record = records.record("compare", FLAGS.commit, **about | row.timed(**how))
        records.append(lines, [record])
        measured.append((job, record))
        place = f"{len(measured)}/{sum(map(len, plans.values()))}"
        print(f"{place} {row.name}: {record.status} {record.time_ms or ''}", file=sys.stderr)
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
    save(done)
    asked_for = answers(measured)
    status = exit_status.of(asked_for, done)
    if status == exit_status.NOT_MEASURED:
        lost = (record for record in asked_for if record.status != "ok")
        names = (f"{x.framework} {x.branch} {x.mode} {x.implementation}" for x in lost)
        print(f"not measured: {', '.join(names)}", file=sys.stderr)
    return status


def answers(measured: Sequence[tuple[Job, Record]]) -> list[Record]:
    """Return the rows that determine the exit status. All rows that the command line names count.
    Of the rows that are not named, only the first row that is ok counts, or the first row if none
    is ok. Next to other branches, dense attention is only a baseline.
    """
    named, others = [], dict[tuple, list[Record]]()
    for job, record in measured:
        if job.branch == "dense" and len(FLAGS.branch) > 1:
            continue
        if job.asked:
            named.append(record)
        elif job.asked is not None:
            key = record.framework, record.mode, record.branch, job.form
            others.setdefault(key, []).append(record)
    ok = lambda record: record.status == "ok"
    return named + [next(filter(ok, some), some[0]) for some in others.values()]


def judged_rows(
    plans: Mapping[str, JobsOfRunners], settings, inputs
) -> Iterator[tuple[str, Any, Job, Judged]]:
    """Yield mode, runner, job and parity of each row. Each array is loaded once for all rows."""
    loads = {id(runner): once(runner.load) for plan in plans.values() for runner, _ in plan}
    checker = Checker(settings, inputs, backward="fwdbwd" in plans, most_rows=FLAGS.most_rows)
    for mode, plan in plans.items():
        own = checker if mode == "fwdbwd" else checker.without_gradients()
        for runner, job in plan:
            yield mode, runner, job, judge(job, runner, own, loads[id(runner)])


def save(done: Sequence[Record]) -> None:
    """Store records if `--save_records` is given. Records with products in 8 bits go to a separate
    file.
    """
    if FLAGS.save_records:
        eight = [record for record in done if "compute_dtype" in record.config]
        records.keep(eight, FP8_RECORDS)
        records.keep([record for record in done if record not in eight], "compare.jsonl")


if __name__ == "__main__":
    cli.run(main, FLAGS)
