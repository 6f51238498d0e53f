"""Appends tokens to a paged cache, and the means which they finish, in one launch and in place.

A program has one token and one key/value head. It writes the token to its page. Where the token
is the last of a compressed one, position i d + l - 1, it also writes the mean of the last `l`
tokens: those of this call from the call, which other programs may not have written yet, the
others from their pages. What bounds it is the launch.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.decode import entry_place
from kernels_pallas.triton.rows import load_rows, store_rows


@triton.jit
def _row_of(starts, token, B):
    """The row of a token by bisection: the last that begins at or before it."""
    low = token * 0
    high = low + B
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(starts + middle) <= token
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle)
    return low


@triton.jit
def _store_token(
    new, pages, token, at, head, HEADS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
):
    """`pages[at] = new[token]` of one head."""
    one = tl.arange(0, 1)
    row = load_rows(new, token * HEADS + head + one, one == 0, WIDTH, COLUMNS)
    store_rows(pages, at * HEADS + head + one, row, one == 0, WIDTH, COLUMNS)


@triton.jit
def _store_mean(
    new,
    raw,
    compressed,
    token,
    begin,
    table,
    position,
    at,
    head,
    P,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    COMPRESS_BLOCK: tl.constexpr,
    COMPRESS_STRIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """The mean of the tokens up to `token`, in the page of it: the entry `at` of `raw`."""
    back = tl.arange(0, BLOCK_ROWS)
    inside = back < COMPRESS_BLOCK
    mine = token - COMPRESS_BLOCK + 1 + back
    rows = load_rows(new, mine * HEADS + head, inside & (mine >= begin), WIDTH, COLUMNS)
    older = inside & (mine < begin)
    entry = tl.maximum(position - COMPRESS_BLOCK + 1 + back, 0)
    place = entry_place(table, entry, older, P, PAGE) * HEADS + head
    rows = rows.to(tl.float32) + load_rows(raw, place, older, WIDTH, COLUMNS).to(tl.float32)
    mean = tl.sum(rows, axis=0)[None, :] / COMPRESS_BLOCK
    slot = at // PAGE * (PAGE // COMPRESS_STRIDE) + position % PAGE // COMPRESS_STRIDE
    one = tl.arange(0, 1)
    store_rows(compressed, slot * HEADS + head + one, mean, one == 0, WIDTH, COLUMNS)


@triton.jit(do_not_specialize=["N", "B", "M", "P"])
def append(
    selected_key,
    selected_value,
    sliding_key,
    sliding_value,
    raw_key,
    raw_value,
    selected_key_pages,
    selected_value_pages,
    sliding_key_pages,
    sliding_value_pages,
    raw_key_pages,
    raw_value_pages,
    compressed_key_pages,
    compressed_value_pages,
    page_table,
    lengths,
    starts,
    N,
    B,
    M,
    P,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    COMPRESS_BLOCK: tl.constexpr,
    COMPRESS_STRIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    RAGGED: tl.constexpr,
    SEPARATE: tl.constexpr,
    MEANS: tl.constexpr,
):
    """Programs: N * HEADS.

    Args:
      selected_key .. raw_value: `[N, HEADS, .]`, the new tokens; the last four are the first two
        unless `SEPARATE`.
      selected_key_pages ..: `[P, PAGE, HEADS, .]`, compressed `[P, PAGE / COMPRESS_STRIDE, ..]`.
      page_table: int32 `[B, M]`; lengths: int32 `[B]`; starts: int32 `[B + 1]`, read if `RAGGED`.
    """
    program = tl.program_id(0)
    token = (program // HEADS).to(tl.int64)
    head = program % HEADS
    if RAGGED:
        row = _row_of(starts, token, B)
        begin = tl.load(starts + row).to(tl.int64)
        end = tl.load(starts + row + 1).to(tl.int64)
    else:
        row = token // (N // B)
        begin = row * (N // B)
        end = begin + N // B
    length = tl.load(lengths + row)
    position = tl.where(token < end, length - (end - token), -1).to(tl.int32)
    position = tl.where((length > 0) & (position < M * PAGE), position, -1)
    table = page_table + row * M
    page = tl.load(table + tl.maximum(position, 0) // PAGE)
    page = tl.where((position >= 0) & (page < P), page, -1)
    if page >= 0:
        at = page.to(tl.int64) * PAGE + position % PAGE
        _store_token(selected_key, selected_key_pages, token, at, head, HEADS, WIDTH, COLUMNS)
        _store_token(
            selected_value,
            selected_value_pages,
            token,
            at,
            head,
            HEADS,
            VALUE_WIDTH,
            VALUE_COLUMNS,
        )
        if SEPARATE:
            _store_token(sliding_key, sliding_key_pages, token, at, head, HEADS, WIDTH, COLUMNS)
            _store_token(
                sliding_value,
                sliding_value_pages,
                token,
                at,
                head,
                HEADS,
                VALUE_WIDTH,
                VALUE_COLUMNS,
            )
            _store_token(raw_key, raw_key_pages, token, at, head, HEADS, WIDTH, COLUMNS)
            _store_token(
                raw_value, raw_value_pages, token, at, head, HEADS, VALUE_WIDTH, VALUE_COLUMNS
            )
        if MEANS:
            into = position - COMPRESS_BLOCK + 1
            if (into >= 0) & (into % COMPRESS_STRIDE == 0):
                _store_mean(
                    raw_key,
                    raw_key_pages,
                    compressed_key_pages,
                    token,
                    begin,
                    table,
                    position,
                    at,
                    head,
                    P,
                    HEADS,
                    WIDTH,
                    COLUMNS,
                    PAGE,
                    COMPRESS_BLOCK,
                    COMPRESS_STRIDE,
                    BLOCK_ROWS,
                )
                _store_mean(
                    raw_value,
                    raw_value_pages,
                    compressed_value_pages,
                    token,
                    begin,
                    table,
                    position,
                    at,
                    head,
                    P,
                    HEADS,
                    VALUE_WIDTH,
                    VALUE_COLUMNS,
                    PAGE,
                    COMPRESS_BLOCK,
                    COMPRESS_STRIDE,
                    BLOCK_ROWS,
                )
