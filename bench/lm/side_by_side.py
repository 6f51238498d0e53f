"""Draws the loss curves of runs of one task on different numbers of devices, and the differences
of these curves.

    python -m bench.lm.side_by_side figure.svg one/train.jsonl two/train.jsonl ..

The lower part of the figure shows the relative difference of each run on several devices from a run
on one device. The run on one device must have the same framework and attention, and be among the
files.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from absl import app

from ..harness import cli
from . import curves, log, watched
from .log import Header, Line


def plot(found: Mapping[str, Sequence[Line]], path: Path) -> None:
    """Write the figure to `path`. `found` has the lines of each file, keyed by the name of the
    file.

    Raises:
      ValueError: A file has several runs or none, or the runs have different values of
        `watched.task_of`.
    """
    runs = {}
    for name, lines in found.items():
        headers = curves.last(lines, Header)
        if len(headers) != 1:
            raise ValueError(f"{name} must contain one run, got {sorted(headers)}")
        (run,) = headers
        runs[name] = run, headers[run], curves.losses(lines)[run]
    first = next(header for _, header, _ in runs.values())
    for name, (_, header, _) in runs.items():
        if watched.task_of(header) != watched.task_of(first):
            raise ValueError(
                f"{name} must have the same model, training settings, dtype and input_sha256 as "
                f"{next(iter(runs))}"
            )
    alone = {run: losses for run, header, losses in runs.values() if header.parallel is None}
    drawn = []
    for run, header, losses in runs.values():
        several = header.parallel is not None and run in alone
        over = curves.difference(losses, alone[run]) if several else None
        drawn.append(curves.Curve(losses, f"{run}, {curves.devices(header)}", over))
    bound = watched.PARITY[first.dtype], watched.PARITY_STEPS
    curves.draw(drawn, path, first, bound, "|several - one| / one")


def main(argv: Sequence[str]) -> int:
    if len(argv) < 4:
        raise app.UsageError(
            "arguments must be the file of the plot and at least two record files"
        )
    figure, *files = map(Path, argv[1:])
    plot({str(path): log.read(path) for path in files}, figure)
    print(f"written to {figure}")
    return 0


if __name__ == "__main__":
    cli.run(main, arguments=True)
