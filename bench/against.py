"""Is this checkout slower than another one, on this GPU, and does it compute the same bits?

    git worktree add ../before <commit>
    python -m bench.against --checkout ../before
    python -m bench.against --checkout ../before --only 64k --rounds 10

Both checkouts run in processes of their own on one machine: all compile side by side, then
they are timed in turn (before, after, after, before, ...), calls in a row, one on the GPU. A
row is slower where the median of its ratios exceeds `--margin`. Exit status 1: a row is slower
or not bit-equal (`--allow_other_bits` for a change that may round differently), or a process
failed. Kernels: `mosaic`, so a Hopper GPU.
"""

import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from absl import app, flags

from . import tables
from .harness import cli, exit_status, process, records
from .harness.timed_problem import Problem, named

FLAGS = cli.define(
    checkout=(str, "Folder of the other checkout."),
    only=cli.ONLY,
    rounds=(5, "Times that both are timed.", 3),
    margin=(0.02, "What counts as slower."),
    allow_other_bits=(False, "Bits may differ."),
    memory_gib=(70.0, "Of the GPU, for all at once.", None),
    other_commit=(str, "Of the other, likewise."),
)
cli.define_lines(FLAGS)

SCRIPT = Path(__file__).parent / "harness" / "timed_problem.py"
ROWS = [Problem(name=name, **sizes) for name, sizes in named("calls").items()]
EAGER = [p for p in ROWS if p.framework == "torch" and not p.graph]


def chosen(own: flags.FlagValues, rows: Sequence[Problem]) -> list[Problem]:
    """Those of `rows` that `--only` names."""
    names = cli.chosen(own.only, (p.name for p in rows))
    if not torch.cuda.is_available():
        raise NotImplementedError("a Hopper GPU is needed")
    return [p for p in rows if p.name in names]


def measured(
    own: flags.FlagValues,
    rows: Sequence[Problem],
    measure: Callable[[Problem], Iterable[tuple[str, Iterable[records.Record]]]],
) -> None:
    """Prints the lines of `measure` for each problem, and appends its records to `--out`."""
    for problem in chosen(own, rows):
        for line, made in measure(problem):
            print(line, flush=True)
            if own.out:
                records.append(own.out, made)
        torch.cuda.empty_cache()


def gib(problem: Problem) -> float:
    """About the GPU memory of a process: ten tensors like the output, and CUDA."""
    return 1.5 + 10 * 2 * problem.B * problem.T * problem.H * max(problem.D, 128) / 2**30


def waves(problems: Iterable[Problem], memory_gib: float) -> Iterator[list[Problem]]:
    """Those that fit on the GPU together, twice each."""
    wave: list[Problem] = []
    for problem in problems:
        if wave and 2 * sum(map(gib, [*wave, problem])) > memory_gib:
            yield wave
            wave = []
        wave.append(problem)
    if wave:
        yield wave


class Child:
    """A process of `timed_problem` on the library of a checkout."""

    def __init__(self, checkout: Path, problem: Problem):
        self.name = f"{problem.name} in {checkout.name}"
        self.process = subprocess.Popen(
            [sys.executable, "-P", SCRIPT, json.dumps(dataclasses.asdict(problem))],
            env=process.environment(
                {"PYTHONPATH": str(checkout), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            ),
            # Until 5653ce6 processes that build kernels import from the working directory.
            cwd=checkout,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> dict:
        """The next line; compiling comes before the first."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise ChildProcessError(f"{self.name}: exit status {self.process.wait()}")
        return json.loads(line)

    def time(self) -> dict[str, float]:
        assert self.process.stdin is not None
        print("time", file=self.process.stdin, flush=True)
        return self.answer()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()  # closes the pipes too


def compiled(children) -> tuple[list, list[ChildProcessError]]:
    """Waits for all, so that none compiles while another is timed: those that are ready, with
    the hashes of their results, and why others are not."""
    ready, broken = [], []
    for problem, pair in children:
        try:
            ready.append((problem, pair, [child.answer() for child in pair]))
        except ChildProcessError as error:
            broken.append(error)
    return ready, broken


def measure(
    before: Child, after: Child, digests: Sequence[Mapping[str, str]], rounds: int
) -> Iterator[dict[str, Any]]:
    """A row per mode; the times of the rounds are in milliseconds."""
    times = []
    for i in range(rounds):  # the first one alternates too
        pair = [child.time() for child in ((after, before) if i % 2 else (before, after))]
        times.append(pair[::-1] if i % 2 else pair)
    for mode, bits in digests[0].items():
        both = [[pair[at][mode] for pair in times] for at in range(2)]
        ratio = statistics.median(y / x for x, y in zip(*both, strict=True))
        found = {"mode": mode, "same_bits": bits == digests[1][mode], "ratio": ratio}
        yield found | {"before_ms": both[0], "after_ms": both[1]}


def faults(row: Mapping[str, Any], margin: float, other_bits: bool) -> str:
    slower = [f"{row['ratio'] - 1:.1%} slower"] if row["ratio"] > 1 + margin else []
    return ", ".join(slower + ([] if row["same_bits"] or other_bits else ["other bits"]))


def main(argv: Sequence[str]) -> int:
    here = Path(__file__).parents[1]
    if not FLAGS.checkout:
        raise app.UsageError("--checkout is needed: the folder of the other checkout")
    there = Path(FLAGS.checkout).resolve()
    if not (there / "nsa_torch").is_dir():
        raise ValueError(f"--checkout: no nsa_torch in {there}")
    rows = chosen(FLAGS, ROWS)
    print(f"{'ms':28} {'mode':8} {'before':>8} {'after':>8}", flush=True)
    failed, lines = False, []
    about = {
        "device": torch.cuda.get_device_name(),
        "before_commit": FLAGS.other_commit or records.head(there),
    }
    for wave in waves(rows, FLAGS.memory_gib):
        with contextlib.ExitStack() as ends:
            children = [(p, (Child(there, p), Child(here, p))) for p in wave]
            for _, pair in children:
                for child in pair:
                    ends.callback(child.end)
            ready, broken = compiled(children)
            for error in broken:
                failed = True
                print(error, flush=True)
            for problem, (before, after), digests in ready:
                for row in measure(before, after, digests, FLAGS.rounds):
                    wrong = faults(row, FLAGS.margin, FLAGS.allow_other_bits)
                    failed |= bool(wrong)
                    found = about | vars(problem) | row
                    times = {x: statistics.median(row[f"{x}_ms"]) for x in ("before", "after")}
                    shown = times | {"change": row["ratio"] - 1, "faults": wrong}
                    print(tables.line("against", found | shown), flush=True)
                    lines.append(records.record("against", FLAGS.commit, **found))
    if FLAGS.out:
        records.append(FLAGS.out, lines)
    return exit_status.WRONG if failed else exit_status.OK


if __name__ == "__main__":
    cli.run(main, FLAGS)
