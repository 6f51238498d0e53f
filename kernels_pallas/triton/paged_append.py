"""Appends tokens to a paged cache, and the means which they finish, in one launch and in place.

A program has one token and one key/value head. It writes the token to its page. Where the token
is the last of a compressed one, position i d + l - 1, it also writes the mean of the last `l`
tokens: those of this call from the call, which other programs may not have written yet, the
others from their pages. What bounds it is the launch.

A cache in fp8 gets codes and scales (`nsa_core.rounding`), and its mean is of the older tokens in
the row's ring, where these round to what the page has.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.decode import entry_place
from kernels_pallas.triton.rows import load_rows, store_rows

LARGEST = tl.constexpr(448.0)  # as in `nsa_core.rounding`
LEAST = tl.constexpr(1e-30)
NEAR = tl.constexpr(2**-4 + 2**-7)
LEAST_NEAR = tl.constexpr(2**-9)


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
def _rounded(rows):
    """Codes and scales of rows in float32."""
    largest = tl.maximum(tl.max(tl.abs(rows), axis=1), LEAST)
    largest += tl.sum(rows * 0.0, axis=1)  # NaN where an element is not finite
    inverse = tl.math.div_rn(tl.full(largest.shape, LARGEST, tl.float32), largest)
    return (rows * inverse[:, None]).to(tl.float8e4nv), largest * (1.0 / LARGEST)


@triton.jit
def _restored(codes, scales, like):
    """What is read of them, in the dtype of `like`, as float32."""
    return (codes.to(tl.float32) * scales[:, None]).to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _scale_place(at, head, HEADS: tl.constexpr, PER_PAGE: tl.constexpr):
    """Where the scale of the entry `at` lies."""
    return (at // PER_PAGE * HEADS + head) * PER_PAGE + at % PER_PAGE


@triton.jit
def _store(
    rows,
    pages,
    scale,
    at,
    head,
    HEADS: tl.constexpr,
    PER_PAGE: tl.constexpr,
    ROW: tl.constexpr,
    FP8: tl.constexpr,
):
    """`pages[at] = rows`, `[1, columns]`, of one head; ROW: width and columns."""
    one = tl.arange(0, 1)
    if FP8:
        rows, scales = _rounded(rows.to(tl.float32))
        tl.store(scale + _scale_place(at, head, HEADS, PER_PAGE) + one, scales)
    store_rows(pages, at * HEADS + head + one, rows, one == 0, ROW[0], ROW[1])


@triton.jit
def _store_token(
    new,
    pages,
    scale,
    token,
    at,
    head,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    ROW: tl.constexpr,
    FP8: tl.constexpr,
):
    """`pages[at] = new[token]` of one head."""
    one = tl.arange(0, 1)
    row = load_rows(new, token * HEADS + head + one, one == 0, ROW[0], ROW[1])
    _store(row, pages, scale, at, head, HEADS, PAGE, ROW, FP8)


@triton.jit
def _keep_token(
    new,
    recent,
    token,
    slot,
    position,
    head,
    HEADS: tl.constexpr,
    ROW: tl.constexpr,
    RING: tl.constexpr,
):
    """The token to its row's ring."""
    one = tl.arange(0, 1)
    row = load_rows(new, token * HEADS + head + one, one == 0, ROW[0], ROW[1])
    at = slot.to(tl.int64) * RING + position % RING
    store_rows(recent, at * HEADS + head + one, row, one == 0, ROW[0], ROW[1])


@triton.jit
def _store_mean(
    new,
    raw,
    raw_scale,
    recent,
    compressed,
    compressed_scale,
    token,
    begin,
    slot,
    R,
    table,
    position,
    at,
    head,
    P,
    HEADS: tl.constexpr,
    ROW: tl.constexpr,
    PAGE: tl.constexpr,
    COMPRESS_BLOCK: tl.constexpr,
    COMPRESS_STRIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    RING: tl.constexpr,
    FP8: tl.constexpr,
    FP8_MEAN: tl.constexpr,
):
    """The mean of the tokens up to `token`, in the page of it: the entry `at` of `raw`."""
    back = tl.arange(0, BLOCK_ROWS)
    inside = back < COMPRESS_BLOCK
    mine = token - COMPRESS_BLOCK + 1 + back
    rows = load_rows(new, mine * HEADS + head, inside & (mine >= begin), ROW[0], ROW[1])
    older = inside & (mine < begin)
    entry = tl.maximum(position - COMPRESS_BLOCK + 1 + back, 0)
    place = entry_place(table, entry, older, P, PAGE)
    stored = load_rows(raw, place * HEADS + head, older, ROW[0], ROW[1])
    if FP8:
        scales = _scale_place(place, head, HEADS, PAGE)
        scales = tl.load(raw_scale + scales, mask=older, other=0.0)
        stored = _restored(stored, scales, recent)
        kept_at = tl.minimum(tl.maximum(slot, 0), R - 1).to(tl.int64) * RING + entry % RING
        kept = load_rows(recent, kept_at * HEADS + head, older, ROW[0], ROW[1]).to(tl.float32)
        most = tl.abs(stored) * NEAR + scales[:, None] * LEAST_NEAR
        known = tl.min((tl.abs(kept - stored) <= most).to(tl.int32), axis=1)
        stored = tl.where((known > 0)[:, None], kept, stored)
    rows = rows.to(tl.float32) + stored.to(tl.float32)
    mean = tl.sum(rows, axis=0)[None, :] / COMPRESS_BLOCK
    PER_PAGE: tl.constexpr = PAGE // COMPRESS_STRIDE
    to = at // PAGE * PER_PAGE + position % PAGE // COMPRESS_STRIDE
    if FP8:
        mean = mean.to(recent.dtype.element_ty)
    _store(mean, compressed, compressed_scale, to, head, HEADS, PER_PAGE, ROW, FP8_MEAN)


@triton.jit(do_not_specialize=["N", "B", "M", "P", "R"])
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
    selected_key_scale,
    selected_value_scale,
    sliding_key_scale,
    sliding_value_scale,
    raw_key_scale,
    raw_value_scale,
    compressed_value_scale,
    recent_key,
    recent_value,
    slots,
    N,
    B,
    M,
    P,
    R,
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
    FP8: tl.constexpr,
    SLOTS: tl.constexpr,
    WRITES: tl.constexpr,
    KEEPS: tl.constexpr,
):
    """Programs: N * HEADS.

    Args:
      selected_key .. raw_value: `[N, HEADS, .]`, the new tokens; the last four are the first two
        unless `SEPARATE`.
      selected_key_pages ..: `[P, PAGE, HEADS, .]`, compressed `[P, PAGE / COMPRESS_STRIDE, ..]`.
      page_table: int32 `[B, M]`; lengths: int32 `[B]`; starts: int32 `[B + 1]`, read if `RAGGED`.
      selected_key_scale ..: float32 `[P, HEADS, .]`; recent_key, recent_value: `[R, 2 l, HEADS,
        .]`; slots: int32 `[B]`, read if `SLOTS`; all of pages in `FP8`.
      WRITES, KEEPS: whether pages are written, and rings.
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
    RING: tl.constexpr = 2 * COMPRESS_BLOCK
    slot = row.to(tl.int32)
    if SLOTS:
        slot = tl.load(slots + row)
    new = selected_key, selected_value, sliding_key, sliding_value, raw_key, raw_value
    selected_pages = selected_key_pages, selected_value_pages
    sliding_pages = sliding_key_pages, sliding_value_pages
    raw_pages = raw_key_pages, raw_value_pages
    pages = selected_pages + sliding_pages + raw_pages
    selected_scales = selected_key_scale, selected_value_scale
    sliding_scales = sliding_key_scale, sliding_value_scale
    raw_scales = raw_key_scale, raw_value_scale
    scales = selected_scales + sliding_scales + raw_scales
    raw, recent = (raw_key, raw_value), (recent_key, recent_value)
    compressed_pages = compressed_key_pages, compressed_value_pages
    KEY: tl.constexpr = (WIDTH, COLUMNS)
    VALUE: tl.constexpr = (VALUE_WIDTH, VALUE_COLUMNS)
    if WRITES & (page >= 0):
        at = page.to(tl.int64) * PAGE + position % PAGE
        for i in tl.static_range(6 if SEPARATE else 2):
            of_token = new[i], pages[i], scales[i], token, at, head
            _store_token(*of_token, HEADS, PAGE, VALUE if i % 2 else KEY, FP8)
        if MEANS:
            into = position - COMPRESS_BLOCK + 1
            if (into >= 0) & (into % COMPRESS_STRIDE == 0):
                for i in tl.static_range(2):
                    arrays = raw[i], raw_pages[i], raw_scales[i], recent[i]
                    means = compressed_pages[i], compressed_value_scale
                    of_window = token, begin, slot, R, table, position, at, head, P
                    _store_mean(
                        *arrays,
                        *means,
                        *of_window,
                        HEADS,
                        VALUE if i else KEY,
                        PAGE,
                        COMPRESS_BLOCK,
                        COMPRESS_STRIDE,
                        BLOCK_ROWS,
                        RING,
                        FP8,
                        FP8 if i else False,
                    )
    if FP8 & KEEPS:
        if (page >= 0) & (position >= length - RING) & (slot >= 0) & (slot < R):
            for i in tl.static_range(2):
                of_ring = raw[i], recent[i], token, slot, position, head
                _keep_token(*of_ring, HEADS, VALUE if i else KEY, RING)
