"""The part of `nsa_core.debug` that reads JAX arrays. `nsa_core.debug` itself reports events of
both frameworks, torch and JAX.
"""

import jax
import numpy as np

from nsa_core.debug import Backend

JAX = Backend(
    "nsa_jax",
    lambda: False,
    lambda given: any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(given)),
    jax.block_until_ready,
    np.asarray,
)
