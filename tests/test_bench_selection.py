"""Selected attention beside the portable path: problems, lines, table, what is wrong."""

import dataclasses
import re

import numpy as np
import pytest

import nsa_torch.dispatch
from bench import selection
from bench.harness import exit_status, records
from nsa_jax.dispatch import Implementation
from nsa_torch import sdpa
from tests.commands import run
from tests.measured import record

SMALL = ("--N=6", "--H=2", "--D=8", "--Dv=8", "--l_sel=8", "--iters=2", "--device=cpu")


@pytest.mark.parametrize(("count", "runs"), [(1, 1), (5, 1), (8, 8), (9, 4), (16, 8)])
def test_spans_are_runs_that_do_not_touch(count, runs):
    found = selection.spans(50, 2 * count + 8, count, runs, seed=3)
    assert found.shape == (50, count) and found.dtype == np.int32
    assert found.min() >= 0 and found.max() < 2 * count + 8
    steps = np.diff(found, axis=-1)
    assert (steps > 0).all() and ((steps > 1).sum(-1) == runs - 1).all()
    assert len(np.unique(found, axis=0)) > 1
    assert (found == selection.spans(50, 2 * count + 8, count, runs, seed=3)).all()


@pytest.mark.parametrize(("blocks", "count", "runs"), [(10, 3, 4), (10, 9, 4), (10, 3, 0)])
def test_spans_that_do_not_fit_are_refused(blocks, count, runs):
    with pytest.raises(ValueError, match=f"cannot lie in {runs} runs"):
        selection.spans(2, blocks, count, runs, seed=0)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_the_command(framework, tmp_path, capsys):
    path = tmp_path / "other.csv"
    given = (*SMALL, f"--framework={framework}", "--L_list=16,64", f"--csv={path}")
    status, found, table = run(selection, tmp_path / "out", *given, table=path)
    assert status == 0 and list(table[0]) == list(selection.COLUMNS)
    names = "mode,N,H,D,Dv,L,nspans,streams,tri_ms,ref_ms,speedup,mae"
    assert selection.COLUMNS[:12] == tuple(names.split(","))
    portable = {"torch": "sdpa", "jax": "xla"}[framework]
    kinds = [(row["mode"], row["L"], row["nspans"], row["status"]) for row in table]
    assert kinds == [
        ("dense", "16", "1", "ok"),
        ("varlen", "16", "8", "unsupported"),
        ("varlen", "16", "4", "unsupported"),
        ("dense", "64", "1", "ok"),
        ("varlen", "64", "8", "ok"),
        ("varlen", "64", "4", "ok"),
    ]
    for row in table:
        if row["status"] == "ok":
            assert row["kernel"] == row["ref_kernel"] == portable
            assert row["speedup"] == "", "no speed-up of a path over itself"
            assert 0 < float(row["mae"]) < float(row["error_bound"])
        else:
            assert "8 runs need 8 blocks of 8, L=16 has 2" in row["reason"] or row["L"] == "16"
            assert row["tri_ms"] == row["speedup"] == row["mae"] == ""
    assert len(found) == 12 and {(r.T, r.bench) for r in found} == {(6, "selection")}
    line = r"varlen,N=6,H=2,D=8,Dv=8,L=64,nspans=8,streams=1 tri_ms=\d+\.\d{3}, "
    assert re.search(line + r"ref_ms=\d+\.\d{3}, speedup=n/a, mae=", capsys.readouterr().out)


def test_a_speed_up_is_of_a_kernel_over_the_portable_path():
    base, itself = record("selected", "sdpa", 3.0), record("selected", "sdpa", 2.0)
    assert selection.gain(base, record("selected", "triton", 2.0)) == 1.5
    assert selection.gain(base, itself) is None
    assert selection.gain(base, record("selected", "reference", 2.0)) is None
    assert selection.gain(base, record("selected", "triton", None)) is None


def test_one_query_is_decoding(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "FOLDER", tmp_path / "records")
    given = ("--decode=1", "--L_list=16", "--dist=few", "--save_records", "--commit=abc")
    status, found, table = run(selection, tmp_path, *SMALL, *given)
    assert records.read(tmp_path / "records" / "cpu" / "selection.jsonl") == found
    assert status == 0 and [row["mode"] for row in table] == ["decode"]
    assert {(r.T, r.mode, r.status, r.overlap) for r in found} == {(1, "decode", "ok", None)}


def late(query, key, value, block_indices, *, config, **options):
    """Attention to the selected blocks but the first."""
    rest = dataclasses.replace(config, num_selected=config.num_selected - 1)
    return sdpa.selected_attention(
        query, key, value, block_indices[..., 1:], config=rest, **options
    )


def broken(*arguments, **options):
    raise RuntimeError("the kernel broke")


@pytest.mark.parametrize(("name", "status"), [("late", "wrong"), ("broken", "error")])
def test_a_bad_kernel_has_no_time(name, status, tmp_path, capsys, monkeypatch):
    registry = nsa_torch.dispatch.REGISTRY
    bad = Implementation("mosaic", f"{__name__}:{name}")
    entries = (bad, *registry.table["selected"][1:])
    monkeypatch.setattr(registry, "table", {**registry.table, "selected": entries})
    code, found, (row,) = run(selection, tmp_path, *SMALL, "--L_list=64", "--dist=few")
    assert code == 1 and [r.status for r in found] == [status, "ok"]
    assert row["kernel"] == "mosaic" and row["tri_ms"] == row["speedup"] == ""
    printed = capsys.readouterr().out
    assert "tri_ms=n/a" in printed and "speedup=n/a" in printed and f" {status}: " in printed


def test_a_named_kernel_that_refuses_is_a_row(tmp_path):
    given = ("--L_list=16", "--dist=few", "--selected_kernel=mosaic")
    code, found, (row,) = run(selection, tmp_path, *SMALL, *given)
    assert code == exit_status.NOT_MEASURED
    assert [r.status for r in found] == ["unsupported", "ok"]
    assert "needs a Hopper GPU" in row["reason"] and row["kernel"] == "mosaic"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--L_list=12",), "L_list must be multiples of l_sel=8, got"),
        (("--streams=2",), "streams must be 1 but in torch on CUDA, got 2"),
        (("--ref=xla",), r"torch has .*'sdpa'.*, got 'xla'"),
    ],
)
def test_bad_arguments_are_named(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(selection, tmp_path, *SMALL, *arguments)


@pytest.mark.gpu
def test_streams_on_a_gpu(tmp_path):
    given = ("--L_list=128", "--dist=few", "--streams=2", "--iters=2")
    status, found, _ = run(selection, tmp_path, *given)
    assert status == 0 and [r.status for r in found] == ["ok", "ok"]
