"""Copies what pages hold of each row side by side, for attention over whole rows.

A program has some entries of one row, all heads. Entries that no query looks at are zeros, so that
what stands in their pages is neither read nor multiplied. What bounds it is the memory's
bandwidth: each entry is read once and written once. Entries in fp8 are written as 16 bits or 32.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.decode import entry_place
from kernels_pallas.triton.rows import load_rows, store_rows


@triton.jit(do_not_specialize=["M", "P", "S", "reach"])
def gather(
    pages,
    scale,
    page_table,
    lengths,
    M,
    P,
    S,
    reach,
    out,
    PER_PAGE: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
    ELEMENTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ENTRIES: tl.constexpr,
    HEADS: tl.constexpr,
    FP8: tl.constexpr,
):
    """Programs: B * cdiv(S, ENTRIES).

    Args:
      pages: `[P, PER_PAGE, ELEMENTS]`; scale: float32 `[P, HEADS, PER_PAGE]`, read if `FP8`.
      page_table: int32 `[B, M]`; lengths: int32 `[B]`.
      S: entries of a row; entry `i` stands at place `FIRST + i` of the row's pages and is of the
        tokens `i STRIDE .. i STRIDE + BLOCK - 1`.
      reach: the last tokens of a row, which are looked at.
      out: `[B, S, ELEMENTS]`.
    """
    tiles = tl.cdiv(S, ENTRIES)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    entry = tl.program_id(0) % tiles * ENTRIES + tl.arange(0, ENTRIES)
    inside = entry < S
    length = tl.minimum(tl.load(lengths + row), M * (PER_PAGE * STRIDE))
    token = entry * STRIDE
    seen = inside & (token + BLOCK <= length) & (token >= length - reach)
    place = entry_place(page_table + row * M, entry + FIRST, seen, P, PER_PAGE)
    found = load_rows(pages, place, seen, ELEMENTS, COLUMNS)
    if FP8:
        head = tl.arange(0, COLUMNS) // (ELEMENTS // HEADS)
        at = place // PER_PAGE * (HEADS * PER_PAGE) + place % PER_PAGE
        mask = seen[:, None] & (head < HEADS)[None, :]
        scales = tl.load(scale + at[:, None] + head[None, :] * PER_PAGE, mask=mask, other=0.0)
        found = found.to(tl.float32) * scales
    store_rows(out, row * S + entry, found, inside, ELEMENTS, COLUMNS)
