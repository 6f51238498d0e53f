"""All steps of NSA on Mosaic kernels in one function, and its gradient (see `fused.py`)."""

import functools

from kernels_pallas.specs.tile import slab_width
from nsa_core.steps import fused, mosaic_backward, mosaic_compress, mosaic_forward
from nsa_core.steps.fused import Inputs, Residuals, Steps

__all__ = ["STEPS", "Inputs", "Residuals", "backward", "forward", "forward_with_residuals"]

STEPS = Steps(
    mosaic_forward,
    mosaic_backward,
    lists=("starts", "members", "counts"),
    narrowest=slab_width,
    compression=mosaic_compress,
    gates_together=True,
)

forward = functools.partial(fused.forward, STEPS)
forward_with_residuals = functools.partial(fused.forward_with_residuals, STEPS)
backward = functools.partial(fused.backward, STEPS)
