"""The steps on kernels on torch tensors, as operators `nsa::*` (`operators.py`): any kernels.

Every function is one operator on the current stream: the host never waits for the device.
Arguments are those of `functional.py`, with `kv_len` never None. The steps themselves are a
`nsa_core.steps.fused.Steps`.

Where a gradient will be wanted, each branch's own output and log-sum-exp are kept for the
backward pass, and the selection. It cannot be differentiated once more (`first_order.py`).
"""

import functools
import operator
from collections.abc import Callable

import torch
from torch import Tensor

from nsa_core.array_ops import derived, like, padding_zeroed
from nsa_core.config import NSAConfig
from nsa_core.steps import fused
from nsa_core.steps.fused import Residuals, Steps
from nsa_core.steps.gradients import RowResiduals
from nsa_core.types import Branches
from nsa_torch import operators
from nsa_torch.call_forms import APART, GIVEN, SHARED, Form, form_of, mean_shapes
from nsa_torch.kernel_layout import KernelLayout
from nsa_torch.plans import Known, Planned

BRANCHES = (
    ("compressed", operators.THREE, KernelLayout.seen_compressed),
    ("selected", operators.CHOSEN, KernelLayout.seen_tokens),
    ("sliding", operators.THREE, KernelLayout.seen_tokens),
)


class KernelPath:
    """The functions of an implementation that runs on kernels; makes its operators.

    Args:
      prefix: of the operators' names.
      steps: on its kernels.
      masks: whether the kernels read nothing that no query may see, so that it need not be
        finite; else such keys, values and rows of padding are zeroed in copies.
      before: of the plans of all steps, as in `Planned`.
      list_shapes: shapes of what `steps.lists` names, from query, key, value, and as numbers the
        slots of a selection and `select_block`.
    """

    def __init__(
        self,
        prefix: str,
        steps: Steps,
        *,
        masks: bool,
        before: Callable[..., None] = lambda planned, plan, arguments, device: None,
        list_shapes: Callable[..., list[tuple[int, ...]]] = lambda *arguments: [],
    ):
        self.prefix, self.steps, self.masks = prefix, steps, masks
        self.before, self.list_shapes = before, list_shapes
        self.planned: dict[str, Planned] = {}
        self.joined: dict[Form, Planned] = {}
        self._define()

    def _layout(self, ops, query, place, clean=False):
        placed = self.steps.compression is not None
        return KernelLayout(ops, query, *place, clean=clean or self.masks, placed=placed)

    # One branch, or the selection alone.

    def _branch(self, step, seen, ops, query, key, value, *rest):
        indices, place = _split(rest, -operators.PLACE_COUNT)
        layout = self._layout(ops, query, place)
        if seen is KernelLayout.seen_compressed:
            key, value = layout.in_slots(key, value)
        value = seen(layout, value)
        if indices:
            (query,) = padding_zeroed(ops, layout, query)
        return step(ops, query, key, value, *indices, *layout.rest)

    def _branch_backward(self, step, seen, ops, do, out, lse, query, key, value, *rest):
        """`step`: of `steps.backward`; `seen`: the method of the layout for its keys."""
        indices, place = _split(rest, -operators.PLACE_COUNT)
        layout = self._layout(ops, query, place)
        query, do = padding_zeroed(ops, layout, query, do)
        (delta,) = self.steps.backward.delta_of(ops, do, out)
        rows, count = RowResiduals(lse, delta), key.shape[1]
        compressed = seen is KernelLayout.seen_compressed
        if compressed:
            key, value = layout.in_slots(key, value)
        key, value = seen(layout, key), seen(layout, value)
        dq, *pair = step(ops, query, key, value, *indices, do, rows, *layout.rest)
        return [dq, *(layout.of_slots(count, *pair) if compressed else pair)]

    def _select(self, ops, query, key, *place):
        layout, forward = self._layout(ops, query, place), self.steps.forward
        (key,) = layout.in_slots(key)
        # Only the log-sum-exp is read: the narrowest values do.
        (value,) = ops.derive(_narrow, key, width=self.steps.narrowest(key.shape[-1]))
        _, lse = forward.compressed(ops, query, key, value, *layout.rest)
        rest = *layout.rest, layout.num_blocks(key)
        return [forward.select_blocks(ops, query, key, lse, *rest)]

    # All steps. An operator returns `selection`: the block indices, or nothing where the caller
    # gave them, because no output may be an input. What is kept of a compression comes next.

    def _forward(self, form, ops, *arguments, keep=False):
        """`keep`: return the means too."""
        inputs, given, layout = self._arguments(form, ops, arguments)
        inputs, means = self._compressed(form, ops, inputs, layout)
        inputs = inputs._replace(value=layout.seen(inputs.value))
        rest = *layout.rest, layout.num_blocks(inputs.key.compressed)
        out, indices = fused.forward(self.steps, ops, inputs, given, *rest)
        return out, _selection(ops, given, indices), *(means if keep else ())

    def _forward_joined(self, form, ops, *arguments):
        """`_forward` of gates `[B, T, H, 3]`, the output alone."""
        before, (gates, *rest) = _split(arguments, form.count - 3)
        return self._forward(form, ops, *before, *ops.unbound_float32(gates), *rest)[:1]

    def _forward_with_residuals(self, form, ops, *arguments):
        """`_forward`, and what its gradients need: the branches one by one (`_residuals`)."""
        inputs, given, layout = self._arguments(form, ops, arguments)
        inputs, means = self._compressed(form, ops, inputs, layout)
        inputs = inputs._replace(value=layout.seen(inputs.value))
        rest = *layout.rest, layout.num_blocks(inputs.key.compressed)
        out, (indices, lists, outputs, lses) = fused.forward_with_residuals(
            self.steps, ops, inputs, given, *rest
        )
        kept = *outputs, *lses, *(lists or ())
        return out, _selection(ops, given, indices), *means, *kept

    def _backward(self, form, ops, do, selection, *tensors):
        """The branches are computed again."""
        means, arguments = _split(tensors, len(form.means))
        given = arguments[form.count]
        residuals = Residuals.recomputed(selection if given is None else given)
        return self._gradients(form, ops, do, residuals, means, arguments)

    def _backward_from_residuals(self, form, ops, do, selection, *tensors):
        means, tensors = _split(tensors, len(form.means))
        branches, tensors = _split(tensors, 6)
        lists, arguments = _split(tensors, len(self.steps.lists))
        given = arguments[form.count]
        indices = selection if given is None else given
        outputs, lses = Branches(*branches[:3]), Branches(*branches[3:])
        residuals = Residuals(indices, lists or None, outputs, lses)
        return self._gradients(form, ops, do, residuals, means, arguments)

    def _gradients(self, form, ops, do, residuals, means, arguments):
        inputs, _, layout = self._arguments(form, ops, arguments)
        length = inputs.key.compressed.shape[1]
        if form.compresses:
            inputs = inputs.with_compressed(*means)
        else:
            inputs, _ = self._compressed(form, ops, inputs, layout)
        inputs = inputs._replace(key=layout.seen(inputs.key), value=layout.seen(inputs.value))
        found = fused.backward(self.steps, ops, inputs, residuals, do, *layout.rest)
        if form.compresses:
            of_tokens = length, layout.config, layout, form.shared
            found = fused.gradients_of_tokens(self.steps, ops, found, *of_tokens)
        else:
            pair = found.key.compressed, found.value.compressed
            found = found.with_compressed(*layout.of_slots(length, *pair))
        gates = zip(found.gates, inputs.gates, strict=True)
        gates = Branches(*(ops.copied(x, gate.dtype) for x, gate in gates))
        return form.gradients(found._replace(gates=gates))

    def _compressed(self, form, ops, inputs, layout):
        """`inputs` with compressed tokens, and those that were made."""
        if not form.compresses:
            pair = inputs.key.compressed, inputs.value.compressed
            return inputs.with_compressed(*layout.in_slots(*pair)), ()
        inputs = fused.with_means(self.steps, ops, inputs, layout.config, layout)
        return inputs, (inputs.key.compressed, inputs.value.compressed)

    def _arguments(self, form, ops, arguments):
        """`Inputs`, the block indices or None, and the layout, from those of an operator."""
        given, clean, *place = arguments[form.count :]
        inputs = form.inputs(arguments)
        layout = self._layout(ops, inputs.query, place, clean)
        if self.masks:  # keys and queries; a gate multiplies what the kernels found
            rows = KernelLayout(ops, inputs.query, *place, clean=clean)
            gates = padding_zeroed(ops, rows, *inputs.gates)
            inputs = inputs._replace(gates=Branches(*gates))
        return inputs, given, layout

    def _shapes(self, form, *arguments, keep=False):
        """Of the results of `_forward`."""
        query, key, value, _ = form.inputs(arguments)
        given, _, *place = arguments[form.count :]
        out, _ = operators.branch_shapes(query, key.selected, value.selected)
        means = mean_shapes(key, value, place) if keep and form.compresses else ()
        selection = query.new_empty(0, dtype=torch.int32)
        if given is None:
            selection = operators.index_shapes(query, key.selected, *place)
        return out, selection, *means

    def _residual_shapes(self, form, *arguments):
        query, key, value, _ = form.inputs(arguments)
        given, _, *place = arguments[form.count :]
        out, selection, *means = self._shapes(form, *arguments, keep=True)
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        n = (selection if given is None else given).shape[-1]
        block = operators.numbers_in(place)[operators.FIELDS.index("select_block")]
        shapes = self.list_shapes(query, key.selected, value.selected, n, block)
        lists = (query.new_empty(shape, dtype=torch.int32) for shape in shapes)
        branches = (x.new_empty(x.shape) for x in [out] * 3 + [lse] * 3)
        return out, selection, *means, *branches, *lists

    @property
    def _residuals(self) -> list[str]:
        """What an operator keeps besides the selection and the means."""
        branches = (f"{name}_{x}" for x in ("out", "lse") for name in Branches._fields)
        return [*branches, *self.steps.lists]

    def _define(self):
        for branch, tensors, seen in BRANCHES:
            forward, backward = (
                Planned(functools.partial(method, getattr(steps, branch), seen), returns)
                for method, steps, returns in (
                    (self._branch, self.steps.forward, tuple),
                    (self._branch_backward, self.steps.backward, list),
                )
            )
            name = f"{self.prefix}{branch}_attention"
            operators.define_branch(name, tensors, forward, "Tensor out, Tensor lse", backward)
        name, shapes = f"{self.prefix}select_blocks", operators.index_shapes
        select = Planned(self._select, operator.itemgetter(0))
        operators.define(name, operators.SCORING, "Tensor", select, shapes)

        for form in (GIVEN, APART, SHARED) if self.steps.compression else (GIVEN,):
            self._define_whole(form)

    def _define_whole(self, form):
        """Operators of all steps: without gradients, with those of residuals, or of branches that
        are computed again.
        """

        def define(suffix, kept, function, shapes, backward=None):
            pull_back = backward and Planned(functools.partial(backward, form), list)
            own = functools.partial(function, form)
            forward = Planned(own, backward=pull_back, before=self.before)
            name, kept = f"{form.name}{suffix}", _tensors(*kept)
            self.planned[name], name = forward, f"{self.prefix}{name}"
            shapes = functools.partial(shapes, form)
            operators.define(name, form.schema, f"(Tensor out, {kept})", forward, shapes)
            if backward:
                operators.differentiate(name, form.schema, form.count, kept, pull_back, 1)

        means = "selection", *form.means
        with_means, shapes = (
            functools.partial(function, keep=True) for function in (self._forward, self._shapes)
        )
        define("", ["selection"], self._forward, self._shapes)
        self.joined[form] = Planned(functools.partial(self._forward_joined, form))
        define("_recomputing", means, with_means, shapes, self._backward)
        saving = self._forward_with_residuals, self._residual_shapes
        define("_saving", (*means, *self._residuals), *saving, self._backward_from_residuals)

    def _call(self, name, *arguments, known=None):
        return operators.call(f"{self.prefix}{name}", *arguments, known=known)

    # The functions that `dispatch.py` names.

    def compressed_attention(
        self,
        query,
        compressed_key,
        compressed_value,
        *,
        config,
        kv_len,
        cu_seqlens=None,
        scale=None,
        with_lse=True,
    ):
        """`functional.compressed_attention`."""
        place = operators.arguments(config, kv_len, cu_seqlens, scale)
        tensors = query, compressed_key, compressed_value
        out, lse = self._call("compressed_attention", *tensors, *place)
        return out, lse.detach()

    def select_blocks(
        self, query, compressed_key, *, config, kv_len, cu_seqlens=None, scale=None
    ):
        """`functional.select_blocks`; the normalisation is a pass of its own here."""
        place = operators.arguments(config, kv_len, cu_seqlens, scale)
        pair = query.detach(), compressed_key.detach()
        return self._call("select_blocks", *pair, *place)

    def selected_attention(
        self,
        query,
        key,
        value,
        block_indices,
        *,
        config,
        kv_len,
        cu_seqlens=None,
        scale=None,
        with_lse=True,
    ):
        """`functional.selected_attention`."""
        place = operators.arguments(config, kv_len, cu_seqlens, scale)
        out, lse = self._call("selected_attention", query, key, value, block_indices, *place)
        return out, lse.detach()

    def sliding_attention(
        self, query, key, value, *, config, kv_len, cu_seqlens=None, scale=None, with_lse=True
    ):
        """`functional.sliding_attention`."""
        place = operators.arguments(config, kv_len, cu_seqlens, scale)
        out, lse = self._call("sliding_attention", query, key, value, *place)
        return out, lse.detach()

    def attention(
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
        clean: bool = False,
        recompute: bool = False,
        known: Known | None = None,
    ) -> Tensor:
        """All steps. Each branch's kernel adds to the gated sum; where residuals are kept, a
        kernel of its own adds the branches.

        Args:
          key, value: the compressed field is not read where `compressed` is given.
          compressed: `(k_cmp, v_cmp)`; None, of one sequence a row: the means.
          clean: whether keys and values that no query may look at are finite, as in a cache, so
            that they need not be copied to be kept out.
          recompute: the backward pass computes the branches again. Else it keeps their outputs.
          known: of calls like this one; gates may then be one tensor `[B, T, H, 3]` where no
            gradient is wanted.
        """
        if known is None or known.call is None:
            form = form_of(key, value, compressed)
            name = f"{self.prefix}{form.name}"
            if operators.requires_grad(query, *key, *value, *gates, *(compressed or ())):
                name += "_recomputing" if recompute else "_saving"
            call = form, name, operators.arguments(config, kv_len, cu_seqlens, scale)
            if known is not None:
                known.call = call
        else:
            call = known.call
        form, name, (kv_len, lengths, _, *sizes) = call
        tokens = form.tokens(key, value, compressed)
        place = kv_len, lengths, cu_seqlens, *sizes
        if known is not None and isinstance(gates, Tensor):
            given = query, *tokens, gates, block_indices, clean, *place
            out = known.run(self.joined[form], given)[0]
            known.quick = functools.partial(_quick, form, known.plan)
            return out
        given = query, *tokens, *gates, block_indices, clean, *place
        return operators.call(name, *given, known=known)[0]


def _quick(form, plan, query, key, value, gates, compressed, *integers):
    """A call of `KernelPath.joined` whose plan is known; `integers`: block indices and borders."""
    tensors = [query, *form.tokens(key, value, compressed), gates]
    return plan([*tensors, *(x for x in integers if x is not None)])[0]


def _split(tensors, count):
    return tensors[:count], tensors[count:]


def _tensors(*names):
    """In the words of a schema."""
    return ", ".join(f"Tensor {name}" for name in names)


def _selection(ops, given, indices):
    return indices if given is None else ops.zeros(given, (0,))


@derived(lambda x, *, width: [like(x, *x.shape[:-1], width)])
def _narrow(ops, x, *, width):
    return [x[..., :width]]
