"""Rows of query heads, and what kernels share.

The rows of a key/value head are numbered through: row `r` is head `r % GROUP` of token
`r // GROUP`, so that a tile has no row to spare, regardless of the size of a group.

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
    """`[rows, columns]` of the `[.., WIDTH]` array; zeros where the mask is not set. None: all rows
    are there.
    """
    column = tl.arange(0, columns(WIDTH))
    at = array + row[:, None] * WIDTH + column[None, :]
    if mask is not None:
        mask = mask[:, None]
    return _load(at, mask, (column < WIDTH)[None, :], WIDTH)


@triton.jit
def load_columns(array, row, mask, WIDTH):
    """The transpose of `load_rows`: `[columns, rows]`."""
    column = tl.arange(0, columns(WIDTH))
    at = array + row[None, :] * WIDTH + column[:, None]
    if mask is not None:
        mask = mask[None, :]
    return _load(at, mask, (column < WIDTH)[:, None], WIDTH)


@triton.jit
def _load(at, mask, inside, WIDTH):
    if WIDTH == columns(WIDTH):
        inside = mask
    elif mask is not None:
        inside = mask & inside
    return tl.load(at, mask=inside, other=None if inside is None else 0.0)


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
def raised(most, theirs):
    """The greater of two maxima, and the same for exponents: 0 where nothing is seen."""
    larger = tl.maximum(most, theirs)
    return larger, tl.where(larger == NEGATIVE_INFINITY, 0.0, larger)


@triton.jit
def softmax_step(logits, values, state, c):
    """One step of the online softmax over base-2 logits `[rows, keys]`, -inf: not seen.

    m' = max(m, max S)    P = exp2(S - m')    l' = l exp2(m - m') + sum P
    O' = O exp2(m - m') + P V
    """
    most, total, acc = state
    larger, base = raised(most, tl.max(logits, axis=1))
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
def start(c, BACK):
    """The sums of a query-stationary loop before its first tile of keys: the state of
    `softmax_step`, or if `BACK` dq without the scale, the sum of dS K.
    """
    if BACK:
        return tl.full([c.ROWS, columns(c.WIDTH)], 0.0, tl.float32)
    else:
        return softmax_start(c.ROWS, columns(c.VALUE_WIDTH))


@triton.jit
def load_tile(key, value, skip, at, inner, c, BACK):
    """Keys and values of a tile, at `skip + at`, the latter as their product wants them."""
    keys = load_columns(key + skip * c.WIDTH, at, inner, c.WIDTH)
    if BACK:
        values = load_columns(value + skip * c.VALUE_WIDTH, at, inner, c.VALUE_WIDTH)
    else:
        values = load_rows(value + skip * c.VALUE_WIDTH, at, inner, c.VALUE_WIDTH)
    return keys, values


@triton.jit
def product(rows, tile, scale, c, BACK):
    """S = scale Q K^T, base 2; if `BACK` dS = P * (g dP - (g delta - dlse)). `rows`: of the query,
    or of `rows_back`.
    """
    keys, values = tile
    if BACK:
        query_rows, do_rows, lse_log2, gates, shift = rows
        logits = tl.dot(query_rows, keys, input_precision=c.PRECISION) * scale
        probs = tl.exp2(logits - lse_log2[:, None])
        dp = tl.dot(do_rows, values, input_precision=c.PRECISION)
        return probs * (dp * gates[:, None] - shift[:, None])
    else:
        return tl.dot(rows, keys, input_precision=c.PRECISION) * scale


@triton.jit
def add(state, products, seen, tile, c, BACK):
    """`state` of `start` with a tile of keys, `products` of which are masked by `seen`, where this
    is not None.
    """
    keys, values = tile
    if seen is not None:
        products = tl.where(seen, products, 0.0 if BACK else NEGATIVE_INFINITY)
    if BACK:
        ds = products.to(keys.dtype)
        return tl.dot(ds, tl.trans(keys), state, input_precision=c.PRECISION)
    else:
        return softmax_step(products, values, state, c)


@triton.jit
def store_dq(out, added, row, mask, acc, scale, c):
    """dq = scale * acc, plus the sum so far."""
    acc *= scale
    if c.ADDED:
        acc += load_rows(added, row, mask, c.WIDTH).to(tl.float32)
    store_rows(out, row, acc, mask, c.WIDTH)


@triton.jit
def in_base_2(lse):
    """+inf where nothing is seen: there every probability exp2(S - lse) is 0."""
    return tl.where(lse == NEGATIVE_INFINITY, float("inf"), lse * LOG2E)


@triton.jit
def row_statistics(lse, delta, gate, dlse, row, mask, c):
    """lse_log2, g and g * delta - dlse of each row: dS = P * (g * dP - (g * delta - dlse)).

    Rows that see nothing: lse_log2 is +inf, so that P = exp2(S - lse_log2) is 0.
    """
    log2 = in_base_2(tl.load(lse + row, mask=mask, other=float("-inf")))
    shift = tl.load(delta + row, mask=mask, other=0.0)
    scale = tl.full(shift.shape, 1.0, tl.float32)
    if c.GATED:
        scale = tl.load(gate + row, mask=mask, other=0.0)
        shift = shift * scale
    if c.LSE_GRAD:
        shift -= tl.load(dlse + row, mask=mask, other=0.0)
    return log2, scale, shift


@triton.jit
def rows_back(query, do, lse, delta, gate, dlse, row, mask, c):
    """Of the query and of dO, and their `row_statistics`."""
    rows = load_rows(query, row, mask, c.WIDTH)
    do_rows = load_rows(do, row, mask, c.VALUE_WIDTH)
    lse_log2, gates, shift = row_statistics(lse, delta, gate, dlse, row, mask, c)
    return rows, do_rows, lse_log2, gates, shift
