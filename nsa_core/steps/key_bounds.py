"""Which keys each query sees, as an interval `first .. last - 1`, and the same by kernel row.

A kernel's tile has `tokens` tokens times the `G` query heads of a group; row `token * G + head`
(`kernels_pallas.specs.tile`). What follows from a layout and sizes alone goes through
`ArrayOps.cached`, so that torch makes it once for all calls of the same sizes.
"""

import dataclasses
from typing import Any

from kernels_pallas.specs.tile import cdiv
from nsa_core.array_ops import ArrayOps, QueryLayout
from nsa_core.config import NSAConfig


def visible_compressed(layout: QueryLayout, config: NSAConfig) -> tuple[Any, Any]:
    """Position `p` sees compressed token `i` iff `p >= i*d + l - 1`: `[B, T]` both."""
    block, stride = config.compress_block, config.compress_stride
    count = ((layout.position + (1 + stride - block)) // stride).clip(0, None)
    return layout.compressed_start, layout.compressed_start + count


def window_bounds(
    ops: ArrayOps, layout: QueryLayout, config: NSAConfig, num_keys: int
) -> tuple[Any, Any]:
    """The last `window` keys up to the query's own: `[B, T]` both."""
    last = causal_end(ops, layout)
    first = ops.xp.maximum(layout.key_start, last - config.window)
    return first.clip(0, num_keys), last.clip(0, num_keys)


def causal_end(ops: ArrayOps, layout: QueryLayout) -> Any:
    """`[B, T]`: the key after the query's own token."""
    make = lambda: [layout.key_start + layout.position + 1]
    (end,) = ops.cached(layout, ("causal_end",), make)
    return end


@dataclasses.dataclass(frozen=True)
class VisibleCompressed:
    """The bounds of the compressed branch."""

    config: NSAConfig

    def of(self, ops: ArrayOps, layout: QueryLayout) -> tuple[Any, Any]:
        return visible_compressed(layout, self.config)

    def tiles_seen(self, first: int, end: int, tokens: int, keys: int, tile: int) -> int:
        """Tiles of `tile` keys that the tokens `first .. end - 1` of `tokens` see at most, from
        the tile of the first one's first key on; of a row that is not packed.
        """
        stride = self.config.compress_stride
        # No more compressed tokens than of the queries' own: fewer than `compress_block` tokens
        # came before them, so that no query before `end` is at `end + compress_block - 1`.
        if keys <= tokens // stride:
            keys = min(keys, cdiv(end, stride))
        return cdiv(keys, tile)


@dataclasses.dataclass(frozen=True)
class Window:
    """The bounds of the sliding branch."""

    config: NSAConfig
    num_keys: int

    def of(self, ops: ArrayOps, layout: QueryLayout) -> tuple[Any, Any]:
        return window_bounds(ops, layout, self.config, self.num_keys)

    def tiles_seen(self, first: int, end: int, tokens: int, keys: int, tile: int) -> int:
        """As of `VisibleCompressed`."""
        seen = min(keys, end - first + self.config.window - 1)
        return cdiv(seen - 1, tile) + 1  # which may begin anywhere in a tile


type Bounds = VisibleCompressed | Window


def bounds_of(ops: ArrayOps, layout: QueryLayout, bounds: Bounds):
    """`first, last` of each query, `[B, T]` both."""
    return ops.cached(layout, bounds, lambda: bounds.of(ops, layout))


def bounds_by_row(ops: ArrayOps, layout: QueryLayout, bounds: Bounds, tile, tiles: int):
    """`bounds_of` as kernels read them: int32 `[B, tiles, rows]` both."""

    def make():
        return [by_row(ops, x, tile, tiles) for x in bounds_of(ops, layout, bounds)]

    return ops.cached(layout, (bounds, tile, tiles), make)


def causal_end_by_row(ops: ArrayOps, layout: QueryLayout, tile, tiles: int):
    """`causal_end` as kernels read it: int32 `[B, tiles, rows]`."""
    make = lambda: [by_row(ops, causal_end(ops, layout), tile, tiles)]
    (end,) = ops.cached(layout, ("causal_end", tile, tiles), make)
    return end


def by_row(ops: ArrayOps, x, tile, tiles: int):
    """`[B, T]` as int32 `[B, tiles, rows]`; rows past the end repeat the last token."""
    batch = x.shape[0]
    x = ops.extend(ops.to_int32(x), 1, tiles * tile.tokens)
    x = x.reshape(batch, tiles, tile.tokens, 1)
    x = ops.xp.broadcast_to(x, (batch, tiles, tile.tokens, tile.group))
    return ops.extend(x.reshape(batch, tiles, tile.used), 2, tile.rows)
