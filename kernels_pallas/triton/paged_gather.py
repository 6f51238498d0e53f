"""Copies the entries of each row from its pages to contiguous memory, for attention over rows.

A program has some entries of one row, with all heads, of keys and of values. Entries to which no
query attends are written as zeros. The contents of pages to which no query attends are neither
read nor multiplied. Entries far before the visible entries are not written. The kernel is
bandwidth bound, since each entry is read once and written once. Entries in fp8 are written in 16
or 32 bits.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.decode import entry_place
from kernels_pallas.triton.rows import columns, load_rows, store_rows


@triton.jit
def gather(
    key_pages, value_pages, key_scale, value_scale, page_table, lengths,
    M, P, S, reach, margin,
    key, value, c: tl.constexpr,
):  # fmt: skip
    """Copy the entries. Programs: B * cdiv(S, ENTRIES).

    Args:
      key_pages, value_pages: `[P, PER_PAGE, .._WIDTH]`, all heads side by side.
      key_scale, value_scale: float32 `[P, HEADS, PER_PAGE]`, read if `KEY_FP8`, `VALUE_FP8`.
      page_table: int32 `[B, M]`.
      lengths: int32 `[B]`.
      S: Number of entries per row. Entry `i` has index `FIRST + i` in the row's pages, and
        covers the tokens `i STRIDE .. i STRIDE + BLOCK - 1`.
      reach: Number of last tokens of a row that are visible.
      margin: Number of tokens before the visible tokens whose entries are zeros. Earlier entries
        are not written.
      key, value: `[B, S, .._WIDTH]`.
      LAST: Whether `S` covers only the last page of a row. If `LAST` is true, FIRST is 0.
    """
    tiles = tl.cdiv(S, c.ENTRIES)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    entry = tl.program_id(0) % tiles * c.ENTRIES + tl.arange(0, c.ENTRIES)
    length = tl.minimum(tl.load(lengths + row), M * (c.PER_PAGE * c.STRIDE))
    into = row * S + entry
    there = entry < S
    if c.LAST:
        entry += tl.maximum(length - 1, 0) // (c.PER_PAGE * c.STRIDE) * c.PER_PAGE
    token = entry * c.STRIDE
    written = there & (token >= length - reach - margin)
    seen = written & (token + c.BLOCK <= length) & (token >= length - reach)
    place = entry_place(page_table + row * M, entry + c.FIRST, seen, P, c.PER_PAGE)
    found = load_rows(key_pages, place, seen, c.KEY_WIDTH)
    if c.KEY_FP8:
        scales = _scales(key_scale, place, seen, c.KEY_WIDTH, c)
        found = found.to(tl.float32) * scales
    store_rows(key, into, found, written, c.KEY_WIDTH)
    found = load_rows(value_pages, place, seen, c.VALUE_WIDTH)
    if c.VALUE_FP8:
        scales = _scales(value_scale, place, seen, c.VALUE_WIDTH, c)
        found = found.to(tl.float32) * scales
    store_rows(value, into, found, written, c.VALUE_WIDTH)


@triton.jit
def _scales(scale, place, seen, WIDTH, c):
    """Load scales, and repeat each scale over the columns of its head, as float32 `[entries,
    columns]`.
    """
    head = tl.arange(0, columns(WIDTH)) // (WIDTH // c.HEADS)
    at = place // c.PER_PAGE * (c.HEADS * c.PER_PAGE) + place % c.PER_PAGE
    mask = seen[:, None] & (head < c.HEADS)[None, :]
    return tl.load(scale + at[:, None] + head[None, :] * c.PER_PAGE, mask=mask, other=0.0)
