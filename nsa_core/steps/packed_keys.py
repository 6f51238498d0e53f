"""Compressed keys of packed rows, moved so that scores can be added up by blocks."""

from nsa_core.array_ops import ArrayOps, derived, int32, like
from nsa_core.config import NSAConfig
from nsa_core.varlen import taken


def align_sequences(ops: ArrayOps, key, start, first, last, config: NSAConfig):
    """Compressed keys of packed rows with every sequence in blocks of its own.

    Args:
      start: index of the first compressed token of each query's sequence `[B, T]`.
      first, last: The first and last compressed token that the query sees.

    Returns:
      The keys `[B, blocks * r, Hkv, D]` with zeros in the gaps. For each query its sequence's first
      block, and the first and the last of the moved keys that it sees, `[B, T]`.
    """
    ratio, count = config.select_block // config.compress_stride, key.shape[1]
    if not count:
        (none,) = ops.derive(zeros_like, start)
        return key, none, none, none
    sequences = count * config.compress_stride // config.compress_block + 1
    length = (-(-count // ratio) + min(count, sequences)) * ratio
    sizes = {"count": count, "length": length, "ratio": ratio}
    at, *of_queries = ops.derive(_aligned, start, first, last, **sizes)
    return ops.derive(taken, key, at)[0], *of_queries


@derived(
    lambda start, *seen, count, length, ratio: [
        int32(start.shape[0], length),
        *[int32(*start.shape)] * 3,
    ]
)
def _aligned(ops, start, first, last, *, count, length, ratio):
    """The key of each slot, -1 if it is empty; and per query its first block and the moved keys
    that it sees.
    """
    xp, batch = ops.xp, start.shape[0]
    source, target = (
        xp.broadcast_to(ops.arange(start, n), (batch, n)) for n in (count, length)
    )
    # A token belongs to the last sequence of a query that starts at or before it.
    owner = ops.searchsorted(start, source, "right") - 1
    local = source - ops.take_rows(start, owner.clip(0, None))
    local = xp.where(owner < 0, 1, local)
    opens = xp.where(local % ratio == 0, 1, 0)
    opened = xp.cumsum(opens, axis=1)
    aligned = (opened - 1) * ratio + local % ratio  # where each token goes, ascending
    first_block = xp.concatenate([opened - opens, opened[:, -1:]], axis=1)
    at = ops.searchsorted(aligned, target, "left").clip(0, count - 1)
    at = xp.where(ops.take_rows(aligned, at) == target, at, -1)
    base = ops.to_int32(ops.take_rows(first_block, start))
    return ops.to_int32(at), base, base * ratio, base * ratio + (last - first)


@derived(lambda x: [like(x)])
def zeros_like(ops, x):
    """Zeros that no step writes to."""
    return [ops.xp.zeros_like(x)]
