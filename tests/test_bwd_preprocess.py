"""Row statistics of the backward pass; the oracle is plain Python."""

import math

import numpy as np
import pytest

from kernels_pallas.specs.bwd_preprocess import RowStats, row_stats
from kernels_pallas.specs.tile import LOG2E
from tests.oracles.list_kernels import emulated, interpreted
from tests.tables import table

SPECS = {
    name: RowStats(*sizes, **rest) for name, (sizes, rest) in table("lists")["stats"].items()
}


def draw(spec):
    """The inputs of `row_stats`; what sees nothing, and padding, is NaN elsewhere."""
    rng = np.random.default_rng(7)
    shape = spec.B, spec.T, spec.H
    count = 2 + spec.gated + spec.lse_grad
    lse, delta, *extra = rng.normal(size=(count, *shape)).astype(np.float32) * 3
    lse[:, 1] = lse[:, -1, ::2] = -np.inf
    if spec.gated:  # drawn of both signs
        extra[0][:, 2] = [0.0, -0.0] * (spec.H // 2)
    for x in (delta, *extra):
        x[:, 1] = np.nan
    first, end = rng.integers(0, 2**20, size=(2, *shape[:2]), dtype=np.int32)
    return [lse, delta, end, *([first] if spec.interval else []), *extra]


def expected(spec, lse, delta, key_end, *extra):
    """The rows, and whether the gates are negative."""
    extra = list(extra)
    first_key = extra.pop(0) if spec.interval else np.zeros_like(key_end)
    gate = extra.pop(0) if spec.gated else np.ones_like(delta)
    dlse = extra.pop(0) if spec.lse_grad else np.zeros_like(delta)
    found = np.zeros((spec.B, spec.Hkv, spec.tiles, spec.rows, 4), np.float32)
    negative = np.zeros(found.shape[:-1], bool)
    for b, t, h in np.ndindex(lse.shape):
        g, member = divmod(h, spec.H // spec.Hkv)
        tile, place = divmod(t, spec.tokens)
        at = b, g, tile, place * spec.group + member
        row = math.inf, 0.0, 0.0, 0.0
        if lse[b, t, h] > -math.inf:
            shift = lse[b, t, h] * LOG2E
            if size := abs(gate[b, t, h]):
                shift -= math.log2(size)
            else:
                shift = math.inf
            row = shift, delta[b, t, h] - dlse[b, t, h], first_key[b, t], key_end[b, t]
            negative[at] = gate[b, t, h] < 0
        found[at] = row
    return found, negative


@pytest.mark.parametrize("name", SPECS)
def test_warps(name):
    spec = SPECS[name]
    arrays = draw(spec)
    (found,) = emulated(row_stats, interpreted(spec), *arrays)
    rows, negative = expected(spec, *arrays)
    # A shift near 0 is a difference of larger numbers. Its last bit is the sign of the gate.
    np.testing.assert_allclose(found, rows, rtol=1e-6, atol=3e-6)
    np.testing.assert_array_equal(found[..., 0].view(np.uint32) & 1, negative)
