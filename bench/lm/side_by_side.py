"""The loss curves of runs on other numbers of devices, and how far they are apart.

    python -m bench.lm.side_by_side figure.svg one/train.jsonl two/train.jsonl ..

Below the losses: the relative difference of each run from that of the same name on one device,
which must be among the files.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from absl import app

from ..harness import cli
from . import curves, log, watched
from .log import Header, Line


def plot(found: Mapping[str, Sequence[Line]], path: Path) -> None:
    """Writes the figure of the runs of files, by name.

    Raises:
      ValueError: files of several runs, or of no run; runs of different tasks.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = {}
    for name, lines in found.items():
        headers = curves.last(lines, Header)
        if len(headers) != 1:
            raise ValueError(f"{name} must hold one run, got {sorted(headers)}")
        (run,) = headers
        runs[name] = run, headers[run], curves.losses(lines)[run]
    first = next(header for _, header, _ in runs.values())
    for name, (_, header, _) in runs.items():
        if watched.task_of(header) != watched.task_of(first):
            raise ValueError(f"{name} must hold the same task as {next(iter(runs))}")
    alone = {run: losses for run, header, losses in runs.values() if header.parallel is None}
    figure, (above, below) = pyplot.subplots(
        2, sharex=True, figsize=(9, 7), height_ratios=(3, 2), layout="constrained"
    )
    for run, header, losses in runs.values():
        label = f"{run}, {curves.devices(header)}"
        above.plot(losses, label=f"{label}: {curves.final(losses):.4f}", linewidth=1)
        if header.parallel is not None and run in alone:
            apart = curves.difference(losses, alone[run])
            below.semilogy(np.maximum(apart, 1e-9), linewidth=0.8, label=label)
    bound = watched.PARITY[first.dtype]
    below.plot(
        [0, watched.PARITY_STEPS], [bound, bound], "k:", label="bound of the first steps"
    )
    above.set_ylabel("loss (nats a token)")
    above.legend(title="mean of the last tenth of the steps")
    below.set_ylabel("|several - one| / one")
    below.set_xlabel("step")
    below.legend()
    at = first.training
    size = f"{first.parameters / 1e6:.3g}M parameters, {at['batch']} x {at['seq_len']} a step"
    above.set_title(f"{first.device}, {size}, {first.dtype}", size=9, loc="left")
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}):
        figure.savefig(
            path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None
        )
    pyplot.close(figure)


def main(argv: Sequence[str]) -> int:
    if len(argv) < 4:
        raise app.UsageError("a figure and two files or more")
    figure, *files = map(Path, argv[1:])
    plot({str(path): log.read(path) for path in files}, figure)
    print(f"written to {figure}")
    return 0


if __name__ == "__main__":
    cli.run(main, arguments=True)
