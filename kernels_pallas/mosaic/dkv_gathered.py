"""dk and dv of the selected branch: the queries of a tile of keys are gathered from its query list.

A CTA is one warpgroup with 64 keys. A step has 64 query rows: several query tiles, each of which
one of the four warps starts to copy as soon as all are done with the stage. Of dS^T, which 6. of
a step multiplies, a copy may go to memory, where `stored_ds_dq.py` finds it.

Stages: as many as two CTAs on an SM have room for, 2 to 4. Floors at B=1 H=64 Hkv=4 D=Dv=128
T=65536 on an H100: 4.4 TFLOP = 4.4 ms, and 34 GB of gathered rows, which come from L2 for work
items that run together.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import operands
from kernels_pallas.mosaic.dkv_step import (
    COLUMNS,
    KeyTile,
    QueryMask,
    down,
    key_index,
    scratch,
)
from kernels_pallas.mosaic.operands import PER_COLUMN, div
from kernels_pallas.mosaic.refs import build_kernel
from kernels_pallas.mosaic.row_copies import RowCopies
from kernels_pallas.mosaic.row_io import GatheredRows
from kernels_pallas.mosaic.stored_ds import NO_ENTRY, StoredDs
from kernels_pallas.specs.block_query_lists import BLOCK_OFFSET_BIAS, BLOCK_OFFSET_SHIFT
from kernels_pallas.specs.dkv import Dkv
from kernels_pallas.specs.stored_ds import FIRST_ROW
from kernels_pallas.specs.work_items import WorkItem


class Entries:
    """The entries of a work item in the query lists, `tiles_per_step` of them a step."""

    def __init__(self, spec: Dkv, refs: Any, tile: KeyTile):
        self.spec, self.refs, self.tile = spec, refs, tile
        self.per_step, self.group = spec.tiles_per_step, spec.query_tile.group
        self.copies = None
        if spec.copied_by_lanes and not spec.interpret:
            divisor = spec.Hkv * spec.selection_entries or 1
            self.copies = RowCopies(tile.buffers, self.group, divisor)

    def of_step(self, array, i) -> list:
        """What `array`, the query list or the token bits, has for the entries of step `i`."""
        begin, end = self.tile.begin, self.tile.end
        at = [begin + i * self.per_step + t for t in range(self.per_step)]
        # A work item without entries must not read before the first one of all.
        at = [jnp.maximum(jnp.minimum(entry, end - 1), begin) for entry in at]
        return [array[entry] + 0 for entry in at]

    def token(self, entry):
        """Of an entry that is a place in the selection."""
        return div(entry, self.spec.Hkv * self.spec.selection_entries)

    def ds_places(self, i) -> list:
        """The places in ds of the tokens of step `i`; past the last one nowhere."""
        refs, tile = self.refs, self.tile
        count, places = jnp.int32(self.spec.selection_entries), []
        first = (tile.row - refs.ds_chunk[FIRST_ROW]) * refs.sizes.T
        for t, entry in enumerate(self.of_step(refs.query_list, i)):
            place = (first + self.token(entry)) * count + lax.rem(entry, count)
            exists = tile.begin + i * self.per_step + t < tile.end
            places.append(jnp.where(exists, place, NO_ENTRY))
        return places

    def query_tiles(self, i) -> list:
        """The query tiles of step `i`; none if they are single tokens, which are many: these are
        prefetched into L1, and `load` reads them there.
        """
        refs, tile = self.refs, self.tile
        if self.spec.selection_entries:
            return [self.token(entry) for entry in self.of_step(refs.query_list, i)]
        if not self.spec.single_token:
            return self.of_step(refs.query_list, i)
        rows = GatheredRows(self.group, bool(self.spec.interpret))
        rows.prefetch_entries(refs.query_list, tile.begin + i * self.per_step, tile.end)
        return []

    def wait(self, i) -> None:
        """The copies of step `i` have arrived."""
        if self.copies is None:
            plgpu.barrier_wait(self.refs.step_full.at[self.tile.stage(i)])
            return
        self.copies.wait(self.spec.stages - 1)
        plgpu.commit_smem()

    def load(self, i, tiles, varies: bool) -> None:
        """Starts the copies of step `i`: a warp takes every fourth query tile."""
        if (copies := self.copies) is not None:
            pl.when(i < self.tile.steps)(lambda: self._load_by_lanes(copies, i))
            copies.commit()
            return

        def load(t):
            if tiles:
                tile = tiles[0]
                for later, other in enumerate(tiles[1:]):
                    tile = jnp.where(t > later, other, tile)
                self.tile.load_query_tile(i, t, tile)
                return
            entry = jnp.minimum(self.tile.begin + i * self.per_step + t, self.tile.end - 1)
            self.tile.load_query_tile(i, t, self.refs.query_list[entry] + 0)

        pl.when(i < self.tile.steps)(lambda: operands.by_warps(self.per_step, load, varies))

    def _load_by_lanes(self, copies: RowCopies, i) -> None:
        refs, tile, stage = self.refs, self.tile, self.tile.stage(i)
        pairs = (refs.query, (refs.query_s, stage)), (refs.do, (refs.do_s, stage))
        stats, place = (refs.row_stats, refs.stats_s.at[stage]), (tile.b, tile.g, refs.sizes.T)
        first = tile.begin + i * self.per_step
        copies.load(refs.query_list, first, tile.end, place, pairs, stats)

    # Masks.

    def _token_of_column(self, row):
        """The tokens of eight columns of a query tile, the first of which is `row`."""
        column = lax.broadcasted_iota(jnp.int32, (COLUMNS,), 0)
        column = plgpu.layout_cast(column, PER_COLUMN)
        return div(column + row, self.group)

    def selected(self, token_bits, j):
        """Whether the token of a column selected the block of its entry, `[8]`."""
        token = self._token_of_column(j % self.spec.query_tile.rows)
        bits = token_bits[j // self.spec.query_tile.rows]
        return lax.shift_right_logical(bits, token) & 1 == 1

    def visible(self, first, token_bits, j, key_begin, key_end):
        """Which query of eight columns from `j` on sees which key, `[64, 8]`; `key_end`: of their
        statistics; `first`: the first entry of the step.
        """
        spec, end, first_key = self.spec, self.tile.end, self.tile.first_key
        key = key_index(first_key)
        if spec.single_token:
            exists = first + self._token_of_column(j) < end
            return key < down(jnp.where(exists, key_end, 0.0))
        t = j // spec.query_tile.rows
        key_end = jnp.where(first + t < end, key_end, 0.0)
        if not spec.block:
            return key < down(key_end)
        offset = lax.shift_right_logical(token_bits[t], BLOCK_OFFSET_SHIFT)
        key_begin = (offset - BLOCK_OFFSET_BIAS + first_key).astype(jnp.float32)
        key_end = jnp.minimum(key_end, key_begin + spec.block)
        key_end = jnp.where(self.selected(token_bits, j), key_end, 0.0)
        return (key >= key_begin) & (key < down(key_end))


def partials(kernel: Kernel):
    """The body of `specs.dkv.partials` for query lists."""
    spec: Dkv = kernel.spec
    interpret = bool(spec.interpret)
    buffers = operands.Buffers(jnp.dtype(spec.dtype), spec.query_tile, interpret)
    stored = StoredDs(spec.query_tile.rows, spec.selection_entries, interpret)

    def body(refs):
        # `shard_map` lets nothing that varies along its mesh into `warp_map`.
        varies = any(
            jax.typeof(x).manual_axis_type.varying
            for x in (refs.query, refs.do, refs.row_stats)
        )
        tile = KeyTile.of_cta(spec, buffers, refs)
        entries = Entries(spec, refs, tile)

        def step(keys, under_mask, i, sums):
            stage = tile.stage(i)
            first = tile.begin + i * spec.tiles_per_step
            following = entries.query_tiles(i + spec.stages)
            token_bits = entries.of_step(refs.token_bits, i) if spec.block else []
            entries.wait(i)
            if under_mask:
                mask = QueryMask(functools.partial(entries.visible, first, token_bits))
            else:
                selected = functools.partial(entries.selected, token_bits)
                mask = QueryMask(selected=selected if spec.block else None)

            def write_ds(ds):
                if spec.stored_rows:
                    stored.write(refs.ds, ds, entries.ds_places(i))

            sums = tile.add_step(stage, keys, sums, mask, write_ds)
            plgpu.commit_smem()  # all four warps have read this stage
            entries.load(i + spec.stages, following, varies)
            return sums

        def walk(keys, sums):
            bounds = tile.bounds(WorkItem._fields.index("begin"))
            first, last = jnp.int32(0), tile.steps
            unmasked_first, unmasked_last = tile.unmasked(bounds[1], bounds[2], first, last)
            masked, unmasked = (functools.partial(step, keys, x) for x in (True, False))
            sums = lax.fori_loop(first, unmasked_first, masked, sums)
            sums = lax.fori_loop(unmasked_first, unmasked_last, unmasked, sums)
            return lax.fori_loop(unmasked_last, last, masked, sums)

        @pl.when(tile.exists())
        def _():
            tile.clear_padding_rows()
            for i in range(spec.stages):
                entries.load(jnp.int32(i), entries.query_tiles(jnp.int32(i)), varies)
            tile.sum_steps(0, walk)

    return build_kernel(
        kernel,
        body,
        scratch=scratch(spec, buffers),
        grid_names=("item",),
        interpret=spec.interpret,
    )
