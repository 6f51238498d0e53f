"""Computes attention to selected blocks, one block at a time.

A first kernel gathers the queries that selected a block and computes their partial results. A
second kernel merges the partials of each query.

Algorithm: For each token and far block j, forward computes the softmax over the keys of the block,
and the block's lse_log2. The kernel of dq computes dQ_j from the statistics of the whole row
(formulas in `softmax.py`):

    forward   S = Q K_j^T [64, block],  P = 2^(c S - m),  O_j = P V_j / l
    dq        S = Q K_j^T, dP = dO V_j^T,  dS = |g| P * (dP - delta),  dQ_j = scale dS K_j

Loop order: key-stationary. A CTA is one warpgroup with one work item. A work item is a selection
block of 64 or 128 keys, which stays in shared memory, and some of the entries (token, slot) that
selected the block. A step gathers the query heads of as many tokens as fit in 64 rows, and scatters
their results. Rows of tokens that did not select the block are not multiplied. In step i, a CTA
waits for the rows of the step, and computes S = Q K^T (and dP = dO V^T). While the CTA computes and
stores the result of step i, the rows of step i + 1 are being loaded. A result is stored with all
columns or one slab at a time.

A far block of a tile ends before the tile's first token, so the tile's tokens attend to all keys of
the block. The entries of a step are read one step ahead, so that they are in the cache when the
copies of the step start.
Tiles: 64 // G tokens x G heads of queries, and one block of keys.

The merge starts with O and m, the output and the log2 log-sum-exp of the loop over a tile's near
blocks (`selected.py`), and with l = 1. Then (O, m, l) is updated for each slot j of a token's
selection that has a far block, in the order of slots:

    forward   m'  = max(m, lse_j)                        lse_j in log2
              O'  = O 2^(m - m') + O_j 2^(lse_j - m')
              l'  = l 2^(m - m') + 2^(lse_j - m')
              result O / l,  lse = (m + log2 l) ln 2
    dq        dQ' = dQ + dQ_j

Tiles that are not gathered keep the result of the loop. Slots of the selection without a far block
are skipped, since their partials are undefined. Slots before the first and after the last far block
of the tile's tokens are not read. The merge is query-stationary: a CTA merges a few tiles of 64
rows in sequence. While a slot is merged, the partials of the next slots are being loaded. If
`spec.stays` is true, a CTA ends at once if its batch row and key/value head have no work items in
the kernel's segment.

Bound: the bandwidth of HBM, since all partials are written to HBM and read again. Floors at B=1
H=32
Hkv=8 D=Dv=128 T=32768, 13 far blocks per token, on an H100: forward 0.45 TFLOP = 0.45 ms, dq
0.67 TFLOP = 0.67 ms; the partials are 3.5 GB, which are written and read in 2.1 ms.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import operands, softmax
from kernels_pallas.mosaic.operands import LOG2E, PER_ROW, Buffers, across, div, div_rem, rem
from kernels_pallas.mosaic.refs import build_kernel
from kernels_pallas.mosaic.row_copies import RowCopies
from kernels_pallas.mosaic.row_io import GatheredRows, TileRows
from kernels_pallas.mosaic.selected import list_counts, tile_is_gathered
from kernels_pallas.specs.gathered import MERGE_STAGES, TILES_OF_CTA, GatheredAttention
from kernels_pallas.specs.tile import ROWS, SMEM_THIRD
from kernels_pallas.specs.work_items import WorkItem


class Rows(NamedTuple):
    """The 64 query rows of a step."""

    b: Any
    kv_head: Any
    token: Any  # [64]
    entry: Any  # [64], `(token * Hkv + kv_head) * n + slot`
    segment_token: Any  # first token of the segment
    first: Any  # index of the first row's entry in `entries`
    end: Any  # end of the entries of the work item


def partials(kernel: Kernel) -> Callable:
    """The body of the kernel `specs.gathered.partials`."""
    spec = kernel.spec
    buffers, gathered_rows = _token_buffers(spec), _gathered_rows(spec)
    c, dtype = spec.scale * LOG2E, buffers.dtype

    def store_lse(refs, rows, lse_log2):
        """Store `lse_log2` of each row at the index `[slot, tile, row of the tile]` of the row's
        token.
        """
        slot, tile_tokens = rem(rows.entry, spec.n), spec.tile.tokens
        token, tiles = rows.token - rows.segment_token, refs.sizes.tiles
        index = (slot * tiles + div(token, tile_tokens)) * ROWS
        index += rem(token, tile_tokens) * spec.group + rem(operands.row_index(), spec.group)
        place = div(operands.row_index(), spec.group)
        exists = (place < gathered_rows.tokens) & (rows.first + place < rows.end)
        of_head = rows.b, rows.kv_head, spec.n * tiles * ROWS
        gathered_rows.put(refs.partial_lse, lse_log2, *of_head, index, exists)

    def work(refs, rows):
        def compute(scores):
            acc, *state = softmax.initial_state(spec.Dv)
            state = softmax.SoftmaxState(None, *state)
            p, new_max = softmax.block_softmax(state.row_max, scores, c)
            _, row_max, row_sum = softmax.rescaled(state, new_max, p)
            acc = buffers.add_product(acc, p.astype(dtype), (refs.value_tile, 0))
            acc *= across(1 / row_sum, acc.shape)  # [64, Dv]
            store_lse(refs, rows, row_max + jnp.log2(row_sum))
            return acc

        return compute

    return _build(kernel, {"query": spec.D}, spec.Dv, work)


def partial_dq(kernel: Kernel) -> Callable:
    """The body of the kernel `specs.gathered.partial_dq`."""
    spec = kernel.spec
    buffers, gathered_rows = _token_buffers(spec), _gathered_rows(spec)

    def work(refs, rows):
        of_rows = refs.row_stats, rows.b, rows.kv_head, rows.token
        stats_tiles = spec.stats_tile[0], refs.sizes.stats_tiles
        stats = gathered_rows.softmax_stats(*of_rows, stats_tiles)

        def compute(scores, dp):
            acc = operands.zeros(spec.D)
            ds = softmax.softmax_backward(scores, dp, spec.scale * LOG2E, stats)  # [64, block]
            acc = buffers.add_product(acc, ds.astype(buffers.dtype), (refs.key_tile, 0))
            return acc * across(stats.sign * spec.scale, acc.shape)  # [64, D]

        return compute

    return _build(kernel, {"query": spec.D, "do": spec.Dv}, spec.D, work)


def _token_buffers(spec: GatheredAttention) -> Buffers:
    return Buffers.of(spec, spec.token_tile)


def _gathered_rows(spec: GatheredAttention) -> GatheredRows:
    return GatheredRows(spec.group, spec.interpret)


def staged_columns(spec: GatheredAttention, loaded: int, out_width: int) -> int:
    """Return the number of result columns in shared memory at a time: all columns, or one slab if
    only then three CTAs fit on an SM. `loaded` is the number of columns of query rows.
    """
    slab, others = spec.token_tile.slab, (spec.D + spec.Dv) * spec.parts + loaded
    fits = lambda columns: ROWS * 2 * (others + columns) <= SMEM_THIRD
    return slab if fits(slab) and not fits(out_width) else out_width


def _build(kernel: Kernel, rows: dict[str, int], out_width: int, work: Callable) -> Callable:
    """Build a kernel that computes partials.

    Args:
      kernel: The description of the kernel.
      rows: Widths of the arrays `[B, T, H, .]` whose rows are gathered. The first array is
        multiplied with K. The second array, if there is one, is multiplied with V.
      out_width: Number of columns of the result.
      work: `work(refs, rows)` starts the remaining loads of a step and returns a function. The
        arguments of the returned function are the products `[64, block]` of the step. The
        result of the returned function, float32 `[64, out_width]`, is scattered to
        `refs.partials`.
    """
    spec: GatheredAttention = kernel.spec
    buffers, gathered_rows = _token_buffers(spec), _gathered_rows(spec)
    group, tokens, slab = spec.group, gathered_rows.tokens, spec.token_tile.slab
    staged = staged_columns(spec, sum(rows.values()), out_width)

    def body(refs):
        loads = [
            (getattr(refs, name), getattr(refs, f"{name}_tile"), width)
            for name, width in rows.items()
        ]
        keys_and_values = refs.key_tile, refs.value_tile
        pairs = [((x[1], 0), (y, 0)) for x, y in zip(loads, keys_and_values, strict=False)]
        typed = refs.query, refs.key, refs.items
        varies = any(jax.typeof(x).manual_axis_type.varying for x in typed)
        copies = None
        if spec.copied_by_lanes and not spec.interpret:
            copies = RowCopies(buffers, group, spec.Hkv * spec.n)

        # The code adds 0 to each loaded value, since under `shard_map` only a sum has the type
        # of values that vary.
        segment, segment_token = refs.segment[0] + 0, refs.segment[1] + 0
        columns = refs.items.at[segment * refs.sizes.items + refs.cta.item]
        item = WorkItem(*(columns[i] + 0 for i in range(len(WorkItem._fields))))
        exists, row = item.row >= 0, jnp.maximum(item.row, 0)
        b, kv_head = div_rem(row, spec.Hkv)
        begin, end = item.begin, item.end
        steps = div(end - begin + (tokens - 1), tokens)
        steps = jnp.where(exists, steps, 0)

        def load(i):
            if copies is not None:

                def load_by_lanes():
                    first, place = begin + i * tokens, (b, kv_head, refs.sizes.T)
                    targets = [(source, (tile, 0)) for source, tile, _ in loads]
                    copies.load(refs.entries, first, end, place, targets)

                pl.when(i < steps)(load_by_lanes)
                copies.commit()
                return

            def load_token(t):
                index = jnp.minimum(begin + i * tokens + t, end - 1)
                token = div(refs.entries[index] + 0, spec.Hkv * spec.n)
                for source, tile, width in loads:
                    heads = functools.partial(_heads, source, b, token, kv_head * group, group)
                    buffers.load_rows(heads, tile, 0, width, refs.rows_ready, t)

            pl.when(i < steps)(lambda: operands.by_warps(tokens, load_token, varies))

        def store(i, column):
            """Start the copies of the staged columns, from `column` on."""
            if copies is not None:
                all_before = segment_token * (spec.Hkv * spec.n)
                count = refs.sizes.segment_tokens * (spec.Hkv * spec.n)
                place, source = (b, count, all_before), (refs.out_tile, 0, staged)
                at = refs.entries, begin + i * tokens, end
                copies.store(*at, place, refs.partials, source, column)
                return

            def store_token(t):
                index = begin + i * tokens + t

                @pl.when(index < end)
                def _():
                    place = refs.entries[index] - segment_token * (spec.Hkv * spec.n)
                    heads = functools.partial(_heads, refs.partials, b, place, 0, group)
                    shifted = lambda x: heads(pl.ds(column + x.start, x.size))
                    buffers.store_rows(refs.out_tile, 0, staged, shifted, t)

            operands.by_warps(tokens, store_token, varies)

        def entries_of(i):
            return gathered_rows.load_entries(refs.entries, begin + i * tokens, end)

        def step(i, entry):
            first = begin + i * tokens
            following = entries_of(i + 1)
            token = div(entry, spec.Hkv * spec.n)  # [64]
            compute = work(refs, Rows(b, kv_head, token, entry, segment_token, first, end))
            if copies is None:
                plgpu.barrier_wait(refs.rows_ready)
            else:
                copies.wait(0)
                plgpu.commit_smem()
            *products, _ = buffers.products(*pairs)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.commit_smem()  # all four warps have read these query rows and the last output
            load(i + 1)
            result = compute(*products)
            for column in range(0, out_width, staged):
                if column:
                    # Each warp waits for its own copies of the previous columns.
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

    tiles = rows | {"out": staged}
    return build_kernel(
        kernel,
        body,
        scratch={
            "key_tile": buffers.ring(1, spec.block, spec.D),
            "value_tile": buffers.ring(1, spec.block, spec.Dv),
            **{f"{name}_tile": buffers.rows(1, x, tokens) for name, x in tiles.items()},
            "keys_ready": operands.barriers((spec.D + spec.Dv) // slab),
            "rows_ready": operands.barriers(tokens * (sum(rows.values()) // slab)),
        },
        grid_names=("item",),
    )


def _heads(array, b, index, head, group, columns):
    return array.at[b, pl.ds(index, 1), pl.ds(head, group), columns]


def merge(kernel: Kernel) -> Callable:
    """The body of the kernel `specs.gathered.merge` and `specs.gathered.merge_dq`."""
    spec: GatheredAttention = kernel.spec
    forward = "partial_lse" in kernel.names
    width = kernel.outputs[0].shape[-1]
    stages, buffers, slabs = _stages(spec), _tile_buffers(spec), width // spec.tile.slab

    def body(refs):
        def of_tile(i, nothing):
            tile = refs.cta.tiles * TILES_OF_CTA + i
            out = refs.out if forward else refs.dq
            pl.when(tile < refs.sizes.tiles)(_merge_tile(spec, refs, tile, out, forward))
            return nothing

        count = jnp.int32(TILES_OF_CTA)
        if spec.stays:  # empty work items are the last of a row
            item = refs.segment[0] * refs.sizes.items + refs.cta.row * refs.sizes.row_items
            count = jnp.where(refs.items[item, 0] + 0 >= 0, count, 0)
        lax.fori_loop(0, count, of_tile, None)

    lse = {"lse_ring": plgpu.SMEM((stages, ROWS), jnp.float32)} if forward else {}
    added = {"added_tile": buffers.rows(1, width)} if spec.added else {}
    return build_kernel(
        kernel,
        body,
        scratch={
            **lse,
            **added,
            "partial_ring": buffers.rows(stages, width),
            "out_tile": buffers.rows(1, width),
            "partial_ready": operands.barriers(slabs + len(lse), stages),
            "rows_ready": operands.barriers(slabs * (1 + len(added))),
        },
        grid_names=("row", "tiles"),
    )


def _stages(spec: GatheredAttention) -> int:
    return min(MERGE_STAGES, spec.n)


def _tile_buffers(spec: GatheredAttention) -> Buffers:
    return Buffers.of(spec, spec.tile)


def _merge_tile(spec: GatheredAttention, refs, tile, out, forward: bool) -> Callable[[], None]:
    """Return a function that merges a tile.

    Inside that function, a result is a list of slabs, float32 `[64, slab]` each.
    """
    width, buffers, stages = out.shape[-1], _tile_buffers(spec), _stages(spec)
    b, kv_head = div_rem(refs.cta.row, spec.Hkv)
    tokens = pl.ds(tile * spec.tile.tokens, spec.tile.tokens)
    all_tile = refs.segment[2] + tile  # index of the tile among those of all tokens
    tile_rows = TileRows.of(spec)

    def heads_of(array):
        """Return a function that maps a slice of columns to these columns of the tile's rows in
        `array` `[B, segment_tokens, H, width]`.
        """
        heads = pl.ds(kv_head * spec.group, spec.group)
        return lambda columns: array.at[b, tokens, heads, columns]

    def in_segment():
        """Return the position of the tile's rows in arrays of the segment."""
        first = tile * spec.tile.tokens
        return b, first, kv_head * spec.group, refs.sizes.segment_tokens

    def looped():
        """Load the result that `selected.py` computed for the tile."""
        rows = buffers.read_rows(refs.out_tile, 0, width)
        return [x.astype(jnp.float32) for x in rows]

    def write(result):
        """Write a result to shared memory, for the copy to `out`."""
        for i, x in enumerate(result):
            buffers.write_slab(refs.out_tile, 0, i, x)

    def gated_and_added(rows, factor):
        """Compute `added + gate * factor * rows`, where `factor` is `[64]`."""
        if spec.gated:
            first, head = all_tile * spec.tile.tokens, kv_head * spec.group
            factor *= tile_rows.values(refs.gate, b, first, head, refs.sizes.T)
        rows = [x * across(factor, x.shape) for x in rows]
        if not spec.added:
            return rows
        added = buffers.read_rows(refs.added_tile, 0, width)
        return [x + y.astype(jnp.float32) for x, y in zip(rows, added, strict=True)]

    def load(first, end, i):
        """Start the copies of slot `first + i`, if the slot is below `end`."""

        @pl.when(first + i < end)
        def _():
            heads = pl.ds(0, spec.group)
            stage, slot = rem(jnp.int32(i), stages), first + i
            ready, column = refs.partial_ready.at[stage], kv_head * spec.n + slot

            def rows(columns):
                return refs.partials.at[b, tokens, column, heads, columns]

            buffers.load_rows(rows, refs.partial_ring, stage, width, ready)
            if forward:
                rows = pl.ds((slot * refs.sizes.tiles + tile) * ROWS, ROWS)
                source = refs.partial_lse.at[b, kv_head, rows]
                plgpu.copy_gmem_to_smem(source, refs.lse_ring.at[stage], ready)

    def merge_slots(first, end):
        """Merge the result of the loop over near blocks with the partials of the slots `first
        .. end - 1`. Forward also updates (row_max, row_sum).
        """
        selection = refs.indices, refs.position, b, kv_head
        token = all_tile * spec.tile.tokens
        slots = _gathered_rows(spec).far_slots(
            *selection, token, refs.sizes.T
        )  # one bit per slot
        count, acc, carry = end - first, looped(), None
        if forward:
            lse = tile_rows.values(refs.looped_lse, *in_segment()) * LOG2E
            seen = lse > softmax.EMPTY
            carry = [jnp.where(seen, lse, softmax.MASKED), jnp.where(seen, 1.0, 0.0)]

        def add(i, state):
            acc, carry = state
            stage = rem(i, stages)
            exists = lax.shift_right_logical(slots, first + i) & 1 == 1  # [64]
            plgpu.barrier_wait(refs.partial_ready.at[stage])
            partial = buffers.read_rows(refs.partial_ring, stage, width)
            partial = [x.astype(jnp.float32) for x in partial]
            if carry is not None:
                row_max, row_sum = carry
                lse = operands.load(refs.lse_ring.at[stage], PER_ROW)
                lse = jnp.where(exists, lse, softmax.MASKED)
                new_max = jnp.maximum(row_max, lse)
                decay, weight = jnp.exp2(row_max - new_max), jnp.exp2(lse - new_max)  # [64]
                carry = [new_max, row_sum * decay + jnp.where(exists, weight, 0.0)]
                acc = [x * across(decay, x.shape) for x in acc]
                partial = [x * across(weight, x.shape) for x in partial]
            # Partials without an entry are undefined.
            partial = [jnp.where(across(exists, x.shape), x, 0.0) for x in partial]
            plgpu.commit_smem()  # all four warps have read this stage
            load(first, end, i + stages)
            return [x + y for x, y in zip(acc, partial, strict=True)], carry

        acc, carry = lax.fori_loop(0, count, add, (acc, carry))
        if carry is not None:
            inverse, lse = softmax.normalizer(softmax.SoftmaxState(acc, *carry))
            tile_rows.put(refs.lse, lse, *in_segment())
            acc = gated_and_added(acc, inverse)
        write(acc)

    def keep():
        """Finish a tile that is not gathered, whose rows keep the result of `selected.py`."""
        if not forward:
            return
        lse = tile_rows.values(refs.looped_lse, *in_segment())
        tile_rows.put(refs.lse, lse, *in_segment())
        if spec.gated or spec.added:
            one = operands.full((ROWS,), 1.0, PER_ROW)
            write(gated_and_added(looped(), one))

    def run():
        index = refs.cta.row * refs.sizes.all_tiles + all_tile
        gathered = tile_is_gathered(refs.block_counts, all_tile, index, spec.gather_limit)
        counts = list_counts(refs.block_counts, index)
        far_slots = counts.far_slot, jnp.where(gathered, counts.far_slot_end, 0)

        def rewrite(merged):
            """Load the rows that the loop in `selected.py` computed, change these rows by the
            function `merged`, and write the result.
            """
            given = [(refs.looped, refs.out_tile)]
            given += [(refs.added, refs.added_tile)] if spec.added else []
            for source, target in given:
                buffers.load_rows(heads_of(source), target, 0, width, refs.rows_ready)
            for i in range(stages):
                load(*far_slots, i)
            plgpu.barrier_wait(refs.rows_ready)
            merged()
            plgpu.commit_smem()
            buffers.store_rows(refs.out_tile, 0, width, heads_of(out))
            plgpu.wait_smem_to_gmem(0)

        def merge_or_keep():
            pl.when(gathered)(functools.partial(merge_slots, *far_slots))
            pl.when(~gathered)(keep)

        if not spec.stays:
            rewrite(merge_or_keep)
            return
        pl.when(gathered)(lambda: rewrite(lambda: merge_slots(*far_slots)))

    return run
