"""Copies rows between an array and a contiguous buffer, and computes the sums that are the
gradients of these copies. The array is `[batch, tokens, heads, width]` with any strides, and the
buffer is `[rows, width]`. A range has consecutive tokens of one head of one batch row. Three
numbers describe a range: its first token, its length, and its first row in the buffer. Ranges are
listed in the order `[batch, query, head, slot]`. A range's index in the list determines its batch
row and its head, so a range needs only 24 bytes of indices. A range of length 0 is an empty slot.

Offsets are 64-bit. Tokens outside the array read as 0 and are never written.
"""

from typing import NamedTuple

import triton
import triton.language as tl

# arguments whose values must not cause a new compilation
SIZES = ["tokens", "heads", "slots", "per_batch", "tiles"]


class Tile(NamedTuple):
    """The compiled constants of the kernels. TERMS is the number of tiles of `sum_ranges`, and
    HEADS is the number of heads of `gather_rows`.
    """

    WIDTH: int
    ROWS: int
    COLUMNS: int
    TERMS: int = 1
    HEADS: int = 0

    @property
    def options(self) -> dict[str, int]:
        """The options of a launch."""
        # 64 elements per thread: eight reads of 16 bytes for elements of two bytes. There is
        # nothing to fuse, and newer versions of Triton warn without this option.
        warps = min(max(self.ROWS * self.COLUMNS * self.TERMS // 2048, 1), 4)
        return {"num_warps": warps, "enable_fp_fusion": False}


def tile(longest: int, width: int, heads: int = 0) -> Tile:
    """Return the tile of `gather_ranges`, `gather_rows` and `add_ranges`, at most 8192 elements.

    The number of columns is the largest power of two that divides `width`. For example, a width of
    192 is processed as three times 64 columns, so that no lane is idle. A divisor below 32 is not
    used, since the parts of a row would be too small for one warp.

    Args:
      longest: Number of rows of the longest range.
      width: Number of elements per row.
      heads: Number of heads of `gather_rows`, and 0 for other kernels.
    """
    columns = width & -width
    columns = min(columns if columns >= 32 else triton.next_power_of_2(width), 256)
    rows = min(triton.next_power_of_2(longest), 8192 // columns)
    return Tile(width, rows, columns, HEADS=heads)


def sum_tile(longest: int, width: int) -> Tile:
    """Return the tile for `sum_ranges`, which has TERMS tiles in registers and loops over long
    lists.

    A program has few rows, so that many programs share the list of the block that all queries
    read. A step has several ranges, so that their loads overlap.
    """
    rows = min(triton.next_power_of_2(longest), 8)
    return tile(longest, width)._replace(ROWS=rows, TERMS=8)


@triton.jit
def _tile_of(item, part, start, tokens, heads, slots, per_batch, c):
    """Return the indices for a part of a range: the batch row, the head, the rows in the range, the
    columns, the tokens of the rows, and a mask of the tokens that exist in the array.
    """
    batch, head = item // per_batch, item // slots % heads
    row = part * c.ROWS + tl.arange(0, c.ROWS)
    column = tl.program_id(1) * c.COLUMNS + tl.arange(0, c.COLUMNS)
    token = tl.load(start + item) + row
    there = (token >= 0) & (token < tokens)
    return batch.to(tl.int64), head.to(tl.int64), row, column, token, there


@triton.jit(do_not_specialize=SIZES)
def gather_ranges(
    source, packed, start, length, place,
    tokens, heads, slots, per_batch, tiles,
    source_batch, source_token, source_head, source_column, c: tl.constexpr,
):  # fmt: skip
    """Write the tokens of every range to the buffer, from row `place` on.

    Grid: (ranges * tiles, columns); `tiles * ROWS` covers the longest range.

    Args:
      source: `[batch, tokens, heads, WIDTH]` with the strides `source_*`, in elements.
      packed: contiguous `[rows, WIDTH]`; rows outside all ranges are not written.
      start, length, place: int64, contiguous, one entry per range.
      slots: Number of ranges per query and head.
      per_batch: Number of ranges per batch row.
    """
    item, part = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    batch, head, row, column, token, there = _tile_of(
        item, part, start, tokens, heads, slots, per_batch, c
    )
    inside = row < tl.load(length + item)
    there &= inside
    wide = (column < c.WIDTH)[None, :]
    source += batch * source_batch + head * source_head
    source += (token * source_token)[:, None] + (column * source_column)[None, :]
    packed += ((tl.load(place + item) + row) * c.WIDTH)[:, None] + column[None, :]
    values = tl.load(source, mask=there[:, None] & wide, other=0)
    tl.store(packed, values, mask=inside[:, None] & wide)


@triton.jit(do_not_specialize=["count", "tokens", "batches"])
def gather_rows(
    source, packed, rows,
    count, tokens, batches,
    source_batch, source_token, source_head, source_column, c: tl.constexpr,
):  # fmt: skip
    """Copy row `rows[i]` of the `[batches * tokens]` rows of `source`, with all heads, to row i of
    `packed`.

    If `rows[i]` is invalid, write 0.

    Grid: (ceil(count / ROWS), columns, HEADS).

    Args:
      source: `[batches, tokens, HEADS, WIDTH]` with the strides `source_*`, in elements.
      packed: contiguous `[count, HEADS, WIDTH]`, every row written.
      rows: int64 `[count]`. An index outside the array, such as -1, is invalid.
    """
    item = tl.program_id(0).to(tl.int64) * c.ROWS + tl.arange(0, c.ROWS)
    column = tl.program_id(1) * c.COLUMNS + tl.arange(0, c.COLUMNS)
    head = tl.program_id(2).to(tl.int64)
    row = tl.load(rows + item, mask=item < count, other=-1)
    batch = row // tokens
    there = (row >= 0) & (batch < batches)
    wide = (column < c.WIDTH)[None, :]
    offset = batch * source_batch + (row - batch * tokens) * source_token
    source += head * source_head + offset[:, None] + (column * source_column)[None, :]
    packed += ((item * c.HEADS + head) * c.WIDTH)[:, None] + column[None, :]
    values = tl.load(source, mask=there[:, None] & wide, other=0)
    tl.store(packed, values, mask=(item < count)[:, None] & wide)


@triton.jit(do_not_specialize=SIZES)
def add_ranges(
    total, grad, start, length, place,
    tokens, heads, slots, per_batch, tiles,
    grad_row, grad_column, c: tl.constexpr,
):  # fmt: skip
    """Add the rows of every range to its tokens with atomics. Atomics are fast, but the order of
    sums is not fixed.

    The grid and the ranges are the same as in `gather_ranges`.

    Args:
      total: float32 `[batch, tokens, heads, WIDTH]`, contiguous.
      grad: `[rows, WIDTH]` with the strides `grad_*`; rows outside all ranges are not read.
    """
    item, part = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    batch, head, row, column, token, there = _tile_of(
        item, part, start, tokens, heads, slots, per_batch, c
    )
    there &= row < tl.load(length + item)
    mask = there[:, None] & (column < c.WIDTH)[None, :]
    grad += ((tl.load(place + item) + row) * grad_row)[:, None]
    grad += (column * grad_column)[None, :]
    total += (((batch * tokens + token) * heads + head) * c.WIDTH)[:, None] + column[None, :]
    values = tl.load(grad, mask=mask, other=0).to(total.dtype.element_ty)
    tl.atomic_add(total, values, mask=mask, sem="relaxed")


@triton.jit(do_not_specialize=SIZES)
def sum_ranges(
    total, grad, block, order, end, start, length, place,
    tokens, heads, slots, per_batch, tiles,
    grad_row, grad_column, c: tl.constexpr,
):  # fmt: skip
    """Add the rows of every range to its tokens, as `add_ranges` does.

    The result has the same bits for any schedule of the programs.

    The inverse list groups the ranges of a head that begin at the same token. A group of ranges
    that begin at the same token is called a block. A single program sums the rows of a block in the
    order of the list and adds the sum to `total`. Two ranges of a head must begin at the same token
    or share no token, so that each token belongs to one block. The grid is the same as in
    `gather_ranges`. Only the program of a block's first range has work.

    Args:
      block: int64, ascending, one number per entry of the list. The number of an entry identifies
        the batch row, the head and the first token of its range. -1 means that the range is empty.
      order: int64: the index of the range that each entry of the list refers to.
      end: int64: for each entry, the end of the entries of its block.
    """
    entry, part = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    own = tl.load(block + entry)
    before = tl.load(block + entry - 1, mask=entry > 0, other=-1)
    if own != before:  # an empty range is never the first of a block
        item = tl.load(order + entry)
        batch, head, row, column, token, there = _tile_of(
            item, part, start, tokens, heads, slots, per_batch, c
        )
        wide = column < c.WIDTH
        columns = grad + (column * grad_column)[None, None, :]
        found = tl.full([c.ROWS, c.COLUMNS], 0, total.dtype.element_ty)
        reach = tl.load(length + item)
        last = tl.load(end + entry)
        for first in range(entry.to(tl.int64), last, c.TERMS):
            term = first + tl.arange(0, c.TERMS)
            listed = term < last
            ranges = tl.load(order + term, mask=listed, other=0)
            size = tl.load(length + ranges, mask=listed, other=0)
            begin = tl.load(place + ranges, mask=listed, other=0)
            inside = (row[None, :] < size[:, None]) & there[None, :]  # [TERMS, ROWS]
            offset = (begin[:, None] + row[None, :]) * grad_row
            mask = inside[:, :, None] & wide[None, None, :]
            values = tl.load(columns + offset[:, :, None], mask=mask, other=0)
            found += tl.sum(values.to(found.dtype), axis=0)
            reach = tl.maximum(reach, tl.max(size, axis=0))
        # Tokens beyond the longest range of the block belong to another program.
        mask = (there & (row < reach))[:, None] & wide[None, :]
        offset = ((batch * tokens + token) * heads + head) * c.WIDTH
        sums = total + (offset[:, None] + column[None, :])
        tl.store(sums, tl.load(sums, mask=mask, other=0) + found, mask=mask)
