"""The runbook's command: its table, its exit status, and a row that is measured."""

import dataclasses
import os
import time
from pathlib import Path

import pytest

from bench import showcase
from bench.harness import exit_status, process, records
from bench.lm import log
from tests import commands
from tests.measured import logged
from tests.tables import table

TABLE = table("training")["showcase"]
SPEED = logged(log.Speed, **TABLE["speed"])


@pytest.fixture
def command(tmp_path, capsys):
    """`main` with arguments: status, what it printed, its folder."""

    def call(*arguments):
        out = tmp_path / "out"
        status = commands.called(showcase, f"--out={out}", *arguments)
        return status, capsys.readouterr(), out

    return call


@pytest.fixture
def rows(monkeypatch):
    """Rows that processes leave: by (length, mode) a `Speed`, or how the process ended."""
    found = {}

    def run(name, words, folder, timeout_s, budget):
        given = dict(word[2:].split("=", 1) for word in words if "=" in word)
        left = found[int(given["lengths"]), given["ranges"]]
        assert Path(given["config"]).name == f"runbook_s{given['lengths']}.yaml"
        (folder / f"{name}.log").write_text("it went on\n")
        if isinstance(left, log.Speed):
            log.append(Path(given["out"]) / "train.jsonl", [left])
            return process.Result(name, "x", "ok")
        code, said = left
        (folder / f"{name}.log").write_text(f"it went on\nerror: {said}\n")
        reason = f"exit status {code}" if code else "timeout after 600 s"
        return process.Result(name, "x", "failed", 1.0, reason)

    monkeypatch.setattr(process, "run", run)
    monkeypatch.setattr(showcase.shutil, "which", lambda name: None)
    return found


def test_the_report(command, rows):
    oom = dataclasses.replace(SPEED, status="oom", reason="no room | here", time_ms=None)
    none = dataclasses.replace(SPEED, implementation="fa2", time_ms=80.0)
    slow = dataclasses.replace(SPEED, implementation="fa2 ranges=v1", time_ms=250.0)
    for length in (512, 2048):
        rows |= {(length, "v1"): slow, (length, "v2"): SPEED, (length, "none"): none}
        rows[length, "adaptive"] = oom if length == 512 else (3, "FA-2 needs CUDA tensors")
    status, printed, out = command("--lengths=512,2048")
    text = (out / "showcase.md").read_text()
    assert status == exit_status.NOT_MEASURED and text in printed.out
    assert "2 of 8 rows were not measured" in printed.err
    assert (
        "### Selection by ranges (Device: some GPU, torch 2.15, cuda 13.0, driver 580)" in text
    )
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert table[0] == "| " + " | ".join(showcase.COLUMNS) + " |" and len(table) == 10
    assert (
        "| 2048 | v2 | 8 | 100 | 99 | 102 | 163840 | 3.00 | yes | - | 25.0 | ok |  |" in table
    )
    assert (
        "| 2048 | adaptive | - | - | - | - | - | - | - | - | - | unsupported | FA-2 needs CUD"
        in text
    )
    assert "no room / here" in text and "| oom |" in text
    assert "- S=2048: the fastest mode is none, 80 ms; v2 is 2.50x as fast as v1" in text
    assert "- `run_s512_v1.log`" in text
    assert len(log.read(out / "showcase.jsonl")) == 7


def test_the_exit_status(command, rows, tmp_path):
    rows[512, "v2"] = (3, "FA-2 needs CUDA tensors, got cpu")
    status, printed, _ = command("--lengths=512", "--modes=v2")
    assert status == exit_status.NOT_MEASURED and "1 of 1 rows were not measured" in printed.err
    assert "- S=512: nothing was measured" in printed.out and "Device: not known" in printed.out
    with pytest.raises(ValueError, match="has files; --out must name a new folder"):
        command("--lengths=512", "--modes=v2")
    for i, left in enumerate(((0, "slow"), (1, "broken"))):
        rows[512, "v2"], rows[512, "v1"] = left, SPEED
        status, printed, _ = command(
            "--lengths=512", "--modes=v1,v2", f"--out={tmp_path / str(i)}"
        )
        assert status == exit_status.WRONG and f"| error | {left[1]} |" in printed.out


@pytest.mark.parametrize(("name", "expected"), TABLE["fa2"].items())
def test_which_branches_are_fa2(name, expected):
    assert showcase.fa2(dataclasses.replace(SPEED, implementation=name)) == expected


def test_the_share_of_the_time_that_the_gpu_is_used(tmp_path):
    path = tmp_path / "gpu.csv"
    lines = ["timestamp, utilization.gpu [%], memory.used [MiB]"]
    shares = (0, 0, 40, 90, 100, 80, 5, 0)
    lines += [f"2026/01/02 03:04:{i:02d}.123, {x}, 900" for i, x in enumerate(shares)]
    path.write_text("\n".join([*lines, "2026/01/02 03:0"]))
    assert showcase.used(path, 2) == pytest.approx((90 + 100 + 80) / 3)
    assert showcase.used(tmp_path / "none.csv", 2) is None
    path.write_text(lines[0])
    assert showcase.used(path, 2) is None


@pytest.mark.parametrize(
    ("visible", "asked"), [(None, "0"), ("", "0"), ("3,1", "3"), ("GPU-5a,0", "GPU-5a")]
)
def test_the_gpu_that_is_watched_is_the_one_that_works(tmp_path, monkeypatch, visible, asked):
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    path = tmp_path / "gpu.csv"
    with showcase.watched(path):
        deadline = time.monotonic() + 20
        while not path.stat().st_size and time.monotonic() < deadline:
            time.sleep(0.01)
    assert path.read_text().split()[-2:] == ["-i", asked]


def test_a_row_is_measured_here(command):
    """Blocks by SDPA, on this machine: all of the way but FA-2."""
    status, printed, out = command(
        "--lengths=64", "--modes=none", "--config=tiny", "--set=runtime.kernels=sdpa",
        "--set=train.batch=1", "--set=data.corpus_bytes=65536", "--row_seconds=0",
    )  # fmt: skip
    assert status == 0, printed.out
    (line,) = log.read(out / "showcase.jsonl")
    assert (line.status, line.implementation, line.batch, line.seq_len) == ("ok", "sdpa", 1, 64)
    assert line.device == "cpu" or records.environment()["versions"]["cuda"]
    assert f"the fastest mode is none, {line.time_ms:.4g} ms" in printed.out
