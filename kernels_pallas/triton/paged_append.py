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
def _scale_place(at, head, c, PER_PAGE):
    """Where the scale of the entry `at` lies."""
    return (at // PER_PAGE * c.HEADS + head) * PER_PAGE + at % PER_PAGE


@triton.jit
def _store(rows, pages, scale, at, head, c, PER_PAGE, WIDTH, FP8):
    """`pages[at] = rows`, `[1, columns]`, of one head."""
    one = tl.arange(0, 1)
    if FP8:
        rows, scales = _rounded(rows.to(tl.float32))
        tl.store(scale + _scale_place(at, head, c, PER_PAGE) + one, scales)
    store_rows(pages, at * c.HEADS + head + one, rows, one == 0, WIDTH)


@triton.jit
def _store_mean(
    new, raw, raw_scale, recent, compressed, compressed_scale, token, begin, slot, R, table,
    position, at, head, P, c, WIDTH, FP8_MEAN,
):  # fmt: skip
    """The mean of the tokens up to `token`, in the page of it: the entry `at` of `raw`."""
    back = tl.arange(0, c.BLOCK_ROWS)
    inside = back < c.COMPRESS_BLOCK
    mine = token - c.COMPRESS_BLOCK + 1 + back
    rows = load_rows(new, mine * c.HEADS + head, inside & (mine >= begin), WIDTH)
    older = inside & (mine < begin)
    entry = tl.maximum(position - c.COMPRESS_BLOCK + 1 + back, 0)
    place = entry_place(table, entry, older, P, c.PAGE)
    stored = load_rows(raw, place * c.HEADS + head, older, WIDTH)
    if c.FP8:
        scales = _scale_place(place, head, c, c.PAGE)
        scales = tl.load(raw_scale + scales, mask=older, other=0.0)
        stored = _restored(stored, scales, recent)
        kept_at = tl.minimum(tl.maximum(slot, 0), R - 1).to(tl.int64) * c.RING + entry % c.RING
        kept = load_rows(recent, kept_at * c.HEADS + head, older, WIDTH).to(tl.float32)
        most = tl.abs(stored) * NEAR + scales[:, None] * LEAST_NEAR
        known = tl.min((tl.abs(kept - stored) <= most).to(tl.int32), axis=1)
        stored = tl.where((known > 0)[:, None], kept, stored)
    rows = rows.to(tl.float32) + stored.to(tl.float32)
    mean = tl.sum(rows, axis=0)[None, :] / c.COMPRESS_BLOCK
    PER_PAGE: tl.constexpr = c.PAGE // c.COMPRESS_STRIDE
    to = at // c.PAGE * PER_PAGE + position % c.PAGE // c.COMPRESS_STRIDE
    if c.FP8:
        mean = mean.to(recent.dtype.element_ty)
    _store(mean, compressed, compressed_scale, to, head, c, PER_PAGE, WIDTH, FP8_MEAN)


@triton.jit(do_not_specialize=["N", "B", "M", "P", "R"])
def append(
    selected_key, selected_value, sliding_key, sliding_value, raw_key, raw_value,
    selected_key_pages, selected_value_pages, sliding_key_pages, sliding_value_pages,
    raw_key_pages, raw_value_pages, compressed_key_pages, compressed_value_pages, page_table,
    lengths, starts, selected_key_scale, selected_value_scale, sliding_key_scale,
    sliding_value_scale, raw_key_scale, raw_value_scale, compressed_value_scale, recent_key,
    recent_value, slots,
    N, B, M, P, R,
    c: tl.constexpr,
):  # fmt: skip
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
    token = (program // c.HEADS).to(tl.int64)
    head = program % c.HEADS
    if c.RAGGED:
        row = _row_of(starts, token, B)
        begin = tl.load(starts + row).to(tl.int64)
        end = tl.load(starts + row + 1).to(tl.int64)
    else:
        row = token // (N // B)
        begin = row * (N // B)
        end = begin + N // B
    length = tl.load(lengths + row)
    position = tl.where(token < end, length - (end - token), -1).to(tl.int32)
    position = tl.where((length > 0) & (position < M * c.PAGE), position, -1)
    table = page_table + row * M
    page = tl.load(table + tl.maximum(position, 0) // c.PAGE)
    page = tl.where((position >= 0) & (page < P), page, -1)
    slot = row.to(tl.int32)
    if c.SLOTS:
        slot = tl.load(slots + row)
    new = selected_key, selected_value, sliding_key, sliding_value, raw_key, raw_value
    pages = (
        selected_key_pages, selected_value_pages, sliding_key_pages, sliding_value_pages,
        raw_key_pages, raw_value_pages,
    )  # fmt: skip
    scales = (
        selected_key_scale, selected_value_scale, sliding_key_scale, sliding_value_scale,
        raw_key_scale, raw_value_scale,
    )  # fmt: skip
    recent = recent_key, recent_value
    compressed_pages = compressed_key_pages, compressed_value_pages
    widths: tl.constexpr = (c.WIDTH, c.VALUE_WIDTH)
    one = tl.arange(0, 1)
    if c.WRITES & (page >= 0):
        at = page.to(tl.int64) * c.PAGE + position % c.PAGE
        for i in tl.static_range(6 if c.SEPARATE else 2):
            mine = token * c.HEADS + head + one
            of_head = load_rows(new[i], mine, one == 0, widths[i % 2])
            _store(of_head, pages[i], scales[i], at, head, c, c.PAGE, widths[i % 2], c.FP8)
        if c.MEANS:
            into = position - c.COMPRESS_BLOCK + 1
            if (into >= 0) & (into % c.COMPRESS_STRIDE == 0):
                for i in tl.static_range(2):
                    _store_mean(
                        new[4 + i], pages[4 + i], scales[4 + i], recent[i],
                        compressed_pages[i], compressed_value_scale, token, begin, slot, R,
                        table, position, at, head, P, c, widths[i], c.FP8 if i else False,
                    )  # fmt: skip
    if c.FP8 & c.KEEPS:
        if (page >= 0) & (position >= length - c.RING) & (slot >= 0) & (slot < R):
            for i in tl.static_range(2):
                mine = token * c.HEADS + head + one
                of_head = load_rows(new[4 + i], mine, one == 0, widths[i])
                at = slot.to(tl.int64) * c.RING + position % c.RING
                place = at * c.HEADS + head + one
                store_rows(recent[i], place, of_head, one == 0, widths[i])
