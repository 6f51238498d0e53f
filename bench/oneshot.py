"""Runs everything once within a time budget: tests, benchmarks, training, thresholds, reports.

    python -m bench.oneshot                    # the plan for this device, within 10 minutes
    python -m bench.oneshot --list             # what it would run
    python -m bench.oneshot --only compare     # only this step (repeatable; --skip likewise)
    python -m bench.oneshot --quick            # smaller sizes

Each step is a process with its own timeout and log. The results are in a new folder
`artifacts/<commit>`, including `summary.json`. The exit status is 1 if a requested step fails, runs
out of time or cannot start. After a failed step, later steps still run. SIGINT and SIGTERM end the
current step; the status in the summary is then `interrupted`.
"""

import dataclasses
import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app

from nsa_core import config_files

from . import environment
from .harness import cli, heartbeat, process, records
from .harness.process import Result, Step

SCHEMA = 1
PLANS = config_files.FOLDER / "oneshot"
FLAGS = cli.define(
    out=(str(process.ROOT / "artifacts"), "Parent of the folder of this run."),
    plan=(str, "Plan: gpu, cpu, or the path of a file; default: by the device."),
    only=((), "Run only this step (repeatable)."),
    skip=((), "Skip this step (repeatable)."),
    list=(False, "Print the steps without running them."),
    quick=(False, "Use the smaller sizes of the plan."),
    minutes=(10.0, "Time budget of the whole run, in minutes."),
    save_records=(False, "Also append the records of the steps to bench/records/."),
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A file in `configs/oneshot`."""

    steps: list[Step]


def load(name: str) -> list[Step]:
    """Return the steps of `configs/oneshot/<name>.yaml`, or of the YAML file at a path.

    Raises:
      ValueError: Two steps have the same name, or a step needs a later step or an unknown step.
    """
    path = PLANS / f"{name}.yaml" if name in ("cpu", "gpu") else Path(name)
    plan, before = config_files.build(Plan, config_files.load(path), path.name), set[str]()
    for step in plan.steps:
        if step.name in before:
            raise ValueError(f"{path}: two steps have the name {step.name!r}")
        if missing := sorted(set(step.needs) - before):
            raise ValueError(
                f"{path}: {step.name} needs {missing}, which no earlier step provides"
            )
        before.add(step.name)
    return plan.steps


def new_folder(parent: Path, commit: str | None, dirty: bool | None) -> Path:
    """Make the folder `<commit>`, with `-dirty` if the tree has changes, and with a number if
    the name exists."""
    name = (commit or "unknown")[:12] + ("-dirty" if dirty else "")
    number = 1
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder.absolute()


def template_of(step: Step, hopper: bool) -> str:
    """Return the command of a step for this run and this GPU."""
    return (FLAGS.quick and step.quick) or (hopper and step.hopper) or step.command


class Run:
    """The steps of one run, which the method `run` executes in order, and the summary."""

    def __init__(self, plan: Sequence[Step], folder: Path, device: str, about: dict[str, Any]):
        """`about` has further fields of the summary. The field `hopper` of `about` determines the
        commands.
        """
        self.plan, self.folder, self.results = plan, folder, list[Result]()
        self.start = time.monotonic()
        self.about = {"schema": SCHEMA, "device": device, **about, "start": records.utc_now()}

    def left_s(self, step: Step) -> float:
        """Return the remaining budget for a step. Time for the last steps, which use the results of
        other steps, is reserved.
        """
        spent = time.monotonic() - self.start
        later = 0.0
        if not step.last:
            later = sum(x.timeout_s for x in self.plan if x.last and self.not_asked(x) is None)
        return FLAGS.minutes * 60 - spent - later

    def not_asked(self, step: Step) -> str | None:
        if FLAGS.only and step.name not in FLAGS.only:
            return "not among --only"
        if step.command.startswith("bench.suite") and process.ROOT != process.CHECKOUT:
            return "tests come with a checkout, not with a wheel"
        return "--skip" if step.name in FLAGS.skip else None

    def run(self) -> int:
        """Run every step and return the exit status."""
        try:
            with process.interruptible():
                for step in self.plan:
                    result = self.one(step)
                    self.results.append(result)
                    self.tell(result)
                    if result.status == "interrupted":
                        raise process.Interrupted(signal.Signals[result.reason])
                    self.write("running")
        except process.Interrupted as error:
            status, code = "interrupted", 128 + error.number
            for step in self.plan[len(self.results) :]:
                why = self.not_asked(step) or "the run was interrupted before it"
                self.results.append(Result(step.name, step.command, "skipped", reason=why))
        else:
            code = int(not all(map(self.good, self.results)))
            status = "failed" if code else "ok"
        self.write(status)
        print(f"{status}: {self.folder}")
        return code

    def one(self, step: Step) -> Result:
        """Run a step unless there is a reason against it, and return its result."""
        template = template_of(step, bool(self.about.get("hopper")))
        made = [str(path) for path in sorted(self.folder.glob("*/*.jsonl"))]
        words = {
            "root": str(self.folder),
            "out": str(self.folder / step.name),
            "commit": f"--commit={FLAGS.commit}" if FLAGS.commit else "",
            "save": "--save_records" if FLAGS.save_records else "",
        }
        command = process.expand(template, words, made)
        ended_well = {result.name for result in self.results if result.status == "ok"}
        lacking, left_s = [x for x in step.needs if x not in ended_well], self.left_s(step)
        reason = self.not_asked(step)
        if reason is None and lacking:
            reason = f"needs {', '.join(lacking)}, which did not end well"
        elif reason is None and "{records}" in template and not made:
            reason = "no records were made"
        elif reason is None and left_s <= 0:
            reason = f"the budget of {FLAGS.minutes:g} minutes is spent"
        if reason is not None:
            shown = f"python -m {process.module(template)}"
            return Result(step.name, shown, "skipped", reason=reason)
        before = self.files()
        print(f"{step.name} ...", flush=True)
        heartbeat.say(step.name)
        limit, budget = min(step.timeout_s, left_s), left_s < step.timeout_s
        result = process.run(step.name, command, self.folder, limit, budget)
        return dataclasses.replace(result, files=tuple(sorted(self.files() - before)))

    def files(self) -> set[str]:
        found = (path for path in self.folder.rglob("*") if path.is_file())
        return {str(path.relative_to(self.folder)) for path in found} - {"summary.json"}

    def good(self, result: Result) -> bool:
        """Whether the step succeeded or was not requested."""
        step = next(step for step in self.plan if step.name == result.name)
        return result.status == "ok" or self.not_asked(step) is not None

    def tell(self, result: Result) -> None:
        """Print a line, and for a failed step the end of the log."""
        if result.status == "skipped" and self.good(result):
            return
        line = f"{result.name}: {result.status} {result.seconds:.1f} s {result.reason}".rstrip()
        print(line, flush=True)
        log = self.folder / f"{result.name}.log"
        if not self.good(result) and log.exists():
            text = process.tail(log)
            print("\n".join(f"  | {line}" for line in text.splitlines()), flush=True)

    def write(self, status: str) -> None:
        """Write `summary.json` atomically."""
        summary = self.about | {
            "end": records.utc_now(),
            "seconds": round(time.monotonic() - self.start, 2),
            "status": status,
            "ok": status == "ok",
            "complete": len(self.results) == len(self.plan)
            and all(result.status == "ok" for result in self.results),
            "steps": [dataclasses.asdict(result) for result in self.results],
        }
        text = json.dumps(summary, indent=2) + "\n"
        records.replace_file(self.folder / "summary.json", text)


def main(argv: Sequence[str]) -> int:
    device = environment.device_name()
    plan = load(FLAGS.plan or ("cpu" if device == "cpu" else "gpu"))
    known = [step.name for step in plan]
    for flag in ("only", "skip"):
        for name in getattr(FLAGS, flag):
            if name not in known:
                raise app.UsageError(f"--{flag} must be one of {known}, got {name!r}")
    hopper = device != "cpu" and any(x.hopper for x in plan) and environment.is_hopper()
    if FLAGS.list:
        print(f"device: {device}")
        for step in plan:
            template = template_of(step, hopper)
            print(f"{step.name}  at most {step.timeout_s:g} s: python -m {template}")
        return 0
    found = records.environment(FLAGS.commit)
    folder = new_folder(Path(FLAGS.out), found["commit"], found["dirty"])
    about = {**found, "minutes": FLAGS.minutes, "quick": FLAGS.quick, "hopper": hopper}
    return Run(plan, folder, device, about).run()


if __name__ == "__main__":
    cli.run(main, FLAGS)
