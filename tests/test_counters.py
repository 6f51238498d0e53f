"""bench.counters: its lines from what ncu writes, and how it ends where ncu fails."""

import subprocess

import pytest

from bench import call_kernels, counters
from tests import commands, pretend

NAMES = [
    ("dkv_partials", "dkv: selected"),
    ("interval_forward", "sliding"),
    ("dkv_partials", "dkv: selected"),
]
PRINTED = "\n".join(["something else", *map("\t".join, NAMES)])


def written(names, metrics=counters.METRICS) -> str:
    """A CSV of ncu: its own words, titles, units, a launch a line; times 1, 2, 3 ms, each other
    number 10 times the launch."""
    lines = [
        "==PROF== Connected to process 1",
        *[",".join(f'"{x}"' for x in ("ID", "Kernel Name", *metrics))],
    ]
    lines.append(",".join(['""'] * (2 + len(metrics))))
    for i, (name, _) in enumerate(names, 1):
        cells = [str(i * 1_000_000 if x == counters.TIME else 10 * i) for x in metrics]
        lines.append(",".join(f'"{x}"' for x in (i, f"{name}{counters.OURS}", *cells)))
    return "\n".join(lines)


def test_launches_of_a_kernel_are_one_line():
    found = counters.lines("8k", PRINTED, written(NAMES), "0123456789")
    both, one = (x.extra | {"time_ms": x.time_ms, "commit": x.commit} for x in found)
    assert one["kernel"] == "8k: interval_forward, sliding"
    assert (one["time_ms"], one["tensor_pipe_percent"], one["commit"]) == (2, 20, "0123456")
    assert both["kernel"] == "8k: dkv_partials, dkv: selected (2 launches)"
    assert (both["time_ms"], both["tensor_pipe_percent"]) == (4, (10 * 1 + 30 * 3) / 4)
    assert both["l2_traffic"] == "25 % busy, 25 % hits; HBM 0.0 TB/s"
    assert both["warps_wait_for"] == "wait 25.0, sleeping 25.0; issue slots 25 %"


def test_launches_that_ncu_did_not_see_are_an_error():
    with pytest.raises(ValueError, match="ncu must report the launches that ran"):
        list(counters.lines("8k", PRINTED, written(NAMES[:2]), None))


def test_an_unknown_row_is_named_where_ncu_is_missing_too(monkeypatch):
    pretend.gpu(monkeypatch)
    monkeypatch.setattr(counters.shutil, "which", lambda _: None)
    with pytest.raises(ValueError, match="the names are 64k"):
        commands.called(counters, "--only=65k")
    with pytest.raises(NotImplementedError, match="ncu"):
        commands.called(counters, "--only=8k")
    pretend.gpu(monkeypatch, None)
    with pytest.raises(NotImplementedError, match="Hopper"):
        commands.called(counters, "--under_ncu=8k")


def test_what_ncu_says_where_it_fails(monkeypatch):
    real = subprocess.run

    def run(words, **how):
        if words[0] != "ncu":
            return real(words, **how)
        (log,) = (x.partition("=")[2] for x in words if x.startswith("--log-file"))
        with open(log, "w") as file:
            file.write("==ERROR== ERR_NVGPUCTRPERM")
        return subprocess.CompletedProcess(words, 1, "", "no counters")

    pretend.gpu(monkeypatch)
    monkeypatch.setattr(call_kernels, "prepared", lambda _: None)
    monkeypatch.setattr(counters.shutil, "which", lambda name: name)
    monkeypatch.setattr(counters.subprocess, "run", run)
    with pytest.raises(ChildProcessError, match=r"(?s)status 1.*ERR_NVGPUCTRPERM.*no counters"):
        commands.called(counters, "--only=8k")
