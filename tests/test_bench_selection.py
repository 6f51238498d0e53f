"""Selected attention beside the portable path: problems, lines, table, what is wrong."""

import dataclasses
import io
import re
import sys

import numpy as np
import pytest

from bench import selection
from bench.harness import (
    command,
    exit_status,
    problems,
    records,
    selection_rows,
    turns,
)
from bench.harness.runners import RUNNERS
from bench.harness.selection_rows import Matrix
from kernels_pallas.triton import capability
from nsa_core import config_files
from nsa_torch import sdpa
from nsa_torch.dispatch import REGISTRY
from tests import pretend
from tests.commands import ends, parsed, put_in_place, rows, run
from tests.measured import problem
from tests.refusals import refused
from tests.tables import table

TABLE = table("bench")
WHOLE = sdpa.selected_attention
SMALL = "--N=6 --H=2 --D=8 --Dv=8 --l_sel=8 --iters=2 --device=cpu"


@pytest.mark.parametrize("count, runs", TABLE["spans"])
def test_spans_are_runs_that_do_not_touch(count, runs):
    given = 50, 2 * count + 8, count, runs, 3
    found = selection_rows.spans(*given)
    assert found.shape == (50, count) and found.dtype == np.int32
    assert found.min() >= 0 and found.max() < 2 * count + 8
    steps = np.diff(found, axis=-1)
    assert (steps > 0).all() and ((steps > 1).sum(-1) == runs - 1).all()
    assert len(np.unique(found, axis=0)) > 1
    assert (found == selection_rows.spans(*given)).all()


@pytest.mark.parametrize("blocks, count, runs", TABLE["no spans"])
def test_spans_that_do_not_fit_are_refused(blocks, count, runs):
    with refused(f"cannot form {runs} runs"):
        selection_rows.spans(2, blocks, count, runs, seed=0)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_the_command(framework, tmp_path, capsys):
    path = tmp_path / "other.csv"
    given = f"{SMALL} --framework={framework} --L_list=16,64 --csv={path}"
    status, found, table = run(selection, tmp_path / "out", given, table=path)
    names = "mode,N,H,D,Dv,L,nspans,streams,tri_ms,ref_ms,speedup,mae"
    assert status == 0 and list(table[0])[:12] == names.split(",")
    portable = {"torch": "sdpa", "jax": "xla"}[framework]
    kinds = [" ".join(row[x] for x in ("mode", "L", "nspans", "status")) for row in table]
    assert kinds == TABLE["rows of the selection"]
    for row in table:
        if row["status"] == "ok":
            assert row["kernel"] == row["ref_kernel"] == portable
            assert row["speedup"] == "", "no speed-up of a path over itself"
            assert 0 < float(row["mae"]) < float(row["error_bound"])
        else:
            need = "{0} runs need {0} blocks of 8 tokens, but L=16 has only 2"
            assert need.format(row["nspans"]) in row["reason"]
            assert row["tri_ms"] == row["speedup"] == row["mae"] == ""
    assert len(found) == 12 and {(r.T, r.bench) for r in found} == {(6, "selection")}
    line = r"varlen,N=6,H=2,D=8,Dv=8,L=64,nspans=8,streams=1 tri_ms=\d+\.\d{3}, "
    assert re.search(line + r"ref_ms=\d+\.\d{3}, speedup=n/a, mae=", capsys.readouterr().out)


def test_one_query_is_decoding(tmp_path, monkeypatch):
    pretend.folder(monkeypatch, "records", tmp_path / "records")
    given = "--decode=1 --L_list=16 --dist=few --selected_kernel=reference"
    status, found, table = run(selection, tmp_path, SMALL, given, "--save_records --commit=abc")
    assert table[0]["kernel"] == "reference" and table[0]["speedup"] == "", "no kernel"
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


RTX_4090 = problem(problems.settings("tiny"), capability=(8, 9))._replace(dtype="float16")
S2 = Matrix(**config_files.load("selection/s2"))


def test_the_seed_systems_matrix():
    rows = list(S2.rows())
    assert len(rows) == len(set(rows)) == 2**4 * (5 + 4 + 4) and S2.streams == [1, 2]
    assert not any(row.why_not for row in rows), "every length holds a block for each run"
    guide = [row for row in rows if (row.N, row.H, row.D, row.Dv) == (1024, 8, 128, 128)]
    assert [row.L for row in guide if row.dist == "few"] == [64, 128, 256, 512, 1024]
    blocks = {(row.L, row.dist): row.l_sel for row in guide}
    for length, dist, size in TABLE["blocks of the seed"]:
        assert blocks[length, dist] == size
    for row in rows:
        sizes = {"T": row.N, "H": row.H, "Hkv": 1, "D": row.D, "Dv": row.Dv}
        config = selection.selected(row.l_sel, row.count)
        there = RTX_4090._replace(config=config, **sizes)
        assert capability.why_not(there) is None, row


@pytest.mark.parametrize("changes, message", TABLE["matrices"])
def test_a_matrix_that_cannot_be_is_named(changes, message):
    with refused(message):
        dataclasses.replace(S2, **changes)


TINY = "--preset=tiny --device=cpu"


def test_a_matrix_without_a_gpu_times_sdpa_alone(tmp_path, capsys):
    code, found, table = run(selection, tmp_path, TINY)
    assert code == exit_status.NOT_MEASURED
    assert [" ".join(row[x] for x in ("mode", "nspans", "streams")) for row in table] == [
        f"{kind} {streams}" for kind in ("dense 1", "varlen 8", "varlen 4") for streams in "12"
    ]
    for row in table:
        assert row["tri_ms"] == row["speedup"] == "" and row["status"] == "unsupported"
        assert bool(row["ref_ms"]) == (row["streams"] == "1"), "SDPA runs anywhere"
        reasons = {
            "1": ("needs an NVIDIA GPU", "FA-2 needs CUDA tensors"),
            "2": ("2 streams need torch on CUDA",) * 2,
        }
        for name, reason in zip(("", "fa2_"), reasons[row["streams"]], strict=True):
            assert reason in row[f"{name}reason"]
    assert ends(found[:3]) == "triton unsupported, sdpa ok, fa2 unsupported"
    said = (
        "6 of 6 rows were not measured: .*triton: needs an NVIDIA GPU, got cpu; 2 streams need"
    )
    assert re.search(said, capsys.readouterr().err)
    for kind, count in (("dense", 2), ("varlen", 4)):
        some = rows(tmp_path / f"sel_{kind}.csv")
        assert len(some) == count and {row["mode"] for row in some} == {kind}


def test_a_table_without_rows_has_its_columns(tmp_path):
    """`bench.tune_thresholds --csv` then reports that there are no rows."""
    run(selection, tmp_path, TINY, "--dist=few --N=5")
    some, none = ((tmp_path / f"sel_{kind}.csv").read_text() for kind in ("dense", "varlen"))
    assert none == some.splitlines(keepends=True)[0] and "fa2_ms" in none
    run(selection, tmp_path / "none", "--rows=")
    with refused("must have rows, got none"):
        command.read_csv(tmp_path / "none/selection.csv", ["tri_ms"])


KERNELS = {"late": late, "broken": broken, "right": WHOLE}


@pytest.mark.parametrize("row", TABLE["kernels of the selection"], ids=lambda row: row["ends"])
def test_a_kernel_that_is_wrong_or_compared_with_itself_has_no_speed_up(
    row, tmp_path, capsys, monkeypatch
):
    functions = {name: KERNELS[x] for name, x in row["kernels"].items()}
    put_in_place(monkeypatch, REGISTRY, "selected", **functions)
    words = row["words"].format(small=SMALL, tiny=TINY)
    code, found, (cells,) = run(selection, tmp_path, words)
    assert (code, ends(found)) == (row["status"], row["ends"])
    assert cells | row["cells"] == cells
    assert all(float(cells[name]) > 0 for name in row["timed"])
    told = f"{capsys.readouterr().out} {cells}"
    assert not [part for part in row["said"] if part not in told]


def test_a_matrix_has_triton_beside_sdpa_and_fa2(tmp_path, capsys, monkeypatch):
    put_in_place(monkeypatch, REGISTRY, "selected", triton=WHOLE, fa2=WHOLE)
    given = f"{TINY} --streams=1 --dist=few --dist=mixed --N=5"
    code, found, table = run(selection, tmp_path, given)
    assert code == 0 and len(table) == 2 and len(found) == 6
    columns = ["fa2_ms", "speedup_over_fa2", "fa2_mae", "fa2_reason"]
    for row in table:
        assert list(row)[-4:] == columns and row["N"] == "5" and row["fa2_reason"] == ""
        assert (row["kernel"], row["ref_kernel"]) == ("triton", "sdpa")
        over = {"speedup": "ref_ms", "speedup_over_fa2": "fa2_ms"}
        for name, base in over.items():
            expected = float(row[base]) / float(row["tri_ms"])
            assert float(row[name]) == pytest.approx(expected)
    assert " triton/sdpa fa2_ms=" in capsys.readouterr().out


def test_a_process_measures_its_rows_for_another(tmp_path, monkeypatch, capsys):
    """What `--processes` starts: ready, then timed when told to, a file a row."""
    put_in_place(monkeypatch, REGISTRY, "selected", triton=WHOLE, fa2=broken)
    monkeypatch.setattr(sys, "stdin", io.StringIO(turns.GO))
    words = f"{TINY} --streams=1 --turn={tmp_path} --rows=2"
    assert run(selection, tmp_path, words) == (0, [], [])  # its parent writes them
    assert capsys.readouterr().out == turns.READY
    found = records.read(tmp_path / "2.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["2.jsonl"]
    assert ends(found) == "triton ok, sdpa ok, fa2 error"
    assert {r.extra["dist"] for r in found} == {"mixed"}
    assert found[0].overlap is not None and found[2].reason.endswith("the kernel broke")


def test_inputs_that_do_not_fit_are_rows(tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise MemoryError("full")

    monkeypatch.setattr(problems, "make", full)
    code, found, table = run(selection, tmp_path, TINY, "--streams=1 --dist=few")
    assert code == exit_status.NOT_MEASURED and len(table) == 1
    assert ends(found) == "triton oom, sdpa oom, fa2 oom"
    assert {r.reason for r in found} == {"MemoryError: full"}


def test_rows_of_a_process_that_died(tmp_path):
    row = next(S2.rows())
    parsed(selection.FLAGS, "selection", *TINY.split())
    names = ("triton", "sdpa", "fa2")
    found = selection.problem(RUNNERS["torch"]("cpu"), row, S2, names).lost("it died")
    assert [(r.implementation, r.extra["streams"]) for r in found] == [
        (name, streams) for streams in (1, 2) for name in names
    ]
    assert {(r.status, r.reason, r.T, r.D) for r in found} == {("error", "it died", 256, 64)}
    records.append(tmp_path / "x.jsonl", found)


@pytest.mark.gpu
def test_streams_on_a_gpu(tmp_path):
    given = "--L_list=128 --dist=few --streams=2 --iters=2"
    status, found, _ = run(selection, tmp_path, given)
    assert status == 0 and [r.status for r in found] == ["ok", "ok"]
