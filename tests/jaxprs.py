"""What programs of JAX are made of, and types of their arguments."""

import jax
import jax.numpy as jnp


def layer_types(*rows, heads, kv_heads, width):
    """Types of query, key, value and gates of rows `[.., T]`."""
    shapes = (heads, width), (kv_heads, width), (kv_heads, width), (heads, 3)
    return [jax.ShapeDtypeStruct((*rows, *x), jnp.bfloat16) for x in shapes]


def equations(jaxpr):
    """All equations, of those within others too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in jax.tree.leaves(
            list(eqn.params.values()),
            is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
        ):
            inner = getattr(sub, "jaxpr", sub)
            if hasattr(inner, "eqns"):
                yield from equations(inner)
