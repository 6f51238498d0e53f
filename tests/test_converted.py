"""`bench.lm.converted`: what its lines say of runs that begin and learn alike."""

import pytest

from bench.harness import records
from bench.lm import converted
from nsa_torch.huggingface.convert import STARTS
from tests import commands

SMALL = converted.Preset(
    *(16, 32, 1, 2, 1),
    dict(compress_block=4, compress_stride=2, select_block=4, num_selected=4, window=8),
    length=48,
    batch=2,
    steps=3,
    after=2,
    every=1,
    lr=1e-2,
    after_lr=1e-2,
)


def run(folder, *arguments):
    assert commands.called(converted, f"--out={folder}", *arguments) == 0
    return records.flat_lines(folder / "converted.jsonl")


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(converted.PRESETS, "tiny", SMALL)


def test_lines_of_runs_that_begin_alike(small, tmp_path, capsys):
    lines = run(tmp_path, "--preset=tiny", "--seed=1", "--commit=c0ffee")
    found = {(x["run"], x["step"]): x for x in lines}
    assert {x["commit"] for x in lines} == {"c0ffee"}
    assert set(found) == {(x, i) for x in ("dense", *STARTS) for i in range(3)}
    for name in ("loss", "within", "beyond"):
        assert len({found[x, 0][name] for x in STARTS}) == 1
    assert found["values", 0]["within"] == pytest.approx(found["dense", 0]["within"], abs=1e-5)
    assert found["values", 0]["beyond"] != pytest.approx(found["dense", 0]["beyond"], abs=1e-7)
    for name in ("dense", *STARTS):
        losses = [found[name, i]["loss"] for i in range(3)]
        assert len(set(losses)) == 3 and losses[-1] < losses[0]
    assert found["dense", 0]["preset"]["length"] == 48
    assert "| values | 2 | " in capsys.readouterr().out


def test_no_row_is_seen_twice():
    learned, held, _ = converted.rows(SMALL, 0)
    assert learned.shape == (10, 49) and held.shape == (converted.HELD, 49)
    assert len({x.tobytes() for x in (*learned, *held)}) == 10 + converted.HELD
    other, same, _ = converted.rows(SMALL, 1)
    assert (same == held).all() and not (other == learned).all()
    assert sorted(x.tobytes() for x in other) == sorted(x.tobytes() for x in learned)


def test_a_text_that_is_too_short(small, tmp_path):
    with pytest.raises(ValueError, match=r"corpus in .* has .* bytes, expected"):
        run(tmp_path, "--preset=tiny", "--steps=1000000")
    assert not list(tmp_path.iterdir())
