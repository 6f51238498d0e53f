"""Computes one step of the online softmax, for one block of keys, and the gradient of the
softmax. The rows of a tile are in registers.

With S = Q K^T [64, keys] in float32 and c = scale * log2(e):

    forward   m'  = max(m, max_j c S)                     row_max, in log2
              P   = 2^(c S - m')
              l'  = l 2^(m - m') + sum_j P                row_sum
              O'  = O 2^(m - m') + P V                    acc
    result    O / l,  lse = (m + log2 l) ln 2

    backward  |g| P = 2^(c S - shift)                     shift = lse log2(e) - log2|g|
              dP  = dO V^T
              dS  = +-|g| P * (dP - delta)                delta = rowsum(dO * O) - dlse
              dQ  = scale * dS K                          the sign of the gate g at the end

Callers compute the products of matrices. This module has only the elementwise operations.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from kernels_pallas.mosaic import operands
from kernels_pallas.mosaic.operands import LOG2E, PER_ROW, ROWS, across

MASKED = -1e30  # score of a key that a row must not see
EMPTY = -1e20  # the maximum of a row that sees a key is never below this
ABSENT = 3e38  # as the maximum of a row, it makes every probability exactly 0


class SoftmaxState(NamedTuple):
    """The state of the online softmax after some blocks. `acc` may be None."""

    acc: Any  # [64, width]
    row_max: Any  # [64], in log2
    row_sum: Any  # [64]


class SoftmaxStats(NamedTuple):
    """Statistics of rows for the backward pass, `[64]` (`specs/bwd_preprocess.py`)."""

    shift: Any  # +inf makes all probabilities of the row 0
    delta: Any
    sign: Any  # sign of the gate, 1 or -1


def initial_state(width: int) -> SoftmaxState:
    """Return the state before the first block."""
    return SoftmaxState(
        operands.zeros(width),
        operands.full((ROWS,), MASKED, PER_ROW),
        operands.full((ROWS,), 0.0, PER_ROW),
    )


def block_softmax(row_max, scores, c, visible=None, row_mask=None, offset: float = 0.0):
    """Return P `[64, keys]` of a block, and the new maximum of each row.

    P is relative to the new maximum.

    Args:
      row_max: Maximum over the previous blocks, `[64]`.
      scores: S, `[64, keys]`.
      c: scale * log2(e), a number or one per row.
      visible: Keys that each row sees, `[64, keys]`; None means all.
      row_mask: Mask of the rows that attend to the block, `[64]`. None means all.
      offset: P is multiplied by 2^offset.
    """
    if visible is not None:
        scores = jnp.where(visible, scores, MASKED)
    new_max = jnp.maximum(row_max, scores.max(axis=1) * c)
    base = new_max if visible is None else jnp.maximum(new_max, EMPTY)
    if row_mask is not None:
        new_max = jnp.where(row_mask, new_max, row_max)
        base = jnp.where(row_mask, base, ABSENT)
    if offset:
        base -= offset
    of_rows = c if isinstance(c, float) else across(c, scores.shape)
    return jnp.exp2(scores * of_rows - across(base, scores.shape)), new_max


def rescaled(state: SoftmaxState, new_max, p) -> SoftmaxState:
    """Rescale `state` to a new maximum of each row.

    The returned sum includes `p` of the new block. The returned `acc` does not include the new
    block yet.
    """
    acc, row_max, row_sum = state
    decay = jnp.exp2(row_max - new_max)  # [64]
    row_sum = row_sum * decay + p.sum(axis=1)
    if acc is not None:
        acc *= across(decay, acc.shape)
    return SoftmaxState(acc, new_max, row_sum)


def normalizer(state: SoftmaxState, offset: float = 0.0):
    """Return 1 / l and the natural log-sum-exp, `[64]` each. For rows without keys the results
    are 0 and -inf. `offset` is as in `block_softmax`.
    """
    _, row_max, row_sum = state
    seen = row_sum > 0
    inverse = jnp.where(seen, 1 / row_sum, 0.0)
    return inverse, jnp.where(seen, (row_max + jnp.log2(row_sum) - offset) / LOG2E, -jnp.inf)


def probabilities(scores, c: float, shift, visible=None):
    """Return |g| P = 2^(c S - shift) for scores S. All arrays have the same shape. The result
    is 0 for keys that are not visible.
    """
    p = jnp.exp2(scores * c - shift)
    return p if visible is None else jnp.where(visible, p, 0.0)


def softmax_backward(scores, dp, c: float, stats: SoftmaxStats, visible=None):
    """Return |g| P * (dP - delta) `[64, keys]` of a block, which is dS without the sign of the
    gate.

    Args:
      scores: S, `[64, keys]`.
      dp: dO V^T, `[64, keys]`.
      c: scale * log2(e).
      stats: Statistics of the rows.
      visible: Keys that each row sees, `[64, keys]`; None means all.
    """
    shift, delta = (across(x, scores.shape) for x in (stats.shift, stats.delta))
    p = probabilities(scores, c, shift, visible)
    return p * dp - p * delta  # FMUL and FFMA are 1 to 3 % faster on an H200 than FADD and FMUL
