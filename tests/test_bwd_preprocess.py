"""Row statistics of the backward pass; the oracle is plain Python."""

import math

import numpy as np
import pytest
import torch

from kernels_pallas.specs.bwd_preprocess import RowStats, row_stats
from kernels_pallas.specs.tile import LOG2E
from tests.test_block_query_lists import needs_gpu
from tests.warp_emulation import Warps, emulated, interpreted

SPECS = {
    "tiles": RowStats(2, 9, 32, 2, 4, 64, gated=True),
    "tiles with rows of none": RowStats(1, 7, 12, 2, 2, 16, gated=True, lse_grad=True),
    "tokens": RowStats(2, 5, 8, 2, 1, 8, lse_grad=True),
    "several CTAs": RowStats(1, 40, 6, 1, 10, 64),
}
by_spec = pytest.mark.parametrize("name", SPECS)


def draw(spec):
    """The inputs of `row_stats`; what sees nothing, and padding, is NaN elsewhere."""
    rng = np.random.default_rng(7)
    shape = spec.B, spec.T, spec.H
    count = 2 + spec.gated + spec.lse_grad
    lse, delta, *extra = rng.normal(size=(count, *shape)).astype(np.float32) * 3
    lse[:, 1] = lse[:, -1, ::2] = -np.inf
    for x in (delta, *extra):
        x[:, 1] = np.nan
    key_end = rng.integers(0, 2**20, size=shape[:2], dtype=np.int32)
    return [lse, delta, key_end, *extra]


def expected(spec, lse, delta, key_end, *extra):
    extra = list(extra)
    gate = extra.pop(0) if spec.gated else np.ones_like(delta)
    dlse = extra.pop(0) if spec.lse_grad else np.zeros_like(delta)
    found = np.zeros((spec.B, spec.Hkv, spec.tiles, spec.rows, 4), np.float32)
    for b, t, h in np.ndindex(lse.shape):
        g, member = divmod(h, spec.H // spec.Hkv)
        tile, place = divmod(t, spec.tokens)
        row = math.inf, 0.0, 0.0, 0.0
        if lse[b, t, h] > -math.inf:
            delta_of_row = gate[b, t, h] * delta[b, t, h] - dlse[b, t, h]
            row = lse[b, t, h] * np.float32(LOG2E), key_end[b, t], gate[b, t, h], delta_of_row
        found[b, g, tile, place * spec.group + member] = row
    return found


@by_spec
def test_warps(name):
    spec = SPECS[name]
    arrays = draw(spec)
    (found,) = emulated(row_stats, interpreted(spec), *arrays)
    np.testing.assert_allclose(found, expected(spec, *arrays), rtol=1e-6)


MUTANTS = {
    "statistics of what sees nothing": ("different", lambda self, a, b: self.same(a, a)),
    "no end of the tokens": ("where", lambda self, condition, a, b: self.word(a)),
    "the lane is the warp": ("lane", lambda self: self.word(0)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(monkeypatch, mutant):
    spec = SPECS["tiles with rows of none"]
    arrays = draw(spec)
    monkeypatch.setattr(Warps, *MUTANTS[mutant])
    (found,) = emulated(row_stats, interpreted(spec), *arrays)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(found, expected(spec, *arrays), rtol=1e-6)


@pytest.mark.gpu
@needs_gpu
@by_spec
def test_the_kernel(name):
    from interop.launch import launch

    spec = SPECS[name]
    arrays = draw(spec)
    (found,) = launch(row_stats(spec), *(torch.from_numpy(x).cuda() for x in arrays))
    np.testing.assert_allclose(found.cpu().numpy(), expected(spec, *arrays), rtol=1e-6)
