"""How commands end: the same four numbers everywhere, and a sign of life while they work."""

import importlib
import io
import logging
import re
import sys
import time

import pytest
from absl import app, flags
from absl.testing import flagsaver

from bench import compare, summarize
from bench.harness import cli, exit_status, heartbeat, problems, records
from bench.harness.process import ROOT
from nsa_core import debug
from tests import spawned
from tests.commands import SIZES, break_sliding, called, run, start
from tests.measured import record
from tests.tables import table


@pytest.mark.parametrize("asked_for, beside, expected", table("bench")["ends of a command"])
def test_what_was_asked_for_decides(asked_for, beside, expected):
    rows = (
        [record("sliding", "fa2", 1.0, status=x, reason="for a reason") for x in each.split()]
        for each in (asked_for, beside)
    )
    assert exit_status.of(*rows) == getattr(exit_status, expected)


@pytest.mark.parametrize("ends, expected", table("bench")["ends of several"])
def test_several_commands_end_as_the_worst(ends, expected):
    assert exit_status.worst(ends) == getattr(exit_status, expected)


def command_of(name):
    return importlib.import_module(f"bench.{name}")


REFUSED = [
    (command, *row) for command, rows in table("refused_words").items() for row in rows.items()
]


@pytest.mark.parametrize("command, words, said", REFUSED)
def test_words_that_are_refused(command, words, said, tmp_path):
    module = command_of(command)
    out = tmp_path / "out"
    given = [f"--out={out}"] * ("out" in module.FLAGS and "out" not in words)
    with pytest.raises(
        (ValueError, NotImplementedError, OSError, flags.Error, app.UsageError), match=said
    ):
        called(module, *given, *words.replace("{out}", str(out)).split())
    assert not out.exists()


@pytest.mark.parametrize("command, words, statuses, time", table("bench")["refusing"])
def test_a_kernel_that_refuses_is_a_row(command, words, statuses, time, tmp_path):
    code, found, (row,) = run(command_of(command), tmp_path, words.format(SIZES))
    assert code == exit_status.NOT_MEASURED and " ".join(r.status for r in found) == statuses
    assert row["status"] == "unsupported" and row[time] == ""
    assert "needs a Hopper GPU" in row["reason"] and {*row["kernel"].split("/")} == {"mosaic"}


@pytest.mark.parametrize("command, words, columns, said", table("bench")["wrong"])
def test_what_is_wrong_has_no_time(
    command, words, columns, said, tmp_path, capsys, monkeypatch
):
    break_sliding(monkeypatch)
    given = words.format(SIZES), "--framework=jax"
    code, found, (*_, row) = run(command_of(command), tmp_path, *given)
    assert code == exit_status.WRONG and row["status"] == "wrong"
    assert all((r.status == "wrong") == (r.branch in ("sliding", "all")) for r in found)
    assert {row[name] for name in columns.split()} == {""} and "max error" in row["reason"]
    printed = capsys.readouterr().out
    assert all(words in printed for words in said)


def test_a_file_that_takes_no_lines_is_refused_before_a_measurement(tmp_path):
    """Where `--out` is a folder, ends within a line, would be below a file, or cannot be made."""
    cut = tmp_path / "cut.jsonl"
    cut.write_text('{"schema": 1')
    for path, said in {
        tmp_path: "must be a regular file or not exist",
        cut: "must end with a complete line",
        cut / "more.jsonl": "cut.jsonl is not a folder",
        "/proc/rows.jsonl": "No such file or directory",
    }.items():
        own = flags.FlagValues()
        cli.define_lines(own)
        with pytest.raises(flags.IllegalFlagValueError, match=said):
            own(["command", f"--out={path}"])
    own = flags.FlagValues()
    holder = cli.define_lines(own)
    own(["command", f"--out={tmp_path}/new/rows.jsonl"])
    assert holder.value and list(tmp_path.iterdir()) == [cut]


@pytest.mark.parametrize(
    "program, typed",
    [
        (["-m", "bench.compare"], "python -m bench.compare"),
        (["-m", "nsa_bench.compare"], "python -m nsa_bench.compare"),
        (["nsa-compare"], "nsa-compare"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_a_command_is_called_what_was_typed(program, typed, tmp_path):
    """In its help and in what it says of a fault, which is shorter than the help."""
    script = tmp_path / "nsa-compare"
    script.write_text("from nsa_core.scripts import compare\ncompare()\n")
    words = [str(script) if word == script.name else word for word in program]

    def said(*arguments):
        done = spawned.python("-W", "ignore", *words, *arguments, PYTHONPATH=str(ROOT))
        return done.returncode, done.stdout, done.stderr

    status, told, _ = said("--help")
    assert status == exit_status.OK and f"    {typed} --framework both\n" in told
    assert exit_status.TABLE.strip() in told
    assert f"\n{typed}:\n" in told and not re.search(
        r"(?<!\w)bench\.compare", told.replace(typed, "")
    )
    status, told, faults = said("a.jsonl", "b.jsonl")
    assert (status, told) == (exit_status.USAGE, "")
    assert faults.splitlines() == [
        "error: unexpected argument 'a.jsonl'",
        f"{typed} --help shows the flags",
    ]


def test_bad_flags_are_usage_errors(capsys):
    for bad in "--no_such_flag --log=everything --log_limit=0".split():
        with pytest.raises(SystemExit) as end:
            cli._parse(["summarize", bad])
        assert end.value.code == exit_status.USAGE
        assert "--help shows the flags" in capsys.readouterr().err
    flags.FLAGS.unparse_flags()
    for name in ("log", "log_limit"):
        flags.FLAGS[name].unparse()
    flags.FLAGS(["test"])


def raising(error):
    def main(argv):
        raise error

    return main


def test_faults_by_kind(tmp_path, capsys):
    assert start(raising(ValueError("length must be over 0"))) == exit_status.USAGE
    assert start(raising(NotImplementedError("needs a GPU"))) == exit_status.NOT_MEASURED
    assert start(summarize.main, str(tmp_path / "none.csv")) == exit_status.USAGE
    assert start(summarize.main) == exit_status.USAGE
    assert capsys.readouterr().err.count("error: ") == 4
    assert start(raising(KeyboardInterrupt())) == exit_status.INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"
    with pytest.raises(RuntimeError):  # Python's own status is 1
        start(raising(RuntimeError("the kernel broke")))


KEEPING = """against call_kernels compare counters first_call gpu_tests host_time indices
memory_check packed prefill scale whole_calls"""


@pytest.mark.parametrize("command", KEEPING.split())
def test_records_have_the_commit_of_the_start(command, monkeypatch):
    """Another commit may be made while a command runs."""
    told = []
    monkeypatch.setattr(records, "environment", told.append)
    own = command_of(command).FLAGS
    flags.FLAGS["commit"] = own["commit"]  # as where it is the program
    try:
        with flagsaver.flagsaver(commit="c0ffee"):
            assert start(lambda argv: [*told]) == ["c0ffee"]
    finally:
        del flags.FLAGS.commit


def test_a_silent_command_gives_a_sign(monkeypatch):
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with heartbeat.beating(0.05):
        heartbeat.say("parity of torch sliding")
        time.sleep(0.2)
        signs = err.getvalue().count("... 0 s parity of torch sliding\n")
        for _ in range(20):
            print("a line")
            time.sleep(0.01)
        assert err.getvalue().count("\n") <= signs + 1
    assert signs >= 2 and out.getvalue().count("a line\n") == 20
    assert sys.stdout is out and sys.stderr is err


def test_the_log_tells_of_frameworks_that_were_asked_for():
    """A run of torch printed refusals of JAX, which only made its inputs."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["test"])
    kinds = {"torch": {"nsa_torch"}, "jax": {"nsa_jax"}, "both": {"nsa_jax", "nsa_torch"}}
    loggers = {name: logging.getLogger(f"{name}.timing") for name in debug.FRAMEWORKS}
    before = {name: (x.handlers, x.propagate) for name, x in loggers.items()}
    flags.FLAGS["framework"] = compare.FLAGS["framework"]  # as where it is the program
    try:
        for framework, expected in kinds.items():
            with flagsaver.flagsaver(framework=framework, log=["timing"]):
                cli._log_events()
            told = {
                name
                for name, logger in loggers.items()
                if not isinstance(logger.handlers[0], logging.NullHandler)
            }
            assert told == expected
        assert debug.on
        with problems.unlogged():
            assert not debug.on
        assert debug.on and problems.make.__wrapped__
    finally:
        del flags.FLAGS.framework
        debug.enable()
        for name, logger in loggers.items():
            logger.handlers, logger.propagate = before[name]
