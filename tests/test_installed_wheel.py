"""What is told of the first calls of an installed wheel; on a GPU, the calls themselves."""

import sys

import pytest
import torch

from kernels_pallas.runtime import loaded
from nsa_interop import build
from nsa_torch import installed


def test_what_a_wheel_has_no_need_of_is_a_fault(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    (tmp_path / "empty").mkdir()
    assert installed.faults(tmp_path) == []
    (tmp_path / "empty" / "kernel").touch()
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.setattr(loaded.store(), "_memory", {"key": None})
    assert installed.faults(tmp_path) == [
        "wrote empty/kernel",
        "imported jax",
        "built 1 kernels",
    ]


def test_a_wheel_serves_every_length_between_those_that_it_is_made_of():
    between = (64, 700, 5000, 70000, 500000)
    missing = {*build.kernels_of("paper", True, between)} - {*build.kernels_of("paper", True)}
    assert not missing, [kernel.name for kernel in missing]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(capsys):
    assert installed.main([]) == 1
    assert capsys.readouterr().err == "a Hopper GPU is needed\n"


@pytest.mark.parametrize(
    "flag, words",
    [
        ("--preset=paper,big", "--preset must be of paper, seed, smallgroup, got big"),
        ("--length=3", "--length must be at least 64, got 3"),
    ],
)
def test_flags_that_are_refused(flag, words, capsys):
    with pytest.raises(SystemExit) as error:
        installed.main([flag])
    assert error.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("preset", installed.PRESETS)
def test_first_calls_of_each_preset(preset):
    found = installed.first_calls(preset, 200)
    assert 0 < found["again_s"] and found["total_s"] > 0
