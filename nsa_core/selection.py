"""The blocks that a query reads, of scores: top-n, for either framework (Eq. 11)."""

from collections.abc import Callable
from typing import Any

from nsa_core.array_ops import ArrayOps
from nsa_core.config import NSAConfig


def choose(
    ops: ArrayOps,
    top: Callable[[Any, int], Any],
    scores: Any,
    own: Any,
    config: NSAConfig,
    ranked_again: Callable[[Any, Any], Any],
) -> Any:
    """The `n` blocks among `0 .. own`, int32 `[..., n]`, ascending, -1 padding.

    The first `num_initial` and the last `num_local` candidates are always among them; equal
    scores go to the lower index. No framework promises the order of ties in a top-k. Therefore only
    its values are used: blocks above the n-th largest value are selected, and the ties with the
    lowest indices fill the rest.

    Args:
      top: Function that returns the largest values of the last axis in descending order.
      scores: `[..., N]`.
      own: The query's own block, broadcast to `[...]`. A negative one has no candidates.
      ranked_again: Function of the compared values and the candidates that returns other values to
        compare. It is called if not all blocks can be selected.
    """
    xp, num_blocks, n = ops.xp, scores.shape[-1], config.num_selected
    block, own = ops.arange(scores, num_blocks)[0], own[..., None]
    forced = (block < config.num_initial) | (block > own - config.num_local)
    candidate = block <= own
    ranked = xp.where(candidate, xp.where(forced, xp.inf, scores), -xp.inf)
    if num_blocks > n:
        ranked = ranked_again(ranked, candidate)
    width = min(n, num_blocks)
    floor = top(ranked, width)[..., -1:]
    above = ranked > floor
    tied = (ranked == floor) & (ranked > -xp.inf)
    room = width - above.sum(axis=-1, keepdims=True)
    chosen = above | (tied & (tied.cumsum(axis=-1) <= room))
    # The chosen blocks are distinct, so their order does not hang on ties.
    ascending = -top(xp.where(chosen, -block, -num_blocks), width)
    ascending = xp.where(ascending == num_blocks, -1, ascending)
    return ops.to_int32(ops.pad_end(ascending, ascending.ndim - 1, n - width, -1))
