"""Backward passes that autograd cannot record: nothing here but `reference` has second derivatives.

torch's `once_differentiable` is silent where the gradient that comes in wants none: what follows
from the inputs is then missing from a Hessian or a gradient penalty.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MESSAGE = (
    "implementation='reference' alone has second derivatives, without a context_mesh; autograd "
    "records a backward pass of another one, for create_graph=True (Hessians, gradient penalties)"
)


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`backward` of a `torch.autograd.Function`.

    Raises:
      NotImplementedError: autograd records it.
    """

    @functools.wraps(backward)
    def checked(ctx, *grads):
        # What is compiled has no second derivative: torch says so.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError(MESSAGE)
        return backward(ctx, *grads)

    return checked


def once(x: Tensor) -> Tensor:
    """`x`, through which there is no second derivative: for what others' kernels return."""
    return _Once.apply(x)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    @first_order
    def backward(ctx, grad):
        return grad
