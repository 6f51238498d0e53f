"""bench.whole_calls: which times it takes of which problem, and that a replay is checked."""

import pytest
import torch

from bench import run as matrix
from bench import whole_calls
from bench.harness import exit_status, records, timing
from tests import commands, pretend


@pytest.fixture
def posed(monkeypatch):
    """Calls that compute 1, whose replays compute what this list holds."""
    replayed = [1.0]

    def calls(problem):
        named = dict.fromkeys(("forward", "fwdbwd"), lambda: (torch.ones(3),))
        return named, lambda results: None

    def cuda_graph(call):
        return lambda: None, (torch.full((3,), replayed[0]),)

    def events(call, *, iters, rest):
        assert rest == 0.05 and iters >= 5
        return timing.Timing.of([7.0] * iters, "cuda_events")

    pretend.gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(whole_calls, "torch_calls", calls)
    monkeypatch.setattr(whole_calls, "jax_calls", calls)
    monkeypatch.setattr(whole_calls, "milliseconds", lambda call, sync: 5.0)
    monkeypatch.setattr(timing, "cuda_graph", cuda_graph)
    monkeypatch.setattr(timing, "time_cuda_events", events)
    return replayed


def run(*words) -> int:
    return commands.called(whole_calls, *words)


def test_lines_of_every_row(posed, tmp_path, capsys):
    out = tmp_path / "variants.jsonl"
    assert run("--commit=0123456789 --out", out) == exit_status.OK
    lines = records.flat_lines(out)
    found = {(x["variant"], x["shape"]): x["time_ms"] for x in lines}
    rested = {f"{p.name}, after 50 ms of rest" for p in matrix.EAGER}
    names = rested | {p.name for p in matrix.CALLS}
    assert found == {
        (name, mode): 7.0 if name in rested else 5.0
        for name in names
        for mode in ("forward", "fwdbwd")
    }
    assert {(x["kernel"], x["commit"]) for x in lines} == {("whole_calls", "0123456")}
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "a GPU, ms" and len(printed) == 1 + len(names)


def test_a_replay_with_other_bits_is_wrong(posed, tmp_path, capsys):
    posed[0] = 2.0
    out = tmp_path / "variants.jsonl"
    assert run("--only=8k, graph", "--only=4k --out", out) == exit_status.WRONG
    _, wrong, other, *_ = capsys.readouterr().out.splitlines()
    assert wrong.startswith("8k, graph, forward: the results with a graph have other bits")
    assert other.startswith("4k: "), "a reason is printed before the next row is measured"
    names = {line["variant"] for line in records.flat_lines(out)}
    assert names == {"4k", "4k, after 50 ms of rest"}


def test_an_unknown_row(posed):
    with pytest.raises(ValueError, match="the names are 64k; 64k, neighbours alike"):
        run("--only=65k")
