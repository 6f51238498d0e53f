"""Compressed keys of packed rows, moved so that scores can be added up by blocks."""

from nsa_core.array_ops import ArrayOps
from nsa_core.config import NSAConfig


def align_sequences(ops: ArrayOps, key, start, config: NSAConfig):
    """Compressed keys of packed rows with every sequence in blocks of its own.

    Returns `[B, blocks * r, Hkv, D]`, zeros in the gaps, and each query's first block `[B, T]`.
    """
    xp, (batch, count) = ops.xp, key.shape[:2]
    ratio = config.select_block // config.compress_stride
    if count == 0:
        return key, xp.zeros_like(start)
    sequences = count * config.compress_stride // config.compress_block + 1
    length = (-(-count // ratio) + min(count, sequences)) * ratio
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
    filled = ops.take_rows(aligned, at) == target
    key = xp.where(filled[..., None, None], ops.take_rows(key, at), 0)
    return key, ops.take_rows(first_block, start)
