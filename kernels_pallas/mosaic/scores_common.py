"""What both orders of the product share: `scores_qk.py` and `scores_kq.py`."""

import functools

import jax.numpy as jnp
from jax import lax

from kernels_pallas.mosaic.row_io import TileRows
from kernels_pallas.specs.scores import KEYS, Scores
from kernels_pallas.specs.tile import LOG2E

NO_BLOCK = 1 << 30  # in place of a block, sorts behind all of them


def tokens_of_tile(spec: Scores, refs, mine, tile_index) -> tuple:
    """The first token of tile `mine`, the `tile_index`-th of its row, and where its tokens end."""
    if spec.query_tiles:
        return refs.first_token[mine] + 0, refs.end_token[mine] + 0
    return tile_index * spec.tile.tokens, refs.sizes.T


def lse_log2_of_rows(spec: Scores, tokens: int, lse, b, first_token, g, length):
    """lse * log2(e) by row of `tokens` tokens from `first_token` on; +inf, which makes every
    probability zero, where a row sees nothing or is padding; `length`: T.
    """
    rows_of = TileRows(tokens, spec.group, spec.tiling.heads, bool(spec.interpret))
    found = rows_of.values(lse, b, first_token, g * spec.group, length, jnp.inf)
    return jnp.where(found == -jnp.inf, jnp.inf, found * LOG2E)


def walk_chunk(spec: Scores, step, carry, k, steps, base, key_begin, key_end):
    """The steps of chunk `k`: `carry = step(under_mask, i, carry)` for each step `i`.

    A step has `ratio` products, one a phase, of 64 blocks. Only those at both ends of what the
    rows of a tile see need a mask.

    Args:
      steps: of the whole tile.
      base: the block that the first step begins with.
      key_begin, key_end: where the keys of the tile's last row begin, and where those of its
        first row end.
    """
    chunk = spec.tiling.chunk
    step_keys = jnp.int32(KEYS * spec.ratio)
    start = jnp.minimum(k * (chunk // KEYS), steps)
    stop = jnp.minimum(start + chunk // KEYS, steps)
    edge = (base + start * KEYS) * spec.ratio
    left = lax.div(jnp.maximum(key_begin - edge, 0) + (KEYS * spec.ratio) - 1, step_keys)
    left = jnp.minimum(start + left, stop) if spec.packed else start
    right = lax.div(jnp.maximum(key_end - base * spec.ratio, 0), step_keys)
    right = jnp.clip(right, left, stop)
    masked, unmasked = (functools.partial(step, mask) for mask in (True, False))
    if spec.packed:
        carry = lax.fori_loop(start, left, masked, carry)
    carry = lax.fori_loop(left, right, unmasked, carry)
    return lax.fori_loop(right, stop, masked, carry)
