"""Runs the tests and counts skipped tests. If the reason for a skip is not on the list of allowed
reasons, the test counts as failed.

    python -m bench.suite --out DIR -- -m gpu -n 8 tests/test_launch.py

Arguments after `--` are passed to pytest. DIR gets `junit.xml` and the counts, `tests.json`. The
exit status is 1 if a test fails, if no test passes, or if pytest ends with another error. The exit
status is also 1 if the reason of a skipped test is not in `configs/oneshot/skips.yaml`.
"""

import collections
import dataclasses
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as xml
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from nsa_core import config_files

from .harness import cli

SCHEMA = 1
ROOT = Path(__file__).parents[1]
ALLOWED = config_files.FOLDER / "oneshot" / "skips.yaml"
FLAGS = cli.define(
    flags.FlagValues(),
    out=(str, "New folder for junit.xml and tests.json."),
    skips=(str(ALLOWED), "File with the allowed reasons for skipped tests."),
)


@dataclasses.dataclass(frozen=True)
class Counts:
    """Numbers of tests by outcome, the names of failed tests, and the skipped tests by reason."""

    passed: int
    failed: int
    skipped: int
    allowed: dict[str, int]
    unknown: dict[str, int]
    failures: list[str] = dataclasses.field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.passed > 0 and not self.failed and not self.unknown


def count(junit: Path, allowed: Sequence[str]) -> Counts:
    """Return the outcomes in the report at `junit`. `allowed` has regular expressions that must
    match whole reasons.
    """
    outcomes, reasons, failures = collections.Counter(), collections.Counter(), []
    for case in xml.parse(junit).getroot().iter("testcase"):
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            outcomes["failed"] += 1
            failures.append(f"{case.get('classname', '')}::{case.get('name')}")
        elif skip is not None:
            outcomes["skipped"] += 1
            reasons[skip.get("message", "")] += 1
        else:
            outcomes["passed"] += 1
    known = {text: any(re.fullmatch(each, text) for each in allowed) for text in reasons}
    return Counts(
        outcomes["passed"],
        outcomes["failed"],
        outcomes["skipped"],
        {text: n for text, n in reasons.items() if known[text]},
        {text: n for text, n in reasons.items() if not known[text]},
        failures,
    )


def allow_list(path: str | Path) -> list[str]:
    """Return the allowed reasons in the file at `path`. The file is a list of mappings with
    `reason` and `why`.

    Raises:
      ValueError: An entry lacks `reason` or `why`, or its reason is not a regular expression.
    """
    found = []
    for entry in config_files.load(path, list):
        if not isinstance(entry, dict) or set(entry) != {"reason", "why"}:
            raise ValueError(f"{path}: expected entries with reason and why, got {entry!r}")
        try:
            found.append(re.compile(entry["reason"]).pattern)
        except re.error as error:
            raise ValueError(f"{path}: {entry['reason']!r}: {error}") from None
    return found


def run(
    folder: Path, arguments: Sequence[str], skips: str | Path = ALLOWED
) -> tuple[int, Counts | None]:
    """Run pytest with `arguments`, and write `junit.xml` and `tests.json` to `folder`.

    Returns:
      The status of pytest, and the outcomes in its report or None if pytest wrote no report.

    Raises:
      OSError, ValueError: The file `skips` of allowed reasons cannot be read.
    """
    allowed = allow_list(skips)
    folder.mkdir(parents=True, exist_ok=True)
    junit = folder / "junit.xml"
    command = [sys.executable, "-m", "pytest", f"--junitxml={junit}", *arguments]
    status = subprocess.run(command, cwd=ROOT).returncode
    if not junit.exists():
        print(f"pytest ended with status {status} and no report")
        return status, None
    found = count(junit, allowed)
    for text, n in found.unknown.items():
        print(f"skipped for a reason that is not in {Path(skips).name}: {n} x {text!r}")
    about = {"schema": SCHEMA, "status": status, **dataclasses.asdict(found)}
    (folder / "tests.json").write_text(json.dumps(about, indent=2) + "\n")
    print(f"tests: {found.passed} passed, {found.failed} failed, {found.skipped} skipped")
    return status, found


def main(argv: Sequence[str]) -> int:
    if FLAGS.out is None or any(Path(FLAGS.out).glob("*")):
        raise app.UsageError(f"--out must name a new folder, got {FLAGS.out}")
    folder = Path(FLAGS.out).absolute()
    try:
        status, found = run(folder, argv[1:], FLAGS.skips)
    except (OSError, ValueError) as error:
        raise app.UsageError(f"--skips: {error}") from None
    return int(found is None or status != 0 or not found.ok)


if __name__ == "__main__":
    cli.run(main, FLAGS, arguments=True)
