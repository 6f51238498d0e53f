"""What tests need of the machine that they run on."""

import pytest
import torch

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_gpu = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")


def on_hopper(function):
    """A test that needs a Hopper GPU."""
    return pytest.mark.gpu(needs_gpu(function))


BOTH = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
