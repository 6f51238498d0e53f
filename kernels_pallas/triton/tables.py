"""Tables of packed rows (`nsa_core.varlen`), bounds by kernel row and work items of intervals.

Each kernel writes what a derived step of the same name computes by some tens of array operations;
these are its test. All arrays are int32 but the borders, which may be int64.
"""

import triton
import triton.language as tl


@triton.jit
def _last_before(starts, at, inside, count, STEPS: tl.constexpr):
    """The last of `count` ascending `starts` that is not larger than `at`, or the first."""
    low = at * 0
    high = low + count - 1
    for _ in tl.static_range(STEPS):
        middle = (low + high + 1) // 2
        unknown = low < high
        before = tl.load(starts + middle, mask=inside & unknown, other=0) <= at
        low = tl.where(unknown & before, middle, low)
        high = tl.where(unknown & (before == 0), middle - 1, high)
    return low


@triton.jit
def _below(row, value, inside, count, STEPS: tl.constexpr):
    """How many of `count` ascending numbers are smaller than `value`."""
    low = value * 0
    high = low + count
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        unknown = low < high
        smaller = tl.load(row + middle, mask=inside & unknown, other=0) < value
        low = tl.where(unknown & smaller, middle + 1, low)
        high = tl.where(unknown & (smaller == 0), middle, high)
    return low


@triton.jit(do_not_specialize=["given", "count", "S", "pitch"])
def sequences(
    borders,
    out,
    given,
    count,
    S,
    pitch,
    UNIT: tl.constexpr,
    WINDOW: tl.constexpr,
    STRIDE: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Start, length, end, place and first compressed token of `count` sequences, of which the last
    is padding. One program.

    Args:
      borders: `[given]`.
      out: `[5, pitch]`.
    """
    i = tl.arange(0, ROOM)
    inside = i < count
    start = tl.load(borders + tl.minimum(i, given - 1)).to(tl.int32)
    end = tl.load(borders + tl.minimum(i + 1, given - 1)).to(tl.int32)
    start = tl.minimum(tl.maximum(start, 0), S)
    end = tl.where(i < count - 1, tl.minimum(tl.maximum(end, 0), S), S)
    keys = tl.where(inside, tl.maximum(end - start, 0), 0)
    length = tl.where(i < count - 1, keys, 0)
    units = (keys + (UNIT - 1)) // UNIT
    windows = tl.where(length >= WINDOW, (tl.maximum(length, WINDOW) - WINDOW) // STRIDE + 1, 0)
    place = (tl.cumsum(units, 0) - units) * UNIT
    window = tl.cumsum(windows, 0) - windows
    tl.store(out + i, start, mask=inside)
    tl.store(out + pitch + i, length, mask=inside)
    tl.store(out + 2 * pitch + i, end, mask=inside)
    tl.store(out + 3 * pitch + i, place, mask=inside)
    tl.store(out + 4 * pitch + i, window, mask=inside)


@triton.jit(do_not_specialize=["T", "offset", "count", "pitch"])
def tokens(
    starts,
    lengths,
    places,
    out,
    T,
    offset,
    count,
    pitch,
    BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    SIZE: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Position, first key, place and first compressed slot of the sequence of each token, the end
    of the slots that it sees, where its window begins, and the key after its own: `[7, pitch]`.

    Args:
      BLOCK, STRIDE, WINDOW: of the configuration.
    """
    t = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = t < T
    key = t + offset
    at = _last_before(starts, key, inside, count, STEPS)
    start = tl.load(starts + at, mask=inside, other=0)
    length = tl.load(lengths + at, mask=inside, other=0)
    place = tl.load(places + at, mask=inside, other=0)
    position = tl.where(key - start < length, key - start, -1)
    seen = (tl.maximum(position + 1 + STRIDE - BLOCK, 0)) // STRIDE
    slot = place // STRIDE
    end = start + position + 1
    tl.store(out + t, position, mask=inside)
    tl.store(out + pitch + t, start, mask=inside)
    tl.store(out + 2 * pitch + t, place, mask=inside)
    tl.store(out + 3 * pitch + t, slot, mask=inside)
    tl.store(out + 4 * pitch + t, slot + seen, mask=inside)
    tl.store(out + 5 * pitch + t, tl.maximum(start, end - WINDOW), mask=inside)
    tl.store(out + 6 * pitch + t, end, mask=inside)


@triton.jit(do_not_specialize=["tiles", "S", "count", "pitch"])
def key_tiles(
    starts,
    ends,
    places,
    out,
    tiles,
    S,
    count,
    pitch,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
    STEPS: tl.constexpr,
):
    """The first key of each KEYS places, and the end of its sequence: `[2, pitch]`."""
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = i < tiles
    at = _last_before(places, i * KEYS, inside, count, STEPS)
    start = tl.load(starts + at, mask=inside, other=0)
    place = tl.load(places + at, mask=inside, other=0)
    first = tl.minimum(tl.maximum(start + i * KEYS - place, 0), S)
    tl.store(out + i, first, mask=inside)
    tl.store(out + pitch + i, tl.load(ends + at, mask=inside, other=0), mask=inside)


@triton.jit(do_not_specialize=["S", "count"])
def places_of_keys(starts, places, out, S, count, SIZE: tl.constexpr, STEPS: tl.constexpr):
    """The place of each key, `[S]`."""
    key = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = key < S
    at = _last_before(starts, key, inside, count, STEPS)
    start = tl.load(starts + at, mask=inside, other=0)
    place = tl.load(places + at, mask=inside, other=0)
    tl.store(out + key, place + key - start, mask=inside)


@triton.jit(do_not_specialize=["count", "T", "offset", "pitch"])
def query_runs(
    starts, ends, out, count, T, offset, pitch, TOKENS: tl.constexpr, ROOM: tl.constexpr
):
    """Of each sequence the tiles of queries before it, its first query and the one after its last,
    `[3, pitch]`. One program.
    """
    i = tl.arange(0, ROOM)
    inside = i < count
    first = tl.load(starts + i, mask=inside, other=0) - offset
    end = tl.load(ends + i, mask=inside, other=0) - offset
    first = tl.minimum(tl.maximum(first, 0), T)
    end = tl.minimum(tl.maximum(end, 0), T)
    tiles = tl.where(inside, (tl.maximum(end - first, 0) + TOKENS - 1) // TOKENS, 0)
    tl.store(out + i, tl.cumsum(tiles, 0) - tiles, mask=inside)
    tl.store(out + pitch + i, first, mask=inside)
    tl.store(out + 2 * pitch + i, end, mask=inside)


@triton.jit(do_not_specialize=["tiles", "T", "count", "run_pitch", "pitch"])
def query_tiles(
    runs,
    out,
    tiles,
    T,
    count,
    run_pitch,
    pitch,
    TOKENS: tl.constexpr,
    SIZE: tl.constexpr,
    STEPS: tl.constexpr,
):
    """First query of each tile of one sequence, and the one after its last: `[2, pitch]`.

    Args:
      runs: of `query_runs`, `[3, run_pitch]`.
    """
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = i < tiles
    at = _last_before(runs, i, inside, count, STEPS)
    before = tl.load(runs + at, mask=inside, other=0)
    first = tl.load(runs + run_pitch + at, mask=inside, other=0) + (i - before) * TOKENS
    first = tl.minimum(tl.maximum(first, 0), T)
    end = tl.load(runs + 2 * run_pitch + at, mask=inside, other=0)
    tl.store(out + i, first, mask=inside)
    tl.store(out + pitch + i, tl.minimum(first + TOKENS, end), mask=inside)


@triton.jit(do_not_specialize=["T", "tiles"])
def candidates_of_tiles(
    firsts,
    lasts,
    positions,
    first_tokens,
    end_tokens,
    first_rows,
    last_rows,
    owns,
    bases,
    spans,
    T,
    tiles,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SCORE_ROWS: tl.constexpr,
    RATIO: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
):
    """What scores read of each tile of queries: bounds of compressed tokens by row, the own and the
    first block of each token, and how many blocks they span. A program a tile.

    Args:
      firsts, lasts, positions: of tokens, `[B, T]`.
      first_tokens, end_tokens: of tiles, `[B, tiles]`.
    """
    tile = tl.program_id(0)
    token = tile // tiles * T
    begin, end = tl.load(first_tokens + tile), tl.load(end_tokens + tile)
    i = tl.arange(0, SIZE)
    of_row = begin + tl.minimum(i, TOKENS * GROUP - 1) // GROUP
    of_row = token + tl.minimum(tl.maximum(tl.minimum(of_row, end - 1), 0), T - 1)
    inside = i < ROWS
    tl.store(first_rows + tile * ROWS + i, tl.load(firsts + of_row), mask=inside)
    tl.store(last_rows + tile * ROWS + i, tl.load(lasts + of_row), mask=inside)
    own_token = begin + tl.minimum(i, TOKENS - 1)
    near = token + tl.minimum(tl.maximum(tl.minimum(own_token, end - 1), 0), T - 1)
    position = tl.load(positions + near)
    exists = (i < TOKENS) & (own_token < end) & (position >= 0)
    own = tl.where(exists, tl.maximum(position, 0) // BLOCK, -1)
    inside = i < SCORE_ROWS
    tl.store(owns + tile * SCORE_ROWS + i, own, mask=inside)
    tl.store(bases + tile * SCORE_ROWS + i, tl.load(firsts + near) // RATIO, mask=inside)
    tl.store(spans + tile, tl.max(own, 0) + 1)


@triton.jit(do_not_specialize=["T", "tiles", "total", "pitch"])
def by_row(
    one,
    two,
    out,
    T,
    tiles,
    total,
    pitch,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """`one` and `two` `[B, T]` by the rows of a kernel's tiles, `[B, tiles, ROWS]`, which are
    `total` numbers each in a row of `out` `[2, pitch]`; rows past the end repeat the last token.
    Program axis 1: which of both.
    """
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = i < total
    row = tl.minimum(i % ROWS, TOKENS * GROUP - 1)
    tile = i // ROWS % tiles
    token = tl.minimum(tile * TOKENS + row // GROUP, T - 1)
    at = i // ROWS // tiles * T + token
    if tl.program_id(1) == 0:
        tl.store(out + i, tl.load(one + at, mask=inside, other=0), mask=inside)
    else:
        tl.store(out + pitch + i, tl.load(two + at, mask=inside, other=0), mask=inside)


@triton.jit(do_not_specialize=["T", "query_tiles", "parts"])
def interval_parts(
    firsts,
    lasts,
    out,
    T,
    query_tiles,
    parts,
    KEYS: tl.constexpr,
    TOKENS: tl.constexpr,
    SIZE: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Of each KEYS keys the query tiles that see some, and those that see all, `[B, parts, 4]`.

    Args:
      firsts, lasts: bounds of the keys that each token sees `[B, T]`, ascending.
    """
    part = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    batch = tl.program_id(1)
    inside = part < parts
    first, last = firsts + batch * T, lasts + batch * T
    key = part * KEYS
    begin = _below(last, key + 1, inside, T, STEPS)
    begin = tl.where(begin < T, begin // TOKENS, query_tiles)
    unmasked_begin = (_below(last, key + KEYS, inside, T, STEPS) + TOKENS - 1) // TOKENS
    unmasked_end = _below(first, key + 1, inside, T, STEPS) // TOKENS
    end = (_below(first, key + KEYS, inside, T, STEPS) + TOKENS - 1) // TOKENS
    at = out + (batch * parts + part) * 4
    tl.store(at, begin, mask=inside)
    tl.store(at + 1, unmasked_begin, mask=inside)
    tl.store(at + 2, unmasked_end, mask=inside)
    tl.store(at + 3, tl.maximum(begin, end), mask=inside)


@triton.jit(do_not_specialize=["tiles", "span", "partials"])
def interval_partials(
    parts,
    before,
    firsts,
    counts,
    tiles,
    span,
    partials,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Of each tile of keys its partials before it in a row, `[B, tiles]`, and by head `[B, HEADS,
    tiles]` the first, and how many. A program a batch row.

    Args:
      parts: of `interval_parts`, `[B, tiles, COLUMNS]`.
    """
    batch = tl.program_id(0)
    tile = tl.arange(0, ROOM)
    inside = tile < tiles
    at = parts + (batch * tiles + tile) * COLUMNS
    begin = tl.load(at, mask=inside, other=0)
    end = tl.maximum(begin, tl.load(at + COLUMNS - 1, mask=inside, other=0))
    count = tl.where(begin < end, (end + span - 1) // span - begin // span, 0)
    ahead = tl.cumsum(count, 0) - count
    tl.store(before + batch * tiles + tile, ahead, mask=inside)
    for head in tl.static_range(HEADS):
        row = batch * HEADS + head
        tl.store(firsts + row * tiles + tile, row * partials + ahead, mask=inside)
        tl.store(counts + row * tiles + tile, count, mask=inside)


@triton.jit(
    do_not_specialize=["T", "tiles", "span", "partials", "of_segment", "segments", "items"]
)
def interval_items(
    firsts,
    parts,
    before,
    table,
    T,
    tiles,
    span,
    partials,
    of_segment,
    segments,
    items,
    BATCH: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FIXED: tl.constexpr,
    INTS: tl.constexpr,
    STREAMS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The rows of the table of work items, `[items, INTS]` (`kernels_pallas.specs.work_items`).

    Args:
      firsts: `[B, T]`; parts, before: of `interval_parts` and `interval_partials`.
      of_segment: tiles of keys of a segment; `segments` of `span` query tiles.
      FIXED: columns before those of parts.
    """
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = i < items
    row = i % (BATCH * HEADS)
    rest = i // (BATCH * HEADS)
    if STREAMS:
        segment, n = rest % segments, rest // segments
    else:
        segment, n = segments - 1 - rest // of_segment, rest % of_segment
    batch = row // HEADS
    token = tl.minimum(tl.maximum(segment * (span * TOKENS), 0), T - 1)
    tile = tl.load(firsts + batch * T + token, mask=inside, other=0) // KEYS + n
    exists = tile < tiles
    tile = tl.minimum(tile, tiles - 1)
    of_tile = batch * tiles + tile
    at = parts + of_tile * COLUMNS
    begin = tl.load(at, mask=inside, other=0)
    end = tl.maximum(begin, tl.load(at + COLUMNS - 1, mask=inside, other=0))
    lower = tl.maximum(begin, segment * span)
    upper = tl.maximum(lower, tl.minimum(end, (segment + 1) * span))
    own = tl.where(exists & (lower < upper), row, -1)
    ahead = tl.load(before + of_tile, mask=inside, other=0)
    out = table + i * INTS
    tl.store(out, own, mask=inside)
    tl.store(out + 1, tile * KEYS, mask=inside)
    tl.store(out + 2, lower, mask=inside)
    tl.store(out + 3, lower, mask=inside)
    tl.store(out + 4, lower, mask=inside)
    tl.store(out + 5, upper, mask=inside)
    tl.store(out + 6, row * partials + ahead + segment - begin // span, mask=inside)
    for column in tl.static_range(7, INTS):
        if column >= FIXED and column < FIXED + COLUMNS:
            value = tl.load(at + (column - FIXED), mask=inside, other=0)
            value = tl.minimum(tl.maximum(value, lower), upper)
            tl.store(out + column, value, mask=inside)
        else:
            tl.store(out + column, own, mask=inside)
