"""Compares the speed and the bits of the results of two checkouts, this one and `--checkout`, on
this GPU.

    git worktree add ../before <commit>
    python -m bench.against --checkout ../before
    python -m bench.against --checkout ../before --only 64k --rounds 10

The two checkouts run in separate processes on one machine. As many processes as fit into
`--memory_gib` compile in parallel. After the compilation, consecutive calls are timed in turn
(before, after, after, before, ...), with one process on the GPU at a time. A row of the table is
one problem in one pass. A row is slower if the median of its ratios (time after / time before)
exceeds 1 + `--margin`. The exit status is 1 if a row is slower or not bit-equal, or if a process
failed. For a change that may round differently, pass `--allow_other_bits`. All rows run on
`mosaic`, so that a Hopper GPU is needed.
"""

import contextlib
import dataclasses
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from absl import app

from . import run, tables
from .harness import cli, exit_status, process, records
from .harness.records import Values
from .harness.timed_problem import Problem

FLAGS = cli.define(
    checkout=(str, "Folder of the other checkout."),
    only=cli.ONLY,
    rounds=(5, "Number of times that both checkouts are timed.", 3),
    margin=(
        0.02,
        "A row is slower if the median ratio of its times exceeds 1 plus this value.",
    ),
    allow_other_bits=(False, "Accept results whose bits differ."),
    memory_gib=(70.0, "GPU memory in GiB for all processes that run at once.", None),
    other_commit=(str, "Commit of the other checkout; default: as git reports."),
)
cli.define_lines(FLAGS)

SCRIPT = Path(__file__).parent / "harness" / "timed_problem.py"


def waves(problems: Iterable[Problem], memory_gib: float) -> list[list[Problem]]:
    """Divide the problems into groups that fit on the GPU together, with two processes per
    problem. A process needs memory for about ten tensors of the output's size, and for CUDA.
    """
    found, left = list[list[Problem]](), 0.0
    for p in problems:
        gib = 2 * (1.5 + 10 * 2 * p.B * p.T * p.H * max(p.D, 128) / 2**30)
        if not found or gib > left:
            found.append([])
            left = memory_gib
        found[-1].append(p)
        left -= gib
    return found


class Child:
    """A process of `timed_problem` on the library of a checkout."""

    def __init__(self, checkout: Path, problem: Problem):
        self.name = f"{problem.name} in {checkout.name}"
        self.process = subprocess.Popen(
            [sys.executable, "-P", SCRIPT, json.dumps(dataclasses.asdict(problem))],
            env=process.environment(
                {"PYTHONPATH": str(checkout), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            ),
            # In checkouts before 5653ce6, processes that build kernels import from the working
            # directory.
            cwd=checkout,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self, asked: str = "") -> Values:
        """Write the text `asked` to the process, and return the next line of the process, which is
        JSON. The first line comes after the process has compiled the problem.

        Raises:
          ChildProcessError: The process ended.
        """
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(asked)
        self.process.stdin.flush()
        if line := self.process.stdout.readline():
            return json.loads(line)
        raise ChildProcessError(f"{self.name}: exit status {self.process.wait()}")

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()  # this also closes the pipes


def measured(
    wave: Sequence[Problem], folders: Sequence[Path], broken: list[ChildProcessError]
) -> Iterator[Values]:
    """Yield a row per problem and mode of a group. A row has the times of all rounds in
    milliseconds.

    Args:
      broken: A list, to which the reasons for rows without times are appended.
    """
    with contextlib.ExitStack() as ends:
        pairs = [[Child(folder, p) for folder in folders] for p in wave]
        for child in itertools.chain(*pairs):
            ends.callback(child.end)
        ready = []  # wait for all processes, so that none compiles while another is timed
        for problem, pair in zip(wave, pairs, strict=True):
            try:
                ready.append((problem, pair, [child.answer() for child in pair]))
            except ChildProcessError as error:
                broken.append(error)
                print(error, flush=True)
        for problem, pair, (bits, other_bits) in ready:
            times = []
            for i in range(FLAGS.rounds):  # the checkout that is timed first alternates
                order = 1 if i % 2 == 0 else -1
                times.append([child.answer("time\n") for child in pair[::order]][::order])
            for mode in bits:
                before, after = ([each[at][mode] for each in times] for at in range(2))
                ratio = statistics.median(y / x for x, y in zip(before, after, strict=True))
                row = {"mode": mode, "same_bits": bits[mode] == other_bits[mode]}
                row |= {"ratio": ratio, "before_ms": before, "after_ms": after}
                yield vars(problem) | row


def faults(row: Values) -> str:
    slower = row["ratio"] - 1
    found = [f"{slower:.1%} slower"] if slower > FLAGS.margin else []
    if not (row["same_bits"] or FLAGS.allow_other_bits):
        found.append("other bits")
    return ", ".join(found)


def main(argv: Sequence[str]) -> int:
    here = Path(__file__).parents[1]
    if not FLAGS.checkout:
        raise app.UsageError("--checkout must be given; pass the folder of the other checkout")
    there = Path(FLAGS.checkout).resolve()
    if not (there / "nsa_torch").is_dir():
        raise ValueError(f"--checkout must be a folder with nsa_torch, got {there}")
    problems = waves(run.chosen(FLAGS, run.CALLS), FLAGS.memory_gib)
    print(tables.LINES["against"]["head"], flush=True)
    broken, wrong = list[ChildProcessError](), list[str]()
    about = {
        "device": torch.cuda.get_device_name(),
        "before_commit": FLAGS.other_commit or records.head(there),
    }

    def show(row):
        wrong.append(faults(row))
        both = {x: statistics.median(row[f"{x}_ms"]) for x in ("before", "after")}
        return both | {"change": row["ratio"] - 1, "faults": wrong[-1]}

    found = (measured(wave, (there, here), broken) for wave in problems)
    run.rows("against", FLAGS, (about | x for x in itertools.chain(*found)), show)
    return exit_status.WRONG if broken or any(wrong) else exit_status.OK


if __name__ == "__main__":
    cli.run(main, FLAGS)
