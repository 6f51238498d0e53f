"""The walk that forward and dq of gathered attention share: a block over its query list.

Key-stationary: a CTA is one warpgroup with one work item, a selection block of 64 or 128 keys,
which stays in shared memory, and some of the entries (token, slot) that chose it. A step gathers
the query heads of as many tokens as 64 rows have room for, so that no product is wasted, and
scatters as many results:

    load(0)
    for each step i:  wait for its rows;  S = Q K^T (and dP = dO V^T);  load(i + 1)
                      compute;  store(i), all columns or a slab at a time

A far block ends before the first token of its tile, so its tokens see all of it. The entries of
the next step are read one step ahead, so that its copies find them in the cache.

Tiles: 64 // G tokens x G heads, and one block.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import operands
from kernels_pallas.mosaic.refs import build_kernel
from kernels_pallas.mosaic.row_copies import RowCopies
from kernels_pallas.mosaic.row_io import GatheredRows
from kernels_pallas.specs.gathered import GatheredAttention
from kernels_pallas.specs.tile import ROWS, SMEM_THIRD
from kernels_pallas.specs.work_items import WorkItem


class Rows(NamedTuple):
    """The 64 rows of a step."""

    b: Any
    kv_head: Any
    token: Any  # [64]
    entry: Any  # [64], `(token * Hkv + kv_head) * n + slot`
    segment_token: Any  # the first one of the segment
    first: Any  # the place of the first row's entry among `entries`
    end: Any  # where the entries of the work item end


@dataclasses.dataclass(frozen=True)
class GatheredWalk:
    """Sizes that follow from those of the problem.

    Attributes:
      spec: of the problem.
      rows: names of scratch for rows of queries, and their widths: those that are multiplied
        with the keys and, if there are two, with the values.
      out_width: of the result.
    """

    spec: GatheredAttention
    rows: Mapping[str, int]
    out_width: int

    @property
    def buffers(self) -> operands.Buffers:
        spec = self.spec
        return operands.Buffers(jnp.dtype(spec.dtype), spec.token_tile, bool(spec.interpret))

    @property
    def staged_columns(self) -> int:
        """Columns of the result that are in shared memory at a time: all, or a slab where an SM
        then has room for three CTAs.
        """
        spec, slab = self.spec, self.spec.token_tile.slab
        others = (spec.D + spec.Dv) * spec.parts + sum(self.rows.values())
        fits = lambda columns: ROWS * 2 * (others + columns) <= SMEM_THIRD
        return slab if fits(slab) and not fits(self.out_width) else self.out_width

    @property
    def gathered_rows(self) -> GatheredRows:
        return GatheredRows(self.spec.group, bool(self.spec.interpret))

    def build(self, kernel: Kernel, body: Callable) -> Callable:
        """The kernel of `body(refs)`, which calls `run`."""
        spec, buffers, tokens = self.spec, self.buffers, self.gathered_rows.tokens
        slab = spec.token_tile.slab
        rows = {**self.rows, "out_tile": self.staged_columns}
        loaded = sum(self.rows.values()) // slab
        return build_kernel(
            kernel,
            body,
            scratch={
                "key_tile": buffers.ring(1, spec.block, spec.D),
                "value_tile": buffers.ring(1, spec.block, spec.Dv),
                **{name: buffers.rows(1, width, tokens) for name, width in rows.items()},
                "keys_ready": plgpu.Barrier(num_arrivals=(spec.D + spec.Dv) // slab),
                "rows_ready": plgpu.Barrier(num_arrivals=tokens * loaded),
            },
            grid_names=("item",),
            interpret=spec.interpret,
        )

    def run(self, refs, sources: Iterable, work: Callable[[Rows], Callable]) -> None:
        """The body of a kernel.

        Args:
          refs: of the kernel.
          sources: arrays `[B, T, H, .]` that are gathered into the scratch of `rows`.
          work: `work(rows)` starts what a step needs besides and returns a function of its
            products `[64, block]` whose result, float32 `[64, out_width]`, is scattered to
            `refs.partials`.
        """
        spec, buffers, gathered_rows = self.spec, self.buffers, self.gathered_rows
        group, tokens = spec.group, gathered_rows.tokens
        tiles = [getattr(refs, name) for name in self.rows]
        loads = list(zip(sources, tiles, self.rows.values(), strict=True))
        keys_and_values = refs.key_tile, refs.value_tile
        pairs = [((x, 0), (y, 0)) for x, y in zip(tiles, keys_and_values, strict=False)]
        typed = refs.query, refs.key, refs.items
        varies = any(jax.typeof(x).manual_axis_type.varying for x in typed)
        copies = None
        if spec.copied_by_lanes and not spec.interpret:
            copies = RowCopies(buffers, group, spec.Hkv * spec.n)

        # Sums, not loads: under `shard_map` only they have the type of what varies.
        segment, segment_token = refs.segment[0] + 0, refs.segment[1] + 0
        columns = refs.items.at[segment * refs.sizes.items + refs.cta.item]
        item = WorkItem(*(columns[i] + 0 for i in range(len(WorkItem._fields))))
        exists, row = item.row >= 0, jnp.maximum(item.row, 0)
        b, kv_head = lax.div(row, jnp.int32(spec.Hkv)), lax.rem(row, jnp.int32(spec.Hkv))
        begin, end = item.begin, item.end
        steps = lax.div(end - begin + (tokens - 1), jnp.int32(tokens))
        steps = jnp.where(exists, steps, 0)

        def load_by_lanes(copies: RowCopies, i):
            first, place = begin + i * tokens, (b, kv_head, refs.sizes.T)
            targets = [(source, (tile, 0)) for source, tile, _ in loads]
            copies.load(refs.entries, first, end, place, targets)

        def load(i):
            if copies is not None:
                pl.when(i < steps)(lambda: load_by_lanes(copies, i))
                copies.commit()
                return

            def load_token(t):
                index = jnp.minimum(begin + i * tokens + t, end - 1)
                token = lax.div(refs.entries[index] + 0, jnp.int32(spec.Hkv * spec.n))
                for source, tile, width in loads:
                    heads = functools.partial(_heads, source, b, token, kv_head * group, group)
                    buffers.load_rows(heads, tile, 0, width, refs.rows_ready, t)

            pl.when(i < steps)(lambda: operands.by_warps(tokens, load_token, varies))

        def store(i, column):
            """Starts the copies of what is staged, the columns from `column` on."""
            if copies is not None:
                all_before = segment_token * (spec.Hkv * spec.n)
                count = refs.sizes.segment_tokens * (spec.Hkv * spec.n)
                place, staged = (b, count, all_before), (refs.out_tile, 0, self.staged_columns)
                at = refs.entries, begin + i * tokens, end
                copies.store(*at, place, refs.partials, staged, column)
                return

            def store_token(t):
                index = begin + i * tokens + t

                @pl.when(index < end)
                def _():
                    place = refs.entries[index] - segment_token * (spec.Hkv * spec.n)
                    heads = functools.partial(_heads, refs.partials, b, place, 0, group)
                    shifted = lambda x: heads(pl.ds(column + x.start, x.size))
                    buffers.store_rows(refs.out_tile, 0, self.staged_columns, shifted, t)

            operands.by_warps(tokens, store_token, varies)

        def entries_of(i):
            return gathered_rows.load_entries(refs.entries, begin + i * tokens, end)

        def step(i, entry):
            first = begin + i * tokens
            following = entries_of(i + 1)
            token = lax.div(entry, jnp.int32(spec.Hkv * spec.n))  # [64]
            compute = work(Rows(b, kv_head, token, entry, segment_token, first, end))
            if copies is None:
                plgpu.barrier_wait(refs.rows_ready)
            else:
                copies.wait(0)
                plgpu.commit_smem()
            *products, _ = buffers.products(*pairs)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.commit_smem()  # all four warps are done with these rows and the last output
            load(i + 1)
            result, staged = compute(*products), self.staged_columns
            for column in range(0, self.out_width, staged):
                if column:
                    # Each warp waits for the copies of the columns before that it started.
                    done = lambda _: plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    operands.by_warps(4, done, varies)
                    plgpu.commit_smem()
                buffers.write_rows(refs.out_tile, 0, result[:, column : column + staged])
                plgpu.commit_smem()
                store(i, column)
            return following

        @pl.when(steps > 0)
        def _():
            keys = pl.ds(item.first_key * spec.parts, spec.block)
            for source, tile in ((refs.key, refs.key_tile), (refs.value, refs.value_tile)):

                def block(columns, source=source):
                    return source.at[b, keys, kv_head, columns]

                buffers.load_keys(block, tile, 0, refs.keys_ready)
            load(jnp.int32(0))
            plgpu.barrier_wait(refs.keys_ready)
            lax.fori_loop(0, steps, step, entries_of(0))
            plgpu.wait_smem_to_gmem(0)


def _heads(array, b, index, head, group, columns):
    return array.at[b, pl.ds(index, 1), pl.ds(head, group), columns]
