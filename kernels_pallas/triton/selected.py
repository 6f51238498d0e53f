"""Computes attention of each query to its selected blocks, and dq of this attention.

The kernels are query-stationary. A tile has the `GROUP` heads of `TOKENS` adjacent tokens. If a
group fills a tile (`TOKENS` = 1), the program loops over the token's blocks. If a tile has
several tokens, the program loops over the tile's block list, and masks the rows of tokens that did
not select the current block. The traffic from L2 limits the kernels, since each tile reads the keys
and values of its blocks.

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

NONE = tl.constexpr(2**31 - 1)  # this value means no block, and is larger than every key index
KEYS_MOST = tl.constexpr(
    2**30
)  # blocks from this index on have no keys; their start may exceed 2**31


@triton.jit
def _starts(indices, key_start, item, mask, head, c):
    """Return the first key of each block that the tokens selected, `[tokens, SLOTS]`, with NONE in
    empty slots.
    """
    slot = tl.arange(0, c.SLOTS)
    at = indices + ((item * c.HEADS + head) * c.N)[:, None] + slot[None, :]
    block = tl.load(at, mask=mask[:, None] & (slot < c.N)[None, :], other=-1)
    start = tl.load(key_start + item, mask=mask, other=0)
    there = (block >= 0) & (block < KEYS_MOST // c.BLOCK)
    return tl.where(there, start[:, None] + block * c.BLOCK, NONE)


@triton.jit
def tile_block_lists(indices, position, key_start, T, starts, counts, c: tl.constexpr):
    """Write the union of the selected blocks of a tile's tokens, ascending and without duplicates.

    Programs: B * HEADS * ceil(T / TOKENS). The rank of an entry is the number of other blocks
    before the entry. Ranks are counted for one chunk of the entries at a time.

    Args:
      indices: int32 `[B, T, HEADS, N]`, -1 for no block; position, key_start: int32 `[B, T]`.
      starts: int32 `[programs, ENTRIES]`: the first key of each block.
      counts: int32 `[programs]`.
    """
    tiles = tl.cdiv(T, c.TOKENS)
    program = tl.program_id(0)
    batch, head = pair_of(program // tiles, c.HEADS)
    entry = tl.arange(0, c.ENTRIES)
    first = tl.cast(program, tl.int64) % tiles * c.TOKENS
    mine = _entries(entry, first, indices, position, key_start, batch, head, T, c)
    repeated = tl.full([c.ENTRIES], 0, tl.int32)
    for part in range(0, c.ENTRIES, c.CHUNK):
        other = part + tl.arange(0, c.CHUNK)
        theirs = _entries(other, first, indices, position, key_start, batch, head, T, c)
        same = (mine[:, None] == theirs[None, :]) & (other[None, :] < entry[:, None])
        repeated += tl.sum(same.to(tl.int32), axis=1)
    kept = (mine != NONE) & (repeated == 0)
    place = starts + tl.cast(program, tl.int64) * c.ENTRIES
    # All threads of the program read the stored entries, since the ranks need them transposed.
    tl.store(place + entry, tl.where(kept, mine, NONE))
    tl.debug_barrier()
    rank = tl.full([c.ENTRIES], 0, tl.int32)
    for part in range(0, c.ENTRIES, c.CHUNK):
        theirs = tl.load(place + part + tl.arange(0, c.CHUNK))
        before = theirs[None, :] < mine[:, None]
        rank += tl.sum(before.to(tl.int32), axis=1)
    tl.debug_barrier()
    tl.store(place + rank, mine, mask=kept)
    tl.store(counts + program, tl.sum(kept.to(tl.int32), axis=0))


@triton.jit
def _entries(entry, first, indices, position, key_start, batch, head, T, c):
    """Return the first keys of the entries `token * SLOTS + slot` of a tile. Entries without a
    block have NONE.
    """
    token, slot = entry // c.SLOTS, entry % c.SLOTS
    there = (token < c.TOKENS) & (slot < c.N) & (first + token < T)
    item = batch * T + first + token
    block = tl.load(indices + (item * c.HEADS + head) * c.N + slot, mask=there, other=-1)
    at = tl.load(position + item, mask=there, other=-1)
    start = tl.load(key_start + item, mask=there, other=0)
    there = (block >= 0) & (block < KEYS_MOST // c.BLOCK) & (at >= 0)
    return tl.where(there, start + block * c.BLOCK, NONE)


@triton.jit
def _tile(position, key_start, T, c):
    """Return the tile of this program.

    The result has the tile's index, batch row and head, the tokens of its rows, the indices of its
    rows in `[B, T, H]`, a mask of the rows that exist, and the end of the keys of each row (0 means
    no keys).
    """
    tiles = tl.cdiv(T, c.TOKENS)
    program = tl.program_id(0)
    chunk = program % c.CHUNKS
    program = program // c.CHUNKS
    batch, head = pair_of(program // tiles, c.HEADS)
    row = chunk * c.ROWS + tl.arange(0, c.ROWS)
    token = program % tiles * c.TOKENS + row // c.GROUP
    there = (row < c.TOKENS * c.GROUP) & (token < T)
    item = batch * T + token
    at = tl.load(position + item, mask=there, other=-1)
    start = tl.load(key_start + item, mask=there, other=0)
    end = tl.where(at >= 0, start + at + 1, 0)
    row = item * (c.HEADS * c.GROUP) + head * c.GROUP + row % c.GROUP
    return program, batch, head, item, row, there, end


@triton.jit
def _attend(
    rows, key, value, indices, key_start, lists, counts, at_tile, T, S, scale, c, BACK
):  # fmt: skip
    """Loop over the block list of a tile, or over the blocks of a token.

    Return the last state of the softmax (`rows.start`).
    """
    tile, batch, head, item, there, end = at_tile
    origin = batch * S * c.HEADS + head
    key += origin * c.WIDTH
    value += origin * c.VALUE_WIDTH
    beyond = tl.minimum(tl.max(end, axis=0), S)
    state = start(c, BACK)
    begin, chosen = 0, None
    if c.TOKENS == 1:
        token = batch * T + tile % T
        begin = tl.load(key_start + token)
        lists = indices + (token * c.HEADS + head) * c.N
        count = c.N
    else:
        lists += tl.cast(tile, tl.int64) * c.ENTRIES
        count = tl.load(counts + tile)
        chosen = _starts(indices, key_start, item, there, head, c)
    for i in range(count * c.PARTS):
        found = tl.load(lists + i // c.PARTS)
        if c.TOKENS == 1:
            some = (found >= 0) & (found < KEYS_MOST // c.BLOCK)
            found = tl.where(some, begin + found * c.BLOCK, NONE - c.BLOCK)
        inside = i % c.PARTS * c.KEYS + tl.arange(0, c.KEYS)
        at = found + inside  # the last of these keys may be after the block
        inner = (inside < c.BLOCK) & (at < beyond) & (at >= 0)
        skip = tl.cast(found, tl.int64) * c.HEADS
        block = load_tile(key, value, skip, inside * c.HEADS, inner, c, BACK)
        products = product(rows, block, scale, c, BACK)
        seen = inner[None, :] & (at[None, :] < end[:, None])
        # Mask the rows of tokens that did not select the block.
        if c.TOKENS > 1:
            row_mask = tl.max((chosen == found).to(tl.int32), axis=1)
            seen &= (row_mask > 0)[:, None]
        state = add(state, products, seen, block, c, BACK)
    return state


@triton.jit
def forward(
    query, key, value, indices, position, key_start, lists, counts, gate, added,
    T, S, scale,
    out, lse, c: tl.constexpr,
):  # fmt: skip
    """Compute the output and its log-sum-exp. Programs: B * HEADS * ceil(T / TOKENS) * CHUNKS.
    CHUNKS is ceil(GROUP / ROWS) or 1.

    Args:
      query, key, value, gate, added, scale, out, lse: as in `interval.forward`.
      indices: int32 `[B, T, HEADS, N]`; position, key_start: int32 `[B, T]`.
      lists, counts: Outputs of `tile_block_lists`, read if TOKENS > 1.
    """
    tile, batch, head, item, row, there, end = _tile(position, key_start, T, c)
    rows = load_rows(query, row, end > 0, c.WIDTH)
    of_tile = tile, batch, head, item, there, end
    state = _attend(
        rows, key, value, indices, key_start, lists, counts, of_tile, T, S, scale, c, False
    )  # fmt: skip
    store_attention(out, lse, gate, added, row, there, state, c)


@triton.jit
def dq(
    query, key, value, indices, position, key_start, lists, counts, do, lse, delta, gate, dlse,
    added,
    T, S, scale, scale_dq,
    out, c: tl.constexpr,
):  # fmt: skip
    """Compute dq. Programs are the same as in the kernel `forward`. do, lse, delta, gate, dlse,
    added and out are the same as in `interval.dq`.
    """
    tile, batch, head, item, row, there, end = _tile(position, key_start, T, c)
    rows = rows_back(query, do, lse, delta, gate, dlse, row, end > 0, c)
    of_tile = tile, batch, head, item, there, end
    acc = _attend(
        rows, key, value, indices, key_start, lists, counts, of_tile, T, S, scale, c, True
    )  # fmt: skip
    store_dq(out, added, row, there, acc, scale_dq, c)
