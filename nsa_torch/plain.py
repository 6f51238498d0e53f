"""Finds out whether torch runs operations on tensors directly, and in which state a backward
pass is.

Only `reference` has second derivatives. torch's `once_differentiable` raises no error if the
incoming gradient requires no gradient. A Hessian or a gradient penalty would then lack the part
that depends on the inputs.

By default, torch frees the tensors that an operator has saved only after the operator's
backward pass. The outputs of the three branches, half of the memory of a call, are read only by
one of the first launches (`deltas`), so dq can reuse their memory. They are therefore released
early, but only in the last pass through a graph (no `retain_graph`), and only if no hook has
seen the saved tensors. A hook may keep such a tensor, or move it back from another stream. Code
that reads the node (`out.grad_fn.saved_tensors`) finds tensors without memory after the pass.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

TENSORS = frozenset({Tensor, torch.nn.Parameter})  # classes that override no operation


def plain(tensors: Iterable[Any]) -> bool:
    """Return whether torch runs operations on these tensors directly. This requires
    `undisturbed()`, and that no tensor has a subclass or the negative bit. Arguments that are
    not tensors are ignored.
    """
    return undisturbed() and all(
        type(x) in TENSORS and not x.is_neg() for x in tensors if isinstance(x, Tensor)
    )


def undisturbed() -> bool:
    """Return whether torch runs operations directly. In that case no function is traced,
    compiled or transformed, and no mode is active.
    """
    return (
        not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and torch._C._functorch.maybe_current_level() is None
        and torch._C._get_tracing_state() is None
        and forward_ad._current_level < 0
    )


def traced(tensors: Iterable[Any]) -> bool:
    """Return whether one of the tensors represents an input of a function that is being
    compiled. `is_compiling` does not suffice, since it is False while torch 2.11 traces a
    backward pass.
    """
    return any(isinstance(x, FakeTensor | FunctionalTensor) for x in tensors)


def as_given(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which autocast is off, since autocast would make the scores of float32
    tensors bfloat16.
    """
    # Tensors on meta have no autocast; torch 2.11 compiles no call that asks for it by name.
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of products of tensors of `dtype`. If autocast is on, it is autocast's
    dtype, except for float64.
    """
    if dtype is torch.float64:
        return dtype
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return dtype


def constant[Function: Callable](function: Function) -> Function:
    """Return `torch.compiler.assume_constant_result` without an immediate import of the compiler,
    which takes longer than all other imports.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# torch has no public names for these.
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: True)


def is_last_pass() -> bool:
    """Return whether no other pass through the same graph can follow this backward pass."""
    return not _keeps_graph()


def has_hooks() -> bool:
    """Return whether `torch.autograd.graph.saved_tensors_hooks` are set. Checkpointing uses
    such hooks.
    """
    return _hooks(True) is not None


def release(tensors: Sequence[Tensor]) -> None:
    """Free the memory of tensors that are not read any more. They are empty afterwards. Work
    that is queued on the current stream may still read them.
    """
    for x in tensors:
        if x.untyped_storage().nbytes() == x.nbytes:  # it has its memory for itself
            x.untyped_storage().resize_(0)


MESSAGE = (
    "implementation='reference' alone has second derivatives (create_graph=True, for Hessians and "
    "gradient penalties), without a context_mesh and, in layers on a GPU, without qk_norm_eps"
)


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the `backward` of a `torch.autograd.Function`, which has no second derivative.

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
    """Return `x` without second derivatives, for results of other libraries' kernels."""
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
    """Raise NotImplementedError, as the backward pass of functions that have none."""
    raise NotImplementedError(MESSAGE)


class Refused(torch.autograd.Function):
    """Marks a gradient as dependent on `inputs`, and refuses its own gradient."""

    @staticmethod
    def forward(grad, *inputs):
        return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = staticmethod(refuse)


def under_transforms() -> bool:
    """Return whether the current code runs under a transform of torch.func."""
    return torch._C._functorch.maybe_current_level() is not None
