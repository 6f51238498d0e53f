"""Runs the steps of an implementation on kernels, `mosaic` or `triton`, on torch tensors as
operators `nsa::*` (`operators.py`). Every function of a `KernelPath` is one operator on the current
stream, and the host never waits for the device. The arguments are the same as in `functional.py`,
except that `kv_len` is never None. `nsa_core.steps.fused.Steps` defines the steps. If a gradient
may be requested later, the operator saves the block indices, and the output and log-sum-exp of each
branch. The backward pass itself cannot be differentiated (`plain.py`).
"""

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels_pallas.kernel import int32
from nsa_core.array_ops import ArrayOps, Places, derived, like, masked, padding_zeroed
from nsa_core.steps import fused, key_bounds
from nsa_core.steps.fused import Pages, Residuals, Steps, in_slots, of_slots
from nsa_core.steps.params import Params, Qkv
from nsa_core.types import Branches
from nsa_core.varlen import Capacity, Varlen
from nsa_torch import operators
from nsa_torch.geometry import geometry
from nsa_torch.operators import (
    FORWARD,
    MODES,
    PAGES,
    PRECOMPRESSED,
    RECOMPUTING,
    SAVING,
    InputMode,
    all_steps,
)
from nsa_torch.plans import Planned


class KernelLayout:
    """The `nsa_core.array_ops.QueryLayout` of one call, computed by derived steps of torch.
    Each array is `[B, T]` int32.

    Args:
      query: `[B, T, H, D]`.
      kv_len, lengths, cu_seqlens, max_seqlen, padded, gap, config, scale: As in
        `operators.LAYOUT_ARGS`.
      assume_finite: whether rows of padding, and keys and values to which no query attends, are
        known to be finite.
      may_gather: As in `Params`.
      placed: Whether the sequences of a packed row are laid out in slots (`nsa_core.varlen`). If
        `placed` is true, the compressed tokens of a sequence are stored in the slots of the
        sequence.
    """

    def __init__(
        self,
        ops: ArrayOps,
        query,
        kv_len,
        lengths,
        cu_seqlens,
        max_seqlen,
        padded,
        gap,
        config,
        scale,
        *,
        assume_finite=False,
        placed=False,
        may_gather=True,
    ):
        self.ops, self.config, self.scale = ops, operators.config_of(*config), scale
        self.kv_len, self.lengths = kv_len, lengths
        self.may_be_padded, self.gap = padded, gap
        self.cu_seqlens = None if cu_seqlens is None else ops.per_batch(cu_seqlens)
        self.shape, self.assume_finite = tuple(query.shape[:2]), assume_finite
        self.device = getattr(query, "device", None)  # arrays of a plan have no device
        self.fixed = lengths is None and cu_seqlens is None  # the layout depends only on sizes
        self.packed = cu_seqlens is not None
        self.placed, self.may_gather = placed, may_gather
        self.max_seqlen = max_seqlen

    @property
    def padded(self) -> bool:
        if self.assume_finite or not self.may_be_padded:
            return False
        return not (self.fixed and self.kv_len >= self.shape[1])

    @property
    def longest(self) -> int:
        """The maximum number of keys per sequence."""
        return self.kv_len if self.max_seqlen is None else min(self.kv_len, self.max_seqlen)

    @functools.cached_property
    def varlen(self) -> Varlen | None:
        """The tables of a packed row with slots (`placed`)."""
        (batch, length), borders = self.shape, self.cu_seqlens
        if borders is None or not self.placed:
            return None
        count = borders.shape[0]
        numbers = self.kv_len, count - 1, self.longest
        capacity = Capacity(batch, length, *numbers, self.config.of_sizes, self.gap)
        return Varlen(self.ops, capacity, borders.reshape(1, count))

    @property
    def params(self) -> Params:
        """The parameters of every step of a call."""
        return Params(self, self.config, self.scale, self.may_gather)

    @functools.cached_property
    def _arrays(self) -> Places:
        if self.varlen is not None:
            tokens = self.varlen.tokens
            return Places(tokens.position, tokens.key_start, tokens.compressed_start)
        given = [x for x in (self.lengths, self.cu_seqlens) if x is not None]
        sizes = {"shape": self.shape, "kv_len": self.kv_len, "packed": self.packed}
        with torch.device(self.device) if self.device else contextlib.nullcontext():
            return Places(*self.ops.derive(_places, *given, **sizes, config=self.config))

    position = property(lambda self: self._arrays[0])
    key_start = property(lambda self: self._arrays[1])
    compressed_start = property(lambda self: self._arrays[2])

    num_keys = None

    # A probability of zero times NaN is NaN. Values after the last visible key are therefore set
    # to zero. For keys, masking the logits is sufficient in the forward pass.

    def zero_unreachable(self, x: Branches) -> Branches:
        """Return the keys or values of the branches, with zeros for tokens to which no query
        may attend.
        """
        if self.assume_finite:
            return x
        selected = self.zero_unreachable_tokens(x.selected)
        shared = x.sliding is x.selected
        sliding = selected if shared else self.zero_unreachable_tokens(x.sliding)
        return Branches(self.zero_unreachable_compressed(x.compressed), selected, sliding)

    def zero_unreachable_tokens(self, x):
        """Return `x` `[B, S, Hkv, .]` with zeros after the existing tokens."""
        if self.packed:
            return self.ops.derive(_cut, x, self.cu_seqlens)[0] if self.may_be_padded else x
        if self.lengths is not None:
            return self.ops.derive(_cut, x, self.lengths)[0]
        return x if self.kv_len >= x.shape[1] else self.ops.derive(_cut, x, end=self.kv_len)[0]

    def zero_unreachable_compressed(self, x):
        """Return `x` `[B, C, Hkv, .]` with zeros after the existing compressed tokens."""
        if self.fixed or (self.varlen is not None and not self.may_be_padded):
            return x
        bounds = key_bounds.VisibleCompressed(self.config).of(self.ops, self)
        return self.ops.derive(_cut, x, bounds[1])[0]

    def num_blocks(self, compressed_key) -> int:
        """Return the maximum number of key blocks per sequence among which queries select."""
        longest = self.longest
        if self.lengths is not None:
            stride, block = self.config.compress_stride, self.config.compress_block
            longest = compressed_key.shape[1] * stride + block - 1
        return self.config.num_blocks(longest)


@derived(lambda *given, shape, **static: [int32(*shape)] * 3)
def _places(ops, *given, shape, kv_len, packed, config):
    """Return the fields of `Places` for the queries: `position`, `key_start` and
    `compressed_start`. `given` has `lengths` or `cu_seqlens`. `given` is empty if all rows have
    `kv_len` keys.
    """
    number = given[0] if given else None
    layout = geometry(
        *shape,
        config=config,
        kv_len=kv_len if packed or number is None else number,
        cu_seqlens=number if packed else None,
        device=None if number is None else number.device,
    )
    start = layout.compressed_start if packed else layout.key_start
    return [ops.to_int32(x) for x in (layout.position, layout.key_start, start)]


@derived(lambda x, *ends, end=0: [like(x)])
def _cut(ops, x, *ends, end: Any = 0):
    """Return `x` `[B, S, ...]` with zeros from the position `end` on, or from the last value of
    `ends` on. `ends` has one value for all rows, or one per row.
    """
    there = torch.arange(x.shape[1], device=x.device)[None]
    if ends:
        end = ends[0].reshape(x.shape[0] if ends[0].numel() > 1 else 1, -1)[:, -1:]
    return masked(torch, there < end, x)


# For each branch, the method of the layout that sets tokens to zero if no query may attend to
# them.
BRANCHES = {
    "compressed": KernelLayout.zero_unreachable_compressed,
    "selected": KernelLayout.zero_unreachable_tokens,
    "sliding": KernelLayout.zero_unreachable_tokens,
}


class KernelPath:
    """The functions of an implementation that consists of kernels. The constructor registers the
    kinds of calls of this implementation (`operators.Kind`).

    Args:
      name: name of the implementation.
      steps: the steps of attention on the kernels of this implementation.
      may_gather: As in `Params`.
      masks: Whether the kernels skip padding, and keys and values to which no query attends. If
        `masks` is False, the kernels read copies in which these tokens are zeros.
      list_shapes: function that returns the shapes of `steps.lists`. The arguments of
        `list_shapes` are query, key, value, the number of selected blocks and `select_block`.
    """

    compressed_attention: Callable[..., Any]
    selected_attention: Callable[..., Any]
    sliding_attention: Callable[..., Any]

    def __init__(
        self,
        name: str,
        steps: Steps,
        *,
        masks: bool,
        may_gather: bool = True,
        list_shapes: Callable[..., list[tuple[int, ...]]] = lambda *arguments: [],
    ):
        self.name, self.steps, self.masks, self.list_shapes = name, steps, masks, list_shapes
        self.may_gather = may_gather
        for branch in BRANCHES:
            forward, backward = (
                Planned(functools.partial(function, branch))
                for function in (self._branch, self._branch_backward)
            )
            kind, kept = f"branch_attention/{name}/{branch}", slice(None)
            gradient = {"floats": 3, "kept": kept, "returned": 2}
            operators.define(kind, forward, operators.branch_shapes, backward, **gradient)
            setattr(self, f"{branch}_attention", operators.step_of_kind(kind))
        kind = f"select_blocks/{name}"
        operators.define(kind, Planned(self._select), operators.index_shapes)
        # `functional.select_blocks`, where the normalization of scores is a separate pass.
        self.select_blocks = operators.step_of_kind(kind)

        modes = [*MODES, *(mode.with_joined_gates() for mode in MODES)]
        every = [*itertools.product(modes, (FORWARD, SAVING, RECOMPUTING))]
        every += [(PRECOMPRESSED, PAGES)] if steps.reads_pages else []
        for mode, keep in every:
            forward, backward, shapes = (
                functools.partial(function, mode, keep)
                for function in (self._forward, self._backward, self._shapes)
            )
            pull_back, gradient = None, {}
            if keep in (SAVING, RECOMPUTING):
                pull_back = Planned(backward)
                gradient = {"floats": mode.count, "kept": slice(1, None)}
            function = Planned(forward, pull_back)
            operators.define(self.kind(mode, keep), function, shapes, pull_back, **gradient)

    def kind(self, mode: InputMode, keep: str) -> str:
        """Return the name of a kind of calls that run all steps. `keep` is `FORWARD`, `SAVING` or
        `RECOMPUTING`. `FORWARD` saves no residuals, and `SAVING` saves all residuals. `RECOMPUTING`
        saves only the residuals for a backward pass that computes the branches again.
        """
        return f"attention/{self.name}/{mode.name}/{keep}"

    def planned(self, mode: InputMode, keep: str) -> Any:
        """Return the `Planned` function of the kind with this mode and `keep`."""
        return operators.kind_of(self.kind(mode, keep)).run

    def _layout(self, ops, query, assume_finite, *layout_args):
        options = {
            "assume_finite": assume_finite or self.masks,
            "placed": self.steps.reads_places,
            "may_gather": self.may_gather,
        }
        return KernelLayout(ops, query, *layout_args, **options)

    # These kinds run one branch, or only select blocks.

    def _branch(self, branch, ops, *arguments):
        given = self._of_branch(branch, ops, *arguments)
        return fused.one_branch(self.steps, ops, branch, *given)

    def _branch_backward(self, branch, ops, do, out, lse, *rest):
        dlse, rest = operators.second_gradient(rest, 4 if branch == "selected" else 3)
        qkv, indices, params, visible = self._of_branch(branch, ops, *rest)
        given = qkv, indices, params, (out, lse), (do, dlse)
        return fused.one_branch_backward(self.steps, ops, branch, *given, visible)

    def _of_branch(self, branch, ops, query, key, value, *rest):
        """Return the arguments of `fused.one_branch` from `qkv` on."""
        indices, rest = _split(rest, -operators.REST_COUNT)
        layout = self._layout(ops, query, *rest)
        visible = functools.partial(BRANCHES[branch], layout)
        return Qkv(query, key, value), indices, layout.params, visible

    def _select(self, ops, query, key, *rest):
        layout = self._layout(ops, query, *rest)
        given = query, key, layout.params, layout.num_blocks(key)
        return [fused.select_blocks(self.steps, ops, *given)]

    # These kinds run all steps. The residuals are the block indices, the computed means, and the
    # outputs, log-sum-exps and lists of the branches. Block indices from the caller are no
    # residual, since an operator must not return an input.

    def _forward(self, mode, keep, ops, *arguments):
        tensors, rest = _split(arguments, mode.count)
        pages = {}
        if keep == PAGES:  # arguments after the gates; the selected keys and values are pages
            given, rest = _split(rest, len(Pages._fields))
            pages = {"pages": Pages(*given)}
        given, *rest = rest
        inputs, means, layout = self._inputs(mode, ops, tensors, rest)
        inputs = inputs._replace(value=layout.zero_unreachable(inputs.value))
        steps = self.steps, ops, inputs, given, layout.params
        blocks = layout.num_blocks(inputs.key.compressed)
        branches = []
        if keep == SAVING:
            found = fused.forward_with_residuals(*steps, blocks)
            out, (indices, lists, outputs, lses) = found
            branches = [*outputs, *lses, *(lists or ())]
        else:
            out, indices = fused.forward(*steps, blocks, **pages)
            if keep != RECOMPUTING:
                return [out]
        selection = indices if given is None else ops.zeros(given, (0,))
        return [out, selection, *means, *branches]

    def _backward(self, mode, keep, ops, do, selection, *kept):
        means, kept = _split(kept, 2 * mode.compresses)
        outputs = lses = lists = None
        if keep == SAVING:
            branches, kept = _split(kept, 6)
            outputs, lses = Branches(*branches[:3]), Branches(*branches[3:])
            lists, kept = _split(kept, len(self.steps.lists))
        tensors, (given, *rest) = _split(kept, mode.count)
        indices = selection if given is None else given
        residuals = Residuals(indices, lists or None, outputs, lses)
        asked = mode.inputs(tensors)
        length = asked.key.compressed.shape[1]
        inputs, _, layout = self._inputs(mode, ops, tensors, rest, means)
        inputs = inputs._replace(
            key=layout.zero_unreachable(inputs.key), value=layout.zero_unreachable(inputs.value)
        )
        # `gradients_of_tokens` reads the gradients from the slots to which such kernels write
        # them.
        by_places = mode.shared and self.steps.reads_places
        found = fused.backward(self.steps, ops, inputs, residuals, do, layout.params, by_places)
        if mode.compresses:
            of_tokens = length, layout.params, mode.shared
            found = fused.gradients_of_tokens(self.steps, ops, found, *of_tokens)
        else:
            pair = found.key.compressed, found.value.compressed
            found = found.with_compressed(*of_slots(layout, length, *pair))
        if mode.joined:
            gates: Any = ops.stacked(found.gates, asked.gates.dtype)
        else:
            pairs = zip(found.gates, asked.gates, strict=True)
            gates = Branches(*(ops.copied(x, gate.dtype) for x, gate in pairs))
        return mode.gradients(found._replace(gates=gates))

    def _inputs(self, mode, ops, tensors, rest, means=None):
        """Return the `Inputs` of the steps with compressed tokens, the computed means, and the
        layout.

        Args:
          rest: The arguments that `operators.REST` describes.
          means: The means that the forward pass has computed; None in the forward pass itself.
        """
        inputs = mode.inputs(tensors)
        if mode.joined:
            gates = inputs.gates
            if self.steps.gates_together:
                gates = ops.unstacked_float32(gates)
            else:
                gates = ops.derive(_unbound, gates)
            inputs = inputs._replace(gates=Branches(*gates))
        layout = self._layout(ops, inputs.query, *rest)
        # Kernels that mask keys and queries do not read padding. However, they multiply outputs
        # by the gates, and gates of padding may be NaN.
        if self.masks:
            assume_finite, *layout_args = rest
            rows = KernelLayout(ops, inputs.query, *layout_args, assume_finite=assume_finite)
            gates = padding_zeroed(ops, rows, *inputs.gates)
            inputs = inputs._replace(gates=Branches(*gates))
        pair = inputs.key.compressed, inputs.value.compressed
        if not mode.compresses:
            return inputs.with_compressed(*in_slots(layout, *pair)), (), layout
        if means is None:
            means = self.steps.compression.means(ops, *pair, layout.params)
        return inputs.with_compressed(*means), means, layout

    def _shapes(self, mode, keep, *arguments):
        """Return uninitialized tensors with the shapes and dtypes of the results."""
        query, key, value, _ = mode.inputs(arguments)
        out, lse = operators.branch_shapes(query, key.selected, value.selected)
        if keep in (FORWARD, PAGES):
            return [out]
        given, _, *layout_args = arguments[mode.count :]
        selection = query.new_empty(0, dtype=torch.int32)
        if given is None:
            (selection,) = operators.index_shapes(query, key.selected, *layout_args)
        found, config = [out, selection], operators.config_of(*layout_args[-2])
        if mode.compresses:
            length, borders = key.compressed.shape[1], layout_args[2]
            count = config.num_compressed(length)
            if self.steps.reads_places:
                multiple = config.select_block // config.compress_stride
                count = -(-count // multiple) * multiple
                if borders is not None and count:
                    sizes = 1, length, length, borders.shape[0] - 1, length
                    count = Capacity(*sizes, config).slots
            for x in (key.compressed, value.compressed):
                found.append(x.new_empty(x.shape[0], count, *x.shape[2:]))
        if keep == SAVING:
            n = (selection if given is None else given).shape[-1]
            sizes = key.selected, value.selected, n, config.select_block
            found += [x.new_empty(x.shape) for x in [out] * 3 + [lse] * 3]
            lists = self.list_shapes(query, *sizes)
            found += [query.new_empty(shape, dtype=torch.int32) for shape in lists]
        return found

    def __call__(self, *tensors: Any, **options: Any) -> Tensor:
        """Run all steps, with the arguments of `all_steps`."""
        return all_steps(self.kind, *tensors, **options)


def _split(tensors, count):
    return tensors[:count], tensors[count:]


@derived(lambda x: [like(x, *x.shape[:-1])] * 3)
def _unbound(ops, x):
    return x.unbind(-1)
