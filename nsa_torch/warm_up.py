"""Compiles and loads all Mosaic kernels of a layer in parallel, before its first call.

A kernel serves every sequence length, so that the prepared kernels of a layer stay valid in memory
and on disk (`kernels_pallas.runtime.store`). In this module, a layer is a combination of heads,
widths, dtype and `NSAConfig`.
"""

from collections.abc import Iterable

import torch

from kernels_pallas.kernel import LENGTHS
from nsa_core.config import NSAConfig
from nsa_core.plan import kernels
from nsa_interop import launch


def prepare(
    *,
    heads: int,
    kv_heads: int,
    key_width: int,
    value_width: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    config: NSAConfig = NSAConfig(),
    scale: float | None = None,
    gradients: bool = True,
    packed: bool = False,
    lengths: Iterable[int] = LENGTHS,
    device: torch.device | str | int = "cuda",
    jobs: int | None = None,
) -> int:
    """Compile those Mosaic kernels of a layer that are not yet stored on disk. Then load all
    kernels of the layer.

    Args:
      heads, kv_heads: The numbers of query heads and of key/value heads.
      key_width, value_width: The numbers of columns per head. `value_width` defaults to
        `key_width`.
      dtype, config, scale: The same as in the calls of `attention`.
      gradients: Whether to include the kernels of the backward pass.
      packed: Whether to prepare the kernels for batches with `cu_seqlens` instead of the kernels
        for batches without `cu_seqlens`. Kernels that compute means are always included, for shared
        and for separate keys and values.
      lengths: Numbers of tokens of the calls. A kernel supports all lengths, but short and long
        sequences run different kernels. By default the kernels for short and for long sequences
        are included.
      device: The GPU on which the kernels are loaded.
      jobs: Number of processes that build missing kernels, by default one per core.

    Returns:
      The number of kernels that are ready.

    Raises:
      ValueError: `device` is no GPU.
      NotImplementedError: There is no Hopper GPU.
      RuntimeError: A kernel could not be built. The error message comes from the compiler.
    """
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise NotImplementedError("Mosaic kernels need a Hopper GPU, but torch finds none")
    wanted = kernels.kernels_of_layer(
        list(lengths),
        gradients=gradients,
        packed=packed,
        heads=heads,
        kv_heads=kv_heads,
        key_width=key_width,
        value_width=key_width if value_width is None else value_width,
        dtype=str(dtype).removeprefix("torch."),
        config=config,
        scale=scale,
    )
    return launch.prepare(wanted, device, jobs)
