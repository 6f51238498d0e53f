"""`bench.scale --check rows`: the oracle of single rows, and what it finds."""

import itertools

import pytest
import torch

import nsa_torch
from bench.harness import scale_rows
from bench.harness.scale_problem import Problem, judged
from nsa_core.config import NSAConfig

CONFIG = NSAConfig(8, 4, 16, num_selected=4, num_initial=1, num_local=1, window=10)


def problem(*documents):
    sizes = {"S": 200, "H": 6, "Hkv": 2, "D": 16, "Dv": 8, "dtype": "float32"}
    about = {"framework": "torch", "mode": "fwdbwd", "layout": "zigzag", "checked": 0}
    return Problem(**about, **sizes, config=CONFIG, documents=documents)


@pytest.mark.parametrize("documents", [(), (5, 95, 100)])
def test_rows_are_those_of_the_reference(documents):
    case = problem(*documents)
    draw = torch.Generator().manual_seed(0)
    query, key, value, gates = (
        torch.randn(1, case.S, *shape, generator=draw, dtype=torch.float64, requires_grad=True)
        for shape in case.shapes
    )
    rows = scale_rows.rows_of(case)
    assert rows[0] == 0 and rows[-1] == 199 and len(rows) == scale_rows.ROWS
    _, position = scale_rows.places(case)
    indices = scale_rows.selection(position, case.Hkv, CONFIG)
    own = position // CONFIG.select_block
    for at, head in itertools.product(range(case.S), range(case.Hkv)):
        blocks = [x for x in indices[at, head].tolist() if x >= 0]
        assert blocks == sorted(set(blocks)) and blocks[-1] == own[at]
        assert len(blocks) == min(CONFIG.num_selected, own[at] + 1)
    own = query[0, rows], gates[0, rows], indices[rows]
    found = scale_rows.oracle(case, rows, *own, key[0], value[0])
    borders = torch.tensor([0, *itertools.accumulate(documents)]) if documents else None
    options = {"config": CONFIG, "block_indices": indices[None], "cu_seqlens": borders}
    out = nsa_torch.attention(query, key, value, gates, **options, implementation="reference")
    assert (found - out[0, rows]).abs().max() < 1e-12
    weights = torch.zeros_like(out)
    weights[0, rows] = torch.randn(len(rows), case.H, case.Dv, dtype=out.dtype, generator=draw)
    arrays = query, key, value, gates
    expected = torch.autograd.grad(out, arrays, weights)
    gradients = torch.autograd.grad(found, arrays, weights[0, rows])
    for x, y in zip(gradients, expected, strict=True):
        assert (x - y).abs().max() < 1e-12


def test_what_is_wrong_is_said():
    good = {"out": 1e-7, "key": 9e-6}
    assert "status" not in judged(problem(), good)
    assert "oracle" in judged(problem(), good | {"key": 2e-5})["reason"]
    assert judged(problem(), good | {"out": float("nan")})["status"] == "wrong"
    assert "no gradient" in judged(problem(), good, stray=True)["reason"]
