"""`bench.lm.converted`: what its lines say of runs that begin and learn alike."""

import pytest

from bench.harness import records
from bench.lm import converted
from nsa_torch.huggingface.convert import STARTS
from tests import commands
from tests.tables import table

SMALL = converted.Preset(**table("training")["converted"])


def test_lines_of_runs_that_begin_alike(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(converted.PRESETS, "tiny", SMALL)
    runs = [*STARTS, "shared:num_selected=50"]  # every block
    words = "--preset=tiny", "--seed=1", "--commit=c0ffee", f"--runs={','.join(runs)}"
    assert commands.called(converted, f"--out={tmp_path}", *words) == 0
    lines = records.flat_lines(tmp_path / "converted.jsonl")
    found = {(x["run"], x["step"]): x for x in lines}
    assert {x["commit"] for x in lines} == {"c0ffee"}
    assert set(found) == {(x, i) for x in ("dense", *runs) for i in range(3)}
    for name in ("loss", "within", "beyond", "recall", "copied"):
        assert len({found[x, 0][name] for x in STARTS}) == 1
    assert found["values", 0]["within"] == pytest.approx(found["dense", 0]["within"], abs=1e-5)
    assert found["values", 0]["beyond"] != pytest.approx(found["dense", 0]["beyond"], abs=1e-7)
    for name in ("loss", "beyond", "recall", "copied"):
        assert found[runs[-1], 0][name] == pytest.approx(found["dense", 0][name], abs=1e-5)
    for name in ("dense", *runs):
        losses = [found[name, i]["loss"] for i in range(3)]
        assert len(set(losses)) == 3 and losses[-1] < losses[0]
    first = found["dense", 0]
    assert first["preset"]["length"] == 200 and "copied_128" in first
    assert first["loss"] == pytest.approx((16 * first["within"] + 184 * first["beyond"]) / 200)
    assert "| values | 2 | " in capsys.readouterr().out


def test_no_row_is_seen_twice():
    batches = converted.rows(SMALL, 0)
    learned = [x.tobytes() for step in range(5) for x in batches.train(step).tokens[:, 1:]]
    held = [x.tobytes() for each in batches.evaluation(16) for x in each.tokens]
    assert len(set(learned)) == 10 and len(set(held)) == converted.HELD
    other = converted.rows(SMALL, 1)
    assert [x.tobytes() for each in other.evaluation(16) for x in each.tokens] == held
    assert other.train(0).tokens.tobytes() != batches.train(0).tokens.tobytes()
