"""One block of keys of a running softmax, and of its gradient; rows in registers."""

import jax.numpy as jnp

from kernels_pallas.mosaic import operands
from kernels_pallas.mosaic.operands import LOG2E, MATRIX, PER_ROW, ROWS, across

MASKED = -1e30  # logit of a key that a row must not see
EMPTY = -1e20  # no row that sees a key has a maximum below this
ABSENT = 3e38  # as a row's maximum: every probability becomes exactly 0


def nothing(width: int):
    """The state before the first block: output `[64, width]`, maximum in bits and total."""
    return (
        operands.full((ROWS, width), 0.0, MATRIX),
        operands.full((ROWS,), MASKED, PER_ROW),
        operands.full((ROWS,), 0.0, PER_ROW),
    )


def probabilities(state, logits, scale, seen=None, member=None):
    """Probabilities of a block relative to the new maximum, and the state rescaled to it; its
    output may be None, for nothing.

    `scale`: of logits to bits; `seen` `[64, keys]`: or all of them; `member` `[64]`: rows that
    have this block at all, or every row.
    """
    acc, top, total = state
    if seen is not None:
        logits = jnp.where(seen, logits, MASKED)
    new = jnp.maximum(top, logits.max(axis=1) * scale)
    base = new if seen is None else jnp.maximum(new, EMPTY)
    if member is not None:
        new = jnp.where(member, new, top)
        base = jnp.where(member, base, ABSENT)
    probs = jnp.exp2(logits * scale - across(base, logits.shape))
    decay = jnp.exp2(top - new)
    total = total * decay + probs.sum(axis=1)
    if acc is not None:
        acc *= across(decay, acc.shape)
    return probs, (acc, new, total)


def result(state):
    """What the output is to be multiplied by, and the natural log-sum-exp."""
    _, top, total = state
    seen = total > 0
    weight = jnp.where(seen, 1 / total, 0.0)
    return weight, jnp.where(seen, (top + jnp.log2(total)) / LOG2E, -jnp.inf)


def softmax_backward(logits, weights, scale, norm, gate, offset, seen=None):
    """The gradient of the logits of a block.

    `weights` `[64, keys]`: products of the output's gradient and the values; by row: `norm`,
    the log-sum-exp in bits (+inf: all probabilities are 0), `gate` or None, and `offset`, gate
    times the product of the output and its gradient.
    """
    probs = jnp.exp2(logits * scale - across(norm, logits.shape))
    if seen is not None:
        probs = jnp.where(seen, probs, 0.0)
    if gate is not None:
        weights = weights * across(gate, weights.shape)
    return probs * (weights - across(offset, weights.shape))
