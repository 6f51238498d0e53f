"""The steps of NSA on Mosaic kernels, for `fused.py`."""

from kernels_pallas.specs.tile import slab_width
from nsa_core.steps import mosaic_backward, mosaic_compress, mosaic_forward
from nsa_core.steps.fused import Steps

STEPS = Steps(
    mosaic_forward,
    mosaic_backward,
    lists=("starts", "members", "counts"),
    narrowest=slab_width,
    summed=mosaic_forward.selected_and_sum,
    compression=mosaic_compress,
    reads_places=True,
    reads_pages=True,
    gates_together=True,
)
