"""How many lines of Python each package has, at a commit and now.

    python -m bench.lines --before <commit>

One row of Markdown a package, tests last and apart from the sum: lines at the commit, in the
working tree, and the difference.
"""

import collections
import subprocess
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from .harness import cli, exit_status

FLAGS = flags.FlagValues()
BEFORE = flags.DEFINE_string("before", "HEAD", "A commit.", flag_values=FLAGS)
ROOT = Path(__file__).parents[1]


def git(*words: str) -> list[str]:
    """The lines that git prints."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def counted(*where: str) -> collections.Counter[str]:
    """Lines of Python by package: of the commit `where`, or of the working tree."""
    found: collections.Counter[str] = collections.Counter()
    for line in git(
        "grep", "--untracked" if not where else "-I", "-c", "", *where, "--", "*.py"
    ):
        *_, path, count = line.split(":")
        found[path.partition("/")[0] if "/" in path else "(top)"] += int(count)
    return found


def table(before: collections.Counter[str], after: collections.Counter[str]) -> list[str]:
    """Rows of Markdown, the largest package first."""
    names = sorted({*before, *after} - {"tests"}, key=lambda name: -after[name])
    sums = [sum(each.values()) - each["tests"] for each in (before, after)]
    rows = [(name, before[name], after[name]) for name in names]
    rows += [("all of these", *sums), ("tests", before["tests"], after["tests"])]
    lines = ["| package | before | now | |", "| --- | --- | --- | --- |"]
    return lines + [f"| {name} | {a} | {b} | {b - a:+d} |" for name, a, b in rows]


def main(argv: Sequence[str]) -> int:
    try:
        before = counted(BEFORE.value)
    except subprocess.CalledProcessError as error:
        raise app.UsageError(f"--before: {error.stderr.strip()}") from None
    print("\n".join(table(before, counted())))
    return exit_status.OK


if __name__ == "__main__":
    cli.run(main, FLAGS)
