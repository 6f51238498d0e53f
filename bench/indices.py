"""Whether an implementation selects the blocks that the reference selects, in every row.

    python -m bench.indices --kernels mosaic
    python -m bench.indices --framework torch --kernels sdpa --config smallgroup --input text

Not a sample: every query position and key/value head. A row that differs is explained when what
it gives up is below what float32 resolves of these scores
(`bench/judge/selection_shortfall.py`). The first rows that are not explained are printed.
"""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from absl import flags

from nsa_core import flags as kernel_flags

from .harness import cli, command, exit_status, problems, records
from .harness.markdown import number, table
from .harness.records import Record
from .harness.runners import RUNNERS, forward, out_of_memory, problem
from .judge import selection_shortfall

log = logging.getLogger(__name__)

FRAMEWORK = flags.DEFINE_enum("framework", "jax", ["jax", "torch", "both"], "Whose selection.")
CONFIG = flags.DEFINE_string(
    "config", None, "Name of a file in configs/ or a path; default: paper, without a GPU tiny."
)
flags.DEFINE_alias("preset", "config")
INPUT = flags.DEFINE_multi_enum(
    "input", ["random", "text"], ["random", "text"], "Where the arrays come from (repeatable)."
)
SEQ_LEN = flags.DEFINE_integer(
    "seq_len", None, "Tokens, instead of the config's (paper: 65536).", lower_bound=1
)
BATCH = flags.DEFINE_integer(
    "batch", None, "Sequences, instead of the config's.", lower_bound=1
)
DTYPE = flags.DEFINE_enum(
    "dtype", None, list(problems.PRECISIONS), "Precision, instead of the config's."
)
SEED = flags.DEFINE_integer("seed", 0, "Of the random arrays and of the text model.")
SECONDS = flags.DEFINE_float(
    "row_seconds", 0.5, "Time spent on samples of a selection.", lower_bound=0
)
OUT = flags.DEFINE_string("out", None, "A new folder, for the records in indices.jsonl.")
SAVE = flags.DEFINE_bool(
    "save_records", False, "Append to bench/records/<device>/indices.jsonl too."
)
COMMIT = cli.define_commit()
TITLES = ("input", "framework", "implementation", "status", "rows", "differ", "unexplained")
TITLES += ("shortfall", "float32 resolves", "ms")


def choices(runners, settings) -> list[tuple[Any, Any]]:
    """The implementation that each framework selects with: scores go with `selected`.

    Raises:
      ValueError: no framework has an implementation of the name.
      NotImplementedError: one that was named refuses, and `--on_unsupported` is error.
    """
    name, found = kernel_flags.named().selected, []
    able = [r for r in runners if name is None or name in r.registry.names("scores")]
    if not able:
        known = {runner.framework: runner.registry.names("scores") for runner in runners}
        raise ValueError(f"no framework selects with {name!r}; known: {known}")
    for runner in able:
        asked = problem(settings, runner.framework, runner.platform, runner.capability)
        asked = asked._replace(step="scores")
        choice = runner.registry.choose(asked, name, kernel_flags.on_unsupported())
        found.append((runner, choice))
    return found


def measure(runner, implementation, inputs, wanted, config, seconds) -> dict[str, Any]:
    """The fields of the record, and under `comparison` what they come from, if there is one."""
    arguments = runner.load(inputs.arguments("scores"))

    def function(arguments):
        return forward(runner.api, "scores", config, implementation, arguments)

    try:
        step = runner.prepare(function, arguments)
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
            return fields | {"status": "wrong", "reason": reason}
        return fields | dataclasses.asdict(step.time(seconds))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".strip()
        if out_of_memory(error):
            return {"status": "oom", "reason": reason.splitlines()[0]}
        log.exception("%s %s", runner.framework, implementation)
        return {"status": "error", "reason": reason}


def row(record: Record, found: selection_shortfall.Comparison | None) -> Sequence[str]:
    """A row of the table."""
    counts = ("-",) * 3
    if found is not None:
        counts = (str(found.rows), str(found.differing), str(found.unexplained))
    cells = (record.input, record.framework, record.implementation, record.status, *counts)
    cells += (number(record.error_max, ".2g"), number(record.error_bound, ".2g"))
    return *cells, number(record.time_ms, ".4g")


def main(argv: Sequence[str]) -> int:
    lines = command.new_file(OUT.value, "indices.jsonl") if OUT.value else None
    names = ("jax", "torch") if FRAMEWORK.value == "both" else (FRAMEWORK.value,)
    runners = [RUNNERS[name]() for name in names]
    gpu = any(runner.device != "cpu" for runner in runners)
    given = {"seq_len": SEQ_LEN.value, "batch": BATCH.value, "precision": DTYPE.value}
    settings = problems.settings(
        CONFIG.value or ("paper" if gpu else "tiny"),
        {name: value for name, value in given.items() if value is not None},
    )
    chosen = choices(runners, settings)
    config = settings.nsa
    done, rows, reports = [], [], []
    for kind in dict.fromkeys(INPUT.value):
        inputs = problems.make(settings, kind, SEED.value)
        wanted = selection_shortfall.expected(inputs.query, inputs.compressed_key, config)
        for runner, choice in chosen:
            fields = measure(
                runner, choice.implementation, inputs, wanted, config, SECONDS.value
            )
            found = fields.pop("comparison", None)
            fields |= {"branch": "scores", "mode": "forward", "refused": dict(choice.refused)}
            record = records.record(
                "indices",
                COMMIT.value,
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
    print(table(TITLES, rows))
    print(
        "shortfall: of the row that uses most of its bound, the best score left out less the "
        "worst\ntaken in place of it, and what float32 resolves, over the larger of the two "
        "scores"
    )
    for report in reports:
        print(f"\n{report}")
    if SAVE.value:
        records.keep(done, "indices.jsonl")
    return exit_status.of(done)


if __name__ == "__main__":
    cli.run(main)
