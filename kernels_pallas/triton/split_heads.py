"""Splits a fused QKV projection into rotated heads, and back for the gradient; bound by HBM.

A row of the projection holds, one after the other, the query heads, the heads of each branch's keys
and those of each branch's values. A program has one of these heads of `ROWS` tokens. Of query and
keys it turns pairs of columns by their token's angle:

    (a, b) -> (a cos - b sin, a sin + b cos)        back: by the opposite angle

A layer's gates look at the mean of a group's query heads. Forward, programs of their own make it
of what the L2 cache still has; back, a head's gradient gets its share, dmean / G.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.rows import load_rows, store_rows


@triton.jit
def _of_branch(branch, compressed, selected, sliding):
    found = compressed
    if branch == 1:
        found = selected
    elif branch == 2:
        found = sliding
    return found


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
def _split(
    projection,
    heads,
    cos,
    sin,
    token,
    there,
    inside,
    row,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    TURN: tl.constexpr,
):
    """A head of tokens, at `inside` of the projection, to rows `row` of `heads`."""
    column = tl.arange(0, COLUMNS)
    mask = there[:, None] & (column < WIDTH)[None, :]
    x = tl.load(projection + inside[:, None] + column[None, :], mask=mask, other=0.0)
    if TURN:
        x = _turned(x.to(tl.float32), cos, sin, token, there, WIDTH, COLUMNS)
    store_rows(heads, row, x, there, WIDTH, COLUMNS)


@triton.jit
def _join(
    projection,
    heads,
    mean,
    cos,
    sin,
    token,
    there,
    inside,
    row,
    mean_row,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    TURN: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The way back, with a part of the mean's gradient where a mean was made of `GROUP` heads."""
    x = load_rows(heads, row, there, WIDTH, COLUMNS).to(tl.float32)
    if GROUP > 0:
        x += load_rows(mean, mean_row, there, WIDTH, COLUMNS).to(tl.float32) / GROUP
    if TURN:
        x = _turned(x, cos, sin, token, there, WIDTH, COLUMNS)
    column = tl.arange(0, COLUMNS)
    mask = there[:, None] & (column < WIDTH)[None, :]
    at = projection + inside[:, None] + column[None, :]
    tl.store(at, x.to(projection.dtype.element_ty), mask=mask)


@triton.jit
def _mean(
    projection,
    mean,
    cos,
    sin,
    token,
    there,
    inside,
    row,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The mean of `GROUP` query heads, the first at `inside`, each rounded as the query is."""
    column = tl.arange(0, COLUMNS)
    mask = there[:, None] & (column < WIDTH)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in range(GROUP):
        at = projection + inside[:, None] + i * WIDTH + column[None, :]
        x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        x = _turned(x, cos, sin, token, there, WIDTH, COLUMNS)
        total += x.to(projection.dtype.element_ty).to(tl.float32)
    store_rows(mean, row, total / GROUP, there, WIDTH, COLUMNS)


@triton.jit
def _walk(
    projection,
    query,
    compressed_key,
    selected_key,
    sliding_key,
    compressed_value,
    selected_value,
    sliding_value,
    mean,
    cos,
    sin,
    count,
    H: tl.constexpr,
    HKV: tl.constexpr,
    BRANCHES: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    MEANS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BACK: tl.constexpr,
):
    """The head of this program: a query's, a branch's key's or value's, or forward a mean."""
    PAIRS: tl.constexpr = BRANCHES * HKV  # a branch and a head of it
    GROUP: tl.constexpr = H // HKV
    ALL: tl.constexpr = H + 2 * PAIRS + (0 if BACK else MEANS * HKV)
    program = tl.program_id(0)
    token = (program // ALL).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = token < count
    begin = token * (H * D + PAIRS * (D + DV))
    head = program % ALL
    if head < H:
        at, row = begin + head * D, token * H + head
        if BACK:
            group = token * HKV + head // GROUP
            _join(
                projection, query, mean, cos, sin, token, there, at, row, group,
                D, COLUMNS, True, MEANS * GROUP,
            )  # fmt: skip
        else:
            _split(projection, query, cos, sin, token, there, at, row, D, COLUMNS, True)
    elif head < H + PAIRS:
        pair = head - H
        key = _of_branch(pair // HKV, compressed_key, selected_key, sliding_key)
        at, row = begin + head * D, token * HKV + pair % HKV
        if BACK:
            _join(
                projection, key, mean, cos, sin, token, there, at, row, row, D, COLUMNS, True, 0
            )
        else:
            _split(projection, key, cos, sin, token, there, at, row, D, COLUMNS, True)
    elif head < H + 2 * PAIRS:
        pair = head - H - PAIRS
        value = _of_branch(pair // HKV, compressed_value, selected_value, sliding_value)
        at, row = begin + (H + PAIRS) * D + pair * DV, token * HKV + pair % HKV
        if BACK:
            _join(
                projection, value, mean, cos, sin, token, there, at, row, row,
                DV, VALUE_COLUMNS, False, 0,
            )  # fmt: skip
        else:
            _split(projection, value, cos, sin, token, there, at, row, DV, VALUE_COLUMNS, False)
    else:
        group = head - H - 2 * PAIRS
        at, row = begin + group * (GROUP * D), token * HKV + group
        _mean(projection, mean, cos, sin, token, there, at, row, D, COLUMNS, GROUP, ROWS)


@triton.jit(do_not_specialize=["count"])
def split_heads(
    projection, cos, sin, count,
    query, compressed_key, selected_key, sliding_key,
    compressed_value, selected_value, sliding_value, mean,
    H: tl.constexpr, HKV: tl.constexpr, BRANCHES: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, MEANS: tl.constexpr,
    COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Programs: ceil(count / ROWS) times the heads of a row and, with `MEANS`, the means."""
    _walk(
        projection, query, compressed_key, selected_key, sliding_key,
        compressed_value, selected_value, sliding_value, mean, cos, sin, count,
        H, HKV, BRANCHES, D, DV, MEANS, COLUMNS, VALUE_COLUMNS, ROWS, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def join_heads(
    query, compressed_key, selected_key, sliding_key,
    compressed_value, selected_value, sliding_value, mean,
    cos, sin, count, projection,
    H: tl.constexpr, HKV: tl.constexpr, BRANCHES: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, MEANS: tl.constexpr,
    COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradient of `split_heads`, where `sin` is that of the opposite angle.

    Programs: ceil(count / ROWS) times the heads of a row.
    """
    _walk(
        projection, query, compressed_key, selected_key, sliding_key,
        compressed_value, selected_value, sliding_value, mean, cos, sin, count,
        H, HKV, BRANCHES, D, DV, MEANS, COLUMNS, VALUE_COLUMNS, ROWS, True,
    )  # fmt: skip
