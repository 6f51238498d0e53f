"""How many frames of Python a known call takes."""

import sys
from pathlib import Path

import pytest
import torch

import nsa_torch
from nsa_torch import batch_tables
from tests import pretend
from tests.problems import SMALL
from tests.stand_in_kernels import stand_ins

ROOT = Path(nsa_torch.__file__).parents[1]
PACKAGES = "nsa_torch", "interop", "nsa_jax", "nsa_core", "kernels_pallas"


def of_library(frame):
    path = Path(frame.f_code.co_filename)
    return path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES


@pytest.mark.parametrize(
    ("gradients", "packed", "most"),
    [(False, None, 20), (True, None, 20), (False, "varlen", 24), (False, "cu_seqlens", 60)],
)
def test_a_known_call_takes_few_frames(gradients, packed, most, monkeypatch):
    """Calls of Python functions of the library, and files that they are in. Of borders alone the
    tables are made in each call, by kernels in whose place nothing runs.
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
    found = []

    def note(frame, event, _):
        # What stands for the launch of a kernel calls the library too.
        stand = "tests" in Path(frame.f_back.f_code.co_filename).parts and found
        if event == "call" and of_library(frame) and not stand:
            found.append(frame.f_code.co_filename)

    def frames(function):
        found.clear()
        sys.setprofile(note)
        try:
            result = function()
        finally:
            sys.setprofile(None)
        return result, len(found), len(set(found))

    with stand_ins(monkeypatch):
        for _ in range(2):
            out, forward, files = frames(lambda: nsa_torch.attention(*given, **options))
            if gradients:
                grads = lambda out=out: torch.autograd.grad(out, given, torch.ones_like(out))
                _, backward, _ = frames(grads)
    assert forward <= most and files <= (14 if packed == "cu_seqlens" else 10)
    if gradients:
        assert backward <= 30
