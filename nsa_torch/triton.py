"""The steps on Triton kernels on torch tensors (implementation `triton`): GPUs from Ampere on.

No length compiles anything. A CUDA graph can capture a call whose layer has run before.
"""

from nsa_core.steps import triton_attention
from nsa_torch.kernel_path import KernelPath

PATH = KernelPath("triton", triton_attention.STEPS, masks=True)
compressed_attention = PATH.compressed_attention
selected_attention = PATH.selected_attention
sliding_attention = PATH.sliding_attention
select_blocks = PATH.select_blocks
attention = PATH
