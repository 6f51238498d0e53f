"""Kernels as operators `nsa::*`, bounds and launches included: `torch.compile` keeps each as it
is, and a gradient is an operator of its own.

An operator takes its tensors, then `PLACE`; a backward one the gradient first.

torch's dispatcher needs longer for such a call than a launch takes. Where it would do nothing
but find the function (`plain`), `call` does without it.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, is_functorch_wrapped_tensor, unwrap_if_dead
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad

from nsa_core.config import NSAConfig
from nsa_torch import batch_tables, early_release
from nsa_torch.first_order import first_order, refuse, under_transforms
from nsa_torch.plain import plain, traced
from nsa_torch.plans import Known

PLACE = (
    "SymInt kv_len, Tensor? lengths, Tensor? cu_seqlens, SymInt? max_seqlen, bool padded, "
    "SymInt[] config, float? scale"
)
PLACE_COUNT = PLACE.count(",") + 1
DEVICES = ("cpu", "cuda")
FIELDS = tuple(NSAConfig.__dataclass_fields__)
THREE = "Tensor query, Tensor key, Tensor value"
CHOSEN = f"{THREE}, Tensor block_indices"
SCORING = "Tensor query, Tensor compressed_key"

config_of = functools.cache(NSAConfig)

# By name, the functions of the operators, and what gives them their gradients.
_functions: dict[str, Any] = {}
_differentiable: dict[str, Callable[..., Any]] = {}
_transformed: dict[str, Callable[..., Any]] = {}
_composed: set[str] = set()  # of operators of torch

NO_JVP = (
    "nsa_torch has no forward-mode derivatives (jvp, jacfwd, dual numbers): use reverse mode "
    "(torch.autograd.grad, torch.func.grad, torch.func.vjp)"
)
NO_VMAP = (
    "nsa_torch has no vmap, on which jacrev rests: give what is mapped over as part of the "
    "batch, the first axis"
)
REFUSED = {TransformType.Jvp: NO_JVP, TransformType.Vmap: NO_VMAP}


def call(name: str, *arguments: Any, known: Known | None = None) -> Any:
    """What `torch.ops.nsa.<name>` returns; where it has a gradient, perhaps without what is kept
    for it.

    Args:
      known: what is known of calls like this one, all of them plain.
    """
    if known is not None:
        if differentiable := _differentiable.get(name):
            return differentiable(known, *arguments)
        return known.run(_functions[name], arguments)
    if torch.compiler.is_compiling():
        return getattr(torch.ops.nsa, name)(*arguments)
    if under_transforms():
        return _transform(name, arguments)
    if any(map(is_functorch_wrapped_tensor, _tensors(arguments))):
        # A pull-back of torch.func.vjp runs when the transform has ended; kernels need memory.
        arguments = tuple(unwrap_if_dead(x) if isinstance(x, Tensor) else x for x in arguments)
    if _direct(name, arguments):
        if differentiable := _differentiable.get(name):
            return differentiable(None, *arguments)
        return _functions[name](*arguments)
    return getattr(torch.ops.nsa, name)(*arguments)


def _transform(name: str, arguments: Sequence[Any]) -> Any:
    """Under transforms of torch.func."""
    refuse_transforms(*_tensors(arguments))
    return _transformed.get(name, getattr(torch.ops.nsa, name))(*arguments)


def refuse_transforms(*tensors: Tensor) -> None:
    """Raises NotImplementedError under transforms of torch.func that nothing here has, and where
    one of `tensors` is a dual number.
    """
    if torch.compiler.is_compiling():
        return
    if under_transforms():
        for each in retrieve_all_functorch_interpreters():
            if each.key() in REFUSED:
                raise NotImplementedError(REFUSED[each.key()])
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(x).tangent is not None for x in tensors
    ):
        raise NotImplementedError(NO_JVP)


def _direct(name: str, arguments: Sequence[Any]) -> bool:
    """Whether the dispatcher would do nothing but call the function, or need not: of operators of
    torch a mode sees more.
    """
    device = next(x for x in arguments if isinstance(x, Tensor)).device
    composed = name in _composed and not traced(arguments)
    return device.type in DEVICES and (composed or plain(arguments))


def _tensors(arguments: Iterable[Any]) -> list[Tensor]:
    return [x for x in arguments if isinstance(x, Tensor)]


def numbers_of(config: NSAConfig) -> tuple[int, ...]:
    """In the order of `FIELDS`; constants to `torch.compile`, to which lengths alone vary."""
    return tuple(operator.index(getattr(config, name)) for name in FIELDS)


def arguments(config: NSAConfig, kv_len: int | Tensor, cu_seqlens: Tensor | None, scale):
    """What `PLACE` describes."""
    lengths = kv_len if isinstance(kv_len, Tensor) else None
    kv_len = 0 if isinstance(kv_len, Tensor) else kv_len
    return (
        kv_len,
        lengths,
        cu_seqlens,
        *batch_tables.sizes_of(cu_seqlens),
        [*numbers_of(config)],
        None if scale is None else float(scale),
    )


def lengths(kv_len, lengths, cu_seqlens, max_seqlen, padded, numbers, scale) -> dict[str, Any]:
    """By name, what `arguments` made `PLACE` of; what the borders' sizes say is not among it."""
    return {
        "config": config_of(*numbers),
        "kv_len": kv_len if lengths is None else lengths,
        "cu_seqlens": cu_seqlens,
        "scale": scale,
    }


def numbers_in(place: Sequence[Any]) -> Sequence[int]:
    """Those of `NSAConfig`."""
    return place[-2]


def requires_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd records what is made of those tensors that there are."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def branch_shapes(query, key, value, *rest):
    """Output and log-sum-exp of a branch, unwritten."""
    out = query.new_empty(*query.shape[:3], value.shape[-1])
    return out, query.new_empty(query.shape[:3], dtype=torch.float32)


def index_shapes(query, key, *place):
    """Selected blocks, unwritten."""
    shape = *query.shape[:2], key.shape[2], numbers_in(place)[FIELDS.index("num_selected")]
    return query.new_empty(shape, dtype=torch.int32)


def define_branch(name, tensors, function, kept, backward) -> None:
    """Registers `nsa::name`, a branch, with the gradients of query, key and value."""
    define(name, tensors, "(Tensor out, Tensor lse)", function, branch_shapes)
    differentiate(name, tensors, 3, kept, backward, 2)


def define(name, tensors, results, function, shapes, composed=False) -> None:
    """Registers `nsa::name`; `shapes` gives outputs as `function` does, unwritten; `composed`:
    whether operators of torch are all that it runs.
    """
    torch.library.define(f"nsa::{name}", f"({tensors}, {PLACE}) -> {results}")
    torch.library.impl(f"nsa::{name}", "CompositeExplicitAutograd", function)
    torch.library.register_fake(f"nsa::{name}", shapes)
    _functions[name] = function
    if composed:
        _composed.add(name)


def _refuse_empty(name: str, saved: Sequence[Any]) -> None:
    """Raises where memory of what was saved is gone (`early_release`)."""
    if any(x.numel() and not x.is_meta and not x.data_ptr() for x in _tensors(saved)):
        raise RuntimeError(
            f"the last backward pass of {name} did not end, and has given back memory of what it "
            "needs: run the forward pass again, or pass retain_graph=True"
        )


def differentiate(name, tensors, floats, kept, backward, returned) -> None:
    """Gradients of the first `floats` inputs of `nsa::name`, by `nsa::name_backward`. The first
    `returned` outputs are what a caller wants, the others are there for the gradients.

    `backward` takes the gradient of the first output, the last outputs (`kept`: as the schema has
    them), then the inputs.
    """
    overload, function = getattr(torch.ops.nsa, name).default, _functions[name]
    count = kept.count("Tensor")
    first = len(overload._schema.returns) - count

    def shapes(grad, *arguments):
        return [x.new_empty(x.shape) for x in arguments[count : count + floats]]

    # An operator of its own: what it calls need not be traceable. It has no autograd kernel,
    # and one of torch.library.custom_op would keep autograd from working inside.
    schema = ", ".join(filter(None, ("Tensor grad", kept, tensors)))
    define(f"{name}_backward", schema, "Tensor[]", backward, shapes, name in _composed)
    gradient = _functions[f"{name}_backward"]

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx, run, results, known, *inputs):
            with torch._C._AutoDispatchBelowAutograd():
                output = known.run(run, inputs) if known else run(*inputs)
            arguments = *output[first:], *inputs
            ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in arguments))
            ctx.others = [None if isinstance(x, Tensor) else x for x in arguments]
            hooks = early_release.has_hooks()
            # What a hook brings back may be anything.
            ctx.known = None if hooks else known
            # Whether what was kept is this node's alone.
            ctx.alone = results is not None and results <= first and not hooks
            ctx.set_materialize_grads(False)
            return tuple(output[:results])

        @staticmethod
        def jvp(ctx, *tangents):
            raise NotImplementedError(NO_JVP)

        @staticmethod
        @first_order
        def backward(ctx, grad, *_):
            pairs = zip(ctx.saved_tensors, ctx.others, strict=True)
            arguments = [other if x is None else x for x, other in pairs]
            nothing = (None for _ in arguments[count + floats :])
            direct = plain([grad])
            addresses = (
                [x.data_ptr() for x in arguments if isinstance(x, Tensor)] if direct else []
            )
            if 0 in addresses:
                _refuse_empty(name, arguments)
            last = ctx.alone and direct and early_release.is_last_pass()
            # The gradient that comes in may lie in what was kept, which then stays.
            apart = last and grad.untyped_storage().data_ptr() not in addresses
            with early_release.allowed(apart):
                if ctx.known and direct:
                    found = ctx.known.run_backward(gradient, (grad, *arguments))
                else:
                    found = call(f"{name}_backward", grad, *arguments)
            return None, None, None, *found, *nothing

    class Transformed(torch.autograd.Function):
        """The same as torch.func asks for it, which `Differentiable`, since it keeps what it does
        not return, cannot be.
        """

        @staticmethod
        def forward(*inputs):
            with torch._C._AutoDispatchBelowAutograd():
                return tuple(overload(*inputs))

        @staticmethod
        def setup_context(ctx, inputs, output):
            arguments = *output[first:], *inputs
            ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in arguments))
            ctx.others = [None if isinstance(x, Tensor) else x for x in arguments]

        @staticmethod
        def backward(ctx, grad, *_):
            pairs = zip(ctx.saved_tensors, ctx.others, strict=True)
            arguments = [other if x is None else x for x, other in pairs]
            found = call(f"{name}_backward", grad, *arguments)
            return *found, *(None for _ in arguments[count + floats :])

    class Gradient(torch.autograd.Function):
        """`nsa::name_backward`, which has no gradient itself."""

        @staticmethod
        def forward(*inputs):
            return tuple(getattr(torch.ops.nsa, f"{name}_backward")(*inputs))

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        backward = staticmethod(refuse)

    def dispatched(*inputs):
        return Differentiable.apply(overload, None, None, *inputs)

    def direct(known, *inputs):
        return Differentiable.apply(function, returned, known, *inputs)

    # Not torch.library.register_autograd, which at each call lists all arguments of the schema
    # once for each of them.
    torch.library.impl(f"nsa::{name}", "Autograd", dispatched)
    _differentiable[name], _transformed[name] = direct, Transformed.apply
    _transformed[f"{name}_backward"] = Gradient.apply
