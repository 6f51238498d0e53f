"""What programs of JAX are made of."""

import jax


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
