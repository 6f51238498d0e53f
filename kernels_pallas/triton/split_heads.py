"""Splits a fused projection into rotated heads, and joins the gradients of heads.

The kernel is bound by HBM. A row of the projection has the query heads, then the key heads of each
branch, then the value heads of each branch. A program processes one head for `ROWS` tokens. The
program rotates pairs of columns of query and key heads by the angle of the token. A pair (a, b)
becomes (a cos - b sin, a sin + b cos). The backward pass rotates by the opposite angle.

If the layer has norms, a head x of query or keys is normalised before the rotation. All query
heads share weights w, and all key heads share other weights:

    r = rsqrt(mean(x^2) + eps),  x' = x r w
    dx = r (dx' w - x r mean(dx' w x r)),  dw = sum(dx' x r)

Each program computes a partial sum of dw for its tokens and its head. The backward pass reads x
again.

Gates may depend on the mean of the query heads of a group. In the forward pass, separate
programs compute the mean from rows that are still in L2. In the backward pass, the gradient of
each head includes its share, dmean / G.

Gates that are computed from the layer's input follow the value heads in a row. One program
processes the gates of all heads for its tokens. In the backward pass, the program of the gates also
fills the rest of the row with zeros, since gradients are read as whole rows.
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
    """Rotate float32 rows `x` [ROWS, columns] by cos and sin `[.., width / 2]` of the tokens."""
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
    """Return 1 / rms of float32 rows `x` as `[ROWS, 1]`. Columns of `x` after the width are
    zero.
    """
    return tl.math.rsqrt(tl.sum(x * x, axis=1)[:, None] / WIDTH + eps)


@triton.jit
def _weight(norm, WIDTH):
    column = tl.arange(0, columns(WIDTH))
    return tl.load(norm + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _normed(x, norm, eps, WIDTH):
    return x * _reciprocal(x, eps, WIDTH) * _weight(norm, WIDTH)


@triton.jit
def _head(arrays, heads, norm, inside, row, mean_row, turning, WIDTH, TURN, GROUP, c):
    """Copy a head of some tokens, which is at `inside` in the projection, to rows `row` of `heads`.

    If `NORMS` and `TURN` are true, the head is normalised by `norm`. If `TURN` and `turning` are
    true, the head is rotated.

    In the backward pass, compute the gradient of the head in the projection from the gradient of
    the rows of `heads`. If a mean of `GROUP` heads was computed, the gradient includes a share of
    the gradient of the mean.
    """
    projection, mean, given, eps, partial, angles, there = arrays
    column = tl.arange(0, columns(WIDTH))
    mask = there[:, None] & (column < WIDTH)[None, :]
    if c.BACK:
        x = load_rows(heads, row, there, WIDTH).to(tl.float32)
        if GROUP > 0:
            x += load_rows(mean, mean_row, there, WIDTH).to(tl.float32) / GROUP
        if TURN:
            x = _turned(x, angles, turning, WIDTH)
        if c.NORMS and TURN:
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
        x = tl.load(projection + inside[:, None] + column[None, :], mask=mask, other=0.0)
        if c.NORMS and TURN:
            x = _normed(x.to(tl.float32), norm, eps, WIDTH)
        if TURN:
            x = _turned(x.to(tl.float32), angles, turning, WIDTH)
        store_rows(heads, row, x, there, WIDTH)


@triton.jit
def split_heads(
    projection,
    heads,
    partials,
    given,
    query_norm,
    key_norm,
    cos,
    sin,
    count,
    eps,
    c: tl.constexpr,
):
    """Process the head of this program. The head is a query head, a key or value head of a
    branch, all gates, or in the forward pass a mean.

    Programs: ceil(count / ROWS) times the number of heads. `GATES` adds one head, and `MEANS`
    adds the means unless `BACK`.

    Args:
      projection: `[count, ROW]`, read; if `BACK` the gradient, written.
      heads: A tuple of query, three keys, three values, mean, gates, written; if `BACK` their
        gradients, read, with `sin` of the opposite angle.
      query_norm: `[WIDTH]`, read if `NORMS` is true.
      key_norm: `[WIDTH]`, read if `NORMS` is true.
      given: If `NORMS` and `BACK`, the projection that was split.
      partials: If `NORMS` and `BACK`, gradients of the norms' weights `[tiles of tokens, heads of
        query and keys, WIDTH]`.
      cos: float32 `[count, WIDTH / 2]`.
      sin: float32 `[count, WIDTH / 2]`.
      count: Number of tokens.
      eps: Number that is added to mean(x^2), read if `NORMS` is true.
    """
    query, mean, gates = heads[0], heads[7], heads[8]
    # The number of pairs of a branch and a key/value head.
    PAIRS: tl.constexpr = c.BRANCHES * c.HEADS
    GROUP: tl.constexpr = c.GROUP
    QUERIES: tl.constexpr = GROUP * c.HEADS
    OWN: tl.constexpr = QUERIES + 2 * PAIRS + (1 if c.GATES > 0 else 0)
    ALL: tl.constexpr = OWN + (0 if c.BACK else c.MEANS * c.HEADS)
    program = tl.program_id(0)
    tile = (program // ALL).to(tl.int64)
    token = tile * c.ROWS + tl.arange(0, c.ROWS)
    there = token < count
    begin = token * c.ROW
    head = program % ALL
    partial = partials
    if c.NORMS and c.BACK:
        # the norm is not used for values
        partial += (tile * (QUERIES + PAIRS) + head) * c.WIDTH
    arrays = projection, mean, given, eps, partial, (cos, sin, token), there
    if head < QUERIES:
        at, row = begin + head * c.WIDTH, token * QUERIES + head
        group = token * c.HEADS + head // GROUP
        _head(
            arrays, query, query_norm, at, row, group, there, c.WIDTH, True, c.MEANS * GROUP, c
        )
    elif head < QUERIES + PAIRS:
        pair = head - QUERIES
        key = _of_branch(heads, pair // c.HEADS, 1)
        at, row = begin + head * c.WIDTH, token * c.HEADS + pair % c.HEADS
        # Masked angles are 0, so that keys without rotation do not change.
        turning = there & (pair >= c.RAW_KEYS * c.HEADS)
        _head(arrays, key, key_norm, at, row, row, turning, c.WIDTH, True, 0, c)
    elif head < QUERIES + 2 * PAIRS:
        pair = head - QUERIES - PAIRS
        value = _of_branch(heads, pair // c.HEADS, 4)
        at = begin + (QUERIES + PAIRS) * c.WIDTH + pair * c.VALUE_WIDTH
        row = token * c.HEADS + pair % c.HEADS
        _head(arrays, value, key_norm, at, row, row, there, c.VALUE_WIDTH, False, 0, c)
    elif head < OWN:
        if c.GATES > 0:
            BEFORE: tl.constexpr = QUERIES * c.WIDTH + PAIRS * (c.WIDTH + c.VALUE_WIDTH)
            at = begin + BEFORE
            if c.BACK:  # `load_rows` fills the columns after the gates with zeros
                logits = load_rows(gates, token, there, c.GATES)
                inside = tl.arange(0, columns(c.GATES))
                filled = there[:, None] & (inside < c.ROW - BEFORE)[None, :]
                tl.store(projection + at[:, None] + inside[None, :], logits, mask=filled)
            else:
                _head(arrays, gates, key_norm, at, token, token, there, c.GATES, False, 0, c)
    else:
        # The mean of `GROUP` query heads, which are rounded like the query before.
        group = head - OWN
        at, row = begin + group * (GROUP * c.WIDTH), token * c.HEADS + group
        column = tl.arange(0, columns(c.WIDTH))
        mask = there[:, None] & (column < c.WIDTH)[None, :]
        total = tl.full((c.ROWS, columns(c.WIDTH)), 0.0, tl.float32)
        for i in range(GROUP):
            place = projection + at[:, None] + i * c.WIDTH + column[None, :]
            x = tl.load(place, mask=mask, other=0.0).to(tl.float32)
            if c.NORMS:
                x = _normed(x, query_norm, eps, c.WIDTH)
            x = _turned(x, (cos, sin, token), there, c.WIDTH)
            total += x.to(projection.dtype.element_ty).to(tl.float32)
        store_rows(mean, row, total / GROUP, there, c.WIDTH)
