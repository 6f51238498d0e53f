"""Describes the device and the problem of a call on JAX arrays. The description is the input of
`nsa_core.dispatch`.
"""

import jax

from kernels_pallas.mosaic.capability import interpret
from nsa_core.config import NSAConfig
from nsa_core.dispatch import Problem


def device_name() -> str | None:
    """Return the driver's name of JAX's default device. Return None if that device is no GPU, or
    if kernels are interpreted.
    """
    if interpret.get():
        return None
    device = _default_device()
    return device.device_kind if device.platform in ("gpu", "cuda") else None


def capability() -> tuple[int, int] | None:
    """Return the compute capability of JAX's default device, or None if that device is no NVIDIA
    GPU.
    """
    version = str(getattr(_default_device(), "compute_capability", ""))
    major, _, minor = version.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _default_device() -> jax.Device:
    device = jax.config.jax_default_device or jax.devices()[0]
    return jax.devices(device)[0] if isinstance(device, str) else device


def problem_of(
    query, kv_heads: int, num_keys: int, value_width: int, config: NSAConfig, packed: bool
) -> Problem:
    """Return the problem that `query` `[B, T, H, D]` defines on the default JAX backend.

    Under `jit` it is unknown whether a gradient will be requested. The problem assumes a
    gradient, so that an implementation without a backward pass is refused before the forward pass
    runs. If `compute_dtype` is set, the problem assumes no gradient, and a gradient is refused
    when it is requested.
    """
    batch, length, heads, width = query.shape
    return Problem(
        framework="jax",
        step="",
        platform=jax.default_backend(),
        capability=capability(),
        dtype=str(query.dtype),
        B=batch,
        T=length,
        S=num_keys,
        H=heads,
        Hkv=kv_heads,
        D=width,
        Dv=value_width,
        packed=packed,
        config=config,
        device=device_name(),
        requires_grad=config.compute_dtype is None,
    )
