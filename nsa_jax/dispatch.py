"""JAX's implementations of each step. `nsa_core.dispatch` chooses one."""

from nsa_core.dispatch import FUNCTIONS, STEPS, WHOLE, Implementation, Registry, kernel


def _table(step: str) -> tuple[Implementation, ...]:
    name = FUNCTIONS[step]
    kernels = (
        kernel("mosaic", f"nsa_jax.mosaic:{name}"),  # built for Hopper
        kernel("triton", f"nsa_jax.triton:{name}"),  # NVIDIA GPUs from Ampere on
    )
    if step == WHOLE:
        return kernels
    return (
        *kernels,
        Implementation("xla", f"nsa_jax.branches:{name}"),  # any device, memory bounded
        Implementation("reference", f"nsa_jax.reference:{name}"),
    )


REGISTRY = Registry("jax", {step: _table(step) for step in (*STEPS, WHOLE)})
