"""Lists the implementations of each step in JAX. `nsa_core.dispatch` chooses one implementation
per step."""

import functools

import kernels_pallas
from nsa_core.dispatch import FUNCTIONS, STEPS, WHOLE, Implementation, Registry


def _table(step: str) -> tuple[Implementation, ...]:
    name = FUNCTIONS[step]
    kernels = (
        Implementation(x, f"nsa_jax.{x}:{name}", functools.partial(kernels_pallas.why_not, x))
        # mosaic is for Hopper, triton for NVIDIA GPUs from Ampere on
        for x in ("mosaic", "triton")
    )
    if step == WHOLE:
        return tuple(kernels)
    return (
        *kernels,
        # xla runs on any device, with bounded memory
        Implementation("xla", f"nsa_jax.branches:{name}"),
        Implementation("reference", f"nsa_jax.reference:{name}"),
    )


REGISTRY = Registry("jax", {step: _table(step) for step in (*STEPS, WHOLE)})
