"""Attention of each query to one interval of keys, and its dq: compressed and sliding branch.

Query-stationary: a program has `ROWS` rows of one key/value head and walks over the blocks of
`KEYS` keys that any of them sees. Only blocks that some row sees in part are masked. Blocks
begin at multiples of `KEYS` of the array, so that a row's sums do not depend on its tile.

    S = scale Q K^T    P = exp(S - lse)    dS = P * (g dP - g delta)    dq = scale dS K
"""

import triton
import triton.language as tl

from kernels_pallas.triton.rows import (
    NEGATIVE_INFINITY,
    columns,
    load_all_columns,
    load_all_rows,
    load_columns,
    load_rows,
    logits_gradient,
    pair_of,
    row_statistics,
    softmax_start,
    softmax_step,
    store_attention,
    store_dq,
)


@triton.jit
def _tile(first, last, T, c):
    """The tile of this program, the longest first: batch row, head, row of `[B, T, H]`, which
    rows there are, and the interval `low .. high - 1` of each.
    """
    tiles = tl.cdiv(T * c.GROUP, c.ROWS)
    program = tl.program_id(0)
    batch, head = pair_of(program // tiles, c.HEADS)
    row = (tiles - 1 - program % tiles) * c.ROWS + tl.arange(0, c.ROWS)
    there = row < T * c.GROUP
    row = tl.minimum(row, T * c.GROUP - 1)
    item = batch * T + row // c.GROUP
    low = tl.load(first + item)
    high = tl.load(last + item)
    row = item * (c.HEADS * c.GROUP) + head * c.GROUP + row % c.GROUP
    return batch, head, row, there, low, high


@triton.jit
def _borders(low, high, S, c):
    """The exact range of keys that some row sees, and its blocks: masked from `begin` to
    `plain`, seen by all rows to `tail`, masked to `end`.
    """
    sees = low < high
    least = tl.min(tl.where(sees, low, S), axis=0)
    beyond = tl.max(tl.where(sees, high, 0), axis=0)
    begin = least // c.KEYS * c.KEYS
    end = tl.maximum((beyond + c.KEYS - 1) // c.KEYS * c.KEYS, begin)
    plain = (tl.max(low, axis=0) + c.KEYS - 1) // c.KEYS * c.KEYS
    plain = tl.minimum(tl.maximum(plain, begin), end)
    tail = tl.maximum(tl.min(high, axis=0) // c.KEYS * c.KEYS, plain)
    return least, beyond, (begin, plain, tl.minimum(tail, end), end)


@triton.jit
def _forward_walk(rows, key, value, bounds, begin, end, scale, state, c, MASKED):
    """`bounds`: of each row, and of all that some row sees; `state`: of `softmax_step`."""
    low, high, least, beyond = bounds
    inside = tl.arange(0, c.KEYS)
    for block in range(begin, end, c.KEYS):
        skip = tl.cast(block, tl.int64) * c.HEADS
        keys_at, values_at = key + skip * c.WIDTH, value + skip * c.VALUE_WIDTH
        if MASKED:
            at = block + inside
            inner = (at >= least) & (at < beyond)
            keys = load_columns(keys_at, inside * c.HEADS, inner, c.WIDTH)
            values = load_rows(values_at, inside * c.HEADS, inner, c.VALUE_WIDTH)
        else:
            keys = load_all_columns(keys_at, inside * c.HEADS, c.WIDTH)
            values = load_all_rows(values_at, inside * c.HEADS, c.VALUE_WIDTH)
        logits = tl.dot(rows, keys, input_precision=c.PRECISION) * scale
        if MASKED:
            at = block + inside
            seen = (at[None, :] >= low[:, None]) & (at[None, :] < high[:, None])
            logits = tl.where(seen, logits, NEGATIVE_INFINITY)
        state = softmax_step(logits, values, state, c)
    return state


@triton.jit(do_not_specialize=["T", "S", "scale"])
def forward(
    query, key, value, first, last, gate, added, T, S, scale, out, lse, c: tl.constexpr
):
    """Programs: B * HEADS * ceil(T * GROUP / ROWS).

    Args:
      query: `[B, T, HEADS * GROUP, WIDTH]`; key, value: `[B, S, HEADS, .]`.
      first, last: int32 `[B, T]`: query `t` sees the keys `first .. last - 1`.
      gate: float32 `[B, T, H]`, read if `GATED`; added: as `out`, read if `ADDED`.
      scale: of the logits, times log2(e).
      out: `[B, T, H, VALUE_WIDTH]`: gate * O + added; lse: float32 `[B, T, H]`, natural.
    """
    batch, head, row, there, low, high = _tile(first, last, T, c)
    rows = load_rows(query, row, low < high, c.WIDTH)
    origin = batch * S * c.HEADS + head
    key += origin * c.WIDTH
    value += origin * c.VALUE_WIDTH
    least, beyond, borders = _borders(low, high, S, c)
    bounds = low, high, least, beyond
    state = softmax_start(c.ROWS, columns(c.VALUE_WIDTH))
    for part in tl.static_range(3):
        start, stop = borders[part], borders[part + 1]
        of_part = rows, key, value, bounds, start, stop, scale, state
        state = _forward_walk(*of_part, c, part != 1)
    store_attention(out, lse, gate, added, row, there, state, c)


@triton.jit
def _dq_walk(rows, do_rows, key, value, bounds, begin, end, scale, statistics, acc, c, MASKED):
    low, high, least, beyond = bounds
    inside = tl.arange(0, c.KEYS)
    for block in range(begin, end, c.KEYS):
        skip = tl.cast(block, tl.int64) * c.HEADS
        keys_at, values_at = key + skip * c.WIDTH, value + skip * c.VALUE_WIDTH
        if MASKED:
            at = block + inside
            inner = (at >= least) & (at < beyond)
            keys = load_columns(keys_at, inside * c.HEADS, inner, c.WIDTH)
            values = load_columns(values_at, inside * c.HEADS, inner, c.VALUE_WIDTH)
        else:
            keys = load_all_columns(keys_at, inside * c.HEADS, c.WIDTH)
            values = load_all_columns(values_at, inside * c.HEADS, c.VALUE_WIDTH)
        ds = logits_gradient(rows, do_rows, keys, values, statistics, scale, c)
        if MASKED:
            at = block + inside
            seen = (at[None, :] >= low[:, None]) & (at[None, :] < high[:, None])
            ds = tl.where(seen, ds, 0.0)
        acc = tl.dot(ds.to(keys.dtype), tl.trans(keys), acc, input_precision=c.PRECISION)
    return acc


@triton.jit(do_not_specialize=["T", "S", "scale", "scale_dq"])
def dq(
    query, key, value, first, last, do, lse, delta, gate, dlse, added,
    T, S, scale, scale_dq,
    out, c: tl.constexpr,
):  # fmt: skip
    """Programs and arguments as of `forward`.

    Args:
      do: `[B, T, H, VALUE_WIDTH]`, of the gated output.
      lse, delta: float32 `[B, T, H]`; gate, dlse: the same, read if `GATED`, `LSE_GRAD`.
      added: as `out`, read if `ADDED`.
      scale_dq: the scale itself.
      out: `[B, T, H, WIDTH]`: dq + added.
    """
    batch, head, row, there, low, high = _tile(first, last, T, c)
    sees = low < high
    rows = load_rows(query, row, sees, c.WIDTH)
    do_rows = load_rows(do, row, sees, c.VALUE_WIDTH)
    statistics = row_statistics(lse, delta, gate, dlse, row, sees, c)
    origin = batch * S * c.HEADS + head
    key += origin * c.WIDTH
    value += origin * c.VALUE_WIDTH
    least, beyond, borders = _borders(low, high, S, c)
    acc = tl.full([c.ROWS, columns(c.WIDTH)], 0.0, tl.float32)
    bounds = low, high, least, beyond
    for part in tl.static_range(3):
        start, stop = borders[part], borders[part + 1]
        of_part = rows, do_rows, key, value, bounds, start, stop, scale, statistics, acc
        acc = _dq_walk(*of_part, c, part != 1)
    store_dq(out, added, row, there, acc, scale_dq, c)
