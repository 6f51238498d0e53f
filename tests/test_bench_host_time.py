"""`bench.host_time`: its rows from posed samples, and its two forms."""

import json
import sys

import pytest
import torch
from absl import flags

from bench import host_time
from bench.harness import records, timing
from kernels_pallas.runtime import sequence
from nsa_torch import plans
from tests import commands, pretend
from tests.limits import set_limits
from tests.refusals import refused


def main(*words):
    return commands.called(host_time, *words)


def rows_of(folder, words):
    """What a run that succeeds writes."""
    out = folder / "host.jsonl"
    assert main(words, f"--out={out} --commit=abc") == 0
    return records.flat_lines(out)


def test_a_process_measures_its_form(monkeypatch, capsys):
    """Launches were once graphs in both forms."""
    pretend.gpu(monkeypatch)
    set_limits(monkeypatch, graph_after=3)
    monkeypatch.setattr(host_time, "one_form", lambda _: iter([sequence.GRAPH_AFTER]))
    assert main("--form=each") == main("--form=graphs") == 0
    each, graphs = capsys.readouterr().out.split()
    assert json.loads(each) == [sys.maxsize] and json.loads(graphs) == [3]


def test_a_lost_process_fails_the_run(monkeypatch, capsys):
    pretend.gpu(monkeypatch)
    monkeypatch.setattr(sys, "executable", "false")
    assert main("--rounds=1") == 1
    assert "graphs: exit status 1" in capsys.readouterr().out


def test_without_a_gpu_nothing_is_measured(monkeypatch):
    pretend.gpu(monkeypatch, None)
    with refused("Hopper", NotImplementedError):
        main()
    with pytest.raises(flags.IllegalFlagValueError):
        main("--calls=0")


def test_forms_of_a_call_stand_side_by_side(monkeypatch, capsys, tmp_path):
    """Numbers are medians over the rounds, and words stay."""
    pretend.gpu(monkeypatch)
    parts = [
        f"{x}_{y}" for x in ("host", "done", "row", "replay") for y in ("ms", "p20", "p80")
    ]
    parts += ["graphs_a_call", "python_million_ms", "torch_add_ms"]
    numbers = iter((1.0, 1.0, 5.0, 5.0, 2.0, 2.0))

    def answer(command, form, *words):
        found = dict.fromkeys(parts, next(numbers)) | {"form": form.partition("=")[2]}
        return 0, [found | {"shape": x, "pass": y} for x in "ab" for y in "fg"]

    monkeypatch.setattr(host_time.process, "answer", answer)
    rows = rows_of(tmp_path, "--rounds=3")
    told = [line.split()[:3] for line in capsys.readouterr().out.splitlines()[:8]]
    assert told == [[x, y, z] for x in "ab" for y in "fg" for z in host_time.FORMS]
    assert {row[x] for row in rows for x in parts} == {2.0}


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    rows = rows_of(tmp_path, "--rounds=1 --calls=5")
    assert len(rows) == 12 and all(0 < row["host_ms"] <= row["done_ms"] for row in rows)
    assert {(row["commit"], row["implementation"]) for row in rows} == {("abc", "mosaic")}
    for row in rows:
        assert (row["graphs_a_call"] > 0) == (row["form"] == "graphs"), row


def test_one_launch(monkeypatch, tmp_path, capsys):
    """A row of launches is those of one kernel, each on what the last one wrote."""
    pretend.gpu(monkeypatch)
    took = iter([3.0, 1.0, 4.0, 5.0, 3.0, 6.0])
    monkeypatch.setattr(host_time, "microseconds", lambda row, calls: next(took))
    rows = rows_of(tmp_path, "--launch --rounds=2")
    assert [(row["variant"], row["time_ms"]) for row in rows] == [
        ("torch, each by itself", 4),
        ("torch, as graphs", 2),
        ("JAX, a compiled program", 5),
    ]
    assert "torch, each by itself: us 4.000" in capsys.readouterr().out
    given = []
    last = host_time.chain(lambda *x: given.append(x[1:]) or (x[2] + 1,), 3, "gate", 0)
    assert last == 3 and given == [("gate", 0), ("gate", 1), ("gate", 2)]
    plan = plans.Planned(lambda ops, *x: [host_time.chain(ops.run, 5, *x)]).plan(
        [torch.ones(1, 64, 1), torch.ones(64, 64, dtype=torch.bfloat16)], None
    )
    assert [step.name for step in plan.steps] == ["gated_sum"] * 5
    waited = []
    found = timing.in_a_row(lambda: 7, 10, 5, wait=waited.append, done=True, warmup=2)
    assert len(found) == 5 and min(found) > 0 and waited.count(7) == 2 * 7


@pytest.mark.gpu
def test_one_launch_on_a_gpu(tmp_path):
    rows = rows_of(tmp_path, "--launch --rounds=1 --calls=5")
    assert len(rows) == 3 and all(0 < row["time_ms"] < 1000 for row in rows)
