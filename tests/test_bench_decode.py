"""Decoding: what is read is counted, branches are timed alone, and the summary of the table."""

import functools
import re
import sys
import unittest.mock
from pathlib import Path

import numpy as np
import pytest
import torch

import nsa_jax
import nsa_torch
from bench import decode, doc_tables, summarize
from bench.harness import decode_steps, exit_status, records, turns
from nsa_core.config import NSAConfig
from nsa_torch import paged_attend
from tests import pretend
from tests.commands import break_sliding, run
from tests.measured import record

SIZES = ("--heads=4", "--dk=8", "--dv=8", "--l=8", "--d=4", "--l_sel=8", "--n_sel=4", "--w=12")
SMALL = (*SIZES, "--iters=2", "--warmup=1", "--device=cpu", "--input=random", "--dtype=f32")
LENGTHS = {"torch": "5,61", "jax": "61"}
CONFIG = NSAConfig(8, 4, 8, 4, 1, 2, 12)
SEED = "S,ms_total,ms_cmp,ms_sel,ms_win,reads_actual,reads_expected,reads_actual_decode"
SEED += ",reads_expected_decode"


def actual(length):
    """Keys that the last of `length` tokens reads of one head, one by one."""
    own = (length - 1) // 8
    compressed = sum(4 * i + 7 <= length - 1 for i in range(length))
    selected = min(3, own) * 8 + (length - 1) % 8 + 1
    return compressed, selected, min(12, length)


@functools.cache
def measured(framework, folder):
    given = (f"--framework={framework}", "--B=2", f"--S_list={LENGTHS[framework]}", *SMALL)
    given += ("--side_by_side",)  # of one length: here
    with unittest.mock.patch.object(sys, "argv", ["decode", *given]):
        return run(decode, folder, *given)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("decode")


def test_a_part_above_the_whole_is_marked(tmp_path, capsys):
    """Within noise it is no fault, and still no part of that whole."""
    cells = dict(
        zip(SEED.split(","), (512, 40.7, 3.0, 46.1, None, 40, 50, 20, 25), strict=True)
    )
    times = {name: cells[name] for name in decode.TIMES.values()}
    assert decode.above_whole(times) == ["ms_sel"]
    assert decode.starred(times) == {"cmp": "3.000", "sel": "46.100*", "win": "n/a"}
    for name in ("ms_total", "ms_sel"):
        assert decode.above_whole(times | {name: None}) == []
    cells["ms_win"] = 1.0
    path = tmp_path / "decode.csv"
    path.write_text(f"{SEED}\n{','.join(str(cells[name]) for name in SEED.split(','))}\n")
    assert summarize.main(["summarize", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[1:5] == [
        "40.700",
        "7.4",
        "113.3*",
        "2.5",
    ]


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_reads_are_counted(framework, folder):
    status, found, table = measured(framework, folder / framework)
    assert status == 0, [(r.branch, r.reason) for r in found if r.status != "ok"]
    assert list(table[0])[:9] == SEED.split(",")
    for row in table:
        length = int(row["S"])
        counts = actual(length)
        assert [float(row[f"reads_{x}"]) for x in ("cmp", "sel", "win")] == list(counts)
        assert float(row["reads_actual_decode"]) == sum(counts)
        assert int(row["reads_actual"]) == 2 * 2 * sum(counts)  # sequences, key/value heads
        assert int(row["reads_expected_decode"]) == CONFIG.reads(length)
        assert int(row["reads_expected"]) == 2 * 2 * CONFIG.reads(length)
    # The formula counts blocks that are not there yet and the unseen part of the last one.
    assert float(table[-1]["reads_actual_decode"]) == CONFIG.reads(61) - 3


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_every_branch_is_judged_and_timed_alone(framework, folder):
    _, found, table = measured(framework, folder / framework)
    for length, row in zip(map(int, LENGTHS[framework].split(",")), table, strict=True):
        own = {(r.branch, r.implementation): r for r in found if r.S == length}
        portable, dense = {"torch": ("sdpa", "math"), "jax": ("xla", "xla")}[framework]
        steps = ("compressed", "scores", "selected", "sliding", "all")
        beside = {("all", "paged/gathered"), ("dense", dense)}
        assert set(own) == {(step, portable) for step in steps} | beside
        assert float(row["ms_paged"]) > 0 and row["paged_kernel"] == "gathered"
        assert row["ms_host"] == row["ms_paged_host"] == ""  # of a GPU's host
        assert all((r.T, r.mode, r.status) == (1, "decode", "ok") for r in own.values())
        for branch, name in decode.TIMES.items():
            record = own[branch, portable]
            assert float(row[name]) == record.time_ms and record.error_max <= record.error_bound
            assert float(row[f"{name}_p20"]) <= float(row[name]) <= float(row[f"{name}_p80"])
        assert float(row[f"ms_dense_{dense}"]) == own["dense", dense].time_ms
        assert row["graph"].startswith("no: ") and row["kernel"] == portable


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_several_new_tokens(framework, tmp_path):
    given = (f"--framework={framework}", "--B=2", "--S_list=61", "--q_len=3", *SMALL)
    status, found, (row,) = run(decode, tmp_path, *given)
    assert status == 0, [(r.branch, r.reason) for r in found if r.status != "ok"]
    own = [r for r in found if r.branch != "dense"]
    assert {(r.T, r.S, r.status) for r in own} == {(3, 61, "ok")} and len(own) == 6
    (dense,) = [r for r in found if r.branch == "dense"]
    assert "dense needs T = S or T = 1, got T=3" in dense.reason
    assert row["q_len"] == "3"
    assert float(row["reads_actual_decode"]) == sum(actual(61))


def test_the_table_has_hosts_where_records_have(tmp_path, monkeypatch):
    """Of the device and commit that are asked for."""
    kinds = "paged/mosaic", "paged_fp8/mosaic", "cudnn"
    host = {"extra": {"host_ms": 0.0512}}, {"extra": {"host_ms": 0.0649}}, {}
    rows = [
        record("dense" if kind == "cudnn" else "all", kind, 0.1, **more, commit="beef")
        for kind, more in zip(kinds, host, strict=True)
    ]
    rows += [record("all", x, 0.3, commit="c0de") for x in ("mosaic", "paged/mosaic")]
    monkeypatch.setattr(doc_tables, "DEVICE", tmp_path / "card")
    (tmp_path / "card").mkdir()
    records.append(tmp_path / "card/decode.jsonl", rows)
    head, _, row = doc_tables.of_lines("decode", device="card", commit="beef").splitlines()
    assert head.count("host") == 2
    assert row.endswith("| 0.100 | 0.100 | 0.100 | 0.051 | 0.065 | beef |")
    head, _, row = doc_tables.of_lines("decode", device="card", commit="c0de").splitlines()
    assert "host" not in head and row.endswith("| 0.300 | 0.300 | c0de |")


def test_a_part_longer_than_the_whole_is_refused():
    times = {"time_ms": 1.0, "p20_ms": 0.9, "p80_ms": 1.1, "samples": 32}
    parts = {"selected": 1.3, "sliding": 0.2}
    parts = {name: record(name, "sdpa", ms) for name, ms in parts.items()}
    assert decode.doubt(parts, times) == {}, "its fastest samples are within the noise"
    parts["selected"] = record("selected", "sdpa", 1.5)
    found = decode.doubt(parts, times)
    assert found["status"] == "error" and "selected 1.5 ms" in found["reason"]
    assert "than the whole, 1 ms" in found["reason"] and "sliding" not in found["reason"]
    assert decode.doubt(parts, times | {"samples": 2}) == {}, "two samples tell no noise"
    parts["selected"] = record("selected", "sdpa", None)
    assert decode.doubt(parts, times) == {}, "a part without a time says nothing"


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_part_copies_no_values(framework, folder, monkeypatch):
    """Only a length that is known on the host says that there is nothing behind it to zero."""
    lengths = []
    for module in (nsa_jax, nsa_torch):
        for name in ("compressed_attention", "selected_attention", "sliding_attention"):
            function = getattr(module, name)

            def noted(*arrays, kv_len, function=function, **options):
                lengths.append((kv_len, arrays[1].shape[1]))
                return function(*arrays, kv_len=kv_len, **options)

            monkeypatch.setattr(module, name, noted)
    given = (f"--framework={framework}", "--B=2", "--S_list=61")
    code, _, _ = run(decode, folder / f"{framework}-lengths", *given, *SMALL)
    compressed = CONFIG.num_compressed(61)
    assert code == 0 and set(lengths) == {(61, 61), (61, compressed)}


def test_a_step_on_pages_is_given_its_tokens_side_by_side(tmp_path, monkeypatch):
    """As projections give them: of slices of the rows it would copy each array first."""
    given, step = [], nsa_torch.paged_attention

    def noted(*arrays, key, value, **options):
        given.extend((*key, *value))
        return step(*arrays, key=key, value=value, **options)

    monkeypatch.setattr(nsa_torch, "paged_attention", noted)
    code, _, _ = run(decode, tmp_path, "--B=2", "--S_list=61", *SMALL)
    assert code == 0 and given and all(x.is_contiguous() for x in given)


def test_a_wrong_branch_has_no_time_and_no_reads(tmp_path, capsys, monkeypatch):
    break_sliding(monkeypatch)
    given = ("--framework=jax", "--B=2", "--S_list=61")
    code, found, (row,) = run(decode, tmp_path, *given, *SMALL)
    status = {r.branch: r.status for r in found}
    assert code == 1 and status["sliding"] == status["all"] == "wrong"
    assert status["compressed"] == status["selected"] == "ok"
    assert row["ms_win"] == row["ms_total"] == row["reads_actual"] == ""
    assert row["status"] == "wrong" and "max error" in row["reason"]
    assert "n/a" in capsys.readouterr().out


def test_kernels_on_pages_are_asked_for_their_blocks(tmp_path, monkeypatch):
    """With the arguments that the public function gives them: gates in one array."""
    chosen, asked = [], []
    of_cache = decode_steps.Cached.chosen
    monkeypatch.setattr(
        decode_steps.Cached, "chosen", lambda self: chosen.append(of_cache(self)) or chosen[-1]
    )
    monkeypatch.setattr(decode_steps.Paged, "name", "triton")

    def with_indices(name, inputs):
        asked.append((name, inputs.query.shape, inputs.gates.shape))
        return None, torch.tensor(np.asarray(chosen[-1])[:, 0].tolist())

    monkeypatch.setattr(paged_attend, "with_indices", with_indices)
    code, _, (row,) = run(decode, tmp_path, "--B=2", "--S_list=61", *SMALL)
    assert asked == [("triton", (2, 4, 8), (2, 4, 3))]
    assert code == 0 and row["status"] == "ok" and float(row["ms_paged"]) > 0


def test_a_length_that_is_lost_fails_the_run(tmp_path, monkeypatch, capsys):
    """Its process ended before it wrote a row; the others' rows stand."""

    def of_names(commands, folder, environment, unit):
        assert environment and [*commands] == ["61", "5"]
        out = folder / "5"
        arguments = [x for x in commands["5"][1:] if not x.startswith(("--turn", "--out"))]
        run(decode, out, *arguments)
        yield "5", 0
        yield "61", -9

    monkeypatch.setattr(turns, "of_names", of_names)
    given = ("--S_list=61,5", "--side_by_side", *SMALL)
    pretend.words(monkeypatch, "decode", *given)
    out = tmp_path / "all"
    code, found, (row,) = run(decode, out, *given)
    assert code == exit_status.WRONG and row["S"] == "5" and {r.S for r in found} == {5}
    assert f"see {out / '61'}.log" in capsys.readouterr().err


def test_a_kernel_that_refuses_is_a_row(tmp_path):
    code, found, (row,) = run(decode, tmp_path, "--S_list=61", "--kernels=mosaic", *SMALL)
    assert code == exit_status.NOT_MEASURED and row["status"] == "unsupported"
    assert "needs a Hopper GPU" in row["reason"] and row["ms_total"] == ""
    assert [r.status for r in found] == ["unsupported"] * 6 + ["ok"]  # dense stays


def test_the_seeds_way_to_force_a_branch_is_accepted(capsys, monkeypatch):
    """And told to have no effect."""
    ended = RuntimeError("far enough")
    monkeypatch.setitem(decode.RUNNERS, "torch", lambda device: (_ for _ in ()).throw(ended))
    with pytest.raises(RuntimeError, match="far enough"):
        run(decode, Path("unused"), "--branch_force_mode=env")
    assert "each branch runs separately" in capsys.readouterr().out


def test_the_summary_of_what_decode_writes(folder, capsys):
    measured("torch", folder / "torch")
    capsys.readouterr()  # of the command, where no test before has run it
    assert summarize.main(["summarize", str(folder / "torch" / "decode.csv")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "S",
        "total",
        "cmp%",
        "sel%",
        "win%",
        "reads(dec)",
        "reads(tot)",
    ]
    assert [line.split()[0] for line in lines[1:]] == ["5", "61"]
    total = sum(actual(61))
    assert lines[2].split()[-2:] == [
        f"{total}/{CONFIG.reads(61)}",
        f"{4 * total}/{4 * CONFIG.reads(61)}",
    ]


GOOD = f"{SEED}\n64,2,0.5,1,0.25,40,50,20,25\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r":1: columns \['S', .*are missing, got \[\]"),
        (SEED.replace("ms_sel", "sel") + "\n1,2,3,4,5,6,7,8,9\n", r":1: columns \['ms_sel'\]"),
        (f"{SEED}\n", "must have rows, got none"),
        (f"{GOOD}64,2,0.5,1\n", ":3 must have 9 cells, got 4"),
        (
            f"{GOOD}64,2,0.5,one,0.25,40,50,20,25\n",
            ":3: ms_sel must be a positive number, got 'one'",
        ),
        (f"{GOOD}64,nan,0.5,1,0.25,40,50,20,25\n", ":3: ms_total must be a positive number"),
    ],
)
def test_a_damaged_table_is_refused(text, message, tmp_path, capsys):
    path = tmp_path / "decode.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(str(path)) + ".*" + message):
        summarize.main(["summarize", str(path)])
    assert not capsys.readouterr().out


def test_the_seed_systems_own_table_is_read(tmp_path):
    path = tmp_path / "decode.csv"
    path.write_text(GOOD)
    line = summarize.table(summarize.read(path)).splitlines()[1]
    assert line.split() == ["64", "2.000", "25.0", "50.0", "12.5", "20/25", "40/50"]
    path.write_text(
        GOOD.replace("\n", ",status,reason\n", 1).replace("25\n", "25,oom,no room\n")
    )
    assert summarize.table(summarize.read(Path(path))).splitlines()[1].split(None, 1) == [
        "64",
        "oom: no room",
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_decode_on_a_gpu(framework, tmp_path):
    given = (f"--framework={framework}", "--S_list=300", "--iters=2")
    status, _, (row,) = run(decode, tmp_path, *given)
    assert status == 0 and row["status"] == "ok", row["reason"]
    assert np.isfinite(float(row["ms_total"])) and row["graph"]
    hosts = [row[name] for name in ("ms_host", "ms_paged_host")]
    assert hosts == ["", ""] if framework == "jax" else all(0 < float(x) < 50 for x in hosts)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_cache_in_fp8_is_judged_by_what_it_has(framework, tmp_path, monkeypatch):
    given = (f"--framework={framework}", "--B=2", "--S_list=61", *SMALL, "--cache_dtype=fp8")
    status, found, (row,) = run(decode, tmp_path, *given)
    assert status == 0, [(r.branch, r.reason) for r in found if r.status != "ok"]
    (paged,) = [r for r in found if r.implementation == "paged_fp8/gathered"]
    assert paged.status == "ok" and row["cache_dtype"] == "fp8" and float(row["ms_paged"]) > 0
    if framework == "jax":
        return
    monkeypatch.setattr(decode_steps.Paged, "stored", lambda self: {})
    _, found, _ = run(decode, tmp_path / "whole", *given)
    (paged,) = [r for r in found if r.implementation == "paged_fp8/gathered"]
    assert paged.status == "wrong"  # judged by tokens that were not rounded
