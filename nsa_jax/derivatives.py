"""Raises an error for derivatives that are not implemented, which would otherwise be zeros."""

import functools

import jax


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def refuse_derivatives(message: str, arrays):
    """`arrays`, a pytree. A derivative with respect to one of them raises NotImplementedError."""
    del message
    return arrays


@refuse_derivatives.defjvp
def _refuse(message: str, primals, tangents):
    raise NotImplementedError(message)
