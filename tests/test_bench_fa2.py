"""FA-2 beside masked SDPA: the lines, the table, the two calls, and what is wrong."""

import dataclasses
import re

import pytest
import torch
import torch.nn.functional as F

import nsa_torch
from bench import fa2
from bench.harness import exit_status
from nsa_core.config import NSAConfig
from tests.commands import results, run
from tests.measured import record

SMALL = ("--S_list=40,63", "--w_list=12", "--heads=2", "--dk=8", "--dv=8", "--l=8", "--d=4")
SMALL = (*SMALL, "--iters=2", "--device=cpu")
NUMBER = r"(n/a|\d+\.\d{3} ms)"


def test_without_a_gpu_only_fa2_is_not_timed(tmp_path, capsys):
    status, found, table = run(fa2, tmp_path, *SMALL)
    printed = capsys.readouterr().out
    assert status == exit_status.NOT_MEASURED and len(found) == 12
    assert list(table[0])[:8] == "D,T,dtype,sdpa_ms,fa_ms,speedup,sm,device".split(",")
    for r in found:
        portable = r.implementation in ("masked", "sdpa")
        assert r.status == ("ok" if portable else "unsupported")
        assert portable or ("needs CUDA" in r.reason and r.time_ms is None)
        assert (r.bench, r.device, r.samples) == ("fa2", "cpu", 2 * portable)
    assert [(row["branch"], row["S"], row["w"]) for row in table] == [
        ("sliding", "40", "12"),
        ("sliding", "63", "12"),
        ("compressed", "40", ""),
        ("compressed", "63", ""),
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
    with pytest.raises(ValueError, match=r"_kernel must be auto or fa2, got sdpa"):
        run(fa2, tmp_path, *SMALL, "--sliding_kernel=sdpa")
    lengths = "--S_list=40", "--rows=0", "--fa2_min_len_win=64", "--kernels=fa2"
    _, found, _ = run(fa2, tmp_path, *SMALL, *lengths)
    assert [r.implementation for r in found] == list(fa2.IMPLEMENTATIONS)
    assert "note: --fa2_min_len_win has no effect on the rows" in capsys.readouterr().err


def fake(config, wrong=0):
    """FA-2's dense call by SDPA; `wrong`: keys too many in the past."""

    def call(query, key, value, window=-1):
        length = query.shape[1]
        row, column = torch.arange(length)[:, None], torch.arange(length)
        seen = column <= row
        if window >= 0:
            seen &= column >= row - window - wrong
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)
        return out.transpose(1, 2)

    return call


@pytest.mark.parametrize("length", [5, 8, 31, 63])
def test_dense_calls_are_the_branches(length, monkeypatch):
    config = NSAConfig(8, 4, 8, 4, 1, 2, 12)
    monkeypatch.setattr(fa2, "_dense", fake(config))
    make = torch.Generator().manual_seed(length)
    query, key, value = (
        torch.randn(2, length, heads, width, generator=make)
        for heads, width in ((4, 8), (2, 8), (2, 16))
    )
    compressed = [nsa_torch.compress(x, config=config) for x in (key, value)]
    given = {"query": query, "key": key, "value": value}
    pooled = dict(zip(("compressed_key", "compressed_value"), compressed, strict=True))
    options = {"config": config, "implementation": "reference"}
    expected = nsa_torch.sliding_attention(**given, **options)[0]
    found = fa2.dense("sliding", config, length)(given)["out"]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    given = {"query": query, **pooled}
    expected = nsa_torch.compressed_attention(**given, **options)[0]
    found = fa2.dense("compressed", config, length)(given)["out"]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("wrong", "status"), [(0, "ok"), (1, "wrong")])
def test_a_wrong_call_prints_no_speed_up(wrong, status, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(fa2, "_dense", fake(None, wrong))
    monkeypatch.setattr(fa2.fa2, "why_not", lambda problem: None)
    code, found, table = run(fa2, tmp_path, *SMALL, "--path=dense", "--S_list=63")
    sliding = {r.implementation: r for r in found if r.branch == "sliding"}
    assert (code, sliding["fa2"].status) == (int(wrong), status)
    assert sliding["masked"].status == sliding["sdpa"].status == "ok"
    line = next(x for x in capsys.readouterr().out.splitlines() if "sliding" in x)
    assert bool(re.search(r"speedup x\d", line)) == (not wrong)
    assert bool(table[0]["speedup"]) == bool(table[0]["fa_ms"]) == (not wrong)
    assert table[0]["path"] == "dense" and table[0]["status"] == status
    if wrong:
        assert "fa2 wrong: out: max error" in line


def test_a_speed_up_needs_two_rows_that_count(tmp_path, capsys):
    about = {"S": 8, "config": NSAConfig(window=4), "extra": {"path": "varlen", "kernel": "FA"}}
    times = {"masked": 3.0, "fa2": 2.0, "sdpa": 4.0}
    rows = [record("sliding", name, ms, **about) for name, ms in times.items()]
    text = "S=8 w=4 sliding masked 3.000 ms  fa2 2.000 ms  speedup x1.50  sdpa 4.000 ms\n"
    found = results(fa2, tmp_path)
    cells = found.row(**fa2.values(*rows, (9, 0)))
    assert capsys.readouterr().out == text
    assert (cells["sm"], cells["speedup"], cells["library_ms"]) == ("90", 1.5, 4.0)
    rows[0] = dataclasses.replace(rows[0], status="oom", reason="no room")
    assert found.row(**fa2.values(*rows, None))["status"] == "oom"
    printed = capsys.readouterr().out
    assert printed.endswith("speedup n/a  sdpa 4.000 ms  (masked oom: no room)\n")


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["varlen", "dense"])
def test_both_calls_are_right_on_a_gpu(path, tmp_path):
    arguments = ("--S_list=300", "--w_list=64", "--iters=2", f"--path={path}")
    status, found, _ = run(fa2, tmp_path, *arguments)
    assert status == 0 and [r.status for r in found] == ["ok"] * 6
