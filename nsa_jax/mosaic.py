"""The implementation `mosaic` in JAX, which runs all steps on Mosaic kernels, with `jit`,
`vmap` and gradients.
"""

from nsa_core.steps import mosaic_attention
from nsa_jax.kernel_path import KernelPath

PATH = KernelPath(mosaic_attention.STEPS)

compressed_attention = PATH.compressed_attention
selected_attention = PATH.selected_attention
sliding_attention = PATH.sliding_attention
select_blocks = PATH.select_blocks
attention = PATH.attention
