"""FA-2 beside masked SDPA: the lines, the table, the two calls, and what is wrong."""

import dataclasses
import re

import pytest

from bench import fa2
from bench.harness import exit_status
from bench.harness.runners import TorchRunner
from tests.commands import CONFIG, run
from tests.oracles import nsa

SMALL = "--S_list=40,63 --w_list=12 --heads=2 --dk=8 --dv=8 --l=8 --d=4 --iters=2 --device=cpu"
NUMBER = r"(n/a|\d+\.\d{3} ms)"


def test_without_a_gpu_only_fa2_is_not_timed(tmp_path, capsys):
    status, found, table = run(fa2, tmp_path, SMALL)
    printed = capsys.readouterr().out
    assert status == exit_status.NOT_MEASURED and len(found) == 12
    assert list(table[0])[:8] == "D,T,dtype,sdpa_ms,fa_ms,speedup,sm,device".split(",")
    for r in found:
        portable = r.implementation in ("masked", "sdpa")
        assert r.status == ("ok" if portable else "unsupported")
        assert portable or ("needs CUDA" in r.reason and r.time_ms is None)
        assert (r.bench, r.device, r.samples) == ("fa2", "cpu", 2 * portable)
    assert [" ".join(row[x] for x in ("branch", "S", "w")) for row in table] == [
        "sliding 40 12",
        "sliding 63 12",
        "compressed 40 ",
        "compressed 63 ",
    ]
    for row in table:
        assert row["status"] == "unsupported" and "needs CUDA" in row["reason"]
        assert float(row["sdpa_ms"]) > 0 and row["speedup"] == row["fa_ms"] == ""
        assert float(row["library_ms"]) > 0
    line = rf"S=40 w=12 sliding masked {NUMBER}  fa2 n/a  speedup n/a  sdpa {NUMBER}"
    assert re.search(line, printed), printed
    assert re.search(rf"S=63 l=8 d=4 compressed masked {NUMBER}  fa2 n/a  speedup n/a", printed)


def test_it_is_fa2_that_is_measured(tmp_path, capsys):
    """Whatever is named and from whatever length: another kernel is no row of it."""
    given = "--S_list=40 --rows=0 --fa2_min_len_win=64 --kernels=fa2"
    _, found, _ = run(fa2, tmp_path, SMALL, given)
    assert [r.implementation for r in found] == ["masked", "fa2", "sdpa"]
    assert "note: --fa2_min_len_win has no effect on the rows" in capsys.readouterr().err


def fake(wrong=0):
    """FA-2's dense call by the oracle; `wrong`: keys too many in the past."""

    def call(query, key, value, window=-1):
        length = query.shape[1]
        config = dataclasses.replace(
            CONFIG, window=length if window < 0 else window + 1 + wrong
        )
        mask = nsa.sliding_mask(config, nsa.Rows(length, length, (length,)))
        return nsa.attend(query, key, value, mask, None)[0]

    return call


def full(given):
    raise MemoryError("no room")


ENDS = {
    "ok": "",
    "wrong": "fa2 wrong: out: max error",
    "oom": "masked oom: MemoryError: no room",
}


@pytest.mark.parametrize("status", ENDS)
def test_a_speed_up_needs_two_rows_that_are_right(status, tmp_path, capsys, monkeypatch):
    wrong = status == "wrong"
    monkeypatch.setattr(fa2, "_dense", fake(wrong))
    monkeypatch.setattr(fa2.fa2, "why_not", lambda problem: None)
    always = property(lambda _: (9, 0), lambda *_: None)
    monkeypatch.setattr(TorchRunner, "capability", always, raising=False)
    if status == "oom":
        monkeypatch.setattr(fa2, "masked", lambda *_: full)
    code, found, (row, *_) = run(
        fa2, tmp_path, SMALL, "--path=dense --batch=2 --S_list=63,5,8,31"
    )
    base, fast, library = found[:3]
    assert (code, fast.status) == (wrong, "wrong" if wrong else "ok")
    assert (row["path"], row["status"], row["sm"]) == ("dense", status, "90")
    assert library.status == "ok"
    line = next(x for x in capsys.readouterr().out.splitlines() if "sliding" in x)
    assert bool(row["fa_ms"]) == (not wrong) and f"  sdpa {library.time_ms:.3f} ms" in line
    if status == "ok":
        gain = base.time_ms / fast.time_ms
        assert (
            float(row["speedup"]) == pytest.approx(gain) and f"  speedup x{gain:.2f}  " in line
        )
        return
    assert row["speedup"] == "" and "  speedup n/a  " in line and ENDS[status] in line


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["varlen", "dense"])
def test_both_calls_are_right_on_a_gpu(path, tmp_path):
    given = f"--S_list=300 --w_list=64 --iters=2 --path={path}"
    status, found, _ = run(fa2, tmp_path, given)
    assert status == 0 and [r.status for r in found] == ["ok"] * 6
