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
def _reciprocal(x, eps, WIDTH: tl.constexpr):
    """1 / rms of float32 rows `x`, whose columns behind `WIDTH` are zero: `[ROWS, 1]`."""
    return tl.math.rsqrt(tl.sum(x * x, axis=1)[:, None] / WIDTH + eps)


@triton.jit
def _weight(norm, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.arange(0, COLUMNS)
    return tl.load(norm + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _normed(x, norm, eps, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    return x * _reciprocal(x, eps, WIDTH) * _weight(norm, WIDTH, COLUMNS)


@triton.jit
def _split(
    projection,
    heads,
    norm,
    eps,
    cos,
    sin,
    token,
    there,
    turning,
    inside,
    row,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    TURN: tl.constexpr,
    NORMS: tl.constexpr,
):
    """A head of tokens, at `inside` of the projection, to rows `row` of `heads`, turned where
    `turning`.
    """
    column = tl.arange(0, COLUMNS)
    mask = there[:, None] & (column < WIDTH)[None, :]
    x = tl.load(projection + inside[:, None] + column[None, :], mask=mask, other=0.0)
    if NORMS:
        x = _normed(x.to(tl.float32), norm, eps, WIDTH, COLUMNS)
    if TURN:
        x = _turned(x.to(tl.float32), cos, sin, token, turning, WIDTH, COLUMNS)
    store_rows(heads, row, x, there, WIDTH, COLUMNS)


@triton.jit
def _join(
    projection,
    heads,
    mean,
    given,
    norm,
    eps,
    partial,
    cos,
    sin,
    token,
    there,
    turning,
    inside,
    row,
    mean_row,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    TURN: tl.constexpr,
    GROUP: tl.constexpr,
    NORMS: tl.constexpr,
):
    """The way back, with a part of the mean's gradient where a mean was made of `GROUP` heads.

    `given` is the projection that was split, `partial` the place of this program's dw.
    """
    x = load_rows(heads, row, there, WIDTH, COLUMNS).to(tl.float32)
    if GROUP > 0:
        x += load_rows(mean, mean_row, there, WIDTH, COLUMNS).to(tl.float32) / GROUP
    if TURN:
        x = _turned(x, cos, sin, token, turning, WIDTH, COLUMNS)
    column = tl.arange(0, COLUMNS)
    mask = there[:, None] & (column < WIDTH)[None, :]
    if NORMS:
        at = given + inside[:, None] + column[None, :]
        head = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        reciprocal = _reciprocal(head, eps, WIDTH)
        head *= reciprocal
        tl.store(partial + column, tl.sum(x * head, axis=0), mask=column < WIDTH)
        x *= _weight(norm, WIDTH, COLUMNS)
        x = (x - head * (tl.sum(x * head, axis=1)[:, None] / WIDTH)) * reciprocal
    at = projection + inside[:, None] + column[None, :]
    tl.store(at, x.to(projection.dtype.element_ty), mask=mask)


@triton.jit
def _join_gates(
    projection, gates, token, there, inside,
    WIDTH: tl.constexpr, FILLED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows `[WIDTH]` of `gates`, and zeros up to `FILLED` columns."""
    x = load_rows(gates, token, there, WIDTH, COLUMNS)
    column = tl.arange(0, COLUMNS)
    at = projection + inside[:, None] + column[None, :]
    tl.store(at, x, mask=there[:, None] & (column < FILLED)[None, :])


@triton.jit
def _mean(
    projection,
    mean,
    norm,
    eps,
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
    NORMS: tl.constexpr,
):
    """The mean of `GROUP` query heads, the first at `inside`, each rounded as the query is."""
    column = tl.arange(0, COLUMNS)
    mask = there[:, None] & (column < WIDTH)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in range(GROUP):
        at = projection + inside[:, None] + i * WIDTH + column[None, :]
        x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        if NORMS:
            x = _normed(x, norm, eps, WIDTH, COLUMNS)
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
    gates,
    given,
    query_norm,
    key_norm,
    partials,
    cos,
    sin,
    count,
    eps,
    H: tl.constexpr,
    HKV: tl.constexpr,
    BRANCHES: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    MEANS: tl.constexpr,
    GATES: tl.constexpr,
    RAW_KEYS: tl.constexpr,
    ROW: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    GATE_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BACK: tl.constexpr,
    NORMS: tl.constexpr,
):
    """The head of this program: a query's, a branch's key's or value's, all gates, or forward a
    mean.
    """
    PAIRS: tl.constexpr = BRANCHES * HKV  # a branch and a head of it
    GROUP: tl.constexpr = H // HKV
    OWN: tl.constexpr = H + 2 * PAIRS + (1 if GATES > 0 else 0)
    ALL: tl.constexpr = OWN + (0 if BACK else MEANS * HKV)
    program = tl.program_id(0)
    tile = (program // ALL).to(tl.int64)
    token = tile * ROWS + tl.arange(0, ROWS)
    there = token < count
    begin = token * ROW
    head = program % ALL
    partial = partials
    if NORMS and BACK:
        partial += (tile * (H + PAIRS) + head) * D  # of values: not used
    if head < H:
        at, row = begin + head * D, token * H + head
        if BACK:
            group = token * HKV + head // GROUP
            _join(
                projection, query, mean, given, query_norm, eps, partial, cos, sin,
                token, there, there, at, row, group, D, COLUMNS, True, MEANS * GROUP, NORMS,
            )  # fmt: skip
        else:
            _split(
                projection, query, query_norm, eps, cos, sin,
                token, there, there, at, row, D, COLUMNS, True, NORMS,
            )  # fmt: skip
    elif head < H + PAIRS:
        pair = head - H
        key = _of_branch(pair // HKV, compressed_key, selected_key, sliding_key)
        at, row = begin + head * D, token * HKV + pair % HKV
        # A turn by no angle where nothing is loaded: of a key that stays as it is.
        turning = there & (pair >= RAW_KEYS * HKV)
        if BACK:
            _join(
                projection, key, mean, given, key_norm, eps, partial, cos, sin,
                token, there, turning, at, row, row, D, COLUMNS, True, 0, NORMS,
            )  # fmt: skip
        else:
            _split(
                projection, key, key_norm, eps, cos, sin,
                token, there, turning, at, row, D, COLUMNS, True, NORMS,
            )  # fmt: skip
    elif head < H + 2 * PAIRS:
        pair = head - H - PAIRS
        value = _of_branch(pair // HKV, compressed_value, selected_value, sliding_value)
        at, row = begin + (H + PAIRS) * D + pair * DV, token * HKV + pair % HKV
        if BACK:
            _join(
                projection, value, mean, given, key_norm, eps, partial, cos, sin,
                token, there, there, at, row, row, DV, VALUE_COLUMNS, False, 0, False,
            )  # fmt: skip
        else:
            _split(
                projection, value, key_norm, eps, cos, sin,
                token, there, there, at, row, DV, VALUE_COLUMNS, False, False,
            )  # fmt: skip
    elif head < OWN:
        if GATES > 0:
            BEFORE: tl.constexpr = H * D + PAIRS * (D + DV)
            at = begin + BEFORE
            if BACK:
                _join_gates(
                    projection, gates, token, there, at, GATES, ROW - BEFORE, GATE_COLUMNS
                )
            else:
                _split(
                    projection, gates, key_norm, eps, cos, sin,
                    token, there, there, at, token, GATES, GATE_COLUMNS, False, False,
                )  # fmt: skip
    else:
        group = head - OWN
        at, row = begin + group * (GROUP * D), token * HKV + group
        _mean(
            projection, mean, query_norm, eps, cos, sin,
            token, there, at, row, D, COLUMNS, GROUP, ROWS, NORMS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def split_heads(
    projection, cos, sin, count,
    query, compressed_key, selected_key, sliding_key,
    compressed_value, selected_value, sliding_value, mean, gates,
    H: tl.constexpr, HKV: tl.constexpr, BRANCHES: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, MEANS: tl.constexpr, GATES: tl.constexpr,
    RAW_KEYS: tl.constexpr, ROW: tl.constexpr, COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    GATE_COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Programs: ceil(count / ROWS) times the heads of a row, with `GATES` one more and, with
    `MEANS`, the means.
    """
    _walk(
        projection, query, compressed_key, selected_key, sliding_key,
        compressed_value, selected_value, sliding_value, mean, gates,
        None, None, None, None, cos, sin, count, 0.0,
        H, HKV, BRANCHES, D, DV, MEANS, GATES, RAW_KEYS, ROW,
        COLUMNS, VALUE_COLUMNS, GATE_COLUMNS, ROWS, False, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def join_heads(
    query, compressed_key, selected_key, sliding_key,
    compressed_value, selected_value, sliding_value, mean, gates,
    cos, sin, count, projection,
    H: tl.constexpr, HKV: tl.constexpr, BRANCHES: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, MEANS: tl.constexpr, GATES: tl.constexpr,
    RAW_KEYS: tl.constexpr, ROW: tl.constexpr, COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    GATE_COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradient of `split_heads`, where `sin` is that of the opposite angle.

    Programs: ceil(count / ROWS) times the heads of a row and, with `GATES`, one more.
    """
    _walk(
        projection, query, compressed_key, selected_key, sliding_key,
        compressed_value, selected_value, sliding_value, mean, gates,
        None, None, None, None, cos, sin, count, 0.0,
        H, HKV, BRANCHES, D, DV, MEANS, GATES, RAW_KEYS, ROW,
        COLUMNS, VALUE_COLUMNS, GATE_COLUMNS, ROWS, True, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count", "eps"])
def split_normed_heads(
    projection, query_norm, key_norm, cos, sin, count, eps,
    query, compressed_key, selected_key, sliding_key,
    compressed_value, selected_value, sliding_value, mean, gates,
    H: tl.constexpr, HKV: tl.constexpr, BRANCHES: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, MEANS: tl.constexpr, GATES: tl.constexpr,
    RAW_KEYS: tl.constexpr, ROW: tl.constexpr, COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    GATE_COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`split_heads` with norms of the weights `[D]`."""
    _walk(
        projection, query, compressed_key, selected_key, sliding_key,
        compressed_value, selected_value, sliding_value, mean, gates,
        None, query_norm, key_norm, None, cos, sin, count, eps,
        H, HKV, BRANCHES, D, DV, MEANS, GATES, RAW_KEYS, ROW,
        COLUMNS, VALUE_COLUMNS, GATE_COLUMNS, ROWS, False, True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count", "eps"])
def join_normed_heads(
    query, compressed_key, selected_key, sliding_key,
    compressed_value, selected_value, sliding_value, mean, gates,
    given, query_norm, key_norm, cos, sin, count, eps, projection, partials,
    H: tl.constexpr, HKV: tl.constexpr, BRANCHES: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, MEANS: tl.constexpr, GATES: tl.constexpr,
    RAW_KEYS: tl.constexpr, ROW: tl.constexpr, COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    GATE_COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradient of `split_normed_heads` of the projection `given`, as `join_heads`.

    `partials` [tiles of tokens, heads of query and keys, D] are those of the norms' weights.
    """
    _walk(
        projection, query, compressed_key, selected_key, sliding_key,
        compressed_value, selected_value, sliding_value, mean, gates,
        given, query_norm, key_norm, partials, cos, sin, count, eps,
        H, HKV, BRANCHES, D, DV, MEANS, GATES, RAW_KEYS, ROW,
        COLUMNS, VALUE_COLUMNS, GATE_COLUMNS, ROWS, True, True,
    )  # fmt: skip
