"""Which Mosaic kernels a problem runs: the steps are traced, and no kernel runs."""

import jax
import jax.numpy as jnp

from kernels_pallas.kernel import Kernel
from nsa_core.config import NSAConfig
from nsa_core.steps import fused, mosaic_attention
from nsa_core.steps.mosaic_attention import Inputs
from nsa_core.types import Branches
from nsa_jax import geometry
from nsa_jax.jax_ops import JaxOps


class Recording(JaxOps):
    """Notes kernels in place of running them."""

    def __init__(self):
        self.kernels: dict[Kernel, None] = {}

    def run(self, kernel, *arrays):
        self.kernels[kernel] = None
        return [jnp.zeros(x.shape, x.dtype) for x in kernel.outputs]

    def device_name(self, x):
        return None  # measured tiles are a device's: none is asked for here


def kernels_of(
    *,
    length: int,
    heads: int,
    kv_heads: int,
    key_width: int,
    value_width: int,
    dtype: str,
    config: NSAConfig,
    gradients: bool,
    scale: float | None = None,
    packed: bool = False,
    batch: int = 1,
    compresses: bool = False,
    shared: bool = False,
) -> list[Kernel]:
    """The kernels of `attention` for `batch` sequences of `length` tokens.

    Args:
      heads, kv_heads, key_width, value_width: H, Hkv, D and Dv.
      dtype: `bfloat16` or `float16`.
      scale: None: 1 / sqrt(key_width).
      gradients: of a forward pass that keeps residuals and its backward pass, in place of a
        forward pass alone.
      packed: of rows with several sequences.
      compresses: of compression by means too (torch), with the gradients of tokens.
      shared: of tokens that all branches look at.
    """
    ops = Recording()
    count = length if compresses else config.num_compressed(length)

    def call(query, key, value, gates, segment_ids):
        layout = geometry.query_layout(
            batch, length, kv_len=length, segment_ids=segment_ids, config=config
        )
        inputs = Inputs(query, key, value, gates)
        if compresses:
            inputs = fused.with_means(mosaic_attention.STEPS, ops, inputs, config)
        rest, num_blocks = (layout, config, scale), config.num_blocks(length)
        if not gradients:
            return mosaic_attention.forward(ops, inputs, None, *rest, num_blocks)
        out, residuals = mosaic_attention.forward_with_residuals(
            ops, inputs, None, *rest, num_blocks
        )
        found = mosaic_attention.backward(ops, inputs, residuals, out, *rest)
        if compresses:
            steps, rest = mosaic_attention.STEPS, (length, config, shared)
            found = fused.gradients_of_tokens(steps, ops, found, *rest)
        return found

    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    key, value = (
        Branches(
            array(batch, count, kv_heads, width),
            *[array(batch, length, kv_heads, width)] * 2,
        )
        for width in (key_width, value_width)
    )
    gates = Branches.each(array(batch, length, heads))
    segment_ids = array(batch, length, dtype="int32") if packed else None
    query = array(batch, length, heads, key_width)
    jax.eval_shape(call, query, key, value, gates, segment_ids)
    return list(ops.kernels)
