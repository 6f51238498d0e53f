"""The steps on kernels on torch tensors, as operators `nsa::*` (`operators.py`): any kernels.

Every function is one operator on the current stream: the host never waits for the device.
Arguments are those of `functional.py`, with `kv_len` never None. The steps themselves are a
`nsa_core.steps.fused.Steps`.

Where a gradient will be wanted, each branch's own output and log-sum-exp are kept for the
backward pass, and the selection. It cannot be differentiated once more (`first_order.py`).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nsa_core.array_ops import derived, like, padding_zeroed
from nsa_core.config import NSAConfig
from nsa_core.plan.buffers import Plan
from nsa_core.steps import fused
from nsa_core.steps.fused import Pages, Residuals, Steps
from nsa_core.steps.gradients import RowResiduals
from nsa_core.steps.params import Qkv
from nsa_core.types import Branches
from nsa_torch import operators
from nsa_torch.compress import compress
from nsa_torch.input_modes import (
    PRECOMPRESSED,
    SEPARATE_KV,
    SHARED_KV,
    InputMode,
    are_shared,
    mean_shapes,
    mode_of,
)
from nsa_torch.kernel_layout import KernelLayout
from nsa_torch.plans import Planned, nothing_before

# How the layout zeroes what no query of a branch may look at.
BRANCHES = {
    "compressed": KernelLayout.zero_unreachable_compressed,
    "selected": KernelLayout.zero_unreachable_tokens,
    "sliding": KernelLayout.zero_unreachable_tokens,
}
FORWARD, SAVING, RECOMPUTING = "forward", "saving", "recomputing"
PAGES = "pages"  # as FORWARD


def _target(branch: str) -> Callable:
    """`functional.<branch>_attention` on the kernels of a path."""

    def attend(
        path, *tensors, config, kv_len, cu_seqlens=None, scale=None, with_lse=True
    ) -> tuple[Tensor, Tensor]:
        kind = f"branch_attention/{path.name}/{branch}"
        place = operators.arguments(config, kv_len, cu_seqlens, scale)
        out, lse = operators.call(kind, *tensors, False, *place)
        return out, lse

    attend.__name__ = f"{branch}_attention"
    return attend


class KernelPath:
    """The functions of an implementation that runs on kernels; makes its kinds of calls known.

    Args:
      name: of the implementation.
      steps: on its kernels.
      masks: whether the kernels read nothing that no query may see, so that it need not be
        finite; else such keys, values and rows of padding are zeroed in copies.
      before: of the plans of all steps, as in `Planned`.
      list_shapes: shapes of what `steps.lists` names, from query, key, value, and as numbers the
        entries of a selection and `select_block`.

    Attributes:
      planned: functions of all steps, by input mode and what they keep: `FORWARD` nothing, `SAVING`
        what a gradient needs, `RECOMPUTING` what one needs that computes the branches again.
      alone: what calls of a known signature run that keep nothing, where it is not `planned`, by
        input mode. Where steps make no means, these do, so that none outlives its last use.
      joins: whether gates in one tensor stay so: kernels read them together.
    """

    def __init__(
        self,
        name: str,
        steps: Steps,
        *,
        masks: bool,
        before: Callable[..., None] = nothing_before,
        list_shapes: Callable[..., list[tuple[int, ...]]] = lambda *arguments: [],
    ):
        self.name, self.steps, self.masks = name, steps, masks
        self.before, self.list_shapes = before, list_shapes
        self.planned: dict[tuple[InputMode, str], Planned] = {}
        self.alone: dict[InputMode, Planned] = {}
        self.joins = steps.gates_together
        self._define()

    def _layout(self, ops, query, assume_finite, *place):
        options = {
            "assume_finite": assume_finite or self.masks,
            "placed": self.steps.reads_places,
        }
        return KernelLayout(ops, query, *place, **options)

    # One branch, or the selection alone.

    def _branch(self, branch, ops, query, key, value, *rest):
        indices, rest = _split(rest, -operators.REST_COUNT)
        layout = self._layout(ops, query, *rest)
        if branch == "compressed":
            key, value = layout.in_slots(key, value)
        value = BRANCHES[branch](layout, value)
        if indices:
            (query,) = padding_zeroed(ops, layout, query)
        step = getattr(self.steps.forward, branch)
        return step(ops, Qkv(query, key, value), *indices, layout.params)

    def _branch_backward(self, branch, ops, do, out, lse, *rest):
        dlse, rest = operators.second_gradient(rest, 4 if branch == "selected" else 3)
        query, key, value, *rest = rest
        indices, rest = _split(rest, -operators.REST_COUNT)
        layout = self._layout(ops, query, *rest)
        query, do = padding_zeroed(ops, layout, query, do)
        (delta,) = self.steps.backward.delta_of(ops, do, out)
        if dlse is not None:
            (dlse,) = ops.derive(_of_rows_with_keys, dlse, lse)
        rows, count = RowResiduals(lse, delta, dlse=dlse), key.shape[1]
        if branch == "compressed":
            key, value = layout.in_slots(key, value)
        key, value = (BRANCHES[branch](layout, x) for x in (key, value))
        step = getattr(self.steps.backward, branch)
        dq, *pair = step(ops, Qkv(query, key, value), *indices, do, rows, layout.params)
        return [dq, *(layout.of_slots(count, *pair) if branch == "compressed" else pair)]

    def _select(self, ops, query, key, *rest):
        layout, forward = self._layout(ops, query, *rest), self.steps.forward
        (key,) = layout.in_slots(key)
        # Only the log-sum-exp is read: the narrowest values do.
        (value,) = ops.derive(_narrow, key, width=self.steps.narrowest(key.shape[-1]))
        _, lse = forward.compressed(ops, Qkv(query, key, value), layout.params)
        rest = layout.params, layout.num_blocks(key)
        return [forward.select_blocks(ops, query, key, lse, *rest)]

    # All steps. They return `selection`: the block indices, or nothing where the caller gave them,
    # because no output of an operator may be an input. What is kept of a compression comes next.

    def _forward(self, mode, ops, *arguments, keep=False):
        """`keep`: return the means too."""
        inputs, given, means, rest = self._forward_arguments(mode, ops, arguments)
        out, indices = fused.forward(self.steps, ops, inputs, given, *rest)
        return out, _selection(ops, given, indices), *(means if keep else ())

    def _forward_alone(self, mode, ops, *arguments):
        """`_forward`, the output alone."""
        return self._forward(mode, ops, *arguments)[:1]

    def _forward_on_pages(self, ops, *arguments):
        """`_forward` of PRECOMPRESSED, whose selected keys and values are pages; before the block
        indices stand the `Pages`.
        """
        mode, count = PRECOMPRESSED, len(Pages._fields)
        tensors, rest = _split(arguments, mode.count)
        pages, rest = _split(rest, count)
        inputs, given, _, rest = self._forward_arguments(mode, ops, (*tensors, *rest))
        out, _ = fused.forward(self.steps, ops, inputs, given, *rest, Pages(*pages))
        return [out]

    def _forward_with_residuals(self, mode, ops, *arguments):
        """`_forward`, and what its gradients need: the branches one by one."""
        inputs, given, means, rest = self._forward_arguments(mode, ops, arguments)
        found = fused.forward_with_residuals(self.steps, ops, inputs, given, *rest)
        out, (indices, lists, outputs, lses) = found
        return out, _selection(ops, given, indices), *means, *outputs, *lses, *(lists or ())

    def _backward(self, mode, ops, do, selection, *tensors):
        """The branches are computed again."""
        means, arguments = _split(tensors, 2 * mode.compresses)
        given = arguments[mode.count]
        residuals = Residuals.recomputed(selection if given is None else given)
        return self._gradients(mode, ops, do, residuals, means, arguments)

    def _backward_from_residuals(self, mode, ops, do, selection, *tensors):
        means, tensors = _split(tensors, 2 * mode.compresses)
        branches, tensors = _split(tensors, 6)
        lists, arguments = _split(tensors, len(self.steps.lists))
        given = arguments[mode.count]
        indices = selection if given is None else given
        outputs, lses = Branches(*branches[:3]), Branches(*branches[3:])
        residuals = Residuals(indices, lists or None, outputs, lses)
        return self._gradients(mode, ops, do, residuals, means, arguments)

    def _gradients(self, mode, ops, do, residuals, means, arguments):
        inputs, _, layout = self._arguments(mode, ops, arguments)
        length, given = inputs.key.compressed.shape[1], mode.inputs(arguments).gates
        if mode.compresses:
            inputs = inputs.with_compressed(*means)
        else:
            inputs, _ = self._compressed(mode, ops, inputs, layout)
        inputs = inputs._replace(
            key=layout.zero_unreachable(inputs.key), value=layout.zero_unreachable(inputs.value)
        )
        rest = layout.params, mode.shared
        found = fused.backward(self.steps, ops, inputs, residuals, do, *rest)
        if mode.compresses:
            of_tokens = length, layout.params, mode.shared
            found = fused.gradients_of_tokens(self.steps, ops, found, *of_tokens)
        else:
            pair = found.key.compressed, found.value.compressed
            found = found.with_compressed(*layout.of_slots(length, *pair))
        if mode.joined:
            gates: Any = ops.bound(found.gates, given.dtype)
        else:
            pairs = zip(found.gates, given, strict=True)
            gates = Branches(*(ops.copied(x, gate.dtype) for x, gate in pairs))
        return mode.gradients(found._replace(gates=gates))

    def _compressed(self, mode, ops, inputs, layout):
        """`inputs` with compressed tokens, and those that were made."""
        if not mode.compresses:
            pair = inputs.key.compressed, inputs.value.compressed
            return inputs.with_compressed(*layout.in_slots(*pair)), ()
        if self.steps.compression is None:
            borders = () if layout.cu_seqlens is None else (layout.cu_seqlens,)
            pair = (x.compressed for x in (inputs.key, inputs.value))
            means = (ops.derive(_means, x, *borders, config=layout.config)[0] for x in pair)
            return inputs.with_compressed(*means), ()
        inputs = fused.with_means(self.steps, ops, inputs, layout.params)
        return inputs, (inputs.key.compressed, inputs.value.compressed)

    def _forward_arguments(self, mode, ops, arguments):
        """`Inputs` with compressed tokens, block indices or None, the means that were taken, and
        the last arguments of `fused.forward`.
        """
        inputs, given, layout = self._arguments(mode, ops, arguments)
        inputs, means = self._compressed(mode, ops, inputs, layout)
        inputs = inputs._replace(value=layout.zero_unreachable(inputs.value))
        rest = layout.params, layout.num_blocks(inputs.key.compressed)
        return inputs, given, means, rest

    def _arguments(self, mode, ops, arguments):
        """`Inputs`, the block indices or None, and the layout, from those of an operator."""
        given, assume_finite, *place = arguments[mode.count :]
        inputs = mode.inputs(arguments)
        if mode.joined:
            inputs = inputs._replace(gates=Branches(*ops.unbound_float32(inputs.gates)))
        layout = self._layout(ops, inputs.query, assume_finite, *place)
        if self.masks:  # keys and queries; a gate multiplies what the kernels found
            rows = KernelLayout(ops, inputs.query, *place, assume_finite=assume_finite)
            gates = padding_zeroed(ops, rows, *inputs.gates)
            inputs = inputs._replace(gates=Branches(*gates))
        return inputs, given, layout

    def _shapes(self, mode, keep, *arguments):
        """Of results, unwritten; `keep`: what is kept."""
        query, key, value, _ = mode.inputs(arguments)
        given, _, *place = arguments[mode.count :]
        out, lse = operators.branch_shapes(query, key.selected, value.selected)
        selection = query.new_empty(0, dtype=torch.int32)
        if given is None:
            (selection,) = operators.index_shapes(query, key.selected, *place)
        found = [out, selection]
        if keep != FORWARD and mode.compresses:
            found += mean_shapes(key, value, place)
        if keep == SAVING:
            n = (selection if given is None else given).shape[-1]
            block = operators.numbers_in(place)[operators.FIELDS.index("select_block")]
            lists = self.list_shapes(query, key.selected, value.selected, n, block)
            found += [x.new_empty(x.shape) for x in [out] * 3 + [lse] * 3]
            found += [query.new_empty(shape, dtype=torch.int32) for shape in lists]
        return found

    def _define(self):
        for branch in BRANCHES:
            forward, backward = (
                Planned(functools.partial(function, branch))
                for function in (self._branch, self._branch_backward)
            )
            kind, kept = f"branch_attention/{self.name}/{branch}", slice(None)
            gradient = {"floats": 3, "kept": kept, "returned": 2}
            operators.define(kind, forward, operators.branch_shapes, backward, **gradient)
        kind = f"select_blocks/{self.name}"
        operators.define(kind, Planned(self._select), operators.index_shapes)
        whole = {
            FORWARD: (self._forward, None),
            RECOMPUTING: (functools.partial(self._forward, keep=True), self._backward),
            SAVING: (self._forward_with_residuals, self._backward_from_residuals),
        }
        compressing = SEPARATE_KV, SHARED_KV
        if not self.steps.compression:
            for mode in compressing:
                self.alone[mode] = Planned(functools.partial(self._forward, mode))
        modes = [*(compressing if self.steps.compression else ()), PRECOMPRESSED]
        joined = [mode.with_joined_gates() for mode in modes if self.joins]
        for mode in joined:
            forward = functools.partial(self._forward_alone, mode)
            self.alone[mode] = Planned(forward, before=self.before)
        for mode in modes + joined:
            for keep, (forward, backward) in whole.items():
                pull_back = (
                    None if backward is None else Planned(functools.partial(backward, mode))
                )
                forward = functools.partial(forward, mode)
                function = Planned(forward, backward=pull_back, before=self.before)
                self.planned[mode, keep] = function
                shapes = functools.partial(self._shapes, mode, keep)
                gradient = {"floats": mode.count, "kept": slice(1, None)}
                operators.define(self.kind(mode, keep), function, shapes, pull_back, **gradient)

        if self.steps.reads_pages:
            operators.define(
                self.kind(PRECOMPRESSED, PAGES),
                Planned(self._forward_on_pages, before=self.before),
                lambda query, *rest: operators.branch_shapes(query, None, rest[4])[:1],
            )

    def kind(self, mode: InputMode, keep: str) -> str:
        return f"attention/{self.name}/{mode.name}/{keep}"

    def plans(
        self, query, key, value, gates, place, gradients: bool, device, shared: bool = True
    ) -> list[Plan]:
        """Of a call, and of its gradient.

        Args:
          query, key, value, gates: tensors, or `Array`s in their place.
          place: of `operators.arguments`.
          shared: whether the branches share their tokens.
        """
        compressed = None
        if not self.steps.compression:
            config = operators.config_of(*operators.numbers_in(place))
            count = config.num_compressed(key.shape[1])
            compressed = [
                x._replace(shape=(x.shape[0], count, *x.shape[2:])) for x in (key, value)
            ]
        mode = mode_of(shared, compressed is not None, joined=False)
        tokens = mode.tokens(Branches.each(key), Branches.each(value), compressed)
        function = self.planned[mode, SAVING if gradients else FORWARD]
        return function.plans([query, *tokens, *gates, None, False, *place], device)

    # The functions that `dispatch.py` names.

    compressed_attention, selected_attention, sliding_attention = map(_target, BRANCHES)

    def select_blocks(
        self, query, compressed_key, *, config, kv_len, cu_seqlens=None, scale=None
    ):
        """`functional.select_blocks`; the normalisation is a pass of its own here."""
        place = operators.arguments(config, kv_len, cu_seqlens, scale)
        pair = query.detach(), compressed_key.detach()
        return operators.call(f"select_blocks/{self.name}", *pair, False, *place)[0]

    def __call__(
        self,
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
    ) -> Tensor:
        """All steps. Each branch's kernel adds to the gated sum; where residuals are kept, the
        sum comes after the branches.

        Args:
          key, value: the compressed field is not read where `compressed` is given.
          compressed: `(k_cmp, v_cmp)`; None: the means, where the steps make them.
          assume_finite: keys and values that no query may look at are finite, as in a cache, so
            that they need not be copied to be kept out.
          recompute: the backward pass computes the branches again. Else it keeps their outputs.
        """
        mode = mode_of(are_shared(key, value), compressed is not None)
        floats = query, *key, *value, *gates, *(compressed or ())
        keep = self.keep(operators.requires_grad(*floats), recompute)
        place = operators.arguments(config, kv_len, cu_seqlens, scale)
        tensors = query, *mode.tokens(key, value, compressed), *gates, block_indices
        return operators.call(self.kind(mode, keep), *tensors, assume_finite, *place)[0]

    def on_pages(
        self,
        query: Tensor,
        key: Branches,
        value: Branches,
        gates: Branches[Tensor],
        pages: Pages,
        *,
        config: NSAConfig,
        kv_len: Tensor,
        scale: float | None = None,
    ) -> Tensor:
        """All steps, without a gradient: the selected keys and values are pages, and of the others
        those that no query may look at are finite.
        """
        tensors = query, *key, *value, *gates, *pages, None
        place = operators.arguments(config, kv_len, None, scale)
        return operators.call(self.kind(PRECOMPRESSED, PAGES), *tensors, True, *place)[0]

    def keep(self, gradient: bool, recompute: bool) -> str:
        """What a call keeps."""
        if not gradient:
            return FORWARD
        return RECOMPUTING if recompute else SAVING

    def function(self, mode: InputMode, keep: str) -> Planned:
        """What a call runs; where it keeps nothing, its output alone is made."""
        alone = self.alone.get(mode) if keep == FORWARD else None
        return alone or self.planned[mode, keep]


def _split(tensors, count):
    return tensors[:count], tensors[count:]


def _selection(ops, given, indices):
    return indices if given is None else ops.zeros(given, (0,))


@derived(lambda dlse, lse: [like(dlse)])
def _of_rows_with_keys(ops, dlse, lse):
    """What sees nothing has no log-sum-exp that could change."""
    return [ops.xp.where(lse == -float("inf"), 0.0, dlse)]


@derived(
    lambda x, *borders, config: [
        like(x, x.shape[0], config.num_compressed(x.shape[1]), *x.shape[2:])
    ]
)
def _means(ops, x, *borders, config):
    return [compress(x, config=config, cu_seqlens=borders[0] if borders else None)]


@derived(lambda x, *, width: [like(x, *x.shape[:-1], width)])
def _narrow(ops, x, *, width):
    return [x[..., :width]]
