"""The implementation `triton` in JAX, which runs all steps on Triton kernels, with `jit`,
`vmap` and gradients.
"""

from nsa_core.steps import triton_attention
from nsa_jax.kernel_path import KernelPath

PATH = KernelPath(triton_attention.STEPS)

compressed_attention = PATH.compressed_attention
selected_attention = PATH.selected_attention
sliding_attention = PATH.sliding_attention
select_blocks = PATH.select_blocks
attention = PATH.attention
