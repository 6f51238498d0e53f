"""Query, keys and values of a layer out of one product and back, rotated; bound by HBM.

A row of the product holds, one after the other, the query heads, the heads of each branch's keys
and those of each branch's values. A program has one of these heads of `ROWS` tokens. Of query and
keys it turns pairs of columns by their token's angle:

    (a, b) -> (a cos - b sin, a sin + b cos)        back: by the opposite angle
"""

import triton
import triton.language as tl


@triton.jit
def _turned(x, cos, sin, token, there, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Float32 rows `x` [ROWS, COLUMNS] by the angles `[.., WIDTH / 2]` of tokens."""
    PAIRS: tl.constexpr = COLUMNS // 2
    pair = tl.arange(0, PAIRS)
    at = token[:, None] * (WIDTH // 2) + pair[None, :]
    mask = there[:, None] & (pair < WIDTH // 2)[None, :]
    cos_rows = tl.load(cos + at, mask=mask, other=1.0)
    sin_rows = tl.load(sin + at, mask=mask, other=0.0)
    even, odd = tl.split(tl.reshape(x, (x.shape[0], PAIRS, 2)))
    turned = tl.join(even * cos_rows - odd * sin_rows, even * sin_rows + odd * cos_rows)
    return tl.reshape(turned, (x.shape[0], COLUMNS))


@triton.jit
def _move(
    product,
    apart,
    cos,
    sin,
    token,
    there,
    inside,
    row,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    TURN: tl.constexpr,
    BACK: tl.constexpr,
):
    """A head of tokens, at `inside` of the product and in rows `row` of `apart`."""
    column = tl.arange(0, COLUMNS)
    mask = there[:, None] & (column < WIDTH)[None, :]
    joined = product + inside[:, None] + column[None, :]
    split = apart + row[:, None] * WIDTH + column[None, :]
    if BACK:
        source, target = split, joined
    else:
        source, target = joined, split
    x = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    if TURN:
        x = _turned(x, cos, sin, token, there, WIDTH, COLUMNS)
    tl.store(target, x.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _walk(
    product,
    query,
    key,
    value,
    cos,
    sin,
    count,
    H: tl.constexpr,
    HKV: tl.constexpr,
    BRANCHES: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BACK: tl.constexpr,
):
    """The head of this program, of all that a row holds."""
    PAIRS: tl.constexpr = BRANCHES * HKV  # a branch and a head of it
    KEYS: tl.constexpr = H * D
    VALUES: tl.constexpr = KEYS + PAIRS * D
    ROW: tl.constexpr = VALUES + PAIRS * DV
    program = tl.program_id(0)
    token = (program // (H + 2 * PAIRS)).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = token < count
    head = program % (H + 2 * PAIRS)
    begin = token * ROW
    if head < H:
        at, row = begin + head * D, token * H + head
        _move(product, query, cos, sin, token, there, at, row, D, COLUMNS, True, BACK)
    elif head < H + PAIRS:
        pair = head - H
        at, row = begin + KEYS + pair * D, (pair // HKV * count + token) * HKV + pair % HKV
        _move(product, key, cos, sin, token, there, at, row, D, COLUMNS, True, BACK)
    else:
        pair = head - H - PAIRS
        at, row = begin + VALUES + pair * DV, (pair // HKV * count + token) * HKV + pair % HKV
        _move(product, value, cos, sin, token, there, at, row, DV, VALUE_COLUMNS, False, BACK)


@triton.jit(do_not_specialize=["count"])
def split_heads(
    product,
    cos,
    sin,
    count,
    query,
    key,
    value,
    H: tl.constexpr,
    HKV: tl.constexpr,
    BRANCHES: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Programs: ceil(count / ROWS) times the heads of a row."""
    _walk(
        product, query, key, value, cos, sin, count,
        H, HKV, BRANCHES, D, DV, COLUMNS, VALUE_COLUMNS, ROWS, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def join_heads(
    query,
    key,
    value,
    cos,
    sin,
    count,
    product,
    H: tl.constexpr,
    HKV: tl.constexpr,
    BRANCHES: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The gradient of `split_heads`, where `sin` is that of the opposite angle."""
    _walk(
        product, query, key, value, cos, sin, count,
        H, HKV, BRANCHES, D, DV, COLUMNS, VALUE_COLUMNS, ROWS, True,
    )  # fmt: skip
