"""Processes that get ready side by side and take turns; bench.compare with several lengths."""

import json
from typing import ClassVar

import pytest

from bench import compare
from bench.harness import process, records, turns
from tests import pretend
from tests.commands import run
from tests.measured import record

HERE = {"PYTHONPATH": str(process.ROOT)}


def children(tmp_path, *steps):
    log = tmp_path / "order.txt"
    return log, [
        turns.Child(["tests.fake_step", step, str(log)], tmp_path / f"{i}.log", HERE)
        for i, step in enumerate(steps)
    ]


def test_one_after_the_other(tmp_path):
    order, started = children(tmp_path, "turn", "turn", "turn")
    assert [child.ready().split()[0] for child in started] == ["ready"] * 3
    assert not order.exists(), "none begins before its turn"
    for child in (started[2], started[0]):
        assert child.take_turn() == (0, "fake step: turn\ntimed\n")
    started[1].end()
    words = [line.split() for line in order.read_text().splitlines()]
    pids = [str(started[place].process.pid) for place in (2, 2, 0, 0)]
    assert words == [
        [pid, word] for pid, word in zip(pids, ["begins", "ends"] * 2, strict=True)
    ]


def test_one_that_ends_early_is_no_hang(tmp_path):
    _, (broken, failed) = children(tmp_path, "unknown", "fail")
    assert broken.ready().startswith("ended after")
    assert broken.take_turn() == (1, "fake step: unknown\n")
    assert "ValueError" in (tmp_path / "0.log").read_text()
    assert failed.ready().startswith("ended") and failed.take_turn()[0] == 3


def test_without_a_turn_nothing_is_timed(tmp_path):
    order, (child,) = children(tmp_path, "turn")
    child.ready()
    child.process.stdin.close()
    assert child.process.wait() == 1 and not order.exists()
    child.end()


class Pretended:
    """A child whose process writes what it is told to; 2k finds a wrong row, 4k dies."""

    events: ClassVar[list] = []

    def __init__(self, words, log, environment):
        self.words, self.environment = words, environment
        given = dict(word.split("=", 1) for word in words if "=" in word)
        self.length, self.out = int(given["--seq_len"]), given["--out"]

    def ready(self):
        self.events.append(("ready", self.length))
        return "ready after 1 s"

    def take_turn(self):
        self.events.append(("turn", self.length))
        if self.length == 4096:
            return -9, ""
        wrong = self.length == 2048
        row = record("all", "sdpa", None if wrong else 1.0, S=self.length)
        records.append(f"{self.out}/compare.jsonl", [row])
        return int(wrong), f"the table of {self.length}\n"

    def end(self):
        self.events.append(("end", self.length))


@pytest.mark.parametrize(
    "lengths, status", [((1024, 512), 0), ((512, 2048), 1), ((512, 4096), 1)]
)
def test_several_lengths(tmp_path, monkeypatch, capsys, lengths, status):
    monkeypatch.setattr(turns, "Child", Pretended)
    monkeypatch.setattr(Pretended, "events", [])
    pretend.folder(monkeypatch, "records", tmp_path / "records")
    low, high = sorted(lengths)
    words = f"--framework=torch --save_records --seq_len={lengths[0]},{lengths[1]}"
    code, found, _ = run(compare, tmp_path / "out", words)
    assert code == status
    order = [("ready", high), ("ready", low), ("turn", low), ("turn", high)]
    assert Pretended.events == [*order, ("end", low), ("end", high)]
    assert [r.S for r in found] == [n for n in (low, high) if n != 4096]
    (kept,) = (tmp_path / "records").glob("*/compare.jsonl")
    assert records.read(kept) == found
    printed = capsys.readouterr().out
    assert f"the table of {low}" in printed and f"{low} tokens: exit status 0" in printed


def test_rows_of_a_length_are_kept_at_once(tmp_path, monkeypatch):
    """Whatever ends the run later."""

    class Interrupted(Pretended):
        def take_turn(self):
            if self.length == 1024:
                raise KeyboardInterrupt
            return super().take_turn()

    monkeypatch.setattr(turns, "Child", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(compare, tmp_path, "--seq_len=512,1024 --framework=torch")
    assert [r.S for r in records.read(tmp_path / "compare.jsonl")] == [512]


def test_what_a_child_is_asked(tmp_path, monkeypatch):
    """The flags of the run, and its own in their place; JAX gives back memory beside torch."""
    asked = []

    class Asked(Pretended):
        def __init__(self, words, *rest):
            super().__init__(words, *rest)
            asked.append((words, rest))

    monkeypatch.setattr(turns, "Child", Asked)
    for framework in ("torch", "both"):
        words = "--seq_len=512,256 --nosave_records --framework", framework
        run(compare, tmp_path / framework, *words)
    (words, (log, alone)), _, (_, (_, both)), _ = asked
    own = ["--seq_len=512", f"--out={tmp_path / 'torch' / '512'}", "--turn"]
    assert words[0] == "bench.compare" and words[3] == "--seq_len=512,256"
    assert words[-4:] == [*own, "--nosave_records"], "the last of a flag counts"
    assert log == tmp_path / "torch" / "512.log"
    assert json.dumps(alone) == '{"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}' and both == {}
