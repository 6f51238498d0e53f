"""Kernels as operators `nsa::*`, bounds and launches included: `torch.compile` keeps each as it
is, and a gradient is an operator of its own.

An operator takes its tensors, then `PLACE`; a backward one the gradient first.

torch's dispatcher needs longer for such a call than a launch takes. Where it would do nothing
but find the function (`replay.plain`), `call` does without it.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from nsa_jax.config import NSAConfig
from nsa_torch import early_release, replay
from nsa_torch.first_order import first_order

PLACE = "SymInt kv_len, Tensor? lengths, Tensor? cu_seqlens, SymInt[] config, float? scale"
DEVICES = ("cpu", "cuda")
FIELDS = tuple(NSAConfig.__dataclass_fields__)
THREE = "Tensor query, Tensor key, Tensor value"
CHOSEN = f"{THREE}, Tensor block_indices"

config_of = functools.cache(NSAConfig)

# By name, the functions of the operators, and what gives them their gradients.
_functions: dict[str, Any] = {}
_differentiable: dict[str, Callable[..., Any]] = {}


def call(name: str, *arguments: Any, pair: replay.Pair | None = None) -> Any:
    """What `torch.ops.nsa.<name>` returns; where it has a gradient, perhaps without what is kept
    for it.

    Args:
      pair: what is known of calls with these arguments' signature, all of them plain.
    """
    if torch.compiler.is_compiling():
        return getattr(torch.ops.nsa, name)(*arguments)
    if replay.recording() and not requires_grad(*_tensors(arguments)):
        return _functions[name](*arguments)  # its steps are noted, not the operator
    if pair or _direct(arguments):
        differentiable = _differentiable.get(name)
        return (
            differentiable(pair, *arguments) if differentiable else _functions[name](*arguments)
        )
    return getattr(torch.ops.nsa, name)(*arguments)


def _direct(arguments: Sequence[Any]) -> bool:
    """Whether the dispatcher would do nothing but call the function."""
    device = next(x for x in arguments if isinstance(x, Tensor)).device
    return device.type in DEVICES and replay.plain(arguments)


def _addresses(arguments: Iterable[Any]) -> list[int]:
    return [x.data_ptr() for x in arguments if isinstance(x, Tensor)]


def _tensors(arguments: Iterable[Any]) -> list[Tensor]:
    return [x for x in arguments if isinstance(x, Tensor)]


def arguments(config: NSAConfig, kv_len: int | Tensor, cu_seqlens: Tensor | None, scale):
    """What `PLACE` describes."""
    lengths = kv_len if isinstance(kv_len, Tensor) else None
    kv_len = 0 if isinstance(kv_len, Tensor) else kv_len
    numbers = [getattr(config, name) for name in FIELDS]
    return kv_len, lengths, cu_seqlens, numbers, None if scale is None else float(scale)


def requires_grad(*tensors: Tensor) -> bool:
    """Whether autograd records what is made of these tensors."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def branch_shapes(query, key, value, *rest):
    """Output and log-sum-exp of a branch, unwritten."""
    out = query.new_empty(*query.shape[:3], value.shape[-1])
    return out, query.new_empty(query.shape[:3], dtype=torch.float32)


def define_branch(name, tensors, function, kept, backward) -> None:
    """Registers `nsa::name`, a branch, with the gradients of query, key and value."""
    define(name, tensors, "(Tensor out, Tensor lse)", function, branch_shapes)
    differentiate(name, tensors, 3, kept, backward, 2)


def define(name, tensors, results, function, shapes) -> None:
    """Registers `nsa::name`; `shapes` gives outputs like those of `function`, unwritten."""
    torch.library.define(f"nsa::{name}", f"({tensors}, {PLACE}) -> {results}")
    torch.library.impl(f"nsa::{name}", DEVICES, function)
    torch.library.register_fake(f"nsa::{name}", shapes)
    _functions[name] = function


def _refuse_empty(name: str, saved: Sequence[Any]) -> None:
    """Raises where memory of what was saved is gone (`early_release`)."""
    if any(x.numel() and not x.data_ptr() for x in _tensors(saved)):
        raise RuntimeError(
            f"the last backward pass of {name} did not end, and has given back memory of what it "
            "needs: run the forward pass again, or pass retain_graph=True"
        )


def differentiate(name, tensors, floats, kept, backward, returned) -> None:
    """Gradients of the first `floats` inputs of `nsa::name`, by `nsa::name_backward`. The first
    `returned` outputs are what a caller wants, the others are there for the gradients.

    `backward` takes the gradient of the first output, the other outputs (`kept`: as the schema
    has them, the first output before them if `Tensor out` is among them), then the inputs.
    """
    first = 0 if kept.startswith("Tensor out,") else 1
    count = kept.count("Tensor")

    def shapes(grad, *arguments):
        return [x.new_empty(x.shape) for x in arguments[count : count + floats]]

    # An operator of its own: what it calls need not be traceable. It has no autograd kernel,
    # and one of torch.library.custom_op would keep autograd from working inside.
    schema = f"Tensor grad, {kept}, {tensors}"
    define(f"{name}_backward", schema, "Tensor[]", backward, shapes)
    operator, function = getattr(torch.ops.nsa, name), _functions[name]
    gradient = _functions[f"{name}_backward"]

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx, run, results, pair, *inputs):
            with torch._C._AutoDispatchBelowAutograd():
                output = run(*inputs)
            arguments = *output[first:], *inputs
            ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in arguments))
            ctx.others = [None if isinstance(x, Tensor) else x for x in arguments]
            ctx.pair, ctx.addresses = pair, _addresses(arguments) if pair else None
            # Whether what was kept is this node's alone.
            ctx.alone = (
                results is not None and results <= first and not early_release.has_hooks()
            )
            ctx.set_materialize_grads(False)
            return output[:results]

        @staticmethod
        @first_order
        def backward(ctx, grad, *_):
            pairs = zip(ctx.saved_tensors, ctx.others, strict=True)
            arguments = [other if x is None else x for x, other in pairs]
            nothing = (None for _ in arguments[count + floats :])
            plain = replay.plain([grad])
            addresses = _addresses(arguments) if plain else []
            if 0 in addresses:
                _refuse_empty(name, arguments)
            last = ctx.alone and plain and early_release.is_last_pass()
            # The gradient that comes in may lie in what was kept, which then stays.
            apart = last and grad.untyped_storage().data_ptr() not in addresses
            with early_release.allowed(apart):
                # What was saved may come back as other tensors: from another device, say.
                if ctx.pair and addresses == ctx.addresses:
                    alike = ctx.pair.backward(grad)
                    if alike.program is None:
                        # What is recorded knows tensors as objects, and this one may be any of
                        # those that were saved.
                        grad = grad.detach()
                    found = gradient.again(alike, grad, *arguments)
                else:
                    found = call(f"{name}_backward", grad, *arguments)
            return None, None, None, *found, *nothing

    def dispatched(*inputs):
        return Differentiable.apply(operator, None, None, *inputs)

    def direct(pair, *inputs):
        run = functools.partial(function.again, pair.forward) if pair else function
        return Differentiable.apply(run, returned, pair, *inputs)

    # Not torch.library.register_autograd, which at each call lists all arguments of the schema
    # once for each of them.
    torch.library.impl(f"nsa::{name}", "Autograd", dispatched)
    _differentiable[name] = direct
