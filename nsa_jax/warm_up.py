"""Builds and loads the kernels of a layer before its first call."""

from collections.abc import Iterable

import jax.numpy as jnp

from kernels_pallas.kernel import LENGTHS
from kernels_pallas.mosaic.capability import HOPPER
from nsa_core.config import NSAConfig
from nsa_core.plan import kernels
from nsa_jax import ffi, jax_problem


def prepare(
    *,
    heads: int,
    kv_heads: int,
    key_width: int,
    value_width: int | None = None,
    dtype: jnp.dtype | type | str = jnp.bfloat16,
    config: NSAConfig = NSAConfig(),
    scale: float | None = None,
    gradients: bool = True,
    packed: bool = False,
    lengths: Iterable[int] = LENGTHS,
    device: int = 0,
    jobs: int | None = None,
) -> int:
    """Build those Mosaic kernels of a layer that are not yet stored on disk. Then load all
    kernels of the layer.

    Args:
      heads, kv_heads: The numbers of query heads and of key/value heads.
      key_width, value_width: The numbers of columns per head. `value_width` defaults to
        `key_width`.
      dtype, config, scale: as in the calls of `attention`.
      gradients: whether to prepare the kernels of the backward pass too.
      packed: whether rows contain several sequences (`segment_ids`).
      lengths: Numbers of tokens. A kernel supports all lengths, but short and long sequences
        run different kernels.
      device: The index of the GPU: its `local_hardware_id` in JAX.
      jobs: number of processes that build missing kernels; by default one per core.

    Returns:
      The number of kernels that are ready.

    Raises:
      NotImplementedError: JAX's default device is not a Hopper GPU.
      RuntimeError: A kernel could not be built or loaded. The error message gives the reason.
    """
    capability = jax_problem.capability()
    if capability != HOPPER:
        raise NotImplementedError(
            f"Mosaic kernels need compute capability {HOPPER} (Hopper), got {capability}"
        )
    wanted = kernels.kernels_of_layer(
        tuple(lengths),
        heads=heads,
        kv_heads=kv_heads,
        key_width=key_width,
        value_width=key_width if value_width is None else value_width,
        dtype=jnp.dtype(dtype).name,
        config=config,
        gradients=gradients,
        scale=scale,
        packed=packed,
        compresses=False,
    )
    return ffi.prepare(wanted, device, jobs)
