"""What one warp does with its score rows (`kernels_pallas/mosaic/warp_topk.py`), on numpy.

By a single warp of `oracles/list_kernels.py`, against a plain selection.
"""

import dataclasses

import numpy as np
import pytest

from kernels_pallas.mosaic.warp_topk import WarpTopK
from kernels_pallas.specs.scores import Scores
from tests.oracles.list_kernels import LANES, Warp, lanes

BASE = 3  # the first block of the tile's sequence
WG = 1


SPEC = Scores(
    B=1,
    T=4096,
    H=16,
    Hkv=1,
    D=64,
    blocks=1024,
    candidates=200,
    ratio=4,
    cover=2,
    n=16,
    num_initial=1,
    num_local=2,
    packed=False,
    dtype="bfloat16",
    scale=1.0,
)
SPECS = {
    "G16": {},
    "G6": {"H": 6},
    "G4": {"H": 4, "n": 40},
    "G1-few-blocks": {"H": 1, "candidates": 10},
    "G1": {"H": 1},
    "G2": {"H": 2, "n": 40},
    "G2-no-room": {"H": 2, "candidates": 300},  # four rows a token
    "G16-chunks": {"held": 64},
    "G3-chunks": {"H": 3, "held": 128, "n": 40},
    "G16-most": {"candidates": 2048, "n": 64},
    "G8-none-forced": {"H": 8, "num_initial": 0, "num_local": 0},
    "G16-all-forced": {"n": 3},
    "G16-large-scores": {"candidates": 1024, "num_initial": 3},
}


def registers(sums, heads):
    """`[16, 64]` of a warp as its lanes have it, a pair of neighbours each (`WarpTopK.add`)."""
    row, column = LANES // 4, 2 * (LANES % 4)
    halves = [
        [[sums[row + 8 * half, 8 * j + column + e] for e in (0, 1)] for j in range(8)]
        for half in (0, 1)
    ]
    if heads < 16:
        return halves
    low, high = halves
    return [[[a + b for a, b in zip(*two, strict=True)] for two in zip(low, high, strict=True)]]


def selected(spec, scores, own):
    """The selection of one token from its `scores`, by sorting."""
    index = np.arange(len(scores))
    free = (index >= spec.num_initial) & (index <= own - spec.num_local)
    order = np.argsort(-scores, kind="stable")
    best = [i for i in order if free[i]][: spec.free]
    forced = [i for i in range(spec.num_initial) if i <= own]
    forced += [own - i for i in range(spec.num_local) if own - i >= spec.num_initial]
    chosen = sorted(best + forced)
    return chosen + [-1] * (spec.n - len(chosen))


def check(change, seed=0):
    spec = dataclasses.replace(SPEC, **change)
    spec = dataclasses.replace(spec, H=2 * spec.H, Hkv=2)
    topk, heads, chunk = WarpTopK(spec), spec.tiling.heads, spec.tiling.chunk
    assert spec.chunks > 1 or not spec.held < spec.candidates
    score_rows = spec.tiling.score_rows
    places = 4 * score_rows * topk.words
    machine = Warp(places + 4 * score_rows * topk.winner_slots)
    topk = dataclasses.replace(topk, warp=machine)
    rng = np.random.default_rng(seed)
    steps = -(-spec.candidates // 64)
    # Few values, so that there are ties; sums of them are exact.
    own_part, next_part = (
        (rng.integers(0, 3, (64, 64 * steps)) / 8).astype(np.float32) for _ in range(2)
    )
    own = rng.integers(0, spec.candidates, score_rows).astype(np.int32)
    own[-5:-1] = -1, 0, min(4, spec.candidates - 1), spec.candidates - 1
    base = np.full(score_rows, BASE, np.int32)
    # The second tile of the second row, for the second head; the last of the tokens is none.
    tokens, first = 64 // heads, spec.tile.tokens + WG * (64 // heads)
    length = first + tokens - 1
    out = np.full((2, length, 2, spec.n), -99, np.int32)
    numbers = [lanes(x) for x in (WG, 1, spec.tile.tokens, 1, length, length)]
    for machine.number_of_warp in range(4):
        rows = slice(16 * machine.number_of_warp, 16 * machine.number_of_warp + 16)
        for k in range(spec.chunks):
            topk.begin_chunk(0, lanes(WG), lanes(k))
            stop = min((k + 1) * chunk // 64, steps)
            if not topk.several_chunks and own.max() < spec.n:  # as in the kernel: no scores
                stop = 0
            for step in range(k * chunk // 64, stop):
                here = slice(64 * step, 64 * step + 64)
                sums = (registers(x[rows, here], heads) for x in (own_part, next_part))
                topk.add(0, lanes(WG), lanes(64 * step - k * chunk), *sums)
            if spec.free:
                topk.extract(0, places, own, base, lanes(WG), lanes(k), lanes(BASE))
        topk.write(places, own, out, *numbers)
    own_part, next_part = (x.reshape(tokens, heads, -1).sum(1) for x in (own_part, next_part))
    scores = own_part
    scores[:, 1:] += next_part[:, :-1]
    wanted = np.full_like(out, -99)
    for token in range(tokens - 1):
        mine = own[WG * tokens + token]
        wanted[1, first + token, 1] = selected(spec, scores[token], mine)
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize(
    ("name", "rows"), [("G1", 2), ("G2", 2), ("G2-no-room", 4), ("G4", 4), ("G6", 8)]
)
def test_rows_of_a_token(name, rows):
    tiling = dataclasses.replace(SPEC, **SPECS[name]).tiling
    assert tiling.heads == rows and tiling.score_rows * rows == tiling.rows


@pytest.mark.parametrize("change", SPECS.values(), ids=SPECS)
def test_the_best_blocks_of_a_warp(change):
    for seed in range(3):
        check(change, seed)
