"""Runs a command of `bench` in this process, as the shell would."""

import csv

from absl import flags
from absl.testing import flagsaver

from bench import records


def run(module, folder, *arguments, table=None):
    """Exit status, the records and the CSV rows that it wrote to `folder`, or to `table`."""
    own, name = module.FLAGS, module.__name__.rpartition(".")[2]
    for flag in own:
        own[flag].unparse()
    own.unparse_flags()
    rest = own([name, f"--out={folder}", *arguments], known_only=True)
    with flagsaver.flagsaver():
        argv = flags.FLAGS(rest)
        status = module.main(argv)
    found = records.read(folder / f"{name}.jsonl")
    return status, found, rows(table or folder / f"{name}.csv")


def rows(path):
    """The rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
