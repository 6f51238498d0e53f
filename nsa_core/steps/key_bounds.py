"""Computes the keys to which each query attends, as an interval `first .. last - 1`. Some
functions return the bounds per token, and others return the bounds per row of a kernel's tile.
A tile has `tokens` tokens times the `G` query heads of a group. Row `token * G + head` of a
tile belongs to the token with index `token` and the head with index `head`
(`kernels_pallas.specs.tile`).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels_pallas.kernel import int32
from kernels_pallas.specs.tile import cdiv
from nsa_core.array_ops import ArrayOps, QueryLayout, derived, like
from nsa_core.config import NSAConfig
from nsa_core.varlen import Capacity, taken


def visible_compressed(position: Any, start: Any, config: NSAConfig) -> tuple[Any, Any]:
    """Return the interval of compressed tokens to which each query attends: the first token and
    the end of the interval, both `[B, T]`. A query at position `p` attends to compressed token
    `i` if and only if `p >= i*d + l - 1`.

    Args:
      start: The first compressed token of the query's sequence.
    """
    block, stride = config.compress_block, config.compress_stride
    return start, start + ((position + (1 + stride - block)) // stride).clip(0, None)


def sees_compressed(slot: Any, position: Any, start: Any, config: NSAConfig) -> Any:
    """Return whether each query `[..]` attends to the compressed tokens `slot` `[C]`, `[.., C]`."""
    first, end = visible_compressed(position[..., None], start[..., None], config)
    return (slot >= first) & (slot < end)


@derived(lambda position, start, *, config: [int32(*position.shape)] * 2)
def _visible(ops, position, start, *, config):
    return visible_compressed(position, start, config)


@derived(lambda start, last, **static: [int32(*last.shape)] * 2)
def _window(ops, key_start, last, *, window, num_keys):
    first = ops.xp.maximum(key_start, last - window)
    return first.clip(0, num_keys), last.clip(0, num_keys)


def _tokens_of(layout: QueryLayout) -> Any:
    """Return the table of a packed row's tokens (`nsa_core.varlen.Tokens`), or None."""
    return None if layout.varlen is None else layout.varlen.tokens


def causal_end(ops: ArrayOps, layout: QueryLayout) -> Any:
    """For each query, return the index of the key after the query's own token, `[B, T]`."""
    if (tokens := _tokens_of(layout)) is not None:
        return tokens.causal_end
    return ops.derive(_causal_end, layout.key_start, layout.position)[0]


@derived(lambda start, position: [int32(*position.shape)])
def _causal_end(ops, key_start, position):
    return [key_start + position + 1]


@dataclasses.dataclass(frozen=True)
class VisibleCompressed:
    """The bounds of the keys to which queries attend in the compressed branch."""

    config: NSAConfig

    def of(self, ops: ArrayOps, layout: QueryLayout) -> Sequence[Any]:
        if (tokens := _tokens_of(layout)) is not None:
            return tokens.compressed_start, tokens.compressed_end
        return ops.derive(
            _visible, layout.position, layout.compressed_start, config=self.config
        )

    def tiles_seen(self, first: Any, end: Any, tokens: int, keys: int, tile: int) -> Any:
        """Return an upper bound for the number of tiles of `tile` keys to which the tokens `first
        .. end - 1` attend. The bound holds for rows that are not packed. The arguments may be
        arrays.
        """
        stride = self.config.compress_stride
        # If the number of compressed tokens is at most `tokens // stride`, fewer than
        # `compress_block` tokens precede the first query. In that case the position of a query
        # before `end` is less than `end + compress_block - 1`.
        most = cdiv(end, stride) if keys <= tokens // stride else np.full_like(end, keys)
        return cdiv(np.minimum(keys, most), tile)

    def tiles_seen_packed(self, first: Any, end: Any, tile: int, capacity: Capacity) -> Any:
        """Return the upper bound of `tiles_seen` for a packed row.

        The compressed tokens of a packed row are in slots.
        """
        # The sequence of the first query may begin up to `max_seqlen` keys before that query.
        # Each sequence has its own slots.
        keys = np.minimum(
            capacity.key_end(end), capacity.span(first, end) + capacity.max_seqlen
        )
        places = keys + (capacity.unit - 1) * np.minimum(capacity.sequences, keys)
        return cdiv(places // self.config.compress_stride, tile) + 1


@dataclasses.dataclass(frozen=True)
class Window:
    """The bounds of the keys to which queries attend in the sliding branch."""

    config: NSAConfig
    num_keys: int

    def of(self, ops: ArrayOps, layout: QueryLayout) -> Sequence[Any]:
        """For each query, return the interval of the last `window` keys up to the key of the
        query's own token.
        """
        if (tokens := _tokens_of(layout)) is not None:
            return tokens.window_start, tokens.causal_end
        sizes = {"window": self.config.window, "num_keys": self.num_keys}
        return ops.derive(_window, layout.key_start, causal_end(ops, layout), **sizes)

    def tiles_seen(self, first: Any, end: Any, tokens: int, keys: int, tile: int) -> Any:
        """Return the same upper bound as `VisibleCompressed.tiles_seen`, for the sliding
        branch.
        """
        seen = np.minimum(keys, end - first + self.config.window - 1)
        return cdiv(seen - 1, tile) + 1  # a window may begin anywhere in a tile


type Bounds = VisibleCompressed | Window


def bounds_by_row(ops: ArrayOps, layout: QueryLayout, bounds: Bounds, tile, tiles: int):
    """Return the two results of `bounds.of` per row of a kernel's tile, each int32 `[B, tiles,
    rows]`.
    """
    return ops.derive(by_row, *bounds.of(ops, layout), tile=tile, tiles=tiles)


def causal_end_by_row(ops: ArrayOps, layout: QueryLayout, tile, tiles: int):
    """Return `causal_end` per row of a kernel's tile, as int32 `[B, tiles, rows]`."""
    return ops.derive(by_row, causal_end(ops, layout), tile=tile, tiles=tiles)[0]


@derived(lambda *arrays, tile, tiles: [int32(x.shape[0], tiles, tile.rows) for x in arrays])
def by_row(ops: ArrayOps, *arrays, tile, tiles: int):
    """Convert arrays `[B, T]` to int32 `[B, tiles, rows]`. Rows after the last token contain the
    values of the last token.
    """
    found = []
    for x in arrays:
        shape = x.shape[0], tiles, tile.tokens
        x = ops.extend(ops.to_int32(x), 1, tiles * tile.tokens).reshape(*shape, 1)
        x = ops.xp.broadcast_to(x, (*shape, tile.group))
        found.append(ops.extend(x.reshape(*shape[:2], tile.used), 2, tile.rows))
    return found


def align_sequences(ops: ArrayOps, key, start, first, last, config: NSAConfig):
    """Move the compressed keys of packed rows so that no block contains two sequences.

    Args:
      start: `[B, T]`, the index of the first compressed token of each query's sequence.
      first: `[B, T]`, the first compressed token to which the query attends.
      last: `[B, T]`, the end of the compressed tokens to which the query attends.

    Returns:
      The keys `[B, blocks * r, Hkv, D]` with zeros in the gaps, followed by three arrays `[B,
      T]`. The arrays have the first block of each query's sequence, and the start and the end of
      the interval of moved keys to which the query attends.
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
    """Return the index of the key in each slot, or -1 if the slot is empty. Also return, for each
    query, the first block of its sequence and the interval of moved keys to which the query
    attends.
    """
    xp, source, target = ops.xp, ops.numbers(start, count), ops.numbers(start, length)
    # A compressed token belongs to the last of the queries' sequences that starts at or before
    # the token.
    owner = ops.searchsorted(start, source, "right") - 1
    local = source - ops.take_rows(start, owner.clip(0, None))
    local = xp.where(owner < 0, 1, local)
    opens = xp.where(local % ratio == 0, 1, 0)
    opened = xp.cumsum(opens, axis=1)
    aligned = (opened - 1) * ratio + local % ratio  # the new index of each token, ascending
    first_block = xp.concatenate([opened - opens, opened[:, -1:]], axis=1)
    at = ops.searchsorted(aligned, target, "left").clip(0, count - 1)
    at = xp.where(ops.take_rows(aligned, at) == target, at, -1)
    base = ops.to_int32(ops.take_rows(first_block, start))
    return ops.to_int32(at), base, base * ratio, base * ratio + (last - first)


@derived(lambda x: [like(x)])
def zeros_like(ops, x):
    """Return zeros that no step may modify."""
    return [ops.xp.zeros_like(x)]
