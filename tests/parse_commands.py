"""Parses command lines, those of a command in a process of its own: other modules have flags too.

That process is a fork of one that has imported, once for all commands, what defines no flags.
"""

import argparse
import contextlib
import gc
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
WITHOUT_FLAGS = "matplotlib.pyplot nsa_jax.nn nsa_torch.huggingface optax pydantic.main"
LINE = re.compile(
    r"(?:^ *|`)(?P<set>(?:[A-Z_]\w*=\S* )*)(?:python|torchrun(?: --\S+)*)\s+"
    r"(?:-m\s+(?P<module>(?:bench|nsa_\w+)\.[\w.]+)|(?P<path>\w+/\w+\.py))(?P<words>[^\n`]*)",
    re.MULTILINE,
)


class Line(NamedTuple):
    """A command: the variables before it, its module or the path of its script, its words."""

    variables: dict[str, str]
    command: str
    words: list[str]


class Parsed(NamedTuple):
    """Whether a line parses, what is said on stderr, and the values of its flags."""

    ok: bool
    said: str
    values: dict | None


def lines(text: str) -> list[Line]:
    """The commands of a page whose words are parsed by absl or by argparse."""
    text = text.replace("\\\n", "")
    for name, value in re.findall(r'^([A-Z]+)="?(.*?)"?$', text, re.MULTILINE):
        text = text.replace(f"${name}", value)
    found = []
    for each in LINE.finditer(text):
        words = [x.strip("[]") for x in shlex.split(each["words"], comments=True)]
        variables = dict(x.split("=", 1) for x in shlex.split(each["set"]))
        kept = [x for x in words if x not in ("..", "...", "|")]
        found.append(Line(variables, each["module"] or each["path"], kept))
    return [x for x in found if re.search(r"\bcli\.run\(|\.parse_args\(", _source(x.command))]


def _source(command: str) -> str:
    path = re.sub(r"^nsa_(?=bench|interop)", "", command.removesuffix(".py")).replace(".", "/")
    return (ROOT / f"{path}.py").read_text()


def parsed(given: Iterable[Line]) -> list[Parsed]:
    """As each of the commands parses it when it is the program."""
    given = list(given)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__],
        input=json.dumps(given),
        cwd=ROOT,
        env=os.environ
        | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": ""},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    return [Parsed(*found[number]) for number in range(len(given))]


def _of_command(numbered: list[tuple[int, Line]]) -> None:
    """Prints what becomes of the lines of one command, which this process runs up to there."""
    from absl import app, flags

    def each(parse):
        for number, (variables, command, words) in numbered:
            os.environ.update(variables)
            said, values = io.StringIO(), None
            with contextlib.redirect_stderr(said):
                try:
                    values = parse([command, *words])
                except SystemExit as error:
                    print(error, file=sys.stderr)
            result = Parsed(values is not None, said.getvalue(), values)
            print(json.dumps([number, result], default=str))
            for name in variables:
                del os.environ[name]
        sys.stdout.flush()
        os._exit(0)

    def with_absl(start, flags_parser):
        def parse(argv):
            for name in flags.FLAGS:
                flags.FLAGS[name].unparse()
            rest = flags_parser([argv[0].rpartition(".")[2], *argv[1:]])
            status = start.func(lambda argv: 0, *start.args[1:], rest, **start.keywords)
            return None if status else {name: flags.FLAGS[name].value for name in flags.FLAGS}

        each(parse)

    plain = argparse.ArgumentParser.parse_args

    def with_argparse(self, *arguments):
        each(lambda argv: vars(plain(self, argv[1:])))

    app.run, argparse.ArgumentParser.parse_args = with_absl, with_argparse
    command = numbered[0][1].command
    if command.endswith(".py"):
        sys.path.insert(0, str((ROOT / command).parent))
        runpy.run_path(command, run_name="__main__")
    runpy.run_module(command, run_name="__main__", alter_sys=True)


def _main() -> None:
    given = [Line(*x) for x in json.load(sys.stdin)]
    for name in WITHOUT_FLAGS.split():
        __import__(name)
    gc.freeze()  # else a child's first collection copies all of it
    for command in {x.command for x in given}:
        if not (child := os.fork()):
            _of_command([(n, x) for n, x in enumerate(given) if x.command == command])
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{command} parsed nothing")


if __name__ == "__main__":
    _main()
