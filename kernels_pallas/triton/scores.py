"""Computes scores and selects the top n blocks of each token. No score is written to memory.

A program has `TOKENS` tokens of one key/value head and loops over the compressed keys, a few blocks
at a time. The product is transposed, `S^T = K Q^T`, so that one thread has all heads of a group in
its columns and adds them:

    p[i] = sum_g exp(scale q_g . k_i - lse_g)                                     (Eqs. 8, 10)
    score[j] = sum_c own[c] p[r j + c] + carry[c] p[r (j - 1) + c]                (Eq. 9)

In each block, `r = l'/d` compressed tokens begin. Token `c` of a block shares `own[c]` stride
blocks with the block and `carry[c]` with the next block. A block is represented by one 64-bit
integer, its candidate. A candidate has the bits of the score (which is not negative), followed by
the complemented index. The blocks with the greatest candidates are selected. If scores are equal,
the block with the lower index is selected. The best candidates so far stay sorted in registers.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.rows import (
    dot,
    in_base_2,
    load_columns,
    load_rows,
    pair_of,
)

# complements an index; it is also the value for no block, and the score of a forced block
HIGHEST = tl.constexpr(2**31 - 1)
FORCED = tl.constexpr(0x7F800000)  # the bits of infinity


@triton.jit
def pack_index(order, index):
    """Pack a sort key and an index into a candidate. The greater of two candidates has the
    greater sort key, or the lower index if the sort keys are equal.
    """
    return (order.to(tl.int64) << 32) | (-index + HIGHEST).to(tl.int64)


@triton.jit
def pack_scores(score, block, own, c):
    """Return the candidates for non-negative scores. The first and the last of the blocks `0 ..
    own` are forced.
    """
    bits = tl.where(score > 0.0, score, 0.0).to(tl.int32, bitcast=True)
    forced = (block < c.NUM_INITIAL) | (block > own - c.NUM_LOCAL)
    return pack_index(tl.where(forced, FORCED, bits), block)


@triton.jit
def unpacked(best, least, c):
    """Return the blocks of those candidates in `best` that are at least `least`, in ascending
    order, followed by -1.
    """
    rank = tl.arange(0, c.BEST)
    found = -(best & HIGHEST).to(tl.int32) + HIGHEST
    found = tl.where((best >= least) & (rank < c.N)[None, :], found, HIGHEST)
    found = tl.sort(found, dim=1)
    return tl.where(found == HIGHEST, -1, found)


@triton.jit
def best_blocks(
    query, key, lse, first, last, position, base, T, count, scale, out, c: tl.constexpr
):
    """Select the blocks with the highest scores. Programs: B * HEADS * ceil(T / TOKENS).

    Args:
      query: `[B, T, HEADS * GROUP, WIDTH]`.
      key: Compressed keys `[B, count, HEADS, WIDTH]`. A sequence begins at a multiple of RATIO.
      lse: float32 `[B, T, H]`, natural, of the compressed branch.
      first, last: int32 `[B, T]`, the interval of compressed keys to which each query attends.
      position: int32 `[B, T]`; negative positions are padding.
      base: int32 `[B, T]`: the block of `key` at which a token's sequence begins.
      scale: Scale of the logits, times log2(e).
      out: int32 `[B, T, HEADS, N]`.
    """
    tiles = tl.cdiv(T, c.TOKENS)
    program = tl.program_id(0)
    batch, head = pair_of(program // tiles, c.HEADS)
    tile = tiles - 1 - program % tiles  # the longest rows run first
    token = tile * c.TOKENS + tl.arange(0, c.TOKENS)
    item = batch * T + tl.minimum(token, T - 1)
    own = tl.load(position + item)
    own = tl.where(own >= 0, own // c.SELECT_BLOCK, -1)
    begins = tl.load(base + item)

    column = tl.arange(0, c.TOKENS * c.GROUP_COLUMNS)
    head_of = column % c.GROUP_COLUMNS
    real = head_of < c.GROUP
    item_of = batch * T + tl.minimum(tile * c.TOKENS + column // c.GROUP_COLUMNS, T - 1)
    low = tl.load(first + item_of)
    high = tl.load(last + item_of)
    sees = real & (low < high)
    row = item_of * (c.HEADS * c.GROUP) + head * c.GROUP + head_of
    rows = load_columns(query, row, sees, c.WIDTH)
    lse_log2 = in_base_2(tl.load(lse + row, mask=sees, other=float("-inf")))

    begin = tl.min(begins, axis=0)
    end = tl.max(begins + own + 1, axis=0)
    end = begin + (tl.maximum(end - begin, 0) + c.BLOCKS - 1) // c.BLOCKS * c.BLOCKS
    # Up to this key, each query that has keys attends to all keys.
    lowest = tl.max(tl.where(sees, low, 0), axis=0)
    plain = tl.min(tl.where(sees, high, count), axis=0) // c.RATIO - begin
    plain = tl.where(lowest <= begin * c.RATIO, tl.maximum(plain, 0), 0)
    plain = tl.minimum(begin + plain // c.BLOCKS * c.BLOCKS, end)

    key += (batch * count * c.HEADS + head) * c.WIDTH
    carried = tl.full([c.TOKENS], 0.0, tl.float32)
    best = tl.full([c.TOKENS, c.BEST], -1, tl.int64)
    edges = begin, plain, end
    KEYS: tl.constexpr = c.BLOCKS * c.RATIO_ROWS
    DOUBLINGS: tl.constexpr = c.DOUBLINGS
    inside = tl.arange(0, KEYS)
    phase = inside % c.RATIO_ROWS
    place = inside // c.RATIO_ROWS * c.RATIO + phase
    block = tl.arange(0, c.BLOCKS)
    member = tl.arange(0, c.RATIO_ROWS)  # `c` of the score
    weight = tl.where(member < c.RATIO, tl.minimum(-member + c.RATIO, c.COVER), 0).to(
        tl.float32
    )
    for part in tl.static_range(2):
        for chunk in range(edges[part], edges[part + 1], c.BLOCKS):
            keys_at = key + tl.cast(chunk, tl.int64) * (c.RATIO * c.HEADS * c.WIDTH)
            inner = None
            if (part == 1) or c.RATIO != c.RATIO_ROWS:
                inner = (phase < c.RATIO) & (chunk * c.RATIO + place < count)
            keys = load_rows(keys_at, place * c.HEADS, inner, c.WIDTH)
            logits = dot(keys, rows, c) * scale
            probs = tl.exp2(logits - lse_log2[None, :])
            if (part == 1) or c.RATIO != c.RATIO_ROWS:
                at = chunk * c.RATIO + place
                seen = (at[:, None] >= low[None, :]) & (at[:, None] < high[None, :])
                probs = tl.where(seen & (phase < c.RATIO)[:, None], probs, 0.0)
            probs = tl.sum(tl.reshape(probs, [KEYS, c.TOKENS, c.GROUP_COLUMNS]), axis=2)
            probs = tl.reshape(tl.trans(probs), [c.TOKENS, c.BLOCKS, c.RATIO_ROWS])
            score = tl.sum(probs * weight[None, None, :], axis=2)
            if c.COVER > 1:
                rest = tl.where(
                    member < c.RATIO, tl.maximum(member + (c.COVER - c.RATIO), 0), 0
                )
                carry = tl.sum(probs * rest.to(tl.float32)[None, None, :], axis=2)
                before = tl.maximum(block - 1, 0)[None, :]
                before += tl.full([c.TOKENS, c.BLOCKS], 0, tl.int32)
                shifted = tl.gather(carry, before, axis=1)
                score += tl.where((block == 0)[None, :], carried[:, None], shifted)
                carried = tl.sum(tl.where((block == c.BLOCKS - 1)[None, :], carry, 0.0), axis=1)
            local = chunk + block[None, :] - begins[:, None]
            packed = pack_scores(score, local, own[:, None], c)
            packed = tl.where((local >= 0) & (local <= own[:, None]), packed, -1)
            if c.BLOCKS > c.BEST:
                packed = tl.topk(packed, c.BEST)
            for doubling in tl.static_range(DOUBLINGS):
                nothing = tl.full([c.TOKENS, c.BLOCKS << doubling], -1, tl.int64)
                packed = tl.reshape(
                    tl.join(packed, nothing), [c.TOKENS, c.BLOCKS << (doubling + 1)]
                )
            both = tl.reshape(tl.join(best, packed), [c.TOKENS, 2 * c.BEST])
            best = tl.topk(both, c.BEST)
    found = unpacked(best, 0, c)
    rank = tl.arange(0, c.BEST)
    place = out + ((item * c.HEADS + head) * c.N)[:, None] + rank[None, :]
    tl.store(place, found, mask=(token < T)[:, None] & (rank < c.N)[None, :])
