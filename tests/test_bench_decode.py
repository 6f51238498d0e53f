"""Decoding: what is read is counted, branches are timed alone, and the summary of the table."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import nsa_jax
import nsa_torch
from bench import decode, doc_tables, summarize
from bench.harness import cost, decode_steps, exit_status, records, timing, turns
from kernels_pallas.specs.decode import Decode
from nsa_core.types import Branches
from nsa_torch import paged_attend
from tests import planned, pretend
from tests.commands import CONFIG, SIZES, ends, run
from tests.measured import made, record
from tests.refusals import refused
from tests.tables import table

SMALL = f"{SIZES} --warmup=1 --input=random --dtype=f32"
STEP = f"--B=2 --S_list=61 {SMALL}"
LENGTHS = {"torch": "5,61", "jax": "61"}
SEED = "S,ms_total,ms_cmp,ms_sel,ms_win,reads_actual,reads_expected,reads_actual_decode"
SEED += ",reads_expected_decode"


def actual(length):
    """Keys that the last of `length` tokens reads of one head."""
    return [cost.visible_pairs(branch, 1, length, CONFIG) for branch in Branches._fields]


@pytest.fixture(scope="module", params=LENGTHS)
def framework(request):
    return request.param


@pytest.fixture(scope="module")
def measured(framework, tmp_path_factory):
    """The folder of what it wrote, exit status, records and rows."""
    given = f"{STEP} --framework={framework} --S_list={LENGTHS[framework]}"
    given += " --side_by_side"  # of one length: here
    folder = tmp_path_factory.mktemp("decode") / "out"
    return folder, *run(decode, folder, given)


def test_reads_are_counted(measured):
    *_, status, found, table = measured
    assert status == 0, ends(found)
    assert list(table[0])[:9] == SEED.split(",")
    for row in table:
        length = int(row["S"])
        counts = actual(length)
        assert [float(row[f"reads_{x}"]) for x in ("cmp", "sel", "win")] == counts
        assert float(row["reads_actual_decode"]) == sum(counts)
        assert int(row["reads_actual"]) == 2 * 2 * sum(counts)  # sequences, key/value heads
        assert int(row["reads_expected_decode"]) == CONFIG.reads(length)
        assert int(row["reads_expected"]) == 2 * 2 * CONFIG.reads(length)
    # The formula counts blocks that are not there yet and the unseen part of the last one.
    assert float(table[-1]["reads_actual_decode"]) == CONFIG.reads(61) - 3


def test_every_branch_is_judged_and_timed_alone(framework, measured):
    *_, found, table = measured
    for length, row in zip(map(int, LENGTHS[framework].split(",")), table, strict=True):
        own = {(r.branch, r.implementation): r for r in found if r.S == length}
        portable, dense = {"torch": ("sdpa", "math"), "jax": ("xla", "xla")}[framework]
        steps = ("compressed", "scores", "selected", "sliding", "all")
        beside = {("all", "paged/gathered"), ("dense", dense)}
        assert set(own) == {(step, portable) for step in steps} | beside
        assert float(row["ms_paged"]) > 0 and row["paged_kernel"] == "gathered"
        assert row["ms_host"] == row["ms_paged_host"] == ""  # of a GPU's host
        assert all((r.T, r.mode, r.status) == (1, "decode", "ok") for r in own.values())
        assert all("kv" not in r.extra for r in own.values()) and row["kv"] == "separate"
        for branch, name in decode.TIMES.items():
            record = own[branch, portable]
            assert float(row[name]) == record.time_ms and record.error_max <= record.error_bound
            assert float(row[f"{name}_p20"]) <= float(row[name]) <= float(row[f"{name}_p80"])
        assert float(row[f"ms_dense_{dense}"]) == own["dense", dense].time_ms
        assert row["graph"].startswith("no: ") and row["kernel"] == portable


def test_the_table_has_hosts_where_records_have(tmp_path, monkeypatch):
    """Of the device and commit that are asked for."""
    monkeypatch.setattr(doc_tables, "DEVICE", tmp_path / "card")
    given = table("bench")["hosts of decoding"]
    records.append(tmp_path / "card/decode.jsonl", made(given["records"]))
    for commit, hosts, cells in given["commits"]:
        told = doc_tables.of_lines("decode", device="card", commit=commit)
        head, _, row = told.splitlines()
        assert head.count("host") == hosts and row.endswith(f"| {cells} | {commit} |")


@pytest.mark.parametrize("part_ms, samples, refused", table("bench")["parts of a step"])
def test_a_part_longer_than_the_whole_is_refused(part_ms, samples, refused):
    times = {"time_ms": 1.0, "p20_ms": 0.9, "p80_ms": 1.1, "samples": samples}
    parts = {x: record(x, "sdpa", ms) for x, ms in (("selected", part_ms), ("sliding", 0.2))}
    assert decode.doubt(parts, times) == refused


def test_what_is_timed_copies_nothing(framework, tmp_path, monkeypatch):
    """Of a part only a length that is known on the host says that there is nothing behind it to
    zero. A step on pages is given its tokens side by side, as projections give them: of slices of
    the rows it would copy each array first.
    """

    def note(kv_len, **given):
        return kv_len, given.get("key", given.get("compressed_key")).shape[1]

    lengths = [
        pretend.calls_of(monkeypatch, module, f"{branch}_attention", note)
        for module in (nsa_jax, nsa_torch)
        for branch in Branches._fields
    ]
    beside = lambda *_, key, value, **__: [x.is_contiguous() for x in (*key, *value)]
    asked = pretend.calls_of(monkeypatch, nsa_torch, "paged_attention", beside)
    code, _, _ = run(decode, tmp_path, STEP, "--framework", framework)
    compressed = CONFIG.num_compressed(61)
    assert code == 0 and set().union(*lengths) == {(61, 61), (61, compressed)}
    assert bool(asked) == (framework == "torch") and all(map(all, asked))


def test_kernels_on_pages_are_asked_for_their_blocks(tmp_path, monkeypatch):
    """With the arguments that the public function gives them: gates in one array."""
    chosen, asked = [], []
    of_cache = decode_steps.Cached.chosen

    def noted(self):
        chosen.append(of_cache(self))
        return chosen[-1]

    monkeypatch.setattr(decode_steps.Cached, "chosen", noted)
    monkeypatch.setattr(decode_steps.Paged, "name", "triton")

    def with_indices(name, inputs):
        asked.append((name, inputs.query.shape, inputs.gates.shape))
        return None, torch.tensor(np.asarray(chosen[-1])[:, 0].tolist())

    monkeypatch.setattr(paged_attend, "with_indices", with_indices)
    code, _, (row,) = run(decode, tmp_path, STEP)
    assert asked == [("triton", (2, 4, 8), (2, 4, 3))]
    assert code == 0 and row["status"] == "ok" and float(row["ms_paged"]) > 0


def test_a_whole_step_in_one_kernel_is_judged_by_its_blocks(tmp_path, monkeypatch):
    """The kernel of the step on emulated warps, and branches in the interpreter. The branch that
    attends to the blocks of `scores` is given others, and is wrong. A branch may take longer.
    """
    given = SMALL.replace("f32", "bf16").replace("--l_sel=8", "--l_sel=16")
    given += " --heads=2 --groups=1 --dk=64 --dv=64 --S_list=61 --iters=1"
    first = jnp.array([0, -1, -1, -1], jnp.int32)
    others = lambda self: jnp.broadcast_to(first, (1, 1, 1, 4))
    monkeypatch.setattr(decode_steps.Cached, "chosen", others)
    monkeypatch.setattr(timing, "MIN_SAMPLES", 1)
    monkeypatch.setattr(decode, "NOISE", 0)
    with planned.interpreted(monkeypatch) as ran:
        _, found, _ = run(decode, tmp_path, given, "--kernels=mosaic --paged=none")
    assert any(isinstance(x.spec, Decode) for x in ran)
    of_branch = {r.branch: r.status for r in found}
    assert of_branch.pop("selected") == "wrong" and {*of_branch.values()} == {"ok"}, ends(found)


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
    given = f"--S_list=61,5 --side_by_side {SMALL}"
    out = tmp_path / "all"
    code, found, (row,) = run(decode, out, given)
    assert code == exit_status.WRONG and row["S"] == "5" and {r.S for r in found} == {5}
    assert f"see {out / '61'}.log" in capsys.readouterr().err


GOOD = f"{SEED}\n64,2,0.5,1,0.25,40,50,20,25\n"


TEXTS = {"seed": SEED, "good": GOOD, "renamed": SEED.replace("ms_sel", "sel")}


def summarize_text(folder, text):
    path = folder / "decode.csv"
    path.write_text(text.format(**TEXTS))
    return summarize.main(["summarize", str(path)])


@pytest.mark.parametrize("text, message", table("bench")["damaged tables"])
def test_a_damaged_table_is_refused(text, message, tmp_path, capsys):
    with refused(f"{tmp_path / 'decode.csv'}*{message}"):
        summarize_text(tmp_path, text)
    assert not capsys.readouterr().out


@pytest.mark.parametrize("text, cells", table("bench")["tables of the seed system"])
def test_the_seed_systems_own_table_is_read(text, cells, tmp_path, capsys):
    assert summarize_text(tmp_path, text) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == cells.split()


def test_a_part_above_the_whole_is_marked():
    times = dict(zip(decode.TIMES.values(), (40.7, 3.0, 46.1, None), strict=True))
    assert decode.starred(times) == {"cmp": "3.000", "sel": "46.100*", "win": "n/a"}
    assert decode.starred(times | {"ms_total": None})["sel"] == "46.100"


@pytest.mark.gpu
def test_decode_on_a_gpu(framework, tmp_path):
    given = f"--framework={framework} --S_list=300 --iters=2"
    status, _, (row,) = run(decode, tmp_path, given)
    assert status == 0 and row["status"] == "ok", row["reason"]
    assert np.isfinite(float(row["ms_total"])) and row["graph"]
    hosts = [row[name] for name in ("ms_host", "ms_paged_host")]
    assert hosts == ["", ""] if framework == "jax" else all(0 < float(x) < 50 for x in hosts)


def test_a_cache_in_fp8_is_judged_by_what_it_has(framework, tmp_path, monkeypatch):
    given = f"{STEP} --framework={framework} --cache_dtype=fp8"
    status, found, (row,) = run(decode, tmp_path, given)
    assert status == 0, ends(found)
    status_of = lambda rows: {r.implementation: r.status for r in rows}["paged_fp8/gathered"]
    assert (
        status_of(found) == "ok" and row["cache_dtype"] == "fp8" and float(row["ms_paged"]) > 0
    )
    if framework == "jax":
        return
    monkeypatch.setattr(decode_steps.Paged, "stored", lambda self: {})
    _, found, _ = run(decode, tmp_path / "whole", given)
    assert status_of(found) == "wrong"  # judged by tokens that were not rounded


def test_several_new_tokens_of_branches_that_share_keys(framework, tmp_path, monkeypatch):
    api = {"torch": nsa_torch, "jax": nsa_jax}[framework]
    separate = lambda *_, separate, **__: separate
    caches = [
        pretend.calls_of(monkeypatch, api, name, separate)
        for name in ("init_cache", "PagedCache")
    ]
    given = f"--framework={framework} --kv=shared --cache_dtype=fp8 --q_len=3"
    status, found, (row,) = run(decode, tmp_path, STEP, given)
    assert status == 0, ends(found)
    assert caches == [[False], [False]] and (row["kv"], row["q_len"]) == ("shared", "3")
    assert float(row["reads_actual_decode"]) == sum(actual(61))
    own = [r for r in found if r.branch != "dense"]
    assert {(r.T, r.S, r.status) for r in own} == {(3, 61, "ok")} and len(own) == 6
    (dense,) = [r for r in found if r.branch == "dense"]
    assert "dense needs T = S or T = 1, got T=3" in dense.reason
    assert all(r.extra["kv"] == "shared" for r in found)


def test_invariant_is_measured(tmp_path, monkeypatch):
    """In the interpreter of the kernels: the steps, and `mosaic` for branches alone."""
    given = SMALL.replace("--l_sel=8", "--l_sel=16").replace("f32", "bf16")
    given += " --heads=2 --groups=1 --dk=16 --dv=16 --S_list=21 --iters=1"
    with planned.interpreted(monkeypatch):
        status, found, (row,) = run(decode, tmp_path, given, "--kernels=invariant --kv=shared")
    assert status == 0 and row["status"] == "ok", row["reason"]
    whole = {r.implementation for r in found if r.branch == "all"}
    assert whole == {"invariant", "paged/invariant"}
    assert {r.implementation for r in found[:4]} == {"mosaic"}
    assert row["kernel"] == row["paged_kernel"] == "invariant"
