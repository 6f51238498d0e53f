"""Runs a command of `bench` in this process, as the shell would."""

import csv
import dataclasses
import re
import sys
from unittest import mock

from absl import app, flags
from absl.testing import flagsaver

from bench.harness import cli, records
from nsa_core.config import NSAConfig
from nsa_core.dispatch import Implementation
from nsa_jax import branches
from nsa_jax.dispatch import REGISTRY

# Flags of a small problem on a CPU, and its settings.
SIZES = "--heads=4 --dk=8 --dv=8 --l=8 --d=4 --l_sel=8 --n_sel=4 --w=12 --iters=2 --device=cpu"
CONFIG = NSAConfig(8, 4, 8, 4, 1, 2, 12)


def run(module, folder, *words, table=None):
    """Exit status, the records and the CSV rows that it wrote to `folder`, or to `table`."""
    status = called(module, "--out", folder, *words)
    name = module.__name__.rpartition(".")[2]
    lines, table = folder / f"{name}.jsonl", table or folder / f"{name}.csv"
    found = records.read(lines) if lines.exists() else []
    return status, found, rows(table) if table.exists() else []


def called(module, *words):
    """The exit status of a command whose own flags are of these words, and of no others. Flags may
    be one word, with spaces between them.
    """
    name = module.__name__.rpartition(".")[2]
    argv = [name, *(x for word in words for x in re.split(" (?=--)", str(word)))]
    with flagsaver.flagsaver(), mock.patch.object(sys, "argv", argv):
        return module.main(flags.FLAGS(parsed(module.FLAGS, *argv, known_only=True)))


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


def ends(found):
    """Implementation and status of each record, as text."""
    return ", ".join(f"{r.implementation} {r.status}" for r in found)


def rows(path):
    """The rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def late(query, key, value, *, config, **options):
    """Sliding attention that looks one token too far into the past."""
    wider = dataclasses.replace(config, window=config.window + 1)
    return branches.sliding_attention(query, key, value, config=wider, **options)


def put_in_place(monkeypatch, registry, step, **functions):
    """From here on the implementations of these names are these functions."""
    entries = (
        Implementation(e.name, f"{f.__module__}:{f.__name__}")
        if (f := functions.get(e.name))
        else e
        for e in registry.table[step]
    )
    monkeypatch.setitem(registry.table, step, tuple(entries))


def break_sliding(monkeypatch, function=late):
    """From here on JAX's `xla` is this function, which is wrong, in the sliding branch."""
    put_in_place(monkeypatch, REGISTRY, "sliding", xla=function)
