"""Splits a fused QKV projection into rotated heads, and back for the gradient; bound by HBM.

A row of the projection holds, one after the other, the query heads, the heads of each branch's keys
and those of each branch's values. A program has one of these heads of `ROWS` tokens. Of query and
keys it turns pairs of columns by their token's angle:

    (a, b) -> (a cos - b sin, a sin + b cos)        back: by the opposite angle

Where the layer has norms, a head x of query and keys is normed before, with weights w of all query
or of all key heads:

    r = rsqrt(mean(x^2) + eps),  x' = x r w
    dx = r (dx' w - x r mean(dx' w x r)),  dw = sum(dx' x r)

A program's dw is a partial, of its tokens and its head. The way back reads x again.

Gates that look at the mean of a group's query heads: forward, programs of their own make it of
what the L2 cache still has; back, a head's gradient gets its share, dmean / G.

Gates of the layer's input stand behind the values. A program has those of all heads of its tokens;
back, it fills the row with zeros: a gradient is read to its end.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.rows import columns, load_rows, store_rows


@triton.jit
def _of_branch(heads, branch, FIRST):
    found = heads[FIRST]
    if branch == 1:
        found = heads[FIRST + 1]
    elif branch == 2:
        found = heads[FIRST + 2]
    return found


@triton.jit
def _turned(x, angles, there, WIDTH):
    """Float32 rows `x` [ROWS, columns] by the angles `[.., width / 2]`, cos and sin, of tokens."""
    cos, sin, token = angles
    PAIRS: tl.constexpr = columns(WIDTH) // 2
    pair = tl.arange(0, PAIRS)
    at = token[:, None] * (WIDTH // 2) + pair[None, :]
    mask = there[:, None] & (pair < WIDTH // 2)[None, :]
    cos_rows = tl.load(cos + at, mask=mask, other=1.0)
    sin_rows = tl.load(sin + at, mask=mask, other=0.0)
    even, odd = tl.split(tl.reshape(x, (x.shape[0], PAIRS, 2)))
    turned = tl.join(even * cos_rows - odd * sin_rows, even * sin_rows + odd * cos_rows)
    return tl.reshape(turned, (x.shape[0], columns(WIDTH)))


@triton.jit
def _reciprocal(x, eps, WIDTH):
    """1 / rms of float32 rows `x`, whose columns behind the width are zero: `[ROWS, 1]`."""
    return tl.math.rsqrt(tl.sum(x * x, axis=1)[:, None] / WIDTH + eps)


@triton.jit
def _weight(norm, WIDTH):
    column = tl.arange(0, columns(WIDTH))
    return tl.load(norm + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _normed(x, norm, eps, WIDTH):
    return x * _reciprocal(x, eps, WIDTH) * _weight(norm, WIDTH)


@triton.jit
def _head(
    projection, heads, mean, given, norm, eps, partial, angles, there, turning, inside, row,
    mean_row, WIDTH, TURN, GROUP, NORMS, BACK,
):  # fmt: skip
    """A head of tokens, at `inside` of the projection, to rows `row` of `heads`, turned where
    `turning`.

    Back, with a part of the mean's gradient where a mean was made of `GROUP` heads. `given` is the
    projection that was split, `partial` the place of this program's dw.
    """
    column = tl.arange(0, columns(WIDTH))
    if BACK:
        x = load_rows(heads, row, there, WIDTH).to(tl.float32)
        if GROUP > 0:
            x += load_rows(mean, mean_row, there, WIDTH).to(tl.float32) / GROUP
        if TURN:
            x = _turned(x, angles, turning, WIDTH)
        mask = there[:, None] & (column < WIDTH)[None, :]
        if NORMS:
            at = given + inside[:, None] + column[None, :]
            head = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            reciprocal = _reciprocal(head, eps, WIDTH)
            head *= reciprocal
            tl.store(partial + column, tl.sum(x * head, axis=0), mask=column < WIDTH)
            x *= _weight(norm, WIDTH)
            x = (x - head * (tl.sum(x * head, axis=1)[:, None] / WIDTH)) * reciprocal
        at = projection + inside[:, None] + column[None, :]
        tl.store(at, x.to(projection.dtype.element_ty), mask=mask)
    else:
        mask = there[:, None] & (column < WIDTH)[None, :]
        x = tl.load(projection + inside[:, None] + column[None, :], mask=mask, other=0.0)
        if NORMS:
            x = _normed(x.to(tl.float32), norm, eps, WIDTH)
        if TURN:
            x = _turned(x.to(tl.float32), angles, turning, WIDTH)
        store_rows(heads, row, x, there, WIDTH)


@triton.jit
def _join_gates(projection, gates, token, there, inside, WIDTH, FILLED):
    """Rows of `gates`, and zeros up to `FILLED` columns."""
    x = load_rows(gates, token, there, WIDTH)
    column = tl.arange(0, columns(WIDTH))
    at = projection + inside[:, None] + column[None, :]
    tl.store(at, x, mask=there[:, None] & (column < FILLED)[None, :])


@triton.jit
def _mean(projection, mean, norm, eps, angles, there, inside, row, WIDTH, GROUP, ROWS, NORMS):
    """The mean of `GROUP` query heads, the first at `inside`, each rounded as the query is."""
    column = tl.arange(0, columns(WIDTH))
    mask = there[:, None] & (column < WIDTH)[None, :]
    total = tl.full((ROWS, columns(WIDTH)), 0.0, tl.float32)
    for i in range(GROUP):
        at = projection + inside[:, None] + i * WIDTH + column[None, :]
        x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        if NORMS:
            x = _normed(x, norm, eps, WIDTH)
        x = _turned(x, angles, there, WIDTH)
        total += x.to(projection.dtype.element_ty).to(tl.float32)
    store_rows(mean, row, total / GROUP, there, WIDTH)


@triton.jit
def _walk(
    projection, heads, given, query_norm, key_norm, partials, cos, sin, count, eps, c, BACK, NORMS
):  # fmt: skip
    """The head of this program: a query's, a branch's key's or value's, all gates, or forward a
    mean. `heads`: query, three keys, three values, mean, gates.
    """
    query, mean, gates = heads[0], heads[7], heads[8]
    PAIRS: tl.constexpr = c.BRANCHES * c.HEADS  # a branch and a head of it
    GROUP: tl.constexpr = c.GROUP
    QUERIES: tl.constexpr = GROUP * c.HEADS
    OWN: tl.constexpr = QUERIES + 2 * PAIRS + (1 if c.GATES > 0 else 0)
    ALL: tl.constexpr = OWN + (0 if BACK else c.MEANS * c.HEADS)
    program = tl.program_id(0)
    tile = (program // ALL).to(tl.int64)
    token = tile * c.ROWS + tl.arange(0, c.ROWS)
    there = token < count
    angles = cos, sin, token
    begin = token * c.ROW
    head = program % ALL
    partial = partials
    if NORMS and BACK:
        partial += (tile * (QUERIES + PAIRS) + head) * c.WIDTH  # of values: not used
    if head < QUERIES:
        at, row = begin + head * c.WIDTH, token * QUERIES + head
        group = token * c.HEADS + head // GROUP
        _head(
            projection, query, mean, given, query_norm, eps, partial, angles, there, there,
            at, row, group, c.WIDTH, True, c.MEANS * GROUP, NORMS, BACK,
        )  # fmt: skip
    elif head < QUERIES + PAIRS:
        pair = head - QUERIES
        key = _of_branch(heads, pair // c.HEADS, 1)
        at, row = begin + head * c.WIDTH, token * c.HEADS + pair % c.HEADS
        # A turn by no angle where nothing is loaded: of a key that stays as it is.
        turning = there & (pair >= c.RAW_KEYS * c.HEADS)
        _head(
            projection, key, mean, given, key_norm, eps, partial, angles, there, turning,
            at, row, row, c.WIDTH, True, 0, NORMS, BACK,
        )  # fmt: skip
    elif head < QUERIES + 2 * PAIRS:
        pair = head - QUERIES - PAIRS
        value = _of_branch(heads, pair // c.HEADS, 4)
        at = begin + (QUERIES + PAIRS) * c.WIDTH + pair * c.VALUE_WIDTH
        row = token * c.HEADS + pair % c.HEADS
        _head(
            projection, value, mean, given, key_norm, eps, partial, angles, there, there,
            at, row, row, c.VALUE_WIDTH, False, 0, False, BACK,
        )  # fmt: skip
    elif head < OWN:
        if c.GATES > 0:
            BEFORE: tl.constexpr = QUERIES * c.WIDTH + PAIRS * (c.WIDTH + c.VALUE_WIDTH)
            at = begin + BEFORE
            if BACK:
                _join_gates(projection, gates, token, there, at, c.GATES, c.ROW - BEFORE)
            else:
                _head(
                    projection, gates, mean, given, key_norm, eps, partial, angles, there, there,
                    at, token, token, c.GATES, False, 0, False, False,
                )  # fmt: skip
    else:
        group = head - OWN
        at, row = begin + group * (GROUP * c.WIDTH), token * c.HEADS + group
        _mean(
            projection, mean, query_norm, eps, angles, there, at, row,
            c.WIDTH, GROUP, c.ROWS, NORMS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def split_heads(
    projection, cos, sin, count,
    query, compressed_key, selected_key, sliding_key,
    compressed_value, selected_value, sliding_value, mean, gates, c: tl.constexpr,
):  # fmt: skip
    """Programs: ceil(count / ROWS) times the heads of a row, with `GATES` one more and, with
    `MEANS`, the means.
    """
    heads = (
        query, compressed_key, selected_key, sliding_key,
        compressed_value, selected_value, sliding_value, mean, gates,
    )  # fmt: skip
    _walk(projection, heads, None, None, None, None, cos, sin, count, 0.0, c, False, False)


@triton.jit(do_not_specialize=["count"])
def join_heads(
    query, compressed_key, selected_key, sliding_key,
    compressed_value, selected_value, sliding_value, mean, gates,
    cos, sin, count, projection, c: tl.constexpr,
):  # fmt: skip
    """The gradient of `split_heads`, where `sin` is that of the opposite angle.

    Programs: ceil(count / ROWS) times the heads of a row and, with `GATES`, one more.
    """
    heads = (
        query, compressed_key, selected_key, sliding_key,
        compressed_value, selected_value, sliding_value, mean, gates,
    )  # fmt: skip
    _walk(projection, heads, None, None, None, None, cos, sin, count, 0.0, c, True, False)


@triton.jit(do_not_specialize=["count", "eps"])
def split_normed_heads(
    projection, query_norm, key_norm, cos, sin, count, eps,
    query, compressed_key, selected_key, sliding_key,
    compressed_value, selected_value, sliding_value, mean, gates, c: tl.constexpr,
):  # fmt: skip
    """`split_heads` with norms of the weights `[D]`."""
    heads = (
        query, compressed_key, selected_key, sliding_key,
        compressed_value, selected_value, sliding_value, mean, gates,
    )  # fmt: skip
    norms = query_norm, key_norm
    _walk(projection, heads, None, *norms, None, cos, sin, count, eps, c, False, True)


@triton.jit(do_not_specialize=["count", "eps"])
def join_normed_heads(
    query, compressed_key, selected_key, sliding_key,
    compressed_value, selected_value, sliding_value, mean, gates,
    given, query_norm, key_norm, cos, sin, count, eps, projection, partials, c: tl.constexpr,
):  # fmt: skip
    """The gradient of `split_normed_heads` of the projection `given`, as `join_heads`.

    `partials` [tiles of tokens, heads of query and keys, D] are those of the norms' weights.
    """
    heads = (
        query, compressed_key, selected_key, sliding_key,
        compressed_value, selected_value, sliding_value, mean, gates,
    )  # fmt: skip
    norms = query_norm, key_norm
    _walk(projection, heads, given, *norms, partials, cos, sin, count, eps, c, True, True)
