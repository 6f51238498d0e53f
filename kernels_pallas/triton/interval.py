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
    load_all_columns,
    load_all_rows,
    load_columns,
    load_rows,
    logits_gradient,
    pair_of,
    row_statistics,
    softmax_step,
    store_attention,
    store_dq,
)


@triton.jit
def _tile(first, last, T, GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """The tile of this program, the longest first: batch row, head, row of `[B, T, H]`, which
    rows there are, and the interval `low .. high - 1` of each.
    """
    tiles = tl.cdiv(T * GROUP, ROWS)
    program = tl.program_id(0)
    batch, head = pair_of(program // tiles, HEADS)
    row = (tiles - 1 - program % tiles) * ROWS + tl.arange(0, ROWS)
    there = row < T * GROUP
    row = tl.minimum(row, T * GROUP - 1)
    item = batch * T + row // GROUP
    low = tl.load(first + item)
    high = tl.load(last + item)
    return batch, head, item * (HEADS * GROUP) + head * GROUP + row % GROUP, there, low, high


@triton.jit
def _borders(low, high, S, KEYS: tl.constexpr):
    """The exact range of keys that some row sees, and its blocks: masked from `begin` to
    `plain`, seen by all rows to `tail`, masked to `end`.
    """
    sees = low < high
    least = tl.min(tl.where(sees, low, S), axis=0)
    beyond = tl.max(tl.where(sees, high, 0), axis=0)
    begin = least // KEYS * KEYS
    end = tl.maximum((beyond + KEYS - 1) // KEYS * KEYS, begin)
    plain = (tl.max(low, axis=0) + KEYS - 1) // KEYS * KEYS
    plain = tl.minimum(tl.maximum(plain, begin), end)
    tail = tl.maximum(tl.min(high, axis=0) // KEYS * KEYS, plain)
    return least, beyond, begin, plain, tl.minimum(tail, end), end


@triton.jit
def _forward_walk(
    rows,
    key,
    value,
    bounds,
    begin,
    end,
    scale,
    state,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """`bounds`: of each row, and of all that some row sees; `state`: of `softmax_step`; KEY, VALUE:
    width and columns.
    """
    low, high, least, beyond = bounds
    most, total, acc = state
    inside = tl.arange(0, KEYS)
    for block in range(begin, end, KEYS):
        skip = tl.cast(block, tl.int64) * HEADS
        keys_at, values_at = key + skip * KEY[0], value + skip * VALUE[0]
        if MASKED:
            at = block + inside
            inner = (at >= least) & (at < beyond)
            keys = load_columns(keys_at, inside * HEADS, inner, KEY[0], KEY[1])
            values = load_rows(values_at, inside * HEADS, inner, VALUE[0], VALUE[1])
        else:
            keys = load_all_columns(keys_at, inside * HEADS, KEY[0], KEY[1])
            values = load_all_rows(values_at, inside * HEADS, VALUE[0], VALUE[1])
        logits = tl.dot(rows, keys, input_precision=PRECISION) * scale
        if MASKED:
            at = block + inside
            seen = (at[None, :] >= low[:, None]) & (at[None, :] < high[:, None])
            logits = tl.where(seen, logits, NEGATIVE_INFINITY)
        most, total, acc = softmax_step(logits, values, most, total, acc, PRECISION)
    return most, total, acc


@triton.jit(do_not_specialize=["T", "S", "scale"])
def forward(
    query,
    key,
    value,
    first,
    last,
    gate,
    added,
    T,
    S,
    scale,
    out,
    lse,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
):
    """Programs: B * HEADS * ceil(T * GROUP / ROWS).

    Args:
      query: `[B, T, HEADS * GROUP, WIDTH]`; key, value: `[B, S, HEADS, .]`.
      first, last: int32 `[B, T]`: query `t` sees the keys `first .. last - 1`.
      gate: float32 `[B, T, H]`, read if `GATED`; added: as `out`, read if `ADDED`.
      scale: of the logits, times log2(e).
      out: `[B, T, H, VALUE_WIDTH]`: gate * O + added; lse: float32 `[B, T, H]`, natural.
    """
    batch, head, row, there, low, high = _tile(first, last, T, GROUP, HEADS, ROWS)
    rows = load_rows(query, row, low < high, WIDTH, COLUMNS)
    key += (batch * S * HEADS + head) * WIDTH
    value += (batch * S * HEADS + head) * VALUE_WIDTH
    least, beyond, begin, plain, tail, end = _borders(low, high, S, KEYS)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE_COLUMNS], tl.float32)
    bounds = low, high, least, beyond
    KEY: tl.constexpr = (WIDTH, COLUMNS)
    VALUE: tl.constexpr = (VALUE_WIDTH, VALUE_COLUMNS)
    state = most, total, acc
    for part in tl.static_range(3):
        start = begin if part == 0 else (plain if part == 1 else tail)
        stop = plain if part == 0 else (tail if part == 1 else end)
        of_part = rows, key, value, bounds, start, stop, scale, state
        state = _forward_walk(*of_part, HEADS, KEYS, KEY, VALUE, PRECISION, part != 1)
    store_attention(
        out, lse, gate, added, row, there, state, VALUE_WIDTH, VALUE_COLUMNS, GATED, ADDED
    )


@triton.jit
def _dq_walk(
    rows,
    do_rows,
    key,
    value,
    bounds,
    begin,
    end,
    scale,
    statistics,
    acc,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    low, high, least, beyond = bounds
    lse_log2, gates, shift = statistics
    inside = tl.arange(0, KEYS)
    for block in range(begin, end, KEYS):
        skip = tl.cast(block, tl.int64) * HEADS
        keys_at, values_at = key + skip * KEY[0], value + skip * VALUE[0]
        if MASKED:
            at = block + inside
            inner = (at >= least) & (at < beyond)
            keys = load_columns(keys_at, inside * HEADS, inner, KEY[0], KEY[1])
            values = load_columns(values_at, inside * HEADS, inner, VALUE[0], VALUE[1])
        else:
            keys = load_all_columns(keys_at, inside * HEADS, KEY[0], KEY[1])
            values = load_all_columns(values_at, inside * HEADS, VALUE[0], VALUE[1])
        ds = logits_gradient(
            rows, do_rows, keys, values, lse_log2, gates, shift, scale, PRECISION
        )
        if MASKED:
            at = block + inside
            seen = (at[None, :] >= low[:, None]) & (at[None, :] < high[:, None])
            ds = tl.where(seen, ds, 0.0)
        acc = tl.dot(ds.to(keys.dtype), tl.trans(keys), acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["T", "S", "scale", "scale_dq"])
def dq(
    query,
    key,
    value,
    first,
    last,
    do,
    lse,
    delta,
    gate,
    dlse,
    added,
    T,
    S,
    scale,
    scale_dq,
    out,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    GATED: tl.constexpr,
    LSE_GRAD: tl.constexpr,
    ADDED: tl.constexpr,
):
    """Programs and arguments as of `forward`.

    Args:
      do: `[B, T, H, VALUE_WIDTH]`, of the gated output.
      lse, delta: float32 `[B, T, H]`; gate, dlse: the same, read if `GATED`, `LSE_GRAD`.
      added: as `out`, read if `ADDED`.
      scale_dq: the scale itself.
      out: `[B, T, H, WIDTH]`: dq + added.
    """
    batch, head, row, there, low, high = _tile(first, last, T, GROUP, HEADS, ROWS)
    sees = low < high
    rows = load_rows(query, row, sees, WIDTH, COLUMNS)
    do_rows = load_rows(do, row, sees, VALUE_WIDTH, VALUE_COLUMNS)
    statistics = row_statistics(lse, delta, gate, dlse, row, sees, GATED, LSE_GRAD)
    key += (batch * S * HEADS + head) * WIDTH
    value += (batch * S * HEADS + head) * VALUE_WIDTH
    least, beyond, begin, plain, tail, end = _borders(low, high, S, KEYS)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    bounds = low, high, least, beyond
    KEY: tl.constexpr = (WIDTH, COLUMNS)
    VALUE: tl.constexpr = (VALUE_WIDTH, VALUE_COLUMNS)
    for part in tl.static_range(3):
        start = begin if part == 0 else (plain if part == 1 else tail)
        stop = plain if part == 0 else (tail if part == 1 else end)
        of_part = rows, do_rows, key, value, bounds, start, stop, scale, statistics, acc
        acc = _dq_walk(*of_part, HEADS, KEYS, KEY, VALUE, PRECISION, part != 1)
    store_dq(out, added, row, there, acc, scale_dq, WIDTH, COLUMNS, ADDED)
