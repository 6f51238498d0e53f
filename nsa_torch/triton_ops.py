"""`ArrayOps` for torch tensors whose kernels are Triton's: launched on the current stream."""

import functools

import torch

from nsa_torch import replay
from nsa_torch.packing import run
from nsa_torch.torch_ops import TorchOps, readable


class TritonOps(TorchOps):
    """`run` launches a `kernels_pallas.triton.kernel.TritonKernel`."""

    def run(self, kernel, *tensors):
        tensors = [readable(x) for x in tensors]
        launch = functools.partial(_launch, kernel)
        recording = replay.recording()
        return recording.called(launch, tensors) if recording else launch(*tensors)

    def run_in_place(self, kernel, *tensors):
        """`run` of a kernel that writes to its arguments: none is copied, all are contiguous."""
        for i, x in enumerate(tensors):
            if not x.is_contiguous():
                raise ValueError(f"{kernel.name}: argument {i} must be contiguous")
        _launch(kernel, *tensors)


def _launch(kernel, *tensors):
    outputs = [
        tensors[0].new_empty(shape, dtype=getattr(torch, dtype))
        for shape, dtype in kernel.outputs
    ]
    options = {"num_warps": kernel.warps, "num_stages": kernel.stages}
    # Newer versions of Triton warn where fusing is not asked for; JAX's calls do it too.
    options |= {**kernel.constants, "enable_fp_fusion": True}
    arguments = *tensors, *kernel.scalars, *outputs
    run(kernel.load(), (kernel.programs,), *arguments, **options)
    return outputs


TRITON_OPS = TritonOps()
