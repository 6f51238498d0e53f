"""Which implementations JAX has of each step; how one is chosen: `nsa_core.dispatch`."""

from nsa_core.dispatch import WHOLE, Implementation, Registry, kernel


def _table(function: str) -> tuple[Implementation, ...]:
    name = function.split(":")[1]
    return (
        kernel("mosaic", f"nsa_jax.mosaic:{name}"),  # built for Hopper
        kernel("triton", f"nsa_jax.triton:{name}"),  # NVIDIA GPUs from Ampere on
        Implementation("xla", f"nsa_jax.{function}"),  # any device, memory bounded
        Implementation("reference", f"nsa_jax.reference:{name}"),
    )


REGISTRY = Registry(
    "jax",
    {
        "compressed": _table("branches:compressed_attention"),
        "scores": _table("select:select_blocks"),
        "selected": _table("branches:selected_attention"),
        "sliding": _table("branches:sliding_attention"),
        WHOLE: tuple(kernel(x, f"nsa_jax.{x}:attention") for x in ("mosaic", "triton")),
    },
)
