"""Computes the tables of packed rows (`nsa_core.varlen`), the bounds of kernel rows, and the work
items of intervals, as int32 in one array `out`. The kernel `sequences` runs first. After
`sequences`, the kernel `tables` computes all sections that depend only on the output of
`sequences`. The work items of intervals need the kernel `partials` and a second launch of `tables`.

`kernels_pallas.specs.sections` describes the output of each launch. Tests compare the results with
the array operations of `nsa_core`, which give equal results.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from kernels_pallas.specs import sections as specs
from kernels_pallas.specs.tile import INTERVAL_ITEM_INTS, WORK_ITEM_INTS

INTS = tl.constexpr(specs.INTS)
MOST = tl.constexpr(specs.SECTIONS)
PART_KEYS = tl.constexpr(specs.PART_KEYS)
SIZE = tl.constexpr(specs.PROGRAM)  # entries per program
FIXED = tl.constexpr(
    WORK_ITEM_INTS
)  # number of columns of a work item before those of its parts
ITEM_INTS = tl.constexpr(INTERVAL_ITEM_INTS)


class Capacity(NamedTuple):
    """The compiled constants of `sequences` and `tables`. WIDTH and STRIDE are the sizes `l` and
    `d` of compressed tokens, and WINDOW is the window of the sliding branch. The number of slots
    per sequence is a multiple of UNIT.
    """

    WIDTH: int
    STRIDE: int
    WINDOW: int
    UNIT: int = 0
    ROOM: int = 0  # entries per program of `sequences`, at least the number of sequences


@triton.jit
def _last_before(starts, at, inside, count, steps):
    """Return the index of the last of `count` ascending `starts` that is not larger than `at`.

    If all `starts` are larger than `at`, return the index of the first.
    """
    low = at * 0
    high = low + count - 1
    for _ in range(steps):
        middle = (low + high + 1) // 2
        unknown = low < high
        before = tl.load(starts + middle, mask=inside & unknown, other=0) <= at
        low = tl.where(unknown & before, middle, low)
        high = tl.where(unknown & (before == 0), middle - 1, high)
    return low


@triton.jit
def _of_token(rows, query, inside):
    """Return the position of a query, and the first key and the first slot of its sequence.
    `rows` has the output of the kernel `sequences`, and the arguments of the kernel `tables` that
    are needed to read this output.
    """
    sequences, pitch, count, offset, half, gap, steps = rows
    key = query + offset + tl.where(query >= half, gap, 0)
    at = _last_before(sequences, key, inside, count, steps)
    start = tl.load(sequences + at, mask=inside, other=0)
    length = tl.load(sequences + pitch + at, mask=inside, other=0)
    place = tl.load(sequences + 3 * pitch + at, mask=inside, other=0)
    return tl.where(key - start < length, key - start, -1), start, place


@triton.jit
def _column(column, token, c):
    """Return a column of the table `Tokens`, computed from the result of `_of_token`."""
    position, start, place = token
    slot = place // c.STRIDE
    seen = tl.maximum(position + 1 + c.STRIDE - c.WIDTH, 0) // c.STRIDE
    end = start + position + 1
    found = tl.where(column == 0, position, start)
    found = tl.where(column == 2, place, found)
    found = tl.where(column == 3, slot, found)
    found = tl.where(column == 4, slot + seen, found)
    found = tl.where(column == 5, tl.maximum(start, end - c.WINDOW), found)
    return tl.where(column == 6, end, found)


@triton.jit
def _queries_before(key, T, half, gap):
    """Return the number of queries before a key. The index of the key counts from the key of the
    first query.
    """
    behind = tl.minimum(tl.maximum(key - half - gap, 0), T - half)
    return tl.minimum(tl.maximum(key, 0), half) + behind


@triton.jit
def _tokens_below(value, column, rows, T, token_steps, inside, c):
    """Return the number of tokens whose entry in a column is less than `value`. The column must
    not decrease.
    """
    low = value * 0
    high = low + T
    for _ in range(token_steps):
        middle = (low + high) // 2
        unknown = inside & (low < high)
        of_token = _of_token(rows, middle, unknown)
        smaller = _column(column, of_token, c) < value
        low = tl.where(unknown & smaller, middle + 1, low)
        high = tl.where(unknown & (smaller == 0), middle, high)
    return low


@triton.jit(do_not_specialize=["given", "count", "T", "offset", "half", "gap", "S", "pitch"])
def sequences(
    cu_seqlens,
    sections,
    out,
    given,
    count,
    T,
    offset,
    half,
    gap,
    S,
    pitch,
    f: tl.constexpr,
    c: tl.constexpr,
):
    """Write the positions of all sequences, and the query tiles of each sequence.

    Program 0 writes start, length, end, first slot and first compressed token of `count` sequences,
    `[5, pitch]` at the begin of `out`. The last of the `count` sequences is padding. Each other
    program handles one section, which stands for one size of query tiles. For each sequence, the
    program of a section writes the number of tiles before the sequence, its first query and the end
    of its queries, `[3, pitch]`.

    Args:
      cu_seqlens: `[given]`.
      sections: `[.., INTS]`, one row for each of the other programs.
      out, T, offset, half, gap, S, count, pitch, f: As in the kernel `tables`.
    """
    i = tl.arange(0, c.ROOM)
    inside = i < count
    start = tl.load(cu_seqlens + tl.minimum(i, given - 1)).to(tl.int32)
    end = tl.load(cu_seqlens + tl.minimum(i + 1, given - 1)).to(tl.int32)
    start = tl.minimum(tl.maximum(start, 0), S)
    end = tl.where(i < count - 1, tl.minimum(tl.maximum(end, 0), S), S)
    if tl.program_id(0) == 0:
        keys = tl.where(inside, tl.maximum(end - start, 0), 0)
        length = tl.where(i < count - 1, keys, 0)
        units = (keys + (c.UNIT - 1)) // c.UNIT
        spare = tl.maximum(length, c.WIDTH) - c.WIDTH
        windows = tl.where(length >= c.WIDTH, spare // c.STRIDE + 1, 0)
        tl.store(out + i, start, mask=inside)
        tl.store(out + pitch + i, length, mask=inside)
        tl.store(out + 2 * pitch + i, end, mask=inside)
        tl.store(out + 3 * pitch + i, (tl.cumsum(units, 0) - units) * c.UNIT, mask=inside)
        tl.store(out + 4 * pitch + i, tl.cumsum(windows, 0) - windows, mask=inside)
    else:
        section = sections + (tl.program_id(0) - 1) * INTS
        tokens = tl.load(section + f.tokens)
        runs = out + tl.load(section + f.runs_at)
        first = _queries_before(start - offset, T, half, gap)
        last = _queries_before(end - offset, T, half, gap)
        tiles = tl.where(inside, (tl.maximum(last - first, 0) + tokens - 1) // tokens, 0)
        tl.store(runs + i, tl.cumsum(tiles, 0) - tiles, mask=inside)
        tl.store(runs + pitch + i, first, mask=inside)
        tl.store(runs + 2 * pitch + i, last, mask=inside)


@triton.jit(
    do_not_specialize=["T", "offset", "half", "gap", "S", "count", "pitch"]
    + ["token_steps", "steps"]
)
def tables(
    sections,
    out,
    T,
    offset,
    half,
    gap,
    S,
    count,
    pitch,
    token_steps,
    steps,
    f: tl.constexpr,
    k: tl.constexpr,
    c: tl.constexpr,
):
    """Compute the entries of one section.

    Args:
      sections: `[MOST, INTS]`.
      out: The output of `sequences`, followed by the output of this launch.
      T: Number of queries per row.
      S: Number of keys per row.
      offset: Query t has the index `t + offset` in the key array if t is less than `half`.
      half: Query t has the index `t + offset + gap` if t is at least `half`.
      gap: Number of keys between the halves of the queries.
      count: Number of sequences.
      pitch: Stride between rows of the output of `sequences`.
      f: `AT` of `specs.sections`.
      k: `KINDS` of `specs.sections`.
      token_steps: Number of steps of a search among tokens.
      steps: Number of steps of a search among sequences.
    """
    rows_of = out, pitch, count, offset, half, gap, steps
    program = tl.program_id(0)
    begins = tl.load(sections + tl.arange(0, MOST) * INTS + f.begin)
    section = sections + (tl.sum((begins <= program).to(tl.int32), 0) - 1) * INTS
    kind = tl.load(section + f.kind)
    i = (program - tl.load(section + f.begin)) * SIZE + tl.arange(0, SIZE)
    inside = i < tl.load(section + f.total)
    at = out + tl.load(section + f.out) + i
    second = at + tl.load(section + f.pitch)
    tokens = tl.load(section + f.tokens)
    first = tl.load(section + f.first)
    last = tl.load(section + f.last)
    if kind <= k.candidate_spans:
        group = tl.load(section + f.group)
        rows = tl.load(section + f.rows)
        tile, row = i // rows, i % rows
        begin = tile * tokens
        end = begin * 0 + T
        if kind >= k.candidate_rows:  # tiles that each belong to one sequence
            runs = out + tl.load(section + f.runs_at)
            at_run = _last_before(runs, tile, inside, count, steps)
            before = tl.load(runs + at_run, mask=inside, other=0)
            begin = tl.load(runs + pitch + at_run, mask=inside, other=0)
            begin = tl.minimum(tl.maximum(begin + (tile - before) * tokens, 0), T)
            end = tl.load(runs + 2 * pitch + at_run, mask=inside, other=0)
            end = tl.minimum(begin + tokens, end)
        token = begin + tl.minimum(row, tokens * group - 1) // group
        token = tl.where(kind == k.candidate_spans, end - 1, token)
        near = tl.minimum(tl.maximum(tl.minimum(token, end - 1), 0), T - 1)
        of_token = _of_token(rows_of, near, inside)
        position, start, place = of_token
        if kind == k.tokens:
            for column in tl.static_range(7):
                found = _column(column, of_token, c)
                tl.store(at + column * tl.load(section + f.pitch), found, mask=inside)
        elif kind == k.query_tiles:
            tl.store(at, begin, mask=inside)
            tl.store(second, end, mask=inside)
        elif kind <= k.candidate_rows:
            found = _column(first, of_token, c)
            tl.store(at, found, mask=inside)
            found = _column(last, of_token, c)
            tl.store(second, found, mask=inside & (last >= 0))
        else:
            block = tl.load(section + f.block)
            exists = (row < tokens) & (begin <= token) & (token < end) & (position >= 0)
            own = tl.where(exists, tl.maximum(position, 0) // block, -1)
            if kind == k.candidate_tokens:
                tl.store(at, own, mask=inside)
                base = place // c.STRIDE // tl.load(section + f.ratio)
                tl.store(second, base, mask=inside)
            else:
                tl.store(at, own + 1, mask=inside)
    elif kind <= k.places_of_keys:
        of_tiles = kind == k.key_tiles
        key = tl.where(of_tiles, i * PART_KEYS, i)
        starts = out + tl.where(of_tiles, 3 * pitch, 0)
        sequence = _last_before(starts, key, inside, count, steps)
        start = tl.load(out + sequence, mask=inside, other=0)
        place = tl.load(out + 3 * pitch + sequence, mask=inside, other=0)
        end = tl.load(out + 2 * pitch + sequence, mask=inside, other=0)
        of_tile = tl.minimum(tl.maximum(start + key - place, 0), S)
        tl.store(at, tl.where(of_tiles, of_tile, place + key - start), mask=inside)
        tl.store(second, end, mask=inside & of_tiles)
    elif kind == k.parts:
        query_tiles = tl.load(section + f.query_tiles)
        at = out + tl.load(section + f.out) + i * 4
        begin = i * 0
        for number in range(4):
            key = i * PART_KEYS + tl.where(number % 2 == 0, 1, PART_KEYS)
            column = tl.where(number < 2, last, first)
            token = _tokens_below(key, column, rows_of, T, token_steps, inside, c)
            tile = tl.where(number % 2 == 0, token, token + tokens - 1) // tokens
            # A tile after all visible keys has no queries. Without this condition `begin` could
            # be the last query tile.
            tile = tl.where((number == 0) & (token >= T), query_tiles, tile)
            begin = tl.where(number == 0, tile, begin)
            tl.store(
                at + number, tl.where(number == 3, tl.maximum(begin, tile), tile), mask=inside
            )
    else:
        heads = tl.load(section + f.heads)
        segments = tl.load(section + f.segments)
        span = tl.load(section + f.span)
        tiles = tl.load(section + f.tiles)
        keys = tl.load(section + f.keys)
        columns = tl.load(section + f.columns)
        in_order = tl.load(section + f.streams) != 0
        segment_tiles = tl.load(section + f.segment_tiles)
        row, rest = i % heads, i // heads
        segment = tl.where(in_order, rest % segments, segments - 1 - rest // segment_tiles)
        n = tl.where(in_order, rest // segments, rest % segment_tiles)
        token = tl.minimum(tl.maximum(segment * (span * tokens), 0), T - 1)
        of_token = _of_token(rows_of, token, inside)
        tile = _column(first, of_token, c) // keys + n
        exists = tile < tiles
        tile = tl.minimum(tile, tiles - 1)
        part = out + tl.load(section + f.parts_at) + tile * columns
        begin = tl.load(part, mask=inside, other=0)
        end = tl.maximum(begin, tl.load(part + columns - 1, mask=inside, other=0))
        lower = tl.maximum(begin, segment * span)
        upper = tl.maximum(lower, tl.minimum(end, (segment + 1) * span))
        own = tl.where(exists & (lower < upper), row, -1)
        ahead = tl.load(out + tl.load(section + f.before_at) + tile, mask=inside, other=0)
        at = out + tl.load(section + f.out) + i * ITEM_INTS
        tl.store(at, own, mask=inside)
        tl.store(at + 1, tile * keys, mask=inside)
        tl.store(at + 2, lower, mask=inside)
        tl.store(at + 3, lower, mask=inside)
        tl.store(at + 4, lower, mask=inside)
        tl.store(at + 5, upper, mask=inside)
        partial = row * tl.load(section + f.partials) + ahead + segment - begin // span
        tl.store(at + 6, partial, mask=inside)
        for column in range(7, ITEM_INTS):
            of_part = (column >= FIXED) & (column < FIXED + columns)
            value = tl.load(part + (column - FIXED), mask=inside & of_part, other=0)
            value = tl.minimum(tl.maximum(value, lower), upper)
            tl.store(at + column, tl.where(of_part, value, own), mask=inside)


@triton.jit
def partials(sections, out, f: tl.constexpr, ROOM: tl.constexpr):
    """For each tile of keys of an interval, compute the number of partials before the tile.

    For each head, also compute the first partial and the number of partials. Each program has one
    section.
    """
    section = sections + tl.program_id(0) * INTS
    tile = tl.arange(0, ROOM)
    tiles = tl.load(section + f.tiles)
    inside = tile < tiles
    columns = tl.load(section + f.columns)
    span = tl.load(section + f.span)
    part = out + tl.load(section + f.parts_at) + tile * columns
    begin = tl.load(part, mask=inside, other=0)
    end = tl.maximum(begin, tl.load(part + columns - 1, mask=inside, other=0))
    count = tl.where(begin < end, (end + span - 1) // span - begin // span, 0)
    ahead = tl.cumsum(count, 0) - count
    tl.store(out + tl.load(section + f.before_at) + tile, ahead, mask=inside)
    firsts = out + tl.load(section + f.firsts_at) + tile
    counts = out + tl.load(section + f.counts_at) + tile
    of_head = tl.load(section + f.partials)
    for head in range(tl.load(section + f.heads)):
        tl.store(firsts + head * tiles, head * of_head + ahead, mask=inside)
        tl.store(counts + head * tiles, count, mask=inside)
