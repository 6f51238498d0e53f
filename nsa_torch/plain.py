"""Tests whether plain torch handles tensors, and constants for its compiler."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

TENSORS = frozenset({Tensor, torch.nn.Parameter})  # classes that override no operation


def plain(tensors: Iterable[Any]) -> bool:
    """Whether torch runs operations on these tensors directly: `undisturbed`, and no tensor has a
    subclass or the negative bit. Arguments that are not tensors are ignored.
    """
    return undisturbed() and all(
        type(x) in TENSORS and not x.is_neg() for x in tensors if isinstance(x, Tensor)
    )


def undisturbed() -> bool:
    """Whether torch runs operations directly: nothing is traced, compiled or transformed, and no
    mode is active.
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
    """Whether one of them stands for a tensor that a compiled function will be given. Where torch
    2.11 traces a backward pass, `is_compiling` is false.
    """
    return any(isinstance(x, FakeTensor | FunctionalTensor) for x in tensors)


def as_given(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Autocast off: it would make the scores of float32 tensors bfloat16."""
    # Tensors on meta have no autocast; torch 2.11 compiles no call that asks for it by name.
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The dtype of products of tensors of `dtype`: autocast's if it is on, except for float64."""
    if dtype is torch.float64:
        return dtype
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return dtype


def constant[Function: Callable](function: Function) -> Function:
    """`torch.compiler.assume_constant_result` without an immediate import of the compiler, which
    takes longer than all other imports.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
