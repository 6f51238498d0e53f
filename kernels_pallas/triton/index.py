"""Scores of an indexer, their maximum over each block, and top-n. No score leaves the chip.

    z[t, h, j] = max of iq[t, h] . ik[r] over the rows r of block j that the query sees

A program has `TOKENS` tokens with all their heads, whose rows stay, and walks over the keys, which
all heads share, `KEYS` at a time: one product, of whose columns a thread holds many, and their
maximum. `BEST` blocks make a step of the selection. A candidate is one 64-bit integer, the bits of
its score in the order of integers before its complemented index: the greatest are the best, and of
equal scores the lower block wins. The best so far stay in registers.

`index_scores` writes z instead, where more blocks are chosen than registers hold, or blocks are few
keys, or scores are added over heads; `paged_blocks.best` chooses then.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.rows import (
    NEGATIVE_INFINITY,
    load_all_columns,
    load_columns,
    load_rows,
)

HIGHEST = tl.constexpr(2**31 - 1)  # complements an index; also the order of what is forced
NOTHING = tl.constexpr(-(2**63))


@triton.jit
def ordered(score):
    """int32 in the order of float32; zeros are equal."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & HIGHEST)


@triton.jit
def _walk(
    rows,
    key,
    at,
    begin,
    end,
    S,
    best,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    POOL: tl.constexpr,
    KEYS: tl.constexpr,
    ENTRY: tl.constexpr,
    BEST: tl.constexpr,
    NUM_INITIAL: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    PARTS: tl.constexpr = POOL // KEYS
    inside = tl.arange(0, KEYS)
    slot = tl.arange(0, BEST)
    own = tl.where(at >= 0, at // (POOL * ENTRY), -1)
    for first in range(begin, end, BEST):
        scores = tl.full([ROWS, BEST], NEGATIVE_INFINITY, tl.float32)
        for i in range(0, BEST * PARTS):
            row = first * POOL + i * KEYS + inside
            if MASKED:
                keys = load_columns(key, row, row < S, WIDTH, COLUMNS)
            else:
                keys = load_all_columns(key, row, WIDTH, COLUMNS)
            product = tl.dot(rows, keys, input_precision=PRECISION)
            if MASKED:
                seen = ((row + 1) * ENTRY)[None, :] <= at[:, None] + 1
                product = tl.where(seen, product, NEGATIVE_INFINITY)
            top = tl.max(product, axis=1)[:, None]
            scores = tl.where((slot == i // PARTS)[None, :], tl.maximum(scores, top), scores)
        block = first + slot[None, :]
        forced = (block < NUM_INITIAL) | (block > own[:, None] - NUM_LOCAL)
        order = tl.where(forced, HIGHEST, ordered(scores))
        packed = (order.to(tl.int64) << 32) | (-block + HIGHEST).to(tl.int64)
        candidate = (forced | (scores > NEGATIVE_INFINITY)) & (block <= own[:, None])
        packed = tl.where(candidate, packed, NOTHING)
        best = tl.topk(tl.reshape(tl.join(best, packed), [ROWS, 2 * BEST]), BEST)
    return best


@triton.jit(do_not_specialize=["T", "S"])
def index_blocks(
    query,
    key,
    position,
    T,
    S,
    out,
    HEADS: tl.constexpr,
    HEAD_ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    N: tl.constexpr,
    POOL: tl.constexpr,
    KEYS: tl.constexpr,
    ENTRY: tl.constexpr,
    BEST: tl.constexpr,
    NUM_INITIAL: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Programs: B * ceil(T / TOKENS).

    Args:
      query: `[B, T, HEADS, WIDTH]`; key: `[B, S, WIDTH]`, a row for each ENTRY tokens.
      position: int32 `[B, T]`, negative: padding.
      out: int32 `[B, T, HEADS, N]`.
    """
    ROWS: tl.constexpr = TOKENS * HEAD_ROWS
    tiles = tl.cdiv(T, TOKENS)
    program = tl.program_id(0)
    batch = (program // tiles).to(tl.int64)
    tile = tiles - 1 - program % tiles  # the longest first
    index = tl.arange(0, ROWS)
    token, head = tile * TOKENS + index // HEAD_ROWS, index % HEAD_ROWS
    real = (token < T) & (head < HEADS)
    item = batch * T + tl.minimum(token, T - 1)
    at = tl.load(position + item)
    at = tl.where(real, at, -1)
    place = item * HEADS + head
    rows = load_rows(query, place, real, WIDTH, COLUMNS)

    end = tl.max(at // (POOL * ENTRY) + 1, axis=0)
    end = tl.where(tl.max(at, axis=0) >= 0, end, 0)
    lowest = tl.min(tl.where(at >= 0, at, HIGHEST - 1), axis=0)
    # Up to here each query sees all keys of a block.
    plain = tl.minimum((lowest + 1) // (POOL * ENTRY), end) // BEST * BEST
    key += batch * S * WIDTH
    best = tl.full([ROWS, BEST], NOTHING, tl.int64)
    for part in tl.static_range(2):
        best = _walk(
            rows,
            key,
            at,
            0 if part == 0 else plain,
            plain if part == 0 else end,
            S,
            best,
            ROWS,
            WIDTH,
            COLUMNS,
            POOL,
            KEYS,
            ENTRY,
            BEST,
            NUM_INITIAL,
            NUM_LOCAL,
            PRECISION,
            part == 1,
        )
    rank = tl.arange(0, BEST)
    found = -(best & HIGHEST).to(tl.int32) + HIGHEST
    found = tl.where((best != NOTHING) & (rank < N)[None, :], found, HIGHEST)
    found = tl.sort(found, dim=1)
    found = tl.where(found == HIGHEST, -1, found)
    store = out + (place * N)[:, None] + rank[None, :]
    tl.store(store, found, mask=real[:, None] & (rank < N)[None, :])


@triton.jit(do_not_specialize=["T", "S", "first", "count", "blocks"])
def index_scores(
    query,
    key,
    position,
    T,
    S,
    first,
    count,
    blocks,
    out,
    HEADS: tl.constexpr,
    HEAD_ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    POOL: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    ENTRY: tl.constexpr,
    RELU: tl.constexpr,
    SUM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of the tokens `first .. first + count - 1`. Programs: B * ceil(count / TOKENS) *
    ceil(blocks * POOL / CHUNK).

    Args:
      query, key, position: as of `index_blocks`.
      out: float32 `[B, count, HEADS or 1, blocks]`; written where a key is seen.
    """
    ROWS: tl.constexpr = TOKENS * HEAD_ROWS
    MADE: tl.constexpr = KEYS // POOL
    tiles, chunks = tl.cdiv(count, TOKENS), tl.cdiv(blocks * POOL, CHUNK)
    program = tl.program_id(0)
    chunk, tile = program % chunks, program // chunks % tiles
    batch = (program // chunks // tiles).to(tl.int64)
    index = tl.arange(0, ROWS)
    local, head = tile * TOKENS + index // HEAD_ROWS, index % HEAD_ROWS
    real = (local < count) & (head < HEADS)
    item = batch * T + tl.minimum(first + local, T - 1)
    at = tl.where(real, tl.load(position + item), -1)
    rows = load_rows(query, item * HEADS + head, real, WIDTH, COLUMNS)
    seen = tl.minimum((at + 1) // ENTRY, S)
    end = tl.minimum(chunk * CHUNK + CHUNK, tl.max(seen, axis=0))
    key += batch * S * WIDTH
    inside = tl.arange(0, KEYS)
    if SUM:
        list_tokens = tile * TOKENS + tl.arange(0, TOKENS)
        here = list_tokens < count
        to = out + (batch * count + list_tokens) * blocks
        sees = tl.max(tl.reshape(seen, [TOKENS, HEAD_ROWS]), axis=1)
    else:
        here = real
        to = out + ((batch * count + local) * HEADS + head) * blocks
        sees = seen
    for begin in range(chunk * CHUNK, end, KEYS):
        row = begin + inside
        keys = load_columns(key, row, row < S, WIDTH, COLUMNS)
        scores = tl.dot(rows, keys, input_precision=PRECISION)
        if RELU:
            scores = tl.maximum(scores, 0.0)
        if SUM:  # heads that are none are rows of zeros
            scores = tl.sum(tl.reshape(scores, [TOKENS, HEAD_ROWS, KEYS]), axis=1)
        scores = tl.where(row[None, :] < sees[:, None], scores, NEGATIVE_INFINITY)
        if MADE == 1:
            scores = tl.max(scores, axis=1)[:, None]
        elif POOL > 1:
            made = tl.reshape(scores, [TOKENS if SUM else ROWS, MADE, POOL])
            scores = tl.max(made, axis=2)
        block = begin // POOL + tl.arange(0, MADE)
        written = here[:, None] & (block < blocks)[None, :]
        tl.store(to[:, None] + block[None, :], scores, mask=written)
