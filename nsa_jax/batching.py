"""Kernels under `vmap` and `shard_map`, which know nothing of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from nsa_jax.eager import any_rank


def _varying(x, axes):
    """`x` typed as varying along mesh axes: `shard_map` sees no such thing in kernels."""
    missing = axes - jax.typeof(x).manual_axis_type.varying
    return jax.lax.pcast(x, tuple(missing), to="varying")


def foldable(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of arrays `[B, ...]` under `vmap`: the mapped axis becomes part of `B`. Its sizes
    must come from the arrays.
    """

    @jax.custom_batching.custom_vmap
    @any_rank
    def folded(*arrays):
        types = [jax.typeof(x).manual_axis_type for x in jax.tree.leaves(arrays)]
        axes = frozenset().union(*(each.varying for each in types))
        return jax.tree.map(lambda x: _varying(x, axes), function(*arrays))

    @folded.def_vmap
    def rule(size, mapped, *arrays):
        def merge(x, is_mapped):
            x = x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        merged = [jax.tree.map(merge, x, flag) for x, flag in zip(arrays, mapped, strict=True)]
        outputs = folded(*merged)
        split = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), outputs)
        return split, jax.tree.map(lambda _: True, split)

    return folded
