"""Faults of an installation: each is said, and what to do."""

import importlib.metadata
import os
import shutil

import pytest
import torch
from packaging.requirements import Requirement

import kernels_pallas
from kernels_pallas.runtime.store import Store
from kernels_pallas.triton import capability
from nsa_torch import doctor
from tests import pretend
from tests.runtime_samples import built_of, kernel
from tests.tables import table
from tests.test_triton import pose


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    found = Store(tmp_path / "kernels", presets=tmp_path / "presets")
    pretend.machine(monkeypatch, store=found)
    return found


@pytest.fixture
def device(monkeypatch):
    """torch of CUDA 13 with a GPU of a capability."""

    def use(capability):
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        pretend.gpu(monkeypatch, capability)

    return use


def test_this_installation(capsys):
    status = doctor.main([])
    lines = capsys.readouterr().out.splitlines()
    whats = [line.split()[1] for line in lines]
    assert whats[:3] == ["python", "torch", "jax"] and {"gpu", "kernels", "folder"} <= {*whats}
    assert status == any(line.startswith("broken") for line in lines)
    with pytest.raises(SystemExit, match="2"):
        doctor.main(["--all"])


def test_a_torch_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "this torch is a CPU build" in doctor.gpu()[2]


@pytest.mark.parametrize("capability, state, words", table("choice")["doctor"])
def test_gpus(device, capability, state, words):
    device(capability and tuple(capability))
    _, found, said = doctor.gpu()
    assert found == state and words in said


def test_no_jax_and_versions_that_were_not_tried(monkeypatch):
    pretend.packages(monkeypatch, torch="9.0", transformers="5.20.0")
    # A checkout of the library that is not installed names no versions.
    assert [x[1] for x in doctor.packages()] == ["ok", "note", "note", "ok", "note"]
    requires = [
        "torch>=2.11,<2.16; extra == 'torch'",
        "transformers<5.25,>=5.17; extra == 'hf'",
    ]
    requires += ["transformers<5.18,>=5.17; extra == 'test'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requires)
    found = {what: (state, words) for what, state, words in doctor.packages()}
    bound = Requirement(requires[0]).specifier
    words = f"9.0 was not tested; run pip install 'torch{bound}'"
    assert found["torch"] == ("note", words)
    assert found["transformers"] == ("ok", "5.20.0")
    assert found["jax"][1] == "not installed; run pip install 'native-sparse-attention[jax]'"
    assert found["flax"][1].endswith("[nnx]'")


def test_two_cudas_in_one_environment(monkeypatch, device):
    device((9, 0))
    pretend.packages(monkeypatch, jax_cuda12_plugin="0.11.2")
    ((_, state, words),) = doctor.cuda()
    assert state == "broken"
    assert words.startswith("JAX uses CUDA 12, torch uses CUDA 13.0; run pip install")
    pretend.packages(monkeypatch, jax_cuda13_plugin="0.11.2")
    assert [state for _, state, _ in doctor.cuda()] == ["ok"]


def test_kernels_on_disk(store, monkeypatch):
    assert doctor.kernels()[2].startswith("none on disk; ")
    store.put(kernel(1), built_of(kernel(1)))
    layer = {"heads": 64, "kv_heads": 4, "key_width": 128, "value_width": 128}
    store.add_layers([layer | {"dtype": "bfloat16", "config": {}}])
    _, state, words = doctor.kernels()
    assert state == "ok" and "1 on disk" in words
    assert words.endswith("layers: H=64 Hkv=4 D=128/128 bfloat16")


def test_a_folder_of_another_user_and_one_that_cannot_be_written(store, monkeypatch):
    assert doctor.folder() == ("folder", "ok", str(store.folder))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "is not writable, kernels that are built now stay in memory" in doctor.folder()[2]
    store.put(kernel(1), built_of(kernel(1)))
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    _, state, words = doctor.folder()
    assert state == "note" and f"must belong to user {user + 1}, got" in words


def test_no_compiler_and_no_plugin(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("sysconfig.get_path", lambda name, scheme: str(tmp_path))
    assert "Triton needs Python.h" in doctor.compilers()[2]
    (tmp_path / "Python.h").touch()
    pretend.machine(monkeypatch, plugin=False)
    assert "only kernels that are on disk can run: JAX's CUDA plugin" in doctor.compilers()[2]
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert doctor.compilers()[2].startswith("Triton needs a C compiler")


def test_without_a_compiler_triton_kernels_refuse(monkeypatch):
    """Torch's operators run in their place; a kernel that is named says why not."""
    pytest.importorskip("triton")
    monkeypatch.delenv("CC", raising=False)
    pretend.asked_again(monkeypatch, capability, "_missing")
    assert kernels_pallas.why_not("triton", pose()) is None
    capability._missing.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for reason in (
        kernels_pallas.why_not("triton", pose()),
        capability.copies_why_not((9, 0), torch.bfloat16),
    ):
        assert reason.startswith("needs a C compiler") and reason.endswith("install gcc")
