"""Computes dk and dv of a branch.

The kernels are key-stationary, and their products are transposed (keys x queries).

    S^T = scale K Q^T    P^T = exp(S^T - lse)    dS^T = P^T * (g V dO^T - g delta)
    dv = (g P)^T dO      dk = scale dS^T Q

A program has one tile of keys, and a segment of the query rows that attend to the tile. The segment
is an interval of tokens (`of_intervals`), or a part of the list of the tokens that selected the
block (`of_blocks`). If there are several segments, their sums are float32 partials, and the kernel
`merge` adds the partials in order. The products already sum over the heads of a group.

The sums of dk and dv have one term per query, and grow with the number of queries. In float32 the
sums are compensated. Without compensation, one multiply-add per query row would round a large sum
thousands of times. The rounding error would be up to four times the error of the reference.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.rows import (
    columns,
    dot,
    load_rows,
    pair_of,
    row_statistics,
    store_rows,
)


@triton.jit
def _add_product(a, b, acc, lost, c):
    """Return acc + A B. In float32 also return the rounding error of the sum so far, as in
    Kahan summation over tiles.
    """
    if c.PRECISION != "ieee":
        return dot(a, b, c, acc), lost
    term = dot(a, b, c) - lost
    larger = acc + term
    return larger, (larger - acc) - term


@triton.jit
def _over_queries(
    tile, arrays, lists, item, at, edges, stop, scale, head, c, LISTED
):  # fmt: skip
    """Return dk / scale and dv of a tile, summed over the rows between the first and the last
    of four `edges`. Rows between the second and the third edge attend to the whole tile. Rows
    belong to the tokens from `item` on or, if `LISTED` is true, to the entries of a query list.

    Args:
      tile: Keys and values `[KEYS, .]`.
      arrays: query, do, lse, delta, gate, dlse.
      lists: Either the arrays first and last, or the arrays order, indices, position and key_start.
      at: Indices of the keys in the array.
    """
    keys, values = tile
    query, do, lse, delta, gate, dlse = arrays
    dk = tl.full([c.KEYS, columns(c.WIDTH)], 0.0, tl.float32)
    dv = tl.full([c.KEYS, columns(c.VALUE_WIDTH)], 0.0, tl.float32)
    dk_lost, dv_lost = tl.zeros_like(dk), tl.zeros_like(dv)  # the rounding errors of the sums
    for part in tl.static_range(3):
        for start in range(edges[part], edges[part + 1], c.ROWS):
            row = start + tl.arange(0, c.ROWS)
            if LISTED:
                order, indices, position, key_start = lists
                there = row < stop
                entry = tl.load(order + row // c.GROUP, mask=there, other=0)
                token = item + entry // (c.N * c.COPIES)
                seen = there[None, :]
                if part != 1:
                    begins = tl.load(key_start + token)
                    ends = begins + tl.load(position + token) + 1
                    seen = at[:, None] < ends[None, :]
                    if c.COPIES == 2:
                        slot = (token * c.HEADS + head) * c.N + entry // c.COPIES % c.N
                        begins += tl.load(indices + slot) * c.BLOCK
                        seen &= (at[:, None] >= begins[None, :]) & (
                            at[:, None] < (begins + c.BLOCK)[None, :]
                        )
            else:
                first, last = lists
                token = item + row // c.GROUP
                there = row < stop
                seen = there[None, :]
                if part != 1:
                    low = tl.load(first + token, mask=there, other=0)
                    high = tl.load(last + token, mask=there, other=0)
                    there &= low < high
                    seen = (at[:, None] >= low[None, :]) & (at[:, None] < high[None, :])
            row = token * (c.HEADS * c.GROUP) + head * c.GROUP + row % c.GROUP
            rows = load_rows(query, row, there, c.WIDTH)
            do_rows = load_rows(do, row, there, c.VALUE_WIDTH)
            lse_log2, gates, shift = row_statistics(lse, delta, gate, dlse, row, there, c)
            logits = dot(keys, tl.trans(rows), c) * scale
            probs = tl.exp2(logits - lse_log2[None, :])
            if part != 1:
                probs = tl.where(seen, probs, 0.0)
            gated = probs * gates[None, :]
            dv, dv_lost = _add_product(gated.to(do_rows.dtype), do_rows, dv, dv_lost, c)
            dp = dot(values, tl.trans(do_rows), c)
            ds = gated * dp - probs * shift[None, :]
            if part != 1:
                ds = tl.where(seen, ds, 0.0)
            dk, dk_lost = _add_product(ds.to(rows.dtype), rows, dk, dk_lost, c)
    return dk, dv


@triton.jit
def of_intervals(
    query, key, value, first, last, do, lse, delta, gate, dlse, bounds,
    T, S, segments, scale, scale_dk,
    dk_out, dv_out, c: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of a branch with intervals of keys.

    Programs: B * HEADS * ceil(S / KEYS) * segments.

    Args:
      query .. dlse: As in `interval.dq`.
      bounds: int32 `[B, tiles, 4]`: begin and end of the tokens that attend to some key of a
        tile, then of the tokens that attend to all of its keys.
      scale_dk: The scale without log2(e).
      DIRECT: Whether there is one segment.
      dk_out, dv_out: if `DIRECT` is true, `[B, S, HEADS, .]`; otherwise float32 partials
        `[programs, KEYS, .]`.
    """
    tiles = tl.cdiv(S, c.KEYS)
    program = tl.program_id(0)
    segment, tile = program % segments, program // segments % tiles
    batch, head = pair_of(program // segments // tiles, c.HEADS)
    inside = tl.arange(0, c.KEYS)
    at = tile * c.KEYS + inside
    inner = at < S
    beyond = (batch * S + at) * c.HEADS + head
    keys = load_rows(key, beyond, inner, c.WIDTH)
    values = load_rows(value, beyond, inner, c.VALUE_WIDTH)
    bounds += (batch * tiles + tile) * 4
    start = tl.load(bounds) * c.GROUP
    stop = tl.load(bounds + 1) * c.GROUP
    share = tl.cdiv(tl.cdiv(stop - start, c.ROWS), segments) * c.ROWS
    start += segment * share
    stop = tl.minimum(stop, start + share)
    last_row = tl.maximum((stop - start + c.ROWS - 1) // c.ROWS, 0) * c.ROWS + start
    plain = (tl.load(bounds + 2) * c.GROUP - start + c.ROWS - 1) // c.ROWS * c.ROWS + start
    plain = tl.minimum(tl.maximum(plain, start), last_row)
    tail = tl.minimum(tl.load(bounds + 3) * c.GROUP, stop)
    tail = tl.maximum(tail - plain, 0) // c.ROWS * c.ROWS + plain
    arrays = query, do, lse, delta, gate, dlse
    edges = start, plain, tail, last_row
    dk, dv = _over_queries(
        (keys, values), arrays, (first, last), batch * T, at, edges, stop, scale, head, c,
        False,
    )  # fmt: skip
    dk *= scale_dk
    if c.DIRECT:
        row = beyond
    else:
        row = tl.cast(program, tl.int64) * c.KEYS + inside
        inner = inside >= 0
    store_rows(dk_out, row, dk, inner, c.WIDTH)
    store_rows(dv_out, row, dv, inner, c.VALUE_WIDTH)


@triton.jit
def of_blocks(
    query, key, value, indices, position, key_start, do, lse, delta, gate, dlse, order, starts,
    ends, tile_of,
    T, S, tiles, items, entries, scale, scale_dk,
    dk_out, dv_out, c: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of the selected branch.

    Programs: B * HEADS * items * PARTS. A work item is up to SEGMENT entries of the query list of a
    tile. A tile is a block of keys, and a program handles KEYS keys of the block.

    Args:
      query .. key_start: As in `selected.forward`; do .. dlse: As in `interval.dq`.
      order: int32 `[B * HEADS, entries]`: the query lists of all tiles, one after the other. An
        entry is `(token * N + slot) * COPIES + copy`, ascending in a list. The block of an entry
        never begins after the entry's token.
      starts: int32 `[B * HEADS, tiles + 1]`: the begin of each list.
      ends: int32 `[B * HEADS, tiles]`: end of the work items of each tile.
      tile_of: int32 `[B * HEADS, items]`: the tile of each item. The value `tiles` in `tile_of`
        marks an unused item.
      COPIES: 2 if sequences may begin at any key, otherwise 1. If COPIES is 2, a block is part of
        two tiles.
      dk_out, dv_out: float32 partials `[B * HEADS * items, PARTS * KEYS, .]`.
    """
    program = tl.program_id(0)
    item, part = program // c.PARTS, program % c.PARTS
    pair, number = item // items, item % items
    tile = tl.load(tile_of + item)
    if tile < tiles:
        batch, head = pair_of(pair, c.HEADS)
        list_row = tl.cast(pair, tl.int64)
        list_at = starts + list_row * (tiles + 1) + tile
        before = tl.load(ends + list_row * tiles + tile - 1, mask=tile > 0, other=0)
        first = tl.load(list_at)
        start = first + (number - before) * c.SEGMENT
        stop = tl.minimum(start + c.SEGMENT, tl.load(list_at + 1))
        inside = part * c.KEYS + tl.arange(0, c.KEYS)
        at = tile * c.BLOCK + inside
        inner = (inside < c.BLOCK) & (at < S)
        row = (batch * S + at) * c.HEADS + head
        keys = load_rows(key, row, inner, c.WIDTH)
        values = load_rows(value, row, inner, c.VALUE_WIDTH)
        # The first entries are the tile's own tokens, which attend to a part of the tile.
        own = first + c.BLOCK if c.COPIES == 1 else stop
        begin = start * c.GROUP
        stop *= c.GROUP
        last_row = tl.maximum((stop - begin + c.ROWS - 1) // c.ROWS, 0) * c.ROWS + begin
        plain = tl.maximum((own * c.GROUP - begin + c.ROWS - 1) // c.ROWS, 0) * c.ROWS + begin
        plain = tl.minimum(plain, last_row)
        tail = tl.maximum(stop - plain, 0) // c.ROWS * c.ROWS + plain
        arrays = query, do, lse, delta, gate, dlse
        order += list_row * entries
        edges = begin, plain, tail, last_row
        lists = order, indices, position, key_start
        dk, dv = _over_queries(
            (keys, values), arrays, lists, batch * T, at, edges, stop, scale, head, c, True
        )  # fmt: skip
        row = tl.cast(program, tl.int64) * c.KEYS + tl.arange(0, c.KEYS)
        store_rows(dk_out, row, dk * scale_dk, inside >= 0, c.WIDTH)
        store_rows(dv_out, row, dv, inside >= 0, c.VALUE_WIDTH)


@triton.jit
def merge(dk_parts, dv_parts, ends, S, tiles, items, dk, dv, c: tl.constexpr):
    """Add the partials of each tile in order. The results are dk and dv `[B, S, HEADS, .]`.

    Programs: B * HEADS * tiles * (KEYS / PART).

    Args:
      dk_parts, dv_parts: float32 `[B * HEADS * items, KEYS, .]`.
      ends: int32 `[B * HEADS, tiles]`: end of the items of each tile.
    """
    program = tl.program_id(0)
    part = program % (c.KEYS // c.PART)
    program = program // (c.KEYS // c.PART)
    tile, pair = program % tiles, program // tiles
    batch, head = pair_of(pair, c.HEADS)
    begin = tl.load(ends + program - 1, mask=tile > 0, other=0)
    end = tl.load(ends + program)
    inside = part * c.PART + tl.arange(0, c.PART)
    there = inside >= 0
    dk_sum = tl.full([c.PART, columns(c.WIDTH)], 0.0, tl.float32)
    dv_sum = tl.full([c.PART, columns(c.VALUE_WIDTH)], 0.0, tl.float32)
    base = tl.cast(pair, tl.int64) * items
    for item in range(begin, end):
        row = (base + item) * c.KEYS + inside
        dk_sum += load_rows(dk_parts, row, there, c.WIDTH)
        dv_sum += load_rows(dv_parts, row, there, c.VALUE_WIDTH)
    at = tile * c.BLOCK + inside
    inner = (inside < c.BLOCK) & (at < S)
    row = (batch * S + at) * c.HEADS + head
    store_rows(dk, row, dk_sum, inner, c.WIDTH)
    store_rows(dv, row, dv_sum, inner, c.VALUE_WIDTH)
