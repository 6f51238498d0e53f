"""Rows of query heads, and what kernels share.

The rows of a key/value head are numbered through: row `r` is head `r % GROUP` of token
`r // GROUP`, so that a tile has no row to spare, whatever the size of a group.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def pair_of(pair, HEADS: tl.constexpr):
    """Batch row and key/value head, 64-bit: offsets go beyond 2**31."""
    return (pair // HEADS).to(tl.int64), (pair % HEADS).to(tl.int64)


@triton.jit
def load_rows(array, row, mask, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """`[rows, COLUMNS]` of the `[.., WIDTH]` array; zeros where the mask is not set."""
    column = tl.arange(0, COLUMNS)
    at = array + row[:, None] * WIDTH + column[None, :]
    if WIDTH == COLUMNS:
        return tl.load(at, mask=mask[:, None], other=0.0)
    return tl.load(at, mask=mask[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def load_columns(array, row, mask, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """The transpose of `load_rows`: `[COLUMNS, rows]`."""
    column = tl.arange(0, COLUMNS)
    at = array + row[None, :] * WIDTH + column[:, None]
    if WIDTH == COLUMNS:
        return tl.load(at, mask=mask[None, :], other=0.0)
    return tl.load(at, mask=mask[None, :] & (column < WIDTH)[:, None], other=0.0)


@triton.jit
def load_all_rows(array, row, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """`load_rows` of rows that are all there."""
    column = tl.arange(0, COLUMNS)
    at = array + row[:, None] * WIDTH + column[None, :]
    if WIDTH == COLUMNS:
        return tl.load(at)
    return tl.load(at, mask=(column < WIDTH)[None, :], other=0.0)


@triton.jit
def load_all_columns(array, row, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """`load_columns` of rows that are all there."""
    column = tl.arange(0, COLUMNS)
    at = array + row[None, :] * WIDTH + column[:, None]
    if WIDTH == COLUMNS:
        return tl.load(at)
    return tl.load(at, mask=(column < WIDTH)[:, None], other=0.0)


@triton.jit
def store_rows(array, row, values, mask, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Writes `[rows, COLUMNS]` where the mask is set."""
    column = tl.arange(0, COLUMNS)
    at = array + row[:, None] * WIDTH + column[None, :]
    mask = mask[:, None] & (column < WIDTH)[None, :]
    tl.store(at, values.to(array.dtype.element_ty), mask=mask)


@triton.jit
def softmax_step(logits, values, most, total, acc, PRECISION: tl.constexpr):
    """One step of the online softmax over base-2 logits `[rows, keys]`, -inf: not seen.

    m' = max(m, max S)    P = exp2(S - m')    l' = l exp2(m - m') + sum P
    O' = O exp2(m - m') + P V
    """
    larger = tl.maximum(most, tl.max(logits, axis=1))
    base = tl.where(larger == NEGATIVE_INFINITY, 0.0, larger)
    probs = tl.exp2(logits - base[:, None])
    less = tl.exp2(most - base)
    total = total * less + tl.sum(probs, axis=1)
    acc = acc * less[:, None]
    acc = tl.dot(probs.to(values.dtype), values, acc, input_precision=PRECISION)
    return larger, total, acc


@triton.jit
def store_attention(
    out,
    lse,
    gate,
    added,
    row,
    mask,
    state,
    VALUE_WIDTH: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
):
    """O = acc / l, times the gate, plus the sum so far; lse = ln 2 * (m + log2 l). `state`: what
    `softmax_step` returns.
    """
    most, total, acc = state
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    acc = acc / total[:, None]
    natural = tl.where(empty, NEGATIVE_INFINITY, (most + tl.log2(total)) * LN2)
    if GATED:
        acc *= tl.load(gate + row, mask=mask, other=0.0)[:, None]
    if ADDED:
        acc += load_rows(added, row, mask, VALUE_WIDTH, VALUE_COLUMNS).to(tl.float32)
    store_rows(out, row, acc, mask, VALUE_WIDTH, VALUE_COLUMNS)
    tl.store(lse + row, natural, mask=mask)


@triton.jit
def logits_gradient(
    rows, do_rows, keys, values, lse_log2, gates, shift, scale, PRECISION: tl.constexpr
):
    """dS = P * (g dP - (g delta - dlse)), `[rows, keys]`, of keys and values `[columns, keys]`."""
    logits = tl.dot(rows, keys, input_precision=PRECISION) * scale
    probs = tl.exp2(logits - lse_log2[:, None])
    dp = tl.dot(do_rows, values, input_precision=PRECISION)
    return probs * (dp * gates[:, None] - shift[:, None])


@triton.jit
def store_dq(
    out,
    added,
    row,
    mask,
    acc,
    scale,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADDED: tl.constexpr,
):
    """dq = scale * acc, plus the sum so far."""
    acc *= scale
    if ADDED:
        acc += load_rows(added, row, mask, WIDTH, COLUMNS).to(tl.float32)
    store_rows(out, row, acc, mask, WIDTH, COLUMNS)


@triton.jit
def row_statistics(
    lse, delta, gate, dlse, row, mask, GATED: tl.constexpr, LSE_GRAD: tl.constexpr
):
    """lse_log2, g and g * delta - dlse of each row: dS = P * (g * dP - (g * delta - dlse)).

    Rows that see nothing: lse_log2 is +inf, so that P = exp2(S - lse_log2) is 0.
    """
    natural = tl.load(lse + row, mask=mask, other=float("-inf"))
    log2 = tl.where(natural == NEGATIVE_INFINITY, float("inf"), natural * LOG2E)
    shift = tl.load(delta + row, mask=mask, other=0.0)
    scale = tl.full(shift.shape, 1.0, tl.float32)
    if GATED:
        scale = tl.load(gate + row, mask=mask, other=0.0)
        shift = shift * scale
    if LSE_GRAD:
        shift -= tl.load(dlse + row, mask=mask, other=0.0)
    return log2, scale, shift
