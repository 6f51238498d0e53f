"""The steps of NSA on Triton kernels, for `fused.py`."""

from kernels_pallas.triton.tiling import LEAST
from nsa_core.steps import triton_backward, triton_forward
from nsa_core.steps.fused import Steps

STEPS = Steps(triton_forward, triton_backward, (), lambda width: min(width, LEAST))
