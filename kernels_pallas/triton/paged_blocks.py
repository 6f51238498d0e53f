"""Selects the blocks of an indexer and attends to blocks, for a few queries of rows in pages.

| kernel     | work of a program                                                             |
|------------|-------------------------------------------------------------------------------|
| `scores`   | writes the maximum score of some keys of one query, a word per block and head |
| `best`     | finds the lowest selected score of one list bit by bit, and writes the list    |
| `digits`   | finds a few more bits of the lowest selected score, for a part of a list       |
| `chosen`   | writes the selected blocks of a part, after the blocks of earlier parts       |
| `partials` | attends to `SPLIT` keys of listed blocks, for one query and key/value head    |
| `merge`    | adds the parts of one query and key/value head                                |

The lists that the kernel `best` writes are in the order of the blocks. Among equal scores, the
blocks with the lowest indices are selected. The kernels `digits` and `chosen` divide few long lists
into parts, since few programs of `best` would leave most of a GPU idle. For each part, the kernel
`digits` counts how often the bits have each value.

A split has a fixed number of keys, so the order of sums does not depend on the batch. The kernel
`scores` is bandwidth bound. The kernel `scores` reads each key of a row once from memory, since the
queries of the row read the key at about the same time. The other kernels are bound by latency.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.index import ordered
from kernels_pallas.triton.rows import (
    NEGATIVE_INFINITY,
    columns,
    dot,
    load_columns,
    load_rows,
    raised,
    softmax_start,
    softmax_step,
    store_attention,
    store_rows,
)
from kernels_pallas.triton.scores import HIGHEST

LOWEST = tl.constexpr(-(2**31))  # the sort key of a block that cannot be selected


@triton.jit
def _place_of(token, places, c):
    """Return the row and position of a token. A negative position means padding. `places` has the
    kernel arguments that determine row and position.
    """
    lengths, rows, positions, queries, most = places
    if c.RAGGED:
        return tl.load(rows + token).to(tl.int64), tl.load(positions + token)
    row = token // queries
    length = tl.minimum(tl.load(lengths + row), most)
    at = tl.where(length > 0, length - queries + token % queries, -1)
    return row.to(tl.int64), at


@triton.jit
def _entries(table, index, seen, P, PER_PAGE):
    """Return the pages of the entries `index` of a row, the indices in these pages, and a mask of
    the `seen` entries that are in an existing page.
    """
    page = tl.load(table + index // PER_PAGE, mask=seen, other=-1)
    there = (page >= 0) & (page < P)
    return tl.where(there, page, 0).to(tl.int64), index % PER_PAGE, there


@triton.jit
def scores(
    query, pages, page_table, lengths, rows, positions,
    tokens, queries, M, P, stride, most, blocks,
    out, c: tl.constexpr,
):  # fmt: skip
    """Programs: tokens * ceil(keys of a table / CHUNK).

    Args:
      query: `[tokens, HEADS, WIDTH]`.
      pages: `[P, PER_PAGE, WIDTH]`, with one key per ENTRY tokens. The stride between pages is
        `stride` keys.
      page_table: int32 `[B, M]`.
      lengths: int32 `[B]`. Each row has `queries` queries.
      rows, positions: int32 `[tokens]`, read if `RAGGED` is true.
      most: Capacity of a row's table in tokens.
      blocks: The maximum number of blocks of the tokens.
      out: float32 `[tokens, HEADS or 1, blocks]`; written if a key is seen.
    """
    program = tl.program_id(0)
    token = (
        program % tokens
    )  # the tokens of a row read the keys of the row at about the same time
    first = program // tokens * c.CHUNK
    row, at = _place_of(token, (lengths, rows, positions, queries, most), c)
    seen = (at + 1) // c.ENTRY
    head = tl.arange(0, c.ROWS)
    inside = tl.arange(0, c.KEYS)
    mine = load_rows(query, token * c.HEADS + head, head < c.HEADS, c.WIDTH)
    table = page_table + row * M
    MADE: tl.constexpr = c.KEYS // c.POOL
    LISTS: tl.constexpr = 1 if c.SUM else c.HEADS
    to = out + token.to(tl.int64) * LISTS * blocks
    for begin in range(first, tl.minimum(first + c.CHUNK, seen), c.KEYS):
        index = begin + inside
        page, at_page, there = _entries(table, index, index < seen, P, c.PER_PAGE)
        keys = load_columns(pages, page * stride + at_page, there, c.WIDTH)
        product = dot(mine, keys, c)
        if c.RELU:
            product = tl.maximum(product, 0.0)
        block = begin // c.POOL + tl.arange(0, MADE)
        if c.SUM:  # padding heads are rows of zeros
            total = tl.where(there, tl.sum(product, axis=0), NEGATIVE_INFINITY)
            if c.POOL > 1:
                total = tl.max(tl.reshape(total, [MADE, c.POOL]), axis=1)
            tl.store(to + block, total, mask=block < blocks)
        else:
            product = tl.where(there[None, :], product, NEGATIVE_INFINITY)
            if MADE == 1:
                top = tl.max(product, axis=1)[:, None]
            elif c.POOL == 1:
                top = product
            else:
                top = tl.max(tl.reshape(product, [c.ROWS, MADE, c.POOL]), axis=2)
            written = (head < c.HEADS)[:, None] & (block < blocks)[None, :]
            tl.store(to + head[:, None] * blocks + block[None, :], top, mask=written)


@triton.jit
def _count(mask):
    return tl.sum(mask.to(tl.int32), axis=0)


@triton.jit
def _order(scores, block, blocks, at, c):
    """Return int32 sort keys with the same order as the scores of the blocks, for a query at
    position `at`.
    """
    own = tl.where(at >= 0, at // (c.POOL * c.ENTRY), -1)
    written = (block < blocks) & (block * c.POOL < (at + 1) // c.ENTRY)
    score = tl.load(scores + block, mask=written, other=NEGATIVE_INFINITY)
    forced = (block < c.NUM_INITIAL) | (block > own - c.NUM_LOCAL)
    candidate = (forced | (score > NEGATIVE_INFINITY)) & (block <= own)
    return tl.where(candidate, tl.where(forced, HIGHEST, ordered(score)), LOWEST)


@triton.jit
def _write(out, count, block, better, equal, left):
    """Write the blocks that are `better` and the first `left` blocks that are `equal`, in their
    order, after the first `count` blocks of a list. Return a mask of the blocks that are written.
    """
    both = tl.cumsum(better | (equal << 16), axis=0)  # running counts of both, in one pass
    equals = both >> 16
    taken = (better > 0) | ((equal > 0) & (equals <= left))
    slot = count + (both & 0xFFFF) + tl.minimum(equals, left) - 1
    tl.store(out + slot, block, mask=taken)
    return taken


@triton.jit
def _write_empty(out, count, c):
    """Write -1 after the `count` blocks of a list."""
    rest = tl.arange(0, c.SLOTS)
    none = tl.full([c.SLOTS], -1, tl.int32)
    tl.store(out + rest, none, mask=(rest >= count) & (rest < c.N))


@triton.jit
def best(scores, lengths, rows, positions, queries, most, blocks, out, c: tl.constexpr):
    """Programs: tokens * LISTS.

    Args:
      scores: The output of the kernel `scores`, `[tokens, LISTS, blocks]`. Other arguments are as
        in the kernel `scores`.
      out: int32 `[tokens, LISTS, N]`, ascending, then -1.
    """
    program = tl.program_id(0)
    places = lengths, rows, positions, queries, most
    _, at = _place_of(program // c.LISTS, places, c)
    here = scores + program.to(tl.int64) * blocks
    everything = tl.arange(0, c.BLOCKS)
    orders = _order(here, everything, blocks, at, c)
    enough = _count(orders >= 0) >= c.N
    least = tl.where(enough, 0, LOWEST)  # the greatest sort key that at least N blocks reach
    bit = tl.full([], 2**30, tl.int32)
    for _ in range(31):
        enough = _count(orders >= least + bit) >= c.N
        least = tl.where(enough, least + bit, least)
        bit = bit >> 1
    need = c.N - _count(orders > least)

    count, left = tl.zeros([], tl.int32), need
    for first in range(0, blocks, c.PART):
        block = first + tl.arange(0, c.PART)
        order = _order(here, block, blocks, at, c)
        better = (order > least).to(tl.int32)
        equal = ((order == least) & (order > LOWEST)).to(tl.int32)
        _write(out + program * c.N, count, block, better, equal, left)
        taken = tl.minimum(tl.sum(equal, axis=0), left)
        count += tl.sum(better, axis=0) + taken
        left -= taken
    _write_empty(out + program * c.N, count, c)


@triton.jit
def _found(counts, item, need, c, VALUES):
    """Return the value of the entry with rank `need` from above in a list, and its rank among
    entries of this value. `counts` `[lists, PARTS, VALUES]` has the number of times that each
    part has each value.
    """
    PARTS: tl.constexpr = c.PARTS
    value = tl.arange(0, VALUES)
    total = tl.zeros([VALUES], tl.int32)
    for part in tl.static_range(PARTS):
        total += tl.load(counts + (item * PARTS + part) * VALUES + value)
    # The number of entries with this value or a greater one.
    reached = tl.sum(total, axis=0) - tl.cumsum(total, axis=0) + total
    last = _count(reached >= need) - 1
    return last, need - tl.sum(tl.where(value > last, total, 0), axis=0)


@triton.jit
def _part(scores, blocks, places, c):
    """Return the list of a program, its part of the list, its blocks, and their uint32 sort
    keys, which increase with the scores. A sort key of 0 means that the block cannot be selected.
    """
    program = tl.program_id(0)
    item, part = program // c.PARTS, program % c.PARTS
    _, at = _place_of(item // c.LISTS, places, c)
    block = part * c.PART + tl.arange(0, c.PART)
    here = scores + item.to(tl.int64) * blocks
    order = _order(here, block, blocks, at, c)
    return item, part, block, (order ^ LOWEST).to(tl.uint32, bitcast=True)


@triton.jit
def digits(
    scores, counts, known, lengths, rows, positions,
    queries, most, blocks,
    out, now_known, before, c: tl.constexpr,
):  # fmt: skip
    """Programs: tokens * LISTS * PARTS.

    Args:
      scores: Output of the kernel `scores`, `[tokens, LISTS, blocks]`; counts, known: `out` and
        `now_known` of the previous launch, if any, whose bits are the `BITS_BEFORE` higher
        bits. Other arguments are as in the kernel `scores`.
      out: int32 `[tokens * LISTS, PARTS, 2**BITS]`: For each value of the bits from `SHIFT` on, the
        number of blocks of a part with this value. Only blocks with the same higher bits as the
        lowest selected score are counted.
      now_known: int32 `[tokens * LISTS, 2]`: the higher bits of the lowest selected score, and the
        number of blocks with these bits that are selected.
      before: int32 `[tokens * LISTS, PARTS]`: number of blocks whose higher bits exceed the higher
        bits of the lowest selected score. The first launch does not write `before`.
    """
    places = lengths, rows, positions, queries, most
    item, part, _, order = _part(scores, blocks, places, c)
    VALUES: tl.constexpr = 2**c.BITS
    digit = ((order >> c.SHIFT) & (VALUES - 1)).to(tl.int32, bitcast=True)
    to = out + (item * c.PARTS + part) * VALUES + tl.arange(0, VALUES)
    if c.BITS_BEFORE == 0:
        tl.store(to, tl.histogram(digit, VALUES))
        if part == 0:
            tl.store(now_known + item * 2, 0)
            tl.store(now_known + item * 2 + 1, c.N)
    else:
        above, need = tl.load(known + item * 2), tl.load(known + item * 2 + 1)
        found, need = _found(counts, item, need, c, 2**c.BITS_BEFORE)
        above = (above << c.BITS_BEFORE) + found
        theirs = (order >> (c.SHIFT + c.BITS)).to(tl.int32, bitcast=True)
        tl.store(to, tl.histogram(digit, VALUES, mask=theirs == above))
        tl.store(before + item * c.PARTS + part, _count(theirs > above))
        if part == 0:
            tl.store(now_known + item * 2, above)
            tl.store(now_known + item * 2 + 1, need)


@triton.jit
def chosen(
    scores, counts, known, before, lengths, rows, positions,
    queries, most, blocks,
    out, c: tl.constexpr,
):  # fmt: skip
    """Programs: tokens * LISTS * PARTS.

    The arguments are those of the kernel `best`, and those of the last launch of the kernel
    `digits`, whose `BITS` are the lowest bits.
    """
    places = lengths, rows, positions, queries, most
    item, part, block, order = _part(scores, blocks, places, c)
    VALUES: tl.constexpr = 2**c.BITS
    above, need = tl.load(known + item * 2), tl.load(known + item * 2 + 1)
    found, need = _found(counts, item, need, c, VALUES)
    least = (above.to(tl.uint32) << c.BITS) + found.to(tl.uint32)
    count, equals = (
        tl.zeros([], tl.int32),
        tl.zeros([], tl.int32),
    )  # sums over the previous parts
    value = tl.arange(0, VALUES)
    for other in range(0, part):
        of_part = item * c.PARTS + other
        theirs = tl.load(counts + of_part * VALUES + value)
        more = tl.sum(tl.where(value > found, theirs, 0), axis=0)
        count += more + tl.load(before + of_part)
        equals += tl.load(counts + of_part * VALUES + found)
    # A least sort key of 0 means that fewer blocks can be selected than were requested. Blocks
    # with this sort key cannot be selected, so none of them is chosen.
    none = least == 0
    need = tl.where(none, 0, need)
    left = tl.maximum(need - equals, 0)
    better = (order > least).to(tl.int32)
    equal = (order == least).to(tl.int32)
    count += tl.minimum(equals, need)
    taken = _write(out + item * c.N, count, block, better, equal, left)
    if part == c.PARTS - 1:
        _write_empty(out + item * c.N, count + _count(taken), c)


@triton.jit
def partials(
    query, key, value, page_table, lengths, rows, positions, lists,
    queries, M, P, key_stride, value_stride, most, scale,
    maxima, sums, outputs, c: tl.constexpr,
):  # fmt: skip
    """Programs: tokens * PAIRS * PARTS; with `BY_PAIR` the programs of a pair are neighbours.

    A pair is a list and one key/value head that uses the list. A pair has `GROUP` query heads. A
    token has `PAIRS = max(SCOPES, HEADS)` pairs.

    Args:
      query: `[tokens, PAIRS * GROUP, WIDTH]`; key, value: `[P, PAGE, HEADS, .]`, whose pages have
        a distance of `key_stride` and `value_stride` tokens.
      lists: int32 `[tokens, SCOPES, N]`; if `TAIL` is true, the query also attends to its own block
        if that block is not complete. Other arguments are as in the kernel `scores`.
      maxima: float32 `[tokens * PAIRS * GROUP, PARTS]`.
      sums: float32 `[tokens * PAIRS * GROUP, PARTS]`.
      outputs: float32 `[tokens * PAIRS * GROUP, PARTS, VALUE_WIDTH]`.
    """
    program = tl.program_id(0)
    part, item = program % c.PARTS, program // c.PARTS
    token, pair = item // c.PAIRS, item % c.PAIRS
    if c.BY_PAIR:
        tokens = tl.num_programs(0) // (c.PAIRS * c.PARTS)
        token, pair = item % tokens, item // tokens
        item = token * c.PAIRS + pair
    row, at = _place_of(token, (lengths, rows, positions, queries, most), c)
    head = pair * c.HEADS // c.PAIRS
    mine = lists + (token.to(tl.int64) * c.SCOPES + pair * c.SCOPES // c.PAIRS) * c.N
    member = tl.arange(0, c.ROWS)
    number = item.to(tl.int64) * c.GROUP + member
    real = member < c.GROUP
    heads = load_rows(query, number, real, c.WIDTH)
    table = page_table + row * M
    inside = tl.arange(0, c.KEYS)
    state = softmax_start(c.ROWS, columns(c.VALUE_WIDTH))
    end = min(part * c.SPLIT + c.SPLIT, (c.N + c.TAIL) * c.BLOCK)
    for begin in range(part * c.SPLIT, end, c.KEYS):
        key_of_list = begin + inside
        slot = key_of_list // c.BLOCK
        block = tl.load(mine + slot, mask=slot < c.N, other=-1)
        if c.TAIL:
            own = tl.where((at + 1) % c.BLOCK == 0, -1, at // c.BLOCK)
            block = tl.where(slot == c.N, own, block)
        named = (block >= 0) & (block <= at // c.BLOCK) & (at >= 0)
        index = tl.where(named, block, 0) * c.BLOCK + key_of_list % c.BLOCK
        page, at_page, there = _entries(table, index, named & (index <= at), P, c.PAGE)
        place = (page * key_stride + at_page) * c.HEADS + head
        keys = load_columns(key, place, there, c.WIDTH)
        place = (page * value_stride + at_page) * c.HEADS + head
        values = load_rows(value, place, there, c.VALUE_WIDTH)
        logits = dot(heads, keys, c) * scale
        logits = tl.where(there[None, :], logits, NEGATIVE_INFINITY)
        state = softmax_step(logits, values, state, c)
    top, total, acc = state
    to = number * c.PARTS + part
    tl.store(maxima + to, top, mask=real)
    tl.store(sums + to, total, mask=real)
    store_rows(outputs, to, acc, real, c.VALUE_WIDTH)


@triton.jit
def merge(maxima, sums, outputs, out, lse, c: tl.constexpr):
    """Programs: tokens * PAIRS.

    Args:
      maxima, sums, outputs: Outputs of `partials`.
      out: `[tokens, PAIRS * GROUP, VALUE_WIDTH]`.
      lse: float32 `[tokens, PAIRS * GROUP]`, natural.
    """
    member = tl.arange(0, c.ROWS)
    number = tl.program_id(0).to(tl.int64) * c.GROUP + member
    real = member < c.GROUP
    top, total, acc = softmax_start(c.ROWS, columns(c.VALUE_WIDTH))
    for part in range(c.PARTS):
        at = number * c.PARTS + part
        theirs = tl.load(maxima + at, mask=real, other=NEGATIVE_INFINITY)
        larger, base = raised(top, theirs)
        less, weight = tl.exp2(top - base), tl.exp2(theirs - base)
        total = total * less + tl.load(sums + at, mask=real, other=0.0) * weight
        rows = load_rows(outputs, at, real, c.VALUE_WIDTH)
        acc = acc * less[:, None] + rows * weight[:, None]
        top = larger
    state = top, total, acc
    store_attention(out, lse, lse, out, number, real, state, c)
