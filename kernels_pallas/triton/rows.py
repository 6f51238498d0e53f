"""Rows of query heads, and what kernels share.

The rows of a key/value head are numbered through: row `r` is head `r % GROUP` of token
`r // GROUP`, so that a tile has no row to spare, whatever the size of a group.

`c`, the last argument of a kernel, is what is compiled in: a NamedTuple of the descriptions. For
Triton 3.6 and 3.7 its fields are plain numbers, of which functions written in Triton (`tl.zeros`)
take no list, and `tl.static_range` no bound; nor do functions take a string.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


@triton.constexpr_function
def columns(width):
    """Of a tile of rows of this width: the least power of two that a product takes (`tiling`)."""
    return max(triton.next_power_of_2(width), 16)


@triton.jit
def pair_of(pair, HEADS):
    """Batch row and key/value head, 64-bit: offsets go beyond 2**31."""
    return (pair // HEADS).to(tl.int64), (pair % HEADS).to(tl.int64)


@triton.jit
def load_rows(array, row, mask, WIDTH):
    """`[rows, columns]` of the `[.., WIDTH]` array; zeros where the mask is not set."""
    column = tl.arange(0, columns(WIDTH))
    at = array + row[:, None] * WIDTH + column[None, :]
    if WIDTH == columns(WIDTH):
        return tl.load(at, mask=mask[:, None], other=0.0)
    return tl.load(at, mask=mask[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def load_columns(array, row, mask, WIDTH):
    """The transpose of `load_rows`: `[columns, rows]`."""
    column = tl.arange(0, columns(WIDTH))
    at = array + row[None, :] * WIDTH + column[:, None]
    if WIDTH == columns(WIDTH):
        return tl.load(at, mask=mask[None, :], other=0.0)
    return tl.load(at, mask=mask[None, :] & (column < WIDTH)[:, None], other=0.0)


@triton.jit
def load_all_rows(array, row, WIDTH):
    """`load_rows` of rows that are all there."""
    column = tl.arange(0, columns(WIDTH))
    at = array + row[:, None] * WIDTH + column[None, :]
    if WIDTH == columns(WIDTH):
        return tl.load(at)
    return tl.load(at, mask=(column < WIDTH)[None, :], other=0.0)


@triton.jit
def load_all_columns(array, row, WIDTH):
    """`load_columns` of rows that are all there."""
    column = tl.arange(0, columns(WIDTH))
    at = array + row[None, :] * WIDTH + column[:, None]
    if WIDTH == columns(WIDTH):
        return tl.load(at)
    return tl.load(at, mask=(column < WIDTH)[:, None], other=0.0)


@triton.jit
def store_rows(array, row, values, mask, WIDTH):
    """Writes `[rows, columns]` where the mask is set."""
    column = tl.arange(0, columns(WIDTH))
    at = array + row[:, None] * WIDTH + column[None, :]
    mask = mask[:, None] & (column < WIDTH)[None, :]
    tl.store(at, values.to(array.dtype.element_ty), mask=mask)


@triton.jit
def softmax_start(ROWS, COLUMNS):
    """The state of `softmax_step` before the first: maxima, sums and outputs that are not
    normalised.
    """
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    return most, total, tl.full([ROWS, COLUMNS], 0.0, tl.float32)


@triton.jit
def softmax_step(logits, values, state, c):
    """One step of the online softmax over base-2 logits `[rows, keys]`, -inf: not seen.

    m' = max(m, max S)    P = exp2(S - m')    l' = l exp2(m - m') + sum P
    O' = O exp2(m - m') + P V
    """
    most, total, acc = state
    larger = tl.maximum(most, tl.max(logits, axis=1))
    base = tl.where(larger == NEGATIVE_INFINITY, 0.0, larger)
    probs = tl.exp2(logits - base[:, None])
    less = tl.exp2(most - base)
    total = total * less + tl.sum(probs, axis=1)
    acc = acc * less[:, None]
    acc = tl.dot(probs.to(values.dtype), values, acc, input_precision=c.PRECISION)
    return larger, total, acc


@triton.jit
def store_attention(out, lse, gate, added, row, mask, state, c):
    """O = acc / l, times the gate, plus the sum so far; lse = ln 2 * (m + log2 l). `state`: what
    `softmax_step` returns.
    """
    most, total, acc = state
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    acc = acc / total[:, None]
    natural = tl.where(empty, NEGATIVE_INFINITY, (most + tl.log2(total)) * LN2)
    if c.GATED:
        acc *= tl.load(gate + row, mask=mask, other=0.0)[:, None]
    if c.ADDED:
        acc += load_rows(added, row, mask, c.VALUE_WIDTH).to(tl.float32)
    store_rows(out, row, acc, mask, c.VALUE_WIDTH)
    tl.store(lse + row, natural, mask=mask)


@triton.jit
def logits_gradient(rows, do_rows, keys, values, statistics, scale, c):
    """dS = P * (g dP - (g delta - dlse)), `[rows, keys]`, of keys and values `[columns, keys]`;
    `statistics`: of `row_statistics`.
    """
    lse_log2, gates, shift = statistics
    logits = tl.dot(rows, keys, input_precision=c.PRECISION) * scale
    probs = tl.exp2(logits - lse_log2[:, None])
    dp = tl.dot(do_rows, values, input_precision=c.PRECISION)
    return probs * (dp * gates[:, None] - shift[:, None])


@triton.jit
def store_dq(out, added, row, mask, acc, scale, c):
    """dq = scale * acc, plus the sum so far."""
    acc *= scale
    if c.ADDED:
        acc += load_rows(added, row, mask, c.WIDTH).to(tl.float32)
    store_rows(out, row, acc, mask, c.WIDTH)


@triton.jit
def row_statistics(lse, delta, gate, dlse, row, mask, c):
    """lse_log2, g and g * delta - dlse of each row: dS = P * (g * dP - (g * delta - dlse)).

    Rows that see nothing: lse_log2 is +inf, so that P = exp2(S - lse_log2) is 0.
    """
    natural = tl.load(lse + row, mask=mask, other=float("-inf"))
    log2 = tl.where(natural == NEGATIVE_INFINITY, float("inf"), natural * LOG2E)
    shift = tl.load(delta + row, mask=mask, other=0.0)
    scale = tl.full(shift.shape, 1.0, tl.float32)
    if c.GATED:
        scale = tl.load(gate + row, mask=mask, other=0.0)
        shift = shift * scale
    if c.LSE_GRAD:
        shift -= tl.load(dlse + row, mask=mask, other=0.0)
    return log2, scale, shift
