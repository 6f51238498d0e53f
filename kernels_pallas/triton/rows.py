"""Functions on rows of query heads, which all Triton kernels share.

The rows of a key/value head are numbered consecutively, so a tile has no unused row, regardless of
the size of a group. Row `r` is head `r % GROUP` of token `r // GROUP`.

The last argument of a kernel, `c`, is the NamedTuple of compiled constants from the descriptions.
In Triton 3.6 and 3.7 the fields of `c` are plain numbers. In Triton 3.6 and 3.7, functions written
in Triton (`tl.zeros`) do not accept lists of plain numbers. `tl.static_range` does not accept a
plain number as a bound. Triton functions do not accept strings.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


@triton.constexpr_function
def columns(width):
    """Return the number of columns of a tile whose rows have the width `width`. The result is the
    smallest power of two that holds a row and that a product supports (`tiling`).
    """
    return max(triton.next_power_of_2(width), 16)


@triton.jit
def pair_of(pair, HEADS):
    """Return the batch row and the key/value head as 64-bit numbers, since offsets may exceed
    2**31.
    """
    return (pair // HEADS).to(tl.int64), (pair % HEADS).to(tl.int64)


@triton.jit
def load_rows(array, row, mask, WIDTH):
    """Load `[rows, columns]` of the `[.., WIDTH]` array, with zeros for rows that are not in
    `mask`. If `mask` is None, all rows are loaded.
    """
    column = tl.arange(0, columns(WIDTH))
    at = array + row[:, None] * WIDTH + column[None, :]
    if mask is not None:
        mask = mask[:, None]
    return _load(at, mask, (column < WIDTH)[None, :], WIDTH)


@triton.jit
def load_columns(array, row, mask, WIDTH):
    """Load the transpose of the result of `load_rows`, `[columns, rows]`."""
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
    """Store `[rows, columns]` for the rows in the mask."""
    column = tl.arange(0, columns(WIDTH))
    at = array + row[:, None] * WIDTH + column[None, :]
    mask = mask[:, None] & (column < WIDTH)[None, :]
    tl.store(at, values.to(array.dtype.element_ty), mask=mask)


@triton.jit
def dot(a, b, c, acc=None):
    """Return A B + `acc`."""
    return tl.dot(a, b, acc, input_precision=c.PRECISION)


@triton.jit
def softmax_start(ROWS, COLUMNS):
    """Return the state before the first `softmax_step`. The state has maxima, sums and
    unnormalised outputs.
    """
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    return most, total, tl.full([ROWS, COLUMNS], 0.0, tl.float32)


@triton.jit
def raised(most, theirs):
    """Return the greater of two maxima, and the number to subtract from exponents. The number to
    subtract is the greater maximum, or 0 if there were no keys.
    """
    larger = tl.maximum(most, theirs)
    return larger, tl.where(larger == NEGATIVE_INFINITY, 0.0, larger)


@triton.jit
def softmax_step(logits, values, state, c):
    """Compute one step of the online softmax over base-2 logits `[rows, keys]`, which are -inf
    for masked keys.

    m' = max(m, max S)    P = exp2(S - m')    l' = l exp2(m - m') + sum P
    O' = O exp2(m - m') + P V
    """
    most, total, acc = state
    larger, base = raised(most, tl.max(logits, axis=1))
    probs = tl.exp2(logits - base[:, None])
    less = tl.exp2(most - base)
    total = total * less + tl.sum(probs, axis=1)
    acc = acc * less[:, None]
    acc = dot(probs.to(values.dtype), values, c, acc)
    return larger, total, acc


@triton.jit
def store_attention(out, lse, gate, added, row, mask, state, c):
    """Store the output, which is gate * acc / l plus the array `added`, and lse = ln 2 * (m + log2
    l). `state` is the result of `softmax_step`.
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
    """Return the initial sums of a query-stationary loop. In the forward pass the sums are the
    state of `softmax_step`. If `BACK` is true, the sum is dq without the scale, which is the sum of
    dS K.
    """
    if BACK:
        return tl.full([c.ROWS, columns(c.WIDTH)], 0.0, tl.float32)
    else:
        return softmax_start(c.ROWS, columns(c.VALUE_WIDTH))


@triton.jit
def load_tile(key, value, skip, at, inner, c, BACK):
    """Load the keys and values of a tile at `skip + at`. The tile of values has the layout that its
    product needs.
    """
    keys = load_columns(key + skip * c.WIDTH, at, inner, c.WIDTH)
    if BACK:
        values = load_columns(value + skip * c.VALUE_WIDTH, at, inner, c.VALUE_WIDTH)
    else:
        values = load_rows(value + skip * c.VALUE_WIDTH, at, inner, c.VALUE_WIDTH)
    return keys, values


@triton.jit
def product(rows, tile, scale, c, BACK):
    """Return S = scale Q K^T in base 2. If `BACK` is true, return dS = P * (g dP - (g delta -
    dlse)). `rows` has the rows of the query, or is the result of `rows_back`.
    """
    keys, values = tile
    if BACK:
        query_rows, do_rows, lse_log2, gates, shift = rows
        logits = dot(query_rows, keys, c) * scale
        probs = tl.exp2(logits - lse_log2[:, None])
        dp = dot(do_rows, values, c)
        return probs * (dp * gates[:, None] - shift[:, None])
    else:
        return dot(rows, keys, c) * scale


@triton.jit
def add(state, products, seen, tile, c, BACK):
    """Add a tile of keys to the state of `start`.

    If `seen` is not None, `seen` masks `products`.
    """
    keys, values = tile
    if seen is not None:
        products = tl.where(seen, products, 0.0 if BACK else NEGATIVE_INFINITY)
    if BACK:
        ds = products.to(keys.dtype)
        return dot(ds, tl.trans(keys), c, state)
    else:
        return softmax_step(products, values, state, c)


@triton.jit
def store_dq(out, added, row, mask, acc, scale, c):
    """Store dq, which is scale * acc plus the array `added`."""
    acc *= scale
    if c.ADDED:
        acc += load_rows(added, row, mask, c.WIDTH).to(tl.float32)
    store_rows(out, row, acc, mask, c.WIDTH)


@triton.jit
def in_base_2(lse):
    """Return lse in base 2. Rows without keys have +inf, so that every probability exp2(S - lse)
    is 0.
    """
    return tl.where(lse == NEGATIVE_INFINITY, float("inf"), lse * LOG2E)


@triton.jit
def row_statistics(lse, delta, gate, dlse, row, mask, c):
    """Return lse_log2, g and g * delta - dlse of each row, for dS = P * (g * dP - (g * delta -
    dlse)).

    For rows without keys lse_log2 is +inf, so that P = exp2(S - lse_log2) is 0.
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
    """Load the rows of the query and of dO, and their `row_statistics`."""
    rows = load_rows(query, row, mask, c.WIDTH)
    do_rows = load_rows(do, row, mask, c.VALUE_WIDTH)
    lse_log2, gates, shift = row_statistics(lse, delta, gate, dlse, row, mask, c)
    return rows, do_rows, lse_log2, gates, shift
