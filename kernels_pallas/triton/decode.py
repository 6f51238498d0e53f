"""Decode: a few queries a row, all branches, over a paged cache, in two launches.

    partials   a program has one split of the compressed keys, or of the window, of one row and
               key/value head. It keeps the logits of the compressed keys for the scores, and of
               its split the maximum, the sum and the unnormalised output.
    finish     a program has one query of one key/value head, and one part of its selected blocks.
               It scores all blocks, chooses the best, attends to those of its part and adds the
               outputs of its share of the splits. The last part to end adds the parts up.

Split-K: a split has a fixed number of keys, so that the order of sums follows from the length of
a row alone, not from the batch or the table. What bounds it is the memory's bandwidth: every
compressed key and value once a row, and the keys and values of the window and the blocks.

    m_s = max S    l_s = sum exp2(S - m_s)    O_s = exp2(S - m_s) V       of split s
    m = max m_s    lse = m + log2(sum l_s exp2(m_s - m))    O = sum exp2(m_s - lse) O_s
"""

import triton
import triton.language as tl

from kernels_pallas.triton.rows import (
    NEGATIVE_INFINITY,
    load_columns,
    load_rows,
    pair_of,
    softmax_step,
    store_rows,
)
from kernels_pallas.triton.scores import FORCED, HIGHEST

MERGED = tl.constexpr(8)  # splits whose statistics are read at a time


@triton.jit
def entry_place(table, entry, mask, P, PER_PAGE: tl.constexpr):
    """Where the entries of a row lie in the pool, as if it were one long page."""
    page = tl.load(table + entry // PER_PAGE, mask=mask, other=0)
    page = tl.minimum(tl.maximum(page, 0), P - 1).to(tl.int64)
    return page * PER_PAGE + entry % PER_PAGE


@triton.jit
def _scales(scale, place, head, mask, HEADS: tl.constexpr, PER_PAGE: tl.constexpr):
    """Of tokens of one head, `[P, HEADS, PER_PAGE]`."""
    at = (place // PER_PAGE * HEADS + head) * PER_PAGE + place % PER_PAGE
    return tl.load(scale + at, mask=mask, other=0.0)


@triton.jit
def load_values(
    value,
    scale,
    like,
    place,
    head,
    mask,
    HEADS: tl.constexpr,
    PER_PAGE: tl.constexpr,
    VALUE: tl.constexpr,
    FP8: tl.constexpr,
):
    """`[keys, columns]` in the dtype of `like`; VALUE: width and columns."""
    values = load_rows(value, place * HEADS + head, mask, VALUE[0], VALUE[1])
    if FP8:
        scales = _scales(scale, place, head, mask, HEADS, PER_PAGE)
        values = (values.to(tl.float32) * scales[:, None]).to(like.dtype)
    return values


@triton.jit
def _split_walk(
    arrays,
    bounds,
    rows,
    table,
    head,
    P,
    scale,
    logits_at,
    row_mask,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    PER_PAGE: tl.constexpr,
    FIRST_SLOT: tl.constexpr,
    KEPT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8_KEYS: tl.constexpr,
    FP8: tl.constexpr,
):
    """Attention of the rows to `begin .. end - 1`, of which each sees `low .. high - 1`.

    Args:
      arrays: keys and values, and the scales of both.
      KEY, VALUE: width and columns.
    """
    key, value, key_scale, value_scale = arrays
    low, high, begin, end = bounds
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE[1]], tl.float32)
    for block in range(begin, end, KEYS):
        at = block + tl.arange(0, KEYS)
        inner = at < end
        place = entry_place(table, at + FIRST_SLOT, inner, P, PER_PAGE)
        keys = load_columns(key, place * HEADS + head, inner, KEY[0], KEY[1])
        if FP8_KEYS:
            keys = keys.to(rows.dtype)
        of_values = value, value_scale, rows, place, head, inner
        values = load_values(*of_values, HEADS, PER_PAGE, VALUE, FP8)
        logits = tl.dot(rows, keys, input_precision=PRECISION) * scale
        if FP8_KEYS:
            logits *= _scales(key_scale, place, head, inner, HEADS, PER_PAGE)[None, :]
        seen = (at[None, :] >= low[:, None]) & (at[None, :] < high[:, None])
        logits = tl.where(seen & inner[None, :], logits, NEGATIVE_INFINITY)
        if KEPT:
            mask = row_mask[:, None] & inner[None, :]
            tl.store(logits_at[:, None] + at[None, :], logits, mask=mask)
        most, total, acc = softmax_step(logits, values, most, total, acc, PRECISION)
    return most, total, acc


@triton.jit(do_not_specialize=["M", "P", "splits", "windows", "candidates", "scale"])
def partials(
    query,
    compressed_key,
    compressed_value,
    sliding_key,
    sliding_value,
    compressed_value_scale,
    sliding_key_scale,
    sliding_value_scale,
    page_table,
    lengths,
    M,
    P,
    splits,
    windows,
    candidates,
    scale,
    logits,
    maxima,
    sums,
    outputs,
    counters,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    COMPRESS_BLOCK: tl.constexpr,
    COMPRESS_STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8: tl.constexpr,
):
    """Programs: B * HEADS * ROW_TILES * (splits + windows).

    Args:
      query: `[B * QUERIES, HEADS * GROUP, WIDTH]`.
      compressed_key, compressed_value: `[P, PAGE / COMPRESS_STRIDE, HEADS, .]`.
      sliding_key, sliding_value: `[P, PAGE, HEADS, .]`.
      compressed_value_scale, ..: float32 `[P, HEADS, .]` of pages in fp8, read if `FP8`.
      page_table: int32 `[B, M]`; lengths: int32 `[B]`.
      splits, windows: of the compressed keys and of the window, for the longest row there can be.
      candidates: compressed keys of that row.
      logits: float32 `[B * HEADS, QUERIES * GROUP, candidates]`, base 2.
      maxima, sums: float32 `[B * HEADS, QUERIES * GROUP, splits + windows]`.
      outputs: float32 `[B * HEADS, QUERIES * GROUP, splits + windows, VALUE_WIDTH]`.
      counters: int32 `[B * HEADS, QUERIES]`, set to 0.
    """
    program = tl.program_id(0)
    count = splits + windows
    split = program % count
    program = program // count
    tile = program % ROW_TILES
    batch, head = pair_of(program // ROW_TILES, HEADS)
    pair = batch * HEADS + head
    ALL: tl.constexpr = QUERIES * GROUP
    number = tile * ROWS + tl.arange(0, ROWS)
    real = number < ALL
    number = tl.minimum(number, ALL - 1)
    if (split == 0) & (tile == 0):
        for i in tl.static_range(QUERIES):
            tl.store(counters + pair * QUERIES + i, 0)

    length = tl.minimum(tl.load(lengths + batch), M * PAGE)
    position = tl.where(length > 0, length - QUERIES, -QUERIES) + number // GROUP
    there = real & (position >= 0)
    row = (batch * QUERIES + number // GROUP) * (HEADS * GROUP) + head * GROUP + number % GROUP
    rows = load_rows(query, row, there, WIDTH, COLUMNS)
    table = page_table + batch * M
    SLOTS: tl.constexpr = PAGE // COMPRESS_STRIDE
    FIRST: tl.constexpr = COMPRESS_BLOCK // COMPRESS_STRIDE - 1  # slot of a row's first page
    logits_at = logits + (pair * ALL + number) * candidates
    KEY: tl.constexpr = (WIDTH, COLUMNS)
    VALUE: tl.constexpr = (VALUE_WIDTH, VALUE_COLUMNS)
    of_rows = rows, table, head, P, scale, logits_at, there
    if split < splits:
        complete = tl.maximum(position - COMPRESS_BLOCK + 1, -COMPRESS_STRIDE)
        high = tl.where(there, (complete + COMPRESS_STRIDE) // COMPRESS_STRIDE, 0)
        begin = split * SPLIT
        end = tl.minimum(begin + SPLIT, tl.max(high, axis=0))
        low = tl.zeros([ROWS], tl.int32)
        scale_of = compressed_value_scale  # keys have none
        compressed = compressed_key, compressed_value, scale_of, scale_of
        of_compressed = (compressed, (low, high, begin, end)) + of_rows
        most, total, acc = _split_walk(
            *of_compressed,
            HEADS,
            KEY,
            VALUE,
            SLOTS,
            FIRST,
            True,
            ROWS,
            KEYS,
            PRECISION,
            False,
            FP8,
        )
    else:
        begin = tl.maximum(length - QUERIES - WINDOW + 1, 0) + (split - splits) * SPLIT
        end = tl.minimum(begin + SPLIT, length)
        low = tl.maximum(position - WINDOW + 1, 0)
        high = tl.where(there, position + 1, 0)
        sliding = sliding_key, sliding_value, sliding_key_scale, sliding_value_scale
        of_sliding = (sliding, (low, high, begin, end)) + of_rows
        most, total, acc = _split_walk(
            *of_sliding, HEADS, KEY, VALUE, PAGE, 0, False, ROWS, KEYS, PRECISION, FP8, FP8
        )
    if begin < end:
        at = (pair * ALL + number) * count + split
        tl.store(maxima + at, most, mask=there)
        tl.store(sums + at, total, mask=there)
        store_rows(outputs, at, acc, there, VALUE_WIDTH, VALUE_COLUMNS)


@triton.jit
def _lse_log2(maxima, sums, at, begin, end, real, ROWS: tl.constexpr):
    """lse of the splits `begin .. end - 1`, base 2, of rows whose statistics lie at `at`."""
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(begin, end, MERGED):
        split = first + tl.arange(0, MERGED)
        mask = real[:, None] & (split < end)[None, :]
        theirs = tl.load(maxima + at[:, None] + split[None, :], mask=mask, other=float("-inf"))
        parts = tl.load(sums + at[:, None] + split[None, :], mask=mask, other=0.0)
        larger = tl.maximum(most, tl.max(theirs, axis=1))
        base = tl.where(larger == NEGATIVE_INFINITY, 0.0, larger)
        total *= tl.exp2(most - base)
        total += tl.sum(parts * tl.exp2(theirs - base[:, None]), axis=1)
        most = larger
    # Rows that see nothing: +inf, so that exp2(S - lse) is 0.
    return tl.where(
        total == 0.0, float("inf"), most + tl.log2(tl.where(total == 0.0, 1.0, total))
    )


@triton.jit
def _best_blocks(
    logits,
    candidates,
    lse_log2,
    own,
    seen,
    RATIO: tl.constexpr,
    RATIO_COLUMNS: tl.constexpr,
    COVER: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEADS_A_STEP: tl.constexpr,
    NUM_INITIAL: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    N: tl.constexpr,
    BEST: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The `N` best of the blocks `0 .. own`, as of `scores.best_blocks`: int32 `[BEST]`,
    ascending, HIGHEST behind them.

        p[i] = sum_g exp2(S_gi - lse_g)
        score[j] = sum_c own[c] p[r j + c] + carry[c] p[r (j - 1) + c]

    Args:
      logits: of this query, `[GROUP, candidates]`; `seen` of the candidates are there.
      lse_log2: `[GROUP_ROWS]`.
    """
    rank = tl.arange(0, BEST)
    head = tl.arange(0, GROUP_ROWS)
    c = tl.arange(0, RATIO_COLUMNS)
    block = tl.arange(0, BLOCKS)
    ALL: tl.constexpr = BLOCKS * RATIO_COLUMNS
    inside = tl.arange(0, ALL)
    phase = inside % RATIO_COLUMNS
    weight = tl.where(c < RATIO, tl.minimum(-c + RATIO, COVER), 0).to(tl.float32)
    rest = tl.where(c < RATIO, tl.maximum(c + (COVER - RATIO), 0), 0).to(tl.float32)
    best = tl.full([BEST], -1, tl.int64)
    carried = tl.zeros([1], tl.float32)
    for first in range(0, own + 1, BLOCKS):
        at = first * RATIO + inside // RATIO_COLUMNS * RATIO + phase
        there = (phase < RATIO) & (at < seen)
        probs = tl.zeros([ALL], tl.float32)
        for some in range(0, GROUP, HEADS_A_STEP):
            these = some + tl.arange(0, HEADS_A_STEP)
            mine = these[:, None] == head[None, :]
            lse = tl.min(tl.where(mine, lse_log2[None, :], float("inf")), axis=1)
            logit = tl.load(
                logits + these.to(tl.int64)[:, None] * candidates + at[None, :],
                mask=there[None, :] & (these < GROUP)[:, None],
                other=float("-inf"),
            )
            probs += tl.sum(tl.exp2(logit - lse[:, None]), axis=0)
        probs = tl.reshape(probs, [BLOCKS, RATIO_COLUMNS])
        score = tl.sum(probs * weight[None, :], axis=1)
        if COVER > 1:
            carry = tl.sum(probs * rest[None, :], axis=1)
            before = tl.gather(carry, tl.maximum(block - 1, 0), axis=0)
            score += tl.where(block == 0, carried, before)
            last = tl.sum(tl.where(block == BLOCKS - 1, carry, 0.0), axis=0)
            carried = tl.zeros([1], tl.float32) + last
        local = first + block
        bits = tl.where(score > 0.0, score, 0.0).to(tl.int32, bitcast=True)
        forced = (local < NUM_INITIAL) | (local > own - NUM_LOCAL)
        bits = tl.where(forced, FORCED, bits)
        packed = (bits.to(tl.int64) << 32) | (-local + HIGHEST).to(tl.int64)
        packed = tl.where(local <= own, packed, -1)
        chosen = tl.full([BEST], -1, tl.int64)
        for i in range(N):
            top = tl.maximum(tl.max(packed, axis=0), tl.max(best, axis=0))
            chosen = tl.where(rank == i, top, chosen)
            packed = tl.where(packed == top, -1, packed)
            best = tl.where(best == top, -1, best)
        best = chosen
    found = -(best & HIGHEST).to(tl.int32) + HIGHEST
    return tl.sort(tl.where(best >= 0, found, HIGHEST))


@triton.jit
def _gate(gates, row, mask, BRANCH: tl.constexpr):
    return tl.load(gates + row * 3 + BRANCH, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["M", "P", "splits", "windows", "candidates", "scale"])
def finish(
    query,
    selected_key,
    selected_value,
    selected_key_scale,
    selected_value_scale,
    page_table,
    lengths,
    gates,
    logits,
    maxima,
    sums,
    outputs,
    counters,
    M,
    P,
    splits,
    windows,
    candidates,
    scale,
    out,
    indices,
    part_maxima,
    part_sums,
    part_outputs,
    part_added,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    COMPRESS_BLOCK: tl.constexpr,
    COMPRESS_STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    N: tl.constexpr,
    NUM_INITIAL: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    BEST: tl.constexpr,
    BLOCKS: tl.constexpr,
    RATIO_COLUMNS: tl.constexpr,
    HEADS_A_STEP: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8: tl.constexpr,
):
    """Programs: B * HEADS * QUERIES * PARTS.

    Args:
      query .. lengths: as of `partials`, with the pages of the selected branch.
      gates: `[B * QUERIES, H, 3]`, of the compressed, the selected and the sliding branch.
      logits .. counters: of `partials`; of its counters each counts the parts that have ended.
      out: `[B * QUERIES, H, VALUE_WIDTH]`; indices: int32 `[B * QUERIES, HEADS, N]`.
      part_maxima, part_sums: float32 `[B * HEADS * QUERIES * PARTS, GROUP_ROWS]`.
      part_outputs, part_added: the same, `[.., VALUE_WIDTH]`: of the selected branch, not
        normalised, and of the other two, gated.
    """
    program = tl.program_id(0).to(tl.int64)
    part = (program % PARTS).to(tl.int32)
    item = program // PARTS  # of [B * HEADS, QUERIES]
    query_number = (item % QUERIES).to(tl.int32)
    batch, head = pair_of(item // QUERIES, HEADS)
    pair = batch * HEADS + head
    number = tl.arange(0, GROUP_ROWS)
    real = number < GROUP
    token = batch * QUERIES + query_number
    row = token * (HEADS * GROUP) + head * GROUP + tl.minimum(number, GROUP - 1)
    rank = tl.arange(0, BEST)

    length = tl.minimum(tl.load(lengths + batch), M * PAGE)
    position = tl.where(length > 0, length - QUERIES, -QUERIES) + query_number
    own = tl.where(position >= 0, position // PAGE, -1)
    complete = tl.maximum(position - COMPRESS_BLOCK + 1, -COMPRESS_STRIDE)
    seen = (complete + COMPRESS_STRIDE) // COMPRESS_STRIDE
    here = real & (number * 0 + position >= 0)

    statistics = pair * (QUERIES * GROUP) + query_number * GROUP + tl.minimum(number, GROUP - 1)
    at = statistics * (splits + windows)
    compressed_end = (seen + SPLIT - 1) // SPLIT
    compressed_lse = _lse_log2(maxima, sums, at, 0, compressed_end, here, GROUP_ROWS)
    window_begin = tl.maximum(length - QUERIES - WINDOW + 1, 0)
    window_end = splits + (length - window_begin + SPLIT - 1) // SPLIT
    window_end = tl.where((windows > 0) & (position >= 0), window_end, splits)
    sliding_lse = _lse_log2(maxima, sums, at, splits, window_end, here, GROUP_ROWS)

    RATIO: tl.constexpr = PAGE // COMPRESS_STRIDE
    best = _best_blocks(
        logits + (pair * (QUERIES * GROUP) + query_number * GROUP) * candidates,
        candidates,
        compressed_lse,
        own,
        seen,
        RATIO,
        RATIO_COLUMNS,
        COMPRESS_BLOCK // COMPRESS_STRIDE,
        GROUP,
        GROUP_ROWS,
        HEADS_A_STEP,
        NUM_INITIAL,
        NUM_LOCAL,
        N,
        BEST,
        BLOCKS,
    )
    if part == 0:
        place = indices + (token * HEADS + head) * N + rank
        tl.store(place, tl.where(best == HIGHEST, -1, best), mask=rank < N)

    rows = load_rows(query, row, here, WIDTH, COLUMNS)
    table = page_table + batch * M
    most = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    acc = tl.zeros([GROUP_ROWS, VALUE_COLUMNS], tl.float32)
    VALUE: tl.constexpr = (VALUE_WIDTH, VALUE_COLUMNS)
    STEPS: tl.constexpr = (PAGE + KEYS - 1) // KEYS
    A_PART: tl.constexpr = (N + PARTS - 1) // PARTS
    for step in range(A_PART * STEPS):
        chosen = part * A_PART + step // STEPS
        block = tl.max(
            tl.where(rank == chosen, tl.where(best == HIGHEST, -1, best), -1), axis=0
        )
        inside = step % STEPS * KEYS + tl.arange(0, KEYS)
        key_at = tl.maximum(block, 0) * PAGE + inside
        inner = (inside < PAGE) & (key_at <= tl.where(block >= 0, position, -1))
        place = entry_place(table, key_at, inner, P, PAGE)
        keys = load_columns(selected_key, place * HEADS + head, inner, WIDTH, COLUMNS)
        if FP8:
            keys = keys.to(rows.dtype)
        of_values = selected_value, selected_value_scale, rows, place, head, inner
        values = load_values(*of_values, HEADS, PAGE, VALUE, FP8)
        logit = tl.dot(rows, keys, input_precision=PRECISION) * scale
        if FP8:
            logit *= _scales(selected_key_scale, place, head, inner, HEADS, PAGE)[None, :]
        logit = tl.where(inner[None, :] & here[:, None], logit, NEGATIVE_INFINITY)
        most, total, acc = softmax_step(logit, values, most, total, acc, PRECISION)

    added = tl.zeros([GROUP_ROWS, VALUE_COLUMNS], tl.float32)
    gate = _gate(gates, row, here, 0)
    for split in range(part, compressed_end, PARTS):
        theirs = tl.load(maxima + at + split, mask=here, other=float("-inf"))
        share = gate * tl.exp2(theirs - compressed_lse)
        added += share[:, None] * load_rows(
            outputs, at + split, here, VALUE_WIDTH, VALUE_COLUMNS
        )
    gate = _gate(gates, row, here, 2)
    for split in range(splits + part, window_end, PARTS):
        theirs = tl.load(maxima + at + split, mask=here, other=float("-inf"))
        share = gate * tl.exp2(theirs - sliding_lse)
        added += share[:, None] * load_rows(
            outputs, at + split, here, VALUE_WIDTH, VALUE_COLUMNS
        )

    # What the parts leave to the last of them.
    mine = program * GROUP_ROWS + number
    tl.store(part_maxima + mine, most, mask=real)
    tl.store(part_sums + mine, total, mask=real)
    store_rows(part_outputs, mine, acc, real, VALUE_WIDTH, VALUE_COLUMNS)
    store_rows(part_added, mine, added, real, VALUE_WIDTH, VALUE_COLUMNS)
    tl.debug_barrier()
    ended = tl.atomic_add(counters + item, 1, sem="acq_rel")
    if ended == PARTS - 1:
        parts = part_maxima, part_sums, part_outputs, part_added
        _merge_parts(gates, out, parts, item, row, number, real, PARTS, GROUP_ROWS, VALUE)


@triton.jit
def _merge_parts(
    gates,
    out,
    parts,
    item,
    row,
    number,
    real,
    PARTS: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    VALUE: tl.constexpr,
):
    """out = sum of what the parts added + gate * selected; VALUE: width and columns."""
    part_maxima, part_sums, part_outputs, part_added = parts
    most = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
    for part in tl.static_range(PARTS):
        at = (item * PARTS + part) * GROUP_ROWS + number
        theirs = tl.load(part_maxima + at, mask=real, other=float("-inf"), cache_modifier=".cg")
        most = tl.maximum(most, theirs)
    most = tl.where(most == NEGATIVE_INFINITY, 0.0, most)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    acc = tl.zeros([GROUP_ROWS, VALUE[1]], tl.float32)
    added = tl.zeros([GROUP_ROWS, VALUE[1]], tl.float32)
    column = tl.arange(0, VALUE[1])
    mask = real[:, None] & (column < VALUE[0])[None, :]
    for part in tl.static_range(PARTS):
        at = (item * PARTS + part) * GROUP_ROWS + number
        theirs = tl.load(part_maxima + at, mask=real, other=float("-inf"), cache_modifier=".cg")
        share = tl.exp2(theirs - most)
        total += share * tl.load(part_sums + at, mask=real, other=0.0, cache_modifier=".cg")
        place = at[:, None] * VALUE[0] + column[None, :]
        acc += share[:, None] * tl.load(
            part_outputs + place, mask=mask, other=0.0, cache_modifier=".cg"
        )
        added += tl.load(part_added + place, mask=mask, other=0.0, cache_modifier=".cg")
    gate = _gate(gates, row, real, 1)
    empty = total == 0.0
    acc = acc * (gate / tl.where(empty, 1.0, total))[:, None]
    acc = added + tl.where(empty[:, None], 0.0, acc)
    store_rows(out, row, acc, real, VALUE[0], VALUE[1])
