"""Whether an implementation selects the blocks that the reference selects, in every row.

    python -m bench.indices --kernels mosaic
    python -m bench.indices --framework torch --kernels sdpa --config smallgroup --input text

Every query position and key/value head is compared. A row that differs is explained when what
it gives up is below what float32 resolves of these scores
(`bench/judge/selection_shortfall.py`). The first rows that are not explained are printed.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from nsa_core import flags as kernel_flags

from . import tables
from .harness import cli, command, exit_status, problems, records
from .harness.markdown import table
from .harness.measure import judged_row
from .harness.records import Record
from .harness.runners import RUNNERS, asked, forward
from .judge import selection_shortfall

FLAGS = cli.define(
    framework=("jax", "Whose selection.", ["jax", "torch", "both"]),
    config=(str, "Name of a file in configs/ or a path; default: paper, without a GPU tiny."),
    preset="config",
    input=(("random", "text"), "Where the arrays come from (repeatable).", ("random", "text")),
    seq_len=(int, "Tokens, instead of the config's (paper: 65536)."),
    batch=(int, "Sequences, instead of the config's."),
    dtype=(str, "Precision, instead of the config's.", problems.PRECISIONS),
    seed=(0, "Of the random arrays and of the text model.", None),
    row_seconds=(0.5, "Time spent on samples of a selection."),
    out=(str, "A new folder, for the records in indices.jsonl."),
    save_records=(False, "Append to bench/records/<device>/indices.jsonl too."),
)


def choices(runners, settings) -> list[tuple[Any, Any]]:
    """The implementation that each framework selects with: scores go with `selected`.

    Raises:
      ValueError: no framework has an implementation of the name.
      NotImplementedError: one that was named refuses, and `--on_unsupported` is error.
    """
    name, on_unsupported = kernel_flags.named().selected, kernel_flags.on_unsupported()
    known = {runner.framework: runner.registry.names("scores") for runner in runners}
    able = [r for r in runners if name is None or name in known[r.framework]]
    if not able:
        raise ValueError(f"no framework selects with {name!r}; known: {known}")
    there = lambda r: asked(settings, r)._replace(step="scores", device=None)
    return [(r, r.registry.choose(there(r), name, on_unsupported)) for r in able]


def judge(runner, implementation, inputs, wanted, config) -> tuple[dict[str, Any], Any]:
    """The fields of the record with the `Comparison`, and a function that times the step."""
    arguments = runner.load(inputs.arguments("scores"))
    select = functools.partial(forward, runner.api, "scores", config, implementation)
    step = runner.prepare(select, arguments)
    chosen = runner.numpy(step(arguments)["indices"])
    found = selection_shortfall.compare(
        chosen, wanted, inputs.query, inputs.compressed_key, config
    )
    fields: dict[str, Any] = {
        "comparison": found,
        "rows_checked": wanted.shape[1],
        "rows_differ": found.differing,
    }
    worst = found.worst
    if worst is None or worst.shortfall is not None:
        error, bound = (0.0, None) if worst is None else worst.relative
        fields |= {"error_of": "indices", "error_max": error, "error_bound": bound}
    if found.unexplained:
        reason = f"{found.unexplained} of {found.rows} rows unexplained: {found.report(1)}"
        fields |= {"status": "wrong", "reason": reason}
    return fields, lambda **how: dataclasses.asdict(step.time(**how))


def row(record: Record, found: selection_shortfall.Comparison | None) -> dict[str, str]:
    """A row of the table."""
    counts = {} if found is None else {"rows": found.rows, "unexplained": found.unexplained}
    line = vars(record) | counts | {"fate": record.status, "status": "ok"}
    return tables.rows("indices", [line])[0]


def main(argv: Sequence[str]) -> int:
    lines = command.new_file(FLAGS.out, "indices.jsonl") if FLAGS.out else None
    names = ("jax", "torch") if FLAGS.framework == "both" else (FLAGS.framework,)
    runners = [RUNNERS[name]() for name in names]
    gpu = any(runner.device != "cpu" for runner in runners)
    given = {"seq_len": FLAGS.seq_len, "batch": FLAGS.batch, "precision": FLAGS.dtype}
    settings = problems.settings(
        FLAGS.config or ("paper" if gpu else "tiny"),
        {name: value for name, value in given.items() if value is not None},
    )
    chosen = choices(runners, settings)
    config = settings.nsa
    done, rows, reports = [], [], []
    for kind in dict.fromkeys(FLAGS.input):
        inputs = problems.make(settings, kind, FLAGS.seed)
        wanted = selection_shortfall.expected(inputs.query, inputs.compressed_key, config)
        for runner, choice in chosen:
            of = runner, choice.implementation, inputs, wanted, config
            measured = judged_row(f"{kind} {runner.framework}", functools.partial(judge, *of))
            fields = measured.timed(seconds=FLAGS.row_seconds)
            found = fields.pop("comparison", None)
            fields |= {"branch": "scores", "mode": "forward", "refused": dict(choice.refused)}
            record = records.record(
                "indices",
                FLAGS.commit,
                implementation=choice.implementation,
                **command.about(runner, settings, inputs),
                **fields,
            )
            done.append(record)
            rows.append(row(record, found))
            if record.status != "ok":
                report = found.report() if found else record.reason
                name = f"{kind} {runner.framework} {choice.implementation}"
                reports.append(f"{name}: {record.status}\n{report}")
            if lines is not None:
                records.append(lines, [record])
    sizes = ("B", "T", "H", "Hkv", "D", "dtype")
    shape = " ".join(f"{name}={getattr(done[0], name)}" for name in sizes)
    devices = ", ".join(dict.fromkeys(record.device for record in done))
    print(f"device: {devices}; {shape}; selection of {config}\n")
    print(table(rows[0], (cells.values() for cells in rows)))
    print(
        "shortfall: of the row that uses most of its bound, the best score left out less the "
        "worst\ntaken in place of it, and what float32 resolves, over the larger of the two "
        "scores"
    )
    for report in reports:
        print(f"\n{report}")
    if FLAGS.save_records:
        records.keep(done, "indices.jsonl")
    return exit_status.of(done)


if __name__ == "__main__":
    cli.run(main, FLAGS)
