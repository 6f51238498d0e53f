"""From records to thresholds: what wins, what does not, and what is no evidence at all."""

import dataclasses
import functools
import os
import subprocess
from unittest import mock

import pytest
import yaml

from bench import tune_thresholds
from bench.harness import records
from bench.harness.process import ROOT
from bench.tuners import dense_crossover, threshold_evidence
from bench.tuners.threshold_evidence import evidence
from nsa_core import config_files, policy
from tests import commands, measured, pretend
from tests.measured import GPU, record
from tests.tables import table

SLUG = "nvidia-test-80gb"
TABLE = table("test_tune")


def pairs(branch, gains, fast="fa2", **fields):
    """Rows of the kernel and of what decides beside it, 1 ms, at each length."""
    base = "sdpa" if branch == "selected" else "masked"
    return measured.pairs(branch, gains, fast, base=base, **fields)


made = functools.partial(measured.made, pairs=pairs)


@pytest.fixture
def file(tmp_path):
    """The file of the device that the command writes."""
    return tmp_path / "out" / f"{SLUG}.yaml"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`bench.tune_thresholds` with these arguments; it writes `tmp_path/out/<device>.yaml`."""
    pretend.folder(monkeypatch, "devices", tmp_path / "devices")
    return lambda *args: commands.called(tune_thresholds, "--out", tmp_path / "out", *args)


@pytest.fixture
def write(tmp_path):
    def call(rows, name="fa2.jsonl"):
        records.append(tmp_path / name, rows)
        return tmp_path / name

    return call


def found(*rows):
    """The thresholds of these rows, margin 1.2."""
    into = evidence((f"rows:{i}", row) for i, row in enumerate(rows, 1))
    return tune_thresholds.tune(into, [], 1.2)["runtime"]


@pytest.mark.parametrize("gains,expected", table("bench")["thresholds"], ids=str)
def test_the_smallest_length_from_which_all_rows_win(gains, expected):
    assert found(*pairs("sliding", gains)) == {"fa2_min_len_win": expected}
    assert found(*pairs("compressed", gains)) == {"fa2_min_len_cmp": expected}
    assert found(*pairs("selected", gains, "mosaic")) == {"sel_min_len": expected}


@pytest.mark.parametrize("rows, expected", TABLE["decisions"].values(), ids=TABLE["decisions"])
def test_what_decides(rows, expected):
    assert found(*made(rows)) == expected


def test_fa2_is_compared_with_masked_sdpa_and_the_portable_path_stands_beside(
    run, write, file, capsys
):
    rows = made(TABLE["portable"])
    path = write(rows)
    assert found(*rows) == {"fa2_min_len_win": "never"}
    assert found(
        *(r for r in rows if r.implementation != "masked"), *pairs("compressed", {8: 2.0})
    ) == {"fa2_min_len_cmp": 8}, "without masked rows there is no answer"
    assert run(path) == 0
    printed = capsys.readouterr().out
    assert "runtime.fa2_min_len_win: never  (fa2 over masked, 2 rows" in printed
    assert "over the portable path 256" in printed
    assert "0.96x fa2 over masked (1 / 1.042 ms), 19.2x over the portable path" in printed
    device = policy.read(file)
    about = device.evidence["fa2_min_len_win"]
    assert (about["over"], about["over_portable_path"]) == ("masked", 256)
    assert about["decided_by"][0]["over_portable"] == 19.2
    # Choice has the portable path in FA-2's place; what a person writes stands.
    assert device.limit("fa2_min_len_win") == 256
    file.write_text(file.read_text().replace("win: never", "win: 512", 1))
    assert policy.read(file).limit("fa2_min_len_win") == 512


def test_thresholds_of_the_committed_records():
    """The H100's file is what the command makes of its records."""
    device = policy.of("NVIDIA H100 80GB HBM3")
    folder = records.folder_of(device.device)
    paths = [folder / name for name in threshold_evidence.FILES]
    rows = [row for path in paths for row in threshold_evidence.read_records(path)]
    made = tune_thresholds.tune(evidence(rows), [], 1.2)
    assert made["runtime"] == device.runtime.given()
    assert made["evidence"] == device.evidence


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
def test_lengths_of_the_committed_records(name):
    """From which NSA is faster than dense attention: what `explain` says on these."""
    device = policy.of(name)
    path = records.folder_of(name) / "compare.jsonl"
    again = f"python -m bench.tune_thresholds --dense {path}"
    found = dense_crossover.lengths(records.read(path))
    assert device.faster_than_dense == found, again


ALL = made(TABLE["all"])


def test_the_file_says_what_decided(run, write, file, capsys):
    path = write(ALL)
    assert run("--records", path, "--dry_run") == 0
    assert not file.parent.exists()
    assert run(path) == 0
    out = capsys.readouterr().out
    assert "+  fa2_min_len_win: 512" in out and f"[{path}:2]" in out
    device = policy.read(file)
    assert device.runtime == policy.Thresholds(512, "never", 256)
    about = device.evidence["fa2_min_len_win"]
    assert (about["margin"], about["rows"], about["kernel"]) == (1.2, 2, "fa2")
    assert about["decided_by"][-1]["row"] == "fa2.jsonl:2" and about["commits"] == ["c0ffee"]
    assert device.evidence["fa2_min_len_cmp"]["decided_by"][0]["speed_up"] == 1.0


def test_lengths_beside_dense_attention(run, write, file):
    """Of one sequence of random inputs; one length says something only where NSA is slower."""
    some = []
    for gains, fields in TABLE["over dense"]:
        for length, gain in gains.items():
            some.append(record("all", "mosaic", 1 / gain, S=length, **fields))
            some.append(record("dense", "cudnn", 1.0, S=length, **fields))
    assert run("--dense", write(some, "compare.jsonl")) == 0
    assert policy.read(file).faster_than_dense == {
        "torch 8/2 heads of 64": {"forward": 2048, "fwdbwd": "never"},
        "torch 64/2 heads of 64/32": {"forward": "never"},
    }
    with pytest.raises(ValueError, match="no rows: --dense needs"):
        run("--dense", write(some[-4:-2], "few.jsonl"))


def test_a_rewrite_keeps_policy_and_the_other_thresholds(run, write, file, monkeypatch):
    assert run(write(ALL)) == 0
    rule = dict(kernel="triton", steps=["selected"], allowed=False, reason="r", since="2025")
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"policy": [rule]}))
    more = write(pairs("sliding", {512: 1.0, 1024: 3.0}, H=4), "more.jsonl")
    before = file.read_text()
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", mock.Mock(side_effect=OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            run(more, "--threshold=fa2_min_len_win")
    assert file.read_text() == before and [*file.parent.iterdir()] == [file]
    assert run(more, "--threshold=fa2_min_len_win") == 0
    device = policy.read(file)
    assert device.runtime == policy.Thresholds(1024, "never", 256)
    assert [r.kernel for r in device.policy] == ["triton"]


CARD = "NVIDIA GeForce RTX 4090"


@pytest.fixture
def card(tmp_path):
    """The seed's rules for its card, and what a person wrote beside them."""
    source = config_files.FOLDER / "devices" / f"{config_files.slug(CARD)}.yaml"
    path = tmp_path / "out" / source.name
    path.parent.mkdir()
    own = "# measured at 300 W\nruntime:\n  sel_min_len: 64\n# of the lab\n"
    path.write_text(source.read_text().replace("policy:", f"{own}policy:"))
    return path


def test_the_card_of_the_seed_gets_its_answer(run, write, card, capsys):
    """Its matrix lifts the rule that it disproves, and no other; comments stay."""
    write(made(TABLE["card"]["matrix"]), "run/selection_s2/selection.jsonl")
    folder = write(made(TABLE["card"]["grid"]), "run/fa2/fa2.jsonl").parents[1]
    before = card.read_text().splitlines()
    assert run(folder) == 0
    device = policy.read(card)
    assert device.runtime == policy.Thresholds("never", "never", "never", 128)
    (rule,) = device.policy
    assert (rule.kernel, rule.steps) == ("fa2", ("compressed", "selected"))
    printed = capsys.readouterr().out
    assert "policy triton selected: lifted, it pays from 128 on" in printed
    assert "policy fa2 compressed: stays, fa2_min_len_cmp is never" in printed
    assert (
        "policy fa2 sliding: lifted, it pays from 256 on over the portable path, by which it is "
        "chosen; over masked SDPA fa2_min_len_win is never" in printed
    )
    assert device.limit("fa2_min_len_win") == 256
    after = card.read_text()
    kept = [line for line in before if line.startswith("#")]
    assert len(kept) == 4 and all(line in after.splitlines() for line in kept)
    assert "\n  sel_min_len: never\n" in after
    assert "ADR-2025-08" not in after and "ADR-2025-09" in after
    policy.of.cache_clear()
    assert run(folder) == 0
    assert card.read_text() == after and "unchanged" in capsys.readouterr().out


def test_the_workflow_tunes_from_every_step(run, write, file, tmp_path, monkeypatch):
    """What its pull request proposes, of records as `bench.oneshot` leaves them."""
    plan = yaml.safe_load((config_files.FOLDER / "oneshot" / "gpu.yaml").read_text())["steps"]
    for step, rows in TABLE["steps"].items():
        (command,) = [x["command"] for x in plan if x["name"] == step]
        name = command.split()[0].partition(".")[2]
        write(made(rows), f"artifacts/artifacts/c0ffee/{step}/{name}.jsonl")
    flow = yaml.safe_load((ROOT / ".github" / "workflows" / "gpu-bench.yml").read_text())
    steps = [x.get("run", "") for x in flow["jobs"]["propose"]["steps"]]
    (script,) = [x for x in steps if "bench.tune_thresholds" in x]
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')  # tells its words
    python.chmod(0o755)
    subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    assert run(*(tmp_path / "thresholds.txt").read_text().split()[2:]) == 0
    assert policy.read(file).runtime == policy.Thresholds(256, 256, 64, 128)


def test_a_rule_of_a_person_is_not_lifted(run, write, card):
    card.write_text(card.read_text().replace("  provisional: true\n", ""))
    assert (
        run(write(pairs("selected", {64: 9.0}, "triton", device=CARD), "selection.jsonl")) == 0
    )
    device = policy.read(card)
    assert [rule.kernel for rule in device.policy] == ["triton", "fa2"]
    assert device.runtime.sel_triton_min_L == 64


def test_no_rows_is_no_threshold(run, write, file):
    path = write([record("sliding", "fa2", None, status="unsupported", reason="no")])
    for args in ([], [path], [path, "--threshold=fa2_min_len_win"]):
        with pytest.raises(ValueError, match="no rows"):
            run(*args)
    assert not file.parent.exists()


def test_records_of_another_device(run, write, file):
    path = write(ALL + [dataclasses.replace(r, device="Other") for r in ALL])
    with pytest.raises(ValueError, match="records are from several devices"):
        run(path)
    assert run(path, "--device", GPU) == 0
    assert [*file.parent.iterdir()] == [file]


def test_csv_files_say_the_same(run, file, tmp_path):
    words = []
    for name, text in TABLE["csv"].items():
        path = tmp_path / f"{name}.csv"
        path.write_text(text)
        words += ["--csv", path]
    assert run(*words, "--device", GPU) == 0
    assert policy.read(file).runtime == policy.Thresholds(512, 512, sel_triton_min_L=256)


@pytest.mark.parametrize("name, text, message", TABLE["damaged"], ids=range(10))
def test_damaged_files_are_named(run, tmp_path, name, text, message):
    path = tmp_path / f"bad.{name}"
    heads = {x: y.splitlines(keepends=True)[0] for x, y in TABLE["csv"].items()}
    path.write_text(text.format(**heads))
    with pytest.raises(ValueError, match=message):
        run(*["--csv"] * (name == "csv"), path)


def test_check_says_where_choice_switches(run, write, capsys, monkeypatch):
    assert run(write(ALL)) == 0
    capsys.readouterr()
    assert run("--check", "--device", GPU) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7 and all(line.startswith("ok   ") for line in lines)
    assert "torch fa2_min_len_win at 511: sdpa" in lines[0]
    assert "torch fa2_min_len_win at 512: fa2" in lines[1]
    assert {line.split()[1] for line in lines if "sel_min_len" in line} == {"torch", "jax"}
    below = policy._below

    def mutant(name, value, problem):
        return below(name, value if value == policy.NEVER else value + 1, problem)

    monkeypatch.setattr(policy, "_below", mutant)
    assert run("--check", "--device", GPU) == 1
    assert "FAIL torch fa2_min_len_win at 512: sdpa" in capsys.readouterr().out
