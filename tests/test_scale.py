"""Scaling over devices: counts, the model, what is refused, how the command ends."""

import contextlib
import io
import itertools
import types

import pytest
import torch

import nsa_torch
from bench import scale
from bench.harness import exit_status, records, scale_model, scale_ranks, scale_rows
from bench.harness.scale_problem import Problem, judged
from nsa_core.config import NSAConfig
from tests.commands import called
from tests.tables import table

TABLE = table("bench")
PROBLEM = TABLE["problem of scaling"]
COLUMNS = 1024 * 2 * (64 + 32)


def row(devices, ms, **fields):
    times = {"compute_ms": ms, "devices": devices, "ms": ms}
    return PROBLEM | TABLE["row of scaling"] | times | fields


def test_bytes_of_transport():
    """In 16 bits two bytes per number and a gather forward; twice that and a sum in float32 with
    backward.
    """
    forward = row(1, 1.0) | {"mode": "forward"}
    assert scale_model.moved_bytes(forward, 1) == 0
    assert scale_model.moved_bytes(forward, 2) == COLUMNS * 2 / 2
    assert scale_model.moved_bytes(forward | {"dtype": "float32"}, 2) == COLUMNS * 4 / 2
    assert scale_model.moved_bytes(row(1, 1.0), 4) == COLUMNS * 8 * 3 / 4


def test_a_model_finds_what_its_rows_were_made_of():
    bandwidth = scale_model.moved_bytes(row(2, 1.0), 2) / 3e-3  # 3 ms with two devices
    alone = row(1, 100.0)
    several = row(2, 54.0, compute_ms=52.5, transport_ms=3.0)
    ms = scale_model.fitted([alone, several])
    assert ms is not None and ms(1) == 100.0
    assert ms(2) == pytest.approx(52.5 + 3 / 2)  # one of two heads is not hidden
    eight = 3e-3 * (7 / 8) / (1 / 2) * 1e3
    assert ms(8) == pytest.approx(100 / 8 * 1.05 + eight / 2)
    # Links a hundred times slower hide behind nothing.
    slow, compute = 100 * eight, 100 / 8 * 1.05
    assert ms(8, bandwidth / 100) == pytest.approx(compute + slow / 2 + (slow - compute) / 2)
    assert scale_model.fitted([alone]) is scale_model.fitted([several]) is None


def test_efficiency_is_of_the_same_problem_on_one_device():
    rows = [row(1, 100.0), row(2, 62.5)]
    assert scale.derived(row(2, 62.5), rows)["efficiency"] == 0.8
    assert scale.derived(row(2, 62.5), rows[1:])["efficiency"] is None
    longer = row(1, 1.0) | {"S": 2048}
    packed = row(1, 1.0) | {"documents": [1000, 24]}
    assert len(scale_model.by_problem([*rows, longer, packed])) == 3


def test_the_newest_row_of_one_device_counts():
    """A file of records has one of each run."""
    rows = [row(1, 100.0), row(1, 80.0), row(2, 50.0, transport_ms=1.0)]
    assert scale.derived(row(2, 50.0), rows)["efficiency"] == 0.8
    ms = scale_model.fitted(rows)
    assert ms is not None and ms(1) == 80.0


def test_rows_are_found_among_the_words_of_other_ranks(monkeypatch):
    """All write to one log, each of them at any moment."""
    log = []

    class Shared(io.StringIO):
        def write(self, text):
            log.append(f"{text}... 10 s")
            return len(text)

    def run(name, words, folder, *_, **__):
        (folder / f"{name}.log").write_text("".join(log))
        return types.SimpleNamespace(reason="")

    def main(_):
        with contextlib.redirect_stdout(Shared()):
            scale.work(2)
        return scale.measured(2)

    measure = types.SimpleNamespace(devices=contextlib.nullcontext, row=lambda *_: {"ms": 1.0})
    monkeypatch.setattr(scale.importlib, "import_module", lambda *_: measure)
    monkeypatch.setattr(scale, "problems", lambda _: [problem(), problem(S=2048)])
    monkeypatch.setattr(scale.process, "run", run)
    monkeypatch.setattr(scale, "main", main)
    rows, _ = called(scale)
    assert [(x["S"], x["ms"]) for x in rows] == [(1024, 1.0), (2048, 1.0)]


def test_ranks_part_where_one_fails(monkeypatch):
    ended = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_: None)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: ended.append(True))
    monkeypatch.setattr(scale_ranks, "init_device_mesh", lambda *_, **__: "the mesh")
    with pytest.raises(KeyError), scale_ranks.devices(2) as mesh:
        assert mesh == "the mesh" and not ended
        raise KeyError
    assert ended


def problem(**fields):
    return Problem(**PROBLEM | fields, checked=0)


@pytest.mark.parametrize("dtype, alone, errors, bad, words", TABLE["errors of several devices"])
def test_several_devices_may_err_twice_as_much_as_one(dtype, alone, errors, bad, words):
    """In float32 a few tokens are judged, beside the oracle."""
    found = judged(problem(dtype=dtype), errors, alone, stray="gradient" in words)
    assert ("status" in found) == bool(words) and found.get("status", "wrong") == "wrong"
    reason = found.get("reason", "")
    assert [x for x in errors if f"'{x}'" in reason] == bad and words in reason


@pytest.mark.parametrize("words, lengths, documents", TABLE["lengths of scaling"])
def test_problems_of_flags(words, lengths, documents, monkeypatch):
    """Weak scaling has as many tokens a device; documents are a packed row."""
    monkeypatch.setattr(scale, "main", lambda _: scale.problems(4))
    found = called(scale, "--mode=forward", words)
    assert [x.S for x in found] == lengths
    assert all([*x.documents] == documents for x in found)


@pytest.mark.parametrize("rows, reason, status", TABLE["ends of scaling"])
def test_how_it_ends(rows, reason, status, monkeypatch, tmp_path, capsys):
    out, status = tmp_path / "scale.jsonl", getattr(exit_status, status)
    rows = [row(*x[:2], **dict(*x[2:])) for x in rows]
    found = lambda size: ([x for x in rows if x["devices"] == size], reason)
    monkeypatch.setattr(scale, "measured", found)
    assert called(scale, "--devices=1,2 --lengths=1024 --out", out) == status
    lines = records.flat_lines(out)
    assert [line["devices"] for line in lines] == [x["devices"] for x in rows]
    if status == exit_status.OK:
        assert lines[1]["tokens_s_device"] == 1024 / 5.0 / 2 * 1e3
        assert lines[1]["efficiency"] == 0.8 and lines[1]["exposed_ms"] == 0
        # No row has its transport.
        assert called(scale, "--predict=8 --records", out) == exit_status.NOT_MEASURED
        assert "no problem was measured" in capsys.readouterr().out


CONFIG = NSAConfig(8, 4, 16, num_selected=4, num_initial=1, num_local=1, window=10)


@pytest.mark.parametrize("documents", [(), (5, 95, 100)])
def test_rows_are_those_of_the_reference(documents):
    sizes = {"S": 200, "H": 6, "D": 16, "Dv": 8, "dtype": "float32"}
    case = problem(**sizes, config=CONFIG, documents=documents)
    draw = torch.Generator().manual_seed(0)
    query, key, value, gates = (
        torch.randn(1, case.S, *shape, generator=draw, dtype=torch.float64, requires_grad=True)
        for shape in case.shapes
    )
    rows = scale_rows.rows_of(case)
    assert rows[0] == 0 and rows[-1] == 199 and len(rows) == scale_rows.ROWS
    _, position = scale_rows.places(case)
    indices = scale_rows.selection(position, case.Hkv, CONFIG)
    own = position // CONFIG.select_block
    for at, head in itertools.product(range(case.S), range(case.Hkv)):
        blocks = [x for x in indices[at, head].tolist() if x >= 0]
        assert blocks == sorted(set(blocks)) and blocks[-1] == own[at]
        assert len(blocks) == min(CONFIG.num_selected, own[at] + 1)
    own = query[0, rows], gates[0, rows], indices[rows]
    found = scale_rows.oracle(case, rows, *own, key[0], value[0])
    borders = torch.tensor([0, *itertools.accumulate(documents)]) if documents else None
    options = {"config": CONFIG, "block_indices": indices[None], "cu_seqlens": borders}
    out = nsa_torch.attention(query, key, value, gates, **options, implementation="reference")
    assert (found - out[0, rows]).abs().max() < 1e-12
    weights = torch.zeros_like(out)
    weights[0, rows] = torch.randn(len(rows), case.H, case.Dv, dtype=out.dtype, generator=draw)
    arrays = query, key, value, gates
    expected = torch.autograd.grad(out, arrays, weights)
    gradients = torch.autograd.grad(found, arrays, weights[0, rows])
    for x, y in zip(gradients, expected, strict=True):
        assert (x - y).abs().max() < 1e-12
