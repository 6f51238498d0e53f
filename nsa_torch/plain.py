"""Detects whether torch runs operations on tensors directly, and whether a backward pass is
recorded or is the last one.

Only `reference` has second derivatives. With `once_differentiable` of torch, a Hessian or a
gradient penalty would silently lack the part that depends on the inputs. `once_differentiable`
raises no error if the incoming gradient requires no gradient. This module raises an error instead
of computing an incomplete derivative.

By default, torch frees the tensors that an operator has saved only after the operator's backward
pass. The outputs of the three branches are half of the memory of a call. In the backward pass only
one of the first launches (`deltas`) reads the outputs of the branches. The memory of these outputs
can be reused for dq after the launch `deltas`. The outputs are released early only in the last pass
through a graph (no `retain_graph`), and only without hooks for saved tensors. A hook may keep a
saved tensor, or copy it back on another stream. After the backward pass, code that reads
`out.grad_fn.saved_tensors` finds tensors without memory.
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

TENSORS = frozenset({Tensor, torch.nn.Parameter})  # tensor classes that override no operation


def plain(tensors: Iterable[Any]) -> bool:
    """Return whether torch runs operations on these tensors directly. torch does so if
    `undisturbed()` is true and no tensor belongs to a subclass or has the negative bit. Arguments
    that are not tensors are ignored.
    """
    return undisturbed() and all(
        [type(x) in TENSORS and not x.is_neg() for x in tensors if isinstance(x, Tensor)]
    )


def undisturbed() -> bool:
    """Return whether torch runs operations directly: no function is traced, compiled or
    transformed, and no mode is active.
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
    """Return whether a tensor represents an input of a function that torch.compile traces.
    `is_compiling` does not suffice, since `is_compiling` is False while torch 2.11 traces a
    backward pass.
    """
    return any([isinstance(x, FakeTensor | FunctionalTensor) for x in tensors])


def as_given(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context without autocast. Autocast would compute the scores of float32 tensors in
    bfloat16.
    """
    # The device meta has no autocast. torch 2.11 cannot compile code that reads the autocast
    # state of that device.
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which torch computes matrix products of tensors of `dtype`. If autocast
    is on, the result is the dtype of autocast, except for float64.
    """
    if dtype is torch.float64:
        return dtype
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return dtype


def constant[Function: Callable](function: Function) -> Function:
    """Decorate a function as `torch.compiler.assume_constant_result` does, but do not import the
    compiler. The import of the compiler takes longer than all other imports together.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# torch has no public names for these functions.
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: True)


def is_last_pass() -> bool:
    """Return whether no other pass through the same autograd graph can follow the current
    backward pass."""
    return not _keeps_graph()


def has_hooks() -> bool:
    """Return whether `torch.autograd.graph.saved_tensors_hooks` are set. Checkpointing uses these
    hooks.
    """
    return _hooks(True) is not None


def release(tensors: Sequence[Tensor]) -> None:
    """Free the memory of tensors that no later operation reads. The tensors have no memory
    afterwards. Work that is already queued on the current stream may still read the memory.
    """
    for x in tensors:
        if x.untyped_storage().nbytes() == x.nbytes:  # no other tensor shares the memory of `x`
            x.untyped_storage().resize_(0)


MESSAGE = (
    "only implementation='reference' has second derivatives (create_graph=True, for Hessians and "
    "gradient penalties), without a context_mesh and, in layers on a GPU, without qk_norm_eps"
)


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the method `backward` of a `torch.autograd.Function`, which has no second
    derivative.

    Raises:
      NotImplementedError: Autograd records the backward pass.
    """

    @functools.wraps(backward)
    def checked(ctx, *grads):
        check_first_order()
        return backward(ctx, *grads)

    return checked


def check_first_order() -> None:
    """Raise NotImplementedError if autograd records the current backward pass."""
    # torch refuses second derivatives of compiled code, so that no check is needed.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise NotImplementedError(MESSAGE)


def once(x: Tensor) -> Tensor:
    """Return `x`, marked so that second derivatives raise an error. Use this function for results
    of kernels from other libraries.
    """
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
    """Raise NotImplementedError. Functions that have no gradient use this function as their
    backward pass."""
    raise NotImplementedError(MESSAGE)


class Refused(torch.autograd.Function):
    """Marks a gradient as dependent on `inputs`. If autograd asks for a second derivative, this
    function raises an error.
    """

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
