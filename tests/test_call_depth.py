"""How many frames of Python a known call and a decode step take."""

import sys
from pathlib import Path

import pytest
import torch

import nsa_torch
from nsa_torch import batch_tables
from tests import pretend, refusals
from tests.problems import SMALL
from tests.stand_in_kernels import stand_ins
from tests.tables import table

ROOT = Path(nsa_torch.__file__).parents[1]
TABLE = table("test_call_depth")
PACKAGES = "nsa_torch", "interop", "nsa_jax", "nsa_core", "kernels_pallas"


def of_library(frame):
    path = Path(frame.f_code.co_filename)
    return path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES


def frames(function):
    """The result of a function, the calls of the library's functions in it, and their files."""
    found = []

    def note(frame, event, _):
        # What stands for the launch of a kernel calls the library too.
        stand = "tests" in Path(frame.f_back.f_code.co_filename).parts and found
        if event == "call" and of_library(frame) and not stand:
            found.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        result = function()
    finally:
        sys.setprofile(None)
    return result, len(found), len(set(found))


@pytest.mark.parametrize(("gradients", "packed", "first", "most"), TABLE["calls"])
def test_a_call_takes_few_frames(gradients, packed, first, most, monkeypatch):
    """Calls of Python functions of the library in a new call and in a known one, and files that
    they are in. Of borders alone the tables are made in each call, by kernels in whose place
    nothing runs.
    """
    make = lambda *shape: torch.randn(shape, dtype=torch.bfloat16).requires_grad_(gradients)
    given = make(1, 40, 4, 16), make(1, 40, 2, 16), make(1, 40, 2, 16), make(1, 40, 4, 3)
    options = {"config": SMALL, "implementation": "mosaic"}
    if packed:
        borders = torch.tensor([0, 17, 40], dtype=torch.int32)
        meta = nsa_torch.varlen_metadata(borders, total=40, config=SMALL)
        options[packed] = meta if packed == "varlen" else borders
    if packed == "cu_seqlens":
        pytest.importorskip("triton")
        made = batch_tables.PlanTables
        by_kernels = lambda *given: made(*given[:-1], True)
        pretend.machine(monkeypatch, plan_tables=by_kernels, kernels_of_tables=None)
    with stand_ins(monkeypatch):
        for limit, limit_backward in ((first, 1300), (most, 30)):
            out, forward, files = frames(lambda: nsa_torch.attention(*given, **options))
            assert forward <= limit
            if gradients:
                grads = lambda out=out: torch.autograd.grad(out, given, torch.ones_like(out))
                assert frames(grads)[1] <= limit_backward
    assert files <= (14 if packed == "cu_seqlens" else 10)


# A step of one token is one launch, unless the compressor is learned. More tokens than a kernel on
# pages supports are a chunk of a prompt.
@pytest.mark.parametrize(("options", "tokens", "first", "most"), TABLE["steps"], ids=str)
@torch.no_grad()
def test_a_step_of_a_layer_takes_few_frames(options, tokens, first, most, monkeypatch):
    options = refusals.given(options)
    layer = nsa_torch.NSAAttention(64, 4, 1, 64, 64, implementation="mosaic", **options)
    layer = layer.bfloat16()
    cache, x = layer.init_cache(2, 300), torch.randn(2, tokens, 64).bfloat16()
    with stand_ins(monkeypatch):
        counts = [frames(lambda: layer(x, cache))[1] for _ in range(2)]
    assert counts[0] <= first and counts[1] <= most


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 14), ("float8_e4m3fn", 22)])
@torch.no_grad()
def test_a_step_from_pages_takes_few_frames(dtype, most, monkeypatch):
    """Of a new shape and of a known one. Each appends its tokens."""
    make = lambda *shape: torch.randn(shape, dtype=torch.bfloat16)
    cache = nsa_torch.PagedCache(6, 1, 64, 64, dtype=getattr(torch, dtype))
    table, counts = torch.arange(6, dtype=torch.int32).view(2, 3), []
    with stand_ins(monkeypatch):
        for length in (100, 101):
            lengths = torch.tensor([length, 5], dtype=torch.int32)
            given = make(2, 4, 64), make(2, 4, 3), cache, table, lengths
            pair = {"key": make(2, 1, 64), "value": make(2, 1, 64)}
            options = {"implementation": "mosaic", **pair}
            step = lambda given=given, options=options: nsa_torch.paged_attention(
                *given, **options
            )
            counts.append(frames(step)[1])
    assert counts[0] <= 1200 and counts[1] <= most
