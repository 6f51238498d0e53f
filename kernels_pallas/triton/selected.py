"""Attention of each query to its selected blocks, and its dq.

Query-stationary: a tile has the `GROUP` heads of `TOKENS` neighbouring tokens. Where a group
fills a tile (`TOKENS` = 1) the loop is over a token's blocks; else over those of the
tile's block list, and rows of other tokens are masked. What bounds it is L2: a block's keys and
values once a tile.

    S = scale Q K^T    P = exp(S - lse)    dS = P * (g dP - g delta)    dq = scale dS K
"""

import triton
import triton.language as tl

from kernels_pallas.triton.rows import (
    NEGATIVE_INFINITY,
    load_columns,
    load_rows,
    logits_gradient,
    pair_of,
    row_statistics,
    softmax_step,
    store_attention,
    store_dq,
)

NONE = tl.constexpr(2**31 - 1)  # no block: behind every key
KEYS_MOST = tl.constexpr(2**30)  # a block from there on may begin behind 2**31: it has no key


@triton.jit
def _starts(indices, key_start, item, mask, head, HEADS, N, SLOTS: tl.constexpr, BLOCK):
    """The first key of each token's blocks, `[tokens, SLOTS]`; NONE in empty slots."""
    slot = tl.arange(0, SLOTS)
    at = indices + ((item * HEADS + head) * N)[:, None] + slot[None, :]
    block = tl.load(at, mask=mask[:, None] & (slot < N)[None, :], other=-1)
    start = tl.load(key_start + item, mask=mask, other=0)
    there = (block >= 0) & (block < KEYS_MOST // BLOCK)
    return tl.where(there, start[:, None] + block * BLOCK, NONE)


@triton.jit(do_not_specialize=["T"])
def tile_block_lists(
    indices,
    position,
    key_start,
    T,
    starts,
    counts,
    HEADS: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    TOKEN_SLOTS: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The union of the blocks of a tile's tokens, ascending, without duplicates.

    Programs: B * HEADS * ceil(T / TOKENS). The rank of an entry is the number of other blocks
    before it, which is counted, a chunk of the entries at a time.

    Args:
      indices: int32 `[B, T, HEADS, N]`, -1: none; position, key_start: int32 `[B, T]`.
      starts: int32 `[programs, TOKEN_SLOTS * SLOTS]`: the first key of each block.
      counts: int32 `[programs]`.
    """
    tiles = tl.cdiv(T, TOKENS)
    program = tl.program_id(0)
    batch, head = pair_of(program // tiles, HEADS)
    ENTRIES: tl.constexpr = TOKEN_SLOTS * SLOTS
    entry = tl.arange(0, ENTRIES)
    first = tl.cast(program, tl.int64) % tiles * TOKENS
    mine = _entries(
        entry,
        first,
        indices,
        position,
        key_start,
        batch,
        head,
        T,
        HEADS,
        N,
        BLOCK,
        TOKENS,
        SLOTS,
    )
    repeated = tl.zeros([ENTRIES], tl.int32)
    for part in range(0, ENTRIES, CHUNK):
        other = part + tl.arange(0, CHUNK)
        theirs = _entries(
            other,
            first,
            indices,
            position,
            key_start,
            batch,
            head,
            T,
            HEADS,
            N,
            BLOCK,
            TOKENS,
            SLOTS,
        )
        same = (mine[:, None] == theirs[None, :]) & (other[None, :] < entry[:, None])
        repeated += tl.sum(same.to(tl.int32), axis=1)
    kept = (mine != NONE) & (repeated == 0)
    place = starts + tl.cast(program, tl.int64) * ENTRIES
    # What is kept, where all programs' threads can read it: the ranks need it transposed.
    tl.store(place + entry, tl.where(kept, mine, NONE))
    tl.debug_barrier()
    rank = tl.zeros([ENTRIES], tl.int32)
    for part in range(0, ENTRIES, CHUNK):
        theirs = tl.load(place + part + tl.arange(0, CHUNK))
        before = theirs[None, :] < mine[:, None]
        rank += tl.sum(before.to(tl.int32), axis=1)
    tl.debug_barrier()
    tl.store(place + rank, mine, mask=kept)
    tl.store(counts + program, tl.sum(kept.to(tl.int32), axis=0))


@triton.jit
def _entries(
    entry, first, indices, position, key_start, batch, head, T, HEADS, N, BLOCK, TOKENS, SLOTS
):
    """The first keys of the entries `token * SLOTS + slot` of a tile; NONE: no block."""
    token, slot = entry // SLOTS, entry % SLOTS
    there = (token < TOKENS) & (slot < N) & (first + token < T)
    item = batch * T + first + token
    block = tl.load(indices + (item * HEADS + head) * N + slot, mask=there, other=-1)
    at = tl.load(position + item, mask=there, other=-1)
    start = tl.load(key_start + item, mask=there, other=0)
    there = (block >= 0) & (block < KEYS_MOST // BLOCK) & (at >= 0)
    return tl.where(there, start + block * BLOCK, NONE)


@triton.jit
def _tile(position, key_start, T, HEADS, GROUP, TOKENS: tl.constexpr, ROWS, CHUNKS):
    """The tile of this program: batch row, head, first token and which, its rows' tokens and
    rows of `[B, T, H]`, which rows there are, and the end of what each may see; 0: nothing.
    """
    tiles = tl.cdiv(T, TOKENS)
    program = tl.program_id(0)
    chunk = program % CHUNKS
    program = program // CHUNKS
    batch, head = pair_of(program // tiles, HEADS)
    row = chunk * ROWS + tl.arange(0, ROWS)
    token = program % tiles * TOKENS + row // GROUP
    there = (row < TOKENS * GROUP) & (token < T)
    item = batch * T + token
    at = tl.load(position + item, mask=there, other=-1)
    start = tl.load(key_start + item, mask=there, other=0)
    end = tl.where(at >= 0, start + at + 1, 0)
    return (
        program,
        batch,
        head,
        item,
        item * (HEADS * GROUP) + head * GROUP + row % GROUP,
        there,
        end,
    )


@triton.jit
def _lists_of(
    place,
    arrays,
    HEADS: tl.constexpr,
    N: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Of a tile: where its sequence begins, its block list and the length of it, and where the
    blocks begin that each row chose, `[ROWS, SLOTS]`, which one token's rows do not read.
    """
    token, tile, item, there, head = place
    indices, key_start, lists, counts = arrays
    if TOKENS == 1:
        start = tl.load(key_start + token)
        lists = indices + (token * HEADS + head) * N
        count = N
        chosen = item[:, None]
    else:
        start = 0
        lists += tl.cast(tile, tl.int64) * ENTRIES
        count = tl.load(counts + tile)
        chosen = _starts(indices, key_start, item, there, head, HEADS, N, SLOTS, BLOCK)
    return start, lists, count, chosen


@triton.jit
def _block(lists, i, PARTS: tl.constexpr, BLOCK, KEYS, TOKENS: tl.constexpr, start):
    """Of step i: the first key of its block, and its keys, which may lie behind the block."""
    found = tl.load(lists + i // PARTS)
    if TOKENS == 1:
        there = (found >= 0) & (found < KEYS_MOST // BLOCK)
        found = tl.where(there, start + found * BLOCK, NONE - BLOCK)
    inside = i % PARTS * KEYS + tl.arange(0, KEYS)
    return found, inside


@triton.jit(do_not_specialize=["T", "S", "scale"])
def forward(
    query,
    key,
    value,
    indices,
    position,
    key_start,
    lists,
    counts,
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
    N: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    ENTRIES: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
):
    """Programs: B * HEADS * ceil(T / TOKENS) * CHUNKS, which is ceil(GROUP / ROWS) or 1.

    Args:
      query, key, value, gate, added, scale, out, lse: as of `interval.forward`.
      indices: int32 `[B, T, HEADS, N]`; position, key_start: int32 `[B, T]`.
      lists, counts: of `tile_block_lists`, read where TOKENS > 1.
    """
    tile, batch, head, item, row, there, end = _tile(
        position, key_start, T, HEADS, GROUP, TOKENS, ROWS, CHUNKS
    )
    rows = load_rows(query, row, end > 0, WIDTH, COLUMNS)
    key += (batch * S * HEADS + head) * WIDTH
    value += (batch * S * HEADS + head) * VALUE_WIDTH
    beyond = tl.minimum(tl.max(end, axis=0), S)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE_COLUMNS], tl.float32)
    place = batch * T + tile % T, tile, item, there, head
    arrays = indices, key_start, lists, counts
    start, lists, count, chosen = _lists_of(
        place, arrays, HEADS, N, SLOTS, BLOCK, TOKENS, ENTRIES
    )
    for i in range(count * PARTS):
        found, inside = _block(lists, i, PARTS, BLOCK, KEYS, TOKENS, start)
        at = found + inside
        inner = (inside < BLOCK) & (at < beyond) & (at >= 0)
        skip = tl.cast(found, tl.int64) * HEADS
        keys = load_columns(key + skip * WIDTH, inside * HEADS, inner, WIDTH, COLUMNS)
        values = load_rows(
            value + skip * VALUE_WIDTH, inside * HEADS, inner, VALUE_WIDTH, VALUE_COLUMNS
        )
        logits = tl.dot(rows, keys, input_precision=PRECISION) * scale
        seen = inner[None, :] & (at[None, :] < end[:, None])
        if TOKENS > 1:
            row_mask = tl.max((chosen == found).to(tl.int32), axis=1)
            seen &= (row_mask > 0)[:, None]
        logits = tl.where(seen, logits, NEGATIVE_INFINITY)
        most, total, acc = softmax_step(logits, values, most, total, acc, PRECISION)
    state = most, total, acc
    store_attention(
        out, lse, gate, added, row, there, state, VALUE_WIDTH, VALUE_COLUMNS, GATED, ADDED
    )


@triton.jit(do_not_specialize=["T", "S", "scale", "scale_dq"])
def dq(
    query,
    key,
    value,
    indices,
    position,
    key_start,
    lists,
    counts,
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
    N: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    ENTRIES: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    GATED: tl.constexpr,
    LSE_GRAD: tl.constexpr,
    ADDED: tl.constexpr,
):
    """Programs as of `forward`; do, lse, delta, gate, dlse, added, out as of `interval.dq`."""
    tile, batch, head, item, row, there, end = _tile(
        position, key_start, T, HEADS, GROUP, TOKENS, ROWS, CHUNKS
    )
    sees = end > 0
    rows = load_rows(query, row, sees, WIDTH, COLUMNS)
    do_rows = load_rows(do, row, sees, VALUE_WIDTH, VALUE_COLUMNS)
    lse_log2, gates, shift = row_statistics(lse, delta, gate, dlse, row, sees, GATED, LSE_GRAD)
    key += (batch * S * HEADS + head) * WIDTH
    value += (batch * S * HEADS + head) * VALUE_WIDTH
    beyond = tl.minimum(tl.max(end, axis=0), S)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    place = batch * T + tile % T, tile, item, there, head
    arrays = indices, key_start, lists, counts
    start, lists, count, chosen = _lists_of(
        place, arrays, HEADS, N, SLOTS, BLOCK, TOKENS, ENTRIES
    )
    for i in range(count * PARTS):
        found, inside = _block(lists, i, PARTS, BLOCK, KEYS, TOKENS, start)
        at = found + inside
        inner = (inside < BLOCK) & (at < beyond) & (at >= 0)
        skip = tl.cast(found, tl.int64) * HEADS
        keys = load_columns(key + skip * WIDTH, inside * HEADS, inner, WIDTH, COLUMNS)
        values = load_columns(
            value + skip * VALUE_WIDTH, inside * HEADS, inner, VALUE_WIDTH, VALUE_COLUMNS
        )
        ds = logits_gradient(
            rows, do_rows, keys, values, lse_log2, gates, shift, scale, PRECISION
        )
        seen = inner[None, :] & (at[None, :] < end[:, None])
        if TOKENS > 1:
            row_mask = tl.max((chosen == found).to(tl.int32), axis=1)
            seen &= (row_mask > 0)[:, None]
        ds = tl.where(seen, ds, 0.0)
        acc = tl.dot(ds.to(keys.dtype), tl.trans(keys), acc, input_precision=PRECISION)
    store_dq(out, added, row, there, acc, scale_dq, WIDTH, COLUMNS, ADDED)
