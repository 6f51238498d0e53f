"""Runs a command of `bench` in this process, as the shell would."""

import csv
import dataclasses
import types

from absl import app, flags
from absl.testing import flagsaver

from bench.harness import cli, command, records
from nsa_core.dispatch import Implementation
from nsa_jax import branches
from nsa_jax.dispatch import REGISTRY


def run(module, folder, *words, table=None):
    """Exit status, the records and the CSV rows that it wrote to `folder`, or to `table`."""
    status = called(module, f"--out={folder}", *words)
    name = module.__name__.rpartition(".")[2]
    lines, table = folder / f"{name}.jsonl", table or folder / f"{name}.csv"
    found = records.read(lines) if lines.exists() else []
    return status, found, rows(table) if table.exists() else []


def called(module, *words):
    """The exit status of a command whose own flags are of these words, and of no others."""
    name = module.__name__.rpartition(".")[2]
    rest = parsed(module.FLAGS, name, *map(str, words), known_only=True)
    with flagsaver.flagsaver():
        return module.main(flags.FLAGS(rest))


def parsed(own, *words, **how):
    """Parses a command's own flags from its name and words, and from no others; the other words."""
    for flag in own:
        own[flag].unparse()
    own.unparse_flags()
    return own(words, **how)


def start(main, *arguments):
    """The status that the program would end with."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["test"])
    if "verbosity" not in flags.FLAGS:
        app.define_help_flags()
    return cli._start(main, True, ["summarize", *arguments])


def results(module, folder):
    """The results of a command of which the rows are given."""
    own = {"out": folder, "csv": None, "save_records": False, "commit": None}
    return command.Results(module.__name__.rpartition(".")[2], types.SimpleNamespace(**own))


def rows(path):
    """The rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def late(query, key, value, *, config, **options):
    """Sliding attention that looks one token too far into the past."""
    wider = dataclasses.replace(config, window=config.window + 1)
    return branches.sliding_attention(query, key, value, config=wider, **options)


def break_sliding(monkeypatch, place=f"{__name__}:late"):
    """From here on JAX's `xla` is the function at `place`, which is wrong, in the sliding
    branch.
    """
    entries = (
        Implementation("xla", place),
        *(e for e in REGISTRY.table["sliding"] if e.name == "reference"),
    )
    monkeypatch.setattr(REGISTRY, "table", {**REGISTRY.table, "sliding": entries})
