"""Runs a decode step over a paged cache in two launches, for all branches and a few queries per
row.

In the launch `partials`, a program has one row, one key/value head, and one split of the compressed
keys or of the window. A program of the launch `partials` stores the logits of the compressed keys
for the scores, and the maximum, the sum and the unnormalised output of the split. In the launch
`finish`, a program has one query of one key/value head, and one part of the query's selected
blocks. A program of the launch `finish` scores all blocks, selects the best blocks, attends to the
blocks of its part and adds the outputs of some splits. The last program of a query and key/value
head adds up the parts.

The kernels use split-K. A split has a fixed number of keys, so the order of sums depends only on
the length of a row, and not on the batch or the page table. The step is bandwidth bound. Compressed
keys and values, and the keys and values of the window, are read once per row and tile of `ROWS`
query rows. Keys and values of selected blocks are read once per query.

    m_s = max S    l_s = sum exp2(S - m_s)    O_s = exp2(S - m_s) V       of split s
    m = max m_s    lse = m + log2(sum l_s exp2(m_s - m))    O = sum exp2(m_s - lse) O_s
"""

import triton
import triton.language as tl

from kernels_pallas.triton.rows import (
    NEGATIVE_INFINITY,
    columns,
    dot,
    load_columns,
    load_rows,
    pair_of,
    raised,
    softmax_start,
    softmax_step,
    store_rows,
)
from kernels_pallas.triton.scores import HIGHEST, pack_scores

MERGED = tl.constexpr(8)  # number of splits whose statistics are read at a time


@triton.jit
def entry_place(table, entry, mask, P, PER_PAGE):
    """Return the indices of a row's entries in the pool, if all pages are counted as one array."""
    page = tl.load(table + entry // PER_PAGE, mask=mask, other=0)
    page = tl.minimum(tl.maximum(page, 0), P - 1).to(tl.int64)
    return page * PER_PAGE + entry % PER_PAGE


@triton.jit
def _row_of(lengths, batch, M, c):
    """Return the number of tokens of a row, and the position of its first query. The position
    is negative if the row is unused.
    """
    length = tl.minimum(tl.load(lengths + batch), M * c.PAGE)
    return length, tl.where(length > 0, length - c.QUERIES, -c.QUERIES)


@triton.jit
def _complete(position, c):
    """Return the number of compressed tokens to which a query attends."""
    complete = tl.maximum(position - c.COMPRESS_BLOCK + 1, -c.COMPRESS_STRIDE)
    return (complete + c.COMPRESS_STRIDE) // c.COMPRESS_STRIDE


@triton.jit
def _scales(scale, place, head, mask, c, PER_PAGE):
    """Load the scales of tokens of one head, from `[P, HEADS, PER_PAGE]`."""
    at = (place // PER_PAGE * c.HEADS + head) * PER_PAGE + place % PER_PAGE
    return tl.load(scale + at, mask=mask, other=0.0)


@triton.jit
def _logits(rows, arrays, place, head, mask, scale, c, PER_PAGE, FP8_KEYS):
    """Return the base-2 logits and the value vectors of the entries at `place`.

    Keys and values may have scales.

    Args:
      arrays: Keys and values, and the scales of both.
    """
    key, value, key_scale, value_scale = arrays
    at = place * c.HEADS + head
    keys = load_columns(key, at, mask, c.WIDTH)
    if FP8_KEYS:
        keys = keys.to(rows.dtype)
    values = load_rows(value, at, mask, c.VALUE_WIDTH)
    if c.FP8:
        scales = _scales(value_scale, place, head, mask, c, PER_PAGE)
        values = (values.to(tl.float32) * scales[:, None]).to(rows.dtype)
    logits = dot(rows, keys, c) * scale
    if FP8_KEYS:
        logits *= _scales(key_scale, place, head, mask, c, PER_PAGE)[None, :]
    return logits, values


@triton.jit
def _over_split(
    arrays, bounds, rows, table, head, P, scale, logits_at, row_mask, c, PER_PAGE, FIRST_SLOT,
    KEPT, FP8_KEYS,
):  # fmt: skip
    """Compute attention of the rows to the entries `begin .. end - 1`.

    Each row attends only to the entries `low .. high - 1`.
    """
    low, high, begin, end = bounds
    state = softmax_start(c.ROWS, columns(c.VALUE_WIDTH))
    for block in range(begin, end, c.KEYS):
        at = block + tl.arange(0, c.KEYS)
        inner = at < end
        place = entry_place(table, at + FIRST_SLOT, inner, P, PER_PAGE)
        of_block = rows, arrays, place, head, inner, scale
        logits, values = _logits(*of_block, c, PER_PAGE, FP8_KEYS)
        seen = (at[None, :] >= low[:, None]) & (at[None, :] < high[:, None])
        logits = tl.where(seen & inner[None, :], logits, NEGATIVE_INFINITY)
        if KEPT:
            mask = row_mask[:, None] & inner[None, :]
            tl.store(logits_at[:, None] + at[None, :], logits, mask=mask)
        state = softmax_step(logits, values, state, c)
    return state


@triton.jit
def partials(
    query, compressed_key, compressed_value, sliding_key, sliding_value, compressed_value_scale,
    sliding_key_scale, sliding_value_scale, page_table, lengths,
    M, P, splits, windows, candidates, scale,
    logits, maxima, sums, outputs, counters, c: tl.constexpr,
):  # fmt: skip
    """Compute the parts of the compressed and the sliding branch. Programs: B * HEADS *
    ROW_TILES * (splits + windows).

    Args:
      query: `[B * QUERIES, HEADS * GROUP, WIDTH]`.
      compressed_key: `[P, PAGE / COMPRESS_STRIDE, HEADS, .]`.
      compressed_value: `[P, PAGE / COMPRESS_STRIDE, HEADS, .]`.
      sliding_key: `[P, PAGE, HEADS, .]`.
      sliding_value: `[P, PAGE, HEADS, .]`.
      compressed_value_scale, ..: float32 `[P, HEADS, .]` of pages in fp8, read if `FP8` is true.
      page_table: int32 `[B, M]`.
      lengths: int32 `[B]`.
      splits: Number of splits of the compressed keys, for the longest row.
      windows: Number of splits of the window, for the longest row.
      candidates: Number of compressed keys of the longest row.
      scale: Scale of the logits, times log2(e).
      logits: float32 `[B * HEADS, QUERIES * GROUP, candidates]`, base 2.
      maxima: float32 `[B * HEADS, QUERIES * GROUP, splits + windows]`.
      sums: float32 `[B * HEADS, QUERIES * GROUP, splits + windows]`.
      outputs: float32 `[B * HEADS, QUERIES * GROUP, splits + windows, VALUE_WIDTH]`.
      counters: int32 `[B * HEADS, QUERIES]`, set to 0.
    """
    program = tl.program_id(0)
    count = splits + windows
    split = program % count
    program = program // count
    tile = program % c.ROW_TILES
    batch, head = pair_of(program // c.ROW_TILES, c.HEADS)
    pair = batch * c.HEADS + head
    QUERIES: tl.constexpr = c.QUERIES
    ALL: tl.constexpr = QUERIES * c.GROUP
    number = tile * c.ROWS + tl.arange(0, c.ROWS)
    real = number < ALL
    number = tl.minimum(number, ALL - 1)
    if (split == 0) & (tile == 0):
        for i in tl.static_range(QUERIES):
            tl.store(counters + pair * QUERIES + i, 0)

    length, first_position = _row_of(lengths, batch, M, c)
    position = first_position + number // c.GROUP
    there = real & (position >= 0)
    row = (batch * c.QUERIES + number // c.GROUP) * (c.HEADS * c.GROUP)
    row = row + head * c.GROUP + number % c.GROUP
    rows = load_rows(query, row, there, c.WIDTH)
    table = page_table + batch * M
    SLOTS: tl.constexpr = c.PAGE // c.COMPRESS_STRIDE
    # Slot of the first compressed key in a row's first page.
    FIRST: tl.constexpr = c.COMPRESS_BLOCK // c.COMPRESS_STRIDE - 1
    logits_at = logits + (pair * ALL + number) * candidates
    of_rows = rows, table, head, P, scale, logits_at, there
    if split < splits:
        high = tl.where(there, _complete(position, c), 0)
        begin = split * c.SPLIT
        end = tl.minimum(begin + c.SPLIT, tl.max(high, axis=0))
        low = tl.full([c.ROWS], 0, tl.int32)
        scale_of = compressed_value_scale  # compressed keys have no scales
        compressed = compressed_key, compressed_value, scale_of, scale_of
        of_compressed = (compressed, (low, high, begin, end)) + of_rows
        most, total, acc = _over_split(*of_compressed, c, SLOTS, FIRST, True, False)
    else:
        begin = tl.maximum(length - c.QUERIES - c.WINDOW + 1, 0) + (split - splits) * c.SPLIT
        end = tl.minimum(begin + c.SPLIT, length)
        low = tl.maximum(position - c.WINDOW + 1, 0)
        high = tl.where(there, position + 1, 0)
        sliding = sliding_key, sliding_value, sliding_key_scale, sliding_value_scale
        of_sliding = (sliding, (low, high, begin, end)) + of_rows
        most, total, acc = _over_split(*of_sliding, c, c.PAGE, 0, False, c.FP8)
    if begin < end:
        at = (pair * ALL + number) * count + split
        tl.store(maxima + at, most, mask=there)
        tl.store(sums + at, total, mask=there)
        store_rows(outputs, at, acc, there, c.VALUE_WIDTH)


@triton.jit
def _lse_log2(maxima, sums, at, begin, end, real, c):
    """Return the base-2 log-sum-exp over the splits `begin .. end - 1`, for rows whose
    statistics are at `at`.
    """
    most = tl.full([c.GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.full([c.GROUP_ROWS], 0.0, tl.float32)
    for first in range(begin, end, MERGED):
        split = first + tl.arange(0, MERGED)
        mask = real[:, None] & (split < end)[None, :]
        theirs = tl.load(maxima + at[:, None] + split[None, :], mask=mask, other=float("-inf"))
        parts = tl.load(sums + at[:, None] + split[None, :], mask=mask, other=0.0)
        larger, base = raised(most, tl.max(theirs, axis=1))
        total *= tl.exp2(most - base)
        total += tl.sum(parts * tl.exp2(theirs - base[:, None]), axis=1)
        most = larger
    # Rows without keys have +inf, so that exp2(S - lse) is 0.
    return tl.where(
        total == 0.0, float("inf"), most + tl.log2(tl.where(total == 0.0, 1.0, total))
    )


@triton.jit
def _best_blocks(logits, candidates, lse_log2, own, seen, c):
    """Return the `N` best of the blocks `0 .. own`, as in `scores.best_blocks`. The result is
    int32 `[BEST]`, ascending, followed by HIGHEST.

        p[i] = sum_g exp2(S_gi - lse_g)
        score[j] = sum_c own[c] p[r j + c] + carry[c] p[r (j - 1) + c]

    Args:
      logits: Logits of this query, `[GROUP, candidates]`; the first `seen` candidates exist.
      lse_log2: `[GROUP_ROWS]`.
    """
    RATIO: tl.constexpr = c.PAGE // c.COMPRESS_STRIDE
    COVER: tl.constexpr = c.COMPRESS_BLOCK // c.COMPRESS_STRIDE
    rank = tl.arange(0, c.BEST)
    head = tl.arange(0, c.GROUP_ROWS)
    token = tl.arange(0, c.RATIO_COLUMNS)  # `c` of the score
    block = tl.arange(0, c.BLOCKS)
    ALL: tl.constexpr = c.BLOCKS * c.RATIO_COLUMNS
    inside = tl.arange(0, ALL)
    phase = inside % c.RATIO_COLUMNS
    weight = tl.where(token < RATIO, tl.minimum(-token + RATIO, COVER), 0).to(tl.float32)
    rest = tl.where(token < RATIO, tl.maximum(token + (COVER - RATIO), 0), 0).to(tl.float32)
    best = tl.full([c.BEST], -1, tl.int64)
    carried = tl.zeros([1], tl.float32)
    for first in range(0, own + 1, c.BLOCKS):
        at = first * RATIO + inside // c.RATIO_COLUMNS * RATIO + phase
        there = (phase < RATIO) & (at < seen)
        probs = tl.zeros([ALL], tl.float32)
        for some in range(0, c.GROUP, c.HEADS_A_STEP):
            these = some + tl.arange(0, c.HEADS_A_STEP)
            mine = these[:, None] == head[None, :]
            lse = tl.min(tl.where(mine, lse_log2[None, :], float("inf")), axis=1)
            logit = tl.load(
                logits + these.to(tl.int64)[:, None] * candidates + at[None, :],
                mask=there[None, :] & (these < c.GROUP)[:, None],
                other=float("-inf"),
            )
            probs += tl.sum(tl.exp2(logit - lse[:, None]), axis=0)
        probs = tl.reshape(probs, [c.BLOCKS, c.RATIO_COLUMNS])
        score = tl.sum(probs * weight[None, :], axis=1)
        if COVER > 1:
            carry = tl.sum(probs * rest[None, :], axis=1)
            before = tl.gather(carry, tl.maximum(block - 1, 0), axis=0)
            score += tl.where(block == 0, carried, before)
            last = tl.sum(tl.where(block == c.BLOCKS - 1, carry, 0.0), axis=0)
            carried = tl.zeros([1], tl.float32) + last
        local = first + block
        packed = pack_scores(score, local, own, c)
        packed = tl.where(local <= own, packed, -1)
        chosen = tl.full([c.BEST], -1, tl.int64)
        for i in range(c.N):
            top = tl.maximum(tl.max(packed, axis=0), tl.max(best, axis=0))
            chosen = tl.where(rank == i, top, chosen)
            packed = tl.where(packed == top, -1, packed)
            best = tl.where(best == top, -1, best)
        best = chosen
    found = -(best & HIGHEST).to(tl.int32) + HIGHEST
    return tl.sort(tl.where(best >= 0, found, HIGHEST))


@triton.jit
def _gate(gates, row, mask, BRANCH):
    return tl.load(gates + row * 3 + BRANCH, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _add_splits(added, gate, maxima, outputs, at, here, lse, begin, end, c):
    """Add every `PARTS`-th of the splits `begin .. end - 1`, gated and normalised, to the sum
    `added`.
    """
    for split in range(begin, end, c.PARTS):
        theirs = tl.load(maxima + at + split, mask=here, other=float("-inf"))
        share = gate * tl.exp2(theirs - lse)
        added += share[:, None] * load_rows(outputs, at + split, here, c.VALUE_WIDTH)
    return added


@triton.jit
def finish(
    query, selected_key, selected_value, selected_key_scale, selected_value_scale, page_table,
    lengths, gates, logits, maxima, sums, outputs, counters,
    M, P, splits, windows, candidates, scale,
    out, indices, part_maxima, part_sums, part_outputs, part_added, c: tl.constexpr,
):  # fmt: skip
    """Select blocks, attend to the selected blocks, and add up all branches. Programs: B * HEADS *
    QUERIES * PARTS.

    Args:
      query .. lengths: As in the kernel `partials`, with the pages of the selected branch.
      gates: `[B * QUERIES, H, 3]`, of the compressed, the selected and the sliding branch.
      logits .. counters: Outputs of `partials`. A counter has the number of parts that have
      finished.
      out: `[B * QUERIES, H, VALUE_WIDTH]`.
      indices: int32 `[B * QUERIES, HEADS, N]`.
      part_maxima: float32 `[B * HEADS * QUERIES * PARTS, GROUP_ROWS]`.
      part_sums: float32 `[B * HEADS * QUERIES * PARTS, GROUP_ROWS]`.
      part_outputs: Unnormalised outputs of the selected branch, `[.., VALUE_WIDTH]`.
      part_added: Gated outputs of the other two branches, `[.., VALUE_WIDTH]`.
    """
    program = tl.program_id(0).to(tl.int64)
    part = (program % c.PARTS).to(tl.int32)
    item = program // c.PARTS  # index into [B * HEADS, QUERIES]
    query_number = (item % c.QUERIES).to(tl.int32)
    batch, head = pair_of(item // c.QUERIES, c.HEADS)
    pair = batch * c.HEADS + head
    number = tl.arange(0, c.GROUP_ROWS)
    real = number < c.GROUP
    token = batch * c.QUERIES + query_number
    row = token * (c.HEADS * c.GROUP) + head * c.GROUP + tl.minimum(number, c.GROUP - 1)
    rank = tl.arange(0, c.BEST)

    length, first_position = _row_of(lengths, batch, M, c)
    position = first_position + query_number
    own = tl.where(position >= 0, position // c.PAGE, -1)
    seen = _complete(position, c)
    here = real & (number * 0 + position >= 0)

    statistics = pair * (c.QUERIES * c.GROUP) + query_number * c.GROUP
    at = (statistics + tl.minimum(number, c.GROUP - 1)) * (splits + windows)
    compressed_end = (seen + c.SPLIT - 1) // c.SPLIT
    compressed_lse = _lse_log2(maxima, sums, at, 0, compressed_end, here, c)
    window_begin = tl.maximum(length - c.QUERIES - c.WINDOW + 1, 0)
    window_end = splits + (length - window_begin + c.SPLIT - 1) // c.SPLIT
    window_end = tl.where((windows > 0) & (position >= 0), window_end, splits)
    sliding_lse = _lse_log2(maxima, sums, at, splits, window_end, here, c)

    best = _best_blocks(
        logits + statistics * candidates, candidates, compressed_lse, own, seen, c
    )
    if part == 0:
        place = indices + (token * c.HEADS + head) * c.N + rank
        tl.store(place, tl.where(best == HIGHEST, -1, best), mask=rank < c.N)

    rows = load_rows(query, row, here, c.WIDTH)
    table = page_table + batch * M
    selected = selected_key, selected_value, selected_key_scale, selected_value_scale
    state = softmax_start(c.GROUP_ROWS, columns(c.VALUE_WIDTH))
    STEPS: tl.constexpr = (c.PAGE + c.KEYS - 1) // c.KEYS
    A_PART: tl.constexpr = (c.N + c.PARTS - 1) // c.PARTS
    for step in range(A_PART * STEPS):
        chosen = part * A_PART + step // STEPS
        block = tl.max(
            tl.where(rank == chosen, tl.where(best == HIGHEST, -1, best), -1), axis=0
        )
        inside = step % STEPS * c.KEYS + tl.arange(0, c.KEYS)
        key_at = tl.maximum(block, 0) * c.PAGE + inside
        inner = (inside < c.PAGE) & (key_at <= tl.where(block >= 0, position, -1))
        place = entry_place(table, key_at, inner, P, c.PAGE)
        of_block = rows, selected, place, head, inner, scale
        logit, values = _logits(*of_block, c, c.PAGE, c.FP8)
        logit = tl.where(inner[None, :] & here[:, None], logit, NEGATIVE_INFINITY)
        state = softmax_step(logit, values, state, c)

    added = tl.full([c.GROUP_ROWS, columns(c.VALUE_WIDTH)], 0.0, tl.float32)
    of_splits = maxima, outputs, at, here
    gate = _gate(gates, row, here, 0)
    added = _add_splits(added, gate, *of_splits, compressed_lse, part, compressed_end, c)
    gate = _gate(gates, row, here, 2)
    added = _add_splits(added, gate, *of_splits, sliding_lse, splits + part, window_end, c)

    # The results of each part, for the last part to finish.
    mine = program * c.GROUP_ROWS + number
    most, total, acc = state
    tl.store(part_maxima + mine, most, mask=real)
    tl.store(part_sums + mine, total, mask=real)
    store_rows(part_outputs, mine, acc, real, c.VALUE_WIDTH)
    store_rows(part_added, mine, added, real, c.VALUE_WIDTH)
    tl.debug_barrier()
    ended = tl.atomic_add(counters + item, 1, sem="acq_rel")
    if ended == c.PARTS - 1:
        parts = part_maxima, part_sums, part_outputs, part_added
        _merge_parts(gates, out, parts, item, row, number, real, c)


@triton.jit
def _load_shared(at, mask, other):
    """Load values that other programs wrote, bypassing L1."""
    return tl.load(at, mask=mask, other=other, cache_modifier=".cg")


@triton.jit
def _merge_parts(gates, out, parts, item, row, number, real, c):
    """Store `out = part_added[0] + .. + part_added[PARTS - 1] + gate * selected` for each row."""
    PARTS: tl.constexpr = c.PARTS
    part_maxima, part_sums, part_outputs, part_added = parts
    most = tl.full([c.GROUP_ROWS], float("-inf"), tl.float32)
    for part in tl.static_range(PARTS):
        at = (item * c.PARTS + part) * c.GROUP_ROWS + number
        most = tl.maximum(most, _load_shared(part_maxima + at, real, float("-inf")))
    most = tl.where(most == NEGATIVE_INFINITY, 0.0, most)
    total = tl.full([c.GROUP_ROWS], 0.0, tl.float32)
    acc = tl.full([c.GROUP_ROWS, columns(c.VALUE_WIDTH)], 0.0, tl.float32)
    added = tl.full([c.GROUP_ROWS, columns(c.VALUE_WIDTH)], 0.0, tl.float32)
    column = tl.arange(0, columns(c.VALUE_WIDTH))
    mask = real[:, None] & (column < c.VALUE_WIDTH)[None, :]
    for part in tl.static_range(PARTS):
        at = (item * c.PARTS + part) * c.GROUP_ROWS + number
        share = tl.exp2(_load_shared(part_maxima + at, real, float("-inf")) - most)
        total += share * _load_shared(part_sums + at, real, 0.0)
        place = at[:, None] * c.VALUE_WIDTH + column[None, :]
        acc += share[:, None] * _load_shared(part_outputs + place, mask, 0.0)
        added += _load_shared(part_added + place, mask, 0.0)
    gate = _gate(gates, row, real, 1)
    empty = total == 0.0
    acc = acc * (gate / tl.where(empty, 1.0, total))[:, None]
    acc = added + tl.where(empty[:, None], 0.0, acc)
    store_rows(out, row, acc, real, c.VALUE_WIDTH)
