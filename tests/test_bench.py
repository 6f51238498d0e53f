"""The comparison end to end on a micro problem, and the parts that it stands on."""

import dataclasses
import hashlib
import re
import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import nsa_jax
import nsa_torch
from bench import compare
from bench.harness import cost, exit_status, peers, problems, records, text, timing, turns
from bench.harness.jobs import Job
from bench.judge import oracle
from bench.judge.checks import Checker
from nsa_core.config import NSAConfig
from nsa_core.types import Branches
from nsa_jax import branches
from nsa_jax.dispatch import REGISTRY
from tests import commands, pretend
from tests.commands import break_sliding, late, put_in_place
from tests.measured import record
from tests.oracles import nsa
from tests.refusals import refused
from tests.tables import table

TABLE = table("bench")
MICRO = """
model: {dim: 16, n_heads: 2, n_kv_groups: 1, d_k: 8, d_v: 8}
nsa: {compress_block: 4, compress_stride: 2, select_block: 8, num_selected: 4, window: 12}
runtime: {precision: f32, seq_len: 63}
"""
OK = record("sliding", "xla", 2.0, **TABLE["a good line"])


@pytest.mark.parametrize("old, new, message", TABLE["damaged lines"])
def test_damage_is_named_with_file_and_line(tmp_path, old, new, message):
    path = tmp_path / "x.jsonl"
    records.append(path, [OK, OK])
    first, second = path.read_text().splitlines()
    damaged = re.sub(old, new, second)
    assert damaged != second
    path.write_text(f"{first}\n{damaged}\n", encoding="latin-1")
    with refused(f"{path}:2*{message}"):
        records.read(path)


def test_a_line_of_another_kind(tmp_path):
    """What is no field of attention is in `extra`, and beside the fields in a table."""
    path = tmp_path / "x.jsonl"
    made = records.record("scale", "0123456789", devices=2, S=8, time="now")
    assert (made.extra, made.commit, made.time) == ({"devices": 2}, "0123456789", "now")
    records.append(path, [made])
    assert records.read(path) == [made]
    (line,) = records.flat_lines(path)
    expected = dict(schema=2, bench="scale", status="ok", S=8, devices=2)
    assert {name: line.get(name) for name in expected} == expected
    assert not {"T", "extra"} & line.keys()


def test_a_file_has_whole_lines(tmp_path):
    """After a full disk, as far as a limit of this process is one: a write takes what fits.
    Nothing is appended to half a line.
    """
    path = tmp_path / "x.jsonl"
    records.append(path, [OK])
    before = path.read_text()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
    try:
        with refused("No space left", OSError):
            records.append(path, [OK])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == before
    path.write_text(before[:9])
    with refused("truncated"):
        records.append(path, [OK])
    assert path.read_text() == before[:9]


def test_environment():
    assert records.environment()["versions"]["python"].startswith("3.")


COST = NSAConfig(4, 2, 8, 4, 1, 2, 12)


@pytest.mark.parametrize("T, S", [(63, 63), (5, 63), (3, 3)])
def test_pairs_are_counted(T, S):
    """Those that the oracle's masks leave; any selection has as many."""
    rows, wide = nsa.Rows(T, S, (S,)), dataclasses.replace(COST, window=S)
    scores = torch.zeros(1, T, 1, COST.num_blocks(S))
    blocks = nsa.select(scores, COST, rows)
    compressed = nsa.compressed_mask(COST, rows)
    masks = {
        "compressed": compressed,
        "scores": compressed,
        "selected": nsa.selected_mask(blocks, COST, rows),
        "sliding": nsa.sliding_mask(COST, rows),
        "dense": nsa.sliding_mask(wide, rows),
    }
    for branch, mask in masks.items():
        assert cost.visible_pairs(branch, T, S, COST) == mask.sum(), branch


def test_flops_and_bytes():
    shape = cost.Shape(B=2, T=63, S=63, H=4, Hkv=2, D=8, Dv=16, itemsize=2)
    pairs = 2 * 4 * 63 * 64 // 2
    q, k, v, out, lse = (2 * 63 * x for x in (4 * 8, 2 * 8, 2 * 16, 4 * 16, 4))
    forward = cost.cost("dense", shape, COST)
    assert forward == cost.Cost(pairs * 2 * (8 + 16), 2 * (q + k + v + out) + 4 * lse)
    both = cost.cost("dense", shape, COST, backward=True)
    assert both.flops == forward.flops + pairs * 2 * (3 * 8 + 2 * 16)
    assert both.bytes == 2 * forward.bytes + 2 * (out + q + k + v)
    whole, *parts = (cost.cost(x, shape, COST).flops for x in ("all", *Branches._fields))
    assert whole == sum(parts)


@pytest.mark.parametrize("flops, size, reason", TABLE["impossible work"])
def test_faster_than_the_hardware_is_refused(flops, size, reason):
    work = cost.Cost(flops, size)
    assert reason in str(cost.impossible(work, 1.0, "NVIDIA H100 80GB HBM3", 2))
    assert cost.impossible(work, 1.0, "a new device", 2) is None


def test_corpus_is_the_sorted_sources(tmp_path):
    for name, content in (("b.py", "bb"), ("a.py", "aaa"), ("c.txt", "no")):
        (tmp_path / name).write_text(content)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "0.py").write_text("no")
    found = text.corpus(4, tmp_path)
    assert bytes(found.tokens) == b"aaab"
    assert found.sha256 == hashlib.sha256(b"aaab").hexdigest()


def test_nothing_reads_a_later_token():
    tokens = text.corpus(64).tokens.reshape(1, 64)
    changed = tokens.copy()
    changed[0, 40] ^= 1
    sizes = dict(dim=16, n_heads=2, n_kv_groups=1, d_k=8, d_v=8, rope_base=1e4)
    made = [text.project(x, **sizes) for x in (tokens, changed)]
    for a, b in zip(*((*x.key, x.query) for x in made), strict=True):
        np.testing.assert_array_equal(a[:, :40], b[:, :40])
        assert (a[:, 40] != b[:, 40]).any()


def test_text_and_neighbouring_queries_select_alike():
    settings = problems.settings("tiny", {"seq_len": 384, "precision": "f32"})
    made = [problems.make(settings, kind) for kind in ("text", "alike", "random")]
    words, alike, random = made
    assert min(words.overlap, alike.overlap) > random.overlap + 0.05
    query = np.asarray(alike.query, "float64")
    np.testing.assert_array_equal(alike.key.selected, random.key.selected)
    np.testing.assert_allclose(np.mean(query[:, 1:] * query[:, :-1]), 0.95, atol=0.1)
    np.testing.assert_allclose(np.mean(query**2), 1, atol=0.1)


def test_the_last_queries_of_a_problem():
    settings = problems.settings("tiny", {"seq_len": 127})
    whole, last = (problems.make(settings, "text", num_queries=n) for n in (None, 5))
    for name in ("query", "gates", "block_indices"):
        np.testing.assert_array_equal(getattr(last, name), getattr(whole, name)[:, -5:])
    np.testing.assert_array_equal(last.key.selected, whole.key.selected)
    assert (last.num_keys, last.cotangent.shape[1]) == (127, 5)
    assert problems.make(settings, "random", num_queries=1).overlap is None
    with refused("num_queries must be in 1..127, got 128"):
        problems.make(settings, "random", num_queries=128)


def test_overlap():
    indices = jnp.array([[0, 1, 2], [0, 2, 3], [4, 5, 6], [4, -1, -1]])[None, :, None]
    assert float(problems.overlap(indices)) == pytest.approx((2 / 3 + 0 + 1) / 3)


def test_settings():
    base = problems.settings("base").model
    assert (base.d_k, base.d_v, base.dim, base.rope_base) == (192, 128, 2560, 1e4)
    assert problems.settings("seed").runtime.batch == 8


@pytest.mark.parametrize("length, row_elements, most, count", TABLE["checked rows"])
def test_rows_are_counted_once(length, row_elements, most, count):
    slabs = oracle.Slabs.of(length, row_elements, most_rows=most)
    rows = slabs.rows
    assert (np.diff(rows) > 0).all() and rows[0] == 0 and rows[-1] == length - 1
    assert len(rows) == count and len(slabs.starts) == len(slabs.skips)
    assert slabs.size * row_elements <= oracle.FORWARD_ELEMENTS


def test_slabs_give_what_the_whole_gives():
    settings = problems.settings("tiny", {"seq_len": 63})
    inputs = problems.make(settings, "random")
    arguments = inputs.arguments("selected")
    whole = oracle.Slabs((0,), 63, 63)
    slabs = oracle.Slabs((0, 16, 32, 47), 16, 63)
    (out, gradients), (expected_out, expected) = (
        oracle.gradients("selected", arguments, inputs.cotangent, settings.nsa, rows)
        for rows in (whole, slabs)
    )
    alone = oracle.outputs("selected", arguments, settings.nsa, slabs)
    assert set(out) == set(alone) == {"out", "lse"}
    found, expected = out | gradients, expected_out | expected
    assert set(found) == {"out", "lse", "query", "key", "value"}
    for other in (expected, alone):
        for name in other:
            np.testing.assert_allclose(found[name], other[name], rtol=0, atol=1e-12)


def test_timing_counts_calls_and_orders_percentiles(monkeypatch):
    # A clock that only the call moves: no load on this machine can change the answer.
    calls, now_s, unit_s = [], 0.0, 0.0001
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now_s)

    def call():
        nonlocal now_s
        calls.append(now_s)
        now_s += unit_s * (3 + len(calls) // 20 % 3)

    found = timing.time_host(call, lambda result: None, seconds=0.2)
    assert 0.3 <= found.p20_ms < found.time_ms < found.p80_ms <= 0.5
    assert found.samples >= timing.MIN_SAMPLES and found.timer.startswith("host/")
    assert len(calls) > found.samples
    unit_s = 0.002
    for iters in (1, 7, 60):
        found = timing.time_host(call, lambda _: None, iters=iters, warmup=2)
        assert (found.samples, found.timer) == (iters, "host")


@pytest.fixture
def run(tmp_path, capsys):
    """`main` as the command calls it: exit status, output, and the records."""
    config = tmp_path / "micro.yaml"
    config.write_text(MICRO)

    def call(*arguments, folder="out"):
        given = f"--config={config} --row_seconds=0", *arguments
        code, found, _ = commands.run(compare, tmp_path / folder, *given)
        return code, capsys.readouterr().out, found

    return call


def test_compare_writes_the_table_in_four_forms_and_saves_records(run, monkeypatch, tmp_path):
    pretend.folder(monkeypatch, "records", tmp_path / "records")
    code, printed, found = run("--framework=both --save_records")
    assert code == 0
    assert records.read(tmp_path / "records" / "cpu" / "compare.jsonl") == found
    assert {record.bench for record in found} == {"compare"}
    out = tmp_path / "out"
    names = {"compare.jsonl", "compare.csv", "compare.md", "compare.png"}
    assert {path.name for path in out.iterdir()} == names
    assert (out / "compare.md").read_text() in printed
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert len((out / "compare.csv").read_text().splitlines()) == len(found) + 1
    rows = {(r.framework, r.branch, r.implementation): r for r in found}
    for framework in ("jax", "torch"):
        done = {key[1] for key, r in rows.items() if key[0] == framework and r.status == "ok"}
        assert done == set(problems.BRANCHES)
    assert {r.status for r in found} <= {"ok", "unsupported"}
    xla = rows["jax", "selected", "xla"]
    assert xla.rows_checked == 63 and xla.error_max <= xla.error_bound
    assert 0 < xla.error_rms <= xla.error_rms_bound and xla.slope is None
    assert all(f"| {name} |" in printed for name in ("rms bound", "slope"))
    assert xla.input == "text" and len(xla.input_sha256) == 64 and 0 < xla.overlap < 1
    assert rows["jax", "sliding", "mosaic"].reason
    assert printed.count("speed-up") >= 1 and "x |" in printed
    assert "of their blocks" in printed


def kernels(name):
    """Flags that name an implementation of all branches."""
    return " ".join(f"--{step}_kernel={name}" for step in Branches._fields)


# Rows, whether branches are computed again, and whether rows are packed.
FORMS = {"recompute": (2, True, False), "packed": (1, False, True)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("framework, kernel", [("jax", "xla"), ("torch", "sdpa")])
def test_forms_of_the_whole(run, framework, kernel, form, monkeypatch):
    """Rows as one packed row; branches computed again."""
    api = {"jax": nsa_jax, "torch": nsa_torch}[framework]
    note = lambda query, *_, recompute=False, varlen=None, **__: (
        len(query),
        recompute,
        varlen is not None,
    )
    asked = pretend.calls_of(monkeypatch, api, "attention", note)
    only = f"--framework={framework} --branch=all --input=random --batch=2 {kernels(kernel)}"
    code, _, (plain, other) = run(only, f"--mode=fwdbwd --{form}")
    assert code == 0 and plain.status == other.status == "ok"
    assert (plain.implementation, other.implementation) == (kernel, f"{kernel} {form}")
    assert {*asked} == {(2, False, False), FORMS[form]} and asked[-1] == FORMS[form]


@jax.custom_vjp
def scaled_gradient(x):
    return x


scaled_gradient.defvjp(lambda x: (x, None), lambda _, grad: (grad * 1.001,))


def slope(query, key, value, **options):
    """Sliding attention with a slightly wrong gradient of the values."""
    return branches.sliding_attention(query, key, scaled_gradient(value), **options)


def crash(*args, **options):
    raise RuntimeError("the kernel broke")


def exhaust(*args, **options):
    raise MemoryError("RESOURCE_EXHAUSTED: out of memory")


def select_last(query, compressed_key, *, config, **options):
    """The last blocks of the sequence for every query."""
    count = config.num_blocks(query.shape[1])
    last = jnp.arange(count - config.num_selected, count, dtype=jnp.int32)
    shape = (*query.shape[:2], compressed_key.shape[2], config.num_selected)
    return jnp.broadcast_to(last, shape)


BAD = {each.__name__: each for each in (late, slope, crash, exhaust, select_last)}


@pytest.mark.parametrize("step, function, status, code, reason", TABLE["bad paths"])
def test_a_bad_path_gives_no_speed_up(run, monkeypatch, step, function, status, code, reason):
    put_in_place(monkeypatch, REGISTRY, step, xla=BAD[function])
    got, printed, found = run(f"--framework=jax --branch={step} --branch=dense")
    rows = {r.implementation: r for r in found if r.branch == step}
    assert rows["xla"].status == status and rows["xla"].time_ms is None
    assert rows["reference"].status == "ok", "the rows after it go on"
    assert got == code
    line = next(x for x in printed.splitlines() if f"| {step} " in x and "| xla " in x)
    assert status in line and "x |" not in line.replace("| xla", "")
    assert reason in rows["xla"].reason


REFUSES = "--framework=jax --branch=sliding --sliding_kernel=mosaic --on_unsupported=error"


@pytest.mark.parametrize("words, sliding, statuses, status, reason", TABLE["named rows"])
def test_rows_that_were_named(run, monkeypatch, words, sliding, statuses, status, reason):
    if sliding:
        break_sliding(monkeypatch, BAD[sliding])
    code, _, found = run("--framework=torch --input=random", words.format(refuses=REFUSES))
    assert commands.ends(found) == statuses
    assert {r.mode for r in found} == {"fwdbwd" if "fwdbwd" in words else "forward"}
    assert code == getattr(exit_status, status) and reason in found[0].reason


@pytest.mark.parametrize("rows, status", TABLE["answers of compare"])
def test_of_all_implementations_one_a_branch_must_be_measured(rows, status):
    compare.FLAGS.mark_as_parsed()
    pairs = []
    for branch, framework, asked, ended in rows:
        about = dict(branch=branch, framework=framework, implementation=f"of {ended}")
        found = dataclasses.replace(OK, **about, status=ended, reason="no room")
        pairs.append((Job(branch, found.implementation, asked=asked), found))
    assert exit_status.of(compare.answers(pairs)) == getattr(exit_status, status)


def test_a_named_kernel_may_fall_back(run):
    code, printed, found = run(REFUSES, "--on_unsupported=fallback")
    assert code == 0
    assert commands.ends(found) == "xla ok"
    assert "mosaic" in found[0].refused and "not mosaic:" in printed


def test_explain_only_prints(run, monkeypatch):
    """Installed flash attention is listed."""
    able = {"fa4": None, "flash_attn": "not installed"}  # a CPU has no such package
    monkeypatch.setattr(peers, "flash_why_not", lambda name, problem: able[name])
    code, printed, found = run("--framework=both --explain")
    assert code == 0 and not found
    assert "jax   sliding    xla: runs" in printed and "mosaic: refuses: " in printed
    assert re.search(r"torch +dense +fa4: runs", printed) and "flash_attn" not in printed
    words = "--framework=torch --branch=selected --peers=cudnn_nsa --mode=forward --mode=fwdbwd"
    reasons = re.findall(r"cudnn_nsa: refuses: (.*)", run(words, "--explain")[1])
    assert [peers.NO_GRADIENT in x for x in reasons] == [False, True]


def test_both_modes_in_one_run(run, tmp_path, monkeypatch):
    """All rows are judged before it is ready, and none is timed before it is told to."""
    events = []
    judged, timed = (lambda *_, x=x, **__: events.append(x) for x in ("judged", "timed"))
    pretend.calls_of(monkeypatch, Checker, "check", judged)
    pretend.calls_of(monkeypatch, timing, "time_host", timed)
    monkeypatch.setattr(turns, "wait", lambda: events.append("turn"))
    words = "--framework=torch --branch=dense --input=random --mode=forward --mode=fwdbwd"
    code, printed, found = run(words, "--most_rows=20 --turn")
    assert code == 0 and commands.ends(found) == "flash ok, flash ok"
    assert [(r.mode, r.rows_checked) for r in found] == [("forward", 12), ("fwdbwd", 12)]
    assert "problem: forward " in printed and "problem: fwdbwd " in printed
    out = {path.name for path in (tmp_path / "out").iterdir()}
    assert out >= {"compare_forward.png", "compare_fwdbwd.png", "compare.md"}
    assert events == ["judged", "judged", "turn", "timed", "timed"]
