"""Converts block indices to half-open ranges of keys, for logs and checks."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from nsa_core.config import NSAConfig


def to_ranges(
    block_indices: Int[Array, "B T Hkv n"], position: Int[Array, "B T"], config: NSAConfig
) -> Int[Array, "B T Hkv n 2"]:
    """Return `[start, end)` of each run of consecutive selected keys at or before the query, in
    ascending order.

    Adjacent blocks are merged, ends are limited to `position + 1`, and unused slots at the end
    are `(0, 0)`. Positions are local to the sequence, and negative for padding.
    """
    size, last = config.select_block, position[:, :, None, None]
    # The index of a masked block's first token may be invalid.
    valid = (block_indices >= 0) & (block_indices <= last // size)
    block = jnp.where(valid, block_indices, -2)
    previous = jnp.pad(block[..., :-1], ((0, 0),) * 3 + ((1, 0),), constant_values=-2)
    opens = valid & (block != previous + 1)
    # This is the index of the run of each block. Blocks without a run go to an extra slot, which
    # is removed.
    count = block.shape[-1]
    run = jnp.where(valid, jnp.cumsum(opens, axis=-1) - 1, count)
    end = jnp.minimum((block + 1) * size, last + 1)
    slots = jnp.arange(count, dtype=run.dtype)
    member = run[..., None, :] == slots[:, None]  # [..., slot, block]
    starts = jnp.where(member & opens[..., None, :], block[..., None, :] * size, 0)
    ends = jnp.where(member, end[..., None, :], 0)
    return jnp.stack([starts.max(axis=-1), ends.max(axis=-1)], axis=-1).astype(jnp.int32)
