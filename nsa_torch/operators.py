"""Attention as operators `nsa::*` of torch, bounds and launches included: `torch.compile` keeps
each as it is, and a gradient is an operator of its own.

    attention, attention_backward                  all steps
    branch_attention, branch_attention_backward    one branch
    select_blocks

What an operator runs is a `Call`, whose kind it takes first, `attention/mosaic/shared_kv/saving`
for example: which implementation, in what form. Then come tensors, then `REST`.

torch's dispatcher needs longer for such a call than a launch takes. Where it would do nothing
but find the function (`plain`), `call` does without it.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import (
    TransformType,
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
    unwrap_if_dead,
)
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad

from nsa_core.config import COMPUTE_DTYPES, SIZES, NSAConfig
from nsa_torch import batch_tables, early_release
from nsa_torch.first_order import first_order, refuse, under_transforms
from nsa_torch.plain import plain, traced

LAYOUT_ARGS = (
    "SymInt kv_len, Tensor? lengths, Tensor? cu_seqlens, SymInt? max_seqlen, bool padded, "
    "SymInt gap, SymInt[] config, float? scale"
)
# `assume_finite`: whether keys and values that no query may look at are finite.
REST = f"bool assume_finite, {LAYOUT_ARGS}"
REST_COUNT = REST.count(",") + 1
FORWARD = "(str kind, Tensor?[] tensors, {}) -> Tensor[]"
BACKWARD = "(str kind, Tensor grad, Tensor[] kept, Tensor?[] tensors, {}) -> Tensor[]"
DEVICES = ("cpu", "cuda")
FIELDS = *SIZES, "compute_dtype"

NO_JVP = (
    "nsa_torch has no forward-mode derivatives (jvp, jacfwd, dual numbers): use reverse mode "
    "(torch.autograd.grad, torch.func.grad, torch.func.vjp)"
)
NO_VMAP = (
    "nsa_torch has no vmap, on which jacrev rests: give what is mapped over as part of the "
    "batch, the first axis"
)
REFUSED = {TransformType.Jvp: NO_JVP, TransformType.Vmap: NO_VMAP}


class Call(NamedTuple):
    """What operators run for a kind of call. Functions take arguments flat: tensors, or None in
    place of one, then `REST`.

    Attributes:
      run: gives the results.
      shapes: gives them unwritten.
      backward: gradients of the first `floats` tensors. It takes the gradient of the first result,
        the results that were `kept`, that of the second result if there is one, then the arguments.
        None: there are none.
      returned: results that a caller wants; the others are there for the gradient.
      composed: whether operators of torch are all that it runs.
    """

    kind: str
    run: Callable[..., Iterable[Tensor]]
    shapes: Callable[..., Iterable[Tensor]]
    backward: Callable[..., Iterable[Tensor]] | None = None
    floats: int = 0
    kept: slice = slice(0)
    returned: int = 1
    composed: bool = False


_calls: dict[str, Call] = {}
call_of = _calls.__getitem__


def define(kind: str, run, shapes, backward=None, **attributes) -> Call:
    """Makes a kind of call known; its name begins with that of its operator."""
    _calls[kind] = Call(kind, run, shapes, backward, **attributes)
    return _calls[kind]


def call(kind: str, *arguments: Any) -> Sequence[Tensor]:
    """What the operator gives; where it has a gradient, perhaps without what is kept for it."""
    if torch.compiler.is_compiling():
        return _dispatched(kind, *arguments)
    if under_transforms():
        refuse_transforms(*_tensors(arguments))
        differentiable = _calls[kind].backward is not None
        return (Transformed.apply if differentiable else _dispatched)(kind, *arguments)
    found, given = _calls[kind], _alive(arguments)
    if not _direct(found, given):
        return _dispatched(kind, *given)
    if found.backward is None:
        return list(found.run(*given))
    return Differentiable.apply(found, True, *given)


def _call_backward(kind: str, grad, kept, arguments) -> Sequence[Tensor]:
    """The same of the gradient."""
    if under_transforms() and not torch.compiler.is_compiling():
        refuse_transforms(*_tensors([grad, *kept, *arguments]))
        return Gradient.apply(kind, len(kept), grad, *kept, *arguments)
    grad, *flat = _alive([grad, *kept, *arguments])
    kept, arguments = flat[: len(kept)], flat[len(kept) :]
    found = _calls[kind]
    if torch.compiler.is_compiling() or not _direct(found, [grad, *flat]):
        return _backward_dispatched(kind, grad, kept, arguments)
    assert found.backward is not None
    return list(found.backward(grad, *kept, *arguments))


def _operator(kind: str) -> str:
    return kind.partition("/")[0]


def _dispatched(kind: str, *arguments: Any) -> list[Tensor]:
    tensors, rest = arguments[:-REST_COUNT], arguments[-REST_COUNT:]
    return getattr(torch.ops.nsa, _operator(kind))(kind, tensors, *rest)


def _backward_dispatched(kind: str, grad, kept, arguments) -> list[Tensor]:
    tensors, rest = arguments[:-REST_COUNT], arguments[-REST_COUNT:]
    gradient = getattr(torch.ops.nsa, f"{_operator(kind)}_backward")
    return gradient(kind, grad, kept, tensors, *rest)


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


def _alive(arguments: Sequence[Any]) -> Sequence[Any]:
    """A pull-back of torch.func.vjp runs when the transform has ended; kernels need memory."""
    if any(map(is_functorch_wrapped_tensor, _tensors(arguments))):
        return [unwrap_if_dead(x) if isinstance(x, Tensor) else x for x in arguments]
    return arguments


def _direct(found: Call, arguments: Sequence[Any]) -> bool:
    """Whether the dispatcher would do nothing but call the function, or need not: of operators of
    torch a mode sees more.
    """
    device = next(x for x in arguments if isinstance(x, Tensor)).device
    composed = found.composed and not traced(arguments)
    return device.type in DEVICES and (composed or plain(arguments))


def _tensors(arguments: Iterable[Any]) -> list[Tensor]:
    return [x for x in arguments if isinstance(x, Tensor)]


def numbers_of(config: NSAConfig) -> tuple[int, ...]:
    """In the order of `FIELDS`; constants to `torch.compile`, to which lengths alone vary."""
    sizes = (operator.index(getattr(config, name)) for name in SIZES)
    return *sizes, COMPUTE_DTYPES.index(config.compute_dtype)


@functools.cache
def config_of(*numbers: int) -> NSAConfig:
    """That of which `numbers_of` gives these."""
    *sizes, compute_dtype = numbers
    return NSAConfig(*sizes, compute_dtype=COMPUTE_DTYPES[compute_dtype])


def arguments(config: NSAConfig, kv_len: int | Tensor, cu_seqlens: Tensor | None, scale):
    """What `LAYOUT_ARGS` describes."""
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


def lengths(
    kv_len, lengths, cu_seqlens, max_seqlen, padded, gap, numbers, scale
) -> dict[str, Any]:
    """By name, what `arguments` made `LAYOUT_ARGS` of; what the borders' sizes say is not among
    it.
    """
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


def index_shapes(query, key, *rest):
    """Selected blocks, unwritten."""
    shape = *query.shape[:2], key.shape[2], numbers_in(rest)[FIELDS.index("num_selected")]
    return (query.new_empty(shape, dtype=torch.int32),)


# Gradients


def second_gradient(flat: Sequence[Any], count: int) -> tuple[Tensor | None, Sequence[Any]]:
    """That of the second result, if any, and the arguments, of what a `Call.backward` gets behind
    what was kept; `count`: tensors among the arguments.
    """
    given = len(flat) - count - REST_COUNT
    return (flat[0] if given else None), flat[given:]


def _refuse_empty(kind: str, saved: Sequence[Any]) -> None:
    """Raises where memory of what was saved is gone (`early_release`)."""
    if any(x.numel() and not x.is_meta and not x.data_ptr() for x in _tensors(saved)):
        raise RuntimeError(
            f"the last backward pass of {kind} did not end, and has given back memory of what it "
            "needs: run the forward pass again, or pass retain_graph=True"
        )


def _save(ctx, kept: Sequence[Tensor], inputs: Sequence[Any]) -> None:
    arguments = *kept, *inputs
    ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in arguments))
    ctx.others = [None if isinstance(x, Tensor) else x for x in arguments]
    ctx.kept = len(kept)


def _saved(ctx) -> list[Any]:
    pairs = zip(ctx.saved_tensors, ctx.others, strict=True)
    return [other if x is None else x for x, other in pairs]


class Differentiable(torch.autograd.Function):
    """A call whose gradient is its `backward`, not torch.library.register_autograd's, which at each
    call lists all arguments of the schema once for each of them.
    """

    @staticmethod
    def forward(ctx, call: Call, direct: bool, *inputs):
        """
        Args:
          direct: without the dispatcher; a caller then gets `call.returned`, else all results.
        """
        with torch._C._AutoDispatchBelowAutograd():
            output = tuple(call.run(*inputs) if direct else _dispatched(call.kind, *inputs))
        _save(ctx, output[call.kept], inputs)
        ctx.call = call
        # Whether what was kept is this node's alone.
        alone = direct and call.returned <= (call.kept.start or 0)
        ctx.alone = alone and not early_release.has_hooks()
        ctx.set_materialize_grads(False)
        return tuple(output[: call.returned] if direct else output)

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(NO_JVP)

    @staticmethod
    @first_order
    def backward(ctx, grad, *others):
        grad, saved, count = _with_second(ctx, grad, *others)
        call, direct = ctx.call, plain([grad])
        nothing_goes = contextlib.nullcontext()
        with _releasing(call.kind, grad, saved, ctx.alone) if direct else nothing_goes:
            found = _call_backward(call.kind, grad, saved[:count], saved[count:])
        nothing = [None] * (len(saved) - count - call.floats)
        return None, None, *found, *nothing


def _releasing(kind: str, grad: Tensor, saved: Sequence[Any], alone: bool):
    """Within, memory of what was saved may be given back where nothing needs it any more.

    Args:
      alone: what was kept is this node's alone.

    Raises:
      RuntimeError: it was given back before.
      NotImplementedError: many gradients are asked for at once (`is_grads_batched`).
    """
    if is_legacy_batchedtensor(grad):
        raise NotImplementedError(NO_VMAP)
    addresses = [x.data_ptr() for x in saved if isinstance(x, Tensor)]
    if 0 in addresses:
        _refuse_empty(kind, saved)
    last = alone and early_release.is_last_pass()
    # The gradient that comes in may lie in what was kept, which then stays.
    return early_release.allowed(last and grad.untyped_storage().data_ptr() not in addresses)


class KnownCall(torch.autograd.Function):
    """`Differentiable` of a call whose signature is known: it takes the tensors of that alone. What
    is kept is this node's alone, and no hook has a look at it: that could bring back anything.
    """

    @staticmethod
    def forward(ctx, again, *tensors):
        """`again`: what runs calls of this signature (`kernel_path.Again`)."""
        with torch._C._AutoDispatchBelowAutograd():
            out, *kept = again.run(tensors)
        ctx.save_for_backward(*kept, *tensors)
        ctx.again, ctx.kept = again, len(kept)
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(NO_JVP)

    @staticmethod
    @first_order
    def backward(ctx, grad):
        again, saved, call = ctx.again, ctx.saved_tensors, ctx.again.call
        kept, tensors = saved[: ctx.kept], saved[ctx.kept :]
        if grad is None:
            grad = next(iter(call.shapes(*again.arguments(tensors)))).zero_()
        if plain([grad]):
            with _releasing(call.kind, grad, saved, alone=True):
                found = again.run.gradients(grad, kept, tensors)
        else:
            arguments = again.run.apart(kept), again.arguments(tensors)
            found = _call_backward(call.kind, grad, *arguments)
        return None, *found, *[None] * (len(tensors) - call.floats)


def _with_second(ctx, grad, second=None, *_):
    """The gradient of the first result, what was saved, and how much of it is not an argument: that
    of the second result, where it is returned and has one, stands behind what was kept.
    """
    saved, call, count = _saved(ctx), ctx.call, ctx.kept
    if grad is None:
        grad = next(iter(call.shapes(*saved[count:]))).zero_()
    if call.returned < 2 or second is None:
        return grad, saved, count
    return grad, [*saved[:count], second.contiguous(), *saved[count:]], count + 1


class Transformed(torch.autograd.Function):
    """The same as torch.func asks for it, which `Differentiable`, since it keeps what it does not
    return, cannot be.
    """

    @staticmethod
    def forward(kind, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(_dispatched(kind, *inputs))

    @staticmethod
    def setup_context(ctx, inputs, output):
        kind, *inputs = inputs
        ctx.call = _calls[kind]
        _save(ctx, output[ctx.call.kept], inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, grad, *others):
        grad, saved, count = _with_second(ctx, grad, *others)
        found = _call_backward(ctx.call.kind, grad, saved[:count], saved[count:])
        return None, *found, *[None] * (len(saved) - count - ctx.call.floats)


class Gradient(torch.autograd.Function):
    """The operator of a gradient, which has no gradient itself."""

    @staticmethod
    def forward(kind, count, grad, *inputs):
        return tuple(_backward_dispatched(kind, grad, inputs[:count], inputs[count:]))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = staticmethod(refuse)


# The operators


def _in_memory(tensors):
    """As kernels read them: the dispatcher resolves no tensor of a list with None in it."""
    return [x if x is None else x.resolve_neg() for x in tensors]


def _run(kind, tensors, *rest):
    return list(_calls[kind].run(*_in_memory(tensors), *rest))


def _shapes(kind, tensors, *rest):
    return list(_calls[kind].shapes(*tensors, *rest))


def _differentiable(kind, tensors, *rest):
    found = _calls[kind]
    if found.backward is None:
        with torch._C._AutoDispatchBelowAutograd():
            return _dispatched(kind, *tensors, *rest)
    return list(Differentiable.apply(found, False, *tensors, *rest))


def _run_backward(kind, grad, kept, tensors, *rest):
    # What it calls need not be traceable. An autograd kernel, and that of torch.library.custom_op,
    # would keep autograd from working inside.
    backward: Any = _calls[kind].backward
    return [x.contiguous() for x in backward(grad, *kept, *_in_memory(tensors), *rest)]


def _backward_shapes(kind, grad, kept, tensors, *rest):
    return [x.new_empty(x.shape) for x in tensors[: _calls[kind].floats]]


def _register(name: str, schema: str, function, shapes) -> None:
    torch.library.define(f"nsa::{name}", schema.format(REST))
    torch.library.impl(f"nsa::{name}", "CompositeExplicitAutograd", function)
    torch.library.register_fake(f"nsa::{name}", shapes)


for _name in ("attention", "branch_attention", "select_blocks"):
    _register(_name, FORWARD, _run, _shapes)
    torch.library.impl(f"nsa::{_name}", "Autograd", _differentiable)
for _name in ("attention", "branch_attention"):
    _register(f"{_name}_backward", BACKWARD, _run_backward, _backward_shapes)
