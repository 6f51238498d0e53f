"""Scores and top-n: which blocks each token reads. No score leaves the chip.

A program has `TOKENS` tokens of one key/value head and walks over the compressed keys, some
blocks at a time. The product is transposed, `S^T = K Q^T`, so that the heads of a group lie
along the columns that a thread holds, where they are added:

    p[i] = sum_g exp(scale q_g . k_i - lse_g)                                     (Eqs. 8, 10)
    score[j] = sum_c own[c] p[r j + c] + carry[c] p[r (j - 1) + c]                (Eq. 9)

`r = l'/d` compressed tokens begin in a block. Token `c` of a block shares `own` sub-blocks with
it and `carry` with the next one. A candidate is one 64-bit integer, the bits of its score
(which is not negative) before its complemented index: the greatest are the best, and of equal
scores the lower block wins. The best so far stay sorted in registers.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.rows import (
    LOG2E,
    NEGATIVE_INFINITY,
    load_all_rows,
    load_columns,
    load_rows,
    pair_of,
)

HIGHEST = tl.constexpr(2**31 - 1)  # complements an index; also: no block
FORCED = tl.constexpr(0x7F800000)  # the bits of infinity


@triton.jit
def _walk(
    rows,
    key,
    lse_log2,
    low,
    high,
    base,
    own,
    begin,
    end,
    keys_end,
    scale,
    carried,
    best,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP_COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    RATIO: tl.constexpr,
    RATIO_ROWS: tl.constexpr,
    COVER: tl.constexpr,
    NUM_INITIAL: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    BEST: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    KEYS: tl.constexpr = BLOCKS * RATIO_ROWS
    inside = tl.arange(0, KEYS)
    phase = inside % RATIO_ROWS
    place = inside // RATIO_ROWS * RATIO + phase
    block = tl.arange(0, BLOCKS)
    c = tl.arange(0, RATIO_ROWS)
    weight = tl.where(c < RATIO, tl.minimum(-c + RATIO, COVER), 0).to(tl.float32)
    for first in range(begin, end, BLOCKS):
        keys_at = key + tl.cast(first, tl.int64) * (RATIO * HEADS * WIDTH)
        if MASKED or RATIO != RATIO_ROWS:
            inner = (phase < RATIO) & (first * RATIO + place < keys_end)
            keys = load_rows(keys_at, place * HEADS, inner, WIDTH, COLUMNS)
        else:
            keys = load_all_rows(keys_at, place * HEADS, WIDTH, COLUMNS)
        logits = tl.dot(keys, rows, input_precision=PRECISION) * scale
        probs = tl.exp2(logits - lse_log2[None, :])
        if MASKED or RATIO != RATIO_ROWS:
            at = first * RATIO + place
            seen = (at[:, None] >= low[None, :]) & (at[:, None] < high[None, :])
            probs = tl.where(seen & (phase < RATIO)[:, None], probs, 0.0)
        probs = tl.sum(tl.reshape(probs, [KEYS, TOKENS, GROUP_COLUMNS]), axis=2)
        probs = tl.reshape(tl.trans(probs), [TOKENS, BLOCKS, RATIO_ROWS])
        score = tl.sum(probs * weight[None, None, :], axis=2)
        if COVER > 1:
            rest = tl.where(c < RATIO, tl.maximum(c + (COVER - RATIO), 0), 0).to(tl.float32)
            carry = tl.sum(probs * rest[None, None, :], axis=2)
            before = tl.maximum(block - 1, 0)[None, :] + tl.zeros([TOKENS, BLOCKS], tl.int32)
            shifted = tl.gather(carry, before, axis=1)
            score += tl.where((block == 0)[None, :], carried[:, None], shifted)
            carried = tl.sum(tl.where((block == BLOCKS - 1)[None, :], carry, 0.0), axis=1)
        local = first + block[None, :] - base[:, None]
        bits = tl.where(score > 0.0, score, 0.0).to(tl.int32, bitcast=True)
        forced = (local < NUM_INITIAL) | (local > own[:, None] - NUM_LOCAL)
        bits = tl.where(forced, FORCED, bits)
        packed = (bits.to(tl.int64) << 32) | (-local + HIGHEST).to(tl.int64)
        packed = tl.where((local >= 0) & (local <= own[:, None]), packed, -1)
        if BLOCKS > BEST:
            packed = tl.topk(packed, BEST)
        for doubling in tl.static_range(DOUBLINGS):
            nothing = tl.full([TOKENS, BLOCKS << doubling], -1, tl.int64)
            packed = tl.reshape(tl.join(packed, nothing), [TOKENS, BLOCKS << (doubling + 1)])
        both = tl.reshape(tl.join(best, packed), [TOKENS, 2 * BEST])
        best = tl.topk(both, BEST)
    return carried, best


@triton.jit(do_not_specialize=["T", "count", "scale"])
def best_blocks(
    query,
    key,
    lse,
    first,
    last,
    position,
    base,
    T,
    count,
    scale,
    out,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
    SELECT_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP_COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    RATIO: tl.constexpr,
    RATIO_ROWS: tl.constexpr,
    COVER: tl.constexpr,
    NUM_INITIAL: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    BEST: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Programs: B * HEADS * ceil(T / TOKENS).

    Args:
      query: `[B, T, HEADS * GROUP, WIDTH]`.
      key: compressed `[B, count, HEADS, WIDTH]`; a sequence begins at a multiple of RATIO.
      lse: float32 `[B, T, H]`, natural, of the compressed branch.
      first, last: int32 `[B, T]`: which compressed keys each query sees.
      position: int32 `[B, T]`, negative: padding; base: int32 `[B, T]`: the block of `key` at
        which its sequence begins.
      out: int32 `[B, T, HEADS, N]`.
    """
    tiles = tl.cdiv(T, TOKENS)
    program = tl.program_id(0)
    batch, head = pair_of(program // tiles, HEADS)
    tile = tiles - 1 - program % tiles  # the longest first
    token = tile * TOKENS + tl.arange(0, TOKENS)
    item = batch * T + tl.minimum(token, T - 1)
    at = tl.load(position + item)
    own = tl.where(at >= 0, at // SELECT_BLOCK, -1)
    begins = tl.load(base + item)

    column = tl.arange(0, TOKENS * GROUP_COLUMNS)
    head_of = column % GROUP_COLUMNS
    real = head_of < GROUP
    item_of = batch * T + tl.minimum(tile * TOKENS + column // GROUP_COLUMNS, T - 1)
    low = tl.load(first + item_of)
    high = tl.load(last + item_of)
    sees = real & (low < high)
    row = item_of * (HEADS * GROUP) + head * GROUP + head_of
    rows = load_columns(query, row, sees, WIDTH, COLUMNS)
    natural = tl.load(lse + row, mask=sees, other=float("-inf"))
    # Of what sees nothing every probability is exp2(-inf).
    lse_log2 = tl.where(natural == NEGATIVE_INFINITY, float("inf"), natural * LOG2E)

    begin = tl.min(begins, axis=0)
    end = tl.max(begins + own + 1, axis=0)
    end = begin + (tl.maximum(end - begin, 0) + BLOCKS - 1) // BLOCKS * BLOCKS
    # Up to here each query that sees anything sees all keys.
    lowest = tl.max(tl.where(sees, low, 0), axis=0)
    plain = tl.min(tl.where(sees, high, count), axis=0) // RATIO - begin
    plain = tl.where(lowest <= begin * RATIO, tl.maximum(plain, 0), 0)
    plain = tl.minimum(begin + plain // BLOCKS * BLOCKS, end)

    key += (batch * count * HEADS + head) * WIDTH
    best = tl.full([TOKENS, BEST], -1, tl.int64)
    carried = tl.zeros([TOKENS], tl.float32)
    for part in tl.static_range(2):
        carried, best = _walk(
            rows,
            key,
            lse_log2,
            low,
            high,
            begins,
            own,
            begin if part == 0 else plain,
            plain if part == 0 else end,
            count,
            scale,
            carried,
            best,
            HEADS,
            WIDTH,
            TOKENS,
            GROUP_COLUMNS,
            BLOCKS,
            RATIO,
            RATIO_ROWS,
            COVER,
            NUM_INITIAL,
            NUM_LOCAL,
            BEST,
            DOUBLINGS,
            COLUMNS,
            PRECISION,
            part == 1,
        )
    rank = tl.arange(0, BEST)
    found = -(best & HIGHEST).to(tl.int32) + HIGHEST
    found = tl.where((best >= 0) & (rank < N)[None, :], found, HIGHEST)
    found = tl.sort(found, dim=1)
    found = tl.where(found == HIGHEST, -1, found)
    place = out + ((item * HEADS + head) * N)[:, None] + rank[None, :]
    tl.store(place, found, mask=(token < T)[:, None] & (rank < N)[None, :])
