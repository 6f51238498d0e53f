"""Backward passes that autograd cannot record: nothing here but `reference` has second derivatives.

torch's `once_differentiable` raises nothing if the incoming gradient requires none. The part that
depends on the inputs is then missing from a Hessian or a gradient penalty.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MESSAGE = (
    "implementation='reference' alone has second derivatives (create_graph=True, for Hessians and "
    "gradient penalties), without a context_mesh and, in layers on a GPU, without qk_norm_eps"
)


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`backward` of a `torch.autograd.Function`.

    Raises:
      NotImplementedError: autograd records it.
    """

    @functools.wraps(backward)
    def checked(ctx, *grads):
        check_first_order()
        return backward(ctx, *grads)

    return checked


def check_first_order() -> None:
    """Raises NotImplementedError in a backward pass that autograd records."""
    # torch itself refuses second derivatives of compiled code.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise NotImplementedError(MESSAGE)


def once(x: Tensor) -> Tensor:
    """`x` without second derivatives, for the results of other libraries' kernels."""
    return _Once.apply(x)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        # torch.func records every backward pass.
        ctx.transformed = not torch.compiler.is_compiling() and under_transforms()
        if ctx.transformed:
            ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        if ctx.transformed:
            return Refused.apply(grad, *ctx.saved_tensors)
        check_first_order()
        return grad


def refuse(ctx: Any, *grads: Tensor) -> None:
    """The backward pass of functions that have none."""
    raise NotImplementedError(MESSAGE)


class Refused(torch.autograd.Function):
    """A gradient that depends on `inputs`, and has no gradient."""

    @staticmethod
    def forward(grad, *inputs):
        return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = staticmethod(refuse)


def under_transforms() -> bool:
    """Whether torch.func transforms what runs."""
    return torch._C._functorch.maybe_current_level() is not None
