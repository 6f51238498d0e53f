"""Appends tokens to a paged cache, and the means of the windows that the tokens complete.

One launch writes in place.

A program has one token and one key/value head. The program writes the token to its page. A token at
position `i d + l - 1` ends a window. The program of the last token of a window also writes the mean
of the window. The program reads tokens of this call from the inputs, since other programs may not
have written these tokens to pages yet. Tokens of earlier calls are read from their pages. Most of
the time is spent on the launch itself.

A cache in fp8 stores codes and scales (`nsa_core.rounding`). The means of a cache in fp8 use the
older tokens in the row's ring buffer, if these tokens round to the tokens in the page.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.decode import entry_place
from kernels_pallas.triton.rows import load_rows, store_rows

LARGEST = tl.constexpr(448.0)  # the same as in `nsa_core.rounding`
LEAST = tl.constexpr(1e-30)
NEAR = tl.constexpr(2**-4 + 2**-7)
LEAST_NEAR = tl.constexpr(2**-9)


@triton.jit
def _row_of(starts, token, B):
    """Find the row of a token by bisection: the last row that begins at or before the token."""
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
    """Return the codes and scales of rows in float32."""
    largest = tl.maximum(tl.max(tl.abs(rows), axis=1), LEAST)
    largest += tl.sum(rows * 0.0, axis=1)  # NaN if an element is not finite
    inverse = tl.math.div_rn(tl.full(largest.shape, LARGEST, tl.float32), largest)
    return (rows * inverse[:, None]).to(tl.float8e4nv), largest * (1.0 / LARGEST)


@triton.jit
def _restored(codes, scales, like):
    """Convert codes and scales to values. The values are rounded to the dtype of `like` and
    returned as float32.
    """
    return (codes.to(tl.float32) * scales[:, None]).to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _scale_place(at, head, c, PER_PAGE):
    """Return the index of the scale of the entry `at`."""
    return (at // PER_PAGE * c.HEADS + head) * PER_PAGE + at % PER_PAGE


@triton.jit
def _store(rows, pages, scale, at, head, c, PER_PAGE, WIDTH, FP8):
    """Store `pages[at] = rows` for the rows `[1, columns]` of one head."""
    one = tl.arange(0, 1)
    if FP8:
        rows, scales = _rounded(rows.to(tl.float32))
        tl.store(scale + _scale_place(at, head, c, PER_PAGE) + one, scales)
    store_rows(pages, at * c.HEADS + head + one, rows, one == 0, WIDTH)


@triton.jit
def append(
    page_table, lengths, starts, slots, new, pages, compressed, scales, recent, N, B, M, P, R,
    c: tl.constexpr,
):  # fmt: skip
    """Append tokens. Programs: N * HEADS. `new` and `pages` are tuples with keys and values of
    the selected branch, of the sliding branch, and of the raw tokens of the compressed branch.
    If `SEPARATE` is false, the last four entries are equal to the first two.

    Args:
      page_table: int32 `[B, M]`.
      lengths: int32 `[B]`.
      starts: int32 `[B + 1]`, read if `RAGGED` is true.
      slots: int32 `[B]`, read if `SLOTS` is true.
      new: `[N, HEADS, .]`, the new tokens.
      pages: `[P, PAGE, HEADS, .]`.
      compressed: keys and values `[P, PAGE / COMPRESS_STRIDE, ..]`.
      scales: float32 `[P, HEADS, .]` of `pages` in `FP8`, and of compressed values.
      recent: keys and values `[R, 2 l, HEADS, .]` of a cache in `FP8`.
      N, B, M, P, R: Numbers of new tokens, rows, columns of the page table, pages, ring buffers.
      WRITES: Whether the launch writes pages.
      KEEPS: Whether the launch writes ring buffers.
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
    widths: tl.constexpr = (c.WIDTH, c.VALUE_WIDTH)
    PER_PAGE: tl.constexpr = c.PAGE // c.COMPRESS_STRIDE
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
                    back = tl.arange(0, c.BLOCK_ROWS)
                    inside = back < c.COMPRESS_BLOCK
                    some = token - c.COMPRESS_BLOCK + 1 + back
                    here = inside & (some >= begin)
                    rows = load_rows(new[4 + i], some * c.HEADS + head, here, widths[i])
                    older = inside & (some < begin)
                    entry = tl.maximum(position - c.COMPRESS_BLOCK + 1 + back, 0)
                    place = entry_place(table, entry, older, P, c.PAGE)
                    stored = load_rows(pages[4 + i], place * c.HEADS + head, older, widths[i])
                    if c.FP8:
                        place = _scale_place(place, head, c, c.PAGE)
                        scale = tl.load(scales[4 + i] + place, mask=older, other=0.0)
                        stored = _restored(stored, scale, recent[i])
                        ring = tl.minimum(tl.maximum(slot, 0), R - 1).to(tl.int64) * c.RING
                        kept_at = (ring + entry % c.RING) * c.HEADS + head
                        kept = load_rows(recent[i], kept_at, older, widths[i]).to(tl.float32)
                        most = tl.abs(stored) * NEAR + scale[:, None] * LEAST_NEAR
                        known = tl.min((tl.abs(kept - stored) <= most).to(tl.int32), axis=1)
                        stored = tl.where((known > 0)[:, None], kept, stored)
                    rows = rows.to(tl.float32) + stored.to(tl.float32)
                    mean = tl.sum(rows, axis=0)[None, :] / c.COMPRESS_BLOCK
                    to = at // c.PAGE * PER_PAGE + position % c.PAGE // c.COMPRESS_STRIDE
                    if c.FP8:
                        mean = mean.to(recent[i].dtype.element_ty)
                    _store(
                        mean, compressed[i], scales[6], to, head, c, PER_PAGE, widths[i],
                        c.FP8 if i else False,
                    )  # fmt: skip
    if c.FP8 & c.KEEPS:
        if (page >= 0) & (position >= length - c.RING) & (slot >= 0) & (slot < R):
            for i in tl.static_range(2):
                mine = token * c.HEADS + head + one
                of_head = load_rows(new[4 + i], mine, one == 0, widths[i])
                at = slot.to(tl.int64) * c.RING + position % c.RING
                place = at * c.HEADS + head + one
                store_rows(recent[i], place, of_head, one == 0, widths[i])
