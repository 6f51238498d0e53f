"""Computes the gated sum of the branches, and delta = rowsum(dO * O) of each branch.

HBM bandwidth limits the kernels of the gated sum and of delta.

out = sum_c gate[c] * O_c    delta_c = rowsum(dO * O_c) = dg_c
"""

import triton
import triton.language as tl

from kernels_pallas.triton.rows import load_rows, store_rows


@triton.jit
def _gated(out, gate, row, there, c):
    """Return g * O."""
    gates = tl.load(gate + row, mask=there, other=0.0)
    out_rows = load_rows(out, row, there, c.WIDTH).to(tl.float32)
    return out_rows * gates[:, None]


@triton.jit
def gated_sum(
    compressed, selected, sliding, compressed_gate, selected_gate, sliding_gate,
    count,
    out, c: tl.constexpr,
):  # fmt: skip
    """Compute the gated sum of three outputs `[count, WIDTH]` with gates float32 `[count]`.
    Programs: ceil(count / ROWS).
    """
    row = tl.program_id(0).to(tl.int64) * c.ROWS + tl.arange(0, c.ROWS)
    there = row < count
    total = _gated(compressed, compressed_gate, row, there, c)
    total += _gated(selected, selected_gate, row, there, c)
    total += _gated(sliding, sliding_gate, row, there, c)
    store_rows(out, row, total, there, c.WIDTH)


@triton.jit
def _deltas(do, outputs, results, count, c):
    """Return delta = rowsum(dO * O) of each output.

    In padding, the output is 0 and dO may be NaN.
    """
    row = tl.program_id(0).to(tl.int64) * c.ROWS + tl.arange(0, c.ROWS)
    there = row < count
    do_rows = load_rows(do, row, there, c.WIDTH).to(tl.float32)
    for i in tl.static_range(len(outputs)):
        out_rows = load_rows(outputs[i], row, there, c.WIDTH).to(tl.float32)
        sums = tl.sum(tl.where(out_rows == 0.0, 0.0, do_rows * out_rows), axis=1)
        tl.store(results[i] + row, sums, mask=there)


@triton.jit
def delta(do, out, count, delta_out, c: tl.constexpr):
    """Compute delta of one output `[count, WIDTH]`, as float32 `[count]`. Programs: ceil(count /
    ROWS).
    """
    _deltas(do, (out,), (delta_out,), count, c)


@triton.jit
def deltas(
    do, compressed, selected, sliding,
    count,
    compressed_delta, selected_delta, sliding_delta, c: tl.constexpr,
):  # fmt: skip
    """Compute `delta` of the three branches, and read `do` only once."""
    results = compressed_delta, selected_delta, sliding_delta
    _deltas(do, (compressed, selected, sliding), results, count, c)
