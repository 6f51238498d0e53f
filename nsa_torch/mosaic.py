"""The steps on Mosaic kernels on torch tensors (implementation `mosaic`): Hopper GPUs.

Every function is one operator (`operators.py`) on the current stream: the host never waits for
the device, and after one call of the same shape, which compiles the kernels, a CUDA graph can
capture it. Arguments are those of `functional.py`, with `kv_len` never None. The steps
themselves are `nsa_jax.mosaic_forward`, `mosaic_backward` and `mosaic_attention`.

Where a gradient will be wanted, each branch's own output and log-sum-exp are kept for the
backward pass, and the selection. It cannot be differentiated once more.
"""

import functools

import torch
from torch import Tensor

from kernels_pallas.specs.selected import SelectedAttention
from kernels_pallas.specs.tile import slab_width
from nsa_jax import mosaic_attention, mosaic_backward, mosaic_forward
from nsa_jax.array_ops import zero_padding
from nsa_jax.config import NSAConfig
from nsa_jax.mosaic_attention import Inputs, Residuals
from nsa_jax.mosaic_forward import sizes_of
from nsa_jax.types import Branches
from nsa_torch import operators, warm_up
from nsa_torch.mosaic_layout import MosaicLayout
from nsa_torch.replay import Replayed
from nsa_torch.torch_ops import TORCH_OPS as OPS

# One branch, or the selection alone.


def _compressed(query, key, value, *place):
    layout = MosaicLayout(query, *place)
    value = layout.seen_compressed(value)
    out, lse = mosaic_forward.compressed(OPS, query, key, value, *layout.rest)
    return out, lse.contiguous()


def _selected(query, key, value, block_indices, *place):
    layout = MosaicLayout(query, *place)
    query, value = zero_padding(OPS, query, layout), layout.seen_tokens(value)
    out, lse = mosaic_forward.selected(OPS, query, key, value, block_indices, *layout.rest)
    return out, lse.contiguous()


def _sliding(query, key, value, *place):
    layout = MosaicLayout(query, *place)
    value = layout.seen_tokens(value)
    out, lse = mosaic_forward.sliding(OPS, query, key, value, *layout.rest)
    return out, lse.contiguous()


def _branch_backward(step, seen, do, out, lse, query, key, value, *rest):
    """`step`: of `mosaic_backward`; `seen`: the method of the layout for its keys."""
    indices, place = rest[:-5], rest[-5:]
    layout = MosaicLayout(query, *place)
    query, do = zero_padding(OPS, query, layout), zero_padding(OPS, do, layout)
    (delta,) = mosaic_backward.delta_of(OPS, do, out)
    rows = mosaic_backward.RowResiduals(lse, delta)
    key, value = seen(layout, key), seen(layout, value)
    return list(step(OPS, query, key, value, *indices, do, rows, *layout.rest))


def _select(query, key, *place):
    layout = MosaicLayout(query, *place)
    # Only the log-sum-exp is read: the narrowest values do.
    value = key[..., : slab_width(key.shape[-1])].contiguous()
    _, lse = mosaic_forward.compressed(OPS, query, key, value, *layout.rest)
    num_blocks = layout.num_blocks(key)
    return mosaic_forward.select_blocks(OPS, query, key, lse, *layout.rest, num_blocks)


def _select_shapes(query, key, kv_len, lengths, cu_seqlens, config, scale):
    shape = *query.shape[:2], key.shape[2], config[operators.FIELDS.index("num_selected")]
    return query.new_empty(shape, dtype=torch.int32)


# All steps. An operator returns `selection`: the block indices, or nothing where the caller
# gave them, because no output may be an input.


def _forward(*arguments):
    inputs, given, layout = _arguments(*arguments)
    warm_up.before_call(inputs, arguments[NUM_INPUTS + 2 :], gradients=False)
    inputs = inputs._replace(value=layout.seen(inputs.value))
    num_blocks = layout.num_blocks(inputs.key.compressed)
    out, indices = mosaic_attention.forward(OPS, inputs, given, *layout.rest, num_blocks)
    return out, _selection(inputs.query, given, indices)


def _forward_with_residuals(*arguments):
    """`_forward`, and what its gradients need: the branches one by one (`RESIDUALS`)."""
    inputs, given, layout = _arguments(*arguments)
    warm_up.before_call(inputs, arguments[NUM_INPUTS + 2 :], gradients=True)
    inputs = inputs._replace(value=layout.seen(inputs.value))
    num_blocks = layout.num_blocks(inputs.key.compressed)
    out, (indices, lists, outputs, lses) = mosaic_attention.forward_with_residuals(
        OPS, inputs, given, *layout.rest, num_blocks
    )
    contiguous = (x.contiguous() for x in (*lses, *lists))
    return out, _selection(inputs.query, given, indices), *outputs, *contiguous


def _backward(do, selection, *arguments):
    """The branches are computed again."""
    warm_up.before_call(_inputs(arguments), arguments[NUM_INPUTS + 2 :], gradients=True)
    given = arguments[NUM_INPUTS]
    residuals = Residuals.recomputed(selection if given is None else given)
    return _gradients(do, residuals, arguments)


def _backward_from_residuals(do, selection, *tensors):
    branches, lists, arguments = tensors[:6], tensors[6:9], tensors[9:]
    given = arguments[NUM_INPUTS]
    indices = selection if given is None else given
    outputs, lses = Branches(*branches[:3]), Branches(*branches[3:])
    return _gradients(do, Residuals(indices, lists, outputs, lses), arguments)


def _gradients(do, residuals, arguments):
    inputs, _, layout = _arguments(*arguments)
    inputs = inputs._replace(key=layout.seen(inputs.key), value=layout.seen(inputs.value))
    found = mosaic_attention.backward(OPS, inputs, residuals, do, *layout.rest)
    gates = zip(found.gates, inputs.gates, strict=True)
    gates = (x.to(gate.dtype, copy=True) for x, gate in gates)
    return [found.query, *found.key, *found.value, *gates]


def _arguments(*arguments):
    """`Inputs`, the block indices or None, and the layout, from those of `nsa::attention`."""
    clean, *place = arguments[NUM_INPUTS + 1 :]
    inputs = _inputs(arguments)
    layout = MosaicLayout(inputs.query, *place, clean=clean)
    return inputs, arguments[NUM_INPUTS], layout


def _inputs(arguments):
    query, *branches = arguments[:NUM_INPUTS]
    return Inputs(query, *(Branches(*branches[i : i + 3]) for i in (0, 3, 6)))


def _selection(query, given, indices):
    return indices if given is None else query.new_empty(0, dtype=torch.int32)


def _forward_shapes(*arguments):
    query, key, value, _ = _inputs(arguments)
    given, _, *place = arguments[NUM_INPUTS:]
    out, _ = operators.branch_shapes(query, key.selected, value.selected)
    indices = _select_shapes(query, key.selected, *place) if given is None else None
    return out, _selection(query, given, indices)


def _residual_shapes(*arguments):
    query, key, value, _ = _inputs(arguments)
    given, _, *place = arguments[NUM_INPUTS:]
    out, selection = _forward_shapes(*arguments)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    n = (selection if given is None else given).shape[-1]
    block = place[3][operators.FIELDS.index("select_block")]
    spec = SelectedAttention(
        **sizes_of(query, key.selected, value.selected, None), n=n, block=block
    )
    by_tile = spec.B, spec.Hkv, spec.tiles
    lists = (
        query.new_empty(*by_tile, *shape, dtype=torch.int32)
        for shape in ((spec.entries,), (spec.words, spec.entries), (2,))
    )
    return out, selection, *(x.new_empty(x.shape) for x in [out] * 3 + [lse] * 3), *lists


NUM_INPUTS = 10  # tensors of `Inputs`
INPUTS = (
    "Tensor query, Tensor compressed_key, Tensor selected_key, Tensor sliding_key, "
    "Tensor compressed_value, Tensor selected_value, Tensor sliding_value, "
    "Tensor compressed_gate, Tensor selected_gate, Tensor sliding_gate, "
    "Tensor? block_indices, bool clean"
)
RESIDUALS = (
    "Tensor selection, Tensor compressed_out, Tensor selected_out, Tensor sliding_out, "
    "Tensor compressed_lse, Tensor selected_lse, Tensor sliding_lse, "
    "Tensor starts, Tensor members, Tensor counts"
)
BRANCHES = (
    ("compressed", operators.THREE, _compressed, MosaicLayout.seen_compressed),
    ("selected", operators.CHOSEN, _selected, MosaicLayout.seen_tokens),
    ("sliding", operators.THREE, _sliding, MosaicLayout.seen_tokens),
)


def _define_operators():
    for branch, tensors, forward, seen in BRANCHES:
        step = getattr(mosaic_backward, branch)
        backward = functools.partial(_branch_backward, step, seen)
        kept = "Tensor out, Tensor lse"
        operators.define_branch(f"{branch}_attention", tensors, forward, kept, backward)
    pair = "Tensor query, Tensor compressed_key"
    operators.define("select_blocks", pair, "Tensor", _select, _select_shapes)

    selection = "Tensor selection"
    results = f"(Tensor out, {selection})"
    forward, saving = Replayed(_forward), Replayed(_forward_with_residuals)
    operators.define("attention", INPUTS, results, forward, _forward_shapes)
    name = "attention_recomputing"
    operators.define(name, INPUTS, results, forward, _forward_shapes)
    operators.differentiate(name, INPUTS, NUM_INPUTS, selection, Replayed(_backward))
    name, results = "attention_saving", f"(Tensor out, {RESIDUALS})"
    operators.define(name, INPUTS, results, saving, _residual_shapes)
    backward = Replayed(_backward_from_residuals)
    operators.differentiate(name, INPUTS, NUM_INPUTS, RESIDUALS, backward)


_define_operators()


# The functions that `dispatch.py` names.


def compressed_attention(
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
    operator = torch.ops.nsa.compressed_attention
    out, lse = operator(query, compressed_key, compressed_value, *place)
    return out, lse.detach()


def select_blocks(query, compressed_key, *, config, kv_len, cu_seqlens=None, scale=None):
    """`functional.select_blocks`; the normalisation is a pass of its own here."""
    place = operators.arguments(config, kv_len, cu_seqlens, scale)
    return torch.ops.nsa.select_blocks(query.detach(), compressed_key.detach(), *place)


def selected_attention(
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
    operator = torch.ops.nsa.selected_attention
    out, lse = operator(query, key, value, block_indices, *place)
    return out, lse.detach()


def sliding_attention(
    query, key, value, *, config, kv_len, cu_seqlens=None, scale=None, with_lse=True
):
    """`functional.sliding_attention`."""
    place = operators.arguments(config, kv_len, cu_seqlens, scale)
    out, lse = torch.ops.nsa.sliding_attention(query, key, value, *place)
    return out, lse.detach()


def attention(
    query: Tensor,
    key: Branches,
    value: Branches,
    gates: Branches[Tensor],
    compressed: tuple[Tensor, Tensor],
    block_indices: Tensor | None,
    *,
    config: NSAConfig,
    kv_len: int | Tensor,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    clean: bool = False,
    recompute: bool = False,
) -> Tensor:
    """All steps. Each branch's kernel adds to the gated sum; where residuals are kept, a kernel
    of its own adds the branches.

    Args:
      key, value: the compressed field is not read.
      compressed: `(k_cmp, v_cmp)`.
      clean: whether keys and values that no query may look at are finite, as in a cache, so
        that they need not be copied to be kept out.
      recompute: the backward pass computes the branches again. Else it keeps their outputs.
    """
    place = operators.arguments(config, kv_len, cu_seqlens, scale)
    key, value = (Branches(c, *x[1:]) for c, x in zip(compressed, (key, value), strict=True))
    inputs = query, *key, *value, *gates
    name = "attention"
    if operators.requires_grad(*inputs):
        name = "attention_recomputing" if recompute else "attention_saving"
    operator = getattr(torch.ops.nsa, name)
    return operator(*inputs, block_indices, clean, *place)[0]
