"""What tests need of the machine that they run on."""

import pytest
import torch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a Hopper GPU")
