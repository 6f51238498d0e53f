"""Compiles and loads the kernels of a layer before its first call, all at once and in parallel.

A kernel serves every length, so what is prepared once for a layer (heads, widths, dtype,
`NSAConfig`) stays, on disk too (`kernels_pallas.runtime.store`).
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
    """Compiles the kernels of a layer that are not on disk yet, and loads all of them.

    Args:
      heads, kv_heads: query heads, and those of keys and values.
      key_width, value_width: columns of a head; by default those of a value are those of a key.
      dtype, config, scale: Those of the calls, see `attention`.
      gradients: Whether to include the kernels of the backward pass.
      packed: For batches with `cu_seqlens`. Otherwise also for compression by means, for tokens
        that the branches share and for separate tokens.
      lengths: tokens. A kernel serves all lengths; which kernels run differs between short and
        long sequences.
      jobs: processes that build what is not on disk; by default one a core.

    Returns:
      The number of kernels that are ready.

    Raises:
      ValueError: `device` is no GPU.
      NotImplementedError: There is no Hopper GPU.
      RuntimeError: A kernel could not be built. The message is its compiler's.
    """
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise NotImplementedError("Mosaic kernels need a Hopper GPU, torch finds none")
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
