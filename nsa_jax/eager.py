"""Runs each step of a public call as one program. A program is traced and compiled once for all
calls of the same shapes.

Without compiled programs for steps, each operation of a call outside `jax.jit` would be compiled
separately, and each layer of a model inside `jax.jit` would be traced separately. Tracing 12
layers forward and backward takes 0.8 s on a CPU, and would take 2.4 s without programs for steps.
"""

import functools
import sys
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.mosaic.capability import interpret
from nsa_core import policy
from nsa_core.types import Branches

_ARRAY = object()  # represents an array argument in a key


def any_rank[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Wrap `function`, so that it may broadcast arrays of different ranks. The wrapped function
    ignores the caller's setting of `jax_numpy_rank_promotion`.
    """

    @functools.wraps(function)
    def called(*args: P.args, **options: P.kwargs) -> R:
        _refuse_tensors(function, args, options)
        with jax.numpy_rank_promotion("allow"):
            try:
                return function(*args, **options)
            except Exception as error:
                _refuse_explicit(function, error, args, options)
                raise

    return called


def _refuse_tensors(function, args, options) -> None:
    """Check that no argument, and no field of `Branches`, is a torch tensor."""
    if (torch := sys.modules.get("torch")) is None:
        return
    for given in (*args, *options.values()):
        for x in given if isinstance(given, Branches) else [given]:
            if isinstance(x, torch.Tensor):
                raise ValueError(
                    f"arrays must be of JAX or NumPy, got a torch.Tensor of shape "
                    f"{tuple(x.shape)} in {function.__name__}"
                )


def _refuse_explicit(function, error: Exception, args, options) -> None:
    """Raise NotImplementedError if an array is sharded over explicit axes, and if the call
    would be valid with unsharded arrays of the same shapes.
    """
    leaves, tree = jax.tree.flatten((args, options))
    arrays = [x for x in leaves if isinstance(x, jax.Array)]
    cut = [x for x in (jax.typeof(x).sharding for x in arrays) if is_explicit(x)]
    if not cut:
        return

    def whole(*arrays):
        supply = iter(arrays)
        given = [next(supply) if isinstance(x, jax.Array) else x for x in leaves]
        args, options = jax.tree.unflatten(tree, given)
        return function(*args, **options)

    try:
        jax.eval_shape(whole, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays))
    except Exception:
        return
    raise NotImplementedError(
        f"arrays must not be sharded over explicit axes of a mesh here, got {cut[0].spec}; call "
        f"{function.__name__} inside of jax.shard_map or jax.sharding.auto_axes, or make the mesh "
        "with axes of AxisType.Auto"
    ) from error


def is_explicit(sharding: jax.sharding.NamedSharding) -> bool:
    """Return whether `sharding` divides an array over explicit axes of its mesh."""
    return not set(sharding.mesh.explicit_axes).isdisjoint(
        jax.tree.leaves(tuple(sharding.spec))
    )


@functools.lru_cache(1024)
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function`, so that a call runs a compiled program. Arguments other than arrays must
    be hashable.

    While kernels are interpreted, a call runs `function` itself, without a program.
    """

    @functools.wraps(function)
    def called(*args, **options):
        if interpret.get() is not False:
            return function(*args, **options)
        leaves, tree = jax.tree.flatten((args, options))
        # A scale may be a NumPy number, which also has a dtype.
        leaves = [float(x) if isinstance(x, np.floating) else x for x in leaves]
        arrays = [x for x in leaves if hasattr(x, "dtype")]
        constants = tuple(_ARRAY if hasattr(x, "dtype") else x for x in leaves)
        return _program(function, tree, constants, policy.in_force())(*arrays)

    return called


@functools.lru_cache(4096)
def _program(
    function: Callable[..., Any], tree: Any, constants: tuple[Hashable, ...], state: Hashable
):
    """Return a compiled program for these arguments. `state` has all other values on which
    `function` depends."""

    def program(*arrays):
        supply = iter(arrays)
        leaves = [next(supply) if x is _ARRAY else x for x in constants]
        args, options = jax.tree.unflatten(tree, leaves)
        return function(*args, **options)

    program.__name__ = getattr(function, "__name__", "program")
    return jax.jit(program)


def forget() -> None:
    """Clear the compiled programs. Tests that change the state of a step call this function."""
    _program.cache_clear()


def _axes(arrays) -> frozenset[Hashable]:
    """Return the mesh axes of `jax.shard_map` along which at least one of `arrays` varies."""
    types = [jax.typeof(x).manual_axis_type for x in jax.tree.leaves(arrays)]
    return frozenset().union(*(each.varying for each in types))


def _varying(arrays, axes):
    """Return `arrays`, a pytree, with types that vary along the mesh `axes`. `shard_map` cannot
    infer this type for the results of kernels.
    """

    def varying(x):
        missing = axes - jax.typeof(x).manual_axis_type.varying
        return jax.lax.pcast(x, tuple(missing), to="varying")

    return jax.tree.map(varying, arrays)


class custom_vjp:
    """Like `jax.custom_vjp`, for a function whose first `static` arguments are constants. All other
    arguments are arrays or pytrees of arrays.

    Inside `jax.shard_map`, an array may be the same on all devices of a mesh axis along which
    another array varies. The gradient of the array is the sum over these devices. JAX computes
    the sum only if all arrays of a custom rule vary along the same axes.
    """

    def __init__(self, function: Callable[..., Any], static: int = 0):
        self._static = static
        self._rule = jax.custom_vjp(function, nondiff_argnums=tuple(range(static)))
        functools.update_wrapper(self, function)

    def defvjp(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        self._rule.defvjp(any_rank(forward), any_rank(backward))

    def __call__(self, *arguments):
        constants, arrays = arguments[: self._static], arguments[self._static :]
        return self._rule(*constants, *_varying(arrays, _axes(arrays)))


def foldable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a `function` of arrays `[B, ...]` for `vmap`, so that the mapped axis becomes part of
    `B`. The function must read all sizes from the arrays.
    """

    @jax.custom_batching.custom_vmap
    @any_rank
    def folded(*arrays):
        return _varying(function(*arrays), _axes(arrays))

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


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def refuse_derivatives(message: str, arrays):
    """Return `arrays`, a pytree, unchanged. A derivative with respect to one of these arrays
    raises NotImplementedError.
    """
    del message
    return arrays


@refuse_derivatives.defjvp
def _refuse(message: str, primals, tangents):
    raise NotImplementedError(message)
