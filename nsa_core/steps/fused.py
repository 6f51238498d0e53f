"""Runs all steps of NSA in one function, and computes the gradient of this function.

The functions of this module support both frameworks and both kinds of kernels.

    out = sum_c gate[c] * attention_c(query)                                       (Eq. 5)

`forward` adds each branch to the sum in the branch's own kernel, in place. For a backward pass,
`forward_with_residuals` also stores each branch separately. In `forward_with_residuals`, the kernel
of the selected branch computes the sum of all branches. A separate kernel (`gated_sum`) computes
the sum on Triton, and on Mosaic if tiles are gathered. If residuals contain only the block indices
(`Residuals(block_indices)`), `backward` runs the branches again. `backward` runs the branches one
after the other, so that the output of only one branch exists at a time.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kernels_pallas.kernel import float32
from nsa_core.array_ops import ArrayOps, derived, like, padding_zeroed
from nsa_core.config import NSAConfig
from nsa_core.steps.key_bounds import Bounds, VisibleCompressed, Window
from nsa_core.steps.params import Interval, Params, Qkv, RowResiduals
from nsa_core.types import Branches


class Steps(NamedTuple):
    """The steps of attention on one kind of kernels, Mosaic or Triton.

    Attributes:
      forward: a module with the functions of `mosaic_forward`.
      backward: a module with the functions of `mosaic_backward`.
      lists: Names under which the results of `forward.tile_block_lists` are saved for the
        backward pass. Without names, the backward pass computes the lists again.
      narrowest: Function of the width of keys that returns the minimum width of values for the
        compressed branch. If only the log-sum-exp is needed, the compressed branch gets values of
        the minimum width.
      summed: The function `mosaic_forward.selected_and_sum`, or None.
      compression: A module with the functions of `mosaic_compress`, or None if the framework
        compresses tokens before the steps.
      reads_places: Whether the kernels read the tables of packed rows (`nsa_core.varlen`), and
        compressed tokens that are stored in slots.
      reads_pages: Whether `forward.selected` supports `pages`.
      gates_together: Whether all gates are cast to float32 in one launch. If `gates_together` is
        False, each gate is cast when a kernel reads it, so that only one cast gate exists at a
        time.
    """

    forward: Any
    backward: Any
    lists: tuple[str, ...]
    narrowest: Callable[[int], int]
    summed: Callable[..., Any] | None = None
    compression: Any = None
    reads_places: bool = False
    reads_pages: bool = False
    gates_together: bool = False

    def float32_gates(self, ops: ArrayOps, gates) -> Branches:
        """Return the gates in float32. Each kernel reads the gates of one branch."""
        return Branches(*(ops.all_float32(gates) if self.gates_together else gates))


class Inputs(NamedTuple):
    """The input arrays of a call that have a gradient, or the gradients of these arrays. The
    gradients have the shapes of the arrays.

    Compressed keys and values are `[B, C, Hkv, .]`. The keys and values of other branches are
    `[B, S, Hkv, .]`. Callers replace NaN in keys and values to which no query may attend.
    """

    query: Any  # [B, T, H, D]
    key: Branches
    value: Branches
    gates: Branches  # [B, T, H]

    def with_compressed(self, key, value) -> "Inputs":
        """Return a copy of the inputs with the given compressed key and value."""
        key, value = self.key._replace(compressed=key), self.value._replace(compressed=value)
        return self._replace(key=key, value=value)


class Pages(NamedTuple):
    """The pages of each row, if the keys and values of the selected branch are stored in pages of
    select_block tokens. Keys and values in pages are `[1, P select_block, Hkv, .]`, without an
    axis for rows.
    """

    page_table: Any  # int32 [B, M], indices of pages that exist
    lengths: Any  # int32 [B], number of keys of each row, at most M * select_block
    # [B, select_block, Hkv, .]: the page with a row's last key. Keys after that key are finite.
    last_key: Any
    last_value: Any


class Residuals(NamedTuple):
    """The data that the backward pass needs in addition to the inputs.

    If a field is None, the backward pass computes the data of the field again.
    """

    block_indices: Any  # int32 [B, T, Hkv, n]
    block_lists: Any = None  # block lists of the tiles (`Steps.lists`), or None
    out: Any = None  # Branches of [B, T, H, Dv], not gated; or None
    lse: Any = None  # Branches of [B, T, H], float32; or None


def bounds_of(name: str, key, config: NSAConfig) -> Bounds:
    """Return the bounds of the keys to which queries attend in the branch `name`, which is
    `compressed` or `sliding`.
    """
    return VisibleCompressed(config) if name == "compressed" else Window(config, key.shape[1])


def attend(steps: Steps, ops: ArrayOps, name: str, qkv: Qkv, params: Params, *indices, **how):
    """Compute `(out, lse)` of a branch, `[B, T, H, Dv]` and float32 `[B, T, H]`.

    Args:
      indices: `block_indices` of the selected branch.
      how: The other arguments of the branch's step.
    """
    if name == "selected":
        return steps.forward.selected(ops, qkv, *indices, params, **how)
    if qkv.key.shape[1] == 0:
        return ops.derive(_nothing_seen, qkv.query, width=qkv.value.shape[-1])
    bounds = bounds_of(name, qkv.key, params.config)
    return steps.forward.interval(ops, qkv, bounds, params, **how)


@derived(
    lambda query, *, width: [
        like(query, *query.shape[:3], width),
        float32(*query.shape[:3]),
    ]
)
def _nothing_seen(ops, query, *, width: int):
    """Return the output (zeros) and the log-sum-exp (-inf) of queries without keys."""
    shape = (*query.shape[:3], width)
    out = ops.xp.zeros_like(ops.xp.broadcast_to(query[..., :1], shape))
    return out, ops.xp.full_like(ops.to_float32(out[..., 0]), -float("inf"))


def intervals(
    steps: Steps, ops: ArrayOps, do, branches: Sequence[Interval], params: Params
) -> tuple:
    """Run `steps.backward.intervals`, and also support branches without keys, which that
    function does not support.
    """
    zeros = lambda x: ops.zeros(x, tuple(x.shape))
    pairs = [None if x.qkv.key.shape[1] else [*map(zeros, x.qkv[1:])] for x in branches]
    some = [x for x, pair in zip(branches, pairs, strict=True) if pair is None]
    if not some:
        return zeros(branches[0].qkv.query), *pairs
    dq, *found = steps.backward.intervals(ops, do, some, params)
    of_some = iter(found)
    return dq, *(next(of_some) if pair is None else pair for pair in pairs)


def gradients_of_tokens(
    steps: Steps, ops: ArrayOps, found: Inputs, length: int, params: Params, shared: bool
) -> Inputs:
    """In `found`, a result of `backward`, replace the gradients of means by the gradients of the
    tokens that were averaged.

    Args:
      length: S.
      shared: whether all branches read the same tokens. If `shared` is true, the compressed field
        of the result is the gradient of the shared tokens, and the other fields are None.
    """
    _, key, value, _ = found
    others = [*zip(key[1:], value[1:], strict=True)] if shared else []
    means = key.compressed, value.compressed
    merged = steps.compression.gradients(ops, means, others, length, params)
    key, value = (
        Branches(x, None, None) if shared else branches._replace(compressed=x)
        for x, branches in zip(merged, (key, value), strict=True)
    )
    return found._replace(key=key, value=value)


def forward(
    steps: Steps,
    ops: ArrayOps,
    inputs: Inputs,
    block_indices,
    params: Params,
    num_blocks: int,
    pages: Pages | None = None,
):
    """Compute `(out, block_indices)`, which are `[B, T, H, Dv]` and int32 `[B, T, Hkv, n]`.

    Args:
      block_indices: The selected blocks. `block_indices=None` means that the scores of the
        compressed branch select blocks.
      num_blocks: The maximum number of blocks per sequence.
      pages: Pages of the keys and values of the selected branch, or None.
    """
    query, key, value, gates = inputs
    query, *gates = padding_zeroed(ops, params.layout, query, *gates)
    gates = steps.float32_gates(ops, gates)
    qkv = _branches(query, key, value)

    def branch(name, *indices, **how):
        gate = getattr(gates, name)
        return attend(steps, ops, name, getattr(qkv, name), params, *indices, gate=gate, **how)

    # `added` is the sum of the gated outputs of the previous branches. Each branch adds its
    # gated output to `added`.
    out, lse = branch("compressed")
    if block_indices is None:
        block_indices = steps.forward.select_blocks(
            ops, query, key.compressed, lse, params, num_blocks
        )
    # With an 8-bit compute dtype, tokens that the sliding and the selected branch share are
    # rounded once.
    rounded: dict[str, Any] = {}
    if params.config.compute_dtype is not None and key.sliding is key.selected:
        if value.sliding is value.selected:
            tokens = key.sliding, value.sliding
            rounded["rounded"] = steps.forward.round_tokens(ops, *tokens, params.layout)
    out, _ = branch("sliding", added=out, **rounded)
    options = rounded if pages is None else {"pages": pages}
    out, _ = branch("selected", block_indices, added=out, **options)
    return out, block_indices


def _branches(query, key: Branches, value: Branches) -> Branches:
    """Return the `Qkv` of each branch."""
    pairs = zip(key, value, strict=True)
    return Branches(*(Qkv(query, *pair) for pair in pairs))


def forward_with_residuals(
    steps: Steps,
    ops: ArrayOps,
    inputs: Inputs,
    block_indices,
    params: Params,
    num_blocks: int,
) -> tuple[Any, Residuals]:
    """Compute `(out, residuals)`. The arguments are the same as in the function `forward`."""
    params.config.check_differentiable()
    query, key, value, gates = inputs
    query, *gates = padding_zeroed(ops, params.layout, query, *gates)
    qkv = _branches(query, key, value)
    compressed = attend(steps, ops, "compressed", qkv.compressed, params)
    if block_indices is None:
        block_indices = steps.forward.select_blocks(
            ops, query, key.compressed, compressed[1], params, num_blocks
        )
    chosen = qkv.selected, block_indices, params
    block_lists = steps.forward.tile_block_lists(ops, *chosen)
    sliding = attend(steps, ops, "sliding", qkv.sliding, params)
    others, gates = (compressed[0], sliding[0]), Branches(*ops.all_float32(gates))
    given = *chosen, block_lists, others, gates
    together = steps.summed(ops, *given) if steps.summed else None
    if together:
        selected, out = together
    else:
        selected = steps.forward.selected(ops, *chosen, block_lists=block_lists)
        out = steps.forward.gated_sum(ops, (others[0], selected[0], others[1]), gates)
    pairs = zip(compressed, selected, sliding, strict=True)
    outputs, lse = (Branches(*each) for each in pairs)
    kept = tuple(block_lists) if steps.lists else None
    return out, Residuals(block_indices, kept, outputs, lse)


def backward(
    steps: Steps,
    ops: ArrayOps,
    inputs: Inputs,
    residuals: Residuals,
    do,
    params: Params,
    by_places: bool = False,
) -> Inputs:
    """Return the gradients of the inputs, given the gradient `do` `[B, T, H, Dv]` of the output.

    The gradients of gates are float32.

    For each branch c, dO_c = g_c dO and delta_c = rowsum(dO * O_c) = dg_c. The kernels read dO, g_c
    and delta_c. The branches add their parts of dq to one array in place, in a fixed order.

    Args:
      by_places: Whether the gradients of the selected branch's tokens may be returned in slots, if
        kernels read slots of packed rows. If all branches share tokens, `gradients_of_tokens` reads
        the slots.
    """
    query, key, value, gates = inputs
    query, do, *gates = padding_zeroed(ops, params.layout, query, do, *gates)
    gates = steps.float32_gates(ops, gates)
    block_indices, block_lists, outputs, lses = residuals
    qkv = _branches(query, key, value)
    if block_lists is None:
        block_lists = steps.forward.tile_block_lists(ops, qkv.selected, block_indices, params)
    deltas = None
    if outputs is not None:
        deltas = Branches(*steps.backward.delta_of(ops, do, *outputs))
        ops.release(outputs)

    def rows_of(name, *indices, **how):
        """Return the row statistics of the branch `name`. If the branch must run again to
        compute its row statistics, the output of the branch is dropped afterwards.
        """
        gate = getattr(gates, name)
        if lses is not None:
            return RowResiduals(getattr(lses, name), getattr(deltas, name), gate)
        out, lse = attend(steps, ops, name, getattr(qkv, name), params, *indices, **how)
        (delta,) = steps.backward.delta_of(ops, do, out)
        return RowResiduals(lse, delta, gate)

    branches = []
    for name in ("compressed", "sliding"):
        own = getattr(qkv, name)
        branches.append(Interval(own, rows_of(name), bounds_of(name, own.key, params.config)))
    dq, compressed_pair, sliding_pair = intervals(steps, ops, do, branches, params)
    options: dict[str, Any] = {"block_lists": block_lists}
    selected_rows = rows_of("selected", block_indices, **options)
    if by_places:
        options["by_places"] = True
    dq, *selected_pair = steps.backward.selected(
        ops, qkv.selected, block_indices, do, selected_rows, params, dq, **options
    )
    pairs = zip(compressed_pair, selected_pair, sliding_pair, strict=True)
    dk, dv = (Branches(*each) for each in pairs)
    rows = branches[0].rows, selected_rows, branches[1].rows
    return Inputs(dq, dk, dv, Branches(*(x.delta for x in rows)))


def in_slots(layout, *arrays):
    """Move compressed tokens, which are stored without gaps, to the slots of packed rows that
    kernels read. If sequences have no slots, return the tokens unchanged.
    """
    return [x if layout.varlen is None else layout.varlen.in_slots(x) for x in arrays]


def of_slots(layout, count, *arrays):
    """Move the gradients of `count` compressed tokens from slots back to arrays without gaps.
    `of_slots` is the inverse of `in_slots`.
    """
    return [x if layout.varlen is None else layout.varlen.of_slots(x, count) for x in arrays]


def one_branch(steps, ops, name, qkv, block_indices, params, visible=lambda x: x):
    """Compute `(out, lse)` of one branch.

    Args:
      block_indices: A tuple with the array of block indices for the selected branch. For other
        branches the tuple is empty.
      visible: A function that returns keys or values with zeros for tokens to which no query
        attends.
    """
    query, key, value = qkv
    if name == "compressed":
        key, value = in_slots(params.layout, key, value)
    if block_indices:
        (query,) = padding_zeroed(ops, params.layout, query)
    return attend(steps, ops, name, Qkv(query, key, visible(value)), params, *block_indices)


def one_branch_backward(
    steps, ops, name, qkv, block_indices, params, output, cotangents, visible=lambda x: x
):
    """Compute the gradients of query, key and value from the gradients of `output`, `(out, lse)`.
    The gradient of the log-sum-exp may be None.
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
    qkv = Qkv(query, *map(visible, pair))
    if name == "selected":
        return steps.backward.selected(ops, qkv, *block_indices, do, rows, params)
    bounds = bounds_of(name, qkv.key, params.config)
    dq, pair = intervals(steps, ops, do, [Interval(qkv, rows, bounds)], params)
    return [dq, *(of_slots(layout, count, *pair) if name == "compressed" else pair)]


def select_blocks(steps, ops, query, key, params, num_blocks):
    """Select the blocks that each query reads. A separate pass computes the log-sum-exp of the
    compressed branch first.
    """
    (key,) = in_slots(params.layout, key)
    # Only the log-sum-exp of the branch is read. Values of the minimum width are therefore
    # sufficient.
    (value,) = ops.derive(_narrow, key, width=steps.narrowest(key.shape[-1]))
    _, lse = attend(steps, ops, "compressed", Qkv(query, key, value), params)
    return steps.forward.select_blocks(ops, query, key, lse, params, num_blocks)


@derived(lambda dlse, lse: [like(dlse)])
def _of_rows_with_keys(ops, dlse, lse):
    """Set the gradient of the log-sum-exp to zero for queries without keys."""
    return [ops.xp.where(lse == -float("inf"), 0.0, dlse)]


@derived(lambda x, *, width: [like(x, *x.shape[:-1], width)])
def _narrow(ops, x, *, width):
    return [x[..., :width]]
