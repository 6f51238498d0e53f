"""The steps on Mosaic kernels, for either framework: bounds and rows in, public shapes out.

`xp` is `jax.numpy` or `torch`, `run` calls a kernel (`Kernel.__call__`, or `interop.launch`),
`where` has `position`, `key_start` and `compressed_start` `[B, T]` (`geometry.py` of either
framework). Shapes are those of `types.py`; by row means in the order of a kernel's tiles,
`token * G + head` in each (`kernels_pallas.mosaic.operands`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from kernels_pallas.mosaic import (
    block_query_lists,
    capability,
    interval_attention,
    selected_attention,
    tile_block_lists,
    work_items,
)
from kernels_pallas.specs import scores
from kernels_pallas.tiles import tiles_of
from nsa_jax import mosaic_gather, sorted_lists
from nsa_jax.config import NSAConfig


@dataclasses.dataclass(frozen=True)
class Framework:
    """What the steps need of JAX or torch.

    `rows(x, index)`: `x[b, index[b]]`; `search(sorted, values, side)`: `numpy.searchsorted` of
    every row; `cast(x, dtype)`: `x`, or a copy of another dtype; `sort(x)`: rows ascending;
    `sort_pairs(keys, values)`: rows of both in the order of the keys, stable; `numbers(x, n)`:
    int32 `[[0 .. n - 1]]` on the device of `x`; `once(where, name, make)`: the arrays `make()`,
    which follow from `where` and `name` alone, so that calls alike may share them;
    `pad(x, axis, count, value)`: `x` with so many more entries at the end of an axis;
    `put(x, index, part)`: `x` with `part` at `index`, perhaps in the memory of `x`.
    """

    xp: Any
    run: Callable
    rows: Callable
    search: Callable
    cast: Callable
    sort: Callable
    sort_pairs: Callable
    numbers: Callable
    once: Callable
    pad: Callable
    put: Callable

    def integers(self, x):
        return self.cast(x, self.xp.int32)

    def longer(self, x, axis: int, length: int, fill=None):
        """`x` continued along `axis` to `length` by its last entry, or by `fill`."""
        missing = length - x.shape[axis]
        if missing <= 0:
            return x
        if fill is not None:
            return self.pad(x, axis, missing, fill)
        last = x[(slice(None),) * axis + (slice(-1, None),)]
        shape = (*x.shape[:axis], missing, *x.shape[axis + 1 :])
        return self.xp.concatenate([x, self.xp.broadcast_to(last, shape)], axis=axis)

    def by_row(self, x, tile, tiles: int):
        """`[B, T]` as int32 `[B, tiles, rows]`; rows past the end repeat the last token."""
        batch = x.shape[0]
        x = self.longer(self.integers(x), 1, tiles * tile.tokens)
        x = x.reshape(batch, tiles, tile.tokens, 1)
        x = self.xp.broadcast_to(x, (batch, tiles, tile.tokens, tile.group))
        return self.longer(x.reshape(batch, tiles, tile.used), 2, tile.rows)

    # Bounds of the keys that queries see, by name: `("visible", config)` or `("window", config,
    # number of keys)`.

    def bounds(self, where, name):
        """The keys `first .. last - 1` that each query sees, `[B, T]` both."""
        return self.once(where, name, lambda: getattr(self, name[0])(where, *name[1:]))

    def bounds_by_row(self, where, name, tile, tiles: int):
        return self.once(
            where,
            (*name, tile, tiles),
            lambda: [self.by_row(x, tile, tiles) for x in self.bounds(where, name)],
        )

    def last_by_row(self, where, tile, tiles: int):
        """The end of the keys that each row may see."""
        name = ("last", tile, tiles)
        (last,) = self.once(where, name, lambda: [self.by_row(self.end(where), tile, tiles)])
        return last

    def end(self, where):
        (end,) = self.once(where, ("end",), lambda: [where.key_start + where.position + 1])
        return end

    def visible(self, where, config: NSAConfig):
        """Of the compressed tokens."""
        block, stride = config.compress_block, config.compress_stride
        count = ((where.position + (1 + stride - block)) // stride).clip(0, None)
        return where.compressed_start, where.compressed_start + count

    def window(self, where, config: NSAConfig, num_keys: int):
        """Of the sliding branch."""
        last = self.end(where)
        first = self.xp.maximum(where.key_start, last - config.window)
        return first.clip(0, num_keys), last.clip(0, num_keys)

    # The last kernel of a call may add what the ones before it found: `gate` [B, T, H] scales
    # its output, `added` [B, T, H, Dv] is added to it, and the log-sum-exp is None then.

    def _attention(
        self, query, key, value, bounds, where, scale, gate, added, longest_first, config
    ):
        spec = interval_attention.IntervalAttention(
            **shapes_of(query, key, value, scale),
            gated=gate is not None,
            added=added is not None,
            longest_first=longest_first,
            **tiles_of(
                "compressed" if longest_first else "sliding",
                query,
                self.xp,
                kv_heads=key.shape[2],
                keys=key.shape[1],
                Dv=value.shape[-1],
                config=config,
                otherwise=interval_attention.blocks_for(
                    query.shape[-1], value.shape[-1], long=longest_first
                ),
            ),
        )
        arrays = [query, key, value]
        arrays += self.bounds_by_row(where, bounds, spec.tile, spec.tiles)
        arrays += self._extra(gate, added)
        out, lse = self.run(interval_attention.attention(spec), *arrays)
        return out, None if spec.added else lse

    def _extra(self, gate, added):
        extra = [] if gate is None else [self.cast(gate, self.xp.float32)]
        return extra if added is None else [*extra, added]

    def compressed(
        self, query, key, value, where, config: NSAConfig, scale, gate=None
    ) -> tuple[Any, Any]:
        """`(out, lse)` over compressed tokens `[B, C, Hkv, .]`."""
        if key.shape[1] == 0:
            batch, length, heads, _ = query.shape
            shape = (batch, length, heads, value.shape[-1])
            out = self.xp.zeros_like(self.xp.broadcast_to(query[..., :1], shape))
            lse = self.cast(out[..., 0], self.xp.float32)
            return out, self.xp.full_like(lse, -float("inf"))
        bounds = ("visible", config)
        return self._attention(
            query, key, value, bounds, where, scale, gate, None, True, config
        )

    def sliding(
        self, query, key, value, where, config: NSAConfig, scale, gate=None, added=None
    ) -> tuple[Any, Any]:
        """`(out, lse)` over the last `window` keys."""
        bounds = ("window", config, key.shape[1])
        return self._attention(
            query, key, value, bounds, where, scale, gate, added, False, config
        )

    def selected(
        self,
        query,
        key,
        value,
        indices,
        where,
        config: NSAConfig,
        scale,
        gate=None,
        added=None,
        lists=None,
        *,
        packed: bool,
    ) -> tuple[Any, Any]:
        """`(out, lse)` over the blocks `indices` `[B, T, Hkv, n]`; `lists`: `selected_lists`,
        where they are there already; `packed`: sequences may begin at any key.
        """
        spec = selected_attention.SelectedAttention(
            **shapes_of(query, key, value, scale),
            n=indices.shape[-1],
            block=config.select_block,
            gated=gate is not None,
            added=added is not None,
            limit=mosaic_gather.limit(query, key, value, indices, config, packed),
            **tiles_of(
                "selected",
                query,
                self.xp,
                kv_heads=key.shape[2],
                keys=key.shape[1],
                Dv=value.shape[-1],
                config=config,
            ),
        )
        if lists is None:
            lists = self.lists(indices, where, spec)
        last = self.last_by_row(where, spec.tile, spec.tiles)
        extra = self._extra(gate, added)
        arrays = query, key, value
        out, lse = self.run(selected_attention.attention(spec), *arrays, *lists, last, *extra)
        if spec.limit:
            selection = indices, lists[-1], where
            found = out, lse, extra[0] if spec.gated else None
            out, lse = mosaic_gather.attention(self, spec, arrays, selection, *found)
        return out, None if spec.added else lse

    def selected_lists(self, query, key, value, indices, where, config: NSAConfig, scale):
        """What `selected` and its gradient read of `indices`."""
        shape = shapes_of(query, key, value, scale)
        spec = selected_attention.SelectedAttention(
            **shape, n=indices.shape[-1], block=config.select_block
        )
        return self.lists(indices, where, spec)

    def lists(self, indices, where, spec):
        """What `selected_attention.attention` reads."""
        arrays = indices, where.position, where.key_start
        if spec.interpret:
            return sorted_lists.unions(self, *arrays, spec)
        return self.run(tile_block_lists.lists(spec), *arrays)

    def inverse_lists(self, indices, where, spec):
        """`(edges, *lists)`: where the entries of each tile of keys begin and what they are
        (`kernels_pallas.mosaic.inverse`).
        """
        arrays = indices, where.position, where.key_start
        if capability.interpret.get():
            return sorted_lists.inverse(self, *arrays, spec)
        edges = self._edges(arrays, spec)
        return edges, *self.run(block_query_lists.filled(spec), *arrays, edges)

    def slot_lists(self, indices, counts, where, spec):
        """`(items, entries)` that `gathered_attention.partial_outputs` reads; `spec`: a `pieces.Pieces`,
        `counts` of `lists`.
        """
        arrays = indices, where.position, where.key_start
        if capability.interpret.get():
            edges, entries = sorted_lists.inverse(self, *arrays, spec.inverse, counts)
        else:
            arrays = *arrays, counts
            edges = self._edges(arrays, spec.inverse)
            (entries,) = self.run(block_query_lists.slots(spec.inverse), *arrays, edges)
        return self.listed_items(edges, where, spec)[0], entries

    def listed_items(self, edges, where, spec):
        """What `pieces.items` gives; `spec`: its `Pieces`; `edges`: of its lists."""
        if capability.interpret.get():
            return sorted_lists.items(self, edges, where.position, spec)
        return self.run(work_items.items(spec), edges, where.position)

    def _edges(self, arrays, spec):
        (counts,) = self.run(block_query_lists.counted(spec), *arrays)
        return self.xp.cumsum(counts, axis=0, dtype=self.xp.int32)

    def best_blocks(self, query, key, lse, where, config: NSAConfig, scale, num_blocks, packed):
        """The selection int32 `[B, T, Hkv, n]` from compressed keys `[B, C, Hkv, D]` and the
        log-sum-exp `[B, T, H]` of the compressed branch; sequences have at most `num_blocks`.
        """
        batch, length, heads, width = query.shape
        kv_heads = key.shape[2]
        ratio = config.select_block // config.compress_stride
        cover = config.compress_block // config.compress_stride
        first, last = self.bounds(where, ("visible", config))
        base = where.compressed_start
        if packed:
            key, base = self._by_block(key, where.compressed_start, config)
            first, last = base * ratio, base * ratio + (last - first)
            num_blocks += key.shape[1] // ratio
        blocks = max(-(-key.shape[1] // ratio), 1)
        if key.shape[1] == 0:
            key = self.xp.broadcast_to(query[:, :1, :kv_heads], (batch, 1, kv_heads, width))
        key = self.longer(key, 1, blocks * ratio, 0.0)
        spec = scores.Scores(
            B=batch,
            T=length,
            H=heads,
            Hkv=kv_heads,
            D=width,
            blocks=blocks,
            candidates=num_blocks,
            ratio=ratio,
            cover=cover,
            n=config.num_selected,
            num_initial=config.num_initial,
            num_local=config.num_local,
            packed=packed,
            dtype=name_of(query.dtype),
            scale=scale_of(scale, width),
            interpret=capability.interpret.get(),
            **tiles_of(
                "scores",
                query,
                self.xp,
                kv_heads=kv_heads,
                keys=num_blocks,
                Dv=0,
                config=config,
            ),
        )
        tile, tiles = spec.tile, spec.tiles

        def candidates():
            own, start = where.position // config.select_block, base
            own, start = (
                self.longer(self.integers(x), 1, tiles * tile.tokens, fill).reshape(
                    batch, tiles, tile.tokens
                )
                for x, fill in ((own, -1), (start, None))
            )
            span = self.integers(self.xp.amax(start + own + 1 - start[..., :1], axis=-1))
            score_rows = spec.tiling.score_rows
            own, start = self.longer(own, 2, score_rows, -1), self.longer(start, 2, score_rows)
            return *(self.by_row(x, tile, tiles) for x in (first, last)), own, start, span

        # Of packed rows they follow from the keys too.
        found = candidates() if packed else self.once(where, ("candidates", spec), candidates)
        (best,) = self.run(scores.best_blocks(spec), query, key, lse, *found)
        best = self.xp.moveaxis(best[..., : tile.tokens], (1, 3), (3, 4))
        return best.reshape(batch, tiles * tile.tokens, kv_heads, -1)[:, :length]

    def _by_block(self, key, start, config):
        """Compressed keys of packed rows with every sequence in blocks of its own.

        Returns `[B, blocks * r, Hkv, D]`, zeros in the gaps, and each query's first block.
        """
        batch, count = key.shape[:2]
        ratio = config.select_block // config.compress_stride
        if count == 0:
            return key, self.xp.zeros_like(start)
        sequences = count * config.compress_stride // config.compress_block + 1
        places = (-(-count // ratio) + min(count, sequences)) * ratio
        slot, target = (
            self.xp.broadcast_to(self.numbers(start, n), (batch, n)) for n in (count, places)
        )
        # A slot belongs to the last sequence of a query that starts at or before it.
        owner = self.search(start, slot, "right") - 1
        local = slot - self.rows(start, owner.clip(0, None))
        local = self.xp.where(owner < 0, 1, local)
        opens = self.xp.where(local % ratio == 0, 1, 0)
        opened = self.xp.cumsum(opens, axis=1)
        place = (opened - 1) * ratio + local % ratio
        before = self.xp.concatenate([opened - opens, opened[:, -1:]], axis=1)
        at = self.search(place, target, "left").clip(0, count - 1)
        filled = self.rows(place, at) == target
        key = self.xp.where(filled[..., None, None], self.rows(key, at), 0)
        return key, self.rows(before, start)


def shapes_of(query, key, value, scale):
    """The fields that every kernel of attention has."""
    batch, length, heads, width = query.shape
    return {
        "B": batch,
        "T": length,
        "S": key.shape[1],
        "H": heads,
        "Hkv": key.shape[2],
        "D": width,
        "Dv": value.shape[-1],
        "dtype": name_of(query.dtype),
        "scale": scale_of(scale, width),
        "interpret": capability.interpret.get(),
    }


def name_of(dtype) -> str:
    return str(dtype).removeprefix("torch.")


def scale_of(scale, width: int) -> float:
    scale = float(width**-0.5 if scale is None else scale)
    if not scale > 0:
        raise NotImplementedError(f"mosaic: scale must be positive, got {scale}")
    return scale
