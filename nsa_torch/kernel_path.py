"""The steps on kernels on torch tensors, as operators `nsa::*` (`operators.py`): any kernels.

Every function is one operator on the current stream: the host never waits for the device.
Arguments are those of `functional.py`, with `kv_len` never None. The steps themselves are a
`nsa_core.steps.fused.Steps`.

Where a gradient will be wanted, each branch's own output and log-sum-exp are kept for the
backward pass, and the selection. It cannot be differentiated once more (`first_order.py`).
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from nsa_core.array_ops import ArrayOps, zero_padding
from nsa_core.config import NSAConfig
from nsa_core.steps import fused
from nsa_core.steps.fused import Residuals, Steps
from nsa_core.steps.gradients import RowResiduals
from nsa_core.types import Branches
from nsa_torch import operators
from nsa_torch.call_forms import APART, GIVEN, SHARED, form_of, mean_shapes
from nsa_torch.kernel_layout import KernelLayout
from nsa_torch.replay import Pair, Replayed

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
      ops: what they run with.
      masks: whether the kernels read nothing that no query may see, so that it need not be
        finite; else such keys, values and rows of padding are zeroed in copies.
      before_call: called before all steps run, with the inputs, `operators.PLACE`'s values, the
        `Form`, and whether gradients will be wanted.
      list_shapes: shapes of what `steps.lists` names, from query, key, value, and as numbers the
        slots of a selection and `select_block`.
    """

    def __init__(
        self,
        prefix: str,
        steps: Steps,
        ops: ArrayOps,
        *,
        masks: bool,
        before_call: Callable[..., None] = lambda *arguments, gradients: None,
        list_shapes: Callable[..., list[tuple[int, ...]]] = lambda *arguments: [],
    ):
        self.prefix, self.steps, self.ops, self.masks = prefix, steps, ops, masks
        self.before_call, self.list_shapes = before_call, list_shapes
        self._define()

    def _layout(self, query, place, clean=False):
        return KernelLayout(query, *place, clean=clean or self.masks)

    # One branch, or the selection alone.

    def _branch(self, step, seen, query, key, value, *rest):
        indices, place = rest[:-5], rest[-5:]
        layout = self._layout(query, place)
        value = seen(layout, value)
        if indices:
            (query,) = zero_padding(torch, layout, query)
        out, lse = step(self.ops, query, key, value, *indices, *layout.rest)
        return out, lse.contiguous()

    def _branch_backward(self, step, seen, do, out, lse, query, key, value, *rest):
        """`step`: of `steps.backward`; `seen`: the method of the layout for its keys."""
        indices, place = rest[:-5], rest[-5:]
        layout = self._layout(query, place)
        query, do = zero_padding(torch, layout, query, do)
        (delta,) = self.steps.backward.delta_of(self.ops, do, out)
        rows = RowResiduals(lse, delta)
        key, value = seen(layout, key), seen(layout, value)
        return list(step(self.ops, query, key, value, *indices, do, rows, *layout.rest))

    def _select(self, query, key, *place):
        layout, forward = self._layout(query, place), self.steps.forward
        # Only the log-sum-exp is read: the narrowest values do.
        value = key[..., : self.steps.narrowest(key.shape[-1])].contiguous()
        _, lse = forward.compressed(self.ops, query, key, value, *layout.rest)
        rest = *layout.rest, layout.num_blocks(key)
        return forward.select_blocks(self.ops, query, key, lse, *rest)

    # All steps. An operator returns `selection`: the block indices, or nothing where the caller
    # gave them, because no output may be an input. What is kept of a compression comes next.

    def _forward(self, form, *arguments, keep=False):
        """`keep`: return the means too."""
        inputs, given, layout = self._arguments(form, arguments, gradients=False)
        inputs, means = self._compressed(form, inputs, layout)
        inputs = inputs._replace(value=layout.seen(inputs.value))
        rest = *layout.rest, layout.num_blocks(inputs.key.compressed)
        out, indices = fused.forward(self.steps, self.ops, inputs, given, *rest)
        return out, _selection(inputs.query, given, indices), *(means if keep else ())

    def _forward_with_residuals(self, form, *arguments):
        """`_forward`, and what its gradients need: the branches one by one (`_residuals`)."""
        inputs, given, layout = self._arguments(form, arguments, gradients=True)
        inputs, means = self._compressed(form, inputs, layout)
        inputs = inputs._replace(value=layout.seen(inputs.value))
        rest = *layout.rest, layout.num_blocks(inputs.key.compressed)
        out, (indices, lists, outputs, lses) = fused.forward_with_residuals(
            self.steps, self.ops, inputs, given, *rest
        )
        contiguous = (x.contiguous() for x in (*lses, *(lists or ())))
        return out, _selection(inputs.query, given, indices), *means, *outputs, *contiguous

    def _backward(self, form, do, selection, *tensors):
        """The branches are computed again."""
        means, arguments = _split(tensors, len(form.means))
        given = arguments[form.count]
        residuals = Residuals.recomputed(selection if given is None else given)
        return self._gradients(form, do, residuals, means, arguments)

    def _backward_from_residuals(self, form, do, selection, *tensors):
        means, tensors = _split(tensors, len(form.means))
        branches, tensors = _split(tensors, 6)
        lists, arguments = _split(tensors, len(self.steps.lists))
        given = arguments[form.count]
        indices = selection if given is None else given
        outputs, lses = Branches(*branches[:3]), Branches(*branches[3:])
        residuals = Residuals(indices, lists or None, outputs, lses)
        return self._gradients(form, do, residuals, means, arguments)

    def _gradients(self, form, do, residuals, means, arguments):
        inputs, _, layout = self._arguments(form, arguments, gradients=True)
        length = inputs.key.compressed.shape[1]
        if form.compresses:
            inputs = inputs.with_compressed(*means)
        inputs = inputs._replace(key=layout.seen(inputs.key), value=layout.seen(inputs.value))
        found = fused.backward(self.steps, self.ops, inputs, residuals, do, *layout.rest)
        if form.compresses:
            found = fused.gradients_of_tokens(
                self.steps, self.ops, found, length, layout.config, form.shared
            )
        gates = zip(found.gates, inputs.gates, strict=True)
        gates = Branches(*(x.to(gate.dtype, copy=True) for x, gate in gates))
        return form.gradients(found._replace(gates=gates))

    def _compressed(self, form, inputs, layout):
        """`inputs` with compressed tokens, and those that were made."""
        if not form.compresses:
            return inputs, ()
        inputs = fused.with_means(self.steps, self.ops, inputs, layout.config)
        return inputs, (inputs.key.compressed, inputs.value.compressed)

    def _arguments(self, form, arguments, gradients):
        """`Inputs`, the block indices or None, and the layout, from those of an operator."""
        given, clean, *place = arguments[form.count :]
        inputs = form.inputs(arguments)
        self.before_call(inputs, place, form, gradients=gradients)
        layout = self._layout(inputs.query, place, clean)
        if (
            self.masks
        ):  # what kernels mask are keys and queries; a gate multiplies what they found
            rows = KernelLayout(inputs.query, *place, clean=clean)
            gates = zero_padding(torch, rows, *inputs.gates)
            inputs = inputs._replace(gates=Branches(*gates))
        return inputs, given, layout

    def _shapes(self, form, *arguments, keep=False):
        """Of the results of `_forward`."""
        query, key, value, _ = form.inputs(arguments)
        given, _, *place = arguments[form.count :]
        out, _ = operators.branch_shapes(query, key.selected, value.selected)
        indices = operators.index_shapes(query, key.selected, *place) if given is None else None
        means = mean_shapes(key, value, place) if keep and form.compresses else ()
        return out, _selection(query, given, indices), *means

    def _residual_shapes(self, form, *arguments):
        query, key, value, _ = form.inputs(arguments)
        given, _, *place = arguments[form.count :]
        out, selection, *means = self._shapes(form, *arguments, keep=True)
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        n = (selection if given is None else given).shape[-1]
        block = place[3][operators.FIELDS.index("select_block")]
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
                functools.partial(method, getattr(steps, branch), seen)
                for method, steps in (
                    (self._branch, self.steps.forward),
                    (self._branch_backward, self.steps.backward),
                )
            )
            name = f"{self.prefix}{branch}_attention"
            operators.define_branch(name, tensors, forward, "Tensor out, Tensor lse", backward)
        name, shapes = f"{self.prefix}select_blocks", operators.index_shapes
        operators.define(name, operators.SCORING, "Tensor", self._select, shapes)

        for form in (GIVEN, APART, SHARED) if self.steps.compression else (GIVEN,):
            self._define_whole(form)

    def _define_whole(self, form):
        """Operators of all steps: without gradients, with those of residuals, or of branches that
        are computed again.
        """

        def of(function, **options):
            found = functools.partial(function, form, **options)
            return functools.update_wrapper(found, function)

        name, schema, floats = f"{self.prefix}{form.name}", form.schema, form.count
        kept = _tensors("selection")
        forward, shapes = Replayed(of(self._forward)), of(self._shapes)
        operators.define(name, schema, f"(Tensor out, {kept})", forward, shapes)

        kept = _tensors("selection", *form.means)
        forward = Replayed(of(self._forward, keep=True))
        shapes = of(self._shapes, keep=True)
        again = f"{name}_recomputing"
        operators.define(again, schema, f"(Tensor out, {kept})", forward, shapes)
        backward = Replayed(of(self._backward))
        operators.differentiate(again, schema, floats, kept, backward, 1)

        kept = _tensors("selection", *form.means, *self._residuals)
        forward = Replayed(of(self._forward_with_residuals))
        shapes = of(self._residual_shapes)
        saving = f"{name}_saving"
        operators.define(saving, schema, f"(Tensor out, {kept})", forward, shapes)
        backward = Replayed(of(self._backward_from_residuals))
        operators.differentiate(saving, schema, floats, kept, backward, 1)

    def _call(self, name, *arguments, pair=None):
        return operators.call(f"{self.prefix}{name}", *arguments, pair=pair)

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
        pair: Pair | None = None,
    ) -> Tensor:
        """All steps. Each branch's kernel adds to the gated sum; where residuals are kept, a
        kernel of its own adds the branches.

        Args:
          key, value: the compressed field is not read where `compressed` is given.
          compressed: `(k_cmp, v_cmp)`; None, of one sequence a row: the means.
          clean: whether keys and values that no query may look at are finite, as in a cache, so
            that they need not be copied to be kept out.
          recompute: the backward pass computes the branches again. Else it keeps their outputs.
          pair: of calls like this one, whose gradients are wanted.
        """
        place = operators.arguments(config, kv_len, cu_seqlens, scale)
        form, tokens = form_of(key, value, compressed)
        inputs = query, *tokens, *gates
        name = form.name
        if operators.requires_grad(*inputs):
            name += "_recomputing" if recompute else "_saving"
        return self._call(name, *inputs, block_indices, clean, *place, pair=pair)[0]


def _split(tensors, count):
    return tensors[:count], tensors[count:]


def _tensors(*names):
    """In the words of a schema."""
    return ", ".join(f"Tensor {name}" for name in names)


def _selection(query, given, indices):
    return indices if given is None else query.new_empty(0, dtype=torch.int32)
