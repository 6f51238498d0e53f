"""Pairs of packages that must fit, and the file that says what a run ran on."""

import json

import pytest
import torch

from bench import environment
from bench.environment import Pair, pair
from bench.harness import records
from tests import commands
from tests.tables import table

REQUIRES = {
    "torch": ["filelock", 'triton==3.6.0; platform_system == "Linux"'],
    "jax": [
        "jaxlib<=0.11.2,>=0.11.2",
        'jax-cuda13-plugin[with-cuda]==0.11.2; extra == "cuda13"',
    ],
    "jax-triton": ["jax>=0.11", "Triton>=3.7"],
}
BARE = {"torch": ["filelock"]}


def check(first, second, extra="", requires=REQUIRES, **versions):
    installed = {name.replace("_", "-"): version for name, version in versions.items()}
    return pair(first, second, extra, installed.get, requires.get)


def test_a_pair_that_fits():
    found = check("torch", "triton", torch="2.11.0+cu130", triton="3.6.0")
    want = "torch needs triton ==3.6.0"
    assert found == Pair("torch 2.11.0+cu130", "triton 3.6.0", "ok", want)
    assert check("jax", "jaxlib", jax="0.11.2", jaxlib="0.11.2").status == "ok"
    assert check("jax-triton", "triton", jax_triton="0.4", triton="3.7.1").status == "ok"


@pytest.mark.parametrize("triton", ["2.2.0", "3.6.1", None])
def test_a_pair_that_is_broken(triton):
    assert check("torch", "triton", torch="2.11.0", triton=triton).status == "broken"
    assert check("jax", "jaxlib", jax="0.11.2", jaxlib="0.11.1").status == "broken"


def test_what_is_not_installed_or_not_stated():
    assert check("flash-attn", "torch", torch="2.11.0") is None
    assert check("jax", "jax-cuda13-plugin", "cuda13", jax="0.11.2") is None
    found = check(
        "jax", "jax-cuda13-plugin", "cuda13", jax="0.11.2", jax_cuda13_plugin="0.11.1"
    )
    assert found.status == "broken"
    found = check("torch", "triton", requires=BARE, torch="2.11.0+cpu")
    assert found.status == "unchecked" and "states no version" in found.reason


def test_this_environment_fits():
    found = environment.installed_pairs()
    assert {each.status for each in found} <= {"ok", "unchecked"}, found
    assert any(each.first.startswith("jax ") and each.status == "ok" for each in found)


def test_two_runtimes_that_do_not_load_together_are_broken(monkeypatch):
    monkeypatch.setattr(
        environment, "_python", lambda program: (1, "Traceback\nno libcudart\n")
    )
    monkeypatch.setattr(environment.records, "version", {"jax-cuda13-plugin": "0.11.2"}.get)
    found = environment.cuda_runtimes("NVIDIA H100 80GB HBM3")
    assert found.status == "broken" and found.reason.endswith("no libcudart")
    assert environment.cuda_runtimes("cpu").status == "unchecked"


@pytest.mark.gpu
def test_two_runtimes_load_together():
    found = environment.cuda_runtimes(torch.cuda.get_device_name())
    assert found.status == "ok", found.reason


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("broken", 1), ("unchecked", 0)])
def test_the_command(status, code, tmp_path, monkeypatch, capsys):
    fake = [Pair("torch 1", "triton 2", status, "because")]
    monkeypatch.setattr(environment, "installed_pairs", lambda: fake)
    monkeypatch.setattr(environment, "device_name", lambda: "cpu")
    path = tmp_path / "env.json"
    assert commands.called(environment, f"--out={path}") == code
    assert f"{status:9} torch 1 with triton 2: because" in capsys.readouterr().out
    found = json.loads(path.read_text())
    assert found["pairs"][0] == {
        "first": "torch 1",
        "second": "triton 2",
        "status": status,
        "reason": "because",
    }
    assert found["device"] == "cpu" and found["versions"]["jax"] and "commit" in found


@pytest.mark.parametrize(("given", "here", "changed", "expected"), table("bench")["commits"])
def test_which_commit_is_measured(given, here, changed, expected, monkeypatch):
    monkeypatch.setattr(records, "head", lambda folder: here)
    monkeypatch.setattr(records, "output", lambda *words: changed)
    monkeypatch.setattr(records, "_driver", lambda: None)
    found = records.environment.__wrapped__(given)
    assert [found["commit"], found["dirty"]] == expected
