"""Writes a test report of one run of `bench.oneshot`: FA-2, thresholds, and PASS or FAIL of
each test.

    python -m bench.seed_report artifacts/<commit>

The command writes `seed_report.md` to the folder of the run. The report has the speed-ups of FA-2
over masked SDPA, thresholds, PASS or FAIL of each test, benches and files. The report has the
form of two templates of the seed system (docs/seed.md). A test that was not run or could not be
measured on this machine is NOT RUN, never PASS.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from absl import app

from nsa_core import policy

from . import tables, tune_thresholds
from .harness import cli, records
from .harness.records import Record, Values
from .reports import render
from .tuners import threshold_evidence

NAME = "seed_report.md"
MARGIN = 1.2
# The tests of the template, each with the step that runs it, and the values of fields of the
# records of the test, without which only the status of the step counts. The benches by step.
TESTS, BENCHES = tables.KINDS["seed_report"].values()


def rows_of(folder: Path, step: str) -> list[Record]:
    """Return the records of a step. Records of training have another form than records of other
    steps.
    """
    paths = () if step == "train" else sorted((folder / step).glob("*.jsonl"))
    return [record for path in paths for record in records.read(path)]


def verdict(
    step: Values | None, rows: Sequence[Record], judged_by_rows: bool
) -> tuple[str, str]:
    """Return the verdict PASS, FAIL or NOT RUN, with the reason."""
    if step is None or step["status"] == "skipped":
        return "NOT RUN", "" if step is None else step["reason"]
    bad = [row for row in rows if row.status in ("wrong", "error")]
    if bad:
        return "FAIL", bad[0].reason.splitlines()[0]
    if judged_by_rows and not any(row.status == "ok" for row in rows):
        if step["status"] == "timeout" or not rows:
            return "FAIL", step["reason"] or "the step has made no rows"
        return "NOT RUN", rows[0].reason.splitlines()[0]
    if step["status"] != "ok" and not judged_by_rows:
        return "FAIL", step["reason"]
    return "PASS", ""


def tests(folder: Path, steps: dict[str, Values]) -> Iterator[tuple]:
    """Yield each test of the section Tests: its name, verdict, reason and seconds."""
    for name, (step, wanted) in TESTS.items():
        ran, rows = steps.get(step), []
        if wanted:
            rows = [
                r
                for r in rows_of(folder, step)
                if wanted.items() <= (vars(r) | r.extra).items()
            ]
        yield name, *verdict(ran, rows, bool(wanted)), ran and ran["seconds"]


def thresholds(folder: Path, device: str) -> Values:
    """Return the evidence of each threshold from the records of this run, or None for a threshold
    without records.
    """
    tuned: Values = {}
    if any(path for name in threshold_evidence.FILES for path in folder.glob(f"*/{name}")):
        found = threshold_evidence.evidence(threshold_evidence.read_records(folder), device)
        if found.pairs:
            tuned = tune_thresholds.tune(found, [], MARGIN)["evidence"]
    return dict.fromkeys(policy.DECIDES) | tuned


def last_lines(folder: Path, step: str) -> list[str]:
    """Return the last lines of output of the command of a step, from its log."""
    log = folder / f"{step}.log"
    text = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return [x for x in text if x and not x.startswith(("written to", "warning:", "..."))]


def report(folder: Path) -> str:
    """Return the report, which consists of two filled templates.

    Raises:
      FileNotFoundError: The folder has no results of a run.
    """
    run = json.loads((folder / "summary.json").read_text())
    fa2 = rows_of(folder, "fa2")
    files = sorted(str(path.relative_to(folder)) for path in folder.glob("**/*.csv"))
    return render.filled(
        "seed_report.md.jinja",
        run=run,
        versions=dict.fromkeys(("torch", "triton", "cuda", "driver")) | run["versions"],
        fa2=[*zip(fa2, render.speed_ups(fa2, "masked"), strict=True)],
        thresholds=thresholds(folder, run["device"]),
        tests=tests(folder, {step["name"]: step for step in run["steps"]}),
        benches={name: last_lines(folder, step) for step, name in BENCHES.items()},
        files=[*files, *sorted(path.name for path in folder.glob("*.log"))],
    )


def main(argv: Sequence[str]) -> int:
    if len(argv) != 2:
        raise app.UsageError(f"expected the folder of one run, got {argv[1:]}")
    folder = Path(argv[1])
    text = report(folder)
    (folder / NAME).write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    cli.run(main, arguments=True)
