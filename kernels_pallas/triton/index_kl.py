"""The divergence of an indexer's scores from an attention over listed blocks, and its gradients.

    t_j = mean over the heads of exp(scale q . k_j - lse)     p = softmax of index_scale iq . ik_j
    L   = sum_j t_j (log t_j - log p_j)                       dS_j = index_scale (p_j sum(t) - t_j)

`kl_rows` is query-stationary, a query and index head a program: its heads are the rows of one
product, so that t is a sum over them. The scores and t of all listed keys stay in registers, and
the softmax is over what is there. It writes dS and sum_j dS_j ik_j, both for a gradient of L of 1;
L2 bounds it. `index_key_partials` is key-stationary, from the query list of each block; partials
of long lists are added in their order.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.rows import (
    LOG2E,
    NEGATIVE_INFINITY,
    load_columns,
    load_rows,
    store_rows,
)


@triton.jit(do_not_specialize=["T", "S", "log2_scale", "index_scale"])
def kl_rows(
    query,
    key,
    lse,
    index_query,
    index_key,
    indices,
    position,
    T,
    S,
    log2_scale,
    index_scale,
    loss,
    index_dq,
    ds,
    INDEX_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    INDEX_WIDTH: tl.constexpr,
    INDEX_COLUMNS: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    STEPS: tl.constexpr,
    GRADIENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Programs: B * T * INDEX_HEADS.

    Args:
      query: `[B, T, INDEX_HEADS * GROUP, WIDTH]`; key: `[B, S, HEADS, WIDTH]`.
      lse: float32 `[B, T, INDEX_HEADS * GROUP]`, natural.
      index_query: `[B, T, INDEX_HEADS, INDEX_WIDTH]`; index_key: `[B, S, INDEX_WIDTH]`.
      indices: int32 `[B, T, INDEX_HEADS, N]`, negative: none; none beyond the keys.
      position: int32 `[B, T]`, negative: padding.
      loss: float32 `[B, T, INDEX_HEADS]`.
      index_dq: float32 `[B, T, INDEX_HEADS, INDEX_WIDTH]`; ds: `[B, T, INDEX_HEADS, N * BLOCK]`.
    """
    PARTS: tl.constexpr = BLOCK // KEYS
    program = tl.program_id(0)
    item = (program // INDEX_HEADS).to(tl.int64)
    head = program % INDEX_HEADS
    here = item * INDEX_HEADS + head
    batch = item // T
    at = tl.load(position + item)
    kv_head = head * HEADS // INDEX_HEADS
    r = tl.arange(0, ROWS)
    row = here * GROUP + r
    rows = load_rows(query, row, r < GROUP, WIDTH, COLUMNS)
    natural = tl.load(lse + row, mask=r < GROUP, other=NEGATIVE_INFINITY)
    # Of what sees nothing every probability is exp2(-inf).
    lse_log2 = tl.where(natural == NEGATIVE_INFINITY, float("inf"), natural * LOG2E)
    index_rows = load_rows(index_query, here + r * 0, r == 0, INDEX_WIDTH, INDEX_COLUMNS)

    inside = tl.arange(0, KEYS)
    step_of = tl.arange(0, STEPS)
    scores = tl.full([STEPS, KEYS], NEGATIVE_INFINITY, tl.float32)
    target = tl.zeros([STEPS, KEYS], tl.float32)
    for step in range(0, N * PARTS):
        block = tl.load(indices + here * N + step // PARTS)
        token = block * BLOCK + step % PARTS * KEYS + inside
        seen = (token >= 0) & (token <= at) & (token < S)
        key_row = batch * S + token
        keys = load_columns(key, key_row * HEADS + kv_head, seen, WIDTH, COLUMNS)
        logits = tl.dot(rows, keys, input_precision=PRECISION) * log2_scale
        t = tl.sum(tl.exp2(logits - lse_log2[:, None]), axis=0) * (1.0 / GROUP)
        t = tl.where(seen, t, 0.0)
        index_keys = load_columns(index_key, key_row, seen, INDEX_WIDTH, INDEX_COLUMNS)
        z = tl.sum(tl.dot(index_rows, index_keys, input_precision=PRECISION), axis=0)
        z = tl.where(seen, z * index_scale, NEGATIVE_INFINITY)
        mine = (step_of == step)[:, None]
        scores = tl.where(mine, z[None, :], scores)
        target = tl.where(mine, t[None, :], target)

    top = tl.max(tl.max(scores, axis=1), axis=0)
    top = tl.where(top == NEGATIVE_INFINITY, 0.0, top)
    weight = tl.exp(scores - top)
    total = tl.sum(tl.sum(weight, axis=1), axis=0)
    total = tl.where(total > 0, total, 1.0)
    normal = top + tl.log(total)
    known = target > 0
    apart = tl.log(tl.where(known, target, 1.0)) - tl.where(known, scores - normal, 0.0)
    apart = tl.where(known, target * apart, 0.0)
    tl.store(loss + here, tl.sum(tl.sum(apart, axis=1), axis=0))
    if GRADIENT:
        mass = tl.sum(tl.sum(target, axis=1), axis=0)
        change = (weight / total * mass - target) * index_scale
        place = ds + here * (N * BLOCK) + step_of[:, None] * KEYS + inside[None, :]
        tl.store(place, change, mask=(step_of < N * PARTS)[:, None])
        dq = tl.zeros([INDEX_COLUMNS], tl.float32)
        for step in range(0, N * PARTS):
            block = tl.load(indices + here * N + step // PARTS)
            token = block * BLOCK + step % PARTS * KEYS + inside
            seen = (token >= 0) & (token <= at) & (token < S)
            index_keys = load_columns(
                index_key, batch * S + token, seen, INDEX_WIDTH, INDEX_COLUMNS
            )
            mine = tl.sum(tl.where((step_of == step)[:, None], change, 0.0), axis=0)
            dq += tl.sum(index_keys.to(tl.float32) * mine[None, :], axis=1)
        column = tl.arange(0, INDEX_COLUMNS)
        tl.store(index_dq + here * INDEX_WIDTH + column, dq, mask=column < INDEX_WIDTH)


@triton.jit(do_not_specialize=["queries", "tiles", "items", "entries"])
def index_key_partials(
    index_query,
    ds,
    grad,
    order,
    starts,
    ends,
    tile_of,
    queries,
    tiles,
    items,
    entries,
    partials,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Programs: B * items. An item is up to SEGMENT entries of the query list of a block.

    Args:
      index_query: `[B, queries, WIDTH]`; ds: `[B, queries, N * BLOCK]`.
      grad: float32 `[B, queries]`, of the loss.
      order, starts, ends, tile_of: as of `dkv.of_blocks`, a row a batch row.
      partials: float32 `[B * items, BLOCK, WIDTH]`.
    """
    item = tl.program_id(0)
    batch, number = (item // items).to(tl.int64), item % items
    tile = tl.load(tile_of + item)
    if tile < tiles:
        before = tl.load(ends + batch * tiles + tile - 1, mask=tile > 0, other=0)
        first = tl.load(starts + batch * (tiles + 1) + tile)
        begin = first + (number - before) * SEGMENT
        end = tl.minimum(begin + SEGMENT, tl.load(starts + batch * (tiles + 1) + tile + 1))
        inside = tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK, COLUMNS], tl.float32)
        for at in range(begin, end, ROWS):
            place = at + tl.arange(0, ROWS)
            there = place < end
            entry = tl.load(order + batch * entries + place, mask=there, other=0)
            query = batch * queries + entry // N
            weight = tl.load(grad + query, mask=there, other=0.0)
            rows = load_rows(index_query, query, there, WIDTH, COLUMNS)
            change = tl.load(
                ds
                + query[None, :] * (N * BLOCK)
                + (entry % N)[None, :] * BLOCK
                + inside[:, None],
                mask=there[None, :],
                other=0.0,
            )
            rows = (rows.to(tl.float32) * weight[:, None]).to(change.dtype)
            total += tl.dot(change, rows, input_precision=PRECISION)
        row = tl.cast(item, tl.int64) * BLOCK + inside
        store_rows(partials, row, total, inside >= 0, WIDTH, COLUMNS)


@triton.jit(do_not_specialize=["S", "tiles", "items"])
def index_key_merge(
    partials,
    ends,
    S,
    tiles,
    items,
    out,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
):
    """The sum of each block's partials, in their order: `[B, S, WIDTH]`.

    Programs: B * tiles * (BLOCK / PART).

    Args:
      partials: float32 `[B * items, BLOCK, WIDTH]`; ends: int32 `[B, tiles]`.
    """
    program = tl.program_id(0)
    part = program % (BLOCK // PART)
    program = program // (BLOCK // PART)
    tile, batch = program % tiles, (program // tiles).to(tl.int64)
    begin = tl.load(ends + program - 1, mask=tile > 0, other=0)
    end = tl.load(ends + program)
    inside = part * PART + tl.arange(0, PART)
    total = tl.zeros([PART, COLUMNS], tl.float32)
    for item in range(begin, end):
        row = (batch * items + item) * BLOCK + inside
        total += load_rows(partials, row, inside >= 0, WIDTH, COLUMNS)
    at = tile * BLOCK + inside
    store_rows(out, batch * S + at, total, at < S, WIDTH, COLUMNS)
