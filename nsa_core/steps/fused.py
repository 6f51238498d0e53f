"""All steps of NSA on kernels in one function, and its gradient: any framework, any kernels.

    out = sum_c gate[c] * attention_c(query)                                       (Eq. 5)

`forward` adds each branch to the sum in the branch's own kernel, in place. For a backward pass,
`forward_with_residuals` stores each branch separately and adds them in a separate kernel.
`recomputed` residuals contain only the selection. `backward` then runs each branch again in turn,
so that only one branch's output exists at a time.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from nsa_core.array_ops import ArrayOps, padding_zeroed
from nsa_core.steps.gradients import RowResiduals
from nsa_core.steps.params import Params, Qkv
from nsa_core.types import Branches


class Steps(NamedTuple):
    """The steps on one kind of kernels.

    Attributes:
      forward: a module with the functions of `mosaic_forward`.
      backward: a module with the functions of `mosaic_backward`.
      lists: Names under which the results of `forward.tile_block_lists` are saved for the backward
        pass. Without names it makes the lists again.
      narrowest: Function of the width of keys. It returns the fewest columns of values with which
        `forward.compressed` runs if only its log-sum-exp is needed.
      compression: A module with the functions of `mosaic_compress`, or None if compressed tokens
        are made elsewhere.
      reads_places: whether the kernels read packed rows by the places of `nsa_core.varlen`.
      reads_pages: Whether `forward.selected` supports `pages`.
      gates_together: Whether all gates are cast to float32 in one launch. Otherwise each is cast
        when a kernel reads it, which needs the memory of one.
    """

    forward: Any
    backward: Any
    lists: tuple[str, ...]
    narrowest: Callable[[int], int]
    compression: Any = None
    reads_places: bool = False
    reads_pages: bool = False
    gates_together: bool = False

    def float32_gates(self, ops: ArrayOps, gates) -> Branches:
        """The gates in float32 for a pass whose kernels read one each."""
        return Branches(*(ops.all_float32(gates) if self.gates_together else gates))


class Inputs(NamedTuple):
    """Arrays that have a gradient; also the gradients themselves, of the same shapes.

    Compressed keys and values are `[B, C, Hkv, .]`, the others `[B, S, Hkv, .]`. No key or
    value that a query may not see is NaN.
    """

    query: Any  # [B, T, H, D]
    key: Branches
    value: Branches
    gates: Branches  # [B, T, H]

    def with_compressed(self, key, value) -> "Inputs":
        """The same with this compressed key and value."""
        key, value = self.key._replace(compressed=key), self.value._replace(compressed=value)
        return self._replace(key=key, value=value)


class Pages(NamedTuple):
    """The positions of selected keys and values that are stored in pages of select_block tokens,
    `[1, P select_block, Hkv, .]`, instead of rows.
    """

    page_table: Any  # int32 [B, M], of pages that exist
    lengths: Any  # int32 [B], keys of each row, at most M select_block
    # [B, select_block, Hkv, .]: the page of a row's last key; keys behind that are finite.
    last_key: Any
    last_value: Any


class Residuals(NamedTuple):
    """The data that the backward pass needs in addition to the inputs. None is computed again."""

    block_indices: Any  # int32 [B, T, Hkv, n]
    block_lists: Any  # of the tiles (`Steps.lists`); or None
    out: Any  # Branches of [B, T, H, Dv], not gated; or None
    lse: Any  # Branches of [B, T, H], float32; or None

    @classmethod
    def recomputed(cls, block_indices) -> "Residuals":
        """The residuals of `forward`, which are only the selection."""
        return cls(block_indices, None, None, None)


def with_means(steps: Steps, ops: ArrayOps, inputs: Inputs, params: Params) -> Inputs:
    """`inputs` whose compressed keys and values are tokens, `[B, S, Hkv, .]`, with the means of
    their windows in place of these. Needs `steps.compression`.
    """
    _, key, value, _ = inputs
    means = steps.compression.means(ops, key.compressed, value.compressed, params)
    return inputs.with_compressed(*means)


def gradients_of_tokens(
    steps: Steps, ops: ArrayOps, found: Inputs, length: int, params: Params, shared: bool
) -> Inputs:
    """The gradients `found` by `backward`, with those of tokens in place of their means'.

    Args:
      length: S.
      shared: all branches look at the same tokens, whose gradient then is the compressed field;
        the other fields are None.
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
    """`(out, block_indices)`: `[B, T, H, Dv]` and int32 `[B, T, Hkv, n]`.

    Args:
      block_indices: None means selected from the compressed scores.
      num_blocks: The maximum of blocks per sequence.
      pages: Pages of the selected keys and values.
    """
    query, key, value, gates = inputs
    query, *gates = padding_zeroed(ops, params.layout, query, *gates)
    gates = steps.float32_gates(ops, gates)
    compressed, selected, sliding = _branches(query, key, value)
    out, lse = steps.forward.compressed(ops, compressed, params, gates.compressed)
    if block_indices is None:
        block_indices = steps.forward.select_blocks(
            ops, query, key.compressed, lse, params, num_blocks
        )
    # In 8 bits tokens that both branches look at are rounded once.
    rounded: dict[str, Any] = {}
    if params.config.compute_dtype is not None and key.sliding is key.selected:
        if value.sliding is value.selected:
            tokens = key.sliding, value.sliding
            rounded["rounded"] = steps.forward.round_tokens(ops, *tokens, params.layout)
    out, _ = steps.forward.sliding(ops, sliding, params, gates.sliding, added=out, **rounded)
    options = rounded if pages is None else {"pages": pages}
    out, _ = steps.forward.selected(
        ops, selected, block_indices, params, gates.selected, added=out, **options
    )
    return out, block_indices


def _branches(query, key: Branches, value: Branches) -> Branches:
    """The `Qkv` of each branch."""
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
    """`(out, residuals)`; arguments as in `forward`."""
    params.config.check_differentiable()
    query, key, value, gates = inputs
    query, *gates = padding_zeroed(ops, params.layout, query, *gates)
    qkv = _branches(query, key, value)
    compressed = steps.forward.compressed(ops, qkv.compressed, params)
    if block_indices is None:
        block_indices = steps.forward.select_blocks(
            ops, query, key.compressed, compressed[1], params, num_blocks
        )
    chosen = qkv.selected, block_indices, params
    block_lists = steps.forward.tile_block_lists(ops, *chosen)
    sliding = steps.forward.sliding(ops, qkv.sliding, params)
    others, gates = (compressed[0], sliding[0]), Branches(*ops.all_float32(gates))
    selected, out = steps.forward.selected_and_sum(ops, *chosen, block_lists, others, gates)
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
    shared: bool = False,
) -> Inputs:
    """Gradients of the inputs from that of the output, `do` `[B, T, H, Dv]`; gates in float32.

    dO_c = g_c dO and delta_c = rowsum(dO * O_c) = dg_c: the kernels read dO, g_c and delta_c.
    dq is one array, to which the branches add in place, in a fixed order.

    Args:
      shared: Whether `gradients_of_tokens` is next, for branches that read the same tokens.
    """
    query, key, value, gates = inputs
    query, do, *gates = padding_zeroed(ops, params.layout, query, do, *gates)
    gates = steps.float32_gates(ops, gates)
    block_indices, block_lists, outputs, lses = residuals
    compressed, selected, sliding = _branches(query, key, value)
    if block_lists is None:
        block_lists = steps.forward.tile_block_lists(ops, selected, block_indices, params)
    deltas = None
    if outputs is not None:
        deltas = Branches(*steps.backward.delta_of(ops, do, *outputs))
        ops.release(outputs)

    def rows_of(branch, again):
        """The statistics of a branch. `again()` returns its `(out, lse)`; the output is dropped."""
        gate = getattr(gates, branch)
        if lses is not None:
            return RowResiduals(getattr(lses, branch), getattr(deltas, branch), gate)
        out, lse = again()
        (delta,) = steps.backward.delta_of(ops, do, out)
        return RowResiduals(lse, delta, gate)

    compressed_rows = rows_of(
        "compressed", lambda: steps.forward.compressed(ops, compressed, params)
    )
    sliding_rows = rows_of("sliding", lambda: steps.forward.sliding(ops, sliding, params))
    qkvs, rows = (compressed, sliding), (compressed_rows, sliding_rows)
    dq, compressed_pair, sliding_pair = steps.backward.compressed_and_sliding(
        ops, qkvs, do, rows, params
    )
    options: dict[str, Any] = {"block_lists": block_lists}
    selected_rows = rows_of(
        "selected",
        lambda: steps.forward.selected(ops, selected, block_indices, params, **options),
    )
    placed = {"placed": True} if shared else {}
    dq, *selected_pair = steps.backward.selected(
        ops, selected, block_indices, do, selected_rows, params, dq, **options, **placed
    )
    pairs = zip(compressed_pair, selected_pair, sliding_pair, strict=True)
    dk, dv = (Branches(*each) for each in pairs)
    rows = compressed_rows, selected_rows, sliding_rows
    return Inputs(dq, dk, dv, Branches(*(x.delta for x in rows)))
