"""bench.memory_check: what it makes of what a sanitizer says, by one that is not real; layers on a
GPU."""

import dataclasses
import json
import os
import signal
import stat
import sys
import threading
import time

import pytest
import torch

from bench import memory_check
from bench.harness import checked_layer, exit_status, records
from bench.harness.checked_layer import LAYERS, Watch
from kernels_pallas.specs import gathered
from kernels_pallas.specs.gathered import GatheredAttention
from nsa_torch import mosaic
from nsa_torch.kernel_path import SAVING
from nsa_torch.operators import SHARED_KV
from nsa_torch.torch_ops import TorchOps
from tests import commands, planned, pretend
from tests.tables import table

LAYER, OTHER = "gathered, G=1", "gathered, G=8, 16 selected"

SANITIZER = f"""#!{sys.executable}
import json, os, subprocess, sys
words = sys.argv[1:]
child = words.index({sys.executable!r})
tool, subject = words[1], words[-1]
os.environ["UNDER"] = tool
status = subprocess.run(words[child:]).returncode
print("words", json.dumps(words))
found = json.loads(os.environ["FOUND"]).get(f"{{tool}} {{subject}}", int("planted" in subject))
what = "RACECHECK SUMMARY: {{}} hazard" if tool == "racecheck" else "ERROR SUMMARY: {{}} error"
if found and found > 0:
    print("=========     at " + words[-2].removeprefix("--name=") + "_mosaic_gpu_kernel+0x70")
elif found:  # elsewhere
    found = -found
if found is not None:
    print("=========", what.format(found) + "s" * (found != 1))
sys.exit(status)
"""
CHILD = """
import json, os, sys, time
ran = {"kernels": {"selected_forward": 2, "gathered_dq": 1}, "gathered_tiles": 3}
print("apart:", os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"], os.getpid(), flush=True)
place = os.environ.get("UNDER", "alone") + " " + sys.argv[-1]
said = json.loads(os.environ["SAID"]).get(place, {})
time.sleep(said.pop("sleep", 0))
status, silent = said.pop("exit", 0), said.pop("silent", False)
if "planted" not in sys.argv[-1] and not silent:
    print(json.dumps(ran | {"digest": "a", "fault": None} | said))
sys.exit(status)
"""


@pytest.fixture
def sanitizer(tmp_path, monkeypatch):
    """Sets what the sanitizer finds and the layers say, by `<tool> <layer>`."""
    pretend.gpu(monkeypatch)
    pretend.folder(monkeypatch, "records", tmp_path / "records")
    monkeypatch.setattr(memory_check, "CHILD", "layer_that_says")
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "layer_that_says.py").write_text(CHILD)
    program = folder / memory_check.SANITIZER
    program.write_text(SANITIZER)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setenv("PYTHONPATH", str(folder))

    def told(found=None, said=None):
        monkeypatch.setenv("FOUND", json.dumps(found or {}))
        monkeypatch.setenv("SAID", json.dumps(said or {}))

    told()
    return told


def check(tmp_path, *flags):
    """Exit status, and the lines by tool and layer, each once."""
    out = tmp_path / "out"
    words = "--only", LAYER, "--only", OTHER, "--out", out, *flags
    status = commands.called(memory_check, *words)
    lines = records.flat_lines(out / "memory_check.jsonl")
    found = {(x["tool"], x["layer"]): x for x in lines}
    assert len(found) == len(lines)
    return status, found


def log(tmp_path, tool, layer):
    return (tmp_path / "out" / f"{tool}, {layer or 'planted'}.log").read_text()


def test_clean(sanitizer, tmp_path, capsys):
    status, lines = check(tmp_path, "--commit=0123456789 --save_records")
    assert status == exit_status.OK
    kept = tmp_path / "records" / "a-gpu" / "kernel_log" / "memory_check.jsonl"
    assert kept.read_text() == (tmp_path / "out" / "memory_check.jsonl").read_text() != ""
    alone = [("alone", LAYER), ("alone", OTHER)]
    tools = "memcheck", "synccheck", "racecheck"
    planted = [(x, "") for x in tools]
    assert [*lines] == alone + planted + [(x, y) for x in tools for y in (LAYER, OTHER)]
    assert all("apart: 1" in log(tmp_path, *x) for x in lines)
    watched = {x for x in lines if "kns=_mosaic_gpu_kernel" in log(tmp_path, *x)}
    assert watched == {x for x in lines if x[0] == "racecheck"}
    assert {(x["commit"], x.get("dirty")) for x in lines.values()} == {("0123456789", None)}
    assert {(x["status"], x.get("reason", "")) for x in lines.values()} == {("ok", "")}
    assert "3 tiles gathered" in capsys.readouterr().out


def test_only_racecheck_watches_some_kernels(sanitizer, tmp_path):
    status, lines = check(tmp_path, "--kernels=gathered")
    assert status == exit_status.OK and not (tmp_path / "records").exists()
    logs = {x: log(tmp_path, *x) for x in lines}
    assert "--name=gathered" in logs["racecheck", ""]
    watched = {x[0] for x in lines if '"kns=gathered"' in logs[x]}
    assert watched == {"racecheck"} and "kns=" not in logs["memcheck", ""]


@pytest.mark.parametrize("row", table("memory_check"), ids=lambda row: row["reason"])
def test_what_is_wrong(row, sanitizer, tmp_path):
    where = tuple(row["where"])
    sanitizer(row.get("found"), row.get("said"))
    status, lines = check(tmp_path)
    assert status == exit_status.WRONG
    wrong = {x for x, line in lines.items() if line["status"] == "wrong"}
    # Nothing is run under a tool that is not believed, nor what is wrong alone.
    assert any(x[0] == where[0] and x[1] for x in lines) == bool(where[1])
    assert wrong == {where} and row["reason"] in lines[where]["reason"]
    tools = {tool for tool, layer in lines if layer == LAYER}
    assert (tools == {"alone"}) == (where[0] == "alone")


@pytest.mark.parametrize(
    "found, other, expected",
    [
        ({}, "ok", exit_status.NOT_MEASURED),
        ({f"memcheck {OTHER}": 1}, "wrong", exit_status.WRONG),  # comes before what never ends
    ],
)
def test_what_does_not_end(found, other, expected, sanitizer, tmp_path):
    sanitizer(found, {f"memcheck {LAYER}": {"sleep": 30}})
    status, lines = check(tmp_path, "--tool=memcheck --tool=memcheck --timeout_s=5")
    assert status == expected
    assert lines["memcheck", LAYER]["status"] == "timeout"
    assert lines["memcheck", LAYER]["reason"] == "timeout after 5 s"
    assert lines["memcheck", OTHER]["status"] == other


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_ends_what_runs(number, sanitizer, tmp_path, capsys):
    """And nothing that has waited for it runs then."""
    sanitizer(said={f"alone {x}": {"sleep": 60} for x in (LAYER, OTHER)})
    first, second = (tmp_path / "out" / f"alone, {x}.log" for x in (LAYER, OTHER))

    def stop():
        while not (first.exists() and "apart:" in first.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    threading.Thread(target=stop, daemon=True).start()
    begin = time.monotonic()
    with pytest.raises(FileNotFoundError):  # no line was written
        check(tmp_path, "--timeout_s=50 --at_once=1")
    assert time.monotonic() - begin < 30
    assert f"interrupted by {number.name}" in capsys.readouterr().out
    with pytest.raises(ProcessLookupError):
        os.kill(int(first.read_text().split()[2]), 0)
    assert not second.exists()


def test_bad_input(sanitizer, tmp_path, monkeypatch):
    with pytest.raises(
        ValueError,
        match="of the name of a kernel of 'gathered, G=1', which runs selected_forward, ga",
    ):
        check(tmp_path, "--kernels=interval")
    with pytest.raises(ValueError, match="--kernels requires --tool=racecheck"):
        check(tmp_path, "--kernels=gathered --tool=memcheck")
    with pytest.raises(ValueError, match=r"has files; --out must name a new folder"):
        check(tmp_path)
    with pytest.raises(
        ValueError, match="the beginning of a row's name, got H; the names are G=6, D=64"
    ):
        commands.called(memory_check, "--only=H")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NotImplementedError, match="compute-sanitizer of the CUDA toolkit must"):
        check(tmp_path)
    pretend.gpu(monkeypatch, (8, 0))
    with pytest.raises(NotImplementedError, match="Hopper"):
        check(tmp_path)


def test_gathered_tiles_are_those_after_a_long_list(monkeypatch):
    """A tile of 32 tokens, two rows of [B, Hkv]; the last list of a row has no tile after it."""
    shape = dict(B=1, T=100, S=100, H=4, Hkv=2, D=64, Dv=64, dtype="bfloat16", scale=1.0)
    work = dict(n=6, gather_limit=24, segment_tokens=100, segments=1, items=1)
    spec = GatheredAttention(**shape, **work)
    counts = torch.zeros(2, 4, 6, dtype=torch.int32)
    counts[..., 0] = 99
    counts[..., 1] = torch.tensor([[25, 24, 25, 99], [1, 26, 27, 28]])
    assert spec.all_tiles == 4
    watch, merge = Watch(), gathered.merge(spec)
    monkeypatch.setattr(TorchOps, "run", lambda *_: "made")
    for kernel in (gathered.merge_dq(spec), merge, merge):
        given = [torch.empty(0)] * len(kernel.inputs)
        given[kernel.names.index("block_counts")] = counts
        assert watch.run(kernel, *given) == "made"
    assert watch.gathered_tiles == 8
    assert watch.launches == {"gathered_merge_dq": 1, "gathered_merge": 2}


ONES, TWOS = ([torch.full((2,), x)] for x in (1.0, 2.0))
RIGHT = {"kernels": ["gathered_merge"], "tiles": 3, "found": [ONES] * 3}
JUDGED = [
    ({}, None),
    ({"kernels": ["deltas"]}, "gathered_merge did not run"),
    ({"tiles": 0}, "no tile was gathered, although the layer must run gathered_merge"),
    ({"found": [[ONES[0] / 0]] * 3}, "the results must be finite"),
    (
        {"found": [ONES, ONES, TWOS]},
        "the calls must give one result, got 2 results in 3 calls",
    ),
]


@pytest.mark.parametrize("change, fault", JUDGED)
def test_what_is_said_of_a_layer(change, fault, monkeypatch, capsys):
    kernels, tiles, found = (RIGHT | change).values()
    watched, calls = [], iter(found)

    class Pretended(Watch):
        def __init__(self):
            super().__init__()
            watched.append(self)
            self.launches.update(kernels)
            self.gathered_tiles = tiles

    layer = dataclasses.replace(LAYERS[LAYER], kernels=("gathered_merge",))
    monkeypatch.setattr(checked_layer, "LAYERS", {"a layer": layer})
    monkeypatch.setattr(checked_layer, "Watch", Pretended)
    monkeypatch.setattr(checked_layer, "torch_inputs", lambda _: [None])
    monkeypatch.setattr(checked_layer, "results", lambda *_: next(calls))
    checked_layer.FLAGS.unparse_flags()
    checked_layer.FLAGS([""])
    status = checked_layer.main(["", "a layer"])
    said = json.loads(capsys.readouterr().out)
    assert said["fault"] == fault and (status == exit_status.WRONG) == (fault is not None)
    assert said["kernels"] == dict.fromkeys(kernels, 1) and said["gathered_tiles"] == tiles
    assert len(watched) == 1 and next(calls, None) is None


@pytest.mark.parametrize("name", LAYERS)
def test_plans_have_the_kernels_that_must_run(name):
    """A row once named kernels that its layer no longer ran."""
    layer = LAYERS[name]
    call = planned.described(
        SHARED_KV,
        layer.B,
        layer.T,
        heads=layer.H,
        kv_heads=layer.Hkv,
        key_width=layer.D,
        value_width=layer.Dv,
        config=layer.config,
        packed=layer.cu_seqlens is not None,
    )
    plans = mosaic.PATH.planned(SHARED_KV, SAVING).plans(call, None)
    assert {*layer.kernels} <= {step.name for plan in plans for step in plan.steps}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["G=16", "gathered, G=4"])
def test_layers(name):
    assert checked_layer.check(LAYERS[name])["fault"] is None


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change, fault",
    [
        (
            {"config": checked_layer.PAPER},
            "gathered_forward, gathered_merge, gathered_dq, gath",
        ),
        ({"T": 1552}, "no tile was gathered"),
    ],
)
def test_a_layer_that_gathers_nothing(change, fault):
    """3000 tokens have 47 blocks, and a list of 64 is not long where a token selects 16. Where it
    selects 6, one of 25 is long: of 1552 tokens only the last tile may have that.
    """
    layer = dataclasses.replace(LAYERS["gathered, G=4"], **change)
    assert checked_layer.check(layer)["fault"].startswith(fault)
