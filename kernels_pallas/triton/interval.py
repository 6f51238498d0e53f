"""Computes attention of each query to one interval of keys, and dq of this attention, for the
compressed and the sliding branch.

The kernels are query-stationary. A program has `ROWS` rows of one key/value head, and loops over
all blocks of `KEYS` keys to which any of the rows attends. A block is masked only if some row
attends to only a part of the block. Blocks begin at multiples of `KEYS` in the key array, so that a
row's sums do not depend on its tile.

    S = scale Q K^T    P = exp(S - lse)    dS = P * (g dP - g delta)    dq = scale dS K
"""

import triton
import triton.language as tl

from kernels_pallas.triton.rows import (
    add,
    load_rows,
    load_tile,
    pair_of,
    product,
    rows_back,
    start,
    store_attention,
    store_dq,
)


@triton.jit
def _tile(first, last, T, c):
    """Return the tile of this program. The longest tiles come first. The result has the batch
    row, the head, the row of `[B, T, H]`, a mask of the rows that exist, and the interval `low ..
    high - 1` of each row.
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
def _attend(rows, key, value, batch, head, low, high, S, scale, c, BACK):
    """Loop over the keys to which some row attends.

    Blocks before `plain` and from `tail` to `end` are masked. All rows attend to the blocks in
    between. Return the last state of the softmax (`rows.start`).
    """
    origin = batch * S * c.HEADS + head
    key += origin * c.WIDTH
    value += origin * c.VALUE_WIDTH
    sees = low < high
    least = tl.min(tl.where(sees, low, S), axis=0)
    beyond = tl.max(tl.where(sees, high, 0), axis=0)
    begin = least // c.KEYS * c.KEYS
    end = tl.maximum((beyond + c.KEYS - 1) // c.KEYS * c.KEYS, begin)
    plain = (tl.max(low, axis=0) + c.KEYS - 1) // c.KEYS * c.KEYS
    plain = tl.minimum(tl.maximum(plain, begin), end)
    tail = tl.maximum(tl.min(high, axis=0) // c.KEYS * c.KEYS, plain)
    edges = begin, plain, tl.minimum(tail, end), end
    state = start(c, BACK)
    inside = tl.arange(0, c.KEYS)
    for part in tl.static_range(3):
        for block in range(edges[part], edges[part + 1], c.KEYS):
            skip = tl.cast(block, tl.int64) * c.HEADS
            keys_at, values_at = key + skip * c.WIDTH, value + skip * c.VALUE_WIDTH
            at, inner, seen = block + inside, None, None
            if part != 1:
                inner = (at >= least) & (at < beyond)
            tile = load_tile(keys_at, values_at, 0, inside * c.HEADS, inner, c, BACK)
            products = product(rows, tile, scale, c, BACK)
            if part != 1:
                seen = (at[None, :] >= low[:, None]) & (at[None, :] < high[:, None])
            state = add(state, products, seen, tile, c, BACK)
    return state


@triton.jit
def forward(
    query, key, value, first, last, gate, added, T, S, scale, out, lse, c: tl.constexpr
):
    """Compute the output and its log-sum-exp. Programs: B * HEADS * ceil(T * GROUP / ROWS).

    Args:
      query: `[B, T, HEADS * GROUP, WIDTH]`; key, value: `[B, S, HEADS, .]`.
      first, last: int32 `[B, T]`: query `t` attends to the keys `first .. last - 1`.
      gate: float32 `[B, T, H]`, read if `GATED` is true.
      added: The same shape as `out`, read if `ADDED` is true.
      scale: Scale of the logits, times log2(e).
      out: `[B, T, H, VALUE_WIDTH]`: gate * O + added.
      lse: float32 `[B, T, H]`, natural.
    """
    batch, head, row, there, low, high = _tile(first, last, T, c)
    rows = load_rows(query, row, low < high, c.WIDTH)
    state = _attend(rows, key, value, batch, head, low, high, S, scale, c, False)
    store_attention(out, lse, gate, added, row, there, state, c)


@triton.jit
def dq(
    query, key, value, first, last, do, lse, delta, gate, dlse, added,
    T, S, scale, scale_dq,
    out, c: tl.constexpr,
):  # fmt: skip
    """Compute dq. Programs and arguments are the same as in the kernel `forward`.

    Args:
      do: `[B, T, H, VALUE_WIDTH]`, the gradient of the gated output.
      lse, delta: float32 `[B, T, H]`; delta is rowsum(dO * O) without the gate.
      gate, dlse: float32 `[B, T, H]`. The gate is read if `GATED` is true, and dlse, the gradient
        of lse, is read if `LSE_GRAD` is true.
      added: The same shape as `out`, read if `ADDED` is true.
      scale_dq: The scale without log2(e).
      out: `[B, T, H, WIDTH]`: dq + added.
    """
    batch, head, row, there, low, high = _tile(first, last, T, c)
    rows = rows_back(query, do, lse, delta, gate, dlse, row, low < high, c)
    acc = _attend(rows, key, value, batch, head, low, high, S, scale, c, True)
    store_dq(out, added, row, there, acc, scale_dq, c)
