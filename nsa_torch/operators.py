"""Registers attention as torch operators `nsa::*`. An operator computes all tables and launches
all kernels of its call. `torch.compile` does not trace into an operator. Each gradient is a
separate operator.

- `attention` and `attention_backward` compute all steps.
- `branch_attention` and `branch_attention_backward` compute one branch.
- `compress` and `compress_backward` compute compressed tokens in compiled code.
- `select_blocks` selects blocks.

The first argument of an operator is the name of its `Kind`. The name states the implementation
and the form of the call, for example `attention/mosaic/shared_kv/saving`. The tensors of the call
follow, and then the arguments of `REST`.

A call through the dispatcher of torch needs more time than the launch of a kernel. If the
dispatcher would only look up the function (`plain`), the function `call` bypasses the dispatcher.
"""

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
from nsa_core.steps.fused import Inputs, Pages
from nsa_core.types import Branches
from nsa_torch import batch_tables
from nsa_torch.plain import (
    check_first_order,
    first_order,
    has_hooks,
    is_last_pass,
    plain,
    refuse,
    traced,
    under_transforms,
)

LAYOUT_ARGS = (
    "SymInt kv_len, Tensor? lengths, Tensor? cu_seqlens, SymInt? max_seqlen, bool padded, "
    "SymInt gap, SymInt[] config, float? scale"
)
# `assume_finite` means that keys and values to which no query may attend are finite.
REST = f"bool assume_finite, {LAYOUT_ARGS}"
REST_COUNT = REST.count(",") + 1
MAY_BE_NAN = False  # `assume_finite`
FORWARD_SCHEMA = "(str kind, Tensor?[] tensors, {}) -> Tensor[]"
BACKWARD_SCHEMA = "(str kind, Tensor grad, Tensor[] kept, Tensor?[] tensors, {}) -> Tensor[]"
DEVICES = ("cpu", "cuda")

NO_JVP = (
    "nsa_torch has no forward-mode derivatives (jvp, jacfwd, dual numbers); use reverse mode "
    "(torch.autograd.grad, torch.func.grad, torch.func.vjp)"
)
NO_VMAP = (
    "nsa_torch does not support vmap, which jacrev uses; make the mapped axis part of the batch, "
    "the first axis"
)
REFUSED = {TransformType.Jvp: NO_JVP, TransformType.Vmap: NO_VMAP}


class Kind(NamedTuple):
    """A kind of call and its functions. The arguments of each of these functions are a flat list
    of tensors or None, followed by the arguments of `REST`.

    Attributes:
      name: The name of the kind, which begins with the name of the operator.
      run: Function that computes and returns the results.
      shapes: Function that returns uninitialized tensors with the shapes of the results.
      backward: Function that returns the gradients of the first `floats` tensors. The function
        `backward` receives the gradient of the first result, the saved results, the gradient of the
        second result if there is one, and the arguments of the call. `backward=None` means that the
        kind has no gradient.
      floats: Number of tensors that can have a gradient. These tensors are the first arguments.
      kept: Slice that selects the results that are saved for the gradient.
      returned: Number of results that the caller gets. The results for the caller come first, and
        may be saved too.
      composed: Whether the function `run` consists only of torch operators.
    """

    name: str
    run: Callable[..., Iterable[Tensor]]
    shapes: Callable[..., Iterable[Tensor]]
    backward: Callable[..., Iterable[Tensor]] | None = None
    floats: int = 0
    kept: slice = slice(0)
    returned: int = 1
    composed: bool = False


_kinds: dict[str, Kind] = {}
kind_of = _kinds.__getitem__


def define(name: str, run, shapes, backward=None, **attributes) -> None:
    """Register a kind of call."""
    _kinds[name] = Kind(name, run, shapes, backward, **attributes)


def step_of_kind(kind: str, without_lse: str | None = None) -> Callable[..., Any]:
    """Return the function to which `dispatch.py` refers for a step. The function runs calls of the
    kind `kind`, or calls of the kind `without_lse` if the log-sum-exp is not needed.
    """
    selects = kind.startswith("select_blocks")

    def step(*tensors, config, kv_len, cu_seqlens=None, scale=None, with_lse=True):
        layout_args = pack_layout(config, kv_len, cu_seqlens, scale)
        if selects:
            return call(kind, *(x.detach() for x in tensors), MAY_BE_NAN, *layout_args)[0]
        chosen = kind if with_lse else without_lse or kind
        out, lse = call(chosen, *tensors, MAY_BE_NAN, *layout_args)
        return out, lse

    return step


def call(kind: str, *arguments: Any) -> Sequence[Tensor]:
    """Run the operator and return its results. Results that are only saved for the gradient may
    be missing.
    """
    if torch.compiler.is_compiling():
        return _dispatched(kind, arguments)
    if under_transforms():
        refuse_transforms(*_tensors(arguments))
        if _kinds[kind].backward is None:
            return _dispatched(kind, arguments)
        return Dispatched.apply(kind, *arguments)
    found, given = _kinds[kind], _alive(arguments)
    if not _direct(found, given):
        return _dispatched(kind, given)
    if found.backward is None:
        return list(found.run(*given))
    return Eager.apply(Program(found, given), *_tensors(given))


def call_backward(kind: str, grad, kept, arguments) -> Sequence[Tensor]:
    """Run the operator that computes the gradients of `kind`, and return its results as the
    function `call` does."""
    if under_transforms() and not torch.compiler.is_compiling():
        refuse_transforms(*_tensors([grad, *kept, *arguments]))
        return Gradient.apply(kind, len(kept), grad, *kept, *arguments)
    grad, *flat = _alive([grad, *kept, *arguments])
    found = _kinds[kind]
    if torch.compiler.is_compiling() or not _direct(found, [grad, *flat]):
        return _dispatched(kind, flat[len(kept) :], grad, flat[: len(kept)])
    assert found.backward is not None
    return list(found.backward(grad, *flat))


def _dispatched(kind: str, arguments: Sequence[Any], *gradient: Any) -> list[Tensor]:
    """Call the operator through the dispatcher of torch. In a backward pass, `gradient` has the
    gradient of the output, and then the saved results.
    """
    name = kind.partition("/")[0] + ("_backward" if gradient else "")
    tensors, rest = arguments[:-REST_COUNT], arguments[-REST_COUNT:]
    return getattr(torch.ops.nsa, name)(kind, *gradient, tensors, *rest)


def refuse_transforms(*tensors: Tensor) -> None:
    """Raise NotImplementedError under unsupported transforms of torch.func, or if a tensor is a
    dual number.
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
    """Return the arguments with plain tensors instead of the wrappers of a transform that has
    ended. A function from torch.func.vjp runs after its transform has ended, and kernels need
    tensors with memory.
    """
    if any(map(is_functorch_wrapped_tensor, _tensors(arguments))):
        return [unwrap_if_dead(x) if isinstance(x, Tensor) else x for x in arguments]
    return arguments


def _direct(found: Kind, arguments: Sequence[Any]) -> bool:
    """Return whether the function `found` may be called directly, without the dispatcher."""
    device = next(x for x in arguments if isinstance(x, Tensor)).device
    composed = found.composed and not traced(arguments)
    return device.type in DEVICES and (composed or plain(arguments))


def _tensors(arguments: Iterable[Any]) -> list[Tensor]:
    return [x for x in arguments if isinstance(x, Tensor)]


def numbers_of(config: NSAConfig) -> tuple[int, ...]:
    """Convert a config to a tuple of numbers, which are constants for `torch.compile`, so that
    only lengths vary.
    """
    sizes = [operator.index(getattr(config, name)) for name in SIZES]
    return *sizes, COMPUTE_DTYPES.index(config.compute_dtype)


@functools.cache
def config_of(*numbers: int) -> NSAConfig:
    """Convert the result of `numbers_of` back to a config."""
    *sizes, compute_dtype = numbers
    return NSAConfig(*sizes, compute_dtype=COMPUTE_DTYPES[compute_dtype])


def pack_layout(config: NSAConfig, kv_len: int | Tensor, cu_seqlens: Tensor | None, scale):
    """Return the arguments that `LAYOUT_ARGS` describes."""
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


def unpack_layout(
    kv_len, lengths, cu_seqlens, max_seqlen, padded, gap, numbers, scale
) -> dict[str, Any]:
    """Return the arguments of `pack_layout`, keyed by name. The sizes that belong to the
    boundaries are left out.
    """
    return {
        "config": config_of(*numbers),
        "kv_len": kv_len if lengths is None else lengths,
        "cu_seqlens": cu_seqlens,
        "scale": scale,
    }


def requires_grad(*tensors: Tensor | None) -> bool:
    """Return whether autograd records operations on these tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def branch_shapes(query, key, value, *rest):
    """Make uninitialized tensors with the shapes and dtypes of a branch's output and lse."""
    out = query.new_empty(*query.shape[:3], value.shape[-1])
    return out, query.new_empty(query.shape[:3], dtype=torch.float32)


def index_shapes(query, key, *rest):
    """Make an uninitialized tensor with the shape and dtype of block indices."""
    shape = *query.shape[:2], key.shape[2], config_of(*rest[-2]).num_selected
    return (query.new_empty(shape, dtype=torch.int32),)


# Gradients


def second_gradient(flat: Sequence[Any], count: int) -> tuple[Tensor | None, Sequence[Any]]:
    """Split the last arguments of a `Kind.backward` into the gradient of the second result, which
    may be missing, and the arguments of the call. `count` is the number of tensors of the call.
    """
    given = len(flat) - count - REST_COUNT
    return (flat[0] if given else None), flat[given:]


class Program:
    """A kind of call that autograd records, together with those arguments of the call that are
    not tensors.

    Attributes:
      alone: Whether the autograd node of the call is the only object that refers to the saved
        results.
      run: Function that returns the results for the caller, followed by the saved results.
    """

    def __init__(self, kind: Kind, arguments: Sequence[Any]):
        self.kind, self.returned = kind, kind.returned
        self._others = [None if isinstance(x, Tensor) else x for x in arguments]
        self._places = [i for i, x in enumerate(arguments) if isinstance(x, Tensor)]
        self.alone = kind.returned <= (kind.kept.start or 0) and not has_hooks()
        self.run: Any = self._run

    def arguments(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Return all arguments of the operator, given its tensors."""
        found = self._others.copy()
        for i, x in zip(self._places, tensors, strict=True):
            found[i] = x
        return found

    def _run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run the operator and return its results, then the saved results. A result that is
        both returned and saved occurs twice.
        """
        found = [*self.kind.run(*self.arguments(tensors))]
        return found[: self.returned] + found[self.kind.kept]

    def gradients(
        self, grads, kept, tensors, direct: bool, gives_back: bool
    ) -> Sequence[Tensor]:
        """Compute the gradients of the tensors from the gradients of the results, the saved
        results and the tensors of the call.

        Args:
          direct: Whether no mode or transform of torch is active, so that the dispatcher can be
            bypassed.
          gives_back: Whether the memory of saved results may be freed as soon as they have been
            read.
        """
        first, *second = grads
        second = [x.contiguous() for x in second if x is not None]
        return call_backward(self.kind.name, first, [*kept, *second], self.arguments(tensors))

    def complete(self, grads, tensors) -> Sequence[Tensor]:
        """Return the gradients of the results, with zeros if autograd has no gradient for the first
        result.
        """
        if grads[0] is not None:
            return grads
        first = next(iter(self.kind.shapes(*self.arguments(tensors))))
        return first.zero_(), *grads[1:]


class Eager(torch.autograd.Function):
    """A call with a gradient that bypasses the dispatcher of torch. torch.library.register_autograd
    would list all arguments of the schema for each tensor. With `Eager`, only tensors are
    arguments, and the autograd node holds the saved results.
    """

    @staticmethod
    def forward(ctx, program, *tensors):
        """Run the call that `program`, a `Program`, describes."""
        with torch._C._AutoDispatchBelowAutograd():
            found = program.run(tensors)
        count = program.returned
        ctx.save_for_backward(*found[count:], *tensors)
        ctx.program, ctx.kept = program, len(found) - count
        ctx.set_materialize_grads(False)
        return tuple(found[:count])

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(NO_JVP)

    @staticmethod
    @first_order
    def backward(ctx, *grads):
        program, saved = ctx.program, ctx.saved_tensors
        kept, tensors = saved[: ctx.kept], saved[ctx.kept :]
        grads = program.complete(grads, tensors)
        if not program.alone and len(devices := {x.device for x in (*grads[:1], *saved)}) > 1:
            raise ValueError(f"all saved tensors must be on one device, got {devices}")
        direct = plain(grads[:1])
        gives_back = direct and _may_give_back(program, grads[0], saved)
        found = program.gradients(grads, kept, tensors, direct, gives_back)
        return None, *found, *[None] * (len(tensors) - len(found))


def _may_give_back(program: Program, grad: Tensor, saved: Sequence[Tensor]) -> bool:
    """Return whether the saved results may be freed, since no other backward pass needs them.

    Raises:
      RuntimeError: An interrupted backward pass has already freed the memory.
      NotImplementedError: Many gradients are requested at once (`is_grads_batched`).
    """
    if is_legacy_batchedtensor(grad):
        raise NotImplementedError(NO_VMAP)
    addresses = [x.data_ptr() for x in saved]
    if 0 in addresses and any(x.numel() and not x.is_meta and not x.data_ptr() for x in saved):
        raise RuntimeError(
            f"saved tensors of {program.kind.name} were freed by a backward pass that was "
            "interrupted; run the forward pass again, or pass retain_graph=True"
        )
    last = program.alone and is_last_pass()
    # The incoming gradient may be in the memory of saved results. That memory is then not
    # freed.
    return last and grad.untyped_storage().data_ptr() not in addresses


class Dispatched(torch.autograd.Function):
    """A call with a gradient that uses the dispatcher of torch, for compiled code and torch.func.
    The results that are saved for the gradient are returned as further results.
    """

    @staticmethod
    def forward(kind, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(_dispatched(kind, inputs))

    @staticmethod
    def setup_context(ctx, inputs, output):
        kind, *inputs = inputs
        ctx.program, kept = Program(_kinds[kind], inputs), output[_kinds[kind].kept]
        ctx.save_for_backward(*kept, *_tensors(inputs))
        ctx.kept, ctx.count, ctx.transformed = len(kept), len(inputs), under_transforms()
        ctx.set_materialize_grads(False)

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(NO_JVP)

    @staticmethod
    def backward(ctx, *grads):
        # torch.func records every backward pass, also after its transform has ended.
        if not ctx.transformed:
            check_first_order()
        program, saved = ctx.program, ctx.saved_tensors
        kept, tensors = saved[: ctx.kept], saved[ctx.kept :]
        grads = program.complete(grads[: program.returned], tensors)
        found = program.gradients(grads, kept, tensors, False, False)
        return None, *found, *[None] * (ctx.count - len(found))


class Gradient(torch.autograd.Function):
    """The operator that computes a gradient, and that has no gradient itself."""

    @staticmethod
    def forward(kind, count, grad, *inputs):
        return tuple(_dispatched(kind, inputs[count:], grad, inputs[:count]))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = staticmethod(refuse)


# The forms of a call's tokens
#
# PRECOMPRESSED    query, compressed keys and values, and those of the other branches
# SEPARATE_KV      query, tokens of each branch; the compressed branch averages its windows
# SHARED_KV        query, tokens that all branches read


class InputMode(NamedTuple):
    """The form in which a call that runs all steps receives its tensors: query, keys, values,
    gates and `block_indices`.

    Attributes:
      name: The name of the mode, which is a part of the names of kinds.
      compresses: Whether the call receives tokens for the compressed branch. If `compresses` is
        true, the call averages the windows of these tokens.
      shared: Whether all branches share their keys and values. If `shared` is true, keys and
        values are passed once.
      joined: Whether the gates are one tensor `[B, T, H, 3]` instead of three tensors.
    """

    name: str
    compresses: bool = False
    shared: bool = False
    joined: bool = False

    def with_joined_gates(self) -> "InputMode":
        """Return the same mode, but for gates in one tensor."""
        return self._replace(name=f"{self.name}_joined", joined=True)

    @property
    def count(self) -> int:
        """The number of tensors that can have a gradient."""
        return (3 if self.shared else 7) + (1 if self.joined else 3)

    def inputs(self, arguments: Sequence[Any]) -> Inputs:
        """Return the tensors of the call by branch. Gates in one tensor are returned as one
        tensor. If `compresses` is true, keys and values of the compressed branch are tokens `[B,
        S, Hkv, .]` whose windows have not been averaged yet.
        """
        half = 1 if self.shared else 3
        pairs = arguments[1 : half + 1], arguments[half + 1 : 2 * half + 1]
        key, value = (Branches.each(x[0]) if self.shared else Branches(*x) for x in pairs)
        gates = arguments[2 * half + 1 : self.count]
        each = gates[0] if self.joined else Branches(*gates)
        return Inputs(arguments[0], key, value, each)

    def gradients(self, found: Inputs) -> list[Any]:
        """Return the gradients of the tensors of the call, in the order in which the call
        receives them."""
        gates: Any = [found.gates] if self.joined else found.gates
        listed = found.query, *found.key, *found.value, *gates
        return [x for x in listed if x is not None]


PRECOMPRESSED = InputMode("precompressed")
SEPARATE_KV = InputMode("separate_kv", compresses=True)
SHARED_KV = InputMode("shared_kv", compresses=True, shared=True)
MODES = PRECOMPRESSED, SEPARATE_KV, SHARED_KV
# The residuals of a call: none, all residuals, or only those for a backward pass that computes
# the branches again.
FORWARD, SAVING, RECOMPUTING = "forward", "saving", "recomputing"
PAGES = "pages"  # the same residuals as FORWARD


def arranged(query, key, value, gates, compressed) -> tuple[InputMode, list[Any]]:
    """Return the `InputMode` of a call, and its tensors in the order of that mode.

    Args:
      key, value: Keys and values by branch.
      gates: Gates by branch, or one tensor with all gates.
      compressed: Compressed keys and values, which replace the compressed fields of `key` and
        `value`. `compressed=None` means that the call averages the tokens in these fields.
    """
    if compressed is not None:
        mode = PRECOMPRESSED
        tokens = compressed[0], *key[1:], compressed[1], *value[1:]
    elif key[0] is key[1] is key[2] and value[0] is value[1] is value[2]:
        mode, tokens = SHARED_KV, (key[0], value[0])
    else:
        mode, tokens = SEPARATE_KV, (*key, *value)
    if len(gates) == 1:
        mode = mode.with_joined_gates()
    return mode, [query, *tokens, *gates]


def kept_of(gradient: bool, recompute: bool) -> str:
    """Return which residuals a call saves: `FORWARD`, `SAVING` or `RECOMPUTING`."""
    if not gradient:
        return FORWARD
    return RECOMPUTING if recompute else SAVING


def all_steps(
    kind: Callable[[InputMode, str], str],
    query: Tensor,
    key: Branches,
    value: Branches,
    gates: Branches[Tensor],
    compressed: tuple[Tensor, Tensor] | None,
    block_indices: Tensor | None,
    *,
    config: NSAConfig,
    kv_len: int | Tensor,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    assume_finite: bool = False,
    recompute: bool = False,
    pages: Pages | None = None,
) -> Tensor:
    """Compute attention as one operator.

    Args:
      kind: Function that returns the name of the kind. The arguments of `kind` are an input mode
        and the residuals to save.
      key, value: Keys and values by branch. The compressed field is not read if `compressed` is
        given.
      compressed: `(k_cmp, v_cmp)`. `compressed=None` means that compressed tokens are means.
      assume_finite: Whether all keys and values are finite, also those to which no query
        attends. In a cache, all keys and values are finite.
        For finite keys and values, the operator makes no copy with zeros.
      recompute: Whether the backward pass computes the branches again, so that the forward pass
        does not save their outputs.
      pages: Pages with the keys and values of the selected branch, which have no gradient.
    """
    mode, tensors = arranged(query, key, value, gates, compressed)
    keep = kept_of(requires_grad(*tensors), recompute)
    if pages is not None:
        keep, tensors = PAGES, [*tensors, *pages]
    layout_args = pack_layout(config, kv_len, cu_seqlens, scale)
    return call(kind(mode, keep), *tensors, block_indices, assume_finite, *layout_args)[0]


# The operators


def _in_memory(tensors):
    """Resolve the negative bit of tensors, so that kernels can read them. The dispatcher of torch
    does not resolve the negative bit in lists that contain None.
    """
    return [x if x is None else x.resolve_neg() for x in tensors]


def _run(kind, tensors, *rest):
    return list(_kinds[kind].run(*_in_memory(tensors), *rest))


def _shapes(kind, tensors, *rest):
    return list(_kinds[kind].shapes(*tensors, *rest))


def _differentiable(kind, tensors, *rest):
    found = _kinds[kind]
    if found.backward is None:
        with torch._C._AutoDispatchBelowAutograd():
            return _dispatched(kind, [*tensors, *rest])
    return list(Dispatched.apply(kind, *tensors, *rest))


def _run_backward(kind, grad, kept, tensors, *rest):
    # The functions that an operator calls need not be traceable. An autograd kernel, such as
    # that of torch.library.custom_op, would disable autograd inside the operator.
    backward: Any = _kinds[kind].backward
    return [x.contiguous() for x in backward(grad, *kept, *_in_memory(tensors), *rest)]


def _backward_shapes(kind, grad, kept, tensors, *rest):
    return [x.new_empty(x.shape) for x in tensors[: _kinds[kind].floats]]


def _register(name: str, schema: str, function, shapes) -> None:
    torch.library.define(f"nsa::{name}", schema.format(REST))
    torch.library.impl(f"nsa::{name}", "CompositeExplicitAutograd", function)
    torch.library.register_fake(f"nsa::{name}", shapes)


for _name in ("attention", "branch_attention", "compress", "select_blocks"):
    _register(_name, FORWARD_SCHEMA, _run, _shapes)
    torch.library.impl(f"nsa::{_name}", "Autograd", _differentiable)
for _name in ("attention", "branch_attention", "compress"):
    _register(f"{_name}_backward", BACKWARD_SCHEMA, _run_backward, _backward_shapes)
