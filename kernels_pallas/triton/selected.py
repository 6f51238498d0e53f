"""Attention of every query to its selected blocks, one program a token and key/value head.

The `G` heads of a group are the rows of a tile, at least 16 of them, as tensor cores have; the
blocks of the token pass by one after the other. Nothing is shared between tokens, so that no
list and no order of the selection is needed, and strides are free. What a block costs is its
keys and values from L2 once a token: at B=1 H=64 Hkv=4 D=128 T=65536 n=16 137 GB.
"""

import triton
import triton.language as tl

from kernels_pallas.triton import capability

LN2 = tl.constexpr(0.6931471805599453)
KEYS = 64  # of a step, at most


def options(group: int, width: int, value_width: int, block: int, itemsize: int) -> dict:
    """Launch options: sizes of tiles, and steps in flight.

    A step has as many keys as leave room for a second one.
    """
    rows, columns, value_columns = map(capability.power, (group, width, value_width))
    keys = min(capability.power(block), KEYS)

    def fit(stages):
        sizes = itemsize, rows, keys, columns, value_columns
        return capability.smem_bytes(*sizes, stages) <= capability.SMEM_BYTES

    while keys > capability.LEAST and not fit(2):
        keys //= 2
    return {
        "ROWS": rows,
        "KEYS": keys,
        "PARTS": triton.cdiv(block, keys),
        "COLUMNS": columns,
        "VALUE_COLUMNS": value_columns,
        "PRECISION": "ieee" if itemsize == 4 else "tf32",
        "enable_fp_fusion": True,
        "num_warps": 8 if rows * max(columns, value_columns) > 64 * 128 else 4,
        "num_stages": 3 if fit(3) else 2,
    }


@triton.jit(do_not_specialize=["tokens"])
def selected_attention(
    query,
    key,
    value,
    indices,
    position,
    key_start,
    out,
    lse,
    scale,
    tokens,
    query_batch,
    query_token,
    query_head,
    query_column,
    key_batch,
    key_token,
    key_head,
    key_column,
    value_batch,
    value_token,
    value_head,
    value_column,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: (batch * tokens, HEADS).

    Args:
      query: `[batch, tokens, HEADS * GROUP, WIDTH]`; key: `[batch, keys, HEADS, WIDTH]`; value:
        `[batch, keys, HEADS, VALUE_WIDTH]`, with the strides `query_*`, .., in elements.
      indices: int32, contiguous, `[batch, tokens, HEADS, N]`, in any order, -1: none.
      position, key_start: int32, contiguous, `[batch, tokens]`: the token's place in its
        sequence, negative where it sees nothing, and the sequence's first key.
      out: contiguous, `[batch, tokens, HEADS * GROUP, VALUE_WIDTH]`, in the dtype of `query`.
      lse: float32, contiguous, `[batch, tokens, HEADS * GROUP]`, natural.
      scale: of the logits, times log2(e).
    """
    item = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    batch, token = item // tokens, item % tokens
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    value_columns = tl.arange(0, VALUE_COLUMNS)
    head = group * GROUP + row
    real = row < GROUP
    wide, value_wide = column < WIDTH, value_columns < VALUE_WIDTH

    query += batch * query_batch + token * query_token
    places = head[:, None] * query_head + column[None, :] * query_column
    rows = tl.load(query + places, mask=real[:, None] & wide[None, :], other=0.0)
    last = tl.load(position + item)
    start = tl.load(key_start + item).to(tl.int64)
    key += batch * key_batch + start * key_token + group * key_head
    value += batch * value_batch + start * value_token + group * value_head
    indices += (item * HEADS + group) * N

    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE_COLUMNS], tl.float32)
    for i in range(N * PARTS):
        block = tl.load(indices + i // PARTS)
        inside = (i - i // PARTS * PARTS) * KEYS + tl.arange(0, KEYS)
        at = block * BLOCK + inside
        seen = (inside < BLOCK) & (at >= 0) & (at <= last)
        at = at.to(tl.int64)
        # What is not seen may be anything, and zero times NaN is NaN.
        keys = tl.load(
            key + at[None, :] * key_token + column[:, None] * key_column,
            mask=seen[None, :] & wide[:, None],
            other=0.0,
        )
        logits = tl.dot(rows, keys, input_precision=PRECISION) * scale
        logits = tl.where(seen[None, :], logits, float("-inf"))
        larger = tl.maximum(most, tl.max(logits, axis=1))
        base = tl.where(larger == float("-inf"), 0.0, larger)
        probs = tl.exp2(logits - base[:, None])
        less = tl.exp2(most - base)
        values = tl.load(
            value + at[:, None] * value_token + value_columns[None, :] * value_column,
            mask=seen[:, None] & value_wide[None, :],
            other=0.0,
        )
        total = total * less + tl.sum(probs, axis=1)
        acc = acc * less[:, None]
        acc = tl.dot(probs.to(values.dtype), values, acc, input_precision=PRECISION)
        most = larger

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    acc = acc / total[:, None]
    natural = tl.where(empty, float("-inf"), (most + tl.log2(total)) * LN2)
    head = item * (HEADS * GROUP) + head
    places = head[:, None] * VALUE_WIDTH + value_columns[None, :]
    mask = real[:, None] & value_wide[None, :]
    tl.store(out + places, acc.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + head, natural, mask=real)
