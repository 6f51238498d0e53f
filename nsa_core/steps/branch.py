"""One branch on kernels, its gradient, and the selection. `fused.py` has all branches."""

from nsa_core.array_ops import derived, like, padding_zeroed
from nsa_core.steps.gradients import RowResiduals
from nsa_core.steps.params import Qkv


def in_slots(layout, *arrays):
    """Compressed tokens without gaps, moved to the slots that kernels read."""
    return [x if layout.varlen is None else layout.varlen.in_slots(x) for x in arrays]


def of_slots(layout, count, *arrays):
    """Gradients of the `count` compressed tokens that `in_slots` was given."""
    return [x if layout.varlen is None else layout.varlen.of_slots(x, count) for x in arrays]


def forward(steps, ops, name, qkv, block_indices, params, visible=lambda x: x):
    """`(out, lse)` of a branch, `[B, T, H, Dv]` and `[B, T, H]`.

    Args:
      steps, ops: A `fused.Steps`, and the `ArrayOps` that it runs on.
      name: The name of the branch.
      block_indices: One array for the selected branch, none for the others.
      visible: A function that zeroes keys or values that no query sees.
    """
    query, key, value = qkv
    if name == "compressed":
        key, value = in_slots(params.layout, key, value)
    if block_indices:
        (query,) = padding_zeroed(ops, params.layout, query)
    step = getattr(steps.forward, name)
    return step(ops, Qkv(query, key, visible(value)), *block_indices, params)


def backward(
    steps, ops, name, qkv, block_indices, output, cotangents, params, visible=lambda x: x
):
    """Gradients of query, key and value, from those of `output`, of which that of the log-sum-exp
    may be None.
    """
    (query, *pair), (out, lse), (do, dlse) = qkv, output, cotangents
    layout, count = params.layout, pair[0].shape[1]
    query, do = padding_zeroed(ops, layout, query, do)
    (delta,) = steps.backward.delta_of(ops, do, out)
    if dlse is not None:
        (dlse,) = ops.derive(_of_rows_with_keys, dlse, lse)
    rows = RowResiduals(lse, delta, dlse=dlse)
    if name == "compressed":
        pair = in_slots(layout, *pair)
    step, (key, value) = getattr(steps.backward, name), map(visible, pair)
    dq, *pair = step(ops, Qkv(query, key, value), *block_indices, do, rows, params)
    return [dq, *(of_slots(layout, count, *pair) if name == "compressed" else pair)]


def select_blocks(steps, ops, query, key, params, num_blocks):
    """The blocks that each query reads; the normalisation is a pass of its own here."""
    (key,) = in_slots(params.layout, key)
    # Only the log-sum-exp is read: the narrowest values do.
    (value,) = ops.derive(_narrow, key, width=steps.narrowest(key.shape[-1]))
    _, lse = steps.forward.compressed(ops, Qkv(query, key, value), params)
    return steps.forward.select_blocks(ops, query, key, lse, params, num_blocks)


@derived(lambda dlse, lse: [like(dlse)])
def _of_rows_with_keys(ops, dlse, lse):
    """What sees nothing has no log-sum-exp that could change."""
    return [ops.xp.where(lse == -float("inf"), 0.0, dlse)]


@derived(lambda x, *, width: [like(x, *x.shape[:-1], width)])
def _narrow(ops, x, *, width):
    return [x[..., :width]]
