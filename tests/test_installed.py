"""What is told of the first calls of an installed wheel; on a GPU, the calls themselves."""

import sys

import pytest
import torch

from bench import installed
from kernels_pallas.runtime import loaded


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured():
    installed.FLAGS.mark_as_parsed()
    with pytest.raises(NotImplementedError, match="a Hopper GPU is needed"):
        installed.main([])


@pytest.mark.gpu
@pytest.mark.parametrize("preset", installed.PRESETS.default)
def test_first_calls_of_each_preset(preset):
    found = installed.first_calls(preset, 200)
    assert 0 < found["again_s"] and found["total_s"] > 0
