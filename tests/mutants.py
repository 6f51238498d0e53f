"""Small mistakes in the library, each of which named tests must catch.

    python -m tests.mutants [NAME ..] [--control] [--part K/N] [-j WORKERS]

A row of `mutants.toml` is one mistake: `path`, the part of the library, and `name` in it; `file`;
`old`, a text that occurs exactly once in the file; `new`, what replaces it; `tests`, node ids of
pytest, the quickest first. `triton = true` runs them in Triton's interpreter; `at_import = true`
accepts that an import fails instead of a test. A NAME is a path or a part of `path: name`.

A mutant is caught if one of its tests fails; a test that cannot be collected catches nothing.
`--control` runs the tests without a mutant: all must pass. The checkout is never changed: every
worker has a copy of the tracked files as they are in the working tree.
Exit status: 0 if all were caught, 1 if one was not, 2 if a row or an argument is wrong.
"""

import argparse
import contextlib
import functools
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".toml")
NEEDED = {"path", "name", "file", "old", "new", "tests"}
TIMEOUT = 600.0  # seconds of one mutant


def label(row: dict) -> str:
    return f"{row['path']}: {row['name']}"


def read(table: Path = TABLE) -> list[dict]:
    """The rows of a table; ValueError names the first that is wrong."""
    rows, known = tomllib.loads(table.read_text())["mutant"], set()
    for row in rows:
        if (keys := row.keys() - {"triton", "at_import"}) != NEEDED:
            raise ValueError(
                f"a mutant must have {sorted(NEEDED)}, got {sorted(keys)} in {row}"
            )
        if label(row) in known or not row["tests"]:
            raise ValueError(f"{label(row)} must be there once, with tests")
        known.add(label(row))
        mutated((ROOT / row["file"]).read_text(), row)
        for test in row["tests"]:
            file, _, node = test.partition("::")
            text = (ROOT / file).read_text() if (ROOT / file).is_file() else None
            if text is None or (node and f"def {node.partition('[')[0]}(" not in text):
                raise ValueError(f"{label(row)}: the file of {test} must exist and have it")
    return rows


def mutated(text: str, row: dict) -> str:
    """The text of a file with the mistake in it."""
    if (count := text.count(row["old"])) != 1:
        raise ValueError(
            f"{label(row)}: old must occur once in {row['file']}, got {count} times"
        )
    return text.replace(row["old"], row["new"])


def controls(rows) -> list[dict]:
    """All tests of the rows, in one row for each file and interpreter."""
    tests = {}
    for row in rows:
        for test in row["tests"]:
            key = test.partition("::")[0], row.get("triton", False)
            tests.setdefault(key, {})[test] = None
    return [
        {"path": "control", "name": name, "triton": triton, "tests": [*found]}
        for (name, triton), found in tests.items()
    ]


@contextlib.contextmanager
def mistaken(copy: Path, row: dict) -> Iterator[None]:
    """Within: the mistake of the row, if any, is in the copy."""
    if "file" not in row:
        yield
        return
    path = copy / row["file"]
    text, before = path.read_text(), path.stat()
    path.write_text(mutated(text, row))
    try:
        yield
    finally:  # Python knows what it compiled by a file's size and second
        path.write_text(text)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def run(copy: Path, row: dict) -> tuple[int | str, str]:
    """pytest's status and what it printed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-m", "not gpu"]
    # The plugin sorts tests.
    command += ["-p", "no:cacheprovider", "-p", "no:tests.durations"]
    command += [f"--basetemp={copy}.temporary", *row["tests"]]
    environment = {
        "PYTHONPATH": str(copy),
        "TRITON_INTERPRET": str(int(row.get("triton", False))),
        "CUDA_VISIBLE_DEVICES": "",  # a GPU changes which tests are run
    }
    # What the tests start ends with their session.
    how: dict = {"cwd": copy, "env": os.environ | environment, "start_new_session": True}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with mistaken(copy, row), subprocess.Popen(command, **how, **pipes) as child:
        try:
            printed, _ = child.communicate(timeout=TIMEOUT)
            return child.returncode, printed
        except subprocess.TimeoutExpired:
            return "timed out", ""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def copied(folder: Path) -> Path:
    """A new copy of the tracked files as they are in the working tree."""
    copy = Path(tempfile.mkdtemp(dir=folder))
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(lambda x: x and (ROOT / x).is_file(), listed.stdout.split("\0")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    return copy


def judged(copies: queue.Queue, row: dict) -> bool:
    """Whether a row ends as it must, in a copy that no other row has; prints how it ended."""
    copy, began = copies.get(), time.monotonic()
    status, printed = run(copy, row)
    copies.put(copy)
    failures = re.findall(r"^(?:FAILED|ERROR) (\S.*)", printed, re.MULTILINE)
    if "file" not in row:
        # pytest's status is 0 as well where all tests are skipped.
        good = status == 0 and bool(re.search(r"^\d+ passed", printed, re.MULTILINE))
        words = "FAILED", "passed"
    else:
        good = status == 1 or (row.get("at_import", False) and status in (2, 4))
        words = "NOT CAUGHT", "caught"
    why = f"{label(row)}: {failures[0] if failures else f'status {status}'}"
    tail = "" if good else "\n" + printed[-1500:]
    print(f"{words[good]} {time.monotonic() - began:6.1f} s  {why}{tail}", flush=True)
    return good


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="a path, or part of path: name"
    )
    parser.add_argument("--control", action="store_true", help="run the tests without mutants")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="every Nth, from the Kth")
    parser.add_argument("-j", type=int, default=os.cpu_count(), metavar="WORKERS")
    parser.add_argument("--table", type=Path, default=TABLE)
    given = parser.parse_args(arguments)
    try:
        first, step = map(int, given.part.split("/"))
        if not 1 <= first <= step:
            raise ValueError(f"--part must be K/N with 1 <= K <= N, got {given.part}")
        rows, chosen = read(given.table), lambda row, x: x == row["path"] or x in label(row)
        if unknown := [x for x in given.names if not any(chosen(row, x) for row in rows)]:
            raise ValueError(f"no mutant is called {unknown[0]!r}")
        if given.names:
            rows = [row for row in rows if any(chosen(row, x) for x in given.names)]
        rows = rows[first - 1 :: step]
    except (ValueError, OSError) as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2
    rows, began = controls(rows) if given.control else rows, time.monotonic()
    copies: queue.Queue = queue.Queue()
    with tempfile.TemporaryDirectory(prefix="mutants") as folder, ThreadPool(given.j) as pool:
        for _ in range(min(given.j, len(rows))):
            copies.put(copied(Path(folder)))
        good = sum(pool.imap_unordered(functools.partial(judged, copies), rows))
    right = "passed" if given.control else "caught"
    print(f"{good} of {len(rows)} {right}, {time.monotonic() - began:.0f} s")
    return int(good < len(rows))


if __name__ == "__main__":
    sys.exit(main())
