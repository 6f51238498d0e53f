"""Checks whether an implementation selects the same blocks as the reference in every row.

    python -m bench.indices --kernels mosaic
    python -m bench.indices --framework torch --kernels sdpa --config smallgroup --input text

A row is one query position and one key/value head. All rows are compared. A row that differs
counts as explained if the difference in score is below the resolution of float32
(`bench/judge/selection_shortfall.py`). The first rows whose difference is not explained are
printed.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from nsa_core import flags as kernel_flags

from . import run
from .harness import cli, command, exit_status, problems
from .harness.measure import judged_row, shape_of
from .harness.records import Values
from .harness.runners import asked, forward, started
from .judge import selection_shortfall

FLAGS = cli.define(
    framework=("jax", "Framework whose selection is checked.", ["jax", "torch", "both"]),
    config=(
        str,
        "Name of a file in configs/ or a path; default: paper, or tiny without a GPU.",
    ),
    preset="config",
    input=(("random", "text"), "Sources of the input arrays (repeatable).", ("random", "text")),
    seq_len=(int, "Number of tokens, instead of that of the config (paper: 65536)."),
    batch=(int, "Number of sequences, instead of that of the config."),
    dtype=(str, "Precision, instead of that of the config.", problems.PRECISIONS),
    seed=(0, "Seed of the random arrays and of the text model.", None),
    row_seconds=(0.5, "Seconds spent on timing a selection."),
    out=(str, "A new folder, for the records in indices.jsonl."),
    save_records=(False, "Append to bench/records/<device>/indices.jsonl too."),
)


def choices(runners, settings) -> list[tuple[Any, Any]]:
    """Return the implementation of the scores in each framework that has this implementation. The
    flags name the implementation of the selected branch, and the same name applies to the scores.

    Raises:
      ValueError: No framework has an implementation with this name.
      NotImplementedError: The named implementation cannot run, and `--on_unsupported` is `error`.
    """
    name, on_unsupported = kernel_flags.named().selected, kernel_flags.on_unsupported()
    known = {runner.framework: runner.registry.names("scores") for runner in runners}
    able = [r for r in runners if name is None or name in known[r.framework]]
    if not able:
        raise ValueError(f"no framework selects with {name!r}; known: {known}")
    there = lambda r: asked(settings, r)._replace(step="scores", device=None)
    return [(r, r.registry.choose(there(r), name, on_unsupported)) for r in able]


def judge(runner, implementation, inputs, wanted, config) -> tuple[Values, Any]:
    """Return the fields of the record, whose field `comparison` is a `Comparison`, and a function
    that times the step.
    """
    arguments = runner.load(inputs.arguments("scores"))
    select = functools.partial(forward, runner.api, "scores", config, implementation)
    step = runner.prepare(select, arguments)
    chosen = runner.numpy(step()["indices"])
    found = selection_shortfall.compare(
        chosen, wanted, inputs.query, inputs.compressed_key, config
    )
    fields: Values = {
        "comparison": found,
        "rows_checked": wanted.shape[1],
        "rows_differ": found.differing,
    }
    if found.worst:
        error, bound = found.worst
        fields |= {"error_of": "indices", "error_max": error, "error_bound": bound}
    if found.unexplained:
        reason = f"{found.unexplained} of {found.rows} rows unexplained: {found.report(1)}"
        fields |= {"status": "wrong", "reason": reason}
    return fields, lambda **how: dataclasses.asdict(step.time(**how))


def main(argv: Sequence[str]) -> int:
    lines = command.new_folder(FLAGS.out) / "indices.jsonl" if FLAGS.out else None
    runners, gpu = started(FLAGS.framework)
    given = {"seq_len": FLAGS.seq_len, "batch": FLAGS.batch, "precision": FLAGS.dtype}
    settings = problems.settings(FLAGS.config or ("paper" if gpu else "tiny"), given)
    chosen, config = choices(runners, settings), settings.nsa
    shape, compared = dataclasses.asdict(shape_of(settings)), []
    devices = ", ".join(dict.fromkeys(x.device for x in runners))
    print(f"device: {devices}; {shape}; selection of {config}\n")

    def rows():
        for kind in dict.fromkeys(FLAGS.input):
            inputs = problems.make(settings, kind, FLAGS.seed)
            wanted = selection_shortfall.expected(inputs.query, inputs.compressed_key, config)
            for runner, choice in chosen:
                of = runner, choice.implementation, inputs, wanted, config
                row = judged_row(f"{kind} {runner.framework}", functools.partial(judge, *of))
                found = row.timed(seconds=FLAGS.row_seconds)
                compared.append(found.pop("comparison", None))
                about = command.about(runner, settings, inputs) | found
                about |= {"branch": "scores", "mode": "forward"}
                about["implementation"] = choice.implementation
                yield about | {"refused": dict(choice.refused)}

    def show(row):
        found = compared[-1]
        if found is None:
            return {}
        report = f"\n{found.report()}" if "status" in row else None
        return {"rows": found.rows, "unexplained": found.unexplained, "report": report}

    statuses = run.rows("indices", FLAGS, rows(), show, "indices.jsonl", lines)
    print(
        "shortfall: the best score that a row left out minus the worst score that it selected, "
        "and the resolution\nof float32, both divided by the larger of the two scores; shown is "
        "the row that uses most of its bound"
    )
    return exit_status.of_statuses(statuses)


if __name__ == "__main__":
    cli.run(main, FLAGS)
