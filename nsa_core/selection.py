"""Selects blocks from scores by top-n, for both frameworks (Eqs. 9 and 11)."""

import functools
from collections.abc import Callable
from typing import Any

from nsa_core.array_ops import ArrayOps
from nsa_core.config import NSAConfig

# A bound in units of the smallest normal number. A score of at least this size is exact, although
# smaller terms of the sum are lost.
LEAST_EXACT = 2.0**36


def map_to_blocks(
    ops: ArrayOps,
    probs: Any,
    num_blocks: int,
    config: NSAConfig,
    log: bool = False,
    start: Any = None,
) -> Any:
    """Compute Eq. 9, `score[j] = sum_i w(i, j) * probs[..., i]`. `w(i, j)` is the number of
    stride blocks that compressed token `i` shares with selection block `j`.

    Compressed token `i` covers the stride blocks `i .. i + l/d - 1`. Selection block `j` covers
    the stride blocks `j*r .. j*r + r - 1` with `r = l'/d`. The sum is computed first per stride
    block, and then per selection block. With `log=True`, both `probs` and the result are
    logarithms. In packed rows, `start` `[.., Q]` is the index in `probs` of the first compressed
    token of each query's sequence.
    """
    ratio = config.select_block // config.compress_stride
    size, last = num_blocks * ratio, probs.ndim - 1
    nothing, add = (-ops.xp.inf, ops.xp.logaddexp) if log else (0, ops.xp.add)
    count = probs.shape[last]
    if start is not None and count:
        slot = (start[..., None] + ops.arange(start, count)[0]).clip(None, count)
        probs = ops.take_along(ops.pad_end(probs, last, 1, nothing), slot)
    by_stride = []
    for shift in range(config.compress_block // config.compress_stride):
        before = ops.pad_end(probs[..., :0], last, shift, nothing)
        moved = ops.xp.concatenate([before, probs], -1)[..., :size]
        by_stride.append(ops.pad_end(moved, last, size - moved.shape[-1], nothing))
    found = functools.reduce(add, by_stride).reshape(*probs.shape[:-1], num_blocks, ratio)
    return ops.nn.logsumexp(found, -1) if log else found.sum(-1)


def choose(
    ops: ArrayOps,
    scores: Any,
    own: Any,
    config: NSAConfig,
    log_scores: Callable[[], Any] | None = None,
) -> Any:
    """Select `n` blocks among the blocks from 0 to `own`.

    The result is int32 `[..., n]`, ascending, with -1 in empty slots.

    The first `num_initial` and the last `num_local` of the blocks `0 .. own` are always selected.
    If scores are equal, the block with the lower index is selected. No framework guarantees the
    order of equal values in a top-k, so only the values of the top-k are used. Blocks with scores
    above the n-th largest value are selected. Blocks with exactly the n-th largest value fill the
    remaining slots, lowest indices first.

    Args:
      scores: `[..., N]`.
      own: The query's own block, broadcast to `[...]`. If `own` is negative, the query has no
        blocks to select from.
      log_scores: Function that returns the logarithms of the scores. On a CPU the logarithms
        decide the order of inexact scores, which are less than `LEAST_EXACT` times the smallest
        normal number. The logarithms are computed only if an inexact score
        would be selected and not all blocks are selected.
    """
    xp, num_blocks, n = ops.xp, scores.shape[-1], config.num_selected
    block, own = ops.arange(scores, num_blocks)[0], own[..., None]
    forced = (block < config.num_initial) | (block > own - config.num_local)
    candidate = block <= own
    ranked = xp.where(candidate, xp.where(forced, xp.inf, scores), -xp.inf)
    if num_blocks > n and log_scores is not None:
        limits, before = xp.finfo(scores.dtype), ranked
        least = LEAST_EXACT * float(limits.tiny)

        def by_logarithm():
            # Logarithms are shifted below all scores. The logarithm of 0 is still above the value
            # of blocks that must not be selected.
            log = log_scores().clip(float(limits.min), None)
            return xp.where((before < least) & candidate, log, before)

        decides = ((ranked >= least).sum(-1) < n) & (own[..., 0] >= n)
        ranked = ops.if_any(decides, by_logarithm, before)
    width = min(n, num_blocks)
    floor = ops.top(ranked, width)[..., -1:]
    above = ranked > floor
    tied = (ranked == floor) & (ranked > -xp.inf)
    room = width - above.sum(axis=-1, keepdims=True)
    chosen = above | (tied & (tied.cumsum(axis=-1) <= room))
    # The chosen blocks are distinct, so that their order does not depend on ties.
    ascending = -ops.top(xp.where(chosen, -block, -num_blocks), width)
    ascending = xp.where(ascending == num_blocks, -1, ascending)
    return ops.to_int32(ops.pad_end(ascending, ascending.ndim - 1, n - width, -1))
