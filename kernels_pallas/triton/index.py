"""Computes the scores of an indexer, their maximum over each block, and the top n blocks.

The kernel `index_blocks` writes no scores to memory.

    z[t, h, j] = max of iq[t, h] . ik[r] over the visible rows r of block j

A program has the rows of `TOKENS` tokens with all their heads. A program of `index_blocks` loops
over the keys, which all heads share, `KEYS` at a time. Each step computes one product, with many
columns per thread, and the maxima of the product. The selection processes `BEST` blocks per step. A
block is represented by one 64-bit integer, its candidate. A candidate has the bits of the score in
the order of integers, followed by the complemented index. The blocks with the greatest candidates
are selected. If scores are equal, the block with the lower index is selected. The best candidates
so far stay in registers.

`index_scores` writes z to memory if more blocks are selected than registers hold, if blocks have
few keys, or if scores are added over heads. After `index_scores`, `paged_blocks.best` selects the
blocks.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.rows import NEGATIVE_INFINITY, dot, load_columns, load_rows
from kernels_pallas.triton.scores import HIGHEST, pack_index, unpacked

NOTHING = tl.constexpr(-(2**63))


@triton.jit
def ordered(score):
    """Convert float32 to int32 with the same order. The two zeros, 0 and -0, become equal."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & HIGHEST)


@triton.jit
def index_blocks(query, key, position, T, S, out, c: tl.constexpr):
    """Select the blocks with the highest scores. Programs: B * ceil(T / TOKENS).

    Args:
      query: `[B, T, HEADS, WIDTH]`.
      key: `[B, S, WIDTH]`, with one row per ENTRY tokens.
      position: int32 `[B, T]`; negative positions are padding.
      out: int32 `[B, T, HEADS, N]`.
    """
    tiles = tl.cdiv(T, c.TOKENS)
    program = tl.program_id(0)
    batch = (program // tiles).to(tl.int64)
    tile = tiles - 1 - program % tiles  # the longest rows run first
    index = tl.arange(0, c.ROWS)
    token, head = tile * c.TOKENS + index // c.HEAD_ROWS, index % c.HEAD_ROWS
    real = (token < T) & (head < c.HEADS)
    item = batch * T + tl.minimum(token, T - 1)
    at = tl.load(position + item)
    at = tl.where(real, at, -1)
    place = item * c.HEADS + head
    rows = load_rows(query, place, real, c.WIDTH)

    end = tl.max(at // (c.POOL * c.ENTRY) + 1, axis=0)
    end = tl.where(tl.max(at, axis=0) >= 0, end, 0)
    lowest = tl.min(tl.where(at >= 0, at, HIGHEST - 1), axis=0)
    # Up to this key, each query attends to all keys of a block.
    plain = tl.minimum((lowest + 1) // (c.POOL * c.ENTRY), end) // c.BEST * c.BEST
    key += batch * S * c.WIDTH
    best = tl.full([c.ROWS, c.BEST], NOTHING, tl.int64)
    edges = 0, plain, end
    PARTS: tl.constexpr = c.POOL // c.KEYS
    inside = tl.arange(0, c.KEYS)
    slot = tl.arange(0, c.BEST)
    own = tl.where(at >= 0, at // (c.POOL * c.ENTRY), -1)
    for part in tl.static_range(2):
        for first in range(edges[part], edges[part + 1], c.BEST):
            scores = tl.full([c.ROWS, c.BEST], NEGATIVE_INFINITY, tl.float32)
            for i in range(0, c.BEST * PARTS):
                row = first * c.POOL + i * c.KEYS + inside
                keys = load_columns(key, row, row < S if part == 1 else None, c.WIDTH)
                product = dot(rows, keys, c)
                if part == 1:
                    seen = ((row + 1) * c.ENTRY)[None, :] <= at[:, None] + 1
                    product = tl.where(seen, product, NEGATIVE_INFINITY)
                top = tl.max(product, axis=1)[:, None]
                scores = tl.where(
                    (slot == i // PARTS)[None, :], tl.maximum(scores, top), scores
                )
            block = first + slot[None, :]
            forced = (block < c.NUM_INITIAL) | (block > own[:, None] - c.NUM_LOCAL)
            packed = pack_index(tl.where(forced, HIGHEST, ordered(scores)), block)
            candidate = (forced | (scores > NEGATIVE_INFINITY)) & (block <= own[:, None])
            packed = tl.where(candidate, packed, NOTHING)
            best = tl.topk(tl.reshape(tl.join(best, packed), [c.ROWS, 2 * c.BEST]), c.BEST)
    found = unpacked(best, NOTHING + 1, c)
    rank = tl.arange(0, c.BEST)
    store = out + (place * c.N)[:, None] + rank[None, :]
    tl.store(store, found, mask=real[:, None] & (rank < c.N)[None, :])


@triton.jit
def index_scores(query, key, position, T, S, first, count, blocks, out, c: tl.constexpr):
    """Compute the scores of the tokens `first .. first + count - 1`. Programs: B * ceil(count /
    TOKENS) * ceil(blocks * POOL / CHUNK).

    Args:
      query, key, position: As in `index_blocks`.
      out: float32 `[B, count, HEADS or 1, blocks]`. Scores of blocks without visible keys are -inf
        or not written.
    """
    MADE: tl.constexpr = c.KEYS // c.POOL
    tiles, chunks = tl.cdiv(count, c.TOKENS), tl.cdiv(blocks * c.POOL, c.CHUNK)
    program = tl.program_id(0)
    chunk, tile = program % chunks, program // chunks % tiles
    batch = (program // chunks // tiles).to(tl.int64)
    index = tl.arange(0, c.ROWS)
    local, head = tile * c.TOKENS + index // c.HEAD_ROWS, index % c.HEAD_ROWS
    real = (local < count) & (head < c.HEADS)
    item = batch * T + tl.minimum(first + local, T - 1)
    at = tl.where(real, tl.load(position + item), -1)
    rows = load_rows(query, item * c.HEADS + head, real, c.WIDTH)
    seen = tl.minimum((at + 1) // c.ENTRY, S)
    end = tl.minimum(chunk * c.CHUNK + c.CHUNK, tl.max(seen, axis=0))
    key += batch * S * c.WIDTH
    inside = tl.arange(0, c.KEYS)
    if c.SUM:
        list_tokens = tile * c.TOKENS + tl.arange(0, c.TOKENS)
        here = list_tokens < count
        to = out + (batch * count + list_tokens) * blocks
        sees = tl.max(tl.reshape(seen, [c.TOKENS, c.HEAD_ROWS]), axis=1)
    else:
        here = real
        to = out + ((batch * count + local) * c.HEADS + head) * blocks
        sees = seen
    for begin in range(chunk * c.CHUNK, end, c.KEYS):
        row = begin + inside
        keys = load_columns(key, row, row < S, c.WIDTH)
        scores = dot(rows, keys, c)
        if c.RELU:
            scores = tl.maximum(scores, 0.0)
        if c.SUM:  # padding heads are rows of zeros
            scores = tl.sum(tl.reshape(scores, [c.TOKENS, c.HEAD_ROWS, c.KEYS]), axis=1)
        scores = tl.where(row[None, :] < sees[:, None], scores, NEGATIVE_INFINITY)
        if MADE == 1:
            scores = tl.max(scores, axis=1)[:, None]
        elif c.POOL > 1:
            made = tl.reshape(scores, [c.TOKENS if c.SUM else c.ROWS, MADE, c.POOL])
            scores = tl.max(made, axis=2)
        block = begin // c.POOL + tl.arange(0, MADE)
        written = here[:, None] & (block < blocks)[None, :]
        tl.store(to[:, None] + block[None, :], scores, mask=written)
