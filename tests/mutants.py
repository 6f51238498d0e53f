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
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".toml")
NEEDED = {"path", "name", "file", "old", "new", "tests"}
TIMEOUT = 600.0  # seconds of one mutant
PROCESSES = multiprocessing.get_context("fork")


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
            if not (ROOT / test.partition("::")[0]).is_file():
                raise ValueError(f"{label(row)}: the file of {test} must exist")
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


class Seen:
    """The first failure of a run, and how many tests passed."""

    failed, passed = None, 0

    def pytest_runtest_logreport(self, report):
        self.passed += report.passed and report.when == "call"
        if report.failed and self.failed is None:
            self.failed = report.nodeid


def run_tests(copy: Path, row: dict, answer) -> None:
    """Answers with pytest's status, the first failure and the number of passed tests."""
    os.setsid()  # what the tests start ends with them
    with open(copy / "tests.log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    os.environ["TRITON_INTERPRET"] = str(int(row.get("triton", False)))
    sys.path[:] = [str(copy), *(x for x in sys.path if x not in ("", str(ROOT)))]
    for name in [x for x in sys.modules if x.partition(".")[0] == "tests"]:
        del sys.modules[name]  # the checkout's
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    import pytest

    options = ["-x", "-q", "-m", "not gpu", f"--basetemp={copy}.temporary"]
    options += ["-p", "no:cacheprovider", "-p", "no:tests.durations"]  # which sorts tests
    seen = Seen()
    status = pytest.main([*options, *row["tests"]], plugins=[seen])
    answer.send((int(status), seen.failed, seen.passed))
    sys.stdout.flush()
    os._exit(0)


def run(copy: Path, row: dict) -> tuple:
    """What `run_tests` answers, with the mistake of the row, if any, in the copy."""
    path = copy / row["file"] if "file" in row else None
    if path is not None:
        text, before = path.read_text(), path.stat()
        path.write_text(mutated(text, row))
        forget_compiled(path)
    receive, send = PROCESSES.Pipe(duplex=False)
    child = PROCESSES.Process(target=run_tests, args=(copy, row, send))
    child.start()
    send.close()
    try:
        return receive.recv() if receive.poll(TIMEOUT) else ("timed out", None, 0)
    except EOFError:
        return "crashed", None, 0
    finally:
        try:
            os.killpg(child.pid, 9)
        except ProcessLookupError:
            pass
        child.join()
        if path is not None:
            path.write_text(text)
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
            forget_compiled(path)


def forget_compiled(path: Path) -> None:
    """Python knows what it compiled by a file's size and second."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()


def _tail(log: Path) -> str:
    return log.read_text()[-1500:] if log.is_file() else ""


def work(copy: Path, rows, todo, answers) -> None:
    """Takes numbers of rows until None: as rows they would not fit into the pipe all at once."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(lambda x: x and (ROOT / x).is_file(), listed.stdout.split("\0")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    while (number := todo.get()) is not None:
        row, began = rows[number], time.monotonic()
        try:
            status, failed, passed = run(copy, row)
        except (OSError, ValueError) as error:  # the checkout changed meanwhile
            status, failed, passed = repr(error), None, 0
        if "file" not in row:
            good = status == 0 and passed > 0
        else:
            good = (status == 1 and failed) or (row.get("at_import") and status in (2, 4))
        why = failed or f"{passed} passed, status {status}"
        tail = "" if good else "\n" + _tail(copy / "tests.log")
        answers.put((bool(good), time.monotonic() - began, f"{label(row)}: {why}{tail}"))


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
    right, wrong = ("passed", "FAILED") if given.control else ("caught", "NOT CAUGHT")
    rows, began, good = controls(rows) if given.control else rows, time.monotonic(), 0
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU changes which tests are run
    import torch  # noqa: F401  # once for all processes, which are forked from this one

    todo, answers = PROCESSES.SimpleQueue(), PROCESSES.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        copies = [Path(folder) / str(i) for i in range(min(given.j, len(rows)))]
        workers = [
            PROCESSES.Process(target=work, args=(x, rows, todo, answers)) for x in copies
        ]
        for worker in workers:
            worker.start()
        for number in [*range(len(rows)), *[None] * len(workers)]:
            todo.put(number)
        for _ in rows:
            caught, seconds, text = answers.get()
            good += caught
            print(f"{right if caught else wrong} {seconds:6.1f} s  {text}", flush=True)
        for worker in workers:
            worker.join()
    print(f"{good} of {len(rows)} {right}, {time.monotonic() - began:.0f} s")
    return int(good < len(rows))


if __name__ == "__main__":
    sys.exit(main())
