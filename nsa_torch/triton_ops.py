"""`ArrayOps` for torch tensors whose kernels are Triton's: launched on the current stream."""

from typing import Any

import torch
from torch import Tensor

from kernels_pallas.triton.kernel import TritonKernel
from nsa_torch.torch_ops import TorchOps, readable


class TritonOps(TorchOps):
    """`run` launches a `kernels_pallas.triton.kernel.TritonKernel`."""

    def run(self, kernel, *tensors):
        return launch(kernel, *(readable(x) for x in tensors))

    def run_in_place(self, kernel, *tensors):
        """`run` of a kernel that writes to its arguments, or to tuples of them: none is copied,
        all are contiguous.
        """
        for i, x in enumerate(tensors):
            if not all(y.is_contiguous() for y in (x if type(x) is tuple else [x])):
                raise ValueError(f"{kernel.name}: argument {i} must be contiguous")
        launch(kernel, *tensors)


def launch(kernel: TritonKernel, *tensors: Any) -> list[Tensor]:
    """The outputs; every tensor is stored in memory row by row."""
    outputs = [
        tensors[0].new_empty(shape, dtype=getattr(torch, dtype))
        for shape, dtype in kernel.outputs
    ]
    options = {"num_warps": kernel.warps, "num_stages": kernel.stages}
    arguments: Any = *tensors, *kernel.scalars, *outputs, kernel.constants
    # Newer versions of Triton warn where fusing is not asked for; JAX's calls do it too.
    run(kernel.jitted, (kernel.programs,), *arguments, **options, enable_fp_fusion=True)
    return outputs


def run(kernel, grid, x: Tensor, *arguments, **options) -> None:
    """Launches a Triton kernel on the device of its first argument."""
    index = x.get_device()
    if index < 0 or index == torch.cuda.current_device():
        kernel[grid](x, *arguments, **options)
    else:  # Triton launches on the current one
        with torch.cuda.device(index):
            kernel[grid](x, *arguments, **options)


TRITON_OPS = TritonOps()
